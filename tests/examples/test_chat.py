import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import chat
from chat_engine import CHUNK, Completion
from chat_results import RECOMPUTE, Run, describe, draw_table, find_faults, make_console
from chat_servers import find_redis, serve_tiers
from tiered_kv import LoadResult, Reason, TierFault
from tiered_kv_backends.s3 import S3Settings

pytestmark = pytest.mark.timeout(300)

SMALL = ["--conversations=2", "--turns=2", "--new-tokens=2", "--layers=2", "--dtype=float32"]

# The demo, with a disk that loses its mind between the run that wrote and the new process that reads.
ON_A_BROKEN_DISK = """
import os, pathlib, sys
import chat

serve_in_new_process = chat.serve_in_new_process

async def break_blocks_first(tier, options, on_served, console):
    for path in chat.blocks_folder(options).rglob("*"):
        if path.is_file() and path.stat().st_size > 2**24:  # blocks, not ledgers
            size = path.stat().st_size
            with path.open("r+b") as file:
                for start in range(0, size, 2**16):
                    file.seek(start + 2**15)
                    file.write(os.urandom(64))
    return await serve_in_new_process(tier, options, on_served, console)

chat.serve_in_new_process = break_blocks_first
chat.main()
"""


def run_demo(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    """Run Python on these arguments in a process of its own, with the examples on its path; return what it says."""
    environment = os.environ | {"PYTHONPATH": str(Path(chat.__file__).parent), "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_every_tier_serves_what_was_computed(tmp_path: Path) -> None:
    """A small run ends well: a row per tier, equal output, all KV from the tier, a plot, and no blocks left on disk.

    A new process starts warm from servers, and none of them is left behind.
    """
    if find_redis() is None:
        pytest.skip("redis-server is missing: apt-get install redis-server")
    tiers = [*chat.TIERS, "s3", "redis"]
    demo = run_demo(chat.__file__, *SMALL, "--tiers", ",".join(tiers), "--out", tmp_path)
    assert demo.returncode == 0, demo.stdout
    rows = [line.split() for line in demo.stdout.splitlines()]
    verdicts = {row[0]: row[-2:] for row in rows if row[-2:] == ["equal", "yes"]}
    assert list(verdicts) == ["GPU", "CPU", "NVMe,", "S3,", "Redis,"]
    assert "Traceback" not in demo.stdout
    assert "no server, objects are files" in demo.stdout
    (process,) = re.findall(r"redis: .* of the demo's own, process (\d+)", demo.stdout)
    assert not Path("/proc", process).exists()
    assert (tmp_path / "ttft.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {
        "ttft.png",
        *(f"{source}.json" for source in (RECOMPUTE, *tiers)),
    }


def test_an_s3_endpoint_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is named is used, under a prefix of this run; nothing is said of its secret."""
    given = {"URL": "s3://bucket/x", "ENDPOINT": "http://127.0.0.1:1", "SECRET_ACCESS_KEY": "hidden"}
    for name, value in given.items():
        monkeypatch.setenv(f"TIERED_KV_DEMO_S3_{name}", value)
    with serve_tiers(["s3"], tmp_path) as (tiers, notes):
        settings = S3Settings.model_validate(tiers["s3"])
        assert settings.url.startswith("s3://bucket/x/demo-")
        assert (settings.endpoint, settings.region) == ("http://127.0.0.1:1", None)
        assert settings.url in notes[0]
        assert "hidden" not in notes[0]


@pytest.mark.slow
def test_a_broken_disk_costs_time_and_the_exit_code_and_no_bit(tmp_path: Path) -> None:
    """Blocks that were changed on disk are computed again: equal output, said to be not all loaded, and exit code 1."""
    demo = run_demo("-c", ON_A_BROKEN_DISK, *SMALL, "--tiers", "nvme", "--out", tmp_path)
    assert demo.returncode == 1, demo.stdout
    (row,) = [
        line.split() for line in demo.stdout.splitlines() if line.startswith(" NVMe, new process") and "x" in line
    ]
    assert row[-2:] == ["equal", "no"]
    assert "blocks.corrupted" in demo.stdout


def completion(num_prompt_tokens: int = 3 * CHUNK + 1) -> Completion:
    """Return a request whose KV was all loaded."""
    reused = (num_prompt_tokens - 1) // CHUNK * CHUNK
    return Completion([7] * num_prompt_tokens, reused, [1, 2], torch.tensor([0.1, 0.2, -3e-39]), 0.5, 1.0)


REFERENCE = Run(RECOMPUTE, "cpu", "", [completion(), completion()], [])
LOAD = LoadResult(24, 24, {"nvme": 24}, 24 * 4096, 0.1)
RUN = Run("nvme", "cpu", "direct", [completion(), completion()], [LOAD, LOAD])


def test_a_run_is_the_same_when_read_back(tmp_path: Path) -> None:
    """Between processes nothing of a run is rounded or lost, faults and subnormal logits included."""
    run = replace(RUN, loads=[LOAD, replace(LOAD, faults=(TierFault("nvme", Reason.TIMEOUT, 3),))])
    run.write(tmp_path / "run.json")
    again = Run.read(tmp_path / "run.json")
    assert replace(again, requests=[]) == replace(run, requests=[])
    assert find_faults(replace(again, loads=[LOAD]), REFERENCE, may_pass_on=False) == []


@pytest.mark.parametrize(
    ("spoiled", "fault"),
    [
        (
            replace(RUN, requests=[completion(), replace(completion(), tokens=[1, 3])]),
            "request 2 from nvme: other tokens",
        ),
        (
            replace(RUN, requests=[completion(), replace(completion(), last_logits=torch.tensor([0.1, 0.2, -4e-39]))]),
            "request 2 from nvme: other last logits",
        ),
        (
            replace(RUN, requests=[replace(completion(), num_reused_tokens=CHUNK), completion()]),
            f"request 1 from nvme: {CHUNK} of {3 * CHUNK} tokens loaded",
        ),
        (replace(RUN, loads=[LOAD, replace(LOAD, by_tier={"gpu": 4, "nvme": 20})]), "also loaded from gpu"),
        (replace(RUN, loads=[replace(LOAD, faults=(TierFault("nvme", Reason.TIMEOUT, 3),)), LOAD]), "timeout"),
    ],
)
def test_whatever_is_not_right_is_named(spoiled: Run, fault: str) -> None:
    """A token, one bit of a logit, tokens computed that could be loaded, another tier's blocks, a tier's fault."""
    assert find_faults(RUN, REFERENCE, may_pass_on=False) == []
    (found,) = find_faults(spoiled, REFERENCE, may_pass_on=False)
    assert fault in found


def test_nothing_of_the_table_is_cut_in_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is no terminal has as many columns as a large run needs."""
    monkeypatch.setenv("COLUMNS", "80")
    loads = [replace(LOAD, num_blocks=9_999_999, num_bytes=10**13)]
    slow = replace(RUN, source="redis", loads=loads, requests=[replace(completion(), ttft_s=1234.5)] * 2)
    make_console().print(draw_table([REFERENCE, slow], {"redis": []}))
    shown = capsys.readouterr().out
    assert "\u2026" not in shown
    for word in ("Redis, new process", "9,999,999", "1,234,500 ms", "100000.00", "all loaded", "yes"):
        assert word in shown


def test_only_a_run_with_a_gpu_pool_speaks_of_one() -> None:
    """The note that there is no GPU is about a tier of the run."""
    assert "GPU pool" in describe([REFERENCE, replace(RUN, source="gpu")])
    assert "GPU" not in describe([REFERENCE, replace(RUN, source="s3")])


def test_only_a_run_that_may_share_reads_may_have_shared_blocks() -> None:
    """Blocks that came with another request's read are the tier's where no CPU tier could have kept them."""
    shared = replace(RUN, loads=[LOAD, replace(LOAD, by_tier={"cpu": 4, "nvme": 20})])
    assert find_faults(shared, REFERENCE, may_pass_on=True) == []
    assert find_faults(shared, REFERENCE, may_pass_on=False) == ["the run from nvme also loaded from cpu"]
    assert shared.num_passed_on == 4
