"""The benchmark of tiers below a real vLLM runs, on a size that shows nothing."""

import json
import subprocess
import sys

from environments import ROOT, Environment


def test_it_runs(vllm: Environment) -> None:
    """Every figure of both sizes, of vLLM's tier and of ours."""
    assert vllm.is_built
    command = [sys.executable, str(ROOT / "benchmarks" / "engines.py"), "--smoke"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(said["ratios"]) == 2 * 2 * 2 * 2
    assert all(value > 0 for value in said["ratios"].values())
