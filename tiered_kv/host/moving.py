"""A client's loads and stores: the server says which slots, and this process copies, on its own device's streams.

The engine's memory is touched by copies of this process alone. So a transfer ends here, whatever the server does: what
has not begun is revoked, what has begun is waited for, and what the server asks for later is refused.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tiered_kv.errors import ConfigurationError, TieredKVError
from tiered_kv.host import messages, wire
from tiered_kv.host.attachment import Attachment
from tiered_kv.host.fields import Part
from tiered_kv.keys import BlockKeys
from tiered_kv.loop_calls import LoopCalls
from tiered_kv.memory.device import attempt
from tiered_kv.memory.lanes import Lane, LaneCopy, RevokedError
from tiered_kv.results import LoadResult, StoreResult, TierFault, TierStore
from tiered_kv.tiers.base import prefix_of
from tiered_kv.transfers.bindings import Binding
from tiered_kv.transfers.handles import LAST_COPIES_S
from tiered_kv.transfers.load_handle import LoadHandle

R = TypeVar("R")
Ids = NDArray[np.int64]
_GRACE_S: Final = 0.25
"""What a server may take to say how a transfer ended whose time is up."""
_COPIED_AT_ONCE_BYTES: Final = 256 << 10
"""Some 40 us of copying, which is what a thread needs to be woken and to wake the loop."""


class Moving(Generic[R]):
    """One transfer of this client. Its copies are asked for by the server."""

    def __init__(
        self, keys: BlockKeys, binding: Binding, pages: Ids, lane: Lane, deadline: float, loop_calls: LoopCalls
    ) -> None:
        """Prepare one, on the event loop.

        Args:
            keys: What to move.
            binding: The engine's memory.
            pages: ``(n, pages_per_block)`` page ids in it.
            lane: Behind the pages' last use, or their computation; released when the transfer has ended.
            deadline: On the loop's clock.
            loop_calls: Of the loop.
        """
        self.ended: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self.num_layers = binding.caches.group.num_layers
        self.thread = threading.get_ident()
        self._keys = keys
        self._binding = binding
        self._pages = pages
        self._lane = lane
        self._loop_calls = loop_calls
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._deadline = max(deadline, self._started + LAST_COPIES_S)
        self._copies: list[LaneCopy] = []
        self._copying: set[LaneCopy] = set()
        self._in_place = np.zeros(len(keys), np.bool_)
        self._why = ""  # it is over here, whatever the server says
        self._there: Attachment | None = None
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._error = ""

    def start(self, there: Attachment | None, ask: Callable[[int], wire.Message]) -> None:
        """Ask a server for it; if there is none, it ends."""
        if there is None or not there.is_open or there.is_silent:
            self._stop("server away")
            return
        self._there, self._number = there, there.number()
        there.transfers[self._number] = self
        self._timer = self._loop.call_at(self._deadline, self._time_is_up)
        try:
            there.send(ask(self._number))
        except TieredKVError:
            self._stop("too many keys")

    def refuse(self, why: str) -> None:
        """End it before it has begun."""
        self._stop(why)

    def revoke(self) -> None:
        """Stop as soon as possible; on the event loop."""
        if not self._why and not self.ended.done():
            if self._there is not None:
                self._there.send(messages.Cancel(self._number))
            self._stop("revoked")

    def lose(self) -> None:
        """See `Transferring.lose`: what is being copied still comes to its end."""
        self._stop("server away", revoke=False)

    def take(self, reply: messages.Reply) -> None:
        """See `Transferring.take`."""
        match reply:
            case messages.Copy():
                self._copy(reply)
            case messages.Failed(why=why):
                self._stop(why)
            case _:
                self._take_other(reply)

    # Copies.

    def _copy(self, asked: messages.Copy) -> None:
        there = self._there
        assert there is not None  # noqa: S101 - it was started
        if self._why:
            there.send(messages.Copied(asked.id, asked.number, "revoked"))
            return
        work = partial(self._move, there, asked.parts)
        num_bytes = sum(len(part.slots) for part in asked.parts) // 8 * self._binding.caches.payload_bytes
        if num_bytes <= _COPIED_AT_ONCE_BYTES and self._binding.caches.codec is None and self._lane.is_idle:
            self._say_copied(asked, attempt(work))
            return
        copy = LaneCopy(work)
        there.copy_begins()
        self._copies.append(copy)
        self._copying.add(copy)
        copy.ended.add_done_callback(lambda ended: self._copied(asked, copy, ended.exception()))
        try:
            copy.event = self._lane.submit(copy, lambda error: self._loop_calls.call(copy.resolve, error))
        except Exception as error:  # noqa: BLE001 - one that cannot be submitted has failed as any other that fails
            copy.resolve(error)

    def _move(self, there: Attachment, parts: tuple[Part, ...]) -> None:
        for part in parts:
            rows, slots, positions = there.slabs[part.pool].rows, wire.as_ids(part.slots), wire.as_ids(part.positions)
            layers = None if part.layers is None else slice(*part.layers)
            self._move_part(rows, slots, self._pages[positions].ravel(), layers)

    def _move_part(self, rows: Any, slots: Ids, pages: Ids, layers: slice | None) -> None:  # noqa: ANN401 - a Tensor
        raise NotImplementedError

    def _copied(self, asked: messages.Copy, copy: LaneCopy, error: BaseException | None) -> None:
        self._copying.discard(copy)
        self._say_copied(asked, error)
        if self._there is not None:
            self._there.copy_ended()
        if self._why:
            self._end_if_still()

    def _say_copied(self, asked: messages.Copy, error: BaseException | None) -> None:
        """Answer; on a GPU the copy has ended by now, not only been enqueued."""
        said = ""
        if error is None:
            for part in asked.parts:
                if part.layers is None:
                    self._in_place[wire.as_ids(part.positions)] = True
                else:
                    self._layer_copied(part.layers[0], wire.as_ids(part.positions))
        else:
            said = "revoked" if isinstance(error, RevokedError) else f"{type(error).__name__}: {error}"
            self._error = self._error or said
        if self._there is not None:
            self._there.send(messages.Copied(asked.id, asked.number, said))

    def _layer_copied(self, layer: int, positions: Ids) -> None:
        """Count one layer of blocks."""

    # Ends.

    def _time_is_up(self) -> None:
        self._revoke_copies()
        self._timer = self._loop.call_later(_GRACE_S, self._stop, "deadline")

    def _revoke_copies(self) -> None:
        for copy in list(self._copying):
            copy.revoke()

    def _stop(self, why: str, *, revoke: bool = True) -> None:
        """End without the server's word."""
        if self._why or self.ended.done():
            return
        self._why = why
        if why == "deadline" and self._there is not None:
            self._there.send(messages.Cancel(self._number))
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
        self._lane.release()
        self.ended.set_result(result)

    def _forget(self, there: Attachment) -> None:
        there.transfers.pop(self._number, None)

    def _take_other(self, reply: messages.Reply) -> None:
        raise NotImplementedError

    def _result_here(self) -> R:
        """Say what came of it, as far as is known here."""
        raise NotImplementedError

    @property
    def _seconds(self) -> float:
        return self._loop.time() - self._started


