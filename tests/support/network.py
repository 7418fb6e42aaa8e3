"""This machine's network interfaces: browsers need them as they are, and some tests lay cables."""

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_LOCK: Final = Path(tempfile.gettempdir()) / "tiered_kv-tests-network.lock"


@contextmanager
def network(*, changing: bool) -> Iterator[None]:
    """Have it alone, to change it, or beside others who need it unchanged, on the whole machine.

    Chromium drops what it is loading, from 127.0.0.1 too, when an interface comes or goes (ERR_NETWORK_CHANGED).
    """
    with _LOCK.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if changing else fcntl.LOCK_SH)
        yield
