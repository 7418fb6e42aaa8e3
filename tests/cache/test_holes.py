"""What becomes of a hole in a medium that tells by few questions how long a prefix is: an estimate looks past it."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.any_layout import AnyEngine, cpu, open_any, prompt
from tiered_kv import KVGroup, KVLayout, Shard
from tiered_kv.media.backend import Outcome
from tiered_kv.values.keys import BlockKey
from tiered_kv_backends.memory import MemoryBackend

KEYS = prompt(12)
PLACES, ELSEWHERE = range(12), range(20, 32)


class Estimating(MemoryBackend):
    """Says that a prefix is there whole if its first block and its last one are, as bisection may."""

    def __init__(self) -> None:
        super().__init__({"capacity": "1MiB"})
        self.written: list[BlockKey] = []
        self.has_read, self.may_end = asyncio.Event(), asyncio.Event()
        self.may_end.set()

    async def lookup_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Ask about two."""
        ends = await self.lookup([keys[0], keys[-1]])
        return len(keys) if ends == [Outcome.HIT] * 2 else await super().lookup_prefix(keys)

    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[object]) -> list[Outcome]:
        """Remember which."""
        self.written += keys
        return await super().write(keys, blocks)  # type: ignore[arg-type]  # what it got

    async def read(self, keys: Sequence[BlockKey], into: Any) -> list[Outcome]:  # noqa: ANN401 - what it got
        """End when it may."""
        outcomes = await super().read(keys, into)
        self.has_read.set()
        await self.may_end.wait()
        return outcomes


async def test_a_hole_that_a_load_has_met_is_filled_by_the_next_store() -> None:
    """Though no memory keeps blocks, so that the medium is asked which of them it has: it would say all."""
    engine, medium = AnyEngine(), Estimating()
    async with open_any(engine, medium) as kv:
        await (await kv.store(KEYS, engine.fill(KEYS, PLACES))).settled()
        [lost] = [key for key in medium.written if key.hash == KEYS[2]]
        await medium.delete([lost])
        medium.written.clear()
        assert (await kv.load(KEYS, engine.spec(ELSEWHERE))).num_blocks == 2
        [tier] = await (await kv.store(KEYS, engine.fill(KEYS, PLACES))).settled()
        assert (tier.written, tier.present, medium.written) == (1, 11, [lost])
        engine.wipe()
        assert (await kv.load(KEYS, engine.spec(ELSEWHERE))).num_blocks == 12
        assert engine.count_right(KEYS, ELSEWHERE) == 12


async def test_of_replicas_each_writes_its_share_of_a_medium_that_has_others_shares() -> None:
    """However far apart in time: between them they leave no hole, and each loads what the others wrote."""
    layout = KVLayout((KVGroup(2, 1, 48, "bfloat16", 4, "MLA"),))
    medium, engine = Estimating(), AnyEngine(layout)
    for rank in range(3):
        async with open_any(engine, medium, shard=Shard(rank, 3, replicated=True)) as kv:
            [tier] = await (await kv.store(KEYS, engine.fill(KEYS, PLACES))).settled()
            assert tier.written == 4
            engine.wipe()
    async with open_any(engine, medium, shard=Shard(0, 3, replicated=True)) as kv:
        assert (await kv.load(KEYS, engine.spec(ELSEWHERE))).num_blocks == 12
        assert engine.count_right(KEYS, ELSEWHERE) == 12


@pytest.mark.parametrize("num_kept", [0, 16])
async def test_what_is_evicted_while_it_is_read_is_lacking_though_the_read_was_right(num_kept: int) -> None:
    """The read has what was there before: the next store fills the hole, whether memory has the blocks or not."""
    engine, medium = AnyEngine(), Estimating()
    async with open_any(engine, cpu(num_kept), medium) as kv:
        await (await kv.store(KEYS, engine.fill(KEYS, PLACES))).settled()
        if num_kept:
            await kv.evict(KEYS, tier="cpu")
        medium.may_end.clear()
        medium.has_read.clear()
        loading = asyncio.ensure_future(kv.load(KEYS, engine.spec(ELSEWHERE)))
        await medium.has_read.wait()
        await kv.evict(KEYS[1:3], tier="memory")
        medium.may_end.set()
        await loading
        medium.written.clear()
        await (await kv.store(KEYS, engine.fill(KEYS, PLACES))).settled()
        await kv.flush()
        assert {key.hash for key in medium.written} == {KEYS[1], KEYS[2]}


async def test_a_replica_writes_its_share_once_though_others_shares_are_missing() -> None:
    """What others have still to write is no reason to write one's own again."""
    layout = KVLayout((KVGroup(2, 1, 48, "bfloat16", 4, "MLA"),))
    medium, engine = Estimating(), AnyEngine(layout)
    for num_written in (4, 0):
        async with open_any(engine, medium, shard=Shard(1, 3, replicated=True)) as kv:
            [tier] = await (await kv.store(KEYS, engine.fill(KEYS, PLACES))).settled()
            assert tier.written == num_written
