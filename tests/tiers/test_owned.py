"""What a tier that its cache owns says of its writes."""

from collections.abc import Callable

import pytest

from tests.support.backends import ScriptedSlotBackend
from tests.support.caches import inside, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, prompt
from tiered_kv.media.backend import Block
from tiered_kv.tiers.gate import Kind, Waiter
from tiered_kv.tiers.tier import WriteReport


@pytest.mark.parametrize("has_failed", [False, True])
async def test_what_another_write_brought_has_not_failed(*, has_failed: bool) -> None:
    """Though the tier has evicted it, for want of room, before the one that left it to the other looks."""
    slots, reports = ScriptedSlotBackend(1), dict[str, WriteReport]()
    async with open_cache({"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}, slots) as kv:
        seat = inside(kv)
        (tier,) = seat.chains[0].owned

        def write(name: str, seed: int, then: Callable[[], None] = lambda: None) -> None:
            ((_, batch),) = seat.batches(prompt(1, seed=seed))

            def ended(report: WriteReport) -> None:
                reports[name] = report
                then()

            blocks, waiter = [Block.empty(PAYLOAD_BYTES)], Waiter(Kind.STORE)
            tier.start_write(batch, blocks, lambda: tier.lacks(batch), lambda: None, waiter, ended)

        slots.on_write.hold()
        if has_failed:
            slots.on_write.fail_next(OSError("once"))
        write("first", 0, then=lambda: write("other", 1))
        await until(lambda: slots.on_write.num_held == 1)
        write("second", 0)
        slots.on_write.release()
        await until(lambda: len(reports) == 3)
        said = {name: report.counts() for name, report in reports.items()}
        became = {"written": 0, "present": 0, "failed": 0}
        assert said["other"] == became | {"written": 1}, "it took the one slot"
        assert said["first"] == became | {"failed" if has_failed else "written": 1}
        assert said["second"] == became | {"failed" if has_failed else "present": 1}
        await until_idle(kv)


async def test_blocks_that_are_there_leave_nothing_of_their_writes() -> None:
    """However often they are stored: else each write that ends looked at all before it."""
    slots, engine = ScriptedSlotBackend(64), Engine()
    async with open_cache({"medium": "cpu", "capacity": 8 * PAYLOAD_BYTES}, slots, engine=engine) as kv:
        (tier,) = inside(kv).chains[0].owned
        for _ in range(3):
            for seed in range(4):  # each has left memory by the next time, and is below
                await keep(kv, engine, prompt(6, seed=seed))
                await kv.flush()
        assert len(tier.expected) == 0
