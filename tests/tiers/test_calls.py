"""The only place that calls a backend: who waits for a turn to call it."""

import asyncio
import random
from contextlib import nullcontext
from functools import partial

import pytest

from tests.support.caches import until
from tests.support.virtual import CountingDevice, VirtualLoop, advance, run, watch
from tiered_kv.media.backend import Outcome, Then
from tiered_kv.tiers.calls import Calls, Outcomes, Turn
from tiered_kv.tiers.gate import Budget, Kind, Pace, Waiter
from tiered_kv.tiers.health import StorageHealth
from tiered_kv.tiers.storage import READ
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.values.events import Event, TierFailed


async def test_who_waits_for_a_turn_is_told_when_a_call_is_late() -> None:
    """Of a medium that hangs nobody waits for a turn, which may never come: the call is not made, and says so."""
    tasks, gate = Tasks(), asyncio.Event()
    health = StorageHealth("medium", 0.2, lambda _: None, clock=asyncio.get_running_loop().time, rng=random.Random(1))
    calls = Calls(health, tasks, Budget(1))
    hanging = [asyncio.create_task(calls.make("read", gate.wait, num_blocks=1)) for _ in range(16)]
    await until(lambda: len(tasks) == 16)
    waiting = asyncio.create_task(calls.make("read", gate.wait, num_blocks=1))
    await until(waiting.done)
    answer = waiting.result()
    assert (answer.was_made, answer.is_well) == (False, False)
    assert not any(each.done() for each in hanging)
    gate.set()
    assert all([(await each).was_made for each in hanging])


async def test_what_is_off_keeps_nobody_waiting() -> None:
    """Once a tier is bypassed whoever waits or comes is told, and takes nothing, whatever it does a moment later."""
    tasks, turns = Tasks(), list[Turn | None]()
    health = StorageHealth("medium", 60.0, lambda _: None, clock=lambda: 0.0, rng=random.Random(1))
    calls = Calls(health, tasks, Budget(10))
    for _ in range(2):
        calls.when_due("read", 10, Waiter(Kind.LOAD), tasks, turns.append)
    assert (len(turns), calls.num_waiting) == (1, 1)
    health.late("lookup", 1.0)
    calls.when_due("read", 10, Waiter(Kind.LOAD), tasks, turns.append)
    health.ended("lookup", 1.0, is_late=True, has_failed=False)
    await until(lambda: not tasks)
    assert turns[1:] == [None, None]
    assert (calls.budget.in_flight, calls.num_waiting) == (10, 0)


async def test_who_gives_up_waits_for_nobody_before_it() -> None:
    """It is told, wherever it stands in its line, and takes nothing; the others stay where they are."""
    tasks, turns = Tasks(), dict[int, Turn | None]()
    health = StorageHealth("medium", 60.0, lambda _: None, clock=lambda: 0.0, rng=random.Random(1))
    calls, waiters = Calls(health, tasks, Budget(10)), [Waiter(Kind.LOAD) for _ in range(4)]
    for number, waiter in enumerate(waiters):
        calls.when_due("read", 10, waiter, tasks, partial(turns.__setitem__, number))
    waiters[2].give_up()
    await until(lambda: 2 in turns)
    assert turns.keys() == {0, 2}
    assert turns[2] is None
    for number in (0, 1, 3):
        await until(partial(turns.__contains__, number))
        turn = turns[number]
        assert turn is not None
        turn.give_back()
    assert (calls.budget.in_flight, calls.num_underway, len(tasks)) == (0, 0, 0)


@pytest.mark.parametrize("has_come", [False, True])
async def test_who_is_cancelled_has_no_turn(*, has_come: bool) -> None:
    """Nor when it has just come."""
    tasks = Tasks()
    health = StorageHealth("medium", 60.0, lambda _: None, clock=lambda: 0.0, rng=random.Random(1))
    calls = Calls(health, tasks, Budget(10))
    turn = await calls.due("read", 10, Waiter(Kind.LOAD), tasks)
    assert turn is not None
    waiting = asyncio.create_task(calls.due("read", 10, Waiter(Kind.LOAD), tasks))
    await until(lambda: calls.num_waiting == 1)
    if has_come:
        turn.give_back()
        assert calls.num_waiting == 0
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    if not has_come:
        turn.give_back()
    assert (calls.budget.in_flight, calls.num_underway, calls.num_waiting, len(tasks)) == (0, 0, 0, 0)


