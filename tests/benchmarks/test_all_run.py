"""Every benchmark runs, on sizes that show nothing: none is broken unnoticed until somebody needs its figures."""

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

BENCHMARKS: Final = Path(__file__).parents[2] / "benchmarks"
SMALL: Final[Mapping[str, tuple[list[str], dict[str, Any]]]] = {
    "catalog": (["--tracked", "2000", "--policy", "lru"], {}),
    "codec": ([], {"BANDWIDTHS": {"the disk's own": None}}),
    "cpu_tier": (["--rounds", "1"], {"NUM_BLOCKS": 48, "LAYOUTS": {"small": (48, 2, 16, 8, 128)}}),
    "event_loop": (["--seconds", "0.1", "--rounds", "1"], {}),
    "face": (["--rounds", "1"], {"SIZES": (1, 4)}),
    "hops": ([], {}),
    "host": (["--rounds", "1"], {"NUM_BLOCKS": 32, "PROCESSES": (1,), "ASKING": 1}),
    "nvme": (["--rounds", "1"], {"NUM_BYTES": 32 << 20}),
    "peers": (["--rounds", "1", "--mib", "16", "--tier", "shared_fs"], {}),
    "policies": (
        ["synthetic:chat?num_requests=20", "--sizes", "100", "--policies", "lru", "--tracked", "4096"],
        {"BATCH": 256},
    ),
    "recompute": ([], {"LATENCY_S": (0.0,), "BLOCK_S": (1e-4,), "PREFILL": (8_000,)}),
    "remote": (["shared_fs", "--rounds", "1"], {"NUM_BYTES": 16 << 20}),
    "telemetry": (["--seconds", "0.1"], {}),
}
"""How little is enough: arguments, and constants of the module. Of those that are not here all of it is."""
ELSEWHERE: Final = {"engines", "gpu", "launches"}
"""`tests/engines`, `test_gpu` and the last test here run these."""


@pytest.fixture
def _like_a_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Run where a benchmark may leave files, and set back what a program may set for good."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    modules, on_term = set(sys.modules), signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, on_term)
    for name in set(sys.modules) - modules:  # another benchmark may have a module of the same name
        if (Path(getattr(sys.modules[name], "__file__", None) or "/").parent) == BENCHMARKS:
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.usefixtures("_like_a_program")
@pytest.mark.parametrize("name", sorted({path.stem for path in BENCHMARKS.glob("[a-z]*.py")} - ELSEWHERE))
def test_it_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends with a line of JSON, of an object."""
    arguments, constants = SMALL.get(name, ([], {}))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    module = importlib.import_module(name)
    for constant, value in constants.items():
        assert hasattr(module, constant), f"{name} has no {constant} any more"
        monkeypatch.setattr(module, constant, value)
    module.main()
    assert isinstance(json.loads(capsys.readouterr().out.splitlines()[-1]), dict)


@pytest.mark.slow
def test_launches_run() -> None:
    """In a process of its own: once Triton's compiler is imported, its interpreter is no more to be had."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(BENCHMARKS / "launches.py")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert isinstance(json.loads(ran.stdout.splitlines()[-1]), dict), ran.stderr
