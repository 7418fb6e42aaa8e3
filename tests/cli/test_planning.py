"""``tiered-kv plan``, as a shell would call it, on small traces."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tiered_kv.cli.app import app

TRACE = "synthetic:chat?num_requests=60"


def run(*arguments: object) -> Result:
    """Call the command line."""
    return CliRunner().invoke(app, ["plan", *(str(each) for each in arguments)])


def answer(*arguments: object) -> Any:  # noqa: ANN401 - what JSON is
    """Call it with ``--json`` and return what it says."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_plan_says_what_to_buy_and_checks_it() -> None:
    """Curves of every policy, the best choice of each set of media, and what a replay of the best one found."""
    found = answer(TRACE, "--policy", "mq")
    assert list(found["curves"]) == ["lru", "mq"]
    gains = [each["gain_a_month"] for each in found["choices"]]
    assert gains == sorted(gains, reverse=True)
    assert found["checked_hit_rate"] == pytest.approx(found["choices"][0]["hit_rate"], abs=0.01)
    text = run(TRACE).stdout
    assert "Buy " in text
    assert "foretold hit rate" in text


def test_what_a_plan_rests_on_is_said() -> None:
    """Prices, rates and the speed of prefill: what is to be bought is as right as these are."""
    found = answer(TRACE, "--no-check")
    assert (found["token_bytes"], found["prefill_tokens_a_s"]) == (2**17, 10_000)
    given = ("--medium", "cpu=1.5@9GB", "--engine-price", "3", "--prefill-rate", "7000", "--token-bytes", "64KiB")
    rows = [" ".join(line.split()) for line in run(TRACE, *given, "--no-check").stdout.splitlines()]
    at = rows.index("assumed value")
    assert rows[at + 1 : at + 5] == [
        "keys and values of a token 64 KiB",
        "prefill 7,000 tokens/s",
        "an hour of the engine 3, in the currency of all prices",
        "cpu a GiB 1.5 a month, 9 GB/s, lru",
    ]


def test_what_to_buy_is_said_as_exactly_as_in_the_table(tmp_path: Path) -> None:
    """A small trace needs less than a GiB, and not none."""
    file = tmp_path / "trace.jsonl"
    request = {"input_length": 1536, "output_length": 1, "hash_ids": [1, 2, 3]}
    file.write_text("".join(json.dumps({"timestamp": second * 1000, **request}) + "\n" for second in range(3)))
    assert "Buy 0.2 GiB of cpu" in run(str(file), "--medium", "cpu=1@20GB").stdout


def test_plan_counts_what_tiers_add_to_the_engine_s_own_cache() -> None:
    """So less is foretold, and as much is found."""
    alone, below = answer(TRACE), answer(TRACE, "--engine-cache", 60)
    assert below["checked_hit_rate"] == pytest.approx(below["choices"][0]["hit_rate"], abs=0.01)
    assert below["choices"][0]["hit_rate"] < alone["choices"][0]["hit_rate"]
    assert answer(TRACE, "--engine-cache", 10**30)["choices"][0]["tiers"] == []


def test_media_and_prices_are_given(tmp_path: Path) -> None:
    """By options or a file; options go before it."""
    file = tmp_path / "prices.toml"
    file.write_text('[[media]]\nname = "gpu"\nprice_per_gib_month = 0\nread_bandwidth = "50GB"\n')
    named = [each["name"] for each in answer(TRACE, "--prices", file, "--no-check")["choices"][0]["tiers"]]
    assert named == ["gpu"]
    media = ("--medium", "cpu=0@20GB:mq", "--engine-price", "1")
    found = answer(TRACE, "--prices", file, *media)
    assert [(each["name"], each["policy"]) for each in found["choices"][0]["tiers"]] == [("cpu", "mq")]
    own = ("--medium", "cpu=0@20GB:tiered_kv.catalog.policies:LRUPolicy", "--engine-price", "1")  # as one's own class
    assert answer(TRACE, *own)["choices"][0]["tiers"][0]["policy"] == "tiered_kv.catalog.policies:LRUPolicy"
    assert "No tier is worth its price" in run(TRACE, "--medium", "cpu=1000000@20GB").stdout


