"""A seat at an open cache: what one engine has of its own there, and what it shares with the others."""

import pytest

from tests.support.any_layout import MODEL, AnyEngine, cpu, open_any, prompt
from tiered_kv import ClosedError, ConfigurationError, Shard
from tiered_kv.cache.tiered_kv import SeatCalls
from tiered_kv.tiers.pins import Pins
from tiered_kv.values.keys import epoch_digest

KEYS = prompt(12)
EPOCH = epoch_digest(MODEL.weights)


async def test_weights_pins_and_memory_are_the_seats_own() -> None:
    """What one engine does there changes nothing for another, and blocks are everybody's."""
    engine = AnyEngine()
    async with open_any(engine, cpu(24)) as kv:
        pins = Pins(1 << 30)
        other = SeatCalls(kv, (Shard(),), EPOCH, pins)
        await kv.store(KEYS, engine.fill(KEYS, range(12)))
        assert (await other.lookup(KEYS)).num_blocks == 12
        with pytest.raises(ConfigurationError, match="register_kv_caches"):
            await other.load(KEYS, engine.spec(range(12)))
        assert kv.pin(KEYS[:2], ttl_s=60.0).num_blocks == 2
        assert [each.is_pinned for each in await other.explain(KEYS[:2])] == [False, False]
        assert (kv.stats().pinned_bytes > 0, other.stats().pinned_bytes) == (True, 0)
        other.advance_epoch("w1")
        assert ((await other.lookup(KEYS)).num_blocks, (await kv.lookup(KEYS)).num_blocks) == (0, 12)
        assert [each.state for each in await other.explain(KEYS[:1])] == ["old epoch"]
        await other.aclose()
        assert (await kv.load(KEYS, engine.spec(range(12)))).num_blocks == 12
        pins.close()


async def test_a_seat_ends_with_the_cache() -> None:
    """Whoever has one is told that the cache is closed, and asks nothing of what is closed."""
    async with open_any(AnyEngine(), cpu(24)) as kv:
        other = SeatCalls(kv, (Shard(),), EPOCH, Pins(1 << 30))
        assert (await other.lookup(KEYS)).num_blocks == 0
    with pytest.raises(ClosedError):
        await other.lookup(KEYS)
    with pytest.raises(ClosedError):
        other.stats()
