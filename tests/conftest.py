"""How every test runs: under asyncio (and uvloop where asked), never skipped in silence.

- ``async def`` tests and fixtures run under AnyIO's pytest plugin; ``@pytest.mark.both_loops`` runs one on uvloop too.
- ``@pytest.mark.gpu`` skips where there is no CUDA device.
- A reason to skip reads "what is missing: how to get it"; a table of them ends each run.
"""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is: several processes test at once, on small matrices

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import structlog
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels are exact on a CPU too; read when they are imported
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # else Triton 3.9 warns; no kernel here multiplies

TESTS = Path(__file__).parent
_ended = itertools.count(1)
"""Tests of this process."""

TOGETHER = ("servers", "examples", "test_docs_site.py", "memory/test_kernels_compiled.py")

ASYNCIO = pytest.param(("asyncio", {}), id="asyncio")
UVLOOP = pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop")

# Machines differ and are shared: no test is allowed an opinion about time.
hypothesis.settings.register_profile("tests", deadline=None, print_blob=True)
hypothesis.settings.register_profile("thorough", parent=hypothesis.settings.get_profile("tests"), max_examples=2000)
hypothesis.settings.register_profile("torture", parent=hypothesis.settings.get_profile("tests"), max_examples=10_000)
hypothesis.settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--kills``, of each kind of tier, and ``--soak``, in seconds."""
    parser.addoption("--soak", type=float, default=4, help="how many seconds test_soak serves and damages")
    parser.addoption("--kills", type=int, default=4, help="how often test_kills ends a cache of each kind by kill -9")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop of async tests and of async fixtures."""
    return "asyncio"


@pytest.fixture(autouse=True)
def _structlog_is_not_configured() -> Iterator[None]:
    """A test that configures structlog, as programs do, leaves no other test in its process a log on stdout."""
    yield
    structlog.reset_defaults()


@pytest.hookimpl(optionalhook=True)  # a machine with a GPU need not have pytest-xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One process more than cores: many tests wait for servers, timers and disks."""
    return min((os.cpu_count() or 1) + 1, 8)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of a file in one process where they share servers, programs, the site or kernels: `TOGETHER`.

    Where several processes test, they begin with what takes long: else the last of them works alone in the end. In one
    process files stay together, for the same reason.
    """
    if not hasattr(config, "workerinput"):
        return
    items.sort(key=_length)
    for item in items:
        if any(item.path.is_relative_to(TESTS / each) for each in TOGETHER):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking at all tests and torch again and again: what is there now stays."""
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Do so again now and then, with what tests have left: who collects garbage walks all that is there."""
    if next(_ended) % 50 == 0:
        gc.collect()
        gc.freeze()


def _length(item: pytest.Item) -> int:
    """Order tests as far as is known before they run: those with a time limit of their own, slow ones, all others."""
    return 0 if item.get_closest_marker("timeout") else 1 if item.get_closest_marker("slow") else 2


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests marked ``both_loops`` on asyncio's own loop and on uvloop."""
    if metafunc.definition.get_closest_marker("both_loops"):
        metafunc.parametrize("anyio_backend", [ASYNCIO, UVLOOP], scope="session")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device: run on a machine with a GPU and a CUDA build of torch (make test TORCH=...)")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """End the run with what was skipped, why, and how to have it run."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.getreports("skipped")
        if isinstance(report.longrepr, tuple)
    )
    if not reasons:
        return
    rows = [("tests", "not run because", "to run them")]
    rows += [(str(count), *reason.partition(": ")[::2]) for reason, count in sorted(reasons.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    terminalreporter.section("skipped")
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        terminalreporter.write_line("  ".join(cells).rstrip())
