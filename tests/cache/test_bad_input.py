"""What cannot be right is an error of ours, with the numbers, before anything moves."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support.any_layout import BLOCK_SIZE, MODEL, SMALL, STRIDE, AnyEngine, cpu, gpu, nvme, open_any, prompt
from tests.support.backends import ScriptedBackend
from tests.support.caches import Recorder, until, until_idle
from tests.support.programs import started
from tiered_kv import (
    BlockKeys,
    CacheLimits,
    ClosedError,
    ConfigurationError,
    CPULoadStoreSpec,
    FileLoadStoreSpec,
    GPULoadStoreSpec,
    GPUPoolInHostMemory,
    KVLayout,
    LayoutMismatchError,
    ModelIdentity,
    TieredKV,
    TieredKVError,
    TieredKVSettings,
    Worker,
    hash_blocks,
)
from tiered_kv.catalog.policies import LRUPolicy
from tiered_kv.media.backend import BackendContext, Block, Outcome, Recovered, SlotBackend
from tiered_kv.values.keys import Names

Cache = tuple[TieredKV, AnyEngine]
Given = tuple[Any, Any]

KEYS = prompt(4)
IDS = GPULoadStoreSpec(range(4))

BLOCKS: dict[str, tuple[Given, type[TieredKVError], str]] = {
    "a list of hashes": ((list(KEYS), IDS), ConfigurationError, "keys must be BlockKeys, .* got list"),
    "token ids": ((range(16), IDS), ConfigurationError, "keys must be BlockKeys, .* got range"),
    "another block size": (
        (hash_blocks(range(64), block_size=16), IDS),
        LayoutMismatchError,
        "blocks of 16 tokens, the layout has blocks of 4",
    ),
    "a group there is not": ((prompt(4, group=1), IDS), ConfigurationError, "KV group 1 of 1"),
    "ids of another group": (
        (KEYS, GPULoadStoreSpec(range(4), group=1)),
        LayoutMismatchError,
        "group 0, .* of group 1",
    ),
    "a list of ids": (
        (KEYS, [0, 1, 2, 3]),
        ConfigurationError,
        r"CPULoadStoreSpec, got list: write GPULoadStoreSpec\(block_ids\)",
    ),
    "a spec of another medium": (
        (KEYS, FileLoadStoreSpec([0], ["/kv"], [0], [1])),
        ConfigurationError,
        "got FileLoadStoreSpec",
    ),
    "slots of the cache's own": (
        (KEYS, CPULoadStoreSpec(range(4))),
        ConfigurationError,
        "no host pool ''.*; tensors .* are GPUL",
    ),
    "more keys than ids": ((KEYS, IDS[:3]), LayoutMismatchError, "^4 keys need 4 block ids, got 3"),
    "more ids than keys": ((KEYS[:3], IDS), LayoutMismatchError, "^3 keys need 3 block ids, got 4"),
    "one key, no id": ((KEYS[:1], IDS[:0]), LayoutMismatchError, "^1 key needs 1 block id, got 0"),
    "an id too high": (
        (KEYS, GPULoadStoreSpec([0, 1, 64, 2])),
        ConfigurationError,
        re.escape("block id 64 at position 2 is not in [0, 64)"),
    ),
    "an id twice": (
        (KEYS, GPULoadStoreSpec([5, 6, 7, 6])),
        ConfigurationError,
        "block id 6 at position 3 is there twice",
    ),
}


@pytest.fixture
async def cache(tmp_path: Path) -> AsyncIterator[Cache]:
    """A cache with 4 blocks in it. Behind a test nothing has moved and nothing is held."""
    engine = AnyEngine()
    async with open_any(engine, cpu(8), nvme(tmp_path)) as kv:
        await kv.store(KEYS, engine.fill(KEYS, range(4)))
        await kv.flush()
        await until_idle(kv)
        before = kv.stats()
        yield kv, engine
        assert kv.stats() == before
        assert engine.count_right(KEYS, range(4)) == 4
        await until_idle(kv)


@pytest.mark.parametrize("case", BLOCKS.values(), ids=BLOCKS)
async def test_wrong_blocks(cache: Cache, case: tuple[Given, type[TieredKVError], str]) -> None:
    """Keys and block ids that do not fit each other, the layout or the engine, are refused by loads and stores."""
    kv, _ = cache
    (keys, spec), error, message = case
    for call in (kv.load, kv.store):
        with pytest.raises(error, match=message):
            await call(keys, spec)
    for start in (kv.start_load, kv.start_store):
        with pytest.raises(error, match=message):
            start(keys, spec)


@pytest.mark.parametrize("keys", [None, "prompt", [b"x" * 32], b"x" * 32, prompt(2, group=3)], ids=repr)
async def test_wrong_keys(cache: Cache, keys: Any) -> None:  # noqa: ANN401 - anything
    """Whatever is no `BlockKeys` of the layout is refused by every call that takes keys."""
    kv, _ = cache
    calls: list[Callable[[Any], object]] = [
        kv.touch,
        kv.prefetch,
        kv.lease,
        kv.resident,
        kv.leaving,
        kv.unpin,
        kv.membership,
    ]
    for call in calls:
        with pytest.raises(ConfigurationError, match=r"keys must be BlockKeys|KV group 3 of 1"):
            call(keys)
    awaited: list[Callable[[Any], Awaitable[object]]] = [kv.lookup, kv.evict, kv.explain]
    for each in awaited:
        with pytest.raises(ConfigurationError, match=r"keys must be BlockKeys|KV group 3 of 1"):
            await each(keys)
    with pytest.raises(ConfigurationError, match=r"keys must be BlockKeys|2 keys were asked for"):
        kv.count_lookup(keys, np.ones(1, np.bool_))


@pytest.mark.parametrize("found", [["yes"] * 4, [1, 0, 0, 0], np.ones(4), [None] * 4], ids=repr)
async def test_what_says_not_what_was_found(cache: Cache, found: Any) -> None:  # noqa: ANN401 - anything
    """Of each key it is True or False: a state of `membership` is neither."""
    kv, _ = cache
    with pytest.raises(ConfigurationError, match=r"found says True or False of each key, got .*BlockState\.HIT"):
        kv.count_lookup(KEYS, found)


@pytest.mark.parametrize("keys", [None, 5, ["a"], [5], [KEYS[0], None], KEYS[0], [[1]]], ids=repr)
async def test_jobs_of_which_nothing_is_said(keys: Any) -> None:  # noqa: ANN401 - anything
    """A job is answered for by keys or their hashes; by anything else it goes on."""
    async with open_any(AnyEngine(), cpu(8)) as kv:
        planner = kv.planner()
        planner.register_worker()
        job = planner.plan_store(KEYS)
        await job.planned()
        with pytest.raises(ConfigurationError, match="keys must be BlockKeys, or a sequence of their hashes"):
            job.complete(keys)
        assert job.result is None
        job.complete(list(KEYS))
        assert (await job.ended()).num_blocks == 4


async def test_a_worker_that_is_closed() -> None:
    """It takes no memory and no tensors any more, and moves nothing."""
    engine = AnyEngine()
    async with open_any(engine, cpu(8)) as kv:
        planner = kv.planner()
        worker = Worker(planner.slabs(), layout=SMALL, device="cpu")
        worker.close()
        planner.register_worker()
        job = planner.plan_store(KEYS, engine.spec(range(4)))
        plan = await job.planned()
        calls: list[Callable[[], object]] = [
            lambda: worker.attach(planner.slabs()),
            lambda: worker.register_kv_caches(engine.caches[0]),
            lambda: worker.start(plan),
        ]
        for call in calls:
            with pytest.raises(ClosedError, match="this Worker is closed"):
                call()
        job.cancel(undelivered=True)
        await job.ended()


@pytest.mark.parametrize("group", [None, "a", -1, 1], ids=repr)
async def test_a_worker_lets_go_of_groups_that_there_are(cache: Cache, group: Any) -> None:  # noqa: ANN401 - anything
    """Of another it would let go of nothing, and say nothing."""
    kv, _ = cache
    worker = Worker(kv.planner().slabs(), layout=SMALL, device="cpu")
    with worker, pytest.raises(ConfigurationError, match=r"a KV group's number must be|KV group 1 of 1"):
        worker.unregister_kv_caches(group=group)


@pytest.mark.parametrize("rank", [None, "0", 0.0, -1, 1], ids=repr)
async def test_ranks_that_are_not_there(cache: Cache, rank: Any) -> None:  # noqa: ANN401 - anything
    """The number of a rank is an int, of those that the cache stands for."""
    kv, _ = cache
    with pytest.raises(ConfigurationError, match=f"rank must be an int, 0 or more, got {rank!r}|rank 1 of 1"):
        kv.namespace(rank=rank)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"deadline_s": "soon"}, "deadline_s"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"deadline_s": -1}, "deadline_s must be a number of seconds, 0 or more, got -1"),
        ({"priority": "high"}, "priority"),
        ({"after": 7}, "after|event|wait"),
    ],
    ids=str,
)
async def test_wrong_ways_to_load(cache: Cache, how: dict[str, Any], message: str) -> None:
    """A deadline, a priority or an event that is none is refused."""
    kv, _ = cache
    with pytest.raises(ConfigurationError, match=message):
        await kv.load(KEYS, IDS, **how)


@pytest.mark.parametrize("weights", ["", 7, None, b"w1"], ids=repr)
async def test_weights_without_a_name(cache: Cache, weights: Any) -> None:  # noqa: ANN401 - anything
    """An epoch is named by a str that is not empty, where it is advanced and where it is stored for."""
    kv, _ = cache
    with pytest.raises(ConfigurationError, match="weights must be a non-empty str"):
        kv.advance_epoch(weights)
    if weights is not None:
        with pytest.raises(ConfigurationError, match="weights must be a non-empty str"):
            await kv.store(KEYS, IDS, epoch=weights)
    assert (await kv.lookup(KEYS)).num_blocks == 4


async def test_tiers_that_are_not_there(cache: Cache) -> None:
    """A name of no tier is answered with those there are."""
    kv, _ = cache
    with pytest.raises(KeyError, match="no tier 'disk' here; there are cpu, nvme"):
        kv.stats()["disk"]
    with pytest.raises(ConfigurationError, match="no tier 'disk' here; there are cpu, nvme"):
        await kv.evict(KEYS, tier="disk")
    with pytest.raises(ConfigurationError, match="memory tier; here: cpu; not 'nvme'"):
        kv.prefetch(KEYS, to="nvme")


TENSORS: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: [torch.zeros(2, 8, 4, 1, 48)] * 2, "layer 0 is of float32, the KV group of bfloat16"),
    "shape": (lambda: [torch.zeros(2, 8, 4, 1, 40).bfloat16()] * 2, "shape.*40"),
    "layers": (lambda: [torch.zeros(2, 8, 4, 1, 48).bfloat16()] * 3, "has 2 layers, got the tensors of 3"),
    "none": (list, r"got \[\]"),
    "device": (lambda: [torch.zeros(2, 8, 4, 1, 48, device="meta").bfloat16()] * 2, "on meta, the cache .* for cpu"),
    "contiguity": (
        lambda: [torch.zeros(2, 8, 48, 1, 4).bfloat16().transpose(2, 4)] * 2,
        "the tokens of a page must be contiguous, got shape .* with strides",
    ),
    "pages": (
        lambda: [torch.zeros(2, 8, 4, 1, 48).bfloat16(), torch.zeros(2, 9, 4, 1, 48).bfloat16()],
        r"one number of pages: layer 1 \(K\) has 9, layer 0 \(K\) 8",
    ),
    "sparsity": (lambda: [torch.zeros(2, 8, 4, 1, 48).bfloat16().to_sparse()] * 2, "strided"),
    "kind": (lambda: [[1, 2], [3, 4]], r"got \[\[1, 2\]"),
    "numbers": (lambda: 7, "got 7"),
}


@pytest.mark.parametrize("wrong", TENSORS)
async def test_wrong_tensors(cache: Cache, wrong: str) -> None:
    """Tensors that are not what the layout says are refused, and those registered before stay."""
    kv, engine = cache
    make, message = TENSORS[wrong]
    with pytest.raises(LayoutMismatchError, match=message):
        kv.register_kv_caches(make())
    with pytest.raises(ConfigurationError, match="KV group 1 of 1"):
        kv.register_kv_caches(engine.caches[0], group=1)


async def test_no_tensors_yet() -> None:
    """A cache without an engine's tensors looks up, and says what load and store lack."""
    async with TieredKV([cpu(4)], model=MODEL, layout=SMALL) as kv:
        assert (await kv.lookup(KEYS)).num_blocks == 0
        with pytest.raises(ConfigurationError, match=r"register_kv_caches\(\) comes before load and store"):
            await kv.load(KEYS, IDS)
        with pytest.raises(ConfigurationError, match=r"register_kv_caches\(\) comes before load and store"):
            await kv.store(KEYS, IDS)


