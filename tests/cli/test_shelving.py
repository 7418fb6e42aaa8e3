"""``tiered-kv inspect``, ``verify`` and ``delete`` of every kind of medium that can be listed."""

import asyncio
import errno
import os
import shutil
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from redis_server import find_binary, run_redis
from tests.support.caches import keep, open_cache
from tests.support.command_line import answer, run
from tests.support.engine import BLOCK_SIZE, PAYLOAD_BYTES, Engine
from tiered_kv import BlockKeys, CPUTier, GPULoadStoreSpec, hash_blocks, salt_digest
from tiered_kv.cli import shelving
from tiered_kv.media.inventory import MOST_FOUND_BYTES, Found, Inventory
from tiered_kv_backends.nvme.directory_upkeep import NVMeInventory

CPU = CPUTier(capacity=64 * PAYLOAD_BYTES)
NUM_BLOCKS = 20


def of(salt: str) -> BlockKeys:
    """Return a prompt of a tenant."""
    return hash_blocks(range(NUM_BLOCKS * BLOCK_SIZE), block_size=BLOCK_SIZE, salt=salt)


class Asked(Inventory):
    """Has nothing, and keeps which salts were asked for."""

    def __init__(self) -> None:
        self.salts: list[str] = []

    @override
    async def found(self, salt: str = "") -> AsyncIterator[list[Found]]:
        self.salts.append(salt)
        yield []

    @override
    async def read(self, found: Found) -> bytes | None:
        return None

    @override
    async def delete(self, found: Sequence[Found]) -> None:
        assert not found


