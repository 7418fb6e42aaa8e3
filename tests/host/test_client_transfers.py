"""Loads from the back, places and swaps of a client: what a cache of one's own does, through a server."""

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from tests.host.test_hostile import attached_stranger
from tests.support.any_layout import LIMITS, AnyEngine, cpu, nvme, prompt
from tests.support.caches import Recorder, until
from tests.support.serving import attached, serving
from tiered_kv import ConfigurationError, ConnectedKV, CPULoadStoreSpec, FileLoadStoreSpec, Shard
from tiered_kv.host import protocol, wire
from tiered_kv.host.protocol import Keys
from tiered_kv.testing import ScriptedDevice
from tiered_kv.transfers.transfer_requests import Order
from tiered_kv.values.errors import Reason
from tiered_kv.values.events import BlocksLoaded, DeviceFailed
from tiered_kv.values.results import StoreResult

KEYS = prompt(32)


@asynccontextmanager
async def stored(tmp_path: Path, place: str) -> AsyncIterator[tuple[ConnectedKV, AnyEngine]]:
    """Have a client of a server that has the blocks in one of its tiers, and an engine that has none of them."""
    engine = AnyEngine()
    with serving(tmp_path, cpu(64), nvme(tmp_path / "disk")) as server:
        async with attached(server, engine) as kv:
            await (await kv.store(KEYS, engine.fill(KEYS, range(32)))).settled()
            if place == "nvme":
                await kv.evict(KEYS, tier="cpu")
            engine.wipe()
            yield kv, engine


@pytest.mark.parametrize("place", ["cpu", "nvme"])
async def test_whole_from_the_back_if_nobody_computes(place: str, tmp_path: Path) -> None:
    """All of it comes, from memory at once or from a disk part by part."""
    async with stored(tmp_path, place) as (kv, engine):
        loaded = await kv.start_load(KEYS, engine.spec(range(32)), order="back")
        assert (loaded.num_blocks, loaded.by_tier) == (32, {place: 32})
        assert loaded.mask.all()
        assert engine.count_right(KEYS, range(32)) == 32


@pytest.mark.parametrize("place", ["cpu", "nvme"])
async def test_what_is_claimed_is_not_touched(place: str, tmp_path: Path) -> None:
    """Of what the engine has claimed not a byte is written, whatever the server has asked for meanwhile."""
    async with stored(tmp_path, place) as (kv, engine):
        handle = kv.start_load(KEYS, engine.spec(range(32)), order="back")
        assert handle.stop_before(10) == 10
        assert handle.stop_before(4) == 10
        loaded = await handle
        assert loaded.mask.tolist() == [False] * 10 + [True] * 22
        assert (loaded.num_blocks, loaded.num_requested, loaded.by_tier) == (0, 32, {place: 22})
        assert engine.right(KEYS, range(32)) == loaded.mask.tolist()
        assert handle.stop_before(20) == 10
        assert not any(tier.leased for tier in kv.stats().tiers)


async def test_an_engine_and_a_load_meet(tmp_path: Path) -> None:
    """Block by block the engine claims what it computes, until the load has what comes next; together it is all."""
    async with stored(tmp_path, "nvme") as (kv, engine):
        handle, computed = kv.start_load(KEYS, engine.spec(range(32)), order="back"), 0
        while computed < 32 and handle.stop_before(computed + 1) == computed + 1:
            engine.fill(KEYS[computed : computed + 1], [computed])
            computed += 1
            await kv.lookup(KEYS[:1])
        loaded = await handle
        assert loaded.mask[computed:].all()
        assert engine.count_right(KEYS, range(32)) == 32


async def test_how_a_load_ends_is_said_once(tmp_path: Path) -> None:
    """Of one that is in memory it is said with its copy; at the end only if it came to less."""
    engine = AnyEngine()
    with serving(tmp_path, cpu(64)) as server:
        async with attached(server, engine) as kv:
            await kv.store(KEYS, engine.fill(KEYS, range(32)))
            said = Keys.of(KEYS, kv.namespace().epoch)
            with attached_stranger(server) as (connection, _):
                for number, error in ((1, ""), (2, "failed")):
                    connection.sendall(wire.frame(protocol.Load(number, said, 60.0, 0, layerwise=False, gaps=False)))
                    copy = hear(connection)
                    assert isinstance(copy, protocol.Copy)
                    assert (copy.id, copy.by_tier) == (number, {"cpu": 32})
                    connection.sendall(wire.frame(protocol.Copied(number, copy.number, error)))
                loaded = hear(connection)
                assert isinstance(loaded, protocol.Loaded)
                assert (loaded.id, loaded.num_blocks, loaded.faults[0].reason) == (2, 0, "copy failed")
                connection.sendall(wire.frame(protocol.Bye()))


def hear(connection: socket.socket) -> object:
    """Return the next message of a server."""
    length = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")
    return protocol.reply_from(connection.recv(length, socket.MSG_WAITALL))