async def test_a_cache_is_opened_once_by_several_at_once_too() -> None:
    """Who comes while it is being opened is refused: else what was opened first would stay open for good."""
    medium = ScriptedBackend()
    kv = TieredKV([cpu(4), medium], model=MODEL, layout=SMALL)
    medium.on_open.hold()
    opening = asyncio.create_task(kv.__aenter__())
    await until(lambda: medium.on_open.num_held == 1)
    with pytest.raises(ClosedError, match="opened once"):
        await kv.__aenter__()
    medium.on_open.release()
    await opening
    assert medium.on_open.num_calls == 1
    await kv.aclose()


@pytest.mark.parametrize("when", ["before it is opened", "after it is closed"])
async def test_a_cache_that_is_not_open(when: str) -> None:
    """Every call says so; closing again is harmless, opening again is not possible."""
    engine = AnyEngine()
    kv = TieredKV([cpu(4)], model=MODEL, layout=SMALL)
    if when == "after it is closed":
        async with kv:
            pass
        await kv.aclose()
        with pytest.raises(ClosedError, match="opened once"):
            await kv.__aenter__()
    calls: list[Callable[[], object]] = [
        kv.stats,
        lambda: kv.touch(KEYS),
        lambda: kv.advance_epoch("w1"),
        lambda: kv.prefetch(KEYS),
        lambda: kv.lease(KEYS),
        lambda: kv.start_load(KEYS, IDS),
        lambda: kv.start_store(KEYS, IDS),
        lambda: kv.register_kv_caches(engine.caches[0]),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="closed" if "after" in when else "not open yet"):
            call()
    awaited: list[Callable[[], Awaitable[object]]] = [
        lambda: kv.lookup(KEYS),
        lambda: kv.load(KEYS, IDS),
        lambda: kv.store(KEYS, IDS),
        lambda: kv.evict(KEYS),
        kv.clear,
        kv.flush,
    ]
    for each in awaited:
        with pytest.raises(ClosedError, match="closed" if "after" in when else "not open yet"):
            await each()


