"""The GPU benchmark runs wherever it is started, so that a GPU finds it in order."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"


def last_line(*arguments: str) -> dict[str, dict[str, float]]:
    """Run the benchmark; return its line of JSON."""
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_all_of_it_runs_on_a_cpu(tmp_path: Path) -> None:
    """Tiny sizes and meaningless figures, but every part, of every kind of block, into files of their own."""
    found = last_line("--device", "cpu", "--small", "--path", str(tmp_path), "--out", str(tmp_path))
    assert "errors" not in found
    assert {"load_over_one_copy", "store_over_one_copy", "both_over_one_copy"} <= found["copies: small"].keys()
    assert {"load_pageable", "load_one_us", "matmul_beside_both"} <= found["copies: small MLA"].keys()
    assert {"load_by_layer_over_one_copy", "store_by_layer_staging"} <= found["layers: small"].keys()
    assert {"store_settled_gb_s", "load_gb_s"} <= found["cache: cpu nvme"].keys()
    assert found["cache: event to coroutine"].keys() == {"latency_us", "cpu_us"}
    for part in ("facts", "copies", "layers", "graphs", "cache", "soak"):
        written = json.loads((tmp_path / f"{part}.json").read_text())
        assert written["figures"] == {name[len(part) + 2 :]: each for name, each in found.items() if part in name[:8]}


@pytest.mark.slow
def test_a_machine_without_make_or_network_runs_it(tmp_path: Path) -> None:
    """All that it needs is a Python with torch, and the wheels of a kit; a part that fails is named at the end."""
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    subprocess.run(wheel, check=True, cwd=ROOT)
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHON": sys.executable,
        "KIT": str(tmp_path),
        "OUT": str(tmp_path / "out"),
    }
    command = [str(ROOT / ".ci/on_gpu"), "facts", "nonsense", "soak"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "===== failed: nonsense"
    assert json.loads((tmp_path / "out/facts.json").read_text())["figures"]["versions"]["python"]
    soaked = json.loads((tmp_path / "out/soak.json").read_text())["figures"]["soak"]
    assert soaked["loaded"]
    assert soaked["wrong"] == 0


def test_no_answer_of_the_driver_is_a_fault_of_memory(tmp_path: Path) -> None:
    """Events that have not happened, or never will, are asked for: the sanitizer would count the answers as errors."""
    programs = {
        "python": 'case "$*" in *is_available*) echo 1;; *"-m pytest"*) echo tested;; esac',
        "compute-sanitizer": 'case "$*" in *"--report-api-errors no"*) shift 6; exec "$@";; esac; exit 9',
    }
    for name, does in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "kit.whl").touch()
    folders = {"KIT": str(tmp_path), "OUT": str(tmp_path / "out"), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    environment = {**folders, "PYTHON": str(tmp_path / "python")}
    command = [str(ROOT / ".ci/on_gpu"), "sanitizer"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "tested" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1] == "===== failed: none"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device: this is about machines without one")
def test_without_a_gpu_nothing_is_measured() -> None:
    """It says so, and that is no error."""
    assert last_line() == {}
