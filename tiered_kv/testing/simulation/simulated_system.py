"""The system that a simulation gives to the code under test: virtual time, drawn bytes, threads that take turns."""

import asyncio
import random
import selectors
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import Context
from typing import Any, Generic, TypeVar, TypeVarTuple

from anyio._backends._asyncio import _task_states
from typing_extensions import override

from tiered_kv.system import System
from tiered_kv.testing.simulation.disk import SimulatedFiles
from tiered_kv.testing.simulation.tape import Tape
from tiered_kv.testing.simulation.threads import SimulatedThread, Turns

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_LOCK_ODDS = 0.3
"""How often threads meet at a lock, of how often they meet at a call of the kernel: most locks are short."""

_CALL_ODDS = 0.02
"""The same where a loop is given something to do: threads meet there between two steps of Python."""


class SimulatedSystem(System):
    """What `tiered_kv.system.system` returns inside of a simulation. One for all its processes.

    Attributes:
        turns: Who runs.
    """

    def __init__(self, turns: Turns, tape: Tape, files: SimulatedFiles) -> None:
        self.turns = turns
        self.files: SimulatedFiles = files
        self._rng = random.Random(f"{tape.seed} secrets")  # noqa: S311 - the same bytes in each run

    def monotonic(self) -> float:
        """Return virtual seconds."""
        return self.turns.now

    def token_bytes(self, n: int) -> bytes:
        """Return bytes that the seed tells."""
        return self._rng.randbytes(n)

    def random(self) -> random.Random:
        """Return numbers that the seed tells."""
        return random.Random(self._rng.random())  # noqa: S311 - the same numbers in each run

    def getpid(self) -> int:
        """Return the number of the process whose thread this is."""
        return self.turns.current.process.pid

    @override
    def pidfd_open(self, pid: int) -> int:
        return self.files.pidfd_open(pid)

    @override
    def has_ended(self, pidfd: int) -> bool:
        return self.files.has_ended(pidfd)

    @override
    def is_of_a_process(self, fd: int) -> bool:
        return self.files.is_of_a_process(fd)

    def get_ident(self) -> int:
        """Return the number of this thread."""
        return self.turns.current.number

    def start_thread(self, target: Callable[[], None], name: str) -> SimulatedThread:
        """Start a thread of the process whose thread this is."""
        return self.turns.start(self.turns.current.process, target, name)

    def lock(self) -> "SimulatedLock":
        """Make a lock."""
        return SimulatedLock(self.turns)

    def rlock(self) -> "SimulatedLock":
        """Make a lock that a thread may take again."""
        return SimulatedLock(self.turns)

    def condition(self) -> "SimulatedCondition":
        """Make a condition."""
        return SimulatedCondition(self.turns)

    def queue(self) -> "SimulatedQueue[Any]":
        """Make a queue."""
        return SimulatedQueue(self.turns)


class SimulatedLock:
    """A lock that a thread may take again; where it does so with one that may not be, it would wait for ever."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._owner: SimulatedThread | None = None
        self._depth = 0

    def __enter__(self) -> bool:
        turns = self._turns
        if self._owner is not turns.current:
            turns.pause(_LOCK_ODDS)
            while self._owner is not None:
                turns.wait(lambda: self._owner is None, what="a lock")
            self._owner = turns.current
        self._depth += 1
        return True

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None

    def _let_go(self) -> int:
        depth, self._depth, self._owner = self._depth, 0, None
        return depth

    def _take_back(self, depth: int) -> None:
        self._turns.wait(lambda: self._owner is None, what="a lock")
        self._owner, self._depth = self._turns.current, depth


class SimulatedCondition(SimulatedLock):
    """A lock to wait in."""

    def __init__(self, turns: Turns) -> None:
        super().__init__(turns)
        self._num_notified = 0

    def wait(self, timeout: float | None = None) -> bool:
        """See `tiered_kv.system.Condition.wait`."""
        before, depth = self._num_notified, self._let_go()
        is_notified = self._turns.wait(lambda: self._num_notified != before, timeout, "a condition")
        self._take_back(depth)
        return is_notified

    def notify_all(self) -> None:
        """Wake all who wait."""
        self._num_notified += 1


class SimulatedQueue(Generic[T]):
    """Passes things from thread to thread."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._items: deque[T] = deque()

    def put(self, item: T) -> None:
        """Append one."""
        self._items.append(item)
        self._turns.pause()

    def get(self) -> T:
        """Wait for the first, and take it."""
        while not self._items:
            self._turns.wait(lambda: bool(self._items), what="a queue")
        return self._items.popleft()


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which no socket and no pipe wakes."""

    def __init__(self, turns: Turns, has_ended: Callable[[int], bool]) -> None:
        self.turns = turns
        self.is_woken = False
        super().__init__(_Selector(self, has_ended))

    def time(self) -> float:
        """Return virtual seconds."""
        return self.turns.now

    @override
    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = super().call_soon(callback, *args, context=context)
        self.turns.pause(_CALL_ODDS)
        return handle

    def bury(self) -> None:
        """After the end of its process: let nothing keep its tasks, which AnyIO would."""
        for task in [each for each in _task_states if each.get_loop() is self]:
            del _task_states[task]
        self.close()

    def _make_self_pipe(self) -> None:
        """Have no pipe: `_write_to_self` says what one would."""

    def _close_self_pipe(self) -> None:
        """Nothing to close."""

    def _write_to_self(self) -> None:
        self.is_woken = True
        self.turns.pause()


class _Selector(selectors.BaseSelector):
    """Waits in virtual time: for time to pass, for another thread's call, for a process that ends."""

    def __init__(self, loop: SimulatedLoop, has_ended: Callable[[int], bool]) -> None:
        self._loop = loop
        self._has_ended = has_ended
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:  # noqa: ANN401 - as in the base
        """Watch a descriptor."""
        self._keys[fileobj] = selectors.SelectorKey(fileobj, fileobj, events, data)
        return self._keys[fileobj]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:  # noqa: ANN401 - as in the base
        """Watch it no more."""
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """Return what is watched."""
        return self._keys

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:  # noqa: ANN401 - as in the base
        """Return what is watched of one descriptor."""
        return self._keys[fileobj]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Let time pass until something has happened."""
        loop = self._loop
        if timeout is not None and timeout <= 0:
            loop.turns.pause()
        else:
            loop.turns.wait(lambda: loop.is_woken or bool(self._events()), timeout, "events")
        loop.is_woken = False
        return self._events()

    def _events(self) -> list[tuple[selectors.SelectorKey, int]]:
        return [(key, key.events) for key in self._keys.values() if self._is_readable(key.fileobj)]

    def _is_readable(self, watched: Any) -> bool:  # noqa: ANN401 - a descriptor of a process, or a connection
        return self._has_ended(watched) if isinstance(watched, int) else watched.is_readable