async def test_another_thread(cache: Cache) -> None:
    """A call from another thread, or from another loop in one, is refused: it would break the books."""
    kv, _ = cache
    errors: list[BaseException] = []

    calls: list[Callable[[], object]] = [
        kv.stats,
        lambda: asyncio.run(kv.lookup(KEYS)),
        lambda: asyncio.run(kv.load(KEYS, IDS)),
        lambda: asyncio.run(kv.aclose()),
    ]

    def elsewhere() -> None:
        for call in calls:
            try:
                call()
            except ConfigurationError as error:
                errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    others = "submit_load, submit_store, poll, lookup_nowait, membership and count_lookup"
    told = f"on the event loop that opened it; other threads use {others}, or open_blocking for all of it"
    assert [str(error) for error in errors] == [f"a TieredKV is called {told}"] * len(calls)


class Unmakeable(LRUPolicy):
    """Looks for a file of its own, and finds none."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        raise OSError("no file")


def shared_fs(path: Path) -> dict[str, Any]:
    """Return settings of a directory that others use too."""
    return {"medium": "shared_fs", "path": str(path), "capacity": "16MiB", "min_free_fraction": 0}


TIERS: dict[str, tuple[Callable[[Path], list[Any]], str]] = {
    "none": (lambda _: [], "at least one tier"),
    "no tier": (lambda _: [7], r"tiers\[0\]: a tier is a TierSettings, a dict with 'medium' or a URL, not int"),
    "order": (lambda path: [nvme(path), cpu(4)], "fastest first: .* got nvme, cpu"),
    "two of a name": (lambda path: [nvme(path), nvme(path / "other")], "called 'nvme' like"),
    "an unknown medium": (lambda _: [{"medium": "dsik"}], "no medium is called 'dsik'"),
    "an unknown setting": (lambda _: [{"medium": "cpu", "capcity": 4096}], "capcity: there is no such setting"),
    "a size that is none": (lambda _: [{"medium": "cpu", "capacity": "many"}], "'many' is no size"),
    "an unknown policy": (lambda _: [{"medium": "cpu", "policy": "mru"}], "mru"),
    "a policy that cannot be made": (
        lambda _: [{"medium": "cpu", "capacity": 4 * STRIDE, "policy": f"{__name__}:Unmakeable"}],
        f"policy '{__name__}:Unmakeable' cannot be made over 4 slots: OSError: no file",
    ),
    "a small CPU tier": (
        lambda _: [{"medium": "cpu", "capacity": STRIDE - 1}],
        f"the cpu tier's capacity of {STRIDE - 1} bytes is below one block of {STRIDE} bytes",
    ),
    "a small GPU pool": (
        lambda _: [{"medium": "gpu", "capacity": 100}, cpu(4)],
        f"the gpu tier's capacity of 100 bytes is below one block of {STRIDE} bytes",
    ),
    "a small disk": (
        lambda path: [nvme(path, 4096)],
        r"the NVMe tier at /.*: capacity=4.0 KiB \(4096 bytes\) .*holds no block",
    ),
    "a small shared disk": (
        lambda path: [{"medium": "shared_fs", "path": str(path / "shared"), "capacity": 4096}],
        f"the shared_fs tier's capacity of 4096 bytes is below one block of {STRIDE + 4096} bytes: give it more",
    ),
    "a small memory tier": (
        lambda _: ["memory://?capacity=100"],
        r"the memory tier's capacity of 100 bytes is below one block of \d+ bytes: give it more",
    ),
    "a path that is a file": (lambda path: [cpu(4), nvme(path / "file")], "/file: it is a file; the NVMe"),
    "a path under a file": (lambda path: [cpu(4), nvme(path / "file" / "kv")], "file/kv"),
    "a path with a rank misspelt": (
        lambda path: [nvme(path / "{rnk}")],
        r"path of tier 'nvme' has \{rnk\}: only \{rank\} is filled in",
    ),
    "a directory of the system": (lambda _: [nvme(Path("/proc/kv"))], "/proc/kv: .*needs a directory that it can"),
    "more memory than there is": (
        lambda _: [{"medium": "cpu", "capacity": "64TiB"}],
        "65536.* of host memory are wanted, but",
    ),
    "more disk than there is": (
        lambda path: [nvme(path, "1EiB")],
        r"capacity=1.0 EiB \(.* needs .*iB \(.* more .* has .*iB \(.*: lower capacity",
    ),
}


def open_files() -> set[str]:
    """Return what this process's descriptors are open on, those of a kind that a cache would open."""
    links = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink() and each.exists()]
    return {link for link in links if link.startswith("/") and not link.startswith(("/proc", "/dev"))}


