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
    names = {f"decode_{tier}_over_none{at}" for tier in ("cpu", "nvme", "host", "fs") for at in ("", "_22ms")}
    assert said.keys() == names | {"longest_step_over_none", "longest_step_over_none_22ms"}
    assert all(value > 0 for value in said.values())


def test_it_runs(vllm: Environment) -> None:
    """Every figure of both sizes, of vLLM's tier and of ours."""
    assert vllm.is_built
    command = [sys.executable, str(ROOT / "benchmarks" / "engines.py"), "--smoke"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    said = json.loads(done.stdout.splitlines()[-1])
    rows = {f"{what}_{size}" for what in ("store", "promote") for size in ("1MiB", "128KiB")} | {"cpu", "scheduler"}
    assert said.keys() == {f"{row}_over_fs{ours}" for row in rows for ours in ("", "_direct")}
    assert all(value > 0 for value in said.values())


def test_peers_are_measured(vllm: Environment, sglang: Environment) -> None:
    """Of both sizes every figure of our NVMe tier over each other tier; which of them have loaded what was stored."""
    assert vllm.is_built
    assert sglang.is_built
    Environment.of("lmcache").build()
    command = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), "--rounds", "1", "--mib", "16"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    said = json.loads(done.stdout.splitlines()[-1])
    figures = ("store", "flushed", "load", "load_cold", "store_cpu", "load_cold_cpu")
    others = ("bare", "shared_fs", "vllm_fs", "lmcache", "lmcache_direct", "hicache")
    assert said.keys() == {
        f"{what}_{size}_over_{who}" for what in figures for size in ("128KiB", "1MiB") for who in others
    }
    assert all(value > 0 for value in said.values())


def test_what_comes_again_is_measured(vllm: Environment) -> None:
    """First tokens and all of the time, over an engine without a connector and over vLLM's own tiers."""
    assert vllm.is_built
    command = [sys.executable, str(ROOT / "benchmarks" / "engines.py"), "--only", "again", "--smoke"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    said = json.loads(done.stdout.splitlines()[-1])
    figures = [f"again_{what}_over" for what in ("ttft_median", "ttft_p99", "time")]
    assert said.keys() == {f"{figure}_{other}_22ms" for figure in figures for other in ("none", "fs")}
    assert all(value > 0 for value in said.values())


def test_what_cannot_be_helped_is_measured(vllm: Environment) -> None:
    """Of each setting and model the throughput and the first token, and the worst; the last line is flat."""
    assert vllm.is_built
    names = ["nothing comes again, NVMe", "reads hang"]
    command = [sys.executable, str(ROOT / "benchmarks" / "engines.py"), "--only", "hostile", "--smoke"]
    options = ["--models", "tiny", "22ms", "--settings", *names]
    done = subprocess.run([*command, *options], check=True, capture_output=True, text=True)
    said = json.loads(done.stdout.splitlines()[-1])
    figures = [*(f"{name} {what}" for name in names for what in ("throughput", "ttft_p99"))]
    figures += [f"{names[0]} {what}_{whose}" for what in ("throughput", "ttft_p99") for whose in ("fs", "idle")]
    figures += ["hostile_throughput_worst", "hostile_ttft_p99_worst"]
    assert said.keys() == {f"{figure}{at}" for figure in figures for at in ("", "_22ms")}
    assert all(value > 0 for value in said.values())


def test_hits_are_as_replayed(vllm: Environment) -> None:
    """Of vLLM's scheduler, pool and prefix cache over our connector, without a model, whenever blocks are stored."""
    assert vllm.is_built
    command = [sys.executable, str(ROOT / "benchmarks" / "replayed.py"), "--smoke"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["bytes_right"]
    assert said["hits_off_worst"] <= 0.02
