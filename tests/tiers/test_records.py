"""Making and verifying records in threads: whose memory they touch, and until when."""

import asyncio
import threading
from typing import cast

import numpy as np
import pytest
from anyio.lowlevel import checkpoint

from tiered_kv import BlockKey, Encryption, Namespace, RecordShape
from tiered_kv.media.backend import Block, Outcome
from tiered_kv.media.record import encode
from tiered_kv.media.seal import Seal
from tiered_kv.tiers.records import ExponentCodec, Records, SpareBlocks
from tiered_kv.tiers.tasks import WorkerPool
from tiered_kv.tiers.tier import Batch
from tiered_kv.values.keys import Names
from tiered_kv.values.loop_calls import LoopCalls

SHAPE = RecordShape(bytes([7]) * 32, 5000)
SPACE = Namespace(SHAPE.fingerprint, bytes(32))
KEYS = [BlockKey(SPACE, bytes([n]) * 32) for n in range(3)]
BATCH = Batch(SPACE, SPACE.names_of([key.hash for key in KEYS]), np.arange(3))


class HeldSeal(Seal):
    """A seal that opens when it is told to."""

    def __init__(self) -> None:
        super().__init__([bytes(32)])
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def open(self, *args: object) -> bool:
        """Wait before the payload is touched."""
        self.begun.set()
        assert self.may_go_on.wait(60)
        return super().open(*args)  # type: ignore[arg-type]  # as they came


class HeldEncryption:
    """What makes such a seal."""

    def __init__(self) -> None:
        self.seal = HeldSeal()

    def make_seal(self) -> Seal:
        """Return it."""
        return self.seal


def blocks_of(n: int) -> list[Block]:
    """Return blocks of known bytes."""
    blocks = [Block.empty(SHAPE.payload_bytes) for _ in range(n)]
    for number, block in enumerate(blocks):
        block.payload[:] = bytes([number + 1]) * SHAPE.payload_bytes
    return blocks


async def encoded(
    records: Records, batch: Batch, blocks: list[Block], into: list[Block], codec: ExponentCodec | None = None
) -> list[Block | None]:
    """Have records made in a thread, and return them."""
    shape = SHAPE if codec is None else encoded_shape(codec)
    return await records.threads.run(records.making(batch, blocks, into, shape, codec), range(len(batch)))


def encoded_shape(codec: ExponentCodec) -> RecordShape:
    """Return what records of a codec are."""
    return RecordShape(SHAPE.fingerprint, codec.stored_bytes, codec="exponent", decoded_bytes=SHAPE.payload_bytes)


@pytest.mark.both_loops
async def test_a_cancelled_verification_ends_before_its_memory_is_anothers() -> None:
    """It is decrypted in place: who waits, and is cancelled, hears of it when no thread writes there any more."""
    loop_calls = LoopCalls(asyncio.get_running_loop())
    pool, encryption = WorkerPool("records", 1, loop_calls), HeldEncryption()
    records = Records(pool, cast("Encryption", encryption))
    try:
        await records.open(loop_calls)
        blocks, into = blocks_of(1), [Block.empty(SHAPE.payload_bytes)]
        await encoded(records, BATCH[:1], blocks, into)
        verifying = asyncio.create_task(records.verification(BATCH[:1], into, SHAPE).verify_all([Outcome.HIT]))
        while not encryption.seal.begun.is_set():
            await checkpoint()
        for _ in range(3):
            verifying.cancel()
            await checkpoint()
            assert not verifying.done()
        encryption.seal.may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await verifying
        assert bytes(into[0].payload) == bytes(blocks[0].payload)
    finally:
        encryption.seal.may_go_on.set()
        pool.close()


@pytest.mark.parametrize("encryption", [None, Encryption(keys=["01" * 32])])
async def test_named_alone_they_are_verified_as_by_their_keys(encryption: Encryption | None) -> None:
    """Right ones, broken ones, and another block's in the place of one; what was no hit stays what it was."""
    loop_calls = LoopCalls(asyncio.get_running_loop())
    pool = WorkerPool("records", 1, loop_calls)
    records = Records(pool, encryption)
    try:
        await records.open(loop_calls)
        into = blocks_of(3)
        made = await encoded(records, BATCH, into, into)
        assert all(block is not None and block.payload.readonly for block in made)
        into[1].payload[-1] ^= 1
        names: Names = BATCH.names[[0, 1, 0]]
        hits = [Outcome.HIT] * 3
        verification = records.verification_by_name(names, into, SHAPE)
        verdicts = await verification.verify_all(hits)
        assert (verdicts, verification.refused) == ([Outcome.HIT, Outcome.CORRUPT, Outcome.MISS], {})
        assert sum(verification.filled) == 3
        found = [Outcome.FAILED, Outcome.MISS, Outcome.FAILED]
        assert await records.verification_by_name(names, into, SHAPE).verify_all(found) == found
        assert await records.verification(BATCH, into, SHAPE).verify_all(found) == found
    finally:
        pool.close()


async def test_a_whole_record_that_nothing_was_encoded_as_is_corrupt() -> None:
    """Its checksum is right, so something else made it: no bytes are served that nobody stored."""
    loop_calls, codec = LoopCalls(asyncio.get_running_loop()), ExponentCodec(SHAPE.payload_bytes)
    shape = encoded_shape(codec)
    pool = WorkerPool("records", 1, loop_calls)
    records = Records(pool, None)
    try:
        blocks, into = blocks_of(2), [Block.empty(codec.stored_bytes) for _ in range(2)]
        made = await encoded(records, BATCH[:2], blocks, into, codec)
        assert all(block is not None and block.payload.readonly for block in made)
        into[1].payload[0] = 255  # more are listed than may be
        encode(KEYS[1], into[1], codec="exponent", decoded_bytes=SHAPE.payload_bytes)
        found = [Block.empty(SHAPE.payload_bytes) for _ in range(2)]
        verdicts = await records.verification(BATCH[:2], into, shape, codec, found).verify_all([Outcome.HIT] * 2)
        assert verdicts == [Outcome.HIT, Outcome.CORRUPT]
        assert bytes(found[0].payload) == bytes(blocks[0].payload)
    finally:
        pool.close()


def test_spare_blocks_are_lent_once_and_lent_again() -> None:
    """No block is lent to two at once, and what came back is used before more is made."""
    spare = SpareBlocks(SHAPE)
    first, second = spare.take(2), spare.take(3)
    assert len({id(block) for block in first + second}) == 5
    assert all(len(block.payload) == SHAPE.payload_bytes for block in first)
    spare.give(second)
    assert {id(block) for block in spare.take(4)} >= {id(block) for block in second}
