"""A client's loads and stores: the server says which slots, and this process copies, on its own device's streams.

The engine's memory is touched by copies of this process alone. So a transfer ends here, whatever the server does: what
has not begun is revoked, what has begun is waited for, and what the server asks for later is refused.

A `FarLoad` keeps what is in place, and how it ends, as the server says it or as it is known here; a `FarStore` its
layers, and what becomes of its blocks in the server's tiers. `Starts` begins both: they are checked in the caller's
thread, and started on the event loop.
"""

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, Literal, TypeVar

import numpy as np

from tiered_kv.cache.checks import LoadCall, StoreCall
from tiered_kv.cache.seat import past_epochs
from tiered_kv.host import protocol, wire
from tiered_kv.host.attachment import Attachment
from tiered_kv.host.connection import Connection, FarSide
from tiered_kv.host.protocol import REVOKED, Keys, Part
from tiered_kv.memory.device import attempt
from tiered_kv.memory.lanes import Lane, LaneCopy, RevokedError, submit_copy
from tiered_kv.tiers.tier import prefix_of
from tiered_kv.transfers.engine_memory import Binding
from tiered_kv.transfers.handles import LAST_COPIES_S, LoadHandle
from tiered_kv.transfers.store import StoreHandle
from tiered_kv.transfers.transfer_requests import is_copied_at_once
from tiered_kv.values.errors import Reason, TieredKVError, TierFault, in_words
from tiered_kv.values.events import BlocksLoaded, BlocksSettled, BlocksStored, Emit
from tiered_kv.values.integers import Ids
from tiered_kv.values.keys import BlockKeys, epoch_digest
from tiered_kv.values.log import log
from tiered_kv.values.results import LoadResult, StoreResult, TierStore

C = TypeVar("C", bound=LoadCall | StoreCall)
R = TypeVar("R")
_GRACE_S: Final = 0.25
"""What a server may take to say how a transfer ended whose time is up."""
_WHOSE: Final = {Reason.DEADLINE: "", Reason.REVOKED: "", Reason.DEVICE_UNUSABLE: "engine"}
"""What ends a load here and is not the server's."""


@dataclass(frozen=True)
class MovingRequest(Generic[C]):
    """A load or store of a client that was checked, in any thread.

    Attributes:
        call: Its arguments.
        side: What this process has.
        said: Its keys, for the server, with the weights that they are of.
        binding: The engine's memory.
        pages: ``(n, pages_per_block)`` page ids in it, in key order.
        lane: Behind the pages' last use, or their computation; released when the transfer has ended.
        deadline: When a load is given up, on the loop's clock; infinite of a store, whose time begins with it.
    """

    call: C
    side: FarSide
    said: Keys
    binding: Binding
    pages: Ids
    lane: Lane
    deadline: float


