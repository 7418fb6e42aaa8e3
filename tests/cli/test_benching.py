"""``tiered-kv bench`` on tiers of every kind of ceiling."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.command_line import answer, run
from tiered_kv.cli import benching
from tiered_kv.cli.app import app
from tiered_kv.cli.benching import Direction, Measured, Move, by_turns


@pytest.mark.slow
async def test_each_tier_is_measured_beside_its_ceiling(tmp_path: Path) -> None:
    """Memory, a local disk, a shared one and a client; nothing is left behind, and what fails is said and exits 1."""
    file = tmp_path / "kv.toml"
    tiers = [
        {"medium": "cpu", "capacity": "1MiB"},
        {"medium": "nvme", "path": str(tmp_path / "disk"), "capacity": "1MiB"},
        {"medium": "shared_fs", "path": str(tmp_path / "shared"), "capacity": "64MiB"},
        {"medium": "s3", "url": f"file://{tmp_path}/objects"},
    ]
    file.write_text(
        "".join("[[tiers]]\n" + "".join(f'{key} = "{value}"\n' for key, value in tier.items()) for tier in tiers)
    )
    few = ("--config", str(file), "--block", "64KiB", "--blocks", "8", "--rounds", "1")
    found = await answer("bench", *few)
    assert [(each["tier"], each["direction"]) for each in found] == [
        (tier["medium"], direction) for tier in tiers for direction in ("store", "load")
    ]
    assert all(each["bytes_per_s"] > 0 and each["ratio"] > 0 and not each["problem"] for each in found)
    assert not (tmp_path / "disk").exists()
    assert not [each for each in (tmp_path / "objects").rglob("*") if each.is_file()]
    assert await answer("inspect", str(tmp_path / "shared")) == []
    file.write_text('[[tiers]]\nmedium = "redis"\nurl = "redis://127.0.0.1:1"\n')
    failed = await answer("bench", *few, code=1)
    assert all("127.0.0.1:1" in each["problem"] for each in failed)
    assert "through a cache" in (await run("bench", *few)).stdout


def test_a_ratio_above_1_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is bare is no bound, and is not called one: below the table it says why."""

    async def measured(*_: object) -> list[Measured]:
        return [Measured("nvme", "load", 114.0, 100.0, 1.14, "a plain file")]

    monkeypatch.setattr(benching, "measure", measured)
    head, row, why = CliRunner().invoke(app, ["bench"]).stdout.splitlines()
    assert head.split()[-4:] == ["bare", "ratio", "which", "is"]
    assert row.split()[-4:] == ["1.14", "a", "plain", "file"]
    assert why.startswith("Above 1: bare files take a call a block")


async def test_few_blocks_are_moved_until_the_time_says_something() -> None:
    """By turns, as often each; one move of 2 ms would say which thread got a processor first."""
    moved: list[str] = []

    def mover(name: str, seconds: float) -> Move:
        async def move(direction: Direction) -> float:
            moved.append(f"{name} {direction}")
            return seconds

        return move

    assert await by_turns(mover("ours", 0.002), mover("bare", 0.001), "load") == pytest.approx((0.002, 0.001))
    assert moved == ["ours load", "bare load"] * 25
    moved.clear()
    assert await by_turns(mover("ours", 0.5), mover("bare", 0.25), "store") == (0.5, 0.25)
    assert moved == ["ours store", "bare store"]


@pytest.mark.slow
async def test_a_tier_of_several_directories_is_measured_beside_them(tmp_path: Path) -> None:
    """Beside as many plain files; of the tier itself nothing is opened, made or pushed out."""
    file = tmp_path / "kv.toml"
    file.write_text(f'[[tiers]]\nmedium = "nvme"\npath = ["{tmp_path}/a/kv", "{tmp_path}/b/kv"]\ncapacity = "1MiB"\n')
    found = await answer("bench", "--config", str(file), "--block", "64KiB", "--blocks", "8", "--rounds", "1")
    assert [each["problem"] for each in found] == ["", ""]
    assert all("2 plain files" in each["ceiling"] for each in found)
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()


@pytest.mark.slow
@pytest.mark.parametrize("block", ["1", "4KiB"])
async def test_few_small_blocks_are_measured(block: str, tmp_path: Path) -> None:
    """A disk tier for them has room for what it keeps about them, too."""
    file = tmp_path / "kv.toml"
    file.write_text(f'[[tiers]]\nmedium = "nvme"\npath = "{tmp_path}/disk"\ncapacity = "1MiB"\n')
    for blocks in ("1", "64"):
        found = await answer("bench", "--config", str(file), "--block", block, "--blocks", blocks, "--rounds", "1")
        assert [each["problem"] for each in found] == ["", ""]


@pytest.mark.parametrize("much", [("--block", "1PiB"), ("--blocks", "999999999999")], ids=str)
async def test_more_than_memory_has_is_refused_before_it_is_taken(much: tuple[str, str], tmp_path: Path) -> None:
    """In one line, with what to give instead."""
    file = tmp_path / "kv.toml"
    file.write_text('[[tiers]]\nmedium = "cpu"\ncapacity = "1MiB"\n')
    result = await run("bench", "--config", str(file), *much)
    assert result.exit_code == 2
    assert "of host memory are wanted, but" in result.stderr
    assert "give a smaller --block, or fewer --blocks" in result.stderr


async def test_why_a_tier_did_not_take_all_is_said(tmp_path: Path) -> None:
    """Such as by a limit of its own, of which `doctor`, that is named otherwise, finds nothing."""
    file = tmp_path / "kv.toml"
    limit = 'max_write_bytes_per_day = "1KiB"'
    file.write_text(f'[[tiers]]\nmedium = "nvme"\npath = "{tmp_path / "kv"}"\ncapacity = "64MiB"\n{limit}\n')
    found = await answer("bench", "--config", str(file), "--block", "32KiB", "--blocks", "4", code=1)
    assert {each["problem"] for each in found} == {"store moved 0 of 4 blocks: held back"}


async def test_a_cache_has_the_limits_that_are_set(tmp_path: Path) -> None:
    """As the cache would that is to be: it would not open with these blocks."""
    file = tmp_path / "kv.toml"
    file.write_text('[[tiers]]\nmedium = "cpu"\ncapacity = "1MiB"\n[limits]\nwindow = "16KiB"\n')
    found = await answer("bench", "--config", str(file), "--block", "32KiB", "--blocks", "4", code=1)
    assert len(found) == 2
    assert all("window" in each["problem"] for each in found)


@pytest.mark.parametrize(
    ("tier", "blocks"),
    [('medium = "memory"', "64"), ('medium = "memory"', "1"), ('medium = "shared_fs"\npath = "{}"', "64")],
    ids=["all", "one", "shared"],
)
async def test_more_than_a_tier_holds_is_refused_before_it_is_moved(tier: str, blocks: str, tmp_path: Path) -> None:
    """Of a medium that evicts for itself, with the numbers and what to give instead; the tier is not at fault."""
    file, block = tmp_path / "kv.toml", "2MiB" if blocks == "1" else "32KiB"
    file.write_text(f'[[tiers]]\n{tier.format(tmp_path / "shared")}\ncapacity = "1MiB"\n')
    found = await answer("bench", "--config", str(file), "--block", block, "--blocks", blocks, code=1)
    assert [each["direction"] for each in found] == ["store", "load"]
    for each in found:
        assert f"its capacity of 1048576 bytes is below {blocks} blocks of " in each["problem"]
        assert "give a smaller --block, or fewer --blocks" in each["problem"]
    assert not (tmp_path / "shared").exists()
