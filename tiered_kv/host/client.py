"""A cache that a server of this host keeps: made by `TieredKV.connect`.

The server decides and has the storage; this process copies between its tensors and memory that both have mapped. While
no server is there lookups miss, loads bring 0 blocks, and stores are dropped and counted; it is attached again as soon
as there is one. Nothing of that raises where an engine serves.
"""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn, Self
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from tiered_kv.block_cache import BlockCache
from tiered_kv.errors import BackendUnavailableError, ClosedError, ConfigurationError, LayoutMismatchError
from tiered_kv.events import BlocksLoaded, BlocksStored, Emit, EpochAdvanced, SequencePreempted
from tiered_kv.explain import Explanation
from tiered_kv.groups import GroupNeed, GroupsLoad, check_needs, length_in_place
from tiered_kv.hints import ReuseHint, check_hint
from tiered_kv.host import link, wire
from tiered_kv.host.attachment import Attachment
from tiered_kv.host.moving import FarLoad, FarStore
from tiered_kv.keys import BlockKeys, ModelIdentity, Namespace, Shard, epoch_digest, salt_digest
from tiered_kv.layout import KVCaches, KVGroup, KVLayout, fingerprint
from tiered_kv.log import log
from tiered_kv.loop_calls import LoopCalls
from tiered_kv.memory.codec import Codec, make_codec
from tiered_kv.memory.device import Device
from tiered_kv.memory.lanes import Lane, Lanes
from tiered_kv.memory.make import DeviceLike, make_device, resolve
from tiered_kv.results import (
    BlockState,
    CacheStatistics,
    LoadResult,
    LookupResult,
    PinResult,
    PrefetchResult,
    StoreResult,
    SwapOutResult,
    TierFault,
    TierRun,
)
from tiered_kv.specs import EngineBlocks, GPULoadStoreSpec
from tiered_kv.telemetry.logs import guarded, log_event
from tiered_kv.tiers.budget import Priority
from tiered_kv.tiers.tasks import Tasks, WorkerPool, in_a_thread
from tiered_kv.transfers.bindings import Binding, Bindings
from tiered_kv.transfers.handles import Handle, cancel_each, each_of
from tiered_kv.transfers.load_handle import LoadHandle
from tiered_kv.transfers.prefetch import HostLease, PrefetchHandle
from tiered_kv.transfers.requests import Order
from tiered_kv.transfers.store import StoreHandle
from tiered_kv.transfers.submissions import LoadTicket, StoreTicket, Submissions, load_failed, store_failed
from tiered_kv.validation import (
    check_asyncio,
    check_emit,
    check_keys,
    check_one_rank,
    check_pages,
    check_priority,
    check_seconds,
    check_shards,
    check_specs,
    check_ttl,
)

_SCHEME: Final = "unix"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_PROBE_S: Final = 0.5
"""How often a server that did not answer in time is asked whether it is there again."""
_NOW_S: Final = 1.0
"""What a call that blocks its thread may take at most."""
_LONG_S: Final = 60.0
"""What calls for operators may take: `flush`, `clear`, `evict`."""
_PAST_EPOCHS: Final = 8


@dataclass(frozen=True)
class _Group:
    """One KV group, as memory is bound to it."""

    group: KVGroup
    codec: Codec | None
    h2d: Lanes
    d2h: Lanes
    loop_calls: LoopCalls
    gpu: None = None


class _Here:
    """What this process has while the client is open, whatever server there is."""

    def __init__(self, device: DeviceLike, layout: KVLayout, codec: str, loop_calls: LoopCalls) -> None:
        self.loop = asyncio.get_running_loop()
        self.codec = codec
        self.loop_calls = loop_calls
        self.lifetime = AsyncExitStack()
        self.tasks = Tasks()
        self.bindings = Bindings()
        self.submissions = Submissions(loop_calls)
        self.device = device if isinstance(device, Device) else make_device(device)
        if self.device is not device:
            self.lifetime.push_async_callback(in_a_thread, loop_calls, self.device.close, 1.0)
        h2d, d2h = Lanes(self.device, "h2d"), Lanes(self.device, "d2h")
        self.lifetime.callback(h2d.close)
        self.lifetime.callback(d2h.close)
        self.lifetime.callback(self.bindings.forget)
        self.groups = [_Group(each, make_codec(codec, each), h2d, d2h, loop_calls) for each in layout.groups]


