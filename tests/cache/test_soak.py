"""Hours of traffic and faults: what a process holds does not grow. `make soak` takes an hour, a test run seconds."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.programs import Program, started

_MOST_GROWTH_BYTES = 32 << 20
"""What memory that a process has may differ by: allocators keep some of what they were given back."""


class Life:
    """A process that serves, see `soak_process`."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def ask(self, num_requests: int = 300) -> None:
        """Have it serve so many requests, and then say what it holds."""
        self.program.stdin.write(f"{num_requests}\n")
        self.program.stdin.flush()

    def measure(self) -> dict[str, Any]:
        """Wait for what was asked."""
        measured: dict[str, Any] = json.loads(self.program.stdout.readline())
        return measured


@contextmanager
def begun(path: Path, seed: int) -> Iterator[Life]:
    """Begin one; it ends when all that it was asked is answered, if it was not killed."""
    with started("-m", "tests.cache.soak_process", path, str(seed), folder=Path(__file__).parents[2]) as program:
        yield Life(program)
        program.stdin.close()
        program.wait()


def damage(path: Path, rng: np.random.Generator) -> None:
    """Overwrite some bytes of a file, somewhere."""
    files = [each for each in sorted(path.rglob("*")) if each.is_file() and each.stat().st_size > 4096]
    if files:
        file = files[int(rng.integers(len(files)))]
        with file.open("r+b") as opened:
            opened.seek(int(rng.integers(file.stat().st_size - 16)))
            opened.write(rng.bytes(16))


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_nothing_grows_however_long_it_serves(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Threads, descriptors, leases and slots are as many as before, memory about as much, and no byte is wrong."""
    seconds = request.config.getoption("--soak")
    rng = np.random.default_rng(1)
    num_kills = num_damages = 0
    end = time.monotonic() + seconds / 4
    while time.monotonic() < end or not num_kills:  # a disk with a past
        with begun(tmp_path, num_kills) as life:
            life.ask()
            assert life.measure()["wrong"] == 0
            life.ask()
            damage(tmp_path, rng)
            life.program.kill()
        num_kills += 1
    with begun(tmp_path, num_kills) as life:
        told: list[dict[str, Any]] = []
        end = time.monotonic() + 3 * seconds / 4
        while time.monotonic() < end or len(told) < 4:
            life.ask()
            damage(tmp_path, rng)
            num_damages += 1
            told.append(life.measure())
    first, last = told[len(told) // 4], told[-1]
    sys.stdout.write(f"{num_kills} kills, {num_damages} damages; from {first} to {last}\n")
    assert last["wrong"] == 0
    assert last["served"] > 0
    assert (last["threads"], last["descriptors"], last["held"]) == (first["threads"], first["descriptors"], 0)
    assert last["rss"] - first["rss"] < _MOST_GROWTH_BYTES