def test_bandwidths_are_those_that_were_measured(tmp_path: Path) -> None:
    """By `bench`, of a file or of a pipe: instead of those that are given, and where none is."""
    file, found = tmp_path / "kv.toml", tmp_path / "bench.json"
    file.write_text('[[tiers]]\nmedium = "cpu"\ncapacity = "8MiB"\n')
    bench = ("bench", "--config", str(file), "--block", "64KiB", "--blocks", "4", "--rounds", "1", "--json")
    measured = CliRunner().invoke(app, bench)
    assert measured.exit_code == 0, measured.output
    found.write_text(measured.stdout)
    (rate,) = (round(each["bytes_per_s"]) for each in json.loads(measured.stdout) if each["direction"] == "load")
    media = ("--medium", "cpu=2.5", "--medium", "nvme=0.1@3GB")
    prices = answer(TRACE, "--no-check", "--bench", found, *media)["prices"]
    assert [(each["name"], each["read_bandwidth"]) for each in prices["media"]] == [("cpu", rate), ("nvme", 3 * 10**9)]
    piped = CliRunner().invoke(app, ["plan", TRACE, "--no-check", "--bench", "-", "--json"], input=measured.stdout)
    assert json.loads(piped.stdout)["prices"]["media"][0]["read_bandwidth"] == rate


def test_what_was_not_measured_is_not_taken(tmp_path: Path) -> None:
    """No figures, figures of other tiers, and tiers that gave none."""
    file = tmp_path / "bench.json"
    for said, why in (
        ("{}", "not what `tiered-kv bench --json` prints"),
        ('[{"tier": "s3", "direction": "load", "bytes_per_s": 1e9}]', "has s3, none of which is a --medium"),
        ('[{"tier": "cpu", "direction": "load", "problem": "no room"}]', "tier 'cpu' was not measured: no room"),
        ('[{"tier": "cpu", "direction": "load", "bytes_per_s": 1e999}]', "'cpu' was not measured: inf bytes a second"),
        ('[{"tier": "cpu", "direction": "load", "bytes_per_s": NaN}]', "'cpu' was not measured: nan bytes a second"),
    ):
        file.write_text(said)
        result = run(TRACE, "--bench", file)
        assert result.exit_code == 2
        assert why in result.stderr


def test_what_no_file_of_prices_has_is_said_with_what_it_may_have(tmp_path: Path) -> None:
    """At the top, and in a medium."""
    file = tmp_path / "prices.toml"
    for text, why in (
        ("engine_price = 2", "engine_price: there is no such setting: did you mean 'engine_price_per_hour'?"),
        (
            '[[media]]\nname = "cpu"\nprice = 1\nread_bandwidth = "1GB"',
            "media[0].price: there is no such setting: did you mean 'price_per_gib_month' or 'price_per_tib_written'?",
        ),
        ("media = []", "media: there is none to choose from"),
    ):
        file.write_text(text)
        assert why in run(TRACE, "--prices", file).stderr


def test_what_is_beyond_all_numbers_is_null() -> None:
    """JSON has no infinity: what reads it elsewhere would stop there."""
    best = answer(TRACE, "--no-check", "--engine-price", "1e308")["choices"][0]
    assert best["saved_a_month"] is best["gain_a_month"] is None


def test_a_picture_and_a_page_are_written(tmp_path: Path) -> None:
    """Each where it is asked for."""
    png, html = tmp_path / "plan.png", tmp_path / "plan.html"
    assert run(TRACE, "--png", png, "--html", html).exit_code == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert html.read_text().startswith("<!doctype html>")


def test_without_matplotlib_a_picture_names_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And all else goes without it."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(TRACE, "--no-check").exit_code == 0
    result = run(TRACE, "--png", tmp_path / "plan.png")
    assert result.exit_code == 2
    assert "pip install 'tiered-kv[plan]'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--medium", "cpu"], "write NAME=PRICE@RATE"),
        (["--medium", "cpu=1@fast"], "write NAME=PRICE@RATE"),
        (["--medium", "cpu=1@24Gbit"], "write NAME=PRICE@RATE, the rate in bytes a second, e.g. nvme=0.1@3GB"),
        (["--medium", "nvme=1@1GB", "--medium", "cpu=1@9GB"], "media: tiers go fastest first"),
        (["--medium", "nvme=1@1GB", "--medium", "nvme=1@2GB"], "media: tiers need names of their own"),
        (["--prices", "/no/such/file"], "No such file"),
        (["--policy", "best"], "policy must be one of"),
        (["--token-bytes", "9" * 60], "--token-bytes must be a size"),
        (["--token-bytes", ""], "--token-bytes must be a size"),
        (["--engine-price", "inf"], "engine_price_per_hour: Input should be a finite number"),
        (["--medium", "a=1@1GB"] + ["--medium", "b=1@1GB"] * 4, "media: there may be 4 at most"),
        (["--png", "/no/such/folder/plan.png"], "No such file"),
    ],
)
def test_errors_are_one_line_with_a_remedy(arguments: list[str], why: str) -> None:
    """No traceback, exit code 2."""
    result = run(TRACE, *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("tiered-kv: ")
    assert result.stderr.count("\n") == 1
    assert why in result.stderr