class FarLoad(Moving[LoadResult]):
    """A load through a server."""

    def __init__(self, *args: Any, is_current: Callable[[], bool], layerwise: bool, gaps: bool) -> None:  # noqa: ANN401 - of `Moving`
        super().__init__(*args)
        self._is_current = is_current
        self._layerwise = layerwise
        self._gaps = gaps
        self._admitted: asyncio.Future[int] = self._loop.create_future()
        self._layers: dict[int, LaneCopy] = {}
        self._layers_left = np.full(len(self._keys), self.num_layers)
        self._by_tier: Mapping[str, int] = {}

    def handle(self) -> LoadHandle:
        """Return what the caller holds of it."""
        return LoadHandle(self.ended, self)

    @property
    def is_admitted(self) -> bool:
        """See `Loading.is_admitted`."""
        return self._admitted.done()

    async def wait_admitted(self) -> int:
        """See `Loading.wait_admitted`."""
        return await asyncio.shield(self._admitted)

    def copy_of(self, layer: int) -> LaneCopy | None:
        """See `Loading.copy_of`."""
        if self._layerwise:
            return self._layers.get(layer)
        return self._copies[-1] if self._copies else None

    @property
    def is_copying(self) -> bool:
        """See `Loading.is_copying`."""
        return bool(self._copies) or bool(self._in_place.any())

    def stop_before(self, block: int) -> int:
        """See `Loading.stop_before`."""
        raise ConfigurationError('stop_before() is for a load with order="back"')

    def _copy(self, asked: messages.Copy) -> None:
        before = len(self._copies)
        super()._copy(asked)
        if len(self._copies) > before and asked.parts and asked.parts[0].layers is not None:
            self._layers[asked.parts[0].layers[0]] = self._copies[-1]

    def _say_copied(self, asked: messages.Copy, error: BaseException | None) -> None:
        super()._say_copied(asked, error)
        self._end_if_all_is_here()

    def _end_if_all_is_here(self) -> None:
        """End where the server has said how this will end, and so it did: its word would take a while yet."""
        n = len(self._keys)
        if self._why or self._error or sum(self._by_tier.values()) != n or not self._in_place.all():
            return
        num_bytes = n * self._binding.caches.payload_bytes
        result = LoadResult(n, n, self._by_tier, num_bytes, self._seconds)
        self._finish(result if self._is_current() else self._nothing("epoch advanced"))

    def _move_part(self, rows: Any, slots: Ids, pages: Ids, layers: slice | None) -> None:  # noqa: ANN401 - a Tensor
        self._binding.scatter(rows, slots, pages, layers=layers)

    def _layer_copied(self, layer: int, positions: Ids) -> None:
        self._layers_left[positions] -= 1
        self._in_place = self._layers_left == 0

    def _revoke_copies(self) -> None:
        """Let no copy begin; but what is admitted is not taken back for a deadline."""
        if self._why == "revoked" or not (self._layers and self._layers[min(self._layers)].has_begun):
            super()._revoke_copies()

    def _take_other(self, reply: messages.Reply) -> None:
        match reply:
            case messages.Admitted():
                if not self._admitted.done():
                    self._admitted.set_result(reply.num_blocks)
                self._by_tier = reply.by_tier
                self._end_if_all_is_here()
            case messages.Loaded() if not self._why:
                faults = reply.faults
                mask = np.frombuffer(reply.mask, np.bool_) if reply.mask is not None else None
                result = LoadResult(
                    reply.num_blocks, len(self._keys), reply.by_tier, reply.num_bytes, self._seconds, faults, mask
                )
                self._finish(result if self._is_current() else self._nothing("epoch advanced"))

    def _result_here(self) -> LoadResult:
        if not self._is_current():
            return self._nothing("epoch advanced")
        n = prefix_of(self._in_place)
        num_in_place = int(np.count_nonzero(self._in_place)) if self._gaps else n
        faults = [TierFault("", self._why, len(self._keys))] if self._why in ("deadline", "revoked") else []
        if not faults:
            faults = [TierFault("host", "server away", len(self._keys), self._why)]
        if self._error and self._error != "revoked":
            faults.append(TierFault("engine", "copy failed", len(self._keys), self._error))
        mask = self._in_place.copy() if self._gaps else None
        num_bytes = num_in_place * self._binding.caches.payload_bytes
        by_tier = {"host": num_in_place} if num_in_place else {}
        return LoadResult(n, len(self._keys), by_tier, num_bytes, self._seconds, tuple(faults), mask)

    def _nothing(self, why: str) -> LoadResult:
        mask = np.zeros(len(self._keys), np.bool_) if self._gaps else None
        return LoadResult(0, len(self._keys), {}, 0, self._seconds, (TierFault("", why, len(self._keys)),), mask)

    def _finish(self, result: LoadResult) -> None:
        super()._finish(result)
        if not self._admitted.done():
            self._admitted.set_result(result.num_blocks)