@pytest.mark.parametrize("wrong", TIERS)
async def test_wrong_tiers(tmp_path: Path, wrong: str) -> None:
    """A chain that can never work is refused before it serves, and what was opened on the way is closed again."""
    (tmp_path / "file").touch()
    make, message = TIERS[wrong]
    num_threads, files = threading.active_count(), open_files()
    with pytest.raises(ConfigurationError, match=message):
        async with TieredKV(make(tmp_path), model=MODEL, layout=SMALL):
            pass
    deadline = 10_000
    while threading.active_count() > num_threads and deadline:
        deadline -= 1
        await asyncio.sleep(0)
    assert threading.active_count() <= num_threads  # others of the tests before may have ended meanwhile
    assert open_files() <= files


class KeptElsewhere(ScriptedBackend):
    """A backend that keeps its settings under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._settings = self.settings
        del self.settings


class Without(SlotBackend):
    """A backend that has no settings."""

    async def open(self, context: BackendContext) -> list[Recovered]:
        """Find nothing."""
        empty = np.empty((0, 4), np.uint64), np.empty(0, np.int64)
        return [Recovered(4, *empty) for _ in context.groups]

    async def read(self, group: int, slots: NDArray[np.int64], into: Sequence[Block]) -> list[Outcome]:
        """Have nothing."""
        return [Outcome.MISS] * len(slots)

    async def write(self, group: int, slots: NDArray[np.int64], names: Names, blocks: Sequence[Block]) -> list[Outcome]:
        """Take nothing."""
        return [Outcome.FAILED] * len(slots)

    async def forget(self, group: int, slots: NDArray[np.int64]) -> None:
        """Have nothing."""

    async def aclose(self) -> None:
        """Hold nothing."""


def test_a_backend_that_keeps_its_settings_where_nobody_looks() -> None:
    """It is refused: what its settings ask of the cache, as to encrypt, would be dropped without a word."""
    with pytest.raises(ConfigurationError, match=r"KeptElsewhere .* write self\.settings = settings in its __init__"):
        TieredKV([cpu(4), KeptElsewhere()], model=MODEL, layout=SMALL)


async def test_a_backend_without_settings() -> None:
    """One whose class has no model of settings needs none: its tier has the defaults."""
    async with open_any(AnyEngine(), cpu(4), Without()) as kv:
        assert kv.media == {"cpu": "cpu"}
        assert not kv.stats()["without"].is_bypassed


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (nvme, shared_fs, "/holder: an NVMe tier has this directory: each needs one of its own"),
        (shared_fs, nvme, "is a shared_fs tier's, whose sweeper.lock is in it: each needs a directory of its own"),
    ],
)
async def test_a_directory_that_a_tier_of_another_kind_has_used(
    tmp_path: Path, first: Callable[[Path], Any], then: Callable[[Path], Any], message: str
) -> None:
    """Neither takes the other's, which goes on being used: one would delete what it does not know."""
    for make in (first, then, first):
        async with AsyncExitStack() as stack:
            if make is then:
                stack.enter_context(pytest.raises(ConfigurationError, match=message))
            await stack.enter_async_context(open_any(AnyEngine(), cpu(4), make(tmp_path)))