class Moving(Generic[C, R]):
    """A load or store of this client. Its copies are asked for by the server."""

    def __init__(self, request: MovingRequest[C]) -> None:
        """Prepare a transfer, on the event loop."""
        self.ended: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self.num_layers = request.binding.caches.group.num_layers
        self.thread = threading.get_ident()
        self._request = request
        self._keys = request.call.keys
        self._binding = request.binding
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._deadline = request.deadline
        self._copies: list[LaneCopy] = []
        self._copying: set[LaneCopy] = set()
        self._in_place = np.zeros(len(self._keys), np.bool_)
        self._why: Reason | None = None  # it is over here, whatever the server says
        self._detail = ""
        self._there: Attachment | None = None
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._error = ""

    def start(self, there: Attachment | None) -> bool:
        """Ask a server for the transfer, and say whether that was done. If no server is there, the transfer ends."""
        if there is None or not there.is_open or there.is_silent:
            self._stop(Reason.SERVER_AWAY)
            return False
        self._there, self._number = there, there.number()
        there.transfers[self._number] = self
        latest = max(self._deadline, self._started + LAST_COPIES_S)
        self._timer = self._loop.call_at(latest, self._time_is_up)
        try:
            there.send(self._message())
        except TieredKVError:
            self._stop(Reason.TOO_MANY_KEYS)
            return False
        return True

    def _message(self) -> wire.Message:
        """Return the message that asks the server for it."""
        raise NotImplementedError

    def refuse(self, why: Reason, detail: str = "") -> None:
        """End the transfer before it has begun."""
        self._detail = detail
        self._stop(why)

    def revoke(self) -> None:
        """Stop as soon as possible; on the event loop."""
        self._stop(Reason.REVOKED)

    def miss(self) -> None:
        """See `Transferring.miss`: it is over here."""
        self.lose()

    def lose(self) -> None:
        """See `Transferring.lose`: what is being copied still comes to its end."""
        self._stop(Reason.SERVER_AWAY, revoke=False)

    def take(self, reply: protocol.Reply) -> None:
        """See `Transferring.take`."""
        match reply:
            case protocol.Copy():
                self._copy(reply)
            case protocol.Failed(why=why):
                self._detail = why
                log("warning", "host.refused", blocks=len(self._keys), error=why)
                self._stop(Reason.REFUSED)
            case _:
                self._take_other(reply)

    # Copies.

    def _copy(self, asked: protocol.Copy) -> None:
        there = self._there
        assert there is not None  # noqa: S101 - it was started
        if self._why:
            there.send(protocol.Copied(asked.id, asked.number, REVOKED))
            return
        work = partial(self._move, there, asked.parts)
        num_bytes = sum(len(part.slots) for part in asked.parts) // 8 * self._binding.caches.payload_bytes
        if is_copied_at_once(num_bytes, self._binding.caches.codec, self._request.lane):
            self._say_copied(asked, attempt(work))
            return
        there.copy_begins()
        copy = submit_copy(self._request.lane, work, self._request.side.loop_calls)
        self._copies.append(copy)
        self._copying.add(copy)
        copy.ended.add_done_callback(lambda ended: self._copied(asked, copy, ended.exception()))

    def _move(self, there: Attachment, parts: tuple[Part, ...]) -> None:
        for part in parts:
            rows, slots, positions = there.slabs[part.pool].rows, wire.as_ids(part.slots), wire.as_ids(part.positions)
            layers = None if part.layers is None else slice(*part.layers)
            self._move_part(rows, slots, self._request.pages[positions].ravel(), layers)

    def _move_part(self, rows: Any, slots: Ids, pages: Ids, layers: slice | None) -> None:  # noqa: ANN401 - a Tensor
        raise NotImplementedError

    def _copied(self, asked: protocol.Copy, copy: LaneCopy, error: BaseException | None) -> None:
        self._copying.discard(copy)
        self._say_copied(asked, error)
        if self._there is not None:
            self._there.copy_ended()
        if self._why:
            self._end_if_still()

    def _say_copied(self, asked: protocol.Copy, error: BaseException | None) -> None:
        """Answer; on a GPU the copy has ended by now, not only been enqueued."""
        said = ""
        if error is None:
            for part in asked.parts:
                if part.layers is None:
                    self._in_place[wire.as_ids(part.positions)] = True
                else:
                    self._layer_copied(part.layers[0], wire.as_ids(part.positions))
        else:
            said = REVOKED if isinstance(error, RevokedError) else in_words(error)
            self._error = self._error or said
        if self._there is not None:
            self._there.send(protocol.Copied(asked.id, asked.number, said))

    def _layer_copied(self, layer: int, positions: Ids) -> None:
        """Count one layer of blocks."""

    # Ends.

    def _time_is_up(self) -> None:
        self._revoke_copies()
        self._timer = self._loop.call_later(_GRACE_S, self._stop, Reason.DEADLINE)

    def _revoke_copies(self) -> None:
        for copy in list(self._copying):
            copy.revoke()

    def _stop(self, why: Reason, *, revoke: bool = True) -> None:
        """End without the server's word."""
        if self._why or self.ended.done():
            return
        self._why = why
        if self._there is not None:
            self._there.send(protocol.Cancel(self._number))  # of what is over there nothing comes of it
        if revoke:
            self._revoke_copies()
        self._end_if_still()

    def _end_if_still(self) -> None:
        if not self._copying:
            self._finish(self._result_here())

    def _finish(self, result: R) -> None:
        if self.ended.done():
            return
        if self._timer is not None:
            self._timer.cancel()
        if self._there is not None:
            self._forget(self._there)
        self._request.lane.release()
        self.ended.set_result(result)

    def _forget(self, there: Attachment) -> None:
        there.transfers.pop(self._number, None)

    def _take_other(self, reply: protocol.Reply) -> None:
        raise NotImplementedError

    def _result_here(self) -> R:
        """Say what came of it, as far as is known here."""
        raise NotImplementedError

    @property
    def _seconds(self) -> float:
        return self._loop.time() - self._started