class FarStore(Moving[StoreResult]):
    """A store through a server."""

    def __init__(self, *args: Any, layerwise: bool) -> None:  # noqa: ANN401 - of `Moving`
        super().__init__(*args)
        self._missing = set(range(self.num_layers)) if layerwise else set()
        self._layerwise = layerwise
        self._settled: asyncio.Future[tuple[TierStore, ...]] = self._loop.create_future()

    def store_layer(self, layer: int, after: object) -> None:
        """See `StoreHandle.store_layer`."""
        if not self._layerwise:
            raise ConfigurationError("store_layer() is for start_store(..., layerwise=True)")
        if not 0 <= layer < self.num_layers:
            raise ConfigurationError(f"layer {layer} is not one of the KV group's {self.num_layers}")
        if layer not in self._missing:
            raise ConfigurationError(f"layer {layer} was stored already")
        if after is not None:
            self._binding.check(after)
        if self.ended.done() or self._why:
            return
        if after is not None:
            self._lane.wait(after)
        self._missing.discard(layer)
        if self._there is not None:
            self._there.send(messages.StoreLayer(self._number, layer))

    async def settled(self) -> tuple[TierStore, ...]:
        """See `StoreResult.settled`."""
        return await asyncio.shield(self._settled)

    def lose(self) -> None:
        """See `Transferring.lose`: nobody keeps what is copied from now on."""
        if not self._settled.done():
            self._settled.set_result(())
        if self.ended.done():
            return
        self._stop("server away")

    def _move_part(self, rows: Any, slots: Ids, pages: Ids, layers: slice | None) -> None:  # noqa: ANN401 - a Tensor
        self._binding.gather(pages, rows, slots, layers=layers)

    def _take_other(self, reply: messages.Reply) -> None:
        match reply:
            case messages.Stored() if not self._why:
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
            case messages.Settled(tiers=tiers):
                if not self._settled.done():
                    self._settled.set_result(tiers)
                if self._there is not None:
                    self._there.transfers.pop(self._number, None)

    def _forget(self, there: Attachment) -> None:
        """The server has yet to say what became of the blocks."""
        if self._why:
            super()._forget(there)

    def _result_here(self) -> StoreResult:
        if not self._settled.done():
            self._settled.set_result(())
        n = len(self._keys)
        dropped = {self._why: n} if n else {}
        return StoreResult(n, 0, 0, n, dropped, 0, self._seconds, self.settled)