@pytest.mark.slow
async def test_a_directory_held_by_another_process(tmp_path: Path) -> None:
    """One process owns the directory: the next is told which one, and may have it once that has ended."""
    holder = (
        "import asyncio, sys; from tests.support.any_layout import *\n"
        "async def hold():\n"
        "    async with open_any(AnyEngine(), nvme(Path(sys.argv[1]))):\n"
        "        print('held', flush=True); sys.stdin.read()\n"
        "asyncio.run(hold())"
    )
    with started("-c", holder, tmp_path, folder=Path(__file__).parents[2]) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigurationError, match=f"{tmp_path}.*{other.pid}"):
            async with open_any(AnyEngine(), cpu(4), nvme(tmp_path)):
                pass
        other.stdin.close()
        assert other.wait() == 0
    async with open_any(AnyEngine(), cpu(4), nvme(tmp_path)) as kv:
        assert (await kv.lookup(KEYS)).num_blocks == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TieredKV([cpu(4)], model="llama", layout=SMALL), "needs model=ModelIdentity"),  # type: ignore[arg-type]
        (lambda: TieredKV([cpu(4)], model=MODEL, layout=SMALL.groups[0]), "and layout=KVLayout"),  # type: ignore[arg-type]
        (lambda: TieredKV.from_settings([cpu(4)], model=MODEL, layout=SMALL), r"not list: TieredKV\(tiers"),  # type: ignore[arg-type]
        (lambda: TieredKV.from_settings("kv.toml", model=MODEL, layout=SMALL), r"not str: .*from_toml\(path\)"),  # type: ignore[arg-type]
        (lambda: TieredKV.from_settings({"tires": []}, model=MODEL, layout=SMALL), "tires: .* did you mean 'tiers'"),
        (lambda: TieredKV(TieredKVSettings(), model=MODEL, layout=SMALL), r"from_settings\(settings, model="),  # type: ignore[arg-type]
        (
            lambda: TieredKV("cpu://?capacity=1GiB", model=MODEL, layout=SMALL),
            "a list of tiers, .* got str",
        ),
        (lambda: TieredKV([cpu(4)], model=MODEL, layout=SMALL, limits=5), "limits must be CacheLimits or a dict"),  # type: ignore[arg-type]
        (lambda: TieredKV([cpu(4)], model=MODEL, layout=SMALL, limits={"windw": 5}), "^limits.windw: .*'window'"),
        (lambda: TieredKV([cpu(4)], model=MODEL, layout=SMALL, emit=5), "emit must be a function .* got 5"),  # type: ignore[arg-type]
        (
            lambda: TieredKV([cpu(4)], model=MODEL, layout=SMALL, emit=[print, Recorder]),  # type: ignore[list-item]
            "emit must be a function .* got <class .*Recorder",
        ),
        (lambda: prompt(1, group=-1), "a KV group's number must be an int, 0 or more, got -1"),
        (lambda: hash_blocks(range(4), block_size=4, extra=["x"]), r"extra\[0\] must be bytes or None, got 'x'"),  # type: ignore[list-item]
        (lambda: ModelIdentity("llama", weights=""), "weights must be a non-empty str"),
        (lambda: CacheLimits.model_validate({"windw": 5}), "windw"),
        (lambda: TieredKVSettings(tiers=["cpu://?capcity=1GiB"]), "did you mean 'capacity'|capcity"),
        (lambda: BlockKeys.from_hashes(["ab"], block_size=BLOCK_SIZE), "hash 0 must be 8 to 32 bytes"),  # type: ignore[list-item]
        (lambda: GPULoadStoreSpec([-1]), "got -1 at position 0"),
        (lambda: GPULoadStoreSpec([0.5]), "flat sequence of ints"),  # type: ignore[list-item]  # wrong on purpose
        (lambda: GPULoadStoreSpec([[1, 2]]), "flat sequence of ints"),  # type: ignore[list-item]  # wrong on purpose
    ],
    ids=range(20),
)
def test_wrong_parts(make: Callable[[], object], message: str) -> None:
    """What a cache is made of checks itself."""
    with pytest.raises(ConfigurationError, match=message):
        make()


