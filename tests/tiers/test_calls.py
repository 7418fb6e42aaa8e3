"""The only place that calls a backend: who waits for a turn to call it."""

import asyncio
import random

from tests.support.caches import until
from tiered_kv.tiers.calls import Calls
from tiered_kv.tiers.health import StorageHealth
from tiered_kv.tiers.tasks import Tasks


async def test_who_waits_for_a_turn_is_told_when_a_call_is_late() -> None:
    """Of a medium that hangs nobody waits for a turn, which may never come: the call is not made, and says so."""
    tasks, gate = Tasks(), asyncio.Event()
    health = StorageHealth("medium", 0.2, lambda _: None, clock=asyncio.get_running_loop().time, rng=random.Random(1))
    calls = Calls(health, tasks)
    hanging = [asyncio.create_task(calls.make("read", gate.wait, num_blocks=1)) for _ in range(16)]
    await until(lambda: len(tasks) == 16)
    waiting = asyncio.create_task(calls.make("read", gate.wait, num_blocks=1))
    await until(waiting.done)
    answer = waiting.result()
    assert (answer.was_made, answer.is_well) == (False, False)
    assert not any(each.done() for each in hanging)
    gate.set()
    assert all([(await each).was_made for each in hanging])
