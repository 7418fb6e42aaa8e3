"""Routers know exactly what a cache holds, through loss, late joins and whatever becomes of the cache.

vLLM itself is not installed where these run: `tests.support.router` decodes what it would.
"""

import asyncio
import faulthandler
import gc
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.backends import ScriptedSlotBackend
from tests.support.caches import inside, keep, open_cache, until, until_idle
from tests.support.engine import BLOCK_SIZE, PAYLOAD_BYTES, Engine, prompt
from tests.support.router import Place, Router
from tiered_kv import (
    BlockKeys,
    ClosedError,
    ConfigurationError,
    GPULoadStoreSpec,
    KVLayout,
    ModelIdentity,
    Namespace,
    TieredKV,
    hash_blocks,
)
from tiered_kv.telemetry import KVEventPublisher
from tiered_kv.telemetry.kv_event_values import Form, HasChanges
from tiered_kv.telemetry.router_books import RouterBooks
from tiered_kv.tiers.changes import Changes

CPU = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}
AS_ROUTERS_SAY: dict[str, tuple[str, str | None]] = {
    "cpu": ("CPU", None),
    "gpu": ("GPU", None),
    "disk": ("STORAGE", "LOCAL"),
}


def tokens_of(num_blocks: int, seed: int = 0) -> list[int]:
    """Return the tokens of `prompt`."""
    return [1_000_000 * seed + token for token in range(num_blocks * BLOCK_SIZE)]


def u64(digest: bytes) -> int:
    """Return what routers call a block."""
    return int.from_bytes(digest[-8:], "big")


def held(kv: TieredKV, known: Iterable[BlockKeys]) -> dict[Place, set[int]]:
    """Return which of these blocks the books of each tier have now."""
    found: dict[Place, set[int]] = {}
    for place, tier in inside(kv).fates.tiers.items():
        for keys in known:
            if keys.group == place.group:
                ready = tier.index.ready(kv.namespace(group=place.group, rank=place.rank).names(keys))
                hashes = {u64(digest) for digest, is_there in zip(keys, ready, strict=True) if is_there}
                found.setdefault((*AS_ROUTERS_SAY[place.tier], place.group), set()).update(hashes)
    return {place: hashes for place, hashes in found.items() if hashes}


def told_by(router: Router) -> list[Any]:
    """Return the events about blocks that a router has heard."""
    return [event for event in router.index.events if hasattr(event, "block_hashes")]


async def until_exact(router: Router, kv: TieredKV, known: Sequence[BlockKeys], *, asks: bool = False) -> None:
    """Wait until a router knows what the cache holds; one that ``asks`` does so without seeing a gap."""

    def ask() -> None:
        if asks and not router.is_asking:
            router.ask(router.last + 1)

    await until(lambda: router.listen().hashes() == held(kv, known), on_wait=ask)


async def until_answered(router: Router) -> None:
    """Wait for the mark of the end of a replay."""

    def is_answered() -> bool:
        router.listen()
        return not router.is_asking

    await until(is_answered)


@asynccontextmanager
async def publishing(kv: HasChanges, path: Path, **options: Any) -> AsyncIterator[KVEventPublisher]:  # noqa: ANN401
    """Yield a publisher on sockets in a folder, which tells everything anew as often as it has to."""
    given: dict[str, Any] = {"replay_endpoint": f"ipc://{path}/replay", "snapshot_every_s": 0} | options
    async with KVEventPublisher(kv, f"ipc://{path}/pub", **given) as publisher:
        await until(lambda: publisher.statistics().num_batches > 0)  # it knows the weights, and has begun with nothing
        yield publisher


@asynccontextmanager
async def joined(publisher: KVEventPublisher, **options: Any) -> AsyncIterator[Router]:  # noqa: ANN401 - as of a Router
    """Yield a router that has heard of everything since it joined."""
    assert publisher.endpoint is not None
    before = publisher.statistics().num_snapshots
    router = Router(publisher.endpoint, publisher.replay_endpoint, **options)

    def knows_all() -> bool:
        router.listen()
        told = publisher.statistics()
        return told.num_snapshots > before and router.last + 1 == told.num_batches

    try:
        await until(knows_all)
        router.index.num_cleared = 0
        yield router
    finally:
        router.close()


