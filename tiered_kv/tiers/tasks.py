"""Daemon threads for blocking calls, the tasks that the cache owns, and how what is under way is waited for.

Executors of the standard library are joined when the interpreter ends: one call stuck in a dead filesystem would hang
the exit. These threads are daemons, and a call costs about 5 us instead of 40 to 75, because one wake-up of the loop
serves all calls that ended meanwhile.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

from tiered_kv.system import Queue, system
from tiered_kv.tiers.gate import Priority
from tiered_kv.values.log import log
from tiered_kv.values.loop_calls import LoopCalls, carried

T = TypeVar("T")
_End = Callable[[Any, BaseException | None], None]
_LAST_STEPS_S = 1.0
"""What a cancelled task may take to settle what it began, at close."""
_STEPS_A_TURN = 16
_AT_ONCE = 2
"""Of these, those that nobody has to wait for: a transfer of one window is begun in one turn of the loop."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class WorkerPool:
    """A fixed number of daemon threads. All start at once: to start one waits for it, up to 10 ms on a busy machine.

    Attributes:
        is_closed: Whether no call is taken any more.
        num_unfinished: Calls, or batches of them, queued or running.
    """

    def __init__(self, name: str, num_threads: int, loop_calls: LoopCalls) -> None:
        self.name = name
        self._loop_calls = loop_calls
        self._calls: Queue[tuple[Callable[[], Any], _End] | None] = system().queue()
        self.num_unfinished = 0
        self.is_closed = False
        self._num_threads = 0
        try:
            for number in range(num_threads):
                system().start_thread(self._serve, f"tiered_kv-{name}-{number}")
                self._num_threads += 1
        except BaseException:  # the system gives no more: those that did start must not wait for good
            self.close()
            raise

    def run(self, function: Callable[..., T], *args: object) -> "asyncio.Future[T]":
        """Run a blocking call in one of the threads. Cancelling the future does not stop the call.

        Called on the event loop's thread. What means something to the event loop and is no answer of a call
        (StopIteration, a CancelledError, SystemExit) arrives as the cause of a RuntimeError.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def ended(results: list[T], error: Exception | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(results[0])
            else:
                future.set_exception(error)

        self._begin([partial(function, *args)], ended)
        return future

    def begin_each(self, calls: Sequence[Callable[[], T]], then: Callable[[Callable[[], list[T]]], object]) -> None:
        """Make blocking calls, each in any of the threads: the loop hears of them once, when all have ended.

        Otherwise as `run`. What ``then`` is given raises what the first of them raised, of those that raised.
        """
        self._begin(calls, lambda results, error: then((lambda: results) if error is None else partial(_raise, error)))

    def _begin(self, calls: Sequence[Callable[[], T]], ended: Callable[[list[T], Exception | None], object]) -> None:
        """Do as `begin_each`; ``ended`` is told the results, or the error."""
        if self.is_closed:
            ended([], RuntimeError(f"the threads of {self.name} have ended"))
            return
        self.num_unfinished += 1

        def end(results: list[T], error: BaseException | None) -> None:
            self._loop_calls.call(self._tell, ended, results, error)

        if len(calls) == 1:
            self._calls.put((calls[0], lambda result, error: end([result], error)))
            return
        together = _Together(len(calls), end)
        for number, call in enumerate(calls):
            self._calls.put((call, partial(together.ended, number)))

    def close(self) -> None:
        """Let the threads end after the calls that are queued. Never waits: a stuck thread is left, and is a daemon."""
        self.is_closed = True
        for _ in range(self._num_threads):
            self._calls.put(None)

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            call, end = item
            try:
                result, error = call(), None
            except BaseException as caught:  # noqa: BLE001 - carried to the caller, whatever it is
                result, error = None, caught
            end(result, error)
            del item, call, end, result, error  # else the last call's buffers live until the next one

    def _tell(
        self, ended: Callable[[list[T], Exception | None], object], results: list[T], error: BaseException | None
    ) -> None:
        self.num_unfinished -= 1
        ended(results, None if error is None else carried(error, f"a call in the threads of {self.name}"))


def _raise(error: Exception) -> NoReturn:
    raise error


class _Together:
    """The calls of one batch, in several threads: whichever ends last tells that all have ended."""

    def __init__(self, num_calls: int, end: _End) -> None:
        self._end = end
        self._lock = system().lock()
        self._num_left = num_calls
        self._results: list[Any] = [None] * num_calls
        self._errors: dict[int, BaseException] = {}

    def ended(self, number: int, result: object, error: BaseException | None) -> None:
        """Note how one ended, in its thread."""
        self._results[number] = result
        if error is not None:
            self._errors[number] = error
        with self._lock:
            self._num_left -= 1
            is_last = not self._num_left
        if is_last:
            self._end(self._results, self._errors[min(self._errors)] if self._errors else None)


async def in_a_thread(loop_calls: LoopCalls, function: Callable[..., T], *args: object) -> T:
    """Make one blocking call in a thread of its own, and wait for it."""
    pool = WorkerPool(getattr(function, "__name__", "call"), 1, loop_calls)
    try:
        return await pool.run(function, *args)
    finally:
        pool.close()


class Tasks:
    """The tasks of one cache: nothing is fire-and-forget, and `aclose` bounds how long they are waited for.

    Attributes:
        thread: The event loop's.
        is_ending: Whether what is under way is being stopped, in whatever order: what gets free by that is nobody's.
    """

    def __init__(self) -> None:
        """Begin without any, in the thread of the event loop."""
        self.thread = system().get_ident()
        self.is_ending = False
        self._tasks: dict[object, Callable[[], object]] = {}
        """What is under way, and how to stop it."""
        self._on_less: asyncio.Future[None] | None = None
        """Who waits until one of these has ended."""
        self._waiting: tuple[deque[asyncio.Future[None]], ...] = tuple(deque() for _ in Priority)
        """Who waits for a turn, by priority."""
        self._is_turn_coming = False
        self._num_steps = 0
        """Made in this turn of the loop without waiting for another."""

    def __len__(self) -> int:
        return len(self._tasks)

    def hold(self, stop: Callable[[], object]) -> Callable[[], None]:
        """Count what needs no task, too, until what this returns is called, once; ``stop`` makes that soon."""
        over = partial(self._over, key := object())
        self._tasks[key] = stop
        return over

    def watch(self, ended: "asyncio.Future[Any]", stop: Callable[[], object]) -> None:
        """`hold` what has a future, until that is done."""
        self._tasks[ended] = stop
        ended.add_done_callback(self._ended)

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> "asyncio.Task[T]":
        """Start a task that lives until it ends, whoever is cancelled meanwhile."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = task.cancel
        task.add_done_callback(self._ended)
        return task

    def keep_running(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Start a task that does ``work`` until it returns or is cancelled: after an error it is begun again.

        The error is logged, and each pause until the next attempt is twice as long as the last one, at most a minute.
        """
        self.spawn(_persistent(work, name), name)

    def in_turns(self, calls: Sequence[Callable[[], object]], priority: Priority, name: str) -> None:
        """Make calls in a task, each in a turn of its own, see `turn`: all of them, though the task is stopped."""

        async def make() -> None:
            for call in calls:
                with suppress(asyncio.CancelledError):
                    await self.turn(priority, at_once=True)
                call()

        if calls:
            self.spawn(make(), name)

    async def turn(self, priority: Priority, *, at_once: bool = False) -> None:
        """Let others run, and of many tasks that may go on now let a few do so in each turn of the loop.

        A step of a load takes up to a millisecond, and thousands may wait for the same block. Who is of a higher
        priority goes first; but in each turn of the loop one of every priority goes on, so that none starves.

        Args:
            priority: In which line to wait.
            at_once: Whether to go on without waiting where nobody waits, and no more than one has done so in this turn:
                for the first step of several, not for those between.
        """
        if at_once and self.goes_on():
            return
        mine = asyncio.get_running_loop().create_future()
        self._waiting[priority].append(mine)
        self._begin_turn_soon()
        await mine

    def goes_on(self) -> bool:
        """Say whether to go on without waiting, see `turn`, and count that."""
        goes_on = self._num_steps < _AT_ONCE and not any(self._waiting)
        if goes_on:
            self._num_steps += 1
            self._begin_turn_soon()
        return goes_on

    def _begin_turn_soon(self) -> None:
        if not self._is_turn_coming:
            self._is_turn_coming = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._is_turn_coming = False
        self._num_steps = 0
        if not any(self._waiting):
            return
        left = _STEPS_A_TURN - sum(_let_go_on(line, 1) for line in self._waiting)
        for line in self._waiting:
            left -= _let_go_on(line, left)
        self._num_steps = _STEPS_A_TURN - left
        if self._num_steps or any(self._waiting):
            self._begin_turn_soon()

    async def aclose(self, timeout_s: float) -> int:
        """Wait for the tasks to end, then cancel what is left; return how many had to be."""
        await self._wait(timeout_s)
        self.is_ending = True
        loop = asyncio.get_running_loop()
        cancelled: set[object] = set()
        deadline = loop.time() + _LAST_STEPS_S
        while (left := self._tasks.keys() - cancelled) or (self._tasks and loop.time() < deadline):
            for task in left:  # after its first step: a task cancelled before that would never run and settle
                loop.call_soon(self._tasks[task])
            cancelled |= left
            await self._until_less(deadline)
        return len(cancelled)

    async def _wait(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._tasks and loop.time() < deadline:
            await self._until_less(deadline)

    async def _until_less(self, deadline: float) -> None:
        """Wait until one of what is under way has ended, or it is ``deadline``."""
        loop = asyncio.get_running_loop()
        if self._on_less is None or self._on_less.done():  # else somebody else waits for it, too
            self._on_less = loop.create_future()
        await asyncio.wait({self._on_less}, timeout=max(0.0, deadline - loop.time()))

    def _over(self, key: object) -> None:
        del self._tasks[key]
        if self._on_less is not None and not self._on_less.done():
            self._on_less.set_result(None)

    def _ended(self, ended: "asyncio.Future[Any]") -> None:
        self._over(ended)
        if not ended.cancelled() and (error := ended.exception()) is not None:
            name = ended.get_name() if isinstance(ended, asyncio.Task) else "resident"
            log("error", "transfer.crashed", exc_info=error, task=name)


async def to_the_end(futures: Collection["asyncio.Future[Any]"], stop: Callable[[], object] = lambda: None) -> bool:
    """Wait until all are done, however often this is cancelled; say whether it was.

    Args:
        futures: What touches memory that is somebody's again after this, say.
        stop: Has them be done soon; called whenever this is cancelled.
    """
    was_cancelled = False
    while left := [each for each in futures if not each.done()]:
        try:
            await asyncio.wait(left)
        except asyncio.CancelledError:
            was_cancelled = True
            stop()
    return was_cancelled


def is_being_cancelled() -> bool:
    """Whether this task is being cancelled; else a library raises `CancelledError` of its own accord."""
    return cast("asyncio.Task[Any]", asyncio.current_task()).cancelling() > 0


def _let_go_on(line: deque[asyncio.Future[None]], most: int) -> int:
    """Let the first in a line go on, ``most`` of them; return how many did."""
    left = most
    while line and left:
        if not (one := line.popleft()).done():  # else cancelled meanwhile
            one.set_result(None)
            left -= 1
    return most - left


async def _persistent(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    loop, pause_s = asyncio.get_running_loop(), 0.0
    while True:
        started = loop.time()
        try:
            return await work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the next attempt may go well
            if loop.time() - started > _LONGEST_PAUSE_S:
                pause_s = 0.0  # it went well for a while
            pause_s = min(2 * pause_s or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            log("error", "background.failed", exc_info=error, task=name, again_in_s=pause_s)
        await asyncio.sleep(pause_s)