async def test_limits_of_a_dict() -> None:
    """They are taken as `TieredKVSettings` takes them."""
    async with TieredKV([cpu(4)], model=MODEL, layout=SMALL, limits={"load_timeout_s": "2"}) as kv:
        assert kv.stats().transfers == 0


@pytest.mark.parametrize("name", ["window", "store_queue"])
async def test_a_limit_below_one_block_is_refused(name: str) -> None:
    """As a capacity is, with numbers, if somebody has set it: the default may be less than a model's blocks take."""
    said = f"limits.{name} of {STRIDE - 1} bytes is below one block of {STRIDE} bytes"
    with pytest.raises(ConfigurationError, match=said):
        async with TieredKV([cpu(4)], model=MODEL, layout=SMALL, limits={name: STRIDE - 1}):
            pass
    long = KVLayout((replace(SMALL.groups[0], block_size=BLOCK_SIZE << 14),))
    assert long.groups[0].payload_bytes > CacheLimits().window
    async with TieredKV([cpu(1, long.groups[0].payload_bytes)], model=MODEL, layout=long) as kv:
        assert kv.stats()["cpu"].num_slots == 1


async def test_a_device_there_is_not() -> None:
    """A name that is no device's is refused at opening, with some that are."""
    with pytest.raises(ConfigurationError, match=r"no device 'gpuu': write e.g. 'cpu', 'cuda'"):
        async with TieredKV([cpu(4)], model=MODEL, layout=SMALL, device="gpuu"):
            pass


