"""A mock of S3 for machines without Ceph: what tests of S3 fall back to. It takes any credentials and keeps nothing."""

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_START_WITHIN_S = 60.0


@dataclass
class MotoServer:
    """A running mock.

    Attributes:
        endpoint: Without TLS.
        process: Ended by whoever has started it.
    """

    endpoint: str
    process: subprocess.Popen[bytes]

    def make_bucket(self, name: str) -> None:
        """Create a bucket; nothing has to be signed."""
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")  # noqa: S310 - loopback
        urllib.request.urlopen(request, timeout=30).close()  # noqa: S310 - a server of ours

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Within, it accepts connections and answers nobody."""
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)


def find_moto() -> str | None:
    """Return its program: from the environment that ``.ci/install_servers`` has made for it, or from PATH."""
    own = Path(sys.prefix, "moto", "bin", "moto_server")
    return str(own) if own.exists() else shutil.which("moto_server")


@contextmanager
def moto_server(folder: Path, port: int) -> Iterator[MotoServer]:
    """Yield a mock whose log is in ``folder``; its process ends after it, by its id."""
    program = find_moto()
    assert program is not None
    with (folder / "moto.log").open("wb") as log:
        words = [program, "-H", "127.0.0.1", "-p", str(port)]
        process = subprocess.Popen(words, stdout=log, stderr=log, cwd=folder)
    server = MotoServer(f"http://127.0.0.1:{port}", process)
    try:
        _wait_until_it_answers(server)
        yield server
    finally:
        process.kill()
        process.wait()


def _wait_until_it_answers(server: MotoServer) -> None:
    give_up = time.monotonic() + _START_WITHIN_S
    while time.monotonic() < give_up and server.process.poll() is None:
        with suppress(OSError):
            urllib.request.urlopen(server.endpoint, timeout=5).close()  # noqa: S310 - loopback
            return
        time.sleep(0.05)
    raise RuntimeError(f"{server.process.args!r} did not start")
