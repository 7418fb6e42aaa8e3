"""The processes that carry out jobs, one per rank. Any thread registers one; its end is noticed on the event loop.

They are held by `pidfd`, so that no process that got the number of one that has ended is taken for it; and so that
whoever knows a process by another number, or by none, can watch it all the same.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack

from tiered_kv.system import files, system
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.integers import as_int, as_rank
from tiered_kv.values.loop_calls import LoopCalls


class Process:
    """The process that works for a rank. Whoever uses ``fd`` holds the lock of `WorkerProcesses`.

    Attributes:
        rank: Of its plans.
        pid: Its number, where it was registered first.
        fd: A `pidfd`.
    """

    def __init__(self, rank: int, pid: int, fd: int | None = None) -> None:
        """Take over ``fd``, or open one."""
        self.rank = rank
        self.pid = pid
        self.is_forgotten = False
        try:
            self.fd = system().pidfd_open(pid) if fd is None else fd
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"process {pid} cannot be the worker of rank {rank}: {getattr(error, 'strerror', None) or error}"
            ) from error

    def has_ended(self) -> bool:
        """Say whether it has, as far as the system says so now."""
        return system().has_ended(self.fd)


class WorkerProcesses:
    """The processes that work for the ranks of a planner."""

    def __init__(self, num_ranks: int, loop_calls: LoopCalls, on_end: Callable[[int, int], None]) -> None:
        """Watch no process yet; on the event loop, ``on_end(rank, pid)`` is called when one has ended."""
        self._num_ranks = num_ranks
        self._loop_calls = loop_calls
        self._on_end = on_end
        self._lock = system().lock()
        self._by_rank: dict[int, Process] = {}
        self._is_closed = False

    def register(self, rank: int, pid: int, fd: int | None = None) -> None:
        """Count on a process for one rank; its end ends its part of every job. Any thread may call.

        Args:
            rank: Of its plans.
            pid: Its number.
            fd: A `pidfd` of it, which is taken over if this does not raise; one is opened if left out. With one the
                same process may be said again: whoever said it may not have heard the answer.

        Raises:
            ConfigurationError: No such rank or process, or the rank has a worker that is alive, and may be writing.
        """
        rank, pid = as_rank(rank, self._num_ranks), as_int("pid", pid, least=1)
        with self._lock:
            before = self._by_rank.get(rank)
            if before is not None and not before.has_ended():
                if fd is not None and before.pid == pid:
                    files().close(fd)
                    return
                raise ConfigurationError(f"rank {rank} has a worker already, process {before.pid}, which is alive")
            process = self._by_rank[rank] = Process(rank, pid, fd)
        if before is not None:
            self._loop_calls.call(self._end, before)
        self._loop_calls.call(self._watch, process)

    def pids(self) -> list[int]:
        """Return the process of every rank, in order. Any thread may call.

        Raises:
            ConfigurationError: Some rank has no worker: who would end a job?
        """
        with self._lock:
            pids = {rank: process.pid for rank, process in self._by_rank.items()}
        if missing := sorted(set(range(self._num_ranks)) - set(pids)):
            raise ConfigurationError(f"plans need a worker of every rank: register_worker() for ranks {missing}")
        return [pids[rank] for rank in range(self._num_ranks)]

    def is_watched(self, rank: int, pid: int) -> bool:
        """Say whether a process works for a rank, and its end is not known. Any thread may call."""
        with self._lock:
            process = self._by_rank.get(rank)
            return process is not None and process.pid == pid

    def unlike(self, known: Collection[Process]) -> list[Process]:
        """Return those that are not among these. Any thread may call."""
        with self._lock:
            return [process for process in self._by_rank.values() if process not in known]

    def descriptors(self, processes: Sequence[Process]) -> list[int]:
        """Return a `pidfd` of each, which are the caller's to close. Any thread may call.

        Raises:
            ConfigurationError: One has ended, and is forgotten.
        """
        with self._lock:
            if ended := [process.pid for process in processes if process.is_forgotten]:
                raise ConfigurationError(f"processes {ended} have ended")
            with ExitStack() as stack:  # of which the process may have no more
                duplicates = [_duplicate(process.fd, stack) for process in processes]
                stack.pop_all()
            return duplicates

    # On the event loop.

    def close(self) -> None:
        """Watch no process any more."""
        self._is_closed = True
        for process in list(self._by_rank.values()):
            self._forget(process)

    def _watch(self, process: Process) -> None:
        if self._is_closed:
            self._forget(process)
        elif not process.is_forgotten:
            try:
                asyncio.get_running_loop().add_reader(process.fd, self._end, process)
            except BaseException:
                self._end(process)  # one that nobody watches is no worker: its jobs would never end
                raise

    def _end(self, process: Process) -> None:
        if not process.is_forgotten:
            self._forget(process)
            self._on_end(process.rank, process.pid)

    def _forget(self, process: Process) -> None:
        if not process.is_forgotten:
            asyncio.get_running_loop().remove_reader(process.fd)
            with self._lock:
                process.is_forgotten = True
                if self._by_rank.get(process.rank) is process:
                    del self._by_rank[process.rank]
                files().close(process.fd)


def _duplicate(fd: int, stack: ExitStack) -> int:
    """Duplicate a descriptor; ``stack`` closes it."""
    duplicate = files().dup(fd)
    stack.callback(files().close, duplicate)
    return duplicate
