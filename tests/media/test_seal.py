import base64
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_kv import (
    BackendUnavailableError,
    BlockCorruptError,
    BlockKey,
    ConfigurationError,
    CPUTier,
    Encryption,
    Namespace,
    Outcome,
    Shard,
    parse_record,
)
from tiered_kv.media.backend import Block
from tiered_kv.media.record import HEADER_BYTES, Cipher, encode, examine, key_in, verify
from tiered_kv.media.seal import NameCipher, Seal
from tiered_kv_backends.nvme import NVMeBackend

OLD, NEW, OTHER = (bytes([n]) * 32 for n in (1, 2, 3))
PAYLOAD = bytes(range(251)) * 13
SPACE = Namespace(bytes([7]) * 32, epoch=bytes([8]) * 32, salt=bytes([9]) * 32, shard=Shard(1, 2))
KEY = BlockKey(SPACE, bytes([10]) * 32)
BOTH = pytest.mark.parametrize("cipher", ["aes-256-gcm", "aes-256-gmac"])
DATA = Path(__file__).parents[1] / "data"
GOLDEN_NAMES = [
    "87a98e445d3f0f7c44877ce07498c954a2930e5f8561ccac9342fc48ccb1237e",
    "57792270c4e368e8b19314337105dc4453eba6f3c27832d65851b3441aec1334",
]
"""That of 32 zeros, and the hash of the key above."""


def sealed(seal: Seal | None, key: BlockKey = KEY, payload: bytes = PAYLOAD) -> bytes:
    """Return a record."""
    block = Block.empty(len(payload))
    block.payload[:] = payload
    encode(key, block, seal=seal)
    return bytes(block)


def block_of(record: bytes | bytearray) -> Block:
    """Return a block with these bytes."""
    block = Block.empty(len(record) - HEADER_BYTES)
    assert block.fill(record)
    return block


def with_right_checksum(record: bytearray) -> bytearray:
    """Make good the checksum of a header that was changed: whoever may write can."""
    record[504:512] = xxhash.xxh3_64_intdigest(record[:504]).to_bytes(8, "little")
    return record


@BOTH
def test_what_was_sealed_is_read_again(cipher: Cipher) -> None:
    """With the key the payload is what it was, in place; without it nothing of it is in an encrypted record."""
    seal = Encryption(keys=[OLD.hex()], cipher=cipher).make_seal()
    record = sealed(seal)
    assert (PAYLOAD[:64] in record) == (cipher == "aes-256-gmac")
    block = block_of(record)
    assert verify(KEY, block, seal=seal) is Outcome.HIT
    assert bytes(block.payload) == PAYLOAD
    assert bytes(parse_record(record, seal=seal).payload) == PAYLOAD
    assert key_in(memoryview(record)[:HEADER_BYTES]) == KEY


def test_a_payload_elsewhere_stays_as_it_is() -> None:
    """What is written is made in other memory: loads read the CPU tier's meanwhile."""
    source, seal, block = bytearray(PAYLOAD), Seal([OLD]), Block.empty(len(PAYLOAD))
    encode(KEY, block, seal=seal, payload=memoryview(source))
    assert source == PAYLOAD
    assert verify(KEY, block, seal=seal) is Outcome.HIT
    assert bytes(block.payload) == PAYLOAD


def test_sealed_records_are_what_they_always_were() -> None:
    """The golden file is read, by the name that its key makes of the block's: caches outlive releases."""
    record, seal = (DATA / "record-v3.bin").read_bytes(), Seal([OLD])
    block = block_of(record)
    assert verify(seal.names.hide_key(KEY), block, seal=seal) is Outcome.HIT
    assert bytes(block.payload) == PAYLOAD
    assert parse_record(record, seal=seal).key == KEY


def test_a_record_of_version_2_is_another_ones() -> None:
    """It named its block in the clear; nobody takes it for a block, or for damage."""
    record = bytearray((DATA / "record-v3.bin").read_bytes())
    record[8:12] = (2).to_bytes(4, "little")
    seal = Seal([OLD])
    assert verify(seal.names.hide_key(KEY), block_of(with_right_checksum(record)), seal=seal) is Outcome.MISS