class FarLoad(Moving[LoadCall, LoadResult]):
    """A load through a server."""

    num_from_back: int | None = None

    def __init__(self, request: MovingRequest[LoadCall], is_current: Callable[[], bool]) -> None:
        """Prepare a load, on the event loop. Once ``is_current`` is False it returns 0 blocks: weights have changed."""
        super().__init__(request)
        self._is_current = is_current
        self._gaps = request.call.gaps
        self._admitted: asyncio.Future[int] = self._loop.create_future()
        self._layers: dict[int, LaneCopy] = {}
        self._num_copied = np.zeros(len(self._keys), np.int64)  # layers of each block
        self._by_tier: Mapping[str, int] = {}

    def _message(self) -> protocol.Load:
        call, left_s = self._request.call, max(0.0, self._deadline - self._loop.time())
        is_from_back = call.order == "back"
        return protocol.Load(
            self._number, self._request.said, left_s, int(call.priority), call.layerwise, call.gaps, is_from_back
        )

    @property
    def is_admitted(self) -> bool:
        """See `Loading.is_admitted`."""
        return self._admitted.done()

    async def wait_admitted(self) -> int:
        """See `Loading.wait_admitted`."""
        return await asyncio.shield(self._admitted)

    def copy_of(self, layer: int) -> LaneCopy | None:
        """See `Loading.copy_of`."""
        if self._request.call.layerwise:
            return self._layers.get(layer)
        return self._copies[-1] if self._copies else None

    @property
    def is_copying(self) -> bool:
        """See `Loading.is_copying`."""
        return bool(self._copies) or bool(self._in_place.any())

    def stop_before(self, block: int) -> int:
        """See `FarBackLoad`."""
        raise NotImplementedError

    def _copy(self, asked: protocol.Copy) -> None:
        if asked.by_tier:
            self._by_tier = asked.by_tier
            self._settle(len(self._keys))
        before = len(self._copies)
        super()._copy(asked)
        if len(self._copies) > before and asked.parts and asked.parts[0].layers is not None:
            self._layers[asked.parts[0].layers[0]] = self._copies[-1]

    def _say_copied(self, asked: protocol.Copy, error: BaseException | None) -> None:
        super()._say_copied(asked, error)
        self._end_if_all_is_here()

    def _end_if_all_is_here(self) -> None:
        """End where the server has said how this will end, and so it did: its word would take a while yet."""
        if self._why or self._error or not self._by_tier or not self._in_place.all():
            return
        n = len(self._keys)
        num_bytes = n * self._binding.caches.payload_bytes
        result = LoadResult(n, n, self._by_tier, num_bytes, self._seconds)
        self._finish(result if self._is_current() else self._nothing(Reason.EPOCH_ADVANCED))

    def _move_part(self, rows: Any, slots: Ids, pages: Ids, layers: slice | None) -> None:  # noqa: ANN401 - a Tensor
        self._binding.scatter(rows, slots, pages, layers=layers)

    def _layer_copied(self, layer: int, positions: Ids) -> None:
        self._num_copied[positions] += 1
        self._in_place = self._num_copied == self.num_layers

    def _revoke_copies(self) -> None:
        """Let no copy begin; but what is admitted is not taken back for a deadline."""
        if self._why is Reason.REVOKED or not (self._layers and self._layers[min(self._layers)].has_begun):
            super()._revoke_copies()

    def _take_other(self, reply: protocol.Reply) -> None:
        match reply:
            case protocol.Admitted():
                self._settle(reply.num_blocks)
            case protocol.Loaded() if not self._why:
                self._finish(self._result_of(reply) if self._is_current() else self._nothing(Reason.EPOCH_ADVANCED))

    def _result_of(self, said: protocol.Loaded) -> LoadResult:
        mask = np.frombuffer(said.mask, np.bool_) if said.mask is not None else None
        return LoadResult(
            said.num_blocks, len(self._keys), said.by_tier, said.num_bytes, self._seconds, said.faults,
            said.missed_because, mask,
        )  # fmt: skip

    def _result_here(self) -> LoadResult:
        if not self._is_current():
            return self._nothing(Reason.EPOCH_ADVANCED)
        n = prefix_of(self._in_place)
        num_in_place = int(np.count_nonzero(self._in_place)) if self._gaps else n
        mask = self._in_place.copy() if self._gaps else None
        num_bytes = num_in_place * self._binding.caches.payload_bytes
        by_tier = {"host": num_in_place} if num_in_place else {}
        faults = self._faults_here()
        why = faults[-1].reason if n < len(self._keys) else ""
        return LoadResult(n, len(self._keys), by_tier, num_bytes, self._seconds, faults, why, mask)

    def _faults_here(self) -> tuple[TierFault, ...]:
        """Say why it ended without the server's word."""
        n = len(self._keys)
        assert self._why is not None  # noqa: S101 - it has ended here
        fault = TierFault(_WHOSE.get(self._why, "host"), self._why, n, self._detail)
        if self._error and self._error != REVOKED:
            return fault, TierFault("engine", Reason.COPY_FAILED, n, self._error)
        return (fault,)

    def _nothing(self, why: Reason) -> LoadResult:
        mask = np.zeros(len(self._keys), np.bool_) if self._gaps else None
        return LoadResult(0, len(self._keys), {}, 0, self._seconds, (TierFault("", why, len(self._keys)),), why, mask)

    def _finish(self, result: LoadResult) -> None:
        super()._finish(result)
        self._settle(result.num_blocks)

    def _settle(self, num_blocks: int) -> None:
        if not self._admitted.done():
            self._admitted.set_result(num_blocks)


