import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.media.backend import Block, Outcome
from tiered_kv.media.record import HEADER_BYTES, MAGIC, encode, key_in, parse_record, verify
from tiered_kv.values.errors import BlockCorruptError, LayoutMismatchError, TieredKVError
from tiered_kv.values.keys import BlockKey, Namespace, Shard
from tiered_kv_backends.nvme.ledger import parse

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def golden() -> ModuleType:
    """The script that made the golden files."""
    spec = importlib.util.spec_from_file_location("make_golden", DATA / "make_golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def block_of(record: bytes) -> Block:
    """Return a block with these bytes."""
    block = Block.empty(len(record) - HEADER_BYTES)
    assert block.fill(record)
    return block


def test_records_are_what_they_always_were(golden: ModuleType) -> None:
    """The same key and payload make the bytes of the golden file, and those verify: caches outlive releases."""
    record = (DATA / "record-v1.bin").read_bytes()
    assert golden.golden_record() == record
    assert verify(golden.KEY, block_of(record)) is Outcome.HIT


@pytest.mark.parametrize("num_bytes", [1, 64 << 10, (64 << 10) + 1, 200_001, 256 << 10, (256 << 10) + 1])
def test_the_checksum_is_of_the_whole_payload(golden: ModuleType, num_bytes: int) -> None:
    """In parts or not: another reader hashes it at once. A bit that is wrong at either end is found."""
    block = Block.empty(num_bytes)
    block.payload[:] = bytes(at * 7 % 251 for at in range(num_bytes))
    encode(golden.KEY, block)
    assert bytes(block.header[184:200]) == xxhash.xxh3_128_digest(block.payload)
    assert verify(golden.KEY, block) is Outcome.HIT
    for at in (0, num_bytes - 1):
        block.payload[at] ^= 1
        assert verify(golden.KEY, block) is Outcome.CORRUPT
        block.payload[at] ^= 1


def test_ledgers_are_what_they_always_were(golden: ModuleType, tmp_path: Path) -> None:
    """The same writes make the bytes of the golden file, and it is read."""
    content = (DATA / "ledger-v2.bin").read_bytes()
    assert golden.golden_ledger(tmp_path / "ledger") == content
    entries, damaged = parse(content, 0)
    latest, _ = entries.latest()
    assert latest.names.tolist() == [[5, 6, 7, 8], [9, 10, 11, 12]]
    assert latest.slots.tolist() == [1, 5]
    assert not len(damaged)


def test_a_header_names_its_key(golden: ModuleType) -> None:
    """Whoever has nothing but a record can say which block it is; of a header that is not whole, nothing."""
    header = bytearray(golden.golden_record()[:HEADER_BYTES])
    assert key_in(memoryview(header)) == golden.KEY
    for at in range(512):
        header[at] ^= 1
        assert key_in(memoryview(header)) is None
        header[at] ^= 1
    assert key_in(memoryview(bytes(HEADER_BYTES))) is None


@pytest.mark.parametrize("field", ["fingerprint", "epoch", "salt", "shard", "hash"])
def test_a_record_of_another_name_is_a_miss(golden: ModuleType, field: str) -> None:
    """A whole record that differs from what is asked for in one field only is not it, and is not broken."""
    space = golden.KEY.namespace
    fields = {"fingerprint": space.fingerprint, "epoch": space.epoch, "salt": space.salt, "shard": space.shard}
    if field == "hash":
        other = BlockKey(space, bytes(32))
    else:
        changed = fields | {field: Shard(2, 4) if field == "shard" else bytes(32)}
        other = BlockKey(type(space)(**changed), golden.KEY.hash)
    assert verify(other, block_of(golden.golden_record())) is Outcome.MISS


def test_every_flipped_bit_is_seen(golden: ModuleType) -> None:
    """In the header's used part and in the payload there is no bit whose change goes unseen."""
    record = golden.golden_record()
    for at in (*range(512), *range(HEADER_BYTES, len(record))):
        for bit in (1, 128):
            broken = bytearray(record)
            broken[at] ^= bit
            assert verify(golden.KEY, block_of(bytes(broken))) is Outcome.CORRUPT


def test_nothing_is_a_miss(golden: ModuleType) -> None:
    """Zeros, as in a slot that was never written, are no record, and not a broken one."""
    assert verify(golden.KEY, Block.empty(1000)) is Outcome.MISS


def test_another_length_is_corrupt(golden: ModuleType) -> None:
    """A header in front of more or less payload than it names is a broken record."""
    record = golden.golden_record()
    assert verify(golden.KEY, block_of(record[:-1])) is Outcome.CORRUPT
    assert verify(golden.KEY, block_of(record + b"\0")) is Outcome.CORRUPT


@given(st.binary(max_size=600))
def test_foreign_bytes_never_verify(foreign: bytes) -> None:
    """Whatever lies where a header should be, nothing raises and nothing passes."""
    block = block_of(foreign.ljust(HEADER_BYTES + 10, b"\0"))
    key = BlockKey(Namespace(bytes(32), bytes(32)), bytes(32))
    assert verify(key, block) is not Outcome.HIT
    encode(key, block)
    assert verify(key, block) is Outcome.HIT


def test_a_record_says_what_it_is(golden: ModuleType) -> None:
    """Its bytes alone give the whole name of the block, its payload and how that is kept."""
    data = golden.golden_record()
    record = parse_record(data)
    assert record.key == golden.KEY
    assert bytes(record.payload) == data[HEADER_BYTES:]
    assert (record.codec, record.decoded_bytes) == ("none", len(data) - HEADER_BYTES)
    block = block_of(data)
    encode(golden.KEY, block, codec="fp8", decoded_bytes=2000)
    encoded = parse_record(bytearray(bytes(block)))
    assert (encoded.codec, encoded.decoded_bytes) == ("fp8", 2000)


def test_what_is_no_whole_record_is_not_parsed(golden: ModuleType) -> None:
    """Neither a bit that is flipped, nor bytes that are cut or too many, nor anything that is no record."""
    record = golden.golden_record()
    places = (*range(512), *range(HEADER_BYTES, len(record)))
    broken = [record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :] for at in places]
    for data in (b"", bytes(8192), record[:100], record[:-1], record + b"\0", *broken):
        with pytest.raises(BlockCorruptError):
            parse_record(data)


@pytest.mark.parametrize(
    ("at", "value", "error"),
    [
        (8, 2, LayoutMismatchError),
        (8, 2**32 - 1, LayoutMismatchError),
        (12, 8192, LayoutMismatchError),
        (160, 4, BlockCorruptError),
    ],
)
def test_a_whole_header_may_say_what_cannot_be(
    golden: ModuleType, at: int, value: int, error: type[TieredKVError]
) -> None:
    """Another version of the format is told from a broken record, and no rank is beyond the number of ranks."""
    record = bytearray(golden.golden_record())
    record[at : at + 4] = value.to_bytes(4, "little")
    record[504:512] = xxhash.xxh3_64_intdigest(record[:504]).to_bytes(8, "little")
    with pytest.raises(error):
        parse_record(record)


@given(st.binary(max_size=600))
def test_foreign_bytes_are_never_parsed(foreign: bytes) -> None:
    """Whatever lies where a record should be, it is refused in our own words."""
    with pytest.raises(BlockCorruptError):
        parse_record(foreign)
    with pytest.raises(BlockCorruptError):
        parse_record((MAGIC + foreign).ljust(HEADER_BYTES + 10, b"\0"))
