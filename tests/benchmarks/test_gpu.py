"""The GPU benchmark runs wherever it is started, so that a GPU finds it in order."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def last_line(*arguments: str) -> dict[str, dict[str, float]]:
    """Run the benchmark; return its line of JSON."""
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_all_of_it_runs_on_a_cpu(tmp_path: Path) -> None:
    """Tiny sizes and meaningless figures, but every one of them, of every kind of block."""
    found = last_line("--device", "cpu", "--small", "--path", str(tmp_path))
    assert {"load_over_one_copy", "store_over_one_copy", "both_over_one_copy"} <= found["small"].keys()
    assert {
        "load_by_layer",
        "store_directly",
        "load_staging",
        "store_pageable",
        "load_one_us",
        "matmul_beside_both",
    } <= found["small MLA"].keys()
    assert {"nvme_store", "nvme_load"} <= found["small"].keys()
    assert found["event to coroutine"].keys() == {"latency_us", "cpu_us"}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device: this is about machines without one")
def test_without_a_gpu_nothing_is_measured() -> None:
    """It says so, and that is no error."""
    assert last_line() == {}
