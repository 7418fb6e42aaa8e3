"""``tiered-kv replay``, as a shell would call it, on small traces."""

import gzip
import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tiered_kv.cli import replaying
from tiered_kv.cli.app import app
from tiered_kv.traces import chat, write_trace


def run(*arguments: object) -> Result:
    """Call the command line."""
    return CliRunner().invoke(app, [str(each) for each in arguments])


def answer(*arguments: object) -> Any:  # noqa: ANN401 - what JSON is
    """Call it with ``--json`` and return what it says."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Write a trace of conversations."""
    path = tmp_path / "trace.jsonl.gz"
    write_trace(path, chat(num_requests=300))
    return path


def test_replay_shows_what_each_tier_would_do(trace: Path) -> None:
    """A table of the tiers, or one line of JSON that adds up."""
    tiers = ("--tier", "cpu=8GiB", "--tier", "nvme=64GiB:arc", "--tier", "s3")
    found = answer("replay", trace, *tiers)
    assert [each["name"] for each in found["tiers"]] == ["cpu", "nvme", "s3"]
    assert found["hit_rate"] == pytest.approx(sum(each["hit_rate"] for each in found["tiers"]))
    assert 0 < found["saved_tokens"] < found["input_tokens"]
    text = run("replay", trace, *tiers).stdout
    assert "hit rate" in text
    assert "300 requests" in text
    assert f"{found['loads']:,} requests found something in a tier, " in text


def test_a_guessed_size_is_told(trace: Path) -> None:
    """No trace says what a token takes, and every figure goes by it."""
    for command in (("replay", trace, "--tier", "cpu=8GiB"), ("plan", trace)):
        assert "taken to have 128KiB: --token-bytes says" in run(*command).stderr
        assert "--token-bytes" not in run(*command, "--token-bytes", "128KiB").stderr


def test_a_tier_that_is_left_out_is_told(trace: Path) -> None:
    """One that holds no block of the trace: its name is not in the table."""
    tiers = ("--tier", "cpu=64MiB", "--tier", "nvme=1KiB")
    result = run("replay", trace, *tiers, "--token-bytes", "1KiB", "--json")
    assert [each["name"] for each in json.loads(result.stdout)["tiers"]] == ["cpu"]
    assert result.stderr.strip() == "nvme was left out: it holds no block of 524,288 bytes, as this trace has"


