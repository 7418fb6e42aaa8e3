"""Shares of models in a server's tiers: fixed, lent and taken back, and what is reclaimed of those that nobody uses."""

import asyncio
import errno
import gc
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import numpy as np
import pytest

from tests.support.any_layout import BLOCK_SIZE, LIMITS, SMALL, STRIDE, AnyEngine, content, cpu, nvme, open_any, prompt
from tests.support.caches import Recorder, a_while, until
from tests.support.descriptors import descriptors_left, slabs
from tests.support.nvme_tier import disk_usage
from tests.support.serving import attached, models_in, serving
from tiered_kv import (
    BackendUnavailableError,
    CacheLimits,
    ConfigurationError,
    KVGroup,
    KVLayout,
    ModelIdentity,
    Shard,
    TieredKV,
    TieredKVServer,
    TieredKVSettings,
)
from tiered_kv.host.shares import DIRECTORY_DIGITS, Share, Shares
from tiered_kv.system import Files
from tiered_kv.testing.scripted import ScriptedDevice
from tiered_kv_backends.nvme import NVMeBackend

ONE, TWO = ModelIdentity("one", weights="w0"), ModelIdentity("two", weights="w0")
WIDE = KVLayout((KVGroup(2, 16, 128, "bfloat16", BLOCK_SIZE),))
"""A block takes as much as 16 of the small layout."""
WIDE_LIMITS = CacheLimits(window=16 * STRIDE, bounce=64 * STRIDE)


async def test_bytes_are_fixed_for_a_model(tmp_path: Path) -> None:
    """Its share is that, whoever else comes; weights divide the rest."""
    host = {"fixed": {"one": {"cpu": 8 * STRIDE}}, "weights": {"two": 3.0}}
    three = ModelIdentity("three", weights="w0")
    with serving(tmp_path, cpu(32), host=host) as server:
        async with attached(server, model=ONE) as one, attached(server, model=TWO) as two:
            assert (one.stats()["cpu"].num_slots, two.stats()["cpu"].num_slots) == (8, 24)
            async with attached(server, model=three) as last:
                assert [kv.stats()["cpu"].num_slots for kv in (one, two, last)] == [8, 18, 6]
        assert {share["model"]: share["given"]["cpu"] for share in server.health()["shares"]} == {
            "one": 8 * STRIDE, "two": 18 * STRIDE, "three": 6 * STRIDE
        }  # fmt: skip


class LeavingShare(Share):
    """One whose cache is gone as soon as somebody has looked for it, as where another thread closes it just then."""

    def __getattribute__(self, name: str) -> object:
        value: object = super().__getattribute__(name)
        if name == "cache":
            self.cache = None
        return value


async def test_a_share_may_be_closed_while_it_is_asked_how_it_is() -> None:
    """A server answers any thread, whatever its loop does meanwhile."""
    async with open_any(AnyEngine(), cpu(8)) as kv:
        facts = LeavingShare("one", "one", cache=kv).facts()
        assert (facts["transfers"], [tier["tier"] for tier in facts["tiers"]]) == (0, ["cpu"])


@pytest.mark.parametrize("fixed", [{"cpu": 100 * STRIDE}, {"disk": 1}])
async def test_what_cannot_be_fixed_is_said_at_the_start(fixed: dict[str, int], tmp_path: Path) -> None:
    """More than there is, or of a tier that is not there."""
    with pytest.raises(ConfigurationError, match=r"host\.fixed"):
        async with TieredKVServer({"tiers": [cpu(32)], "host": {"socket": tmp_path / "s", "fixed": {"m": fixed}}}):
            pass


@pytest.mark.parametrize(
    ("size", "why"), [("10%", "'10%' is no size"), ("8Gb", "is in bits"), (True, "True is no size")]
)
def test_what_is_fixed_is_a_size(size: object, why: str) -> None:
    """As everywhere else: a part of a tier would be a few bytes, and nobody would be told."""
    with pytest.raises(ConfigurationError, match=why):
        TieredKVSettings(host={"fixed": {"m": {"cpu": size}}})


