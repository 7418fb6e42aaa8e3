"""Loads of a client: what is in place, and how it ends, as the server says it or as it is known here."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered_kv.errors import ConfigurationError
from tiered_kv.host import messages, wire
from tiered_kv.host.moving import Moving
from tiered_kv.memory.lanes import LaneCopy
from tiered_kv.results import LoadResult, TierFault
from tiered_kv.tiers.base import prefix_of
from tiered_kv.transfers.handles import LoadHandle

Ids = NDArray[np.int64]


class FarLoad(Moving[LoadResult]):
    """A load through a server."""

    def __init__(self, *args: Any, is_current: Callable[[], bool], layerwise: bool, gaps: bool) -> None:  # noqa: ANN401 - of `Moving`
        super().__init__(*args)
        self._is_current = is_current
        self._layerwise = layerwise
        self._gaps = gaps
        self._admitted: asyncio.Future[int] = self._loop.create_future()
        self._layers: dict[int, LaneCopy] = {}
        self._num_copied = np.zeros(len(self._keys), np.int64)  # layers of each block
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
        raise ConfigurationError("only a load from the back can be stopped before a block: start_load(order='back')")

    def _copy(self, asked: messages.Copy) -> None:
        if asked.by_tier:
            self._by_tier = asked.by_tier
            self._settle(len(self._keys))
        before = len(self._copies)
        super()._copy(asked)
        if len(self._copies) > before and asked.parts and asked.parts[0].layers is not None:
            self._layers[asked.parts[0].layers[0]] = self._copies[-1]

    def _say_copied(self, asked: messages.Copy, error: BaseException | None) -> None:
        super()._say_copied(asked, error)
        self._end_if_all_is_here()

    def _end_if_all_is_here(self) -> None:
        """End where the server has said how this will end, and so it did: its word would take a while yet."""
        if self._why or self._error or not self._by_tier or not self._in_place.all():
            return
        n = len(self._keys)
        num_bytes = n * self._binding.caches.payload_bytes
        result = LoadResult(n, n, self._by_tier, num_bytes, self._seconds)
        self._finish(result if self._is_current() else self._nothing("epoch advanced"))

    def _move_part(self, rows: Any, slots: Ids, pages: Ids, layers: slice | None) -> None:  # noqa: ANN401 - a Tensor
        self._binding.scatter(rows, slots, pages, layers=layers)

    def _layer_copied(self, layer: int, positions: Ids) -> None:
        self._num_copied[positions] += 1
        self._in_place = self._num_copied == self.num_layers

    def _revoke_copies(self) -> None:
        """Let no copy begin; but what is admitted is not taken back for a deadline."""
        if self._why == "revoked" or not (self._layers and self._layers[min(self._layers)].has_begun):
            super()._revoke_copies()

    def _take_other(self, reply: messages.Reply) -> None:
        match reply:
            case messages.Admitted():
                self._settle(reply.num_blocks)
            case messages.Loaded() if not self._why:
                self._finish(self._result_of(reply) if self._is_current() else self._nothing("epoch advanced"))

    def _result_of(self, said: messages.Loaded) -> LoadResult:
        mask = np.frombuffer(said.mask, np.bool_) if said.mask is not None else None
        return LoadResult(
            said.num_blocks, len(self._keys), said.by_tier, said.num_bytes, self._seconds, said.faults, mask
        )

    def _result_here(self) -> LoadResult:
        if not self._is_current():
            return self._nothing("epoch advanced")
        n = prefix_of(self._in_place)
        num_in_place = int(np.count_nonzero(self._in_place)) if self._gaps else n
        mask = self._in_place.copy() if self._gaps else None
        num_bytes = num_in_place * self._binding.caches.payload_bytes
        by_tier = {"host": num_in_place} if num_in_place else {}
        return LoadResult(n, len(self._keys), by_tier, num_bytes, self._seconds, self._faults_here(), mask)

    def _faults_here(self) -> tuple[TierFault, ...]:
        """Say why it ended without the server's word."""
        n = len(self._keys)
        if self._why in ("deadline", "revoked"):
            fault = TierFault("", self._why, n)
        else:
            fault = TierFault("host", "server away", n, self._why)
        if self._error and self._error != "revoked":
            return fault, TierFault("engine", "copy failed", n, self._error)
        return (fault,)

    def _nothing(self, why: str) -> LoadResult:
        mask = np.zeros(len(self._keys), np.bool_) if self._gaps else None
        return LoadResult(0, len(self._keys), {}, 0, self._seconds, (TierFault("", why, len(self._keys)),), mask)

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

    def __init__(self, *args: Any, is_current: Callable[[], bool]) -> None:  # noqa: ANN401 - of `Moving`
        super().__init__(*args, is_current=is_current, layerwise=False, gaps=False)
        self._claimed = 0
        self._first = len(self._keys)  # of the blocks that some copy may have touched

    def stop_before(self, block: int) -> int:
        """See `LoadHandle.stop_before`."""
        if not 0 <= block <= len(self._keys):
            raise ConfigurationError(f"block {block} is not one of the load's {len(self._keys)}")
        claimed = max(self._claimed, min(block, self._first))
        if claimed > self._claimed and self._there is not None and not self.ended.done():
            self._there.send(messages.StopBefore(self._number, claimed))
        self._claimed = claimed
        return claimed

    def _copy(self, asked: messages.Copy) -> None:
        """Copy what is not claimed."""
        parts = tuple(part for each in asked.parts if (part := each.from_position(self._claimed)) is not None)
        if parts and not self._why:
            self._first = min(self._first, *(int(wire.as_ids(part.positions).min()) for part in parts))
        super()._copy(messages.Copy(asked.id, asked.number, parts, asked.by_tier))

    def _result_of(self, said: messages.Loaded) -> LoadResult:
        return self._brought(said.by_tier, said.faults)

    def _result_here(self) -> LoadResult:
        if not self._is_current():
            return self._nothing("epoch advanced")
        return self._brought({"host": len(self._keys)}, self._faults_here())

    def _brought(self, by_tier: Mapping[str, int], faults: tuple[TierFault, ...]) -> LoadResult:
        """Say which blocks are in place: those at the end."""
        n = len(self._keys)
        start = n - prefix_of(self._in_place[::-1])
        mask = np.arange(n) >= start
        mask.flags.writeable = False
        num_bytes = (n - start) * self._binding.caches.payload_bytes
        counts = _at_most(by_tier, n - start)
        return LoadResult(0 if start else n, n, counts, num_bytes, self._seconds, faults, mask)

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
