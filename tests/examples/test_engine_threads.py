import re
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
