"""The benchmark of tiers below a real vLLM runs, on a size that shows nothing."""

import json
import subprocess
import sys

from environments import ROOT, Environment


def test_decoding_is_measured(vllm: Environment) -> None:
    """Every ratio, of engines that answer the same; the last line is flat."""
    assert vllm.is_built
    command = [sys.executable, str(ROOT / "benchmarks" / "engines.py"), "--only", "decode", "--smoke"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    said = json.loads(done.stdout.splitlines()[-1])
    names = {f"decode_{tier}_over_none{at}" for tier in ("cpu", "nvme", "fs") for at in ("", "_22ms")}
    assert said.keys() == names | {"longest_step_over_none", "longest_step_over_none_22ms"}
    assert all(value > 0 for value in said.values())


def test_it_runs(vllm: Environment) -> None:
    """Every figure of both sizes, of vLLM's tier and of ours."""
    assert vllm.is_built
    command = [sys.executable, str(ROOT / "benchmarks" / "engines.py"), "--smoke"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(said["ratios"]) == 2 * 2 * 2 * 2
    assert all(value > 0 for value in said["ratios"].values())
