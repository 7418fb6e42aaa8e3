"""Threads that take turns: real ones, of which exactly one runs at any moment, in virtual time.

Who goes on is chosen wherever threads meet the world or each other: at locks, queues and calls of the kernel, when an
event loop turns, when one waits or ends. Time stands still while anybody can run, and then jumps to the next who waits
for it. A process is some threads; killed, each of its threads ends where it stands.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from tiered_kv.testing.simulation.tape import Tape

_MOST_TURNS_IN_A_ROW: Final = 256
"""Who spins does not keep others from running."""
_MOST_TURNS_A_MOMENT: Final = 200_000
"""Turns without any time passing: more is a livelock."""
_MOST_TOLD: Final = 1000
"""How often a thread is told that it has ended."""
_FIRST_S: Final = 1000.0


class ProcessEnded(BaseException):
    """Ends a thread of a process that was killed, wherever it is."""


class Stuck(Exception):  # noqa: N818 - reads better where it is raised
    """Nobody can run any more, or everybody runs for ever at the same moment."""


@dataclass(eq=False)
class SimulatedProcess:
    """Some threads that end together.

    Attributes:
        name: In timelines.
        pid: Its number.
        is_dead: Whether it was killed; what has ended is killed as well, so that no thread of it is left.
        has_ended: Whether its main thread has come to its end.
        on_end: Called when it is dead and before its threads end, e.g. to close its files.
    """

    name: str
    pid: int
    is_dead: bool = False
    has_ended: bool = False
    on_end: list[Callable[[], object]] = field(default_factory=list)


class SimulatedThread:
    """A thread of a simulated process. `is_alive` and `join` are as of `threading.Thread`, in virtual time."""

    def __init__(self, turns: "Turns", process: SimulatedProcess, name: str, number: int) -> None:
        self.process = process
        self.name = name
        self.number = number
        self.priority = 0.0
        self.is_ended = False
        self.num_told = 0
        self.is_ready: Callable[[], bool] | None = None
        self.until: float | None = None
        self.waits_for = ""
        self.since = 0
        """When it became able to run, among all others; 0 while it waits."""
        self.go = threading.Lock()
        self.go.acquire()
        self._turns = turns

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return not self.is_ended

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, at most so many seconds."""
        self._turns.wait(lambda: self.is_ended, timeout, f"the end of {self.name}")


