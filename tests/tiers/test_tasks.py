"""Threads for blocking calls, and the tasks that a cache owns."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest
from structlog.testing import capture_logs

from tests.support import virtual
from tests.support.caches import until
from tiered_kv.tiers.gate import Priority
from tiered_kv.tiers.tasks import Tasks, WorkerPool
from tiered_kv.values.loop_calls import LoopCalls


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    """Two threads."""
    pool = WorkerPool("test", 2, LoopCalls(asyncio.get_running_loop()))
    yield pool
    pool.close()


async def test_results_and_errors_come_back(pool: WorkerPool) -> None:
    """Each call answers its own caller, in a thread of the pool, whatever it raises."""
    names = await asyncio.gather(*(pool.run(lambda: threading.current_thread().name) for _ in range(20)))
    assert {name[:-1] for name in names} == {"tiered_kv-test-"}
    with pytest.raises(ZeroDivisionError):
        await pool.run(lambda: 1 // 0)
    assert await pool.run(divmod, 7, 2) == (3, 1)
    assert pool.num_unfinished == 0


class Panic(BaseException):
    """What an extension module raises that is no Exception."""


@pytest.mark.parametrize(
    "error", [StopIteration(5), asyncio.CancelledError("x"), SystemExit(3), GeneratorExit(), Panic()]
)
async def test_what_means_something_to_the_loop_arrives_as_an_error(pool: WorkerPool, error: BaseException) -> None:
    """The call ends, nobody is cancelled who was not, and the program goes on; the cause says what was raised."""

    def work() -> None:
        raise error

    async with asyncio.timeout(30):
        with pytest.raises(RuntimeError, match=f"threads of test raised {type(error).__name__}") as caught:
            await pool.run(work)
    assert caught.value.__cause__ is error
    assert pool.num_unfinished == 0
    assert await pool.run(int) == 0


async def test_a_cancelled_call_runs_to_its_end(pool: WorkerPool) -> None:
    """Cancelling the future ends the wait; the call goes on, is counted until it ends, and others are served."""
    gate, ended = threading.Event(), asyncio.Event()
    future = pool.run(gate.wait)
    future.cancel()
    assert await pool.run(lambda: 1) == 1
    assert pool.num_unfinished == 1
    gate.set()
    for _ in range(2):
        await pool.run(ended.is_set)
    while pool.num_unfinished:
        await pool.run(int)
    assert future.cancelled()


async def test_closing_lets_queued_calls_end_and_refuses_others() -> None:
    """What was queued is done; a call after the end fails at once instead of waiting for good."""
    pool = WorkerPool("test", 1, LoopCalls(asyncio.get_running_loop()))
    calls = [pool.run(int, number) for number in range(5)]
    pool.close()
    assert await asyncio.gather(*calls) == list(range(5))
    with pytest.raises(RuntimeError, match="have ended"):
        await pool.run(int)


async def test_a_task_lives_whoever_is_cancelled() -> None:
    """A spawned task ends by itself; who waits for it may leave."""
    tasks, gate = Tasks(), asyncio.Event()
    task = tasks.spawn(gate.wait(), "gate")
    waiter = asyncio.ensure_future(asyncio.wait({task}))
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.wait({waiter})
    assert (len(tasks), task.done()) == (1, False)
    gate.set()
    assert await task
    await asyncio.sleep(0)
    assert len(tasks) == 0


async def test_closing_cancels_what_has_not_ended_in_time() -> None:
    """It says how many had to be cancelled; what ends in time is not among them."""
    tasks, gate = Tasks(), asyncio.Event()
    stuck = [tasks.spawn(gate.wait(), "stuck") for _ in range(3)]
    quick = tasks.spawn(asyncio.sleep(0, "done"), "quick")
    assert await tasks.aclose(0.01) == 3
    assert all(task.cancelled() for task in stuck)
    assert quick.result() == "done"
    assert await tasks.aclose(0.01) == 0


async def test_a_task_cancelled_at_close_has_taken_its_first_step() -> None:
    """Even one spawned as the others are cancelled: it has begun, so that it settles what waits for it."""
    tasks, settled = Tasks(), list[str]()

    async def work(name: str, spawns: str = "") -> None:
        try:
            await asyncio.Event().wait()
        finally:
            settled.append(name)
            if spawns:
                tasks.spawn(work(spawns), spawns)

    tasks.spawn(work("first", spawns="second"), "first")
    assert await tasks.aclose(0.0) == 2
    assert settled == ["first", "second"]
    assert len(tasks) == 0


def test_work_that_fails_is_begun_again() -> None:
    """After pauses that get longer, each of them said; until it returns."""
    attempts: list[float] = []

    async def main() -> None:
        loop, tasks = asyncio.get_running_loop(), Tasks()
        started = loop.time()

        async def work() -> None:
            attempts.append(loop.time() - started)
            if len(attempts) < 10:
                raise ZeroDivisionError

        tasks.keep_running(work, "upkeep")
        while len(tasks):
            await virtual.advance(0.5)

    with capture_logs() as logs:
        virtual.run(main)
    assert attempts == [0.5, 1.5, 3.5, 7.5, 15.5, 31.5, 63.5, 123.5, 183.5, 243.5]
    assert [entry["again_in_s"] for entry in logs] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert {(entry["event"], entry["task"]) for entry in logs} == {("background.failed", "upkeep")}


async def test_work_that_is_cancelled_is_not_begun_again() -> None:
    """It ends with the cache."""
    tasks, begun = Tasks(), list[int]()

    async def work() -> None:
        begun.append(1)
        await asyncio.Event().wait()

    tasks.keep_running(work, "upkeep")
    await asyncio.sleep(0)
    assert await tasks.aclose(0.0) == 1
    assert begun == [1]


@pytest.mark.parametrize("priority", Priority)
async def test_many_that_may_go_on_do_so_in_many_turns(priority: Priority) -> None:
    """A thousand tasks that wait for one thing leave the loop its turns; who is cancelled takes none."""
    loop, tasks, turns = asyncio.get_running_loop(), Tasks(), [0]

    def count() -> None:
        turns.append(0)
        if not all(each.done() for each in steps):
            loop.call_soon(count)

    async def step() -> None:
        await tasks.turn(priority)
        turns[-1] += 1

    steps = [asyncio.ensure_future(step()) for _ in range(1000)]
    count()
    await asyncio.sleep(0)
    for each in steps[100:900]:
        each.cancel()
    await asyncio.wait(steps)
    assert sum(turns) == 200
    assert max(turns) <= 16


async def test_who_waits_for_nobody_goes_on_at_once_but_twice() -> None:
    """A transfer of one window begins in one turn of the loop; one of many leaves the loop its turns all the same."""
    loop, tasks, turns = asyncio.get_running_loop(), Tasks(), [0]

    def count() -> None:
        turns[0] += 1
        loop.call_soon(count)

    loop.call_soon(count)
    seen = []
    for _step in range(6):
        await tasks.turn(Priority.LOAD, at_once=True)
        seen.append(turns[0])
    assert seen[:2] == [0, 0]
    assert seen == sorted(seen)
    assert seen[-1] >= 3


async def test_loads_take_their_turn_before_whoever_waited_longer() -> None:
    """A load goes on before hundreds that are less urgent, whatever came first, and each of these in its order."""
    tasks, order = Tasks(), list[Priority]()

    async def step(priority: Priority) -> None:
        await tasks.turn(priority)
        order.append(priority)

    arrivals = [Priority.DEMOTE, *[Priority.STORE] * 500, *[Priority.PREFETCH] * 500, Priority.LOAD]
    await asyncio.gather(*map(step, arrivals))
    assert Priority.LOAD in order[:16]
    rest = [each for each in order[16:] if each is not Priority.LOAD]
    assert rest.index(Priority.PREFETCH) < 16
    assert rest[-1] is Priority.STORE
    assert len(order) == len(arrivals)


async def test_no_turn_is_for_loads_alone() -> None:
    """However many loads there are, one of everything else goes on in each turn of the loop."""
    tasks, is_done = Tasks(), asyncio.Event()

    async def load() -> None:
        while not is_done.is_set():
            await tasks.turn(Priority.LOAD)

    loads = [asyncio.ensure_future(load()) for _ in range(100)]
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        for priority in Priority:
            await tasks.turn(priority)
    is_done.set()
    await asyncio.wait(loads)


async def test_a_pool_that_gets_no_more_threads_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that did start end: nobody would ever give them anything to do."""
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_two)
        with pytest.raises(RuntimeError, match="new thread"):
            WorkerPool("few", 3, LoopCalls(asyncio.get_running_loop()))
    await until(lambda: not any(thread.is_alive() for thread in started))
    assert len(started) == 2


