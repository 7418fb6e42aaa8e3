"""Which tests run a line, and running just these: in forks of a process that has imported the libraries.

Starting Python and torch anew would take longer than most tests.
"""

import contextlib
import json
import os
import pathlib
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import anyio
import coverage
import hypothesis
import pydantic_settings
import pytest
import torch

PRELOADED = anyio, hypothesis, pydantic_settings, torch
SECONDS_PER_TEST, RECORDED_SECONDS_PER_TEST = 60, 300
LEAST_SECONDS = 60
PYTEST = (
    *("-q", "-m", "not slow", "--no-header", "-p", "no:cacheprovider"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # of what is imported here already
)


@dataclass(frozen=True)
class Suite:
    """The tests, as they ran on the library as it is.

    Attributes:
        tree: Where they run.
        seconds: How long each took.
        lines: By module and line, which of them ran it.
    """

    tree: pathlib.Path
    seconds: dict[str, float]
    lines: dict[str, dict[int, set[str]]]

    @classmethod
    def recorded(cls, tree: pathlib.Path, paths: list[str]) -> "Suite":
        """Run the tests in ``paths`` and note what each runs. Those that fail are named, and never run again."""
        recorder = _Recorder(tree)
        _in_a_fork(tree, lambda: _record(recorder, paths), float("inf"), writes_bytecode=True)
        said = json.loads(recorder.path.read_text())
        for test in said["failed"]:
            print(f"fails without a change, left out: {test}")
        lines = {
            pathlib.Path(file).relative_to(tree).as_posix(): {
                int(line): said["seconds"].keys() & tests for line, tests in by_line.items()
            }
            for file, by_line in said["lines"].items()
        }
        return cls(tree, said["seconds"], lines)

    def running(self, module: str, lines: Iterable[int]) -> set[str]:
        """Return the tests that run one of these lines; if none does so in its own process, all that run the module."""
        by_line = self.lines.get(module, {})
        return set().union(*(by_line.get(line, ()) for line in lines)) or set().union(*by_line.values())

    def finds(self, tests: set[str]) -> bool:
        """Run tests, the shortest files first; say whether one fails, or they do not end in time."""
        if not tests:
            return False
        files: defaultdict[str, float] = defaultdict(float)
        for test in tests:
            files[_file_of(test)] += self.seconds[test]
        order = {test: (files[_file_of(test)], _file_of(test), self.seconds[test]) for test in tests}
        limit_s = LEAST_SECONDS + 2 * sum(files.values())
        run = [*PYTEST, "-x", f"--timeout={SECONDS_PER_TEST}", *files]
        code = _in_a_fork(self.tree, lambda: int(pytest.main(run, [_Chosen(order)])), limit_s)
        return code not in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}


class _Recorder:
    """A plugin of pytest that notes what each test runs."""

    def __init__(self, tree: pathlib.Path) -> None:
        self.path = tree / "mutate.json"
        self._library = [f"{tree}/tiered_kv/*", f"{tree}/backends/*"]
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()

    def begin(self) -> None:
        """Trace this process and its threads."""
        self._coverage = coverage.Coverage(data_file=None, include=self._library, config_file=False)
        self._coverage.start()

    def end(self) -> None:
        """Write down what was noted."""
        self._coverage.stop()
        data = self._coverage.get_data()
        lines = {file: data.contexts_by_lineno(file) for file in data.measured_files()}
        seconds = {test: took for test, took in self._seconds.items() if test not in self._failed}
        self.path.write_text(json.dumps({"lines": lines, "seconds": seconds, "failed": sorted(self._failed)}))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Note what runs from here on, in any thread, as this test's."""
        self._coverage.switch_context(item.nodeid)
        started = time.monotonic()
        result = yield
        self._seconds[item.nodeid] = time.monotonic() - started
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what fails."""
        if report.failed:
            self._failed.add(report.nodeid)


class _Chosen:
    """A plugin of pytest that runs some tests alone, in an order."""

    def __init__(self, order: dict[str, tuple[float, str, float]]) -> None:
        self._order = order

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out all others."""
        items[:] = sorted(
            (item for item in items if item.nodeid in self._order), key=lambda item: self._order[item.nodeid]
        )


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def _record(recorder: _Recorder, paths: list[str]) -> int:
    recorder.begin()
    code = int(pytest.main([*PYTEST, f"--timeout={RECORDED_SECONDS_PER_TEST}", *paths], [recorder]))
    recorder.end()
    return code


def _in_a_fork(
    tree: pathlib.Path, function: Callable[[], int], timeout_s: float, *, writes_bytecode: bool = False
) -> int:
    """Run a function in a fork of this process, in the tree; return its answer, or -1 if it does not end in time."""
    child = os.fork()
    if not child:
        os.setsid()
        _be_tested(tree, function, writes_bytecode=writes_bytecode)
    ends = time.monotonic() + timeout_s
    code = None
    while code is None:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > ends:
            code = -1
        else:
            time.sleep(0.02)  # waitpid has no time limit of its own
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # processes that a test started and did not end
    if not ended:
        os.waitpid(child, 0)
    return code


def _be_tested(tree: pathlib.Path, function: Callable[[], int], *, writes_bytecode: bool) -> None:
    """Become the process that runs the tests in the copied tree; does not return."""
    code = 1
    try:
        os.chdir(tree)
        path = [str(tree), str(tree / "backends")]
        os.environ |= {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "" if writes_bytecode else "1"}
        sys.path[:0] = path
        sys.dont_write_bytecode = not writes_bytecode
        log = os.open(tree / "mutate.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        if not writes_bytecode:
            os.dup2(log, 1)
            os.dup2(log, 2)
        code = function()
    except BaseException:  # noqa: BLE001 - nobody is above this
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