async def test_memory_that_the_machine_can_never_give_is_refused_at_the_start(tmp_path: Path) -> None:
    """Else a server says that it is ready, and refuses every client."""
    for wanted in ({"tiers": [cpu(1 << 40)]}, {"tiers": [cpu(32)], "limits": {"swap_space": "1EiB"}}):
        with pytest.raises(ConfigurationError, match=r"host memory are wanted, but this machine has .* GiB"):
            async with TieredKVServer({**wanted, "host": {"socket": tmp_path / "s"}}):
                pass


def test_a_tier_that_can_have_no_directory_is_refused_at_the_start(tmp_path: Path) -> None:
    """Before anybody attaches; of several disks, only if that is so of all. Nothing is made where it can have one."""
    (tmp_path / "file").touch()
    bad, good = tmp_path / "file" / "kv", tmp_path / "new" / "kv"
    for paths in ((bad,), (bad, tmp_path / "file" / "more")):
        refused = pytest.raises(ConfigurationError, match=rf"tier 'nvme': no directory can be made at {bad}: Not a dir")
        with refused, serving(tmp_path, cpu(32), {**nvme(bad), "path": paths}):
            pass
    with serving(tmp_path, cpu(32), {**nvme(bad), "path": (bad, good)}):
        assert {each.name for each in tmp_path.iterdir()} == {"file", "kv.sock", "kv.sock.lock"}


async def test_a_directory_of_a_cache_that_is_no_servers_is_refused_at_the_start(tmp_path: Path) -> None:
    """What lies there would count nowhere, and stay; nor does such a cache take a server's. Each goes on as it was."""
    engine, keys, disk, served = AnyEngine(), prompt(8), tmp_path / "own", tmp_path / "served"
    async with open_any(engine, cpu(32), nvme(disk)) as kv:
        await kv.store(keys, engine.fill(keys, range(8)))
    (link := tmp_path / "link").symlink_to(disk)
    for path in (disk, link):
        why = f"tier 'nvme': {path} has the blocks of a cache that is no server's"
        with pytest.raises(ConfigurationError, match=why), serving(tmp_path, cpu(32), nvme(path)):
            pass
    async with open_any(engine, cpu(32), nvme(disk)) as kv:
        assert (await kv.lookup(keys)).num_blocks == 8
    for num_found in (0, 8):
        with serving(tmp_path, cpu(32), nvme(served)) as server:
            async with attached(server, engine, model=ONE) as kv:
                assert (await kv.lookup(keys)).num_blocks == num_found
                await (await kv.store(keys, engine.fill(keys, range(8)))).settled()
        with pytest.raises(ConfigurationError, match=f"{served} is above {served}/[0-9a-f]*, which is an NVMe tier's"):
            async with open_any(engine, cpu(32), nvme(served)):
                pass


def test_a_disk_that_the_filesystem_can_never_hold_is_refused_at_the_start(tmp_path: Path) -> None:
    """Else a server says that it is ready, and refuses every client."""
    why = rf"tier 'nvme': capacity \(1.0 EiB\) is more than the filesystem of {tmp_path}/kv has \([0-9.]+ [GT]iB\)"
    with (
        pytest.raises(ConfigurationError, match=why),
        serving(tmp_path, cpu(32), {**nvme(tmp_path / "kv"), "capacity": 1 << 60}),
    ):
        pass
    assert not (tmp_path / "kv").exists()


async def test_a_model_without_room_changes_nothing_for_others(tmp_path: Path) -> None:
    """It is refused before anything shrinks: not a block of the others goes."""
    engine, keys = AnyEngine(), prompt(32)
    with serving(tmp_path, cpu(32), host={"weights": {"two": 1e-3}, "models": 2}) as server:
        async with attached(server, engine, model=ONE) as kv:
            await kv.store(keys, engine.fill(keys, range(32)))
            with pytest.raises(ConfigurationError, match="too few for a block"):
                async with attached(server, model=TWO):
                    pass
            assert (await kv.lookup(keys)).num_blocks == 32
            assert [share["model"] for share in server.health()["shares"]] == ["one"]


