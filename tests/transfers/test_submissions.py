"""Submissions from threads and from signals' handlers: none is lost, and what nobody asks for is bounded."""

import asyncio
import math
from functools import partial
from typing import Any

import pytest

from tests.support.caches import until
from tests.support.interrupts import interrupted_everywhere
from tiered_kv.transfers.handles import Handle
from tiered_kv.transfers.submissions import Submissions, Ticket
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.loop_calls import LoopCalls


class Transfers:
    """Starts transfers that have ended when they begin."""

    def __init__(self, **limits: int) -> None:
        self.submissions = Submissions(LoopCalls(asyncio.get_running_loop()), **limits)
        self.num_started = 0

    def submit(self) -> Ticket[int]:
        """Submit one, whose result says the how many-th it was."""
        return self.submissions.submit(self._start, lambda _: -1)

    def _start(self) -> Handle[int]:
        self.num_started += 1
        return Handle(asyncio.get_running_loop().create_task(asyncio.sleep(0, self.num_started)), lambda: None)


async def test_a_signals_handler_may_submit_while_its_thread_does() -> None:
    """Wherever it interrupts, nothing waits for itself, and both transfers are started."""
    transfers, tickets = Transfers(), list[Ticket[int]]()

    def submit() -> None:
        tickets.append(transfers.submit())

    for of in ("tiered_kv.transfers.submissions", "tiered_kv.transfers.submissions", "tiered_kv.values.loop_calls"):
        work = partial(interrupted_everywhere, submit, submit, of=of)
        num_times = await asyncio.to_thread(work)
        await until(lambda: all(ticket.result is not None for ticket in tickets))
        assert len(tickets) == 2 * num_times - 1
        tickets.clear()
    assert len(transfers.submissions.poll(0.0)) == transfers.num_started


async def test_a_submission_that_an_interrupt_ends_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes just before the loop is told, say: what is submitted later ends."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    transfers = Transfers()
    with monkeypatch.context() as patch:
        patch.setattr(LoopCalls, "call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            transfers.submit()
    ticket = transfers.submit()
    await until(lambda: ticket.result is not None)
    assert ticket.result == 2


def test_an_interrupt_in_a_start_ends_that_one_alone() -> None:
    """It comes out of the loop, as of any callback; whoever runs the loop again has all tickets end."""
    loop = asyncio.new_event_loop()

    async def made() -> Transfers:
        return Transfers()

    def interrupted() -> Handle[int]:
        raise KeyboardInterrupt

    transfers = loop.run_until_complete(made())
    ticket = transfers.submissions.submit(interrupted, lambda error: -isinstance(error, KeyboardInterrupt))
    behind = [transfers.submit() for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(asyncio.sleep(0))
    loop.run_until_complete(until(lambda: behind[-1].result is not None))
    assert (ticket.result, [each.result for each in behind]) == (-1, [1, 2])
    assert len(transfers.submissions.poll(0.0)) == 3
    loop.close()


async def test_a_result_is_given_to_who_waits_for_it_alone() -> None:
    """Whoever polls just then does not get it, too: an engine would take its pages back twice."""
    submissions, loop, may_end = Transfers().submissions, asyncio.get_running_loop(), asyncio.Event()

    async def late() -> int:
        await may_end.wait()
        return 7

    ticket = submissions.submit(lambda: Handle(loop.create_task(late()), lambda: None), lambda _: -1)
    waiting = [asyncio.ensure_future(asyncio.to_thread(ticket.wait, 30.0)) for _ in range(2)]
    lock: Any = submissions._polled.lock  # noqa: SLF001 - ours
    await until(lambda: len(lock._waiters) == 2)  # noqa: SLF001 - nobody else says who waits
    with lock:  # who waits wakes later
        may_end.set()
        await until(lambda: ticket.result is not None)
        assert submissions.poll(0.0) == []
    assert await asyncio.gather(*waiting) == [7, 7]


async def test_results_that_nobody_asks_for_are_bounded() -> None:
    """A program that looks at its tickets and never polls does not keep them all for good; the newest can be polled."""
    transfers = Transfers(most_kept=10)
    tickets = [transfers.submit() for _ in range(25)]
    await until(lambda: tickets[-1].result is not None)
    assert [ticket.result for ticket in tickets] == list(range(1, len(tickets) + 1))
    assert [ticket for ticket, _ in transfers.submissions.poll(0.0)] == tickets[15:]


@pytest.mark.parametrize("timeout_s", [-1, math.nan, "soon"])
async def test_a_time_that_is_none_is_refused(timeout_s: float) -> None:
    """Instead of a wait that ends at once, or never."""
    transfers = Transfers()
    ticket = transfers.submit()
    with pytest.raises(ConfigurationError, match="timeout_s must be a number of seconds, 0 or more"):
        await asyncio.to_thread(ticket.wait, timeout_s)
    assert await asyncio.to_thread(ticket.wait, 30.0) == 1
