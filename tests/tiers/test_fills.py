"""Fills: who waits for one, and for how long."""

import asyncio

import numpy as np
import pytest

from tests.support.backends import ScriptedBackend
from tests.support.caches import keep, open_cache, until_idle
from tests.support.engine import SMALL_LIMITS, Engine, prompt
from tests.support.virtual import CountingDevice, pools_of, run, watch
from tiered_kv import GPULoadStoreSpec
from tiered_kv.tiers.fills import Fill
from tiered_kv.tiers.gate import Kind, Waiter

KEYS = prompt(4)
PATIENT = SMALL_LIMITS.model_copy(update={"load_timeout_s": 900.0})


def test_nobody_waits_longer_for_a_fill_than_its_tier_may_take() -> None:
    """A load that has fifteen minutes ends when the tier's second is up, though the read goes on."""

    async def main() -> None:
        engine, device, loop = Engine(), CountingDevice(), asyncio.get_running_loop()
        medium = ScriptedBackend(timeout_s=1.0)
        async with open_cache(medium, engine=engine, limits=PATIENT, device=device) as kv:
            watch(device, pools_of(kv))
            await keep(kv, engine, KEYS)
            medium.on_read.hold()
            started = loop.time()
            loaded = await kv.load(KEYS, GPULoadStoreSpec(range(4)))
            assert (loaded.num_blocks, [fault.reason for fault in loaded.faults]) == (0, ["timeout"])
            assert loop.time() - started == pytest.approx(1.0)
            medium.on_read.release()
            await until_idle(kv)

    run(main)


async def test_all_who_wait_for_a_fill_are_told_of_its_end() -> None:
    """Also those behind one who raises, as an interrupt of the program's may come there."""
    fill, told = Fill(np.zeros((1, 4), np.uint64), Waiter(Kind.LOAD)), list[int]()

    def interrupted(_: Fill) -> None:
        raise KeyboardInterrupt

    def gave_up(_: Fill) -> None:
        told.append(0)

    fill.add_done_callback(lambda _: told.append(1))
    fill.add_done_callback(interrupted)
    fill.add_done_callback(gave_up)
    fill.remove_done_callback(gave_up)
    fill.add_done_callback(lambda _: told.append(2))
    with pytest.raises(KeyboardInterrupt):
        fill.finish()
    assert (told, fill.is_in_time) == ([1, 2], True)
    fill.add_done_callback(lambda _: told.append(3))
    assert told == [1, 2, 3]