class ConnectedKV(BlockCache):
    """A cache whose tiers are a server's; made by `TieredKV.connect`. Its calls are those of `BlockCache`.

    What they say differs in little, which is said here.
    """

    def __init__(
        self,
        url: str,
        *,
        model: ModelIdentity,
        layout: KVLayout,
        shard: Shard | tuple[Shard, ...] | None = None,
        device: DeviceLike | None = None,
        emit: Emit | Sequence[Emit] = log_event,
        name: str = "",
        read_only: bool = False,
        timeout_s: float = 5.0,
    ) -> None:
        """See `TieredKV.connect`."""
        if not isinstance(model, ModelIdentity) or not isinstance(layout, KVLayout):
            raise ConfigurationError("connect() needs model=ModelIdentity(...) and layout=KVLayout(...)")
        check_seconds("timeout_s", timeout_s)
        self._path = _path_in(url)
        self._layout = layout
        self._model = model
        self._shards = check_shards(shard)
        self._device = resolve(device)
        self._emit = guarded(check_emit(emit))
        self._timeout_s = timeout_s
        self._epoch = epoch_digest(model.weights)
        self._past_epochs: list[bytes] = []
        name = name or f"{os.path.basename(sys.argv[0]) or 'python'}-{os.getpid()}"  # noqa: PTH119 - of no path
        self._opening = wire.Attach.of(name, model, layout, self._shards, is_read_only=read_only)
        self._here: _Here | None = None
        self._there: Attachment | None = None
        self._closing: asyncio.Task[None] | None = None
        self._is_opening = self._is_draining = False
        self._changed = asyncio.Event()
        self._attaching = Tasks()

    @property
    def is_attached(self) -> bool:
        """Whether a server is there and answers."""
        there = self._there
        return there is not None and there.is_open and not there.is_silent

    # Finding and moving blocks.

    async def lookup(self, keys: BlockKeys, *, where: bool = False) -> LookupResult:
        """See `BlockCache.lookup`; ``where`` a block is only an embedded cache says."""
        self._checked(keys)
        if where:
            raise ConfigurationError("where=True is for a cache in this process")
        return _found(keys, await self._ask(lambda id_: wire.Lookup(id_, self._said(keys)), self._timeout_s))

    def start_load(
        self,
        keys: BlockKeys,
        into: EngineBlocks,
        *,
        after: object = None,
        deadline_s: float | None = None,
        priority: Priority = Priority.LOAD,
        layerwise: bool = False,
        gaps: bool = False,
        order: Order = "front",
    ) -> LoadHandle:
        """See `BlockCache.start_load`; from the back only a cache in this process loads."""
        self._open()
        if order != "front":
            raise ConfigurationError("order='back' is for a cache in this process")
        return self._prepare_load(keys, into, after, deadline_s, priority, layerwise=layerwise, gaps=gaps)()

    def start_store(
        self,
        keys: BlockKeys,
        source: EngineBlocks,
        *,
        after: object = None,
        epoch: str | None = None,
        layerwise: bool = False,
        hint: ReuseHint | None = None,
    ) -> StoreHandle:
        """See `BlockCache.start_store`; hints do not reach the host's cache."""
        self._open()
        check_hint(hint)
        return self._prepare_store(keys, source, after, epoch, layerwise=layerwise)()

    def submit_load(
        self,
        keys: BlockKeys,
        into: EngineBlocks,
        *,
        after: object = None,
        deadline_s: float | None = None,
        priority: Priority = Priority.LOAD,
        gaps: bool = False,
    ) -> LoadTicket:
        """See `BlockCache.submit_load`."""
        here = self._open_here(anywhere=True)
        start = self._prepare_load(keys, into, after, deadline_s, priority, layerwise=False, gaps=gaps)
        return here.submissions.submit(start, partial(load_failed, len(keys)))

    def submit_store(
        self, keys: BlockKeys, source: EngineBlocks, *, after: object = None, epoch: str | None = None
    ) -> StoreTicket:
        """See `BlockCache.submit_store`."""
        here = self._open_here(anywhere=True)
        start = self._prepare_store(keys, source, after, epoch, layerwise=False)
        return here.submissions.submit(start, partial(store_failed, len(keys)))

    def poll(self, timeout_s: float = 0.0) -> list[tuple[LoadTicket, LoadResult] | tuple[StoreTicket, StoreResult]]:
        """See `BlockCache.poll`."""
        check_seconds("timeout_s", timeout_s)
        return self._here.submissions.poll(timeout_s) if self._here else []

    async def load_groups(
        self, needs: Sequence[GroupNeed], into: Sequence[GPULoadStoreSpec], *, after: object = None
    ) -> GroupsLoad:
        """See `BlockCache.load_groups`."""
        here, step = self._open_here(), check_needs(needs)
        length = min(len(need.keys) * need.keys.block_size for need in needs) // step * step
        wanted = [need.at(length) for need in needs]
        check_specs(here.bindings, wanted, into)
        handles = [self.start_load(keys, spec, after=after) for keys, spec in zip(wanted, into, strict=True)]
        task = here.tasks.spawn(each_of(handles), f"load {len(needs)} KV groups")
        results = await Handle(task, partial(cancel_each, handles))
        return GroupsLoad(length_in_place(needs, wanted, results), tuple(results))

    # The engine's memory, which is bound here.

    def register_kv_caches(self, kv_caches: KVCaches, *, group: int = 0, axes: str | None = None) -> None:
        """See `BlockCache.register_kv_caches`."""
        self._open_here().bindings.register_caches(kv_caches, self._group(group), group=group, axes=axes)

    def register_host_pool(
        self,
        name: str,
        buffer: KVCaches,
        *,
        group: int = 0,
        axes: str | None = None,
        slot_bytes: int | None = None,
        direct: bool = False,
    ) -> None:
        """See `BlockCache.register_host_pool`; with ``direct`` too blocks come by way of the server's memory."""
        here = self._open_here()
        here.bindings.register_pool(
            name, buffer, self._group(group), here.lifetime,
            group=group, axes=axes, slot_bytes=slot_bytes, direct=False,
        )  # fmt: skip

    # What is done ahead, and what stays.

    def prefetch(self, keys: BlockKeys, *, to: str = "cpu") -> PrefetchHandle:
        """See `BlockCache.prefetch`."""
        here = self._open_here()
        self._checked(keys)
        task = here.tasks.spawn(self._prefetch(keys, to), f"prefetch {len(keys)} blocks")
        return Handle(task, partial(_cancel, task))

    async def _prefetch(self, keys: BlockKeys, to: str) -> PrefetchResult:
        there = self._there
        try:
            answer = await self._ask(
                lambda id_: wire.Prefetch(id_, self._said(keys), to), there.attached.load_timeout_s if there else 0.0
            )
        except asyncio.CancelledError:
            return PrefetchResult(0, 0)
        if isinstance(answer, wire.Prefetched):
            return PrefetchResult(answer.num_blocks, answer.num_moved, answer.faults)
        return PrefetchResult(0, 0, (TierFault("host", "server away", len(keys)),))

    def lease(self, keys: BlockKeys) -> AbstractAsyncContextManager[HostLease]:
        """See `BlockCache.lease`; it ends with the server, or this process, at the latest."""
        self._open()
        self._checked(keys)
        return self._lease(keys)

    @asynccontextmanager
    async def _lease(self, keys: BlockKeys) -> AsyncGenerator[HostLease]:
        there = self._there
        timeout_s = there.attached.load_timeout_s if there else 0.0
        answer = await self._ask(lambda id_: wire.Lease(id_, self._said(keys)), timeout_s)
        if there is None or not isinstance(answer, wire.Leased):
            yield HostLease([])
            return
        slab = there.slabs[answer.pool]
        try:
            yield HostLease([slab.payload(slot).toreadonly() for slot in wire.as_ids(answer.slots).tolist()])
        finally:
            there.send(wire.Release(answer.id))

    def touch(self, keys: BlockKeys, *, hint: ReuseHint | None = None) -> None:
        """See `BlockCache.touch`; hints do not reach the host's cache."""
        self._open()
        self._checked(keys)
        check_hint(hint)
        if self._there is not None and (hint is None or hint.probability > 0):
            self._there.send(wire.Touch(self._said(keys)))

    def pin(self, keys: BlockKeys, *, ttl_s: float) -> PinResult:
        """See `BlockCache.pin`. Pins end with this process, too; others' are their own."""
        self._open()
        self._checked(keys)
        check_ttl(ttl_s)
        answer = self._ask_now(lambda id_: wire.Pin(id_, self._said(keys), ttl_s))
        return PinResult(answer.number if isinstance(answer, wire.Number) else 0)

    def unpin(self, keys: BlockKeys) -> None:
        """See `BlockCache.unpin`: of the pins of this process."""
        self._open()
        self._checked(keys)
        if self._there is not None:
            self._there.send(wire.Unpin(self._said(keys)))

    async def swap_out(
        self, keys: BlockKeys, source: GPULoadStoreSpec, *, after: object = None, ttl_s: float = 600.0
    ) -> SwapOutResult:
        """See `BlockCache.swap_out`."""
        check_ttl(ttl_s)
        stored = await self.start_store(keys, source, after=after)
        answer = await self._ask(lambda id_: wire.Pin(id_, self._said(keys), ttl_s), self._timeout_s)
        num_pinned = answer.number if isinstance(answer, wire.Number) else 0
        self._emit(SequencePreempted(len(keys), stored.num_dropped, num_pinned))
        return SwapOutResult(**vars(stored), num_pinned=num_pinned)

    def start_swap(self, *_: object, **__: object) -> NoReturn:
        """Swap space by slots of the engine's own is for a cache in this process."""
        raise ConfigurationError("swap() by slot is for a cache in this process; swap_out() and swap_in() go by name")

    # From any thread; these block it for the time that the server needs to answer.

    def lookup_nowait(self, keys: BlockKeys) -> LookupResult:
        """See `BlockCache.lookup_nowait`. It asks the server, at most for a second."""
        self._checked(keys, anywhere=True)
        return _found(keys, self._ask_now(lambda id_: wire.Lookup(id_, self._said(keys), owned=True), anywhere=True))

    def membership(self, keys: BlockKeys) -> NDArray[np.int8]:
        """See `BlockCache.membership`. It asks the server, at most for a second."""
        self._checked(keys, anywhere=True)
        answer = self._ask_now(lambda id_: wire.Membership(id_, self._said(keys)), anywhere=True)
        if isinstance(answer, wire.States):
            return np.frombuffer(answer.states, np.int8)
        return np.full(len(keys), BlockState.MISS, np.int8)

    # What goes, and why.

    async def evict(self, keys: BlockKeys, *, tier: str | None = None) -> int:
        """See `BlockCache.evict`; of all engines that share these blocks.

        Raises:
            BackendUnavailableError: The server has not answered: they may be there.
        """
        self._checked(keys)
        answer = await self._ask(lambda id_: wire.Evict(id_, self._said(keys), tier), _LONG_S)
        return self._number_in(answer)

    async def clear(self) -> None:
        """Empty every tier that the server owns of this model's blocks, for all engines that share them.

        Raises:
            BackendUnavailableError: The server has not answered.
        """
        self._number_in(await self._ask(wire.Clear, _LONG_S))

    async def flush(self, *, sync: bool = False) -> None:
        """See `BlockCache.flush`; of all engines that share these blocks.

        Raises:
            BackendUnavailableError: The server has not answered.
        """
        self._number_in(await self._ask(lambda id_: wire.Flush(id_, sync), _LONG_S))

    async def drain(self, *, timeout_s: float | None = None) -> bool:
        """Take no more stores, and wait until all that were made are settled; say whether they were in time."""
        self._open()
        check_seconds("timeout_s", timeout_s)
        self._is_draining = True
        answer = await self._ask(lambda id_: wire.Flush(id_, sync=True), _LONG_S if timeout_s is None else timeout_s)
        return isinstance(answer, wire.Number)

    def advance_epoch(self, weights: str) -> None:
        """See `BlockCache.advance_epoch`; of this engine alone: others go on with the weights that they serve."""
        self._open()
        epoch = epoch_digest(weights)
        past = [self._epoch, *self._past_epochs]
        self._past_epochs = [each for each in past if each != epoch][:_PAST_EPOCHS]
        self._epoch = epoch
        self._emit(EpochAdvanced(weights))

    async def explain(self, keys: BlockKeys, *, ask: bool = False) -> list[Explanation]:
        """See `BlockCache.explain`; ``"server away"`` is a state, too."""
        self._checked(keys)
        before = tuple(self._past_epochs)
        timeout_s = _LONG_S if ask else self._timeout_s
        answer = await self._ask(lambda id_: wire.Explain(id_, self._said(keys), ask, before), timeout_s)
        if isinstance(answer, wire.Explained):
            return list(answer.blocks)
        return [Explanation("server away")] * len(keys)

    def stats(self) -> CacheStatistics:
        """See `BlockCache.stats`: of the model's cache in the server; without tiers while that is away."""
        self._open()
        answer = self._ask_now(wire.Stats)
        return answer.stats if isinstance(answer, wire.Counted) else CacheStatistics((), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)

    def events(self) -> NoReturn:
        """Changes are told by a cache in this process."""
        raise ConfigurationError("events() is for a cache in this process")

    def namespace(self, salt: str | bytes = b"", *, group: int = 0, rank: int = 0) -> Namespace:
        """See `BlockCache.namespace`."""
        here = self._open_here(anywhere=True)
        self._group(group)
        if not 0 <= rank < len(self._shards):
            raise ConfigurationError(f"rank {rank!r} of {len(self._shards)}: this cache has no such rank")
        name = fingerprint(self._model, self._layout, group, here.codec)
        return Namespace(name, self._epoch, salt_digest(salt), self._shards[rank].part)

    # Opening and closing.

    async def __aenter__(self) -> Self:
        """Attach.

        Raises:
            ConfigurationError: The server refuses this client, or is of another version.
            BackendUnavailableError: There is none, within the time of a call.
        """
        if self._here is not None or self._is_opening:
            raise ClosedError("a TieredKV is opened once; make another")
        check_asyncio()
        self._is_opening = True
        loop_calls = LoopCalls(asyncio.get_running_loop())
        self._beginning = WorkerPool("attach", 1, loop_calls)
        deadline, pause_s = asyncio.get_running_loop().time() + self._timeout_s, _FIRST_PAUSE_S
        try:
            while True:
                try:
                    begun = await self._begin()
                    break
                except BackendUnavailableError:
                    if asyncio.get_running_loop().time() + pause_s > deadline:
                        raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            try:
                self._here = _Here(self._device, self._layout, begun[1].codec, loop_calls)
            except BaseException:
                link.give_back(begun[0], begun[2])
                raise
            await self._attach(begun)
        except BaseException:
            self._beginning.close()
            raise
        finally:
            self._is_opening = False
        self._attaching.keep_running(self._stay_attached, "stay attached")
        return self

    async def aclose(self) -> None:
        """See `BlockCache.aclose`. What was stored stays with the server."""
        here = self._here
        if here is None or (self._closing is not None and self._closing.done()):
            return
        self._check_loop(here)
        if self._closing is None:
            self._closing = here.loop.create_task(self._close(here), name="close")
        await Handle(self._closing, lambda: None)

    async def _close(self, here: _Here) -> None:
        here.submissions.close()
        await self._attaching.aclose(0.0)
        self._beginning.close()
        if self._there is not None:
            for transfer in list(self._there.transfers.values()):
                transfer.lose()  # what is being copied is waited for with the device
            self._there.end()
        await here.tasks.aclose(1.0)
        await here.lifetime.aclose()

    async def _stay_attached(self) -> None:
        """Attach again whenever the server is gone, and ask one that is silent whether it is there."""
        pause_s = _FIRST_PAUSE_S
        while True:
            if self._there is None:
                try:
                    await self._attach(await self._begin())
                    pause_s = _FIRST_PAUSE_S
                    log("info", "host.attached_again", path=self._path)
                except (BackendUnavailableError, ConfigurationError) as error:
                    if isinstance(error, ConfigurationError):
                        log("error", "host.not_attached", path=self._path, error=str(error))
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            if self._there.is_silent:
                self._there.send(wire.Stats(self._there.number()))  # whatever comes ends the silence
            self._changed.clear()
            try:
                async with asyncio.timeout(_PROBE_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _begin(self) -> tuple[socket.socket, wire.Attached, list[int]]:
        """Connect, in a thread."""
        began = self._beginning.run(link.begin, self._path, self._opening, self._timeout_s)
        try:
            connection, attached, descriptors = await asyncio.shield(began)
        except asyncio.CancelledError:
            began.add_done_callback(_give_back)
            raise
        if not isinstance(attached, wire.Attached):
            link.give_back(connection, descriptors)
            raise ConfigurationError(f"the server answered {type(attached).__name__} to a client that attaches")
        return connection, attached, descriptors

    async def _attach(self, begun: tuple[socket.socket, wire.Attached, list[int]]) -> None:
        here, (connection, attached, descriptors) = self._here, begun
        assert here is not None  # noqa: S101 - it is being opened, or is open
        try:
            self._check(here, attached)
        except ConfigurationError:
            link.give_back(connection, descriptors)
            raise
        connection.settimeout(0.0)
        there = Attachment(self._path, connection, attached, descriptors, here.device, self._lost)
        await there.start()
        self._there = there

    def _check(self, here: _Here, attached: wire.Attached) -> None:
        """Raise unless a server keeps blocks as this client has bound its memory for."""
        if attached.codec != here.codec:
            raise ConfigurationError(f"the server keeps blocks as {attached.codec!r} now, it was {here.codec!r}")
        for slab in attached.slabs:
            group = here.groups[slab.group]
            wanted = group.codec.stored_bytes if group.codec else group.group.payload_bytes
            if slab.payload_bytes != wanted:
                raise LayoutMismatchError(f"the server's slots hold {slab.payload_bytes} bytes, a block has {wanted}")

    def _lost(self, there: Attachment) -> None:
        if self._there is there:
            self._there = None
            self._changed.set()
            if self._closing is None:
                log("warning", "host.server_lost", path=self._path)

    # What calls are made of.

    def _open_here(self, *, anywhere: bool = False) -> _Here:
        here = self._here
        if here is None or (self._is_opening and self._there is None):
            raise ClosedError("this TieredKV is not open yet: use it with 'async with'")
        if self._closing is not None:
            raise ClosedError("this TieredKV is closed")
        self._check_loop(here, anywhere=anywhere)
        return here

    def _open(self, *, anywhere: bool = False) -> Any:  # noqa: ANN401 - nothing of what a cache in this process has
        self._open_here(anywhere=anywhere)

    def _check_loop(self, here: _Here, *, anywhere: bool = False) -> None:
        if here.loop.is_closed():
            raise ClosedError("the event loop that opened this TieredKV is closed")
        if anywhere:
            return
        try:
            is_here = asyncio.get_running_loop() is here.loop
        except RuntimeError:
            is_here = False
        if not is_here:
            raise ConfigurationError(
                "a TieredKV is called on the event loop that opened it; other threads use submit_load, submit_store, "
                "poll, lookup_nowait and membership"
            )

    def _group(self, group: int) -> _Group:
        here = self._open_here(anywhere=True)
        check_one_rank(self._shards)
        if not 0 <= group < len(here.groups):
            raise ConfigurationError(f"KV group {group} of {len(here.groups)}: the layout has no such group")
        return here.groups[group]

    def _checked(self, keys: BlockKeys, *, anywhere: bool = False) -> None:
        """Raise unless these are keys of this layout."""
        here = self._open_here(anywhere=anywhere)
        if not isinstance(keys, BlockKeys):
            raise ConfigurationError(
                f"keys must be BlockKeys, from hash_blocks() or BlockKeys.from_hashes(), got {type(keys).__name__}"
            )
        if keys.group >= len(here.groups):
            raise ConfigurationError(f"KV group {keys.group} of {len(here.groups)}: the layout has no such group")
        check_keys(keys, here.groups[keys.group].group)

    def _said(self, keys: BlockKeys, epoch: bytes | None = None) -> wire.Keys:
        return wire.Keys.of(keys, self._epoch if epoch is None else epoch)

    async def _ask(self, make: Callable[[int], wire.Message], timeout_s: float) -> wire.Answer | None:
        """Ask the server; None if it is away. What is wrong with the call raises."""
        self._open()
        there = self._there
        return _raised(await there.ask(make, timeout_s)) if there is not None else None

    def _ask_now(self, make: Callable[[int], wire.Message], *, anywhere: bool = False) -> wire.Answer | None:
        self._open(anywhere=anywhere)
        there = self._there
        if there is None:
            return None
        answer = there.ask_now(make, min(self._timeout_s, _NOW_S))
        if answer is None:
            there.is_silent = True
        return _raised(answer)

    def _number_in(self, answer: wire.Answer | None) -> int:
        if not isinstance(answer, wire.Number):
            raise BackendUnavailableError(f"the server at {self._path} has not answered")
        return answer.number

    def _prepare_load(
        self,
        keys: BlockKeys,
        into: EngineBlocks,
        after: object,
        deadline_s: float | None,
        priority: Priority,
        *,
        layerwise: bool,
        gaps: bool,
    ) -> Callable[[], LoadHandle]:
        """Check a load and enqueue its wait, in any thread; return what starts it on the event loop."""
        here, epoch = self._open_here(anywhere=True), self._epoch
        self._checked(keys, anywhere=True)
        binding = here.bindings.find(into, keys.group)
        pages = check_pages(binding, keys, into)
        check_priority(priority)
        check_seconds("deadline_s", deadline_s)
        if layerwise and gaps:
            raise ConfigurationError(
                "layers of a load with gaps cannot be waited for: it is either layerwise or has gaps"
            )
        there = self._there
        if deadline_s is None:
            deadline_s = there.attached.load_timeout_s if there is not None else 0.0
        deadline = here.loop.time() + deadline_s
        said, lane = self._said(keys, epoch), binding.h2d.take(after)

        def start() -> LoadHandle:
            load = FarLoad(
                *self._facts(keys, binding, pages, lane, deadline),
                is_current=lambda: self._epoch == epoch, layerwise=layerwise, gaps=gaps,
            )  # fmt: skip
            load.ended.add_done_callback(self._say_loaded)
            left_s = max(0.0, deadline - here.loop.time())
            load.start(self._there, lambda id_: wire.Load(id_, said, left_s, int(priority), layerwise, gaps))
            here.tasks.watch(load.ended, load.revoke)
            return load.handle()

        return start

    def _prepare_store(
        self, keys: BlockKeys, source: EngineBlocks, after: object, epoch: str | None, *, layerwise: bool
    ) -> Callable[[], StoreHandle]:
        """Check a store and enqueue its wait, in any thread; return what starts it on the event loop."""
        here = self._open_here(anywhere=True)
        self._checked(keys, anywhere=True)
        binding = here.bindings.find(source, keys.group)
        pages = check_pages(binding, keys, source)
        said = self._said(keys, None if epoch is None else epoch_digest(epoch))
        lane = binding.d2h.take_own(after) if layerwise else binding.d2h.take(after)

        def start() -> StoreHandle:
            there = self._there
            timeout_s = there.attached.store_timeout_s if there is not None else 0.0
            store = FarStore(
                *self._facts(keys, binding, pages, lane, here.loop.time() + timeout_s), layerwise=layerwise
            )
            store.ended.add_done_callback(self._say_stored)
            if self._is_draining:
                store.refuse("draining")
            else:
                store.start(there, lambda id_: wire.Store(id_, said, layerwise))
            here.tasks.watch(store.ended, store.revoke)
            return StoreHandle(store.ended, store)

        return start

    def _facts(self, keys: BlockKeys, binding: Binding, pages: NDArray[np.int64], lane: Lane, deadline: float) -> Any:  # noqa: ANN401 - arguments of `Moving`
        here = self._open_here(anywhere=True)
        return keys, binding, pages, lane, deadline, here.loop_calls

    def _say_loaded(self, ended: "asyncio.Future[LoadResult]") -> None:
        result = ended.result()
        said = tuple(f"{fault.tier}: {fault.reason}" for fault in result.faults)
        num_in_place = sum(result.by_tier.values())
        self._emit(BlocksLoaded(num_in_place, result.num_requested, result.by_tier, result.seconds * 1e3, said))

    def _say_stored(self, ended: "asyncio.Future[StoreResult]") -> None:
        result = ended.result()
        reasons, took_ms = result.drop_reasons, result.seconds * 1e3
        self._emit(BlocksStored(result.num_stored, result.num_present, result.num_dropped, reasons, took_ms))


def _path_in(url: str) -> str:
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme != _SCHEME or parts.netloc or not parts.path:
        raise ConfigurationError(f"a server's address is e.g. 'unix:///run/tiered-kv/kv.sock', got {url!r:.200}")
    return parts.path


def _cancel(task: "asyncio.Task[Any]") -> None:
    task.cancel()


def _give_back(began: "asyncio.Future[tuple[socket.socket, wire.Opened, list[int]]]") -> None:
    if not began.cancelled() and began.exception() is None:
        connection, _, descriptors = began.result()
        link.give_back(connection, descriptors)


def _raised(answer: wire.Answer | None) -> wire.Answer | None:
    """Raise what the caller has done wrong; a server that cannot answer is one that is away."""
    if isinstance(answer, wire.Failed):
        error = wire.error_of(answer.kind, answer.why)
        if isinstance(error, ConfigurationError):
            raise error
        return None
    return answer


def _found(keys: BlockKeys, answer: wire.Answer | None) -> LookupResult:
    if not isinstance(answer, wire.Found):
        return LookupResult(0, (), 0, keys.block_size)
    runs = tuple(TierRun(*run) for run in answer.runs)
    return LookupResult(answer.num_blocks, runs, answer.num_bytes, keys.block_size, answer.costs, answer.num_pending)