def test_who_waits_for_a_pace_is_told_when_a_call_is_late() -> None:
    """A tier that stalls meanwhile makes whoever waits look at once."""

    async def main() -> None:
        loop, tasks, turns = asyncio.get_running_loop(), Tasks(), list[Turn | None]()
        health = StorageHealth("medium", 5.0, lambda _: None, clock=loop.time, rng=random.Random(1))
        calls = Calls(health, tasks, Budget(1000, Pace(1.0, loop.time)))
        for _ in range(2):
            calls.when_due("read", 100, Waiter(Kind.LOAD), tasks, turns.append)
        assert (len(turns), calls.num_waiting) == (1, 1)
        started = loop.time()
        health.late("lookup", 1.0)
        await until(lambda: not tasks)
        assert (turns[1:], loop.time()) == ([None], started)

    run(main)


async def test_what_gets_free_at_the_end_is_nobodys() -> None:
    """The end of a cache stops what is under way in any order: nobody whose own stop is to come begins by it."""
    tasks, answers, turns = Tasks(), list[Outcomes](), list[Turn | None]()
    health = StorageHealth("medium", 60.0, lambda _: None, clock=lambda: 0.0, rng=random.Random(1))
    calls = Calls(health, tasks, Budget(1))

    async def call() -> list[Outcome]:
        return [Outcome.HIT]

    def make(turn: Turn | None) -> None:
        assert turn is not None
        turn.make(lambda _: True, call, answers.append, allowed=READ, num_blocks=1, on_late=answers.clear)

    calls.when_due("read", 1, Waiter(Kind.LOAD), tasks, make)  # and hangs
    waiters = [Waiter(Kind.LOAD, lends=True) for _ in range(64)]
    for waiter in waiters:
        calls.when_due("read", 1, waiter, tasks, turns.append)
    assert (turns, calls.num_waiting) == ([], 64)
    await tasks.aclose(0.0)
    assert turns == [None] * 64
    assert all(waiter.is_given_up for waiter in waiters)
    assert [each.is_well for each in answers] == [False]
    assert (calls.budget.in_flight, calls.num_underway, len(tasks)) == (0, 0, 0)


async def test_a_method_that_fails_over_and_over_is_told_once_a_minute() -> None:
    """Who asks goes on with the default; the next one that is told says how many were not; each method by itself."""
    now, told = 0.0, list[Event]()
    calls = Calls(
        StorageHealth("medium", 0.2, told.append, clock=lambda: now, rng=random.Random(1)), Tasks(), Budget(1)
    )

    def fail() -> int:
        raise RuntimeError("no")

    assert [calls.ask("describe", fail, 7) for _ in range(5)] == [7] * 5
    assert calls.ask("missing", lambda: -1, 8, problem_of=lambda value: f"{value} slots") == 8
    assert calls.ask("describe", lambda: 9, 7) == 9
    assert told == [
        TierFailed("medium", "describe", "RuntimeError: no", 0), TierFailed("medium", "missing", "-1 slots", 0)
    ]  # fmt: skip
    now = 60.0
    assert calls.ask("describe", fail, 7) == 7
    assert told[2:] == [TierFailed("medium", "describe", "RuntimeError: no (and 4 times since it was last told)", 0)]


async def test_an_interrupt_is_the_programs_own() -> None:
    """Whoever presses Ctrl-C while a method of a backend runs means the program."""
    calls = Calls(
        StorageHealth("medium", 0.2, lambda _: None, clock=lambda: 0.0, rng=random.Random(1)), Tasks(), Budget(1)
    )

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calls.ask("describe", interrupted, None)


def test_a_call_that_is_interrupted_has_ended() -> None:
    """A program that goes on after Ctrl-C finds the tier in use: the call that it came in is not waited for."""

    async def interrupted() -> None:
        raise KeyboardInterrupt

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop, tasks = runner.get_loop(), Tasks()
        health = StorageHealth("medium", 5.0, lambda _: None, clock=loop.time, rng=random.Random(1))
        calls = Calls(health, tasks, Budget(1))
        making = loop.create_task(calls.make("lookup", interrupted))
        while not making.done():
            with pytest.raises(KeyboardInterrupt):
                loop.run_until_complete(asyncio.wait({making}))
        assert isinstance(making.exception(), KeyboardInterrupt)
        runner.run(advance(6.0))
        assert (health.num_late, calls.num_underway, len(tasks)) == (0, 0, 0)