class FarBackLoad(FarLoad):
    """A load from the back through a server, for an engine that comes from the front.

    What the engine claims is decided here, at once: copies that are asked for later leave out what it has claimed, and
    the server is told, so that it reads no more of it. It may count a few blocks as loaded that were claimed meanwhile.
    """

    def __init__(self, request: MovingRequest[LoadCall], is_current: Callable[[], bool]) -> None:
        """Prepare a load from the back, on the event loop."""
        super().__init__(request, is_current)
        self.num_from_back = len(self._keys)
        self._claimed = 0
        self._first = len(self._keys)  # of the blocks that some copy may have touched

    def stop_before(self, block: int) -> int:
        """See `LoadHandle.stop_before`."""
        claimed = max(self._claimed, min(block, self._first))
        if claimed > self._claimed and self._there is not None and not self.ended.done():
            self._there.send(protocol.StopBefore(self._number, claimed))
        self._claimed = claimed
        return claimed

    def _copy(self, asked: protocol.Copy) -> None:
        """Copy what is not claimed."""
        parts = tuple(part for each in asked.parts if (part := each.from_position(self._claimed)) is not None)
        if parts and not self._why:
            self._first = min(self._first, *(int(wire.as_ids(part.positions).min()) for part in parts))
        super()._copy(protocol.Copy(asked.id, asked.number, parts, asked.by_tier))

    def _result_of(self, said: protocol.Loaded) -> LoadResult:
        return self._brought(said.by_tier, said.faults, said.missed_because)

    def _result_here(self) -> LoadResult:
        if not self._is_current():
            return self._nothing(Reason.EPOCH_ADVANCED)
        faults = self._faults_here()
        return self._brought({"host": len(self._keys)}, faults, faults[-1].reason)

    def _brought(self, by_tier: Mapping[str, int], faults: tuple[TierFault, ...], why: str) -> LoadResult:
        """Say which blocks are in place: those at the end."""
        n = len(self._keys)
        start = n - prefix_of(self._in_place[::-1])
        mask = np.arange(n) >= start
        mask.flags.writeable = False
        num_bytes = (n - start) * self._binding.caches.payload_bytes
        counts = _at_most(by_tier, n - start)
        why = why if start > self._claimed else ""  # what the engine has claimed it does not miss
        return LoadResult(0 if start else n, n, counts, num_bytes, self._seconds, faults, why, mask)

    def _finish(self, result: LoadResult) -> None:
        if not self.ended.done():
            self._first = len(self._keys) - sum(result.by_tier.values())
        super()._finish(result)


