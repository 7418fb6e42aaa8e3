"""Readers of what comes from outside, given what is almost right: they say so, and nothing else happens.

`make fuzz` gives each more than a million inputs.
"""

import asyncio
import os
import random
import socket
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.support.caches import open_cache
from tests.support.engine import PAYLOAD_BYTES
from tests.support.fuzzing import pieces, variants
from tests.support.nvme_tier import read_member
from tiered_kv import TieredKVError
from tiered_kv.media.backend import Block, Outcome
from tiered_kv.media.record import HEADER_BYTES, encode, examine_any, key_in, parse_record, verify
from tiered_kv.media.seal import Seal
from tiered_kv.telemetry import KVEventPublisher
from tiered_kv.values.keys import BlockKey, Namespace
from tiered_kv_backends.nvme.disks import Member, are_settled, next_turn, write_member
from tiered_kv_backends.nvme.ledger import ENTRY, Ledger, Order, parse
from tiered_kv_backends.nvme.ledger import encode as encode_entries
from tiered_kv_backends.redis.resp import RESPConnection, Socket, command
from tiered_kv_backends.shared_fs.bytes_ledger import LEDGER_NAME, ByteLedger, LedgerCounts
from tiered_kv_backends.shared_fs.files import LOCK_NAME

seeds = st.integers(0, 2**64 - 1)
KEY = BlockKey(Namespace(bytes([7]) * 32, epoch=bytes([8]) * 32, salt=bytes([9]) * 32), bytes([10]) * 32)
PAYLOAD = random.Random(0).randbytes(600)
SEAL = Seal([bytes(32)])
SEALS = {"plain": None, "encrypted": SEAL, "signed": Seal([bytes(32)], "aes-256-gmac")}
SIGNED = 504
"""Bytes of a header that are covered by what follows them."""


def record_of(seal: Seal | None) -> bytes:
    """Return a record."""
    block = Block.empty(len(PAYLOAD))
    block.payload[:] = PAYLOAD
    encode(KEY, block, seal=seal)
    return bytes(block)


@pytest.mark.parametrize("kind", SEALS)
@given(seeds)
def test_records(kind: str, seed: int) -> None:
    """A changed record is no hit, even with a checksum made good if it is sealed; nothing but our errors is raised."""
    seal, original = SEALS[kind], record_of(SEALS[kind])
    into, rng = Block.empty(len(PAYLOAD)), random.Random(seed)
    for data in variants(original, seed):
        is_made_good = len(data) >= HEADER_BYTES and rng.random() < 0.7
        if is_made_good:
            data[SIGNED : SIGNED + 8] = xxhash.xxh3_64_intdigest(data[:SIGNED]).to_bytes(8, "little")
        try:
            payload = bytes(parse_record(data, seal=seal).payload)
        except TieredKVError:
            payload = b""
        is_same = data[:SIGNED] + data[HEADER_BYTES:] == original[:SIGNED] + original[HEADER_BYTES:]
        if seal is not None or not is_made_good:
            assert not payload or (is_same and payload == PAYLOAD)
        if not into.fill(bytes(data)):
            continue
        key = key_in(into.header)
        outcome = verify(KEY, into, seal=seal)
        assert outcome in {Outcome.HIT, Outcome.MISS, Outcome.CORRUPT}
        if outcome is Outcome.HIT:
            assert key == KEY
            assert bytes(into.payload) == PAYLOAD
            assert is_same or (seal is None and is_made_good)
        into.fill(bytes(data))
        name = KEY.namespace.names_of([KEY.hash]).tobytes()
        assert examine_any(name, into, codec="none", seal=seal)[0] is outcome or outcome is not Outcome.HIT