def test_whoever_waits_is_told_how_far_it_is(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipe by lines on stderr, one every ten seconds; the answer stays alone on stdout."""
    monkeypatch.setattr(replaying, "_TELL_EVERY_S", 0.0)
    result = run("replay", trace, "--tier", "cpu=8GiB")
    assert "replaying: 300 of 300 in" in result.stderr
    assert "replaying" not in result.stdout
    assert "lru: 300 of 300 in" in run("plan", trace).stderr
    assert answer("replay", trace, "--tier", "cpu=8GiB")["num_requests"] == 300


def test_a_terminal_shows_a_bar(trace: Path) -> None:
    """Which is gone when it is done."""
    program = "import sys; sys.argv[0] = 'tiered-kv'; from tiered_kv.cli import main; main()"
    command = [sys.executable, "-c", program, "replay", str(trace), "--tier", "cpu=8GiB"]
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    ) as process:
        os.close(theirs)
        shown = bytearray()
        with suppress(OSError):  # the other end is closed
            while part := os.read(ours, 4096):
                shown += part
        table = process.communicate()[0].decode()
    os.close(ours)
    assert "replaying" in shown.decode()
    assert "━" in shown.decode()
    assert "300 requests" in table


def test_a_real_cache_serves_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what is imagined of as many blocks: the same hits; small blocks stand for large ones. Nothing is left."""
    monkeypatch.chdir(tmp_path)
    trace, tiers = "synthetic:chat?num_requests=30", ("--tier", "cpu=2GiB", "--tier", "nvme=8GiB")
    # What lhd keeps depends on the moments at which uses are noted: of LRU the hits are the same to the block.
    options = ("--policy", "lru", "--real", "--real-token-bytes", "8", "--speed", "1000")
    found = answer("replay", trace, *tiers, *options)
    of_tiers = [
        [(each["name"], each["capacity_blocks"], each["hits"], each["evicted_blocks"]) for each in report["tiers"]]
        for report in (found, found["real"])
    ]
    assert of_tiers[0] == of_tiers[1]
    assert found["hit_rate"] == found["real"]["hit_rate"] > 0
    assert (found["block_bytes"], found["real"]["block_bytes"]) == (2**26, 4096)
    assert "0 blocks came back wrong" in run("replay", trace, *tiers, *options).stdout
    assert list(tmp_path.iterdir()) == []


def test_a_real_cache_is_that_of_the_settings(tmp_path: Path) -> None:
    """Their tiers and limits, in folders beside theirs."""
    file = tmp_path / "kv.toml"
    file.write_text(
        '[[tiers]]\nmedium = "cpu"\ncapacity = "80KiB"\n[[tiers]]\nmedium = "nvme"\npath = "kv"\ncapacity = "1MiB"\n'
        "[limits]\npromote = false\n"
    )
    found = answer("replay", "synthetic:chat?num_requests=20", "--config", file, "--token-bytes", "8", "--real")
    assert found["real"]["tiers"][0]["promoted_blocks"] == 0
    assert found["hit_rate"] == found["real"]["hit_rate"]


def test_an_engine_s_own_cache_is_imagined_above_the_tiers(trace: Path) -> None:
    """And when it stores: what that copies is said."""
    arguments = ("replay", trace, "--tier", "cpu=8GiB", "--engine-cache", 100)
    found = answer(*arguments)
    assert (found["engine"]["num_blocks"], found["engine"]["stores"]) == (100, "evicted")
    assert found["hit_rate"] == pytest.approx(found["engine"]["hit_rate"] + found["tiers"][0]["hit_rate"])
    ahead = answer(*arguments, "--engine-ahead", 25)
    assert ahead["engine"]["hit_rate"] == found["engine"]["hit_rate"]
    assert ahead["engine"]["copied_blocks"] > found["engine"]["copied_blocks"]
    most = [answer(*arguments[:-1], size)["engine"] for size in (10**5, 10**30)]  # more than all that there are
    assert most[1] == most[0] | {"num_blocks": 10**30}
    text = run(*arguments, "--store-when", "computed").stdout
    assert "the engine's own cache of 100 blocks: hit rate" in text
    assert "stored when computed" in text


def test_replay_takes_settings_and_synthetic_traces(tmp_path: Path) -> None:
    """A file of settings says which tiers; a name makes up requests."""
    file = tmp_path / "kv.toml"
    file.write_text('[[tiers]]\nmedium = "cpu"\ncapacity = "8GiB"\npolicy = "arc"\n')
    found = answer("replay", "synthetic:batches?num_requests=50", "--config", file)
    assert (found["trace"], [each["name"] for each in found["tiers"]]) == ("synthetic:batches", ["cpu"])


def test_a_policy_of_ones_own_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its path, in settings as on the command line: beside LRU a class that derives from it is the same."""
    (tmp_path / "replayed_policy.py").write_text(
        "from tiered_kv.catalog.policies import LRUPolicy\nclass Mine(LRUPolicy): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    path, file = "replayed_policy:Mine", tmp_path / "kv.toml"
    file.write_text(f'[[tiers]]\nmedium = "cpu"\ncapacity = "4GiB"\npolicy = "{path}"\n')
    replays = ("replay", "synthetic:chat?num_requests=60")
    lru = answer(*replays, "--tier", "cpu=4GiB:lru")["tiers"]
    assert lru[0]["evicted_blocks"] > 0
    for given in (("--tier", f"cpu=4GiB:{path}"), ("--tier", "cpu=4GiB", "--policy", path), ("--config", file)):
        found = answer(*replays, *given)["tiers"]
        assert found == [lru[0] | {"policy": path}]
    found = answer(*replays, "--tier", f"cpu=4GiB:{path}", "--real", "--real-token-bytes", 8)
    assert (found["real"]["wrong_blocks"], found["real"]["tiers"][0]["policy"]) == (0, path)


def test_bad_lines_are_told_and_left_out(trace: Path, tmp_path: Path) -> None:
    """By file and number, on stderr; the first five of them."""
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(gzip.decompress(trace.read_bytes()) + b"{}\n" * 9)
    result = run("replay", bad, "--tier", "cpu=8GiB", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["num_requests"] == 300
    assert f"{bad}, line 301: timestamp must be" in result.stderr
    assert "line 305" in result.stderr
    assert "line 306" not in result.stderr
    assert "9 lines are no requests" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["replay", "/no/such/file", "--tier", "cpu=1GiB"], "No such file"),
        (["replay", "synthetic:none", "--tier", "cpu=1GiB"], "timers, twice, zipf"),
        (["replay", "synthetic:chat?num_requests=9", "--tier", "cpu=much"], "write NAME=SIZE"),
        (
            ["replay", "synthetic:chat?num_requests=9", "--tier", "nvme=1GiB", "--tier", "cpu=1GiB"],
            "tiers go fastest first: gpu, cpu, then storage; got nvme, cpu",
        ),
        (["replay", "synthetic:chat?num_requests=9", "--tier", "cpu=8Gb"], "write NAME=SIZE, the size in bytes, e.g. "),
        (
            ["replay", "synthetic:chat?num_requests=9", "--tier", "cpu=1GiB", "--token-bytes", "0"],
            "--token-bytes must be a size",
        ),
        (
            ["replay", "synthetic:chat?num_requests=9", "--tier", "cpu=1GiB", "--token-bytes", "1Mbit"],
            "--token-bytes must be a size in bytes, such as 128KiB, got '1Mbit'",
        ),
        (
            ["replay", "synthetic:chat?num_requests=9", "--tier", "cpu=1GiB", "--real", "--real-token-bytes", ""],
            "--real-token-bytes must be a size",
        ),
        (["replay", "synthetic:chat?num_requests=9", "--tier", "cpu=1KiB"], "no tier holds a block"),
        (["replay", "synthetic:chat?num_requests=9", "--tier", "cpu=1GiB:best"], "policy must be one of"),
        (["replay", "/no/such/file", "--policy", "lru"], "--policy is for tiers of --tier"),
        (["replay", "/no/such/file", "--tier", "cpu=1GiB", "--config", "kv.toml"], "both say which tiers"),
        (["replay", "/no/such/file", "--tier", "cpu=1GiB", "--engine-ahead", "9"], "is for --engine-cache"),
        (["replay", "/no/such/file", "--tier", "cpu=1GiB", "--store-when", "evicted"], "is for --engine-cache"),
        (["replay", "/no/such/file", "--tier", "cpu=1GiB", "--real-token-bytes", "64"], "is for --real"),
        (["replay", "/no/such/file", "--tier", "cpu=1GiB", "--speed", "9"], "--speed is for --real"),
        (["replay", "/no/such/file", "--tier", "cpu=1GiB", "--real", "--hints", "right"], "leave out --real"),
        (["replay", "/no/such/file", "--tier", "cpu=1GiB", "--real", "--hints", "all"], "--hints must be one of"),
        (
            ["replay", "synthetic:chat?num_requests=9", "--tier", "cpu=1GiB", "--store-when", "never"],
            "--store-when must be one of computed, evicted, auto",
        ),
        (
            ["replay", "synthetic:chat?num_requests=9", "--tier", "cpu=1GiB", "--real", "--real-token-bytes", "1PiB"],
            "of host memory are wanted, but",
        ),
        (
            ["replay", "synthetic:chat?num_requests=9", "--tier", "cpu=1GiB", "--engine-cache", "9", "--real"],
            "leave out --real",
        ),
    ],
)
def test_errors_are_one_line_with_a_remedy(arguments: list[str], why: str) -> None:
    """No traceback, exit code 2."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("tiered-kv: ")
    assert result.stderr.count("\n") == 1
    assert why in result.stderr
