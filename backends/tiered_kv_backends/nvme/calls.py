"""The calls that are under way in threads: files stay open until the last of them has ended."""

from collections.abc import Callable
from typing import TypeVar

from tiered_kv.errors import BackendUnavailableError
from tiered_kv.system import system

T = TypeVar("T")


class Calls:
    """The calls under way in threads. Files close after the last: a descriptor may be another file's by then."""

    def __init__(self, close_files: Callable[[], None]) -> None:
        self._close_files = close_files
        self._lock = system().lock()
        self._num_running = 0
        self._closed = False

    def guarded(self, function: Callable[..., T], *args: object) -> T:
        """Call ``function(*args)`` with the files open, or raise `BackendUnavailableError`."""
        with self._lock:
            if self._closed:
                raise BackendUnavailableError("the NVMe tier was closed")
            self._num_running += 1
        try:
            return function(*args)
        finally:
            with self._lock:
                self._num_running -= 1
                is_last = self._closed and not self._num_running
            if is_last:
                self._close_files()

    def close(self) -> None:
        """Let no more calls start, and close the files now or after the last."""
        with self._lock:
            was_closed, self._closed = self._closed, True
            is_last = not was_closed and not self._num_running
        if is_last:
            self._close_files()