def ledger_of(rng: random.Random) -> bytes:
    """Return a ledger of some slots, some of which hold nothing."""
    held = np.flatnonzero([rng.random() < 0.7 for _ in range(rng.randrange(1, 20))])
    names = np.frombuffer(rng.randbytes(32 * len(held)), np.uint64).reshape(-1, 4)
    entries = encode_entries(names, held, np.arange(1, len(held) + 1, dtype=np.uint64))
    data = bytearray(20 * ENTRY.itemsize)
    for slot, entry in zip(held.tolist(), entries, strict=True):
        data[slot * ENTRY.itemsize : (slot + 1) * ENTRY.itemsize] = entry.tobytes()
    return bytes(data)


@given(seeds)
def test_ledgers(seed: int) -> None:
    """Every slot is free, held or damaged; what is held is what was written there; what has no place is left out."""
    rng = random.Random(seed)
    original, each = ledger_of(rng), ENTRY.itemsize
    file = os.memfd_create("ledger")
    ledger = Ledger(file, Order())
    try:
        for data in variants(original, seed):
            num_slots = len(data) // each
            whole = bytes(data[: num_slots * each])
            entries, damaged = parse(whole, 0)
            used = {slot for slot in range(num_slots) if any(whole[slot * each : (slot + 1) * each])}
            assert set(entries.slots.tolist()) | set(damaged.tolist()) == used
            assert len(entries.slots) + len(damaged) == len(used)
            for slot in entries.slots.tolist():
                assert whole[slot * each : (slot + 1) * each] == original[slot * each : (slot + 1) * each]
            latest, replaced = entries.latest()
            assert len({name.tobytes() for name in latest.names}) == len(latest.names)
            assert sorted([*latest.slots.tolist(), *replaced.tolist()]) == sorted(entries.slots.tolist())
            os.ftruncate(file, 0)
            os.pwrite(file, data, 0)
            ledger.num_slots = num_slots
            num_allocated = rng.randrange(30)
            found, unknown = ledger.read(num_allocated)
            assert all(slot < num_allocated for slot in [*found.slots.tolist(), *unknown.slots.tolist()])
    finally:
        ledger.close()


NOW_NS = 1_760_000_000 * 10**9


@given(seeds)
def test_room_of_a_shared_directory(seed: int) -> None:
    """Whoever may write the books of a directory, checksum and all, at most has it be full, or room that it has not."""
    rng = random.Random(seed)
    original = b'{"total": 4096, "num_sweeps": 3, "swept_ns": 17, "writers": {"00ff": [512, 99]}}'
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / LOCK_NAME).touch()
        books = Path(root) / LEDGER_NAME
        for data in variants(original, seed):
            checksum = zlib.crc32(data) if rng.random() < 0.9 else 17
            books.write_bytes(b"%08x %b\n" % (checksum, bytes(data)))
            ledger = ByteLedger(root, 10_000, lambda: NOW_NS)
            taken = ledger.take(1000, 0)
            assert taken is None or 0 <= taken <= 1000
            begun = ledger.begin_sweep(lambda: 0)
            ledger.end_sweep(begun, 2000)
            assert isinstance(ledger.read(), LedgerCounts)


@given(seeds)
def test_members_of_a_tier(seed: int) -> None:
    """What a directory says of itself is taken as it is, or as nothing at all; also where a checksum is made good."""
    members = [Member("00ff00ff00ff00ff", turn, frozenset({"00ff00ff00ff00ff", "17"})) for turn in (2, 3)]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        said = root / "member"
        for member in members:
            write_member(root, member)
        original = said.read_bytes()
        for data in variants(original, seed):
            said.write_bytes(data)
            assert read_member(root) in members or not read_member(root).turn
        for data in variants(original[:4096].rstrip(b"\0").partition(b" ")[2], seed):
            said.write_bytes(b"%b %b" % (xxhash.xxh3_64_hexdigest(data).encode(), bytes(data)))
            member = read_member(root)
            assert 0 <= member.turn < 2**63
            assert are_settled(next_turn([member]))