def _at_most(by_tier: Mapping[str, int], num_blocks: int) -> dict[str, int]:
    """Leave out what was claimed while it was on its way, of the tier that had the most."""
    counts = dict(by_tier)
    while counts and (over := sum(counts.values()) - num_blocks) > 0:
        most = max(counts, key=lambda tier: counts[tier])
        counts[most] -= min(over, counts[most])
        if not counts[most]:
            del counts[most]
    return counts


class FarStore(Moving[StoreCall, StoreResult]):
    """A store through a server."""

    def __init__(self, request: MovingRequest[StoreCall]) -> None:
        """Prepare a store, on the event loop."""
        super().__init__(request)
        self._deadline = self._started + request.side.attached.store_timeout_s
        self.missing = set(range(self.num_layers)) if request.call.layerwise else None
        self._settled: asyncio.Future[tuple[TierStore, ...]] = self._loop.create_future()
        """What became of the blocks; of no tier, if the server does not say."""

    def _message(self) -> protocol.Store:
        call = self._request.call
        return protocol.Store(self._number, self._request.said, call.layerwise, call.hint)

    def store_layer(self, layer: int, after: object) -> None:
        """See `Storing.store_layer`."""
        after = self._binding.to_wait_for(after)
        if self.ended.done() or self._why:
            return
        if after is not None:
            self._request.lane.wait(after)
        if self.missing is not None:
            self.missing.discard(layer)
        if self._there is not None:
            self._there.send(protocol.StoreLayer(self._number, layer))

    async def settled(self) -> tuple[TierStore, ...]:
        """See `StoreResult.settled`."""
        return await asyncio.shield(self._settled)

    def when_settled(self, callback: Callable[["asyncio.Future[tuple[TierStore, ...]]"], object]) -> None:
        """Call back, on the event loop, once it is known what became of the blocks, or will not be."""
        self._settled.add_done_callback(callback)

    def drop(self, reason: Reason, tiers: Iterable[str]) -> None:
        """End the store before it has begun: no block of it comes to any of these tiers."""
        self._settled.set_result(tuple(TierStore(tier, dropped=len(self._keys)) for tier in tiers))
        self.refuse(reason)

    def lose(self) -> None:
        """See `Transferring.lose`: nobody keeps what is copied from now on."""
        self._settle(())
        self._stop(Reason.SERVER_AWAY)

    def _move_part(self, rows: Any, slots: Ids, pages: Ids, layers: slice | None) -> None:  # noqa: ANN401 - a Tensor
        self._binding.gather(pages, rows, slots, layers=layers)

    def _take_other(self, reply: protocol.Reply) -> None:
        match reply:
            case protocol.Stored() if not self._why:
                self._finish(
                    StoreResult(
                        len(self._keys),
                        reply.num_stored,
                        reply.num_present,
                        sum(reply.dropped.values()),
                        reply.dropped,
                        reply.num_bytes,
                        self._seconds,
                        self.settled,
                    )
                )
            case protocol.Settled(tiers=tiers):
                self._settle(tiers)
                if self._there is not None:
                    self._there.transfers.pop(self._number, None)

    def _settle(self, tiers: tuple[TierStore, ...]) -> None:
        if not self._settled.done():
            self._settled.set_result(tiers)

    def _forget(self, there: Attachment) -> None:
        """The server has yet to say what became of the blocks."""
        if self._why:
            super()._forget(there)

    def _result_here(self) -> StoreResult:
        self._settle(())
        n = len(self._keys)
        dropped = {self._why: n} if n and self._why is not None else {}
        return StoreResult(n, 0, 0, n, dropped, 0, self._seconds, self.settled)


