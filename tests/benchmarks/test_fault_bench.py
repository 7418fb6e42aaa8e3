"""The fault bench over our own tiers: whatever the fault, an engine is given what is right, or told to compute."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "benchmarks" / "faults"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("tier", ["nvme", "shared_fs"])
def test_no_fault_gives_wrong_bytes_or_holds_an_engine_up(tier: str) -> None:
    """Right or a miss in all sixteen classes; what a fault does not touch is served, and all of it once it is over."""
    command = [sys.executable, str(BENCH / "run.py"), "--tier", tier]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if "cc is missing" in done.stderr:
        pytest.skip("a C compiler: apt-get install gcc")
    assert done.returncode == 0, done.stderr
    table: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["table"]
    assert len(table) == 16
    for name, ((title, said),) in ((name, row.items()) for name, row in table.items()):
        assert said["outcome"] in {"right", "miss"}, (name, title, said)
        assert set(said.get("others", ())) | set(said.get("afterwards", ())) <= {"right"}, (name, title, said)
        assert said["outcome"] == "right" or name not in {"restarted", "cancelled"}, (name, title, said)