@pytest.mark.parametrize(("num_blocks", "disk"), [(24, "4MiB"), (128, "400KiB")])
async def test_a_model_that_leaves_another_no_room_is_refused(num_blocks: int, disk: str, tmp_path: Path) -> None:
    """In memory or on a disk, which takes more than its blocks: the other keeps all, and no tier takes too much."""
    engine, keys = AnyEngine(WIDE, num_blocks=4), prompt(1)
    tiers = cpu(num_blocks), nvme(tmp_path / "disk", disk)
    with serving(tmp_path, *tiers, limits=WIDE_LIMITS, host={"weights": {"two": 3.0}}) as server:
        async with attached(server, engine, model=ONE) as kv:
            await (await kv.store(keys, engine.fill(keys, range(1)))).settled()
            with pytest.raises(ConfigurationError, match=r"'one' would have .* too few for a block"):
                async with attached(server, model=TWO):
                    pass
            assert {each.tier: each.ready for each in kv.stats().tiers} == {"cpu": 1, "nvme": 1}
            assert [share["model"] for share in server.health()["shares"]] == ["one"]


async def test_a_model_that_leaves_no_room_to_one_that_is_being_opened_is_refused(tmp_path: Path) -> None:
    """Two come at once: the first has what was its own as it came."""
    settings = TieredKVSettings(tiers=[cpu(24)], limits=WIDE_LIMITS, host={"socket": tmp_path / "kv.sock"})
    shares = Shares(settings, Recorder())
    opening = asyncio.ensure_future(shares.join(ONE, WIDE, (Shard(),)))
    await until(lambda: bool(list(shares)))
    assert [each.cache for each in shares] == [None]
    with pytest.raises(ConfigurationError, match=r"'one' would have .* too few for a block"):
        await shares.join(TWO, SMALL, (Shard(),))
    share, _ = await opening
    assert share.given == {"cpu": 24 * STRIDE}
    await shares.aclose()


