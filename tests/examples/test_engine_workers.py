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


DYING = """
import os, sys, tempfile, asyncio
sys.path.insert(0, sys.argv[1])
import engine_workers

class Dying:
    def __init__(self, pipe):
        self.pipe = pipe

    def recv(self):
        os._exit(9) if self.pipe.recv() is not None else None

def work(rank, slabs, pipe):
    real(rank, slabs, Dying(pipe) if rank else pipe)

real, engine_workers.work = engine_workers.work, work
if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as path:
        asyncio.run(engine_workers.main(path))
"""


@pytest.mark.slow
def test_a_worker_that_dies_brings_its_job_to_nothing(tmp_path: Path) -> None:
    """The others go on to their answers, and the scheduler is told: it waits for nobody for good."""
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    ran = programs.run(script, EXAMPLE.parent)
    assert "rank 1 has died" in ran.stdout.splitlines(), ran.stderr
    assert "stored 0 blocks" in ran.stdout.splitlines()