class Turns:
    """Decides who runs.

    Attributes:
        now: Virtual seconds.
        num_turns: How often somebody else might have gone on.
        tell: Takes what happened, for timelines.
        found: Takes what a medium sees to be wrong, as whatever it raises is for the code under test to bear.
    """

    def __init__(self, tape: Tape, *, pct_depth: int | None = None, pct_length: int = 20_000) -> None:
        """Draw from ``tape``: uniformly, or by PCT with so many changes of priority within so many choices."""
        self.now = _FIRST_S
        self.num_turns = 0
        self.tell: Callable[[str], object] = lambda _: None
        self.found: Callable[[BaseException], object] = lambda _: None
        self._tape = tape
        self._pct = None if pct_depth is None else _Priorities(tape, pct_depth, pct_length)
        self._threads: list[SimulatedThread] = []
        self._num_threads = 0
        self._stamp = 0
        self._num_in_a_row = 0
        self._moment = (self.now, 0)
        self._preempt_odds = tape.pick("plan", (0.0, 0.02, 0.1, 0.3)) if self._pct is None else 1.0
        self._real: list[threading.Thread] = []
        self._killer: SimulatedThread | None = None
        self._current = self._new(SimulatedProcess("the director", 1), "the director")
        self.problem: Stuck | None = None

    @property
    def current(self) -> SimulatedThread:
        """The thread that runs."""
        return self._current

    def start(self, process: SimulatedProcess, target: Callable[[], object], name: str) -> SimulatedThread:
        """Start a thread of a process. It runs when it is chosen."""
        thread = self._new(process, name)
        real = threading.Thread(target=self._run, args=(thread, target), name=name, daemon=True)
        self._real.append(real)
        real.start()
        self.pause()
        return thread

    def pause(self, odds: float = 1.0) -> None:
        """Let another thread go on here, perhaps; with ``odds`` of what is usual."""
        me = self._current
        self._check(me)
        self.num_turns += 1
        self._num_in_a_row += 1
        is_spinning = self._num_in_a_row > _MOST_TURNS_IN_A_ROW
        if not is_spinning and self._pct is None and not self._tape.chance("turns", self._preempt_odds * odds):
            return
        if not (ready := self._ready(but=me)):
            return
        self._hand_over(ready[0] if is_spinning else [me, *ready][self._choose([me, *ready])])

    def wait(self, is_ready: Callable[[], bool], timeout: float | None = None, what: str = "") -> bool:
        """Wait until ``is_ready()``, at most so many seconds; say whether it is."""
        me = self._current
        self._check(me)
        if is_ready():
            return True
        me.is_ready, me.until = is_ready, None if timeout is None else self.now + max(0.0, timeout)
        me.waits_for, me.since = what, 0
        self._next()
        me.is_ready = me.until = None
        return is_ready()

    def sleep(self, seconds: float) -> None:
        """Wait for so long."""
        self.wait(lambda: False, seconds, f"{seconds:g} s")

    def kill(self, process: SimulatedProcess) -> None:
        """End a process now: none of its threads does anything any more. From a thread of another one."""
        if process.is_dead:
            return
        process.is_dead = True
        for end in process.on_end:
            end()
        for thread in [each for each in self._threads if each.process is process]:
            thread.is_ready, thread.since = None, 1
            self._killer = self._current
            self._hand_over(thread)  # it unwinds, and hands back when it has ended
            self._killer = None

    def end(self) -> None:
        """End every process; then no thread is left but the caller's."""
        for process in {each.process: None for each in self._threads if each is not self._current}:
            self.kill(process)
        for real in self._real:
            real.join(10.0)

    def bury(self) -> None:
        """After `end`: whatever code of dead processes runs yet, when it is collected, is told that it has ended."""
        self._current = SimulatedThread(self, SimulatedProcess("the dead", 0, is_dead=True), "the dead", 0)

    def _new(self, process: SimulatedProcess, name: str) -> SimulatedThread:
        self._num_threads += 1
        thread = SimulatedThread(self, process, name, self._num_threads)
        self._stamp += 1
        thread.since = self._stamp
        if self._pct is not None:
            thread.priority = self._pct.first()
        self._threads.append(thread)
        return thread

    def _run(self, thread: SimulatedThread, target: Callable[[], object]) -> None:
        thread.go.acquire()
        try:
            if not thread.process.is_dead:
                target()
        except ProcessEnded:
            pass
        finally:
            self._leave(thread)

    def _leave(self, thread: SimulatedThread) -> None:
        thread.is_ended = True
        self._threads.remove(thread)
        if self._killer is not None:
            self._current = self._killer
            self._killer.go.release()
        else:
            self._next()

    def _next(self) -> None:
        """Let somebody go on, who may be the caller."""
        self.num_turns += 1
        while not (ready := self._ready()):
            times = [each.until for each in self._threads if each.until is not None]
            if not times:
                self._give_up("nobody can go on, and nobody waits for a time")
                return
            self.now = max(self.now, min(times))
        self._hand_over(ready[self._choose(ready)])

    def _give_up(self, why: str) -> None:
        """Have the director end the run."""
        waiting = "; ".join(f"{each.name} waits for {each.waits_for or 'nothing'}" for each in self._threads)
        self.problem = Stuck(f"{why}: {waiting}")
        director = self._threads[0]
        director.is_ready = None
        if self._current is not director:
            self._hand_over(director)

    def _check(self, me: SimulatedThread) -> None:
        """Raise if this thread is to end."""
        if me.process.is_dead:
            me.num_told += 1
            if me.num_told > _MOST_TOLD:  # it catches whatever is raised
                self._leave(me)
                threading.Event().wait()
            raise ProcessEnded
        if self.problem is not None and me is self._threads[0]:
            problem, self.problem = self.problem, None
            raise problem

    def _ready(self, but: SimulatedThread | None = None) -> list[SimulatedThread]:
        """Return those that can run, the one that could first first."""
        found = []
        for each in self._threads:
            if each is but:
                continue
            if each.is_ready is None or each.is_ready() or (each.until is not None and each.until <= self.now):
                if not each.since:
                    self._stamp += 1
                    each.since = self._stamp
                found.append(each)
        found.sort(key=attrgetter("since"))
        return found

    def _choose(self, candidates: list[SimulatedThread]) -> int:
        if len(candidates) == 1:
            return 0
        if self._pct is None or self._tape.is_played:
            return self._tape.draw("turns", len(candidates))
        return self._pct.choose(candidates, self._tape, self._current)

    def _hand_over(self, thread: SimulatedThread) -> None:
        me = self._current
        at, count = self._moment
        self._moment = (self.now, count + 1) if at == self.now else (self.now, 0)
        if self._moment[1] > _MOST_TURNS_A_MOMENT:
            self._moment = (self.now, 0)
            self._give_up("time stands still")
            return
        if thread is not me:
            self._num_in_a_row = 0
            if me.is_ready is None:
                self._stamp += 1
                me.since = self._stamp  # preempted: behind all who can run
            self._current = thread
            thread.go.release()
            if me.is_ended:
                return
            me.go.acquire()
        self._check(me)


class _Priorities:
    """PCT: who has the highest priority runs; at a few moments, chosen beforehand, whoever runs gets the lowest.

    Finds a bug of depth d with a known least chance (Burckhardt et al., ASPLOS 2010).
    """

    def __init__(self, tape: Tape, depth: int, length: int) -> None:
        self._tape = tape
        self._changes = {tape.draw("plan", length) for _ in range(depth)}
        self._num_choices = 0
        self._lowest = 0.0

    def first(self) -> float:
        return 1.0 + self._tape.draw("plan", 1 << 16)

    def choose(self, candidates: list[SimulatedThread], tape: Tape, current: SimulatedThread) -> int:
        self._num_choices += 1
        if self._num_choices in self._changes:
            self._lowest -= 1.0
            current.priority = self._lowest
        best = max(range(len(candidates)), key=lambda i: (candidates[i].priority, -i))
        tape.drawn["turns"].append(best)
        return best
