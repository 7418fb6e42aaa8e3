"""Stores of a client: their layers, and what becomes of them in the server's tiers."""

import asyncio
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered_kv.errors import ConfigurationError
from tiered_kv.host import messages
from tiered_kv.host.attachment import Attachment
from tiered_kv.host.moving import Moving
from tiered_kv.results import StoreResult, TierStore

Ids = NDArray[np.int64]


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
