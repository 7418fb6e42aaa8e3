"""Calls into a loop from other threads."""

import asyncio
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from typing import Any, TypeVarTuple

import pytest

from tests.support.interrupts import interrupted_everywhere
from tiered_kv.values.loop_calls import LoopCalls, carried

Ts = TypeVarTuple("Ts")


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop that counts how often another thread, or this one, wakes it."""

    woken = 0

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Count, and pass on."""
        self.woken += 1
        return super().call_soon_threadsafe(callback, *args, context=context)


@pytest.mark.both_loops
async def test_every_call_runs_once_and_in_the_order_of_its_thread() -> None:
    """However many threads race with each other and with the loop."""
    loop_calls = LoopCalls(asyncio.get_running_loop())
    ran: list[tuple[int, int]] = []
    done = asyncio.Event()

    def note(thread: int, number: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        ran.append((thread, number))
        if len(ran) == 4 * 5000:
            done.set()

    def race(thread: int) -> None:
        for number in range(5000):
            loop_calls.call(note, thread, number)

    threads = [threading.Thread(target=race, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    await done.wait()
    for thread in threads:
        thread.join()
    await asyncio.sleep(0)
    assert len(ran) == len(set(ran)) == 4 * 5000
    for number in range(4):
        assert [call for thread, call in ran if thread == number] == list(range(5000))


@pytest.mark.both_loops
async def test_many_calls_leave_turns_to_others() -> None:
    """Threads may give in more while these run than these were: who is to stop them has a turn all the same."""
    loop_calls, num_ran, num_turns = LoopCalls(asyncio.get_running_loop()), 0, 0

    def twice() -> None:
        nonlocal num_ran
        num_ran += 1
        for _ in range(2 if num_ran < 10_000 else 0):
            loop_calls.call(twice)

    loop_calls.call(twice)
    while num_ran < 19_999:
        before = num_ran
        await asyncio.sleep(0)
        num_turns += 1
        assert num_ran - before <= 256
    assert num_turns >= 19_999 / 256


@pytest.mark.both_loops
async def test_who_catches_up_leaves_as_many_turns_to_others() -> None:
    """However often that was: the wake-up that the loop has had stays the only one."""
    loop_calls, ran = LoopCalls(asyncio.get_running_loop()), list[int]()
    for number in range(8):
        loop_calls.call(ran.append, number)
        loop_calls.catch_up()
    for number in range(8, 1008):
        loop_calls.call(ran.append, number)
    assert ran == list(range(8))
    while len(ran) < 1008:
        before = len(ran)
        await asyncio.sleep(0)
        assert len(ran) - before <= 256
    assert ran == list(range(1008))


def test_many_calls_share_one_wakeup() -> None:
    """All that is queued before the loop runs; the next call wakes it again."""
    loop = CountingLoop()
    loop_calls = LoopCalls(loop)
    ran: list[int] = []
    for number in range(1000):
        loop_calls.call(ran.append, number)
    assert ran == []
    loop_calls.call(loop.stop)
    loop.run_forever()
    assert ran == list(range(1000))
    assert loop.woken == 1
    loop_calls.call(loop.stop)
    loop.run_forever()
    assert loop.woken == 2
    loop.close()


async def test_who_catches_up_finds_all_done_that_came_before() -> None:
    """In its order, each once, and without a turn of the loop; also where one of the calls catches up itself."""
    loop_calls, ran = LoopCalls(asyncio.get_running_loop()), list[str]()
    loop_calls.catch_up()
    loop_calls.call(ran.append, "first")
    loop_calls.call(loop_calls.catch_up)
    loop_calls.call(ran.append, "second")
    loop_calls.catch_up()
    assert ran == ["first", "second"]
    loop_calls.call(ran.append, "third")
    await asyncio.sleep(0)
    assert ran == ["first", "second", "third"]


@pytest.mark.both_loops
async def test_a_call_that_raises_goes_to_the_loops_handler() -> None:
    """And the calls after it run."""
    loop = asyncio.get_running_loop()
    seen: list[Any] = []
    loop.set_exception_handler(lambda _, context: seen.append(context["exception"]))
    loop_calls, done = LoopCalls(loop), asyncio.Event()
    loop_calls.call(lambda: 1 / 0)
    loop_calls.call(done.set)
    await done.wait()
    assert [type(error) for error in seen] == [ZeroDivisionError]


def test_a_call_that_ends_the_loop_leaves_the_others_for_its_next_run() -> None:
    """SystemExit and KeyboardInterrupt come out of the loop, as of any callback; no call is lost."""
    loop, ran = asyncio.new_event_loop(), list[str]()
    loop_calls = LoopCalls(loop)

    def leave() -> None:
        raise SystemExit(3)

    loop_calls.call(leave)
    loop_calls.call(ran.append, "after")
    with pytest.raises(SystemExit):
        loop.run_forever()
    assert ran == []
    loop_calls.call(loop.stop)
    loop.run_forever()
    assert ran == ["after"]
    loop.close()


def test_calls_after_the_loop_closed_are_dropped() -> None:
    """A copy that ends late has nobody to tell; what it held is not kept either."""
    loop = asyncio.new_event_loop()
    loop_calls = LoopCalls(loop)
    loop.close()
    loop_calls.call(pytest.fail, "ran on a closed loop")
    loop_calls.call(pytest.fail, "ran on a closed loop")


def test_a_signals_handler_may_call_while_its_thread_does() -> None:
    """Wherever the handler interrupts: nothing waits for itself, and every call runs."""
    loop, ran = CountingLoop(), list[str]()
    loop_calls = LoopCalls(loop)

    def once() -> None:
        loop_calls.call(ran.append, "outer")

    num_times = interrupted_everywhere(
        once, lambda: loop_calls.call(ran.append, "handler"), of="tiered_kv.values.loop_calls"
    )
    loop_calls.call(loop.stop)
    loop.run_forever()
    assert (ran.count("outer"), ran.count("handler")) == (num_times, num_times - 1)
    loop.close()


def test_a_call_that_an_interrupt_ends_holds_up_no_other() -> None:
    """Wherever it comes: what others have called meanwhile runs, though nobody calls again."""
    loop, ran = CountingLoop(), list[str]()
    loop_calls = LoopCalls(loop)

    def once() -> None:
        with suppress(KeyboardInterrupt):
            loop_calls.call(ran.append, "interrupted")
        sys.settrace(None)  # whatever comes now is no part of the call
        loop.run_until_complete(asyncio.sleep(0))

    def interrupt() -> None:
        loop_calls.call(ran.append, "of another thread")
        raise KeyboardInterrupt

    num_times = interrupted_everywhere(once, interrupt, of="tiered_kv.values.loop_calls")
    assert num_times > 1
    assert ran.count("of another thread") == num_times - 1
    loop.close()


@pytest.mark.parametrize("error", [StopIteration(5), asyncio.CancelledError("x"), SystemExit(3)])
def test_a_future_carries_whatever_was_raised(error: BaseException) -> None:
    """What it refuses, or who awaits it would take for something else, is the cause of a RuntimeError."""
    carrier = carried(error, "a copy")
    assert str(carrier).startswith(f"a copy raised {type(error).__name__}")
    assert carrier.__cause__ is error
    assert carried(carrier, "a copy") is carrier