@pytest.fixture(params=["nvme", "shared_fs", "s3", "redis"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Return a tier; its objects are files, or its server runs."""
    if request.param == "s3":
        pytest.importorskip("obstore", reason="obstore is missing: pip install 'tiered-kv[s3]'")
        yield {"medium": "s3", "url": f"file://{tmp_path}/objects", "pack_bytes": 4 * (4096 + PAYLOAD_BYTES)}
    elif request.param == "redis":
        with run_redis(find_binary("redis-server"), tmp_path / "redis") as server:
            yield {"medium": "redis", "url": server.url}
    else:
        yield {"medium": request.param, "path": str(tmp_path / "kv"), "capacity": "16MiB"}


@pytest.fixture
def config(tier: dict[str, Any], tmp_path: Path) -> str:
    """Write its settings, and return the file."""
    file = tmp_path / "kv.toml"
    file.write_text("[[tiers]]\n" + "".join(f'{name} = "{value}"\n' for name, value in tier.items()))
    return str(file)


async def fill(tier: dict[str, Any]) -> None:
    """Store a prompt without a salt, and one with."""
    engine = Engine()
    async with open_cache(CPU, tier, engine=engine) as kv:
        await keep(kv, engine, of(""))
        await keep(kv, engine, of("geheim"))


async def test_what_is_hidden_is_told_to_who_has_the_key(tier: dict[str, Any], tmp_path: Path) -> None:
    """By the tier's settings a tenant is found, and sealed records are verified; by a directory alone neither is."""
    keys, file = tmp_path / "keys", tmp_path / "kv.toml"
    keys.write_text("01" * 32)
    tier = {**tier, "encryption": str(keys)}
    file.write_text("[[tiers]]\n" + "".join(f'{name} = "{value}"\n' for name, value in tier.items()))
    await fill(tier)
    name, config = tier["medium"], str(file)
    shelves = await answer("inspect", name, "--config", config)
    assert sorted(each["tenant"] == "none" for each in shelves) == [False, True]
    assert not [each for each in shelves if salt_digest("geheim").hex().startswith(each["tenant"])]
    report = await answer("verify", name, "--config", config)
    assert (report["num_good"], report["num_sealed"], report["broken"]) == (2 * NUM_BLOCKS, 0, [])
    if "path" in tier:
        alone = await answer("inspect", tier["path"])
        assert "none" not in [each["tenant"] for each in alone]
        report = await answer("verify", tier["path"])
        assert (report["num_good"], report["num_sealed"], report["broken"]) == (0, 2 * NUM_BLOCKS, [])
    done = await answer("delete", name, "--config", config, "--salt", "geheim", "--yes")
    assert done["num_blocks"] == NUM_BLOCKS
    assert (await num_there(tier, "geheim"), await num_there(tier, "")) == (0, NUM_BLOCKS)


async def num_there(tier: dict[str, Any], salt: str) -> int:
    """Count what a new cache finds."""
    async with open_cache(CPU, tier, engine=Engine()) as kv:
        return (await kv.lookup(of(salt))).num_blocks


async def test_what_lies_there_is_listed_verified_and_deleted_by_tenant(tier: dict[str, Any], config: str) -> None:
    """By the name of a tier in the settings: all blocks are there and good, and only the tenant's go."""
    await fill(tier)
    name = tier["medium"]
    shelves = await answer("inspect", name, "--config", config)
    found = [(each["num_blocks"], each["tenant"] == "none") for each in shelves]
    assert found == [
        (NUM_BLOCKS, True),
        (NUM_BLOCKS, False),
    ]
    assert all(each["num_bytes"] >= NUM_BLOCKS * PAYLOAD_BYTES for each in shelves)
    report = await answer("verify", name, "--config", config)
    assert (report["num_good"], report["broken"]) == (2 * NUM_BLOCKS, [])
    tenant = shelves[1]["tenant"][:8]
    would = await answer("delete", name, "--config", config, "--tenant", tenant, "--dry-run")
    assert (would["num_blocks"], would["is_deleted"]) == (NUM_BLOCKS, False)
    assert "geheim" not in str(shelves)
    done = await answer("delete", name, "--config", config, "--tenant", tenant, "--yes")
    assert (done["num_blocks"], done["is_deleted"]) == (NUM_BLOCKS, True)
    assert await num_there(tier, "geheim") == 0
    assert await num_there(tier, "") == NUM_BLOCKS
    rest = await answer("delete", name, "--config", config, "--model", shelves[0]["model"][:12], "--yes")
    assert rest["num_blocks"] == NUM_BLOCKS
    assert await answer("inspect", name, "--config", config) == []


async def test_a_tenant_and_weights_may_be_said_by_their_own_names(tier: dict[str, Any], config: str) -> None:
    """What is said has to be true of a block together."""
    await fill(tier)
    name = tier["medium"]
    none = await answer("delete", name, "--config", config, "--salt", "geheim", "--weights", "other", "--yes")
    assert none["num_blocks"] == 0
    some = await answer("delete", name, "--config", config, "--salt", "geheim", "--yes")
    assert some["num_blocks"] == NUM_BLOCKS
    assert (await answer("delete", name, "--config", config, "--tenant", "none", "--yes"))["num_blocks"] == NUM_BLOCKS


@pytest.mark.parametrize("tier", ["s3"], indirect=True)
async def test_what_is_broken_in_a_pack_is_found_and_deleted(tier: dict[str, Any], config: str, tmp_path: Path) -> None:
    """A pack holds several records: one that is broken is said by its object, which goes."""
    await fill(tier)
    pack = next(each for each in sorted((tmp_path / "objects").rglob("*")) if each.name.endswith(".x4"))
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)
    report = await answer("verify", "s3", "--config", config, code=1)
    assert [each["where"].endswith(pack.name) for each in report["broken"]] == [True]
    assert report["num_good"] == 2 * NUM_BLOCKS - 1
    assert (await answer("verify", "s3", "--config", config, "--fix"))["num_fixed"] == 1
    assert not pack.exists()
    assert (await answer("verify", "s3", "--config", config))["num_good"] == 2 * NUM_BLOCKS - 4


async def test_all_directories_of_a_tier_are_looked_into(tmp_path: Path) -> None:
    """One that is missing is named, and the others are listed and verified; but nothing is deleted without it."""
    paths = [str(tmp_path / name) for name in "ab"]
    config = tmp_path / "kv.toml"
    config.write_text(f'[[tiers]]\nmedium = "nvme"\npath = {paths}\ncapacity = "16MiB"\n')
    there = ("nvme", "--config", str(config))
    await fill({"medium": "nvme", "path": paths, "capacity": "16MiB"})
    assert [each["num_blocks"] for each in await answer("inspect", *there)] == [NUM_BLOCKS, NUM_BLOCKS]
    report = await answer("verify", *there, "--rate", "1GiB")
    assert (report["num_good"], report["missing"]) == (2 * NUM_BLOCKS, [])
    (tmp_path / "b").rename(tmp_path / "away")
    assert sum(each["num_blocks"] for each in await answer("inspect", *there)) == NUM_BLOCKS
    report = await answer("verify", *there)
    assert (report["num_good"], report["missing"]) == (NUM_BLOCKS, paths[1:])
    assert paths[1] in (await run("inspect", *there)).stderr.replace("\n", "")
    refused = await run("delete", *there, "--tenant", "none", "--yes")
    assert refused.exit_code == 2
    assert paths[1] in refused.stderr
    (tmp_path / "away").rename(tmp_path / "b")
    assert (await answer("delete", *there, "--tenant", "none", "--yes"))["num_blocks"] == NUM_BLOCKS


async def test_the_models_of_a_host_lie_below_its_tiers_directory(tmp_path: Path) -> None:
    """Where its server keeps each in one of its own; nothing is deleted while a cache has one open."""
    where, engine = tmp_path / "kv", Engine()
    for name in ("a" * 32, "b" * 32):
        await fill({"medium": "nvme", "path": where / name, "capacity": "16MiB"})
    (where / ("c" * 32)).mkdir()
    for place in (str(where), f"file://{where}?capacity=1GiB"):
        assert sum(each["num_blocks"] for each in await answer("inspect", place)) == 4 * NUM_BLOCKS
        assert (await answer("verify", place))["num_good"] == 4 * NUM_BLOCKS
    delete = ("delete", str(where), "--tenant", "none", "--yes")
    async with open_cache(CPU, {"medium": "nvme", "path": where / ("b" * 32), "capacity": "16MiB"}, engine=engine):
        refused = await run(*delete)
        assert (refused.exit_code, "is open in a cache" in " ".join(refused.stderr.split())) == (2, True)
    assert (await answer(*delete))["num_blocks"] == 2 * NUM_BLOCKS


@pytest.mark.parametrize(("medium", "scheme"), [("nvme", "file"), ("shared_fs", "shared-fs")])
async def test_a_url_need_not_say_how_much_a_tier_holds(medium: str, scheme: str, tmp_path: Path) -> None:
    """Only a cache asks for that. A URL of the settings, which says it, does as well."""
    path = tmp_path / "kv"
    await fill({"medium": medium, "path": str(path), "capacity": "16MiB"})
    for url in (f"{scheme}://{path}", f"{scheme}://{path}?timeout_s=1", f"{scheme}://{path}?capacity=16MiB"):
        assert [each["num_blocks"] for each in await answer("inspect", url)] == [NUM_BLOCKS, NUM_BLOCKS]


@pytest.mark.parametrize("left", [0, 5 * 64, None, -1], ids=["deleted", "cut", "zeros", "flipped"])
async def test_what_a_ledger_cannot_say_any_more_is_seen_by_the_headers(left: int | None, tmp_path: Path) -> None:
    """As a cache would find it: nothing of a tenant that is deleted comes back, and nothing of others goes."""
    tier = {"medium": "nvme", "path": str(tmp_path / "kv"), "capacity": "16MiB"}
    await fill(tier)
    (ledger,) = (tmp_path / "kv").rglob("ledger")
    data = ledger.read_bytes()
    if left == 0:
        ledger.unlink()
    else:
        bad = bytes([data[0], data[1], data[2] ^ 1, *data[3:]])
        ledger.write_bytes(bytes(len(data)) if left is None else bad if left < 0 else data[:left])
    assert [each["num_blocks"] for each in await answer("inspect", tier["path"])] == [NUM_BLOCKS, NUM_BLOCKS]
    assert (await answer("verify", tier["path"]))["num_good"] == 2 * NUM_BLOCKS
    assert (await answer("delete", tier["path"], "--salt", "geheim", "--yes"))["num_blocks"] == NUM_BLOCKS
    assert [each["num_blocks"] for each in await answer("inspect", tier["path"])] == [NUM_BLOCKS]
    assert await num_there(tier, "geheim") == 0
    assert await num_there(tier, "") == NUM_BLOCKS
    assert [each["num_blocks"] for each in await answer("inspect", tier["path"])] == [NUM_BLOCKS]


async def test_what_no_ledger_knows_goes_with_its_tenant(tmp_path: Path) -> None:
    """A header that was left without an entry is no block, but would be one if the ledger were lost."""
    tier = {"medium": "nvme", "path": str(tmp_path / "kv"), "capacity": "16MiB"}
    await fill(tier)
    (ledger,) = (tmp_path / "kv").rglob("ledger")
    ledger.write_bytes(b"TKVEMPTY" * (ledger.stat().st_size // 8))
    assert await answer("inspect", tier["path"]) == []
    assert (await answer("verify", tier["path"]))["num_good"] == 0
    assert (await answer("delete", tier["path"], "--salt", "geheim", "--yes"))["num_blocks"] == 0
    ledger.unlink()
    assert (await num_there(tier, "geheim"), await num_there(tier, "")) == (0, NUM_BLOCKS)


async def test_a_pipe_in_the_place_of_a_file_is_passed_over(tmp_path: Path) -> None:
    """Who opened one would wait for ever for somebody who writes to it."""
    await fill({"medium": "nvme", "path": str(tmp_path / "kv"), "capacity": "16MiB"})
    await fill({"medium": "shared_fs", "path": str(tmp_path / "shared"), "capacity": "16MiB"})
    record = next(path for path in (tmp_path / "shared").rglob("*") if path.is_file() and len(path.name) == 64)
    for path in (next((tmp_path / "kv").rglob("slab")), record):
        path.unlink()
        os.mkfifo(path)
    assert await answer("inspect", str(tmp_path / "kv")) == []
    assert sum(each["num_blocks"] for each in await answer("inspect", str(tmp_path / "shared"))) == 2 * NUM_BLOCKS - 1


@pytest.mark.parametrize("tier", ["shared_fs", "s3"], indirect=True)
async def test_what_is_longer_than_any_record_is_not_read(tier: dict[str, Any], config: str, tmp_path: Path) -> None:
    """Others may write there too: it is told with its length, costs no memory, and goes with ``--fix``."""
    await fill(tier)
    root = tmp_path / ("kv" if tier["medium"] == "shared_fs" else "objects")
    like = next(path for path in root.rglob("*") if path.is_file() and len(path.name.partition(".")[0]) == 64)
    planted = like.with_name("ab" * 32)
    with planted.open("wb") as file:
        file.truncate(1 << 40)
    tracemalloc.start()
    report = await answer("verify", tier["medium"], "--config", config, code=1)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    (broken,) = report["broken"]
    assert planted.name in broken["where"]
    assert str(1 << 40) in broken["why"]
    assert report["num_good"] == 2 * NUM_BLOCKS
    assert most_bytes < MOST_FOUND_BYTES
    assert (await answer("verify", tier["medium"], "--config", config, "--fix"))["num_fixed"] == 1
    assert not planted.exists()


async def test_verifying_keeps_to_a_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as it has read, so much time has passed."""
    slept = list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    await fill({"medium": "shared_fs", "path": str(tmp_path / "kv"), "capacity": "16MiB"})
    async with shelving.inventory_at(shelving.tier_at(str(tmp_path / "kv"), None)) as inventory:
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "sleep", sleep)
            report = await shelving.verify(inventory, fix=False, rate=1)
    assert report.num_good == 2 * NUM_BLOCKS
    num_bytes = 2 * NUM_BLOCKS * (4096 + PAYLOAD_BYTES)
    assert num_bytes - 60 < max(slept) <= num_bytes


async def test_what_a_cache_writes_anew_meanwhile_is_not_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot holds another block by the time that it is read: there is nothing wrong with either."""
    tier, engine, read = {"medium": "nvme", "path": tmp_path, "capacity": "256KiB"}, Engine(), NVMeInventory.read
    async with open_cache(CPU, tier, engine=engine) as kv:
        left = [of(str(seed)) for seed in range(5)]
        for keys in (left.pop(), left.pop()):
            await keep(kv, engine, keys)

        async def late(self: NVMeInventory, found: Found) -> bytes | bytearray | None:
            while left:
                await keep(kv, engine, left.pop())
            return await read(self, found)

        monkeypatch.setattr(NVMeInventory, "read", late)
        async with shelving.inventory_at(shelving.tier_at(str(tmp_path), None)) as inventory:
            report = await shelving.verify(inventory, fix=False)
        assert kv.stats()["nvme"].evicted > 0
        assert report.broken == []


@pytest.mark.parametrize("medium", ["nvme", "shared_fs"])
async def test_nothing_but_a_tiers_own_files_is_deleted(medium: str, tmp_path: Path) -> None:
    """Not what a folder above has, which a cache may have open, nor what is only named like a block."""
    path = tmp_path / "kv"
    tier, engine = {"medium": medium, "path": str(path), "capacity": "16MiB"}, Engine()
    async with open_cache(tier, engine=engine) as kv:
        await keep(kv, engine, of(""))
        for command in ("inspect", "verify", ("verify", "--fix"), ("delete", "--tenant", "none", "--yes")):
            name, *more = (command,) if isinstance(command, str) else command
            refused = await run(name, str(tmp_path), *more)
            assert (refused.exit_code, "no nvme or shared_fs tier has used" in " ".join(refused.stderr.split())) == (
                2,
                True,
            )
        assert (await kv.load(of(""), GPULoadStoreSpec(range(NUM_BLOCKS)))).num_blocks == NUM_BLOCKS
    backup = path / "backup"
    shutil.copytree(path, backup)
    kept = [each for each in backup.rglob("*") if each.is_file()]
    for record in files_in(path)[:1]:
        kept.append(record.with_name(f"{record.name}.mine"))
        kept[-1].write_text("a note")
    assert (await answer("verify", str(path), "--fix"))["broken"] == []
    assert (await answer("delete", str(path), "--tenant", "none", "--yes"))["num_blocks"] == NUM_BLOCKS
    assert all(each.exists() for each in kept)


async def test_a_place_that_cannot_be_read_is_broken_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its header or its payload; with ``--fix`` it goes, as nobody can read it."""
    await fill({"medium": "nvme", "path": str(tmp_path), "capacity": "16MiB"})
    stride, pread = 4096 + PAYLOAD_BYTES, os.pread
    bad = (3 * stride, 5 * stride + 4096)

    def fails(fd: int, num_bytes: int, at: int) -> bytes:
        if any(at <= each < at + num_bytes for each in bad) and Path(f"/proc/self/fd/{fd}").readlink().name == "slab":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, num_bytes, at)

    monkeypatch.setattr(os, "pread", fails)
    report = await answer("verify", str(tmp_path), code=1)
    assert [each["why"] for each in report["broken"]] == ["cannot be read: Input/output error"] * 2
    assert report["num_good"] == 2 * NUM_BLOCKS - 2
    assert (await answer("verify", str(tmp_path), "--fix"))["num_fixed"] == 2
    assert (await answer("verify", str(tmp_path)))["broken"] == []


def files_in(path: Path) -> list[Path]:
    """Return the files of blocks, in the order in which they are listed."""
    return [each for each in sorted(path.rglob("*")) if len(each.name) == 64 and each.is_file()]


@pytest.mark.parametrize("tier", ["shared_fs"], indirect=True)
async def test_what_is_deleted_while_it_is_listed_harms_nothing(
    tier: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that has the tier open deletes files, before or after they are looked at."""
    await fill(tier)
    first, second = files_in(Path(tier["path"]))[:2]
    look, listdir = os.stat, os.listdir

    def looked_at(path: str, **how: Any) -> os.stat_result:  # noqa: ANN401 - as `os.stat` has them
        seen = look(path, **how)
        if path == first.name and first.exists():
            first.unlink()
        return seen

    def listed(folder: int) -> list[str]:
        names = listdir(folder)
        if second.name in names and second.exists():
            second.unlink()
        return names

    monkeypatch.setattr(os, "stat", looked_at)
    monkeypatch.setattr(os, "listdir", listed)
    assert sum(each["num_blocks"] for each in await answer("inspect", tier["path"])) == 2 * NUM_BLOCKS - 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("delete", ".", "--yes"),
        ("delete", ".", "--tenant", "abc", "--yes"),
        ("delete", ".", "--tenant", "zzzzzzzz", "--yes"),
        ("delete", ".", "--tenant", "12345678", "--salt", "x", "--yes"),
        ("delete", ".", "--salt", os.fsdecode(b"\xff"), "--yes"),
        ("verify", ".", "--rate", "fast"),
        ("verify", ".", "--rate", "50Mbit"),
        ("inspect", "nobody"),
        ("inspect", "mooncake://127.0.0.1:1"),
        ("inspect", "redis://127.0.0.1:1"),
    ],
)
async def test_what_cannot_be_done_is_said_in_one_line(arguments: tuple[str, ...]) -> None:
    """Exit code 2; nothing is deleted that was not said clearly."""
    result = await run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("tiered-kv: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(("num_digits", "asked"), [(8, ""), (31, ""), (32, "a" * 32), (64, "a" * 32)])
async def test_a_medium_is_asked_for_one_tenant_s_alone(num_digits: int, asked: str) -> None:
    """Where enough of its digest is known, as it is of a salt: a medium with a folder for each need not list all."""
    inventory = Asked()
    assert await shelving.matching(inventory, shelving.Wanted(tenant="a" * num_digits), lambda _: None) == []
    assert inventory.salts == [asked]


@pytest.mark.parametrize("medium", ["nvme", "shared_fs"])
async def test_a_folder_that_cannot_be_listed_is_not_taken_for_empty(
    medium: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a tenant whose blocks are in it would be said to be deleted. Root may list all: so the system is played."""
    await fill({"medium": medium, "path": str(tmp_path / "kv"), "capacity": "16MiB"})
    closed, open_ = next(each for each in (tmp_path / "kv").glob("*/") if len(each.name) > 8), os.open

    others = tmp_path / "kv" / "lost+found"
    others.mkdir()

    def refuse(path: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if Path(path).name in {closed.name, others.name}:
            raise PermissionError(13, "Permission denied", path)
        return open_(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refuse)
    for command in (
        ["inspect"],
        ["verify"],
        ["delete", "--salt", "geheim", "--yes"],
        ["delete", "--salt", "x", "--dry-run"],
    ):
        result = await run(command[0], str(tmp_path / "kv"), *command[1:])
        assert result.exit_code == 2
        assert result.stderr == f"tiered-kv: {closed}: Permission denied\n"
    closed = others
    assert (await run("inspect", str(tmp_path / "kv"))).exit_code == 0


@pytest.mark.parametrize("tier", ["shared_fs"], indirect=True)
async def test_no_option_that_is_empty_stands_for_all(tier: dict[str, Any], config: str) -> None:
    """As one that a script has filled in with nothing: the blocks of every tenant would go."""
    await fill(tier)
    (first, *_) = await answer("inspect", "shared_fs", "--config", config)
    for option in ("--epoch", "--tenant", "--salt", "--weights"):
        asked = ("delete", "shared_fs", "--config", config, "--model", first["model"], option, "", "--yes")
        assert f"{option} is empty" in (await run(*asked)).stderr
    assert (await answer("inspect", "shared_fs", "--config", config))[0]["num_blocks"] == first["num_blocks"]


@pytest.mark.parametrize("tier", ["shared_fs"], indirect=True)
async def test_nothing_is_deleted_unasked(tier: dict[str, Any], config: str) -> None:
    """Without --yes, and with nobody at a terminal, it says what to add."""
    await fill(tier)
    result = await run("delete", "shared_fs", "--config", config, "--tenant", "none")
    assert result.exit_code == 2
    assert "--yes" in result.stderr
    assert await num_there(tier, "") == NUM_BLOCKS