@pytest.mark.parametrize(
    "secret",
    [
        OLD.hex(),
        base64.b64encode(NEW).decode(),
        f"0x{OLD.hex()}",
        f"{OLD.hex()}\n",
        base64.urlsafe_b64encode(NEW).decode(),
        f"base64:{base64.b64encode(NEW).decode().rstrip('=')}",
        base64.b64encode(NEW[:-3]).decode(),
    ],
    ids=["hex", "base64", "0x", "line", "urlsafe", "prefix", "cut"],
)
@pytest.mark.parametrize(
    "take",
    [
        lambda secret: Encryption(keys_file=secret).make_seal(),
        lambda secret: Encryption(names_key_file=secret).make_seal(),
        lambda secret: Encryption(**{secret.rstrip("="): 1}),  # type: ignore[arg-type]
        lambda secret: Encryption(keys_from=secret),
        lambda secret: Encryption(keys=[OLD.hex()], cipher=secret),
        lambda secret: Encryption(keys=[OLD.hex()], cipher=[secret]),  # type: ignore[arg-type]
        lambda secret: sealed_by(nvme_with(secret)),
        lambda secret: NVMeBackend.Settings.of(nvme_with({secret: 1})),
        lambda secret: NVMeBackend.Settings.of(nvme_with({"cipher": secret})),
        lambda secret: sealed_by(f"nvme:///mnt/kv?capacity=1GiB&encryption={quote(secret, safe='')}"),
    ],
)
def test_a_key_where_something_else_belongs_is_refused_without_a_word_of_it(
    secret: str, take: Callable[[str], object]
) -> None:
    """A slip that would have put it into errors and logs."""
    with pytest.raises(ConfigurationError) as raised:
        take(secret)
    told = f"{raised.value!r} {raised.value} {raised.value.__cause__!r} {raised.value.__context__!s}"
    key = secret.strip().rpartition(":")[2].rstrip("=")
    assert not [part for part in (key[:12], key[12:24], key[-12:]) if part in told]


def sealed_by(settings: dict[str, object] | str) -> None:
    """Get the keys that an NVMe tier's settings name."""
    encryption = NVMeBackend.Settings.of(settings).encryption
    assert encryption is not None
    encryption.make_seal()


def nvme_with(encryption: object) -> dict[str, object]:
    """Return settings of a tier."""
    return {"path": "/mnt/kv", "capacity": "1GiB", "encryption": encryption}


def test_a_path_that_could_be_a_key_is_one_where_there_is_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of letters and slashes alone, and as long as a key is written: what lies there is read."""
    monkeypatch.chdir(tmp_path)
    file = Path("k" * 38) / "keys"
    assert len(base64.b64decode(f"{file}=", validate=True)) == 32
    file.parent.mkdir()
    file.write_text(OLD.hex())
    assert Encryption(keys_file=file).make_seal().key_id == Seal([OLD]).key_id
    file.unlink()
    with pytest.raises(ConfigurationError, match=f"{file} cannot be read"):
        Encryption(keys_file=file).make_seal()


@given(st.binary(min_size=32, max_size=32 * 70), st.binary(min_size=32, max_size=32))
def test_names_are_hidden_by_a_permutation(data: bytes, key: bytes) -> None:
    """What is hidden is shown again by the same key, one at a time or many; equal names alone have equal ones."""
    names = np.frombuffer(data[: len(data) // 32 * 32], np.uint64).reshape(-1, 4)
    cipher = NameCipher(key)
    hidden = cipher.hide(names)
    assert (cipher.show(hidden) == names).all()
    assert (NameCipher(key).hide(names[-1:]) == hidden[-1:]).all()
    assert len({each.tobytes() for each in hidden}) == len({each.tobytes() for each in names})
    assert (NameCipher(bytes(byte ^ 1 for byte in key)).show(hidden) != names).any()


def test_one_bit_of_a_name_changes_all_of_what_is_hidden() -> None:
    """Whichever it is: neighbours on the medium have nothing in common, though their names have."""
    cipher = NameCipher(OLD)
    names = np.zeros((257, 4), np.uint64)
    for bit in range(256):
        names[bit, bit // 64] = np.uint64(1 << bit % 64)
    hidden = cipher.hide(names)
    assert len(np.unique(hidden)) == hidden.size  # no 8 bytes twice


def test_names_are_what_they_always_were() -> None:
    """Two releases that share a medium make the same names with a key."""
    shown = [NameCipher(OLD).hide_digest(bytes(32)).hex(), Seal([NEW], names_key=OLD).names.hide_key(KEY).hash.hex()]
    assert shown == GOLDEN_NAMES
    assert Seal([OLD, NEW]).names.hide_key(KEY).hash.hex() == GOLDEN_NAMES[1]
    assert Seal([OLD]).names.show_key(Seal([OLD]).names.hide_key(KEY)) == KEY


def test_a_names_key_alone_hides_names_and_seals_nothing() -> None:
    """Records are plain, of the hidden name; who has the key reads the block's own name in them."""
    seal = Encryption(names_key=OLD.hex()).make_seal()
    assert (seal.seals, seal.encrypts) == (False, False)
    record = sealed(None, seal.names.hide_key(KEY))
    assert parse_record(record, seal=seal).key == KEY
    assert bytes(parse_record(record).payload) == PAYLOAD
    assert parse_record(record).key == seal.names.hide_key(KEY)