async def test_a_device_of_torch() -> None:
    """A torch.device is as good as its name; what is neither is refused with what may be written."""
    engine = AnyEngine()
    async with TieredKV([cpu(4)], model=MODEL, layout=SMALL, device=torch.device("cpu")) as kv:
        kv.register_kv_caches(engine.caches[0])
    with pytest.raises(ConfigurationError, match=r"no device tensor\(\[0.*: write e.g. 'cpu'"):
        async with TieredKV([cpu(4)], model=MODEL, layout=SMALL, device=torch.zeros(1)):  # type: ignore[arg-type]
            pass


async def test_a_part_of_a_size_is_none(cache: Cache) -> None:
    """A tier is resized to bytes: a share of them, which would be read as a few bytes, is refused."""
    kv, _ = cache
    for size in ("50%", "1.5", True):
        with pytest.raises(ConfigurationError, match=rf"{size!r} is no size: write bytes as an int, or e.g. '32GiB'"):
            await kv.resize("cpu", size)
    with pytest.raises(ConfigurationError, match="'8Gbit' is in bits: write bytes"):
        await kv.resize("cpu", "8Gbit")


async def test_times_that_are_past(cache: Cache) -> None:
    """Nobody can wait for less than no time, or for a time that no float can hold."""
    kv, _ = cache
    with pytest.raises(ConfigurationError, match="timeout_s must be a number of seconds, 0 or more, got -1"):
        kv.poll(timeout_s=-1)
    with pytest.raises(ConfigurationError, match="timeout_s must be a number of seconds, 0 or more, got 1000"):
        kv.poll(timeout_s=10**400)
    with pytest.raises(ConfigurationError, match="deadline_s must be a number of seconds, 0 or more, got 1000"):
        await kv.load(KEYS, IDS, deadline_s=10**400)
    with pytest.raises(ConfigurationError, match="timeout_s must be a number of seconds, 0 or more, got 'soon'"):
        await kv.drain(timeout_s="soon")  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize(
    "ttl_s", [0, float("nan"), float("inf"), 10**400, "1"], ids=["no time", "nan", "for ever", "no float", "text"]
)
async def test_a_pin_ends(cache: Cache, ttl_s: Any) -> None:  # noqa: ANN401 - anything
    """A pin is for a time that can be counted."""
    kv, _ = cache
    with pytest.raises(ConfigurationError, match="ttl_s must be a positive number of seconds, got "):
        kv.pin(KEYS, ttl_s=ttl_s)