async def test_models_are_bounded(tmp_path: Path) -> None:
    """Each model takes from the others; so one that attaches under ever new names is stopped."""
    with serving(tmp_path, cpu(32), host={"models": 2}) as server:
        async with attached(server, model=ONE), attached(server, model=TWO):
            with pytest.raises(ConfigurationError, match="2 models"):
                async with attached(server, model=ModelIdentity("three", weights="w0")):
                    pass
            async with attached(server, model=ONE):
                pass


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
async def test_an_idle_share_is_lent_and_taken_back(tier: str, tmp_path: Path) -> None:
    """A model whose share is full gets what another, without clients, does not use, until that stores again."""
    one, two = AnyEngine(num_blocks=300), AnyEngine(num_blocks=300)
    divided = cpu(64) if tier == "cpu" else nvme(tmp_path / "disk", 3 << 20)
    with serving(tmp_path, *([divided] if tier == "cpu" else [cpu(600), divided])) as server:
        async with attached(server, two, model=TWO) as lender:
            await lender.store(prompt(2), two.fill(prompt(2), range(2)))
        async with attached(server, one, model=ONE) as kv:
            half = kv.stats()[tier].num_slots
            keys, others = prompt(half * 5 // 4), prompt(half * 5 // 4, seed=7)

            async def grown() -> bool:
                await kv.store(keys, one.fill(keys, range(len(keys))))
                return kv.stats()[tier].num_slots > len(keys)

            await until_true(grown)
            await kv.evict(keys)
            await (await kv.store(keys, one.fill(keys, range(len(keys))))).settled()
            assert kv.stats()[tier].ready == len(keys)
            async with attached(server, two, model=TWO) as lender:
                assert (await lender.lookup(prompt(2))).num_blocks == 2

                async def back() -> bool:
                    await lender.store(others, two.fill(others, range(len(others))))
                    return lender.stats()[tier].num_slots == kv.stats()[tier].num_slots == half

                await until_true(back)
            assert sum(share["given"][tier] for share in server.health()["shares"]) <= divided["capacity"]


@pytest.mark.parametrize("who", ["nobody", "client", "worker"])
async def test_memory_that_a_gpu_may_have_page_locked_is_not_given_back(who: str, tmp_path: Path) -> None:
    """It would copy to and from pages that are none of the slab's any more, and others' bytes be served.

    Once that client has left, what its model does not have is given back, as that of others is at once.
    """
    with serving(tmp_path, cpu(32)) as server:
        async with attached(server, model=ONE) as kv:
            there = kv._connection.there  # noqa: SLF001 - the memory itself
            assert there is not None
            (slab,) = there.slabs.values()
            async with attached(server, model=ONE, device=ScriptedDevice() if who == "client" else "cpu") as other:
                if who == "worker":
                    fd, _ = other.planner().slabs()[0].descriptor(page_locks=True)
                    os.close(fd)
                slab.rows[:] = 90
                num_bytes = os.fstat(slab.fd).st_blocks
                async with attached(server, model=TWO):
                    assert kv.stats()["cpu"].num_slots == 16
                    is_same = bool((slab.rows == 90).all())
                    assert is_same == (who != "nobody")
            if is_same:
                await until(lambda: os.fstat(slab.fd).st_blocks < num_bytes)


async def test_a_model_whose_blocks_are_all_pinned_has_its_share_back(tmp_path: Path) -> None:
    """It has room for nothing as long as its share is lent: that it wants to store is what counts."""
    one, two, few, many, others = AnyEngine(), AnyEngine(), prompt(3), prompt(40), prompt(8, seed=7)
    with serving(tmp_path, cpu(48), host={"lend_after_s": 0.2}) as server:
        async with attached(server, two, model=TWO) as lender, attached(server, one, model=ONE) as kv:
            await lender.store(few, two.fill(few, range(3)))
            assert lender.pin(few, ttl_s=600.0).num_blocks == 3

            async def lent() -> bool:
                await kv.store(many, one.fill(many, range(40)))
                return lender.stats()["cpu"].num_slots == 3

            async def back() -> bool:
                await lender.store(others, two.fill(others, range(8)))
                return lender.stats()["cpu"].num_slots == 24

            await until_true(lent)
            await until_true(back)


async def test_who_attaches_waits_for_no_lease_of_others(tmp_path: Path) -> None:
    """One client leases the whole CPU tier: others attach for open models and for new ones, and are served."""
    engine, other, keys, three = AnyEngine(), AnyEngine(), prompt(32), ModelIdentity("three", weights="w0")
    limits = CacheLimits(**{**dict(LIMITS), "store_timeout_s": 3600.0})
    with serving(tmp_path, cpu(32), limits=limits) as server:
        async with attached(server, engine, model=ONE) as kv:
            await kv.store(keys, engine.fill(keys, range(32)))
            async with kv.lease(keys) as lease:
                assert lease.num_blocks == 32
                opening = [asyncio.ensure_future(store_once(server, model)) for model in (TWO, three)]
                await until(lambda: len(server.health()["shares"]) == 3)
                async with attached(server, other, model=ONE) as neighbour:
                    loaded = await neighbour.load(keys, other.spec(range(32)))
                    assert 0 < loaded.num_blocks == other.count_right(keys, range(32))
                assert await asyncio.gather(*opening) == [4, 4]
                num_bytes = SMALL.groups[0].payload_bytes
                assert [bytes(each) for each in lease.views] == [content(key, num_bytes) for key in keys]
            await until(lambda: sum(each["given"]["cpu"] for each in server.health()["shares"]) <= 32 * STRIDE)


async def store_once(server: TieredKVServer, model: ModelIdentity) -> int:
    """Attach, store, and say how many blocks are there."""
    engine, keys = AnyEngine(), prompt(4)
    async with attached(server, engine, model=model) as kv:
        await kv.store(keys, engine.fill(keys, range(4)))
        return (await kv.lookup(keys)).num_blocks


async def test_a_share_that_cannot_be_smaller_is_not_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a tier in which its part would hold no block an idle model lends nothing, and nobody is warned."""
    engine, keys, tiers = AnyEngine(), prompt(60), [cpu(128), nvme(tmp_path / "disk", "480KiB")]
    settings = TieredKVSettings(tiers=tiers, limits=LIMITS, host={"socket": tmp_path / "kv.sock"})
    shares = Shares(settings, Recorder())
    one, _ = await shares.join(ONE, SMALL, (Shard(),))
    idle, _ = await shares.join(TWO, SMALL, (Shard(),))
    shares.leave(idle)
    before = dict(idle.given)
    assert one.cache is not None
    one.cache.register_kv_caches(engine.caches[0])
    for _ in range(3):
        await one.cache.evict(keys)
        await (await one.cache.store(keys, engine.fill(keys, range(60)))).settled()
        await shares.lend(0.0)
    assert idle.given["nvme"] == before["nvme"]
    assert "host.resize_failed" not in caplog.text
    await shares.aclose()


async def until_true(condition: Callable[[], object]) -> None:
    """Do something again and again until it says yes."""
    with anyio.fail_after(60):
        while not await condition():  # type: ignore[misc]  # a coroutine function's
            await a_while()


async def test_what_nobody_uses_is_reclaimed_and_others_grow(tmp_path: Path) -> None:
    """Its blocks and its directory go, on a disk too; who comes back finds nothing, and works."""
    engine, keys, disk = AnyEngine(), prompt(8), tmp_path / "disk"
    with serving(tmp_path, cpu(32), nvme(disk), host={"reclaim_after_s": 0.3}) as server:
        async with attached(server, engine, model=ONE) as stays:
            await (await stays.store(keys, engine.fill(keys, range(8)))).settled()
            async with attached(server, engine, model=TWO) as kv:
                await (await kv.store(keys, engine.fill(keys, range(8)))).settled()
                assert stays.stats()["cpu"].num_slots == 16
                assert len(models_in(disk)) == 2
            await until(lambda: len(server.health()["shares"]) == 1)
            await until(lambda: stays.stats()["cpu"].num_slots == 32)
            assert len(models_in(disk)) == 1
            assert (await stays.lookup(keys)).num_blocks == 8
            async with attached(server, engine, model=TWO) as again:
                assert (await again.lookup(keys)).num_blocks == 0
                assert (await again.store(keys, engine.fill(keys, range(8)))).num_stored == 8


async def test_the_memory_of_what_is_reclaimed_goes_back(tmp_path: Path) -> None:
    """However many models come and go, and whenever garbage is collected: the server has the memory of those it has."""
    engine, keys = AnyEngine(), prompt(8)
    gc.disable()
    try:
        before = slabs()
        with serving(tmp_path, cpu(32), nvme(tmp_path / "disk"), host={"reclaim_after_s": 0.1}) as server:
            for number in range(5):
                model = ModelIdentity(f"model {number}", weights="w0")
                async with attached(server, engine, model=model) as kv:
                    await (await kv.store(keys, engine.fill(keys, range(8)))).settled()
                    assert (await kv.load(keys, engine.spec(range(8)))).num_blocks == 8
                    async with kv.lease(keys) as lease:
                        assert lease.num_blocks == 8
                    del lease
                await until(lambda: server.health()["shares"] == [])
            assert slabs() <= before
    finally:
        gc.enable()


async def test_who_drains_as_a_model_is_reclaimed(tmp_path: Path) -> None:
    """At whatever moment: nothing of that model is to be written, and all others are."""
    settings = TieredKVSettings(tiers=[cpu(32)], limits=LIMITS, host={"socket": tmp_path / "kv.sock"})
    shares = Shares(settings, Recorder())
    await shares.join(ONE, SMALL, (Shard(),))
    for steps in range(12):
        unused, _ = await shares.join(TWO, SMALL, (Shard(),))
        shares.leave(unused)
        await shares.reclaim(0.0)
        for _ in range(steps):
            await asyncio.sleep(0)
        assert await shares.drain()
        await until(lambda: [share.name for share in shares] == ["one"])
    await shares.aclose()


async def test_what_an_earlier_server_has_left_is_reclaimed_too(tmp_path: Path) -> None:
    """A model that nobody attaches for any more; one that is attached for at once is warm."""
    engine, keys, disk = AnyEngine(), prompt(8), tmp_path / "disk"
    with serving(tmp_path, cpu(32), nvme(disk)) as server:
        for model in (ONE, TWO):
            async with attached(server, engine, model=model) as kv:
                await (await kv.store(keys, engine.fill(keys, range(8)))).settled()
    assert len(models_in(disk)) == 2
    with serving(tmp_path, cpu(32), nvme(disk), host={"reclaim_after_s": 5.0}) as server:  # long enough to attach
        async with attached(server, model=ONE) as kv:
            assert (await kv.lookup(keys)).num_blocks == 8
            await until(lambda: len(server.health()["shares"]) == 1)
            await until(lambda: len(models_in(disk)) == 1)
            assert (await kv.lookup(keys)).num_blocks == 8


async def test_what_an_earlier_server_has_left_makes_room(tmp_path: Path) -> None:
    """Nobody has attached for it yet: another model gets its part all the same, and the tier keeps to its capacity."""
    engine, capacity, disk = AnyEngine(num_blocks=400), 1 << 20, tmp_path / "disk"
    found, tiers = [], (cpu(500), nvme(disk, capacity))
    for model in (ONE, TWO, ONE):
        with serving(tmp_path, *tiers) as server:
            async with attached(server, engine, model=model) as kv:
                num_slots = kv.stats()["nvme"].num_slots
                keys = prompt(num_slots)
                found.append(int(np.count_nonzero(kv.membership(keys))))
                await (await kv.store(keys, engine.fill(keys, range(num_slots)))).settled()
                assert await kv.flush()
                assert kv.stats()["nvme"].ready == num_slots
        assert disk_usage(disk) <= capacity
    assert found[0] == found[1] == 0 < found[2]


@pytest.mark.parametrize("delete", [Path.unlink, lambda file: shutil.rmtree(file.parent)], ids=["file", "folder"])
async def test_what_vanishes_on_a_disk_hides_no_model(
    delete: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server deletes in one directory while this one starts and adds up what is there: it knows all others."""
    disk, look = tmp_path / "disk", Path.lstat
    directories = [str(number) * DIRECTORY_DIGITS for number in range(4)]
    for directory in directories:
        leave_model(disk, directory, 1 << 16)
    first = next(disk.iterdir()).name

    def looked_at(path: Path) -> os.stat_result:
        if path.name == "slab" and first in path.parts:
            delete(path)
        return look(path)

    monkeypatch.setattr(Path, "lstat", looked_at)
    tiers = [cpu(500), nvme(disk, 1 << 20)]
    shares = Shares(TieredKVSettings(tiers=tiers, limits=LIMITS, host={"socket": tmp_path / "kv.sock"}), Recorder())
    num_bytes = {share.directory: share.given["nvme"] for share in shares}
    assert num_bytes.keys() == set(directories)
    assert num_bytes.pop(first) < 1 << 16 <= min(num_bytes.values())
    await shares.aclose()


@pytest.mark.parametrize("num_left", [0, 1])
async def test_a_server_that_cannot_look_for_earlier_models_does_not_start(tmp_path: Path, num_left: int) -> None:
    """Without a descriptor it would take the disk for empty, and let others have what they take."""
    disk = tmp_path / "disk"
    leave_model(disk, "0" * DIRECTORY_DIGITS, 1 << 16)
    settings = TieredKVSettings(tiers=[cpu(500), nvme(disk, 1 << 20)], limits=LIMITS, host={"socket": tmp_path / "s"})
    with descriptors_left(num_left), pytest.raises(ConfigurationError, match=r"disk cannot .*; raise the limit of"):
        Shares(settings, Recorder())
    shares = Shares(settings, Recorder())
    assert [share.directory for share in shares] == ["0" * DIRECTORY_DIGITS]
    await shares.aclose()


async def test_what_cannot_be_deleted_for_want_of_descriptors_still_counts(tmp_path: Path) -> None:
    """What an earlier server has left, and nobody uses: it is not looked into, so it is there, and goes later."""
    disk = tmp_path / "disk"
    leave_model(disk, "0" * DIRECTORY_DIGITS, 1 << 16)
    settings = TieredKVSettings(tiers=[cpu(500), nvme(disk, 1 << 20)], limits=LIMITS, host={"socket": tmp_path / "s"})
    shares = Shares(settings, Recorder())
    (before,) = shares
    with descriptors_left(0):
        await shares.reclaim(0.0)
        await until(lambda: before not in list(shares))
    assert [(share.directory, share.given) for share in shares] == [(before.directory, before.given)]
    await shares.reclaim(0.0)
    await until(lambda: not list(shares))
    assert not list(disk.iterdir())
    await shares.aclose()


@pytest.mark.parametrize("room_s", [0.0, 3600.0])
@pytest.mark.parametrize("doing", ["cut_left", "delete_left"])
async def test_who_attaches_waits_for_no_disk_that_hangs(
    doing: str, room_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does as what another model has there is cut or deleted: a new one waits its time, and goes on without."""
    disk, capacity, goes_on = tmp_path / "disk", 1 << 20, threading.Event()
    leave_model(disk, "0" * DIRECTORY_DIGITS, capacity)
    do = getattr(NVMeBackend, doing)

    def do_late(*args: object) -> object:
        return goes_on.wait() and do(*args)

    monkeypatch.setattr(NVMeBackend, doing, do_late)
    monkeypatch.setattr("tiered_kv.host.shares._ROOM_S", room_s)
    tiers = [cpu(500), nvme(disk, capacity)]
    shares = Shares(TieredKVSettings(tiers=tiers, limits=LIMITS, host={"socket": tmp_path / "kv.sock"}), Recorder())
    await shares.reclaim(0.0 if doing == "delete_left" else 3600.0)
    joining = asyncio.ensure_future(shares.join(ONE, SMALL, (Shard(),)))
    try:
        if room_s:
            for _ in range(9):
                await a_while()
            assert not joining.done()
            goes_on.set()
        with anyio.fail_after(30):
            share, _ = await joining
        assert share.cache is not None
    finally:
        goes_on.set()
    await until(lambda: sum(each.given["nvme"] for each in shares) <= capacity)
    await shares.aclose()
    assert disk_usage(disk) <= capacity


async def test_a_model_that_does_not_go_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One disk hangs in its deletion, another's medium raises: others still go, and who attaches need not wait on."""
    disk, goes_on, delete = tmp_path / "disk", threading.Event(), NVMeBackend.delete_left
    hanging, raising = "0" * DIRECTORY_DIGITS, ""
    leave_model(disk, hanging, 1 << 16)

    def delete_anyhow(path: Path) -> bool:
        if path.name == raising:
            raise RuntimeError("a medium of somebody else's")
        return (path.name != hanging or goes_on.wait()) and delete(path)

    monkeypatch.setattr(NVMeBackend, "delete_left", delete_anyhow)
    settings = TieredKVSettings(tiers=[cpu(500), nvme(disk, 1 << 20)], limits=LIMITS)
    shares = Shares(settings, Recorder())
    await shares.reclaim(0.0)
    share, _ = await shares.join(ONE, SMALL, (Shard(),))
    raising = share.directory
    shares.leave(share)
    try:
        with anyio.fail_after(30):
            await shares.reclaim(0.0)
            await until(lambda: share.cache is None and {each.going is None for each in shares} == {False, True})
            share, _ = await shares.join(ONE, SMALL, (Shard(),))
        assert share.cache is not None
    finally:
        goes_on.set()
    await until(lambda: list(shares) == [share])
    await shares.aclose()


@pytest.mark.parametrize("keeps", ["disk", "memory"])
async def test_a_model_that_no_thread_could_delete_is_tried_again(
    keeps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has on a disk counts until then, and who attaches for it has it: it does not wait for what has ended."""
    tiers, start = [cpu(500), *([nvme(tmp_path / "disk", 1 << 20)] if keeps == "disk" else [])], threading.Thread.start

    def start_unless_it_deletes(thread: threading.Thread) -> None:
        if "delete" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    shares = Shares(TieredKVSettings(tiers=tiers, limits=LIMITS), Recorder())
    share, _ = await shares.join(ONE, SMALL, (Shard(),))
    shares.leave(share)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_unless_it_deletes)
        await shares.reclaim(0.0)
        await until(lambda: all(each.going is None for each in shares))
        assert [list(each.given) for each in shares] == ([["nvme"]] if keeps == "disk" else [])
    with anyio.fail_after(30):
        again, _ = await shares.join(ONE, SMALL, (Shard(),))
    assert again.cache is not None
    shares.leave(again)
    await shares.reclaim(0.0)
    await until(lambda: not list(shares))
    await shares.aclose()


async def test_a_tier_that_cannot_be_resized_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a medium raises, the model keeps what it has, and its tier may be divided anew."""

    async def resize(*_: object) -> None:
        raise RuntimeError("a medium of somebody else's")

    shares = Shares(
        TieredKVSettings(tiers=[cpu(500)], limits=LIMITS, host={"socket": tmp_path / "kv.sock"}), Recorder()
    )
    one, _ = await shares.join(ONE, SMALL, (Shard(),))
    monkeypatch.setattr("tiered_kv.host.shares._ROOM_S", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(TieredKV, "resize", resize)
        two, _ = await shares.join(TWO, SMALL, (Shard(),))
        await until(lambda: not one.resizing)
    assert "a medium of somebody else's" in caplog.text
    shares.leave(two)
    await shares.reclaim(0.0)
    await until(lambda: list(shares) == [one])
    assert one.given["cpu"] == 500 * STRIDE
    await shares.aclose()


@pytest.mark.parametrize(("because", "said"), [("denied", "not permitted"), ("others", "in use")])
async def test_a_model_whose_directory_cannot_be_deleted_is_tried_again(
    because: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named, and its bytes count meanwhile: the tier takes no more than it may. Who attaches for it has it."""
    disk, is_well, unlink = tmp_path / "disk", because != "denied", Files.unlink

    def unlink_if_well(files: Files, name: str, *, dir_fd: int) -> None:
        if not is_well and name == "slab":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), name)
        unlink(files, name, dir_fd=dir_fd)

    monkeypatch.setattr(Files, "unlink", unlink_if_well)
    settings = TieredKVSettings(tiers=[cpu(500), nvme(disk, 1 << 20)], limits=LIMITS)
    shares = Shares(settings, Recorder())
    share, _ = await shares.join(ONE, SMALL, (Shard(),))
    shares.leave(share)
    note = disk / share.directory / "note"
    if because == "others":
        note.touch()
    for _ in range(2):
        await shares.reclaim(0.0)
        await until(lambda: [each.going for each in shares] == [None])
        (kept,) = shares
        assert (kept.name, kept.cache, list(kept.given)) == ("one", None, ["nvme"])
    told = [record.getMessage() for record in caplog.records if "host.directory_kept" in record.getMessage()]
    assert len(told) == 2
    assert all("one" in each and kept.directory in each and said in each for each in told)
    is_well = True
    note.unlink(missing_ok=True)
    again, _ = await shares.join(ONE, SMALL, (Shard(),))
    assert again.cache is not None
    shares.leave(again)
    await shares.reclaim(0.0)
    await until(lambda: not list(shares))
    assert models_in(disk) == []
    await shares.aclose()


async def test_who_attaches_for_a_model_that_does_not_go_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes again while a disk hangs in the deletion; if each attempt waited on, they would take all places."""
    goes_on, delete = threading.Event(), NVMeBackend.delete_left
    monkeypatch.setattr(NVMeBackend, "delete_left", lambda path: goes_on.wait() and delete(path))
    monkeypatch.setattr("tiered_kv.host.shares._GONE_S", 0.01)
    settings = TieredKVSettings(tiers=[cpu(500), nvme(tmp_path / "disk", 1 << 20)], limits=LIMITS)
    shares = Shares(settings, Recorder())
    share, _ = await shares.join(ONE, SMALL, (Shard(),))
    shares.leave(share)
    await shares.reclaim(0.0)
    try:
        with anyio.fail_after(30), pytest.raises(BackendUnavailableError, match="what is left of model 'one'"):
            await shares.join(ONE, SMALL, (Shard(),))
    finally:
        goes_on.set()
    await until(lambda: not list(shares))
    again, _ = await shares.join(ONE, SMALL, (Shard(),))
    assert again.num_clients == 1
    await shares.aclose()


def leave_model(disk: Path, directory: str, num_bytes: int) -> None:
    """Make a directory as a tier has left it, with so many bytes in it."""
    (folder := disk / directory / ("ab" * 32)).mkdir(parents=True)
    for each in (folder, folder.parent):
        each.chmod(0o700)
    (folder.parent / "holder").touch()
    (folder / "slab").write_bytes(bytes(num_bytes))


async def test_two_servers_on_one_disk_do_not_delete_each_others_models(tmp_path: Path) -> None:
    """A model that the other has open is locked: it is forgotten here, and stays."""
    engine, keys, disk = AnyEngine(), prompt(8), tmp_path / "disk"
    second = tmp_path / "second"
    second.mkdir()
    with serving(tmp_path, cpu(32), nvme(disk)) as server:
        async with attached(server, engine, model=ONE) as kv:
            await (await kv.store(keys, engine.fill(keys, range(8)))).settled()
            with serving(second, cpu(32), nvme(disk), host={"reclaim_after_s": 0.1}) as other:
                await until(lambda: other.health()["shares"] == [])
            await kv.evict(keys, tier="cpu")
            assert (await kv.load(keys, engine.spec(range(8)))).num_blocks == 8
    assert len(models_in(disk)) == 1