@BOTH
def test_every_flipped_bit_is_seen_whatever_its_checksum_says(cipher: Cipher) -> None:
    """Who has no key can change nothing, in the header's used part or the payload, and go unseen."""
    seal = Encryption(keys=[OLD.hex()], cipher=cipher).make_seal()
    record = sealed(seal)
    for at in (*range(504), *range(HEADER_BYTES, len(record), 97)):
        broken = bytearray(record)
        broken[at] ^= 1
        assert verify(KEY, block_of(broken), seal=seal) is not Outcome.HIT
        assert verify(KEY, block_of(with_right_checksum(broken)), seal=seal) is not Outcome.HIT


@BOTH
def test_forged_and_swapped_records_fail(cipher: Cipher) -> None:
    """Another block's record under this name, another tenant's, one without a seal, one of a key of the forger's."""
    seal = Encryption(keys=[OLD.hex()], cipher=cipher).make_seal()
    mine = sealed(seal)
    neighbour = BlockKey(SPACE, bytes([11]) * 32)
    tenant = BlockKey(Namespace(SPACE.fingerprint, SPACE.epoch, bytes(32), SPACE.shard), KEY.hash)
    for other in (neighbour, tenant):
        renamed = bytearray(sealed(seal, other))
        assert verify(KEY, block_of(renamed), seal=seal) is Outcome.MISS
        renamed[32:168] = mine[32:168]
        assert verify(KEY, block_of(with_right_checksum(renamed)), seal=seal) is Outcome.CORRUPT
    pasted = bytearray(mine[:HEADER_BYTES] + sealed(seal, payload=bytes(len(PAYLOAD)))[HEADER_BYTES:])
    assert verify(KEY, block_of(pasted), seal=seal) is Outcome.CORRUPT
    assert verify(KEY, block_of(sealed(None)), seal=seal) is Outcome.MISS
    theirs = bytearray(sealed(Seal([OTHER])))
    assert verify(KEY, block_of(theirs), seal=seal) is Outcome.MISS
    theirs[200:216] = seal.key_id
    assert verify(KEY, block_of(with_right_checksum(theirs)), seal=seal) is Outcome.CORRUPT


@given(st.binary(max_size=600), st.sampled_from([1, 2, 3]))
@settings(max_examples=300)
def test_foreign_bytes_never_open(foreign: bytes, version: int) -> None:
    """Whatever follows the name in a header whose checksum is right, nothing raises and nothing passes."""
    original = sealed(Seal([OLD]), payload=b"payload")
    record = bytearray(original)
    record[8:12] = version.to_bytes(4, "little")
    record[184 : 184 + min(len(foreign), 320)] = foreign[:320]
    changed = record[:504] != original[:504]
    assert (verify(KEY, block_of(with_right_checksum(record)), seal=Seal([OLD])) is not Outcome.HIT) == changed


def test_a_wrong_key_is_a_miss_with_its_reason() -> None:
    """It is no damage: the reason names the key by an id that says nothing of it."""
    record, reasons = sealed(Seal([OLD])), []
    for seal in (Seal([NEW]), None):
        outcome, reason = examine(KEY, block_of(record), codec="none", seal=seal)
        assert outcome is Outcome.MISS
        reasons.append(reason)
    outcome, reason = examine(KEY, block_of(sealed(None)), codec="none", seal=Seal([NEW]))
    assert outcome is Outcome.MISS
    assert [*reasons, reason] == [
        f"sealed by key {Seal([OLD]).key_id.hex()}, which is not among the keys",
        f"sealed by key {Seal([OLD]).key_id.hex()}, and there are no keys",
        "not sealed",
    ]


def test_old_keys_read_and_the_new_one_writes() -> None:
    """Rotation: with both keys everything is read, what is written needs the new one alone; ciphers mix too."""
    old, both, new = Seal([OLD], "aes-256-gmac"), Seal([NEW, OLD]), Seal([NEW])
    assert verify(KEY, block_of(sealed(old)), seal=both) is Outcome.HIT
    assert verify(KEY, block_of(sealed(both)), seal=new) is Outcome.HIT
    assert verify(KEY, block_of(sealed(both)), seal=old) is Outcome.MISS


