"""Rates of a storage tier: how fast it is read and written, on the full path and in virtual time."""

import asyncio

import pytest

from tests.support.caches import keep, open_cache
from tests.support.engine import PAYLOAD_BYTES, Engine, contents, prompt
from tests.support.virtual import CountingDevice, pools_of, run, watch
from tiered_kv import CacheLimits, ConfigurationError, CPUTier, GPULoadStoreSpec, TieredKVSettings

RECORD = PAYLOAD_BYTES + 4096
LIMITS = CacheLimits(
    window=4 * PAYLOAD_BYTES, bounce=16 * PAYLOAD_BYTES, load_timeout_s=1000, store_timeout_s=1000, close_timeout_s=1000
)
N = 16


@pytest.mark.parametrize("rate", [{"write_bandwidth": RECORD, "read_bandwidth": 2 * RECORD},
                                  {"writes_per_s": 1, "reads_per_s": 2}])  # fmt: skip
def test_a_tier_is_read_and_written_at_its_rates(rate: dict[str, float]) -> None:
    """A block a second in one direction, two in the other, but for the first window; and every byte arrives."""

    async def main() -> None:
        engine, keys, device, loop = Engine(), prompt(N), CountingDevice(), asyncio.get_running_loop()
        tier = {"medium": "memory", "capacity": "1MiB", **rate}
        async with open_cache(tier, engine=engine, limits=LIMITS, device=device) as kv:
            watch(device, pools_of(kv))
            started = loop.time()
            await keep(kv, engine, keys)
            assert loop.time() - started == pytest.approx(N - 4)
            engine.poison()
            started = loop.time()
            assert (await kv.load(keys, GPULoadStoreSpec(range(N)))).num_blocks == N
            assert loop.time() - started == pytest.approx((N - 4) / 2)
            assert engine.read(range(N)) == contents(keys)
            assert kv.stats()["memory"].failed == 0

    run(main)


def test_memory_has_no_rates() -> None:
    """They are for storage, and a rate of nothing is none."""
    for wrong in ({"medium": "cpu", "read_bandwidth": "1GiB"}, {"medium": "gpu", "capacity": 1, "writes_per_s": 1}):
        with pytest.raises(ConfigurationError, match="for storage tiers only"):
            TieredKVSettings(tiers=[wrong])
    with pytest.raises(ConfigurationError, match="must be positive"):
        TieredKVSettings(tiers=[CPUTier(), {"medium": "memory", "capacity": "1GiB", "reads_per_s": 0}])