async def test_a_load_from_the_back_ends_with_its_server(tmp_path: Path) -> None:
    """What was asked for already is copied, as its memory is there. What came is right, the rest may be claimed."""
    engine, may_begin = AnyEngine(), threading.Event()
    limits = LIMITS.model_copy(update={"close_timeout_s": 1.0})  # it waits for the copy for so long
    with ExitStack() as running:
        server = running.enter_context(serving(tmp_path, cpu(64), limits=limits))
        async with attached(server, engine, timeout_s=1.0) as kv:
            await kv.store(KEYS, engine.fill(KEYS, range(32)))
            engine.wipe()
            handle = kv.start_load(KEYS, engine.spec(range(32)), order="back", after=may_begin)
            await asyncio.to_thread(running.close)
            await until(lambda: not kv.is_attached)
            may_begin.set()
            loaded = await handle
            assert [fault.tier for fault in loaded.faults] == ["host"]
            assert engine.right(KEYS, range(32)) == loaded.mask.tolist() == sorted(loaded.mask.tolist())
            assert handle.stop_before(32) == 32 - loaded.mask.sum()


async def test_a_load_from_the_back_that_is_late_brings_nothing(tmp_path: Path) -> None:
    """All of it may be claimed."""
    engine = AnyEngine()
    with serving(tmp_path, cpu(64)) as server:
        async with attached(server, engine) as kv:
            await kv.store(KEYS, engine.fill(KEYS, range(32)))
            handle = kv.start_load(KEYS, engine.spec(range(32)), order="back", deadline_s=0.0)
            loaded = await handle
            assert (loaded.num_blocks, dict(loaded.by_tier)) == (0, {})
            assert not loaded.mask.any()
            assert handle.stop_before(32) == 32


@pytest.mark.parametrize("how", [{}, {"gaps": True}, {"layerwise": True}, {"order": "back"}])
async def test_a_client_hears_why_a_block_did_not_come(tmp_path: Path, how: dict[str, Any]) -> None:
    """By the result and the event, in the words of a cache of one's own; and of the client's own end of it too."""
    engine, events = AnyEngine(), Recorder()
    with ExitStack() as running:
        server = running.enter_context(serving(tmp_path, cpu(64)))
        async with attached(server, engine, emit=events, timeout_s=1.0) as kv:
            await kv.store(KEYS[:8], engine.fill(KEYS[:8], range(8)))
            into = engine.spec(range(32))
            loads = [await kv.start_load(KEYS[start:stop], into[start:stop], **how) for start, stop in ((0, 8), (0, 9))]
            await kv.evict(KEYS[:8])
            loads.append(await kv.start_load(KEYS[:8], into[:8], **how))
            await asyncio.to_thread(running.close)
            await until(lambda: not kv.is_attached)
            loads.append(await kv.start_load(KEYS[:8], into[:8], **how))
            said = ["", "never stored", "removed", "server away"]
            assert [loaded.missed_because for loaded in loads] == said
            assert [event.missed_because for event in events.of(BlocksLoaded)] == said


async def test_what_cannot_be_stopped_is_said(tmp_path: Path) -> None:
    """Wrong calls are refused where they are made."""
    engine = AnyEngine()
    with serving(tmp_path, cpu(64)) as server:
        async with attached(server, engine) as kv:
            into = engine.spec(range(32))
            with pytest.raises(ConfigurationError, match="only a load from the back"):
                kv.start_load(KEYS, into).stop_before(1)
            with pytest.raises(ConfigurationError, match="not one of the load's 32"):
                kv.start_load(KEYS, into, order="back").stop_before(33)
            with pytest.raises(ConfigurationError, match="neither layers"):
                kv.start_load(KEYS, into, order="back", gaps=True)


async def test_layers_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """A client says of each what a cache of one's own says: no number, no such layer, one that was given."""
    engine = AnyEngine()
    with serving(tmp_path, cpu(64)) as server:
        async with attached(server, engine) as kv:
            handle = kv.start_store(KEYS, engine.fill(KEYS, range(32)), layerwise=True)
            handle.store_layer(np.int64(0))  # type: ignore[arg-type]  # an int, though not Python's
            for wrong in (1.5, 1.0, "0", None, True):
                with pytest.raises(ConfigurationError, match="layer must be an int, got"):
                    handle.store_layer(wrong)  # type: ignore[arg-type]  # wrong on purpose
            for layer, message in ((0, "layer 0 was stored already"), (2, "not one of"), (-1, "not one of")):
                with pytest.raises(ConfigurationError, match=message):
                    handle.store_layer(layer)
            handle.store_layer(1)
            assert (await handle).num_stored == 32
            plain = kv.start_store(KEYS, engine.spec(range(32)))
            with pytest.raises(ConfigurationError, match="layerwise=True"):
                plain.store_layer(0)
            await plain


