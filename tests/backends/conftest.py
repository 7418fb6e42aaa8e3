import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

FileLimit = Callable[[int], AbstractContextManager[None]]


@contextmanager
def _files_no_longer_than(num_bytes: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    was = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, was)


@pytest.fixture
def files_no_longer_than() -> FileLimit:
    """Within ``files_no_longer_than(num_bytes)`` writes beyond that fail with EFBIG, the one before being cut."""
    return _files_no_longer_than