async def drive(kv: TieredKV, publisher: KVEventPublisher, engine: Engine, rounds: int) -> list[BlockKeys]:
    """Store, evict and clear; return all keys that were used."""
    known = []
    for seed in range(rounds):
        keys = prompt(6, seed=seed)
        publisher.describe(keys, tokens_of(6, seed))
        known.append(keys)
        await keep(kv, engine, keys)
        if seed % 3 == 1:
            await kv.evict(known[seed // 2][2:], tier=[None, "cpu"][seed % 2])
        if seed % 7 == 6:
            await kv.clear()
    await until_idle(kv)
    return known


@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.both_loops
async def test_an_exact_index_through_loss_and_replay(form: Form, tmp_path: Path) -> None:
    """Of every third message a router hears nothing; what it rebuilds is what the tiers hold, block for block."""
    engine, disk = Engine(), ScriptedSlotBackend(num_slots=24, name="disk")
    async with (
        open_cache(CPU, disk, engine=engine) as kv,
        publishing(kv, tmp_path, form=form) as publisher,
        joined(publisher, form=form, loses=lambda number: number % 3 == 2 and number < 30) as router,
    ):
        known = await drive(kv, publisher, engine, 20)
        await until_exact(router, kv, known)
        assert router.last > 30  # whoever loses the very last message hears of it with the next
        assert router.num_replayed > 0
        assert router.index.num_cleared == 0
        assert router.ranks == {0}
        assert {event.medium for event in told_by(router)} == {"CPU", "STORAGE"}


async def test_tokens_and_parents_are_those_of_the_prompt(tmp_path: Path) -> None:
    """The hash is the last 8 bytes of the key, as vLLM has it, so that routers find prompts by either."""
    engine, keys = Engine(), prompt(4)
    async with (
        open_cache(CPU, engine=engine) as kv,
        publishing(kv, tmp_path) as publisher,
        joined(publisher) as router,
    ):
        publisher.describe(keys, tokens_of(4))
        await keep(kv, engine, keys)
        await until_exact(router, kv, [keys])
        blocks = router.index.blocks["CPU", None, 0]
        parents = [None, *(u64(digest) for digest in keys[:-1])]
        tokens = np.reshape(tokens_of(4), (4, BLOCK_SIZE)).tolist()
        assert [blocks[u64(digest)] for digest in keys] == [
            (parent, tuple(each)) for parent, each in zip(parents, tokens, strict=True)
        ]


async def test_a_late_router_is_told_everything(tmp_path: Path) -> None:
    """At once, and the one that was there stays exact."""
    engine = Engine()
    async with (
        open_cache(CPU, engine=engine) as kv,
        publishing(kv, tmp_path, buffer_steps=1) as publisher,
        joined(publisher) as first,
    ):
        known = await drive(kv, publisher, engine, 5)
        async with joined(publisher) as late:
            await until_exact(late, kv, known)
            await until_exact(first, kv, known)
            known += await drive(kv, publisher, engine, 9)
            await until_exact(late, kv, known)
            await until_exact(first, kv, known)
        assert publisher.statistics().num_snapshots >= 2


async def test_who_lost_more_than_is_kept_is_told_everything(tmp_path: Path) -> None:
    """The replay begins too late; then all comes anew where everyone hears it."""
    engine = Engine()
    async with (
        open_cache(CPU, engine=engine) as kv,
        publishing(kv, tmp_path, buffer_steps=2) as publisher,
        joined(publisher, loses=lambda number: 2 < number < 9) as router,
    ):
        known = await drive(kv, publisher, engine, 9)
        await until_exact(router, kv, known)
        assert router.index.num_cleared > 0


async def test_what_is_kept_for_replays_is_bounded(tmp_path: Path) -> None:
    """In messages and in bytes; and an answer ends with the mark, whatever was asked for."""
    engine = Engine()
    async with open_cache(CPU, engine=engine) as kv:
        for options, most in (({"buffer_steps": 3}, 3), ({"buffer_bytes": 1}, 0)):
            async with publishing(kv, tmp_path, **options) as publisher, joined(publisher) as router:
                known = await drive(kv, publisher, engine, 6)
                await until_exact(router, kv, known)
                heard, router.last = router.last, -1
                router.index.blocks.clear()
                router.ask(2**64 - 1)
                await until_answered(router)
                assert router.num_replayed == 0
                router.ask(0)
                await until_answered(router)
                assert router.num_replayed == most
                assert heard > 3


async def test_a_router_that_does_not_read_delays_nobody(tmp_path: Path) -> None:
    """The cache stores and serves, other routers are exact; and once it reads again, so is it."""
    engine = Engine()
    async with (
        open_cache(CPU, engine=engine) as kv,
        publishing(kv, tmp_path, high_water_mark=1, buffer_steps=4) as publisher,
        joined(publisher, receive=1) as stuck,
        joined(publisher) as reading,
    ):
        stuck.listen()
        known = await drive(kv, publisher, engine, 30)
        await until_exact(reading, kv, known, asks=True)
        await until_exact(stuck, kv, known, asks=True)


class Narrow:
    """A cache whose stream of changes overflows soon."""

    def __init__(self, kv: TieredKV) -> None:
        self._kv = kv

    def events(self) -> Changes:
        """Return what changes; few names are kept."""
        return inside(self._kv).cache.subscribers.subscribe(max_names=24)

    def namespace(self, salt: str | bytes = b"", *, group: int = 0, rank: int = 0) -> Namespace:
        """Return the cache's own."""
        return self._kv.namespace(salt, group=group, rank=rank)


async def test_a_publisher_that_falls_behind_is_exact_afterwards(tmp_path: Path) -> None:
    """Its thread hangs; the cache goes on, the changes overflow, and routers hear of the difference alone."""
    engine, gate = Engine(), threading.Event()
    async with (
        open_cache(CPU, engine=engine) as kv,
        publishing(Narrow(kv), tmp_path) as publisher,
        joined(publisher) as router,
    ):
        assert publisher._open is not None  # noqa: SLF001 - the thread is stopped where it stands
        publisher._open._outlet.put(lambda: [] * gate.wait(30))  # noqa: SLF001 - so that its thread is busy
        known = await drive(kv, publisher, engine, 80)
        gate.set()
        await until_exact(router, kv, known)
        assert publisher.statistics().num_overflows > 0
        assert router.index.num_cleared == 0


async def test_what_was_there_before_is_told_once_it_is_described(tmp_path: Path) -> None:
    """As after a restart; from any thread, and what is described twice is told once."""
    engine, keys = Engine(), prompt(5)
    async with open_cache(CPU, engine=engine) as kv:
        await keep(kv, engine, keys)
        async with publishing(kv, tmp_path) as publisher, joined(publisher) as router:
            assert router.index.hashes() == {}
            await until(lambda: publisher.statistics().num_undescribed == 5)
            await asyncio.to_thread(publisher.describe, keys[:2], tokens_of(2))
            await until_exact(router, kv, [keys[:2]])
            publisher.describe(keys, tokens_of(5))
            publisher.describe(keys[3:], tokens_of(5)[3 * BLOCK_SIZE :], parent=keys[:3])
            await until_exact(router, kv, [keys])
            assert publisher.statistics().num_undescribed == 0


async def test_blocks_of_other_weights_are_not_told_of(tmp_path: Path) -> None:
    """From `advance_epoch` on, without any other call; those of weights named again are."""
    engine, keys = Engine(), prompt(3)
    async with (
        open_cache(CPU, engine=engine) as kv,
        publishing(kv, tmp_path) as publisher,
        joined(publisher) as router,
    ):
        publisher.describe(keys, tokens_of(3))
        await keep(kv, engine, keys)
        await until_exact(router, kv, [keys])
        kv.advance_epoch("w1")
        await until(lambda: router.listen().hashes() == {})
        publisher.describe(keys[:2], tokens_of(2))
        await keep(kv, engine, keys[:2])
        await until_exact(router, kv, [keys])
        assert held(kv, [keys])["CPU", None, 0] == {u64(digest) for digest in keys[:2]}
        kv.advance_epoch("w0")
        await until_exact(router, kv, [keys])
        assert len(router.index.blocks["CPU", None, 0]) == 3


async def test_several_kv_groups_are_told_apart(tmp_path: Path) -> None:
    """Equal hashes, each with its group and what kind of attention that has."""
    layers = [[torch.randn(2, 8, 16, 2, 64) for _ in range(2)] for _group in range(2)]
    layout = KVLayout.from_groups(layers, block_size=16)
    tokens = list(range(16 * 6))
    keys = [hash_blocks(tokens, block_size=16, group=group) for group in (0, 1)]
    specs = {0: ("full_attention",), 1: ("sliding_window", 64)}
    async with (
        TieredKV(["cpu://?capacity=4MiB"], model=ModelIdentity("hybrid", weights="r1"), layout=layout) as kv,
        publishing(kv, tmp_path, cache_specs=specs) as publisher,
        joined(publisher) as router,
    ):
        for group, each in enumerate(keys):
            kv.register_kv_caches(layers[group], group=group)
            publisher.describe(each, tokens)
        await kv.store(keys[0], GPULoadStoreSpec(range(6)))
        await kv.store(keys[1][4:], GPULoadStoreSpec(range(2), group=1))
        await until_exact(router, kv, keys)
        assert {place[2]: len(found) for place, found in router.index.hashes().items()} == {0: 6, 1: 2}
        kinds = {(e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window) for e in told_by(router)}
        assert kinds == {(0, "full_attention", None), (1, "sliding_window", 64)}
        await kv.evict(keys[0])
        await until_exact(router, kv, keys)


async def test_a_hash_of_the_engines_own_is_told_as_it_is(tmp_path: Path) -> None:
    """And where the keys are padded, nothing is guessed."""
    engine = Engine()
    keys = BlockKeys.from_hashes([bytes([n]) * 16 for n in range(1, 4)], block_size=BLOCK_SIZE)
    async with (
        open_cache(CPU, engine=engine) as kv,
        publishing(kv, tmp_path) as publisher,
        joined(publisher) as router,
    ):
        with pytest.raises(ConfigurationError, match="give hashes="):
            publisher.describe(keys, tokens_of(3))
        publisher.describe(keys, tokens_of(3), hashes=[2**64 - 1, 7, 8], lora_name="a")
        await keep(kv, engine, keys)
        await until(lambda: bool(router.listen().hashes()))
        assert router.index.hashes() == {("CPU", None, 0): {2**64 - 1, 7, 8}}
        assert router.index.events[-1].lora_name == "a"


async def test_media_are_those_of_the_format(tmp_path: Path) -> None:
    """GPU, CPU and STORAGE, with a locality for the last alone; a renamed tier is what its owner says."""
    engine, keys = Engine(), prompt(3)
    async with (
        open_cache(CPU | {"name": "ram"}, ScriptedSlotBackend(name="disk"), engine=engine) as kv,
        publishing(kv, tmp_path, media={"ram": "CPU"}, localities={"disk": "REMOTE"}) as publisher,
        joined(publisher) as router,
    ):
        publisher.describe(keys, tokens_of(3))
        await keep(kv, engine, keys)
        await until(lambda: len(router.listen().hashes()) == 2)
        assert set(router.index.hashes()) == {("CPU", None, 0), ("STORAGE", "REMOTE", 0)}


@pytest.mark.parametrize("first", ["publisher", "cache"])
async def test_closing_tells_routers_that_all_is_gone(first: str, tmp_path: Path) -> None:
    """Whichever closes first; the thread ends, the endpoint is free, and a second close is harmless."""
    engine, keys = Engine(), prompt(3)
    async with open_cache(CPU, engine=engine) as kv:
        publisher = KVEventPublisher(kv, f"ipc://{tmp_path}/pub")
        async with publisher, joined(publisher) as router:
            publisher.describe(keys, tokens_of(3))
            await keep(kv, engine, keys)
            await until_exact(router, kv, [keys])
            await (publisher if first == "publisher" else kv).aclose()
            await until(lambda: router.listen().hashes() == {})
            with pytest.raises(ClosedError):
                publisher.describe(keys, tokens_of(3))
        await publisher.aclose()
        try:
            await until(lambda: "tiered-kv-events" not in {thread.name for thread in threading.enumerate()})
        except TimeoutError:  # seen once, and never again: where does it stand?
            faulthandler.dump_traceback(all_threads=True)
            raise
        if first == "publisher":
            async with KVEventPublisher(kv, f"ipc://{tmp_path}/pub"):
                pass
        with pytest.raises(ClosedError, match="once"):
            async with publisher:
                pass


async def test_routers_that_come_and_go_are_told_everything_at_most_so_often(tmp_path: Path) -> None:
    """However many join: the others are not kept busy by them."""
    engine = Engine()
    async with (
        open_cache(CPU, engine=engine) as kv,
        publishing(kv, tmp_path, snapshot_every_s=3600, buffer_steps=1) as publisher,
        joined(publisher) as router,
    ):
        await drive(kv, publisher, engine, 3)
        for _ in range(5):
            router.ask(0)  # is not kept any more
            await until_answered(router)
        assert publisher.statistics().num_snapshots == 1


async def test_a_snapshot_that_fails_is_tried_again_no_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault of ours neither spins nor fills a log; what changes meanwhile is told all the same."""
    engine = Engine()

    def fails(_: RouterBooks) -> Iterator[list[Any]]:
        raise RuntimeError("planted")

    async with open_cache(CPU, engine=engine) as kv, publishing(kv, tmp_path, snapshot_every_s=3600) as publisher:
        assert publisher.endpoint is not None
        monkeypatch.setattr(RouterBooks, "everything", fails)
        router = Router(publisher.endpoint, publisher.replay_endpoint)
        try:
            await until(lambda: "planted" in caplog.text)
            for seed in range(4):
                keys = prompt(2, seed=seed)
                publisher.describe(keys, tokens_of(2, seed))
                await kv.store(keys, engine.compute(keys))
            await until(lambda: len(told_by(router)) >= 3, on_wait=router.listen)
        finally:
            router.close()
    assert len([each for each in caplog.records if "background.failed" in each.message]) <= 2  # of new weights is one


async def test_a_publisher_that_gets_no_thread_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its endpoint nor a descriptor, nor what would block whoever collects it: the next one begins."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "tiered-kv-events":
            raise RuntimeError("can't start new thread")
        start(thread)

    def num_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async with open_cache(CPU) as kv:
        before = num_open()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            for _ in range(3):
                with pytest.raises(RuntimeError, match="new thread"):
                    await KVEventPublisher(kv, f"ipc://{tmp_path}/pub").__aenter__()
        gc.collect()
        assert num_open() == before
        async with publishing(kv, tmp_path):
            pass


async def test_another_topic_is_not_for_us(tmp_path: Path) -> None:
    """Who subscribes to something else costs nobody a snapshot; a prefix of the topic is ours."""
    engine = Engine()
    async with (
        open_cache(CPU, engine=engine) as kv,
        publishing(kv, tmp_path, topic="kv@pod-1@model") as publisher,
    ):
        other = Router(f"ipc://{tmp_path}/pub", topic="metrics")
        async with joined(publisher, topic="kv@pod-1"):
            assert publisher.statistics().num_snapshots == 1
        other.close()


async def test_a_taken_endpoint_is_refused(tmp_path: Path) -> None:
    """In words, with nothing left behind; and a port of nobody's is chosen where asked."""
    async with open_cache(CPU) as kv, KVEventPublisher(kv, "tcp://127.0.0.1:*") as publisher:
        port = publisher.endpoint.rpartition(":")[2]
        assert int(port) > 0
        with pytest.raises(ConfigurationError, match=r"cannot listen on .*in use"):
            async with KVEventPublisher(kv, f"tcp://*:{port}"):
                pass
        with pytest.raises(ConfigurationError, match="cannot connect to 'nowhere'"):
            async with KVEventPublisher(kv, "nowhere"):
                pass
        for port in ("99999", "-1"):
            with pytest.raises(ConfigurationError, match="a port is at most 65535"):
                async with KVEventPublisher(kv, f"tcp://127.0.0.1:{port}"):
                    pass
        for wrong in (
            {"endpoint": 5557},
            {"endpoint": "ipc://a", "topic": 5},
            {"endpoint": "ipc://a", "replay_endpoint": 5},
        ):
            with pytest.raises(ConfigurationError, match="must be a str, got 5"):
                KVEventPublisher(kv, **wrong)


WRONG: list[tuple[Callable[[KVEventPublisher], None], str]] = [
    (lambda p: p.describe(prompt(3), tokens_of(2)), "3 blocks of 16 tokens have 48, got 32"),
    (lambda p: p.describe(prompt(3)[1:], tokens_of(2)), "begin with block 1: give parent="),
    (lambda p: p.describe(prompt(3)[2:], tokens_of(1), parent=prompt(3)[:1]), "end right before block 2"),
    (lambda p: p.describe(prompt(3)[2:], tokens_of(1), parent=prompt(3)[:2], hashes=[1]), "parent is the u64"),
    (lambda p: p.describe(prompt(1), tokens_of(1), hashes=[-1]), "ints in"),
    (lambda p: p.describe(prompt(2), tokens_of(2), hashes=[1]), "2 blocks, 1 hashes"),
    (lambda p: p.describe(prompt(2), tokens_of(2), extra_keys=[None]), "2 blocks, 1 entries"),
    (lambda p: p.describe(prompt(1), tokens_of(1), extra_keys={("a",)}), "must be a list"),  # type: ignore[arg-type]
    (lambda p: p.describe(prompt(1), [-1] * BLOCK_SIZE), "token ids must lie in"),
    (lambda p: p.describe([1, 2], tokens_of(1)), "keys must be BlockKeys"),  # type: ignore[arg-type]
    (lambda p: p.describe(prompt(3)[2:], tokens_of(1), parent=2**64), "no event can hold it: can't serialize ints"),
    (lambda p: p.describe(prompt(1), tokens_of(1), lora_name="\ud800"), "no event can hold it: 'utf-8' codec"),
    (lambda p: p.describe(prompt(1), tokens_of(1), extra_keys=[(np.int64(1),)]), "numpy.int64"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
async def test_what_cannot_be_right_is_refused(number: int, tmp_path: Path) -> None:
    """Where it is said, and before anything is told."""
    call, words = WRONG[number]
    async with open_cache(CPU) as kv, publishing(kv, tmp_path) as publisher:
        with pytest.raises(ConfigurationError, match=words):
            call(publisher)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"form": "list"}, "form must be"),
        ({"media": {"nvme": "STORAGE"}}, "media names 'nvme'; this cache owns cpu"),
        ({"media": {"cpu": "DRAM"}}, "media are CPU, GPU, STORAGE, got 'DRAM'"),
        ({"localities": {"cpu": "HERE"}}, "localities are LOCAL, REMOTE"),
        ({"buffer_steps": 0}, "buffer_steps must be"),
        ({"snapshot_every_s": -1}, "snapshot_every_s must be"),
    ],
)
async def test_settings_that_cannot_work_are_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    """None is invented, and no tier is named that is not there."""
    async with open_cache(CPU) as kv:
        with pytest.raises(ConfigurationError, match=words):
            async with publishing(kv, tmp_path, **options):
                pass


async def test_a_closed_publisher_says_so() -> None:
    """Before it is opened, too."""
    async with open_cache(CPU) as kv:
        publisher = KVEventPublisher(kv, "inproc://events")
        with pytest.raises(ClosedError):
            publisher.describe(prompt(1), tokens_of(1))
        with pytest.raises(ClosedError):
            publisher.statistics()


@pytest.mark.slow
def test_without_the_extra_it_says_what_to_install() -> None:
    """And the library imports all the same, without ZMQ."""
    program = (
        "import sys; sys.modules['zmq'] = None; import asyncio\n"
        "from tiered_kv.telemetry import KVEventPublisher\n"
        "asyncio.run(KVEventPublisher(None, 'tcp://*:1').__aenter__())"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "KV events need zmq: pip install 'tiered-kv[events]'" in ran.stderr