async def test_a_lookup_says_where_blocks_are(tmp_path: Path) -> None:
    """Slots of the server's memory, and files on its disk, which any process on the host can read."""
    engine, disk = AnyEngine(), tmp_path / "disk"
    with serving(tmp_path, cpu(64), nvme(disk)) as server:
        async with attached(server, engine) as kv, attached(server, shard=Shard.every(2)) as scheduler:
            await (await kv.store(KEYS, engine.fill(KEYS, range(32)))).settled()
            await kv.evict(KEYS[4:], tier="cpu")
            memory, files = (await kv.lookup(KEYS, where=True)).runs
            assert isinstance(memory.spec, CPULoadStoreSpec)
            assert len(memory.spec) == 4
            assert isinstance(files.spec, FileLoadStoreSpec)
            for name, offset, length in files.spec.places():
                assert name.startswith(os.fspath(disk))
                assert (await anyio.Path(name).stat()).st_size >= offset + length
            assert all(run.spec is None for run in (await kv.lookup(KEYS)).runs)
            with pytest.raises(ConfigurationError, match="2 ranks"):
                await scheduler.lookup(KEYS, where=True)


async def test_pages_are_swapped_by_number_without_a_server_too(tmp_path: Path) -> None:
    """The slots are the engine's own, in its own process: they outlive the server."""
    engine, keys = AnyEngine(), prompt(6)
    limits = LIMITS.model_copy(update={"swap_space": 1 << 20})
    with serving(tmp_path, cpu(64), limits=limits) as server:
        stack = attached(server, engine)
        kv = await stack.__aenter__()
        pages = engine.fill(keys, range(6)).ids.tolist()
        moved = await kv.swap(blocks_to_swap_out={page: number for number, page in enumerate(pages)})
        assert moved.num_out == len(pages)
    engine.wipe()
    moved = await kv.swap(dict(enumerate(pages)))
    assert (moved.num_in, moved.fault) == (len(pages), None)
    assert engine.count_right(keys, range(6)) == 6
    with pytest.raises(ConfigurationError, match="blocks_to_swap_in"):
        await kv.swap({10**6: 0})
    await stack.__aexit__(None, None, None)


async def test_without_swap_space_there_is_no_swap(tmp_path: Path) -> None:
    """The server's settings say how much there is."""
    with serving(tmp_path, cpu(64)) as server:
        async with attached(server, AnyEngine()) as kv:
            with pytest.raises(ConfigurationError, match="swap_space"):
                await kv.swap(blocks_to_swap_out={0: 0})


@pytest.mark.parametrize("order", ["front", "back"])
async def test_a_client_whose_device_is_lost_asks_for_nothing_more(tmp_path: Path, order: Order) -> None:
    """Its loads and stores end at once, and say why: for its slots the server would evict what others have there."""
    engine, device, emit = AnyEngine(), ScriptedDevice(), Recorder()
    with serving(tmp_path, cpu(32)) as server:
        async with attached(server, engine) as others, attached(server, engine, device=device, emit=emit) as kv:
            await others.store(KEYS, engine.fill(KEYS, range(32)))
            device.fail(OSError("lost"))
            loaded = await kv.start_load(KEYS, engine.spec(range(32)), order=order)
            assert (loaded.num_blocks, loaded.missed_because) == (0, "device unusable")
            assert [(each.tier, each.detail) for each in loaded.faults] == [("engine", "OSError('lost')")]
            stored = await kv.store(prompt(8, seed=1), engine.spec(range(8)))
            assert stored.drop_reasons == {"device unusable": 8}
            assert [each.dropped for each in await stored.settled()] == [8]
            stats = kv.stats()
            assert (stats.is_device_usable, stats.dropped_because) == (False, {Reason.DEVICE_UNUSABLE: 8})
            assert others.stats().is_device_usable
            await until(lambda: len(emit.of(DeviceFailed)) == 1)
            assert (await others.lookup(KEYS)).num_blocks == 32


class LateLoop(asyncio.SelectorEventLoop):
    """An event loop on whose clock more time passes, as where something holds it up."""

    late_s = 0.0

    def time(self) -> float:
        """Return the time, as late as it is."""
        return super().time() + self.late_s


def test_a_store_has_its_time_from_when_it_begins(tmp_path: Path) -> None:
    """As in a cache of one's own: what held the loop up before takes nothing of it."""

    async def store_late(loop: LateLoop) -> None:
        engine, is_computed = AnyEngine(), threading.Event()
        async with attached(server, engine) as kv:
            ticket = kv.submit_store(KEYS, engine.fill(KEYS, range(32)), after=is_computed)
            loop.late_s += 1000.0
            for _ in range(3):  # together less than a store may take
                await kv.lookup(KEYS)  # some turns of the loop
                loop.late_s += 0.5
            await kv.lookup(KEYS)
            is_computed.set()
            while not (ended := kv.poll()):
                await kv.lookup(KEYS)
            assert [(which, result.num_stored) for which, result in ended if isinstance(result, StoreResult)] == [
                (ticket, 32)
            ]

    with serving(tmp_path, cpu(64)) as server, asyncio.Runner(loop_factory=LateLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, LateLoop)
        runner.run(store_late(loop))
