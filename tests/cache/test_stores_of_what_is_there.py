"""A store of blocks that are there already copies nothing, and is a use of them like any other."""

from tests.support.backends import ScriptedSlotBackend
from tests.support.caches import keep, open_cache, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, prompt

KEYS = prompt(3)


async def test_what_a_store_finds_there_is_used_in_memory() -> None:
    """An engine whose own cache has a prefix stores it anew, and never loads it: it must not be the first to go."""
    engine = Engine()
    async with open_cache({"medium": "cpu", "capacity": 4 * PAYLOAD_BYTES, "policy": "lru"}, engine=engine) as kv:
        for seed in range(1, 6):
            await keep(kv, engine, KEYS)
            await keep(kv, engine, prompt(1, seed=seed))
        assert (await kv.lookup(KEYS)).num_blocks == 3
        assert kv.stats().present == 4 * 3


async def test_it_is_used_below_too() -> None:
    """A tier below sees none of these stores, and keeps what they are of."""
    engine, slots = Engine(), ScriptedSlotBackend(4)
    async with open_cache({"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}, slots, engine=engine) as kv:
        for seed in range(1, 6):
            await keep(kv, engine, KEYS)
            await keep(kv, engine, prompt(1, seed=seed))
        await until_idle(kv)
        assert ((await kv.evict(KEYS, tier="cpu")).num_blocks, (await kv.lookup(KEYS)).by_tier) == (3, {"slots": 3})