class Fed(Socket):
    """A socket that is told what the server says."""

    said: list[bytes]

    async def send(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Take all: nobody listens."""
        for _ in pieces:
            pass

    async def receive(self, into: memoryview) -> int:
        """Give what comes next."""
        if not self.said:
            raise ConnectionResetError("the server closed the connection")
        piece = self.said[0][: len(into)]
        self.said[0] = self.said[0][len(piece) :]
        if not self.said[0]:
            del self.said[0]
        into[: len(piece)] = piece
        return len(piece)


BLOCKS = [b"%d" % n * 300 for n in range(3)]
REPLIES = {
    "get": b"".join(b"$%d\r\n%b\r\n" % (HEADER_BYTES + len(each), bytes(HEADER_BYTES) + each) for each in BLOCKS)
    + b"$-1\r\n-MOVED 1 127.0.0.1:6379\r\n",
    "set": b"+OK\r\n-OOM command not allowed\r\n+OK\r\n",
    "count": b":1\r\n:0\r\n-NOPERM no\r\n:42\r\n",
}


@pytest.mark.parametrize("question", REPLIES)
@given(seeds)
def test_replies_of_redis(question: str, seed: int) -> None:
    """Each gives an answer for each question, or is an error of the connection; a hit is what the server sent."""
    into = [Block.empty(300) for _ in range(5)]

    async def ask(sock: socket.socket, said: list[bytes], *, is_asking: bool) -> None:
        fed = Fed(sock)
        fed.said = said
        connection = RESPConnection(fed)
        connection.is_asking = is_asking
        stream = b"".join(said)
        try:
            if question == "get":
                answers = await connection.get([command(b"GET", b"x")] * 5, into)
                hits = [bytes(each) for each, answer in zip(into, answers, strict=True) if answer is Outcome.HIT]
                assert all(hit in stream for hit in hits)
            elif question == "set":
                answers = await connection.set([b"x"] * 3, into[:3])
            else:
                numbers = await connection.count([b""] * 4)
                assert len(numbers) == 4
        except OSError:  # of which ProtocolError is one
            return

    async def all_of_them() -> None:
        rng = random.Random(seed)
        with socket.socket() as sock:
            for data in variants(REPLIES[question], seed):
                await ask(sock, pieces(bytes(data), rng), is_asking=rng.random() < 0.1)

    asyncio.run(all_of_them())


@settings(max_examples=max(1, settings().max_examples // 64), suppress_health_check=list(HealthCheck))
@given(seed=seeds)
def test_questions_of_routers(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever is asked for, and however, a publisher logs no fault of its own and answers the next question."""
    folder = tmp_path_factory.mktemp("zmq", numbered=True)
    with capture_logs() as logs:
        asyncio.run(_ask_all(folder, seed))
    assert [each for each in logs if each["log_level"] in {"warning", "error"}] == []


async def _ask_all(folder: Path, seed: int) -> None:
    rng, context = random.Random(seed), zmq.Context()
    where = {"endpoint": f"ipc://{folder}/pub", "replay_endpoint": f"ipc://{folder}/replay"}
    try:
        async with (
            open_cache({"medium": "cpu", "capacity": 4 * PAYLOAD_BYTES}) as kv,
            KVEventPublisher(kv, where["endpoint"], replay_endpoint=where["replay_endpoint"], snapshot_every_s=0),
        ):
            asking, joining = context.socket(zmq.DEALER), context.socket(zmq.XSUB)
            asking.connect(where["replay_endpoint"])
            joining.connect(where["endpoint"])
            for data in variants(b"\0\0\0\0\0\0\0\1", seed, times=64):
                asking.send_multipart([bytes(each) for each in pieces(bytes(data), rng)][:8] or [b""])
                joining.send(bytes([rng.randrange(3)]) + bytes(data[:8]))
            asking.send_multipart([b"", (2**64 - 1).to_bytes(8, "big")])
            await asyncio.to_thread(_until_end, asking)
    finally:
        context.destroy(linger=0)


def _until_end(asking: "zmq.Socket[bytes]") -> None:
    asking.setsockopt(zmq.RCVTIMEO, 60_000)
    while asking.recv_multipart()[-1] != b"":
        pass
