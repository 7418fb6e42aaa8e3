"""Loads and stores layer by layer, so that they overlap the computing of one forward pass.

A layer-wise load brings all its blocks to rows that copies reach, and then copies all of layer 0, all of layer 1, and
so on. A layer-wise store has its slots from the start, and is committed when the last layer has been copied. All else
is as in the plain ones.
"""

import asyncio
from collections import deque
from functools import cached_property, partial
from typing import Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tiered_kv.catalog.leases import Reservation
from tiered_kv.memory.lanes import LaneCopy, RevokedError
from tiered_kv.tiers.tier import Batch, MemoryTier
from tiered_kv.transfers.load import Load, WindowCopy
from tiered_kv.transfers.store import Placed, Store
from tiered_kv.transfers.transfer_requests import LoadRequest, StoreRequest
from tiered_kv.transfers.window import Window, WindowResult
from tiered_kv.values.errors import Reason
from tiered_kv.values.results import StoreResult

LAYERS_A_TURN: Final = 16
"""Of a load that are enqueued in one turn of the event loop: a launch each, of 20 to 60 us..."""
_BLOCKS_A_TURN: Final = 8192
"""... and of all these layers together so many blocks, at 0.1 us each."""


def layers_a_turn(num_blocks: int) -> int:
    """Return how many layers of so many blocks are enqueued in one turn of the event loop: a millisecond's worth."""
    return max(1, min(LAYERS_A_TURN, _BLOCKS_A_TURN // num_blocks))


class LayerLoad(Load):
    """A load whose windows all land, and stay leased, before the first layer is copied.

    What does not find slots on the host while the windows before it hold theirs is not loaded. Nothing is promoted to
    the GPU pool. It is admitted when its last layer has been enqueued, some turns of the loop after the first. Once the
    first layer's copy has begun, a deadline does not revoke the others.
    """

    def __init__(self, request: LoadRequest) -> None:
        """Prepare a load; see `Load`."""
        super().__init__(request)
        self._layers: list[LaneCopy] = []
        self._num_left = self.num_layers
        self._error: BaseException | None = None

    @override
    def copy_of(self, layer: int) -> LaneCopy | None:
        return self._layers[layer] if layer < len(self._layers) else None

    def revoke_copies(self) -> None:
        """Let no copy begin; but what is admitted is not taken back for a deadline."""
        if self.revoked or not (self._layers and self._layers[0].has_begun):
            super().revoke_copies()

    def _may_wait(self, underway: deque[Window]) -> bool:
        return not underway and not self._copied

    def _copy(self, landed: WindowResult) -> None:
        self._copied.append(WindowCopy(landed))

    async def _admit(self) -> None:
        landed = [copied.landed for copied in self._copied if copied.landed.num_blocks]
        if landed:
            gpu = np.concatenate([each.gpu for each in landed])
            host = np.concatenate([each.host for each in landed])
            a_turn = layers_a_turn(len(host))
            for layer in range(self.num_layers):
                if layer and not layer % a_turn:
                    await self._chain.tasks.turn(self._request.priority)
                scatter = partial(self._scatter, gpu, host, slice(layer, layer + 1))
                self._layers.append(self._chain.copy(self._request.lane, scatter))
                self.watch(self._layers[-1], self._end_layer)
        await super()._admit()

    def _give_up(self) -> None:
        """Let the layers be missing that were not enqueued: what is leased is held by the others alone."""
        if missing := self.num_layers - len(self._layers):
            self._error = self._error or RevokedError()
            self._end_layers(missing)

    def _scatter(self, gpu: NDArray[np.int64], host: NDArray[np.int64], layers: slice) -> None:
        """Copy layers of all blocks into the engine, from wherever each block is; in a stream's turn."""
        for tier, slots in ((self._gpu, gpu), (self._chain.host, host)):
            if tier is not None and len(at := (slots >= 0).nonzero()[0]):
                pages = self._request.pages[at].ravel()
                self._request.binding.scatter(tier.rows, slots[at], pages, layers=layers)

    def _end_layer(self, error: BaseException | None) -> None:
        if self._error is None and error is not None:
            self._error = error
            self._say_failed(error, sum(copied.landed.num_blocks for copied in self._copied))
        self._end_layers(1)

    def _end_layers(self, n: int) -> None:
        self._num_left -= n
        if not self._num_left:
            for copied in self._copied:
                copied.ok = self._error is None
            self._release()

    def _release(self) -> None:
        for copied in self._copied:
            self._chain.release(*copied.landed.leases)


class LayerStore(Store):
    """A store whose layers come one by one, in any order, as they are computed."""

    def __init__(self, request: StoreRequest) -> None:
        """Reserve slots for all that fit; see `Store`."""
        super().__init__(request)
        batch, pages = request.batch, request.pages
        self._placed: list[Placed] = []
        self.missing: set[int] = set(range(self.num_layers))
        self._is_complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._error: BaseException | None = None
        self._has_ended = False
        done = len(batch) if self._is_refused() else 0
        try:
            while done < len(batch):
                stop = min(done + self._window(), len(batch))
                part = batch[done:stop]
                placing = self._place_now(part)
                if placing is None:
                    self._drop(batch[done:], Reason.NO_ROOM)
                    break
                if (placed := self._begin(*placing, part, pages[done:stop])) is not None:
                    self._placed.append(placed)
                done = stop
        finally:
            self._head.let_go()

    async def run(self) -> StoreResult:
        """Wait for the layers; see `Store.run`."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        self._chain.count_use(self._batch, self._came)
        deadline = started + self._chain.limits.store_timeout_s
        try:
            if self._placed:
                async with asyncio.timeout_at(deadline):
                    await self._is_complete
        except TimeoutError:
            self._error = self._error or RevokedError()
            self.revoke_copies()
        except asyncio.CancelledError:
            self.revoked = True
            self._error = self._error or RevokedError()
        finally:
            self._has_ended = True
            await self.drain_copies(deadline)
            for placed in self._placed:
                self._copied_out(self._error, placed)
            self._count_left()
            self._close_one()
        await self._use_present()
        return self._ended(loop.time() - started)

    @override
    def store_layer(self, layer: int, after: object) -> None:
        after = self._request.binding.to_wait_for(after)
        if self._has_ended or self.revoked:
            return
        if after is not None:
            self._request.lane.wait(after)  # if it raises the layer is missing still, and may be given again
        self.missing.discard(layer)
        if self._placed:
            self.watch(
                self._chain.copy(self._request.lane, partial(self._gather, slice(layer, layer + 1))), self._end_layer
            )
        if not self.missing and not self._is_complete.done():
            self._is_complete.set_result(None)

    def _gather(self, layers: slice) -> None:
        """Copy layers of all blocks, whatever their windows for the tiers below: one copy for each tier of memory."""
        for tier, pages, slots in self._places:
            self._request.binding.gather(pages, tier.rows, slots, layers=layers)

    @cached_property
    def _places(self) -> list[tuple[MemoryTier, NDArray[np.int64], NDArray[np.int64]]]:
        """The pages and slots of all blocks, by tier."""
        places = []
        for tier in dict.fromkeys(placed.tier for placed in self._placed):
            there = [placed for placed in self._placed if placed.tier is tier]
            slots = [placed.reservation.slots[placed.fresh] for placed in there]
            places.append((tier, np.concatenate([placed.pages for placed in there]), np.concatenate(slots)))
        return places

    def _end_layer(self, error: BaseException | None) -> None:
        self._error = self._error or error

    def _place_now(self, part: Batch) -> tuple[MemoryTier, Reservation] | None:
        """Reserve slots that stay, or else bounce slots, but wait for none: the layers are being computed.

        It holds them for as long as that takes: whoever waits for such comes first.
        """
        if (placing := super()._place_now(part)) is not None:
            return placing
        return self._pass_now(part) if self._may_pass(part) else None

    @override
    def _may_pass(self, part: Batch) -> bool:
        return not self._chain.room.num_waiting and super()._may_pass(part)
