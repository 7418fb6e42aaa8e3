import re
import signal
from pathlib import Path

import pytest

from tests.support import programs

EXAMPLE = Path(__file__).parents[2] / "examples" / "engine_threads.py"


@pytest.mark.slow
def test_it_runs() -> None:
    """The engine loads what it stored, the same bytes, and gets every page back from the cache."""
    ran = programs.run(EXAMPLE)
    assert ran.returncode == 0, ran.stderr
    counts = re.search(r"^144 blocks: (\d+) loaded, (\d+) computed, 0 wrong$", ran.stdout, re.MULTILINE)
    assert counts
    assert int(counts[1]) > 0
    assert int(counts[1]) + int(counts[2]) == 144
    assert "pages free again: 64 of 64" in ran.stdout.splitlines()


INTERRUPTED = """
import signal, sys, time
sys.path.insert(0, sys.argv[1])
import engine_threads

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs in the background ignore it

known = engine_threads.block_of

def slow(key, layer):
    print("computing", flush=True)
    time.sleep(0.02)
    {then}
    return known(key, layer)

engine_threads.block_of = slow
engine_threads.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("then", ["", "raise RuntimeError"])
def test_it_ends_where_it_is_interrupted_or_computing_fails(then: str) -> None:
    """By Ctrl-C, and by an exception in the engine's own thread: no client waits for one that serves nobody."""
    with programs.started("-c", INTERRUPTED.format(then=then), EXAMPLE.parent) as program:
        assert program.stdout.readline() == "computing\n"
        if not then:
            program.send_signal(signal.SIGINT)
        assert program.wait() == (0 if then else -signal.SIGINT)
