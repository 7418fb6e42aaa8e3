from pathlib import Path

import pytest

from tests.support import programs

EXAMPLE = Path(__file__).parents[2] / "examples" / "engine_workers.py"


@pytest.mark.slow
def test_it_runs() -> None:
    """Two worker processes store and load 31 blocks by the planner's plans, each its own bytes."""
    ran = programs.run(EXAMPLE)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    for line in ("stored 31 blocks", "found {'cpu': 31}", "loaded 31 blocks"):
        assert line in lines
    for rank in range(2):
        for direction in ("store", "load"):
            assert f"rank {rank}: {direction} of 31 blocks, the right bytes: True" in lines
