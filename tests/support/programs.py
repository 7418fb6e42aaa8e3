"""Python programs that tests start: forked from one process that has imported what they need.

By itself each would import torch and this library for seconds. What is forked has its own command line, environment,
directory and files, and ends as any program does; only its imports are done. Whatever is about imports, or the
interpreter's own start, is started by `subprocess`.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO

Argument = str | os.PathLike[str]
IMPORTED = (
    "tests.support.any_layout",
    "tests.support.caches",
    "tests.support.engine",
    "tiered_kv.cli.app",
    "tiered_kv.testing",
    "tiered_kv_backends.nvme",
    "tiered_kv_backends.shared_fs",
)


class Program:
    """One that was started; killed at the end of its ``with`` block if it runs still.

    Attributes:
        pid: Its process.
        stdin: A pipe to it.
        stdout: A pipe from it.
    """

    def __init__(self, pid: int, ended: FileIO, stdin: IO[str], stdout: IO[str]) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self._ended = ended
        self._code: int | None = None

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._code is None and not select.select([self._ended], [], [], 0)[0]

    def send_signal(self, which: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self.is_running:
            os.kill(self.pid, which)

    def kill(self) -> None:
        """End it by SIGKILL, and wait until it has ended."""
        self.send_signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Wait for its end; return its exit code, or the negative number of the signal that ended it."""
        if self._code is None:
            self._code = int(self._ended.readline())
        return self._code


@contextmanager
def started(
    *arguments: Argument, environment: Mapping[str, str] | None = None, folder: Argument | None = None
) -> Iterator[Program]:
    """Start ``python *arguments``, by default in this process's environment and directory."""
    (stdin, to), (of, stdout) = os.pipe(), os.pipe()
    begun = _begun(arguments, (stdin, stdout, 2), environment, folder)
    with open(to, "w") as ours, open(of) as said, begun as (pid, ended):  # noqa: PTH123 - descriptors
        os.close(stdin)
        os.close(stdout)
        program = Program(pid, ended, ours, said)
        try:
            yield program
        finally:
            program.kill()


def run(
    *arguments: Argument, environment: Mapping[str, str] | None = None, folder: Argument | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run ``python *arguments`` to its end, without input; return what it printed."""
    with open(os.devnull) as stdin, tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:  # noqa: PTH123 - no folder
        files = (stdin.fileno(), stdout.fileno(), stderr.fileno())
        with _begun(arguments, files, environment, folder) as (_, ended):
            code = int(ended.readline())
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(arguments, code, stdout.read(), stderr.read())


@contextmanager
def _begun(
    arguments: Sequence[Argument],
    files: tuple[int, int, int],
    environment: Mapping[str, str] | None,
    folder: Argument | None,
) -> Iterator[tuple[int, FileIO]]:
    """Have a program begin; give its process, and what has a line with its exit code when it has ended."""
    order = {
        "arguments": [os.fspath(each) for each in arguments],
        "environment": dict(os.environ if environment is None else environment),
        "folder": os.fspath(folder or Path.cwd()),
    }
    ended, tell = os.pipe()
    with FileIO(ended) as said:
        socket.send_fds(_nursery(), [json.dumps(order).encode()], [*files, tell])
        os.close(tell)
        yield int(said.readline()), said


@functools.cache
def _nursery() -> socket.socket:
    """Start the process that forks, once in a process that tests; it ends when that does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        theirs.set_inheritable(True)
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        process = subprocess.Popen(command, cwd=Path(__file__).parents[2], pass_fds=[theirs.fileno()])

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _serve(line: socket.socket) -> None:
    """Fork what is asked for; return in that, ready to be it."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # a program that ends need not look at all this
    while True:
        order, fds, *_ = socket.recv_fds(line, 1 << 20, 4)
        with suppress(ChildProcessError):  # what watched programs that have ended
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not order:
            sys.exit()
        if not os.fork():
            break
        for each in fds:
            os.close(each)
    line.close()
    *files, tell = fds
    if pid := os.fork():
        for each in files:
            os.close(each)
        os.write(tell, b"%d\n" % pid)
        os.write(tell, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    os.close(tell)
    for number, each in enumerate(files):
        os.dup2(each, number)
        os.close(each)
    _become(**json.loads(order))


def _become(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """Run a program in this process, as the interpreter would that was started with these arguments."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    what, *rest = arguments
    added = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each and each not in sys.path]
    if what == "-m":
        name, *rest = rest
        sys.argv, sys.path[0:1] = [name, *rest], [folder, *added]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif what == "-c":
        code, *rest = rest
        sys.argv, sys.path[0:1] = ["-c", *rest], ["", *added]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 - as `python -c` does
    else:
        sys.argv, sys.path[0:1] = arguments, [os.fspath(Path(what).parent), *added]
        runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        _serve(asked)