def test_no_two_records_share_a_key_stream() -> None:
    """The same block sealed twice has nothing in common: neither nonce nor bytes."""
    first, second = sealed(Seal([OLD])), sealed(Seal([OLD]))
    assert first[216:232] != second[216:232]
    assert first[HEADER_BYTES : HEADER_BYTES + 32] != second[HEADER_BYTES : HEADER_BYTES + 32]
    assert first[:184] == second[:184]


def test_a_sealed_record_is_parsed_with_its_keys_only() -> None:
    """Who reads without a cache is told which key is missing, and sees every change."""
    record = sealed(Seal([OLD]))
    with pytest.raises(ConfigurationError, match="no keys"):
        parse_record(record)
    with pytest.raises(ConfigurationError, match="not among"):
        parse_record(record, seal=Seal([NEW]))
    with pytest.raises(ConfigurationError, match="not sealed"):
        parse_record(sealed(None), seal=Seal([OLD]))
    with pytest.raises(BlockCorruptError):
        parse_record(record[:-1] + bytes([record[-1] ^ 1]), seal=Seal([OLD]))


def keys_of_a_server() -> list[bytes | str]:
    """Return keys as a client of a key server does."""
    return [OLD, base64.b64encode(NEW).decode()]


def no_server() -> list[bytes | str]:
    """Fail as a client of a key server may."""
    raise OSError("password=hunter2")


def test_keys_come_from_settings_a_file_or_a_function(tmp_path: Path) -> None:
    """Each of them gives the same seal; the file may have comments, and its path alone will do."""
    file = tmp_path / "keys"
    file.write_text(f"# 2026-11\n{OLD.hex()}\n\n{base64.b64encode(NEW).decode()}\n")
    wanted = Seal([OLD]).key_id
    tier = NVMeBackend.Settings.of({"path": tmp_path, "capacity": "1GiB", "encryption": str(file)})
    assert tier.encryption == Encryption(keys_file=file)
    for encryption in (
        Encryption(keys=[OLD.hex(), NEW.hex()]),
        Encryption(keys_file=file),
        Encryption(keys_from=keys_of_a_server),
        pickle.loads(pickle.dumps(Encryption(keys_from=keys_of_a_server))),
    ):
        seal = encryption.make_seal()
        assert seal.key_id == wanted
        assert seal.knows(Seal([NEW]).key_id)
        assert seal.names.hide_digest(bytes(32)) == NameCipher(OLD).hide_digest(bytes(32))
    file.write_text(f"# names\n{NEW.hex()}\n")
    for encryption in (Encryption(names_key_file=file), Encryption(keys=[OLD.hex()], names_key=NEW.hex())):
        assert encryption.make_seal().names.hide_digest(bytes(32)) == NameCipher(NEW).hide_digest(bytes(32))


def test_what_is_no_key_is_refused_without_a_word_of_it(tmp_path: Path) -> None:
    """Neither settings nor files with too few bytes, passphrases or nothing; no secret is in an error or a repr."""
    secret = os.urandom(31).hex()
    file = tmp_path / "keys"
    file.write_text(secret)
    for wrong in (
        lambda: Encryption(keys=[secret]),
        lambda: Encryption(keys_file=file).make_seal(),
        lambda: Encryption(keys_from=lambda: [secret]).make_seal(),
        Encryption,
        lambda: Encryption(names_key=secret),
        lambda: Encryption(names_key_file=file).make_seal(),
        lambda: Encryption(names_key=OLD.hex(), names_key_file=file),
        lambda: Encryption(names_key_file=tmp_path / "absent").make_seal(),
        lambda: Encryption(keys=[OLD.hex()], keys_file=file),
        lambda: Encryption(keys_file=tmp_path / "absent").make_seal(),
        lambda: CPUTier.model_validate({"encryption": Encryption(keys=[OLD.hex()])}),
    ):
        with pytest.raises(ConfigurationError) as raised:
            wrong()
        assert secret.rstrip("=") not in f"{raised.value} {raised.value.__cause__} {raised.value.__context__}"
        assert str(raised.value).count("encryption:") <= 1
    file.write_text(f"# keys\n{OLD.hex()}\n{secret}\n")
    with pytest.raises(ConfigurationError, match=f"encryption: line 3 of {file}: a key is 32 random bytes"):
        Encryption(keys_file=file).make_seal()
    file.write_text("# none yet\n")
    for empty in (Encryption(keys_file=file), Encryption(names_key_file=file)):
        with pytest.raises(ConfigurationError, match=f"there is no key in {file}"):
            empty.make_seal()
    with pytest.raises(BackendUnavailableError) as failed:
        Encryption(keys_from=no_server).make_seal()
    assert "hunter2" not in str(failed.value)
    assert OLD.hex() not in repr(Encryption(keys=[OLD.hex()]))