@pytest.mark.parametrize("error", [OSError, asyncio.CancelledError, SystemExit, KeyboardInterrupt])
def test_whatever_a_medium_raises_as_it_begins_is_how_the_call_ends(error: type[BaseException]) -> None:
    """Who waits is told, and nothing stays taken; an interrupt is the program's after that."""

    def begin(then: Then) -> bool:
        raise error("no")

    async def call() -> list[Outcome]:
        return [Outcome.HIT]

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop, tasks, answers = runner.get_loop(), Tasks(), list[Outcomes]()
        health = StorageHealth("medium", 5.0, lambda _: None, clock=loop.time, rng=random.Random(1))
        calls = Calls(health, tasks, Budget(1))

        def make(turn: Turn | None) -> None:
            assert turn is not None
            turn.make(begin, call, answers.append, allowed=(Outcome.HIT,), num_blocks=1, on_late=answers.clear)

        async def read() -> None:
            calls.when_due("read", 1, Waiter(Kind.LOAD), tasks, make)
            assert len(answers) == 1
            await advance(0.0)

        with pytest.raises(KeyboardInterrupt) if error is KeyboardInterrupt else nullcontext():
            runner.run(read())
        runner.run(advance(6.0))
        assert [(each.is_well, each.was_made) for each in answers] == [(False, True)]
        assert (health.num_late, calls.num_underway, calls.budget.in_flight, len(tasks)) == (0, 0, 0, 0)


def test_an_exit_in_what_is_done_at_once_with_an_answer_is_the_programs() -> None:
    """A medium that tells before it returns has our code run within its own: what ends the program is not its failure.

    The call has ended well.
    """

    def begin(then: Then) -> bool:
        then(lambda: [Outcome.HIT])
        return True

    async def call() -> list[Outcome]:
        return [Outcome.MISS]

    def leave(_: Outcomes) -> None:
        raise SystemExit

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop, tasks, told = runner.get_loop(), Tasks(), list[Event]()
        health = StorageHealth("medium", 5.0, told.append, clock=loop.time, rng=random.Random(1))
        calls = Calls(health, tasks, Budget(1))

        def make(turn: Turn | None) -> None:
            assert turn is not None
            turn.make(begin, call, leave, allowed=(Outcome.HIT,), num_blocks=1, on_late=told.clear)

        async def read() -> None:
            calls.when_due("read", 1, Waiter(Kind.LOAD), tasks, make)
            await advance(0.0)

        with pytest.raises(SystemExit):
            runner.run(read())
        assert (told, calls.num_underway, calls.budget.in_flight, len(tasks)) == ([], 0, 0, 0)


async def test_a_probe_that_is_not_made_is_left_to_the_next_call() -> None:
    """Of a tier that fails one call is the probe: whose turn comes for nothing leaves that to another one."""
    now = 0.0
    health = StorageHealth("medium", 60.0, lambda _: None, clock=lambda: now, rng=random.Random(1))
    calls = Calls(health, Tasks(), Budget(1))

    async def fail() -> None:
        raise OSError("no")

    async def answer() -> int:
        return 1

    for _ in range(3):
        assert not (await calls.make("read", fail)).is_well
    assert not (await calls.make("read", answer)).was_made
    now = 10.0
    turns: list[Turn | None] = []
    calls.when_due("read", 1, Waiter(Kind.LOAD), Tasks(), turns.append)
    assert turns[0] is not None
    assert not (await calls.make("read", answer)).was_made
    turns[0].give_back()
    assert calls.budget.in_flight == 0
    assert (await calls.make("read", answer)).is_well
    assert not health.open_breakers()


def test_each_call_is_late_at_its_own_time() -> None:
    """One timer serves all that have the same time limit: who has not ended is late, neither sooner nor later."""

    async def main() -> None:
        watch(CountingDevice(), [])
        loop, late = asyncio.get_running_loop(), list[tuple[int, float]]()
        health = StorageHealth("medium", 5.0, lambda _: None, clock=loop.time, rng=random.Random(1))
        calls, gate, ends = Calls(health, Tasks(), Budget(1)), asyncio.Event(), asyncio.Event()
        started = loop.time()
        waiting = []
        for number, until_it_ends in enumerate((ends, gate, gate, ends, gate)):
            on_late = partial(lambda number: late.append((number, round(loop.time() - started, 3))), number)
            waiting.append(asyncio.create_task(calls.make("checkpoint", until_it_ends.wait, on_late=on_late)))
            await asyncio.sleep(1.0)
        ends.set()
        await asyncio.sleep(20.0)
        assert late == [(0, 5.0), (1, 6.0), (2, 7.0), (4, 9.0)]
        gate.set()
        assert [(await each).was_made for each in waiting] == [True] * 5

    run(main)
