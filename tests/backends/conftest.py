import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 16 MiB."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    command = [mount or "", "-t", "tmpfs", "-o", "size=16m,mode=700", "tmpfs", str(tmp_path)]
    if not mount or not umount or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no right to mount a small filesystem: run as root")
    yield tmp_path
    subprocess.run([umount, "--lazy", str(tmp_path)], check=True)