class Starts:
    """Begins the loads and stores of one client, and knows which weights they are of.

    Attributes:
        epoch: The digest of the weights that the engine serves.
        past_epochs: Digests of weights that it served before, the last one first; a few.
        is_draining: Whether stores are refused.
        refused: Blocks of stores of which no server was told, by reason.
        missed: The same of loads.
    """

    def __init__(self, connection: Connection, epoch: bytes, emit: Emit) -> None:
        """Tell ``emit`` how transfers end."""
        self.epoch = epoch
        self.past_epochs: list[bytes] = []
        self.is_draining = False
        self.refused, self.missed = Counter[Reason](), Counter[str]()
        self._connection = connection
        self._emit = emit

    def said(self, keys: BlockKeys, *, epoch: bytes | None = None, anywhere: bool = False) -> Keys:
        """Check keys, in the event loop's thread or ``anywhere``, and say them, of these weights or the current."""
        self._connection.here(anywhere=anywhere).check(keys)
        return Keys.of(keys, self.epoch if epoch is None else epoch)

    def advance_epoch(self, epoch: bytes) -> None:
        """Serve other weights from now on."""
        self.past_epochs = past_epochs(self.epoch, self.past_epochs, epoch)
        self.epoch = epoch

    def count_untold(self, direction: Literal["load", "store"], why: Reason, num_blocks: int) -> None:
        """Count blocks of which no server is told."""
        untold: Counter[Reason] | Counter[str] = self.missed if direction == "load" else self.refused
        untold[why] += num_blocks

    # Checked in any thread, then begun on the event loop.

    def load_request(self, call: LoadCall, side: FarSide) -> MovingRequest[LoadCall]:
        """Check a load and enqueue its wait."""
        said = self._said(call.keys, side, self.epoch)  # first: if it advances from here on, the load is overtaken
        return MovingRequest(call, side, said, *side.into(call), side.deadline(call.deadline_s))

    def store_request(self, call: StoreCall, side: FarSide) -> MovingRequest[StoreCall]:
        """Check a store and enqueue its wait."""
        said = self._said(call.keys, side, self.epoch if call.epoch is None else epoch_digest(call.epoch))
        return MovingRequest(call, side, said, *side.source(call), math.inf)

    def _said(self, keys: BlockKeys, side: FarSide, epoch: bytes) -> Keys:
        """Check the keys of what is to be moved here, and say them."""
        side.check(keys)
        side.of_rank(keys.group)
        return Keys.of(keys, epoch)

    def begin_load(self, request: MovingRequest[LoadCall]) -> LoadHandle:
        """Begin a load, on the event loop."""
        kind = FarBackLoad if request.call.order == "back" else FarLoad
        load = kind(request, lambda: self.epoch == request.said.epoch)
        load.ended.add_done_callback(self._say_loaded)
        is_told = False
        if (error := request.binding.error) is not None:
            load.refuse(Reason.DEVICE_UNUSABLE, repr(error))
        else:
            is_told = load.start(self._connection.there)
        if not is_told and len(request.said):
            self.missed[load.ended.result().missed_because] += len(request.said)
        request.side.tasks.watch(load.ended, load.revoke)
        return LoadHandle(load.ended, load)

    def begin_store(self, request: MovingRequest[StoreCall]) -> StoreHandle:
        """Begin a store, on the event loop."""
        there, store, is_told = self._connection.there, FarStore(request), False
        store.ended.add_done_callback(self._say_stored)
        store.when_settled(self._say_settled)
        if (why := self._refusal(request)) is not None:  # here: for its slots the server would evict others' blocks
            store.drop(why, [tier.name for tier in there.attached.tiers] if there is not None else [])
        else:
            is_told = store.start(there)
        if not is_told:
            self.refused.update(store.ended.result().drop_reasons)
        request.side.tasks.watch(store.ended, store.revoke)
        return StoreHandle(store.ended, store)

    def _refusal(self, request: MovingRequest[StoreCall]) -> Reason | None:
        if self.is_draining:
            return Reason.DRAINING
        return None if request.binding.error is None else Reason.DEVICE_UNUSABLE

    def _say_loaded(self, ended: "asyncio.Future[LoadResult]") -> None:
        result = ended.result()
        said = tuple(f"{fault.tier}: {fault.reason}" for fault in result.faults)
        took_ms, why = result.seconds * 1e3, result.missed_because
        num_in_place = sum(result.by_tier.values())
        self._emit(BlocksLoaded(num_in_place, result.num_requested, result.by_tier, took_ms, said, why))

    def _say_settled(self, settled: "asyncio.Future[tuple[TierStore, ...]]") -> None:
        if tiers := settled.result():
            self._emit(BlocksSettled.of(tiers))

    def _say_stored(self, ended: "asyncio.Future[StoreResult]") -> None:
        result = ended.result()
        reasons, took_ms = result.drop_reasons, result.seconds * 1e3
        self._emit(BlocksStored(result.num_stored, result.num_present, result.num_dropped, reasons, took_ms))