async def test_a_gpu_pool_in_host_memory_is_told(tmp_path: Path) -> None:
    """Once, at opening: whoever runs without the GPU that was meant sees why nothing is faster for it."""
    for tiers, told in (([gpu(4), cpu(8)], [GPUPoolInHostMemory("gpu", 4 * STRIDE)]), ([cpu(8)], [])):
        emit = Recorder()
        async with TieredKV([*tiers, nvme(tmp_path)], model=MODEL, layout=SMALL, device="cpu", emit=emit):
            assert emit.of(GPUPoolInHostMemory) == told


async def test_a_gpu_pool_on_a_cpu(tmp_path: Path) -> None:
    """A device that is not there is an error of ours; the CPU stands in where none is asked for."""
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here: run on a machine without one")
    with pytest.raises(TieredKVError, match=r"cuda|CUDA"):
        async with TieredKV([gpu(4), nvme(tmp_path)], model=MODEL, layout=SMALL, device="cuda:0"):
            pass


def test_a_with_that_is_not_async() -> None:
    """It says what to write, with an event loop and without one."""
    with (
        pytest.raises(ConfigurationError, match=r"opened with 'async with'; .* open_blocking"),
        TieredKV([cpu(4)], model=MODEL, layout=SMALL),
    ):
        pass


def test_an_event_loop_that_is_not_asyncios() -> None:
    """As under trio: it says which one is needed, and what to do without."""
    opening = TieredKV([cpu(4)], model=MODEL, layout=SMALL).__aenter__()
    with pytest.raises(ConfigurationError, match=r"needs an event loop of asyncio .* open_blocking"):
        opening.send(None)