async def test_what_is_held_is_waited_for_and_stopped() -> None:
    """What needs no task keeps the cache open until it is over; at the end it is told to stop."""
    tasks, stopped = Tasks(), list[str]()
    over = tasks.hold(lambda: stopped.append("first"))
    asyncio.get_running_loop().call_later(0.01, over)
    assert len(tasks) == 1
    left = await asyncio.gather(tasks.aclose(30.0), tasks.aclose(30.0))
    assert list(left) == [0, 0]
    assert len(tasks) == 0
    assert stopped == []

    def stop() -> None:
        stopped.append("second")
        over()

    over = tasks.hold(stop)
    assert await tasks.aclose(0.0) == 1
    assert len(tasks) == 0
    assert stopped == ["second"]


class FalsyError(Exception):
    """An error that counts as False, as one with a length of its own may."""

    def __bool__(self) -> bool:
        return False


def _raise_falsy() -> int:
    raise FalsyError


async def test_who_is_told_is_told_once_all_have_ended(pool: WorkerPool) -> None:
    """With what returns the results, or raises what a call raised; of threads that have ended at once."""
    told: list[Callable[[], list[int]]] = []
    pool.begin_each([lambda: 1, lambda: 2, lambda: 3], told.append)
    await until(lambda: len(told) == 1)
    assert told[0]() == [1, 2, 3]
    pool.begin_each([lambda: 1, lambda: 1 // 0], told.append)
    await until(lambda: len(told) == 2)
    with pytest.raises(ZeroDivisionError):
        told[1]()
    pool.begin_each([_raise_falsy], told.append)
    await until(lambda: len(told) == 3)
    with pytest.raises(FalsyError):
        told[2]()
    pool.close()
    pool.begin_each([lambda: 1], told.append)
    with pytest.raises(RuntimeError, match="have ended"):
        told[3]()
    assert pool.num_unfinished == 0
