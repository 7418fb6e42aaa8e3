"""What is checked and enqueued of a load before it begins, in whichever thread: it holds nothing if it is refused."""

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.caches import keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, contents, prompt
from tiered_kv import BlockKeys, ConfigurationError, GPULoadStoreSpec, TieredKV
from tiered_kv.testing import ScriptedDevice, ScriptedEvent

KEYS = prompt(9)
INTO = GPULoadStoreSpec(range(9))
CPU = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}


class Overtaken(BlockKeys):
    """Keys of which the weights change at the moment when a load names its blocks."""

    def __init__(self, kv: TieredKV) -> None:
        super().__init__(b"".join(KEYS), block_size=KEYS.block_size)
        self._kv = kv

    @property
    def words(self) -> NDArray[np.uint64]:
        """Let the weights change."""
        self._kv.advance_epoch("w1")
        return super().words


async def test_a_load_that_weights_overtake_while_it_is_checked_says_so() -> None:
    """In another thread that is possible at any moment: blocks of the former weights are never said to be loaded."""
    engine = Engine()
    async with open_cache(CPU, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        loaded = await kv.load(Overtaken(kv), INTO)
        assert (loaded.num_blocks, [fault.reason for fault in loaded.faults]) == (0, ["epoch advanced"])
        await until_idle(kv)


async def test_loads_that_are_refused_hold_no_stream() -> None:
    """However many wait for events that never fire, and are wrong: the next one waits for its own event alone."""
    engine, device, after = Engine(), ScriptedDevice(), ScriptedEvent()
    async with open_cache(CPU, engine=engine, device=device) as kv:
        stored = kv.start_store(KEYS, engine.compute(KEYS))
        await until(lambda: stored.done, on_wait=device.run_all)
        engine.poison()
        for _ in range(8):
            with pytest.raises(ConfigurationError, match="deadline_s"):
                kv.start_load(KEYS, INTO, after=ScriptedEvent(), deadline_s=-1.0)
        handle = kv.start_load(KEYS, INTO, after=after)
        after.fire()
        await until(lambda: handle.done, on_wait=device.run_all)
        assert (await handle).num_blocks == 9
        assert engine.read(INTO) == contents(KEYS)
        await until_idle(kv)
