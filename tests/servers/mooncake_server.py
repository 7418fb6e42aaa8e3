"""A Mooncake Store on this machine: a master, and a process that gives memory; as a script, this file is the latter."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ports import free_port

PACKAGE = "mooncake-transfer-engine-non-cuda"
SEGMENT_BYTES = 256 << 20


class MooncakeServer:
    """A running store. Its processes end with the stack; what they say is in files in ``folder``."""

    def __init__(self, folder: Path, processes: ExitStack, segment_bytes: int, lease_ms: int) -> None:
        self.port = free_port()
        self.url = f"mooncake://127.0.0.1:{self.port}"
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._lease_ms = lease_ms
        self._processes = processes
        self.start_master()
        self.start_storage()

    def start_master(self) -> None:
        """Start the master, and wait until it listens."""
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None
        assert spec.origin is not None
        options = {
            "rpc_address": "127.0.0.1", "rpc_port": self.port, "default_kv_lease_ttl": self._lease_ms,
            "metrics_host": "127.0.0.1", "metrics_port": free_port(),
        }  # fmt: skip
        arguments = [f"--{name}={value}" for name, value in options.items()]
        program = str(Path(spec.origin).with_name("mooncake_master"))
        self.master = self._start(program, *arguments, log="master")
        deadline = time.monotonic() + 30
        while not _listens(self.port):
            assert self.master.poll() is None, (self._folder / "master.log").read_text()
            assert time.monotonic() < deadline, "mooncake_master does not listen after 30 s"
            time.sleep(0.02)

    def start_storage(self) -> None:
        """Start the process that gives memory, and wait until it has joined."""
        self.storage = self._start(
            sys.executable, __file__, f"127.0.0.1:{self.port}", str(self._segment_bytes), log="storage"
        )
        self._expect("joined")

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Within, neither the master nor the process that gives memory answers anybody."""
        processes = self.master, self.storage
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in processes:
                process.send_signal(signal.SIGCONT)

    def clear(self) -> None:
        """Remove all blocks."""
        assert self.storage.stdin is not None
        self.storage.stdin.write(b"clear\n")
        self.storage.stdin.flush()
        self._expect("cleared")

    def _start(self, *command: str, log: str) -> "subprocess.Popen[bytes]":
        with (self._folder / f"{log}.log").open("ab") as output:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output)
        self._processes.enter_context(process)
        self._processes.callback(_end, process)
        return process

    def _expect(self, line: str) -> None:
        assert self.storage.stdout is not None
        while (said := self.storage.stdout.readline().decode().strip()) != line:
            assert said or self.storage.poll() is None, (self._folder / "storage.log").read_text()


@contextmanager
def mooncake_server(folder: Path, segment_bytes: int = SEGMENT_BYTES, lease_ms: int = 500) -> Iterator[MooncakeServer]:
    """Start a store, or skip and say what is missing."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        reason = "libibverbs1" if "libibverbs" in str(error) else PACKAGE
        pytest.skip(f"{reason} is missing: pip install {PACKAGE}; apt-get install libibverbs1")
    with ExitStack() as processes:
        yield MooncakeServer(folder, processes, segment_bytes, lease_ms)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.kill(process.pid, signal.SIGCONT)
        process.kill()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def _give_memory(master: str, segment_bytes: int) -> None:
    from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 - the tests import this file without it

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 16 << 20, "tcp", "", master) == 0
    os.write(1, b"joined\n")
    for _ in sys.stdin:
        store.remove_all(True)  # noqa: FBT003 - the client's own signature
        os.write(1, b"cleared\n")


if __name__ == "__main__":
    _give_memory(sys.argv[1], int(sys.argv[2]))
