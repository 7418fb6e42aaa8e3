"""What becomes of a hole in a medium that tells by few questions how long a prefix is: an estimate looks past it."""

from collections.abc import Sequence

from tests.support.any_layout import AnyEngine, open_any, prompt
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

    async def lookup_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Ask about two."""
        ends = await self.lookup([keys[0], keys[-1]])
        return len(keys) if ends == [Outcome.HIT] * 2 else await super().lookup_prefix(keys)

    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[object]) -> list[Outcome]:
        """Remember which."""
        self.written += keys
        return await super().write(keys, blocks)  # type: ignore[arg-type]  # what it got


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
