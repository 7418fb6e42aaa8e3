"""Swap space: host slots that an engine numbers itself, for pages of sequences that it preempts.

No name, no tier and no eviction takes part: the engine says which page goes to which slot and back. All swaps of a
space run on one stream, in the order of the calls, so that a slot may be filled by one call and read by the next.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from tiered_kv.memory.caches import PagedCaches
from tiered_kv.memory.copies import gather_blocks, scatter_blocks
from tiered_kv.memory.device import Device, Stream
from tiered_kv.memory.host import HostSlab, check_host_memory
from tiered_kv.memory.lanes import SIDE_BUFFERS, SIDE_BYTES, Lane, RevokedError, submit_copy
from tiered_kv.transfers.handles import Revocable
from tiered_kv.values.errors import ConfigurationError, Reason, TierFault, in_words
from tiered_kv.values.events import Emit
from tiered_kv.values.integers import Ids
from tiered_kv.values.loop_calls import LoopCalls
from tiered_kv.values.results import SwapResult

Moves = Mapping[int, int] | Iterable[Sequence[int]] | NDArray[np.integer[Any]]
"""``{source: target}``, or ``(source, target)`` pairs in any form."""
Copies = Mapping[int, int | Sequence[int]] | Iterable[Sequence[int]] | NDArray[np.integer[Any]]
"""``{source: targets}``, or pairs."""
_PARTS: Final = ("out", "in", "copy")


@dataclass(frozen=True)
class SwapSide:
    """What swap spaces need of the process that they are in.

    Attributes:
        device: The engine's.
        loop_calls: Of the event loop.
        emit: Takes what becomes of the memory.
        window_bytes: What one copy moves at most.
    """

    device: Device
    loop_calls: LoopCalls
    emit: Emit
    window_bytes: int


class SwapSpaces:
    """The swap spaces of one cache, one per KV group, made when they are first used."""

    def __init__(self) -> None:
        self._spaces: dict[int, SwapSpace] = {}
        self._slabs: dict[int, HostSlab] = {}
        self._streams: dict[int, Stream] = {}

    def forget(self, group: int) -> None:
        """Let go of the engine's tensors of a KV group: those that are registered next have the same slots."""
        self._spaces.pop(group, None)

    def of(
        self, group: int, side: SwapSide, caches: PagedCaches | None, num_bytes: int, stack: AsyncExitStack
    ) -> "SwapSpace":
        """Return the space of a KV group, for its registered caches; ``stack`` ends with the cache.

        Raises:
            ConfigurationError: It would hold no page, the engine's caches are not registered, the machine lacks the
                memory, or the device has none left for its copies.
        """
        if caches is None:
            raise ConfigurationError("register_kv_caches() comes before swap: the cache has no tensors yet")
        if (space := self._spaces.get(group)) is None or space.registered is not caches:
            page = caches.by_page().group
            if num_bytes < page.stride_bytes:
                raise ConfigurationError(
                    f"CacheLimits.swap_space of {num_bytes} bytes holds no page of {page.stride_bytes}"
                )
            if (slab := self._slabs.get(group)) is None:
                if (stream := self._streams.get(group)) is None:
                    stream = self._streams[group] = side.device.stream(f"swap{group}")
                    stack.callback(stream.close)
                stream.reserve(SIDE_BUFFERS, SIDE_BYTES)  # first: where this is refused the next call asks again
                check_host_memory(num_bytes, less="lower limits.swap_space")
                slab = HostSlab(
                    num_bytes // page.stride_bytes, page.stride_bytes, page.payload_bytes, name=f"swap{group}"
                )
                try:
                    side.device.page_lock(slab, emit=lambda event: side.loop_calls.call(side.emit, event))
                except BaseException:  # the system gives no thread, say: the next call makes another slab
                    slab.close()
                    raise
                stack.callback(slab.close)
                self._slabs[group] = slab
            space = self._spaces[group] = SwapSpace(side, caches, slab, Lane(self._streams[group], None))
        return space


class SwapSpace:
    """The swap space of one KV group: host slots as large as one of the engine's pages, numbered by the engine."""

    def __init__(self, side: SwapSide, registered: PagedCaches, slab: HostSlab, lane: Lane) -> None:
        """Make a swap space; see `SwapSpaces.of`.

        Args:
            side: Of the group.
            registered: The engine's caches.
            slab: Its slots are the engine's to number.
            lane: For these swaps alone.
        """
        self.side = side
        self.registered = registered
        self.caches = registered.by_page()
        self.slab = slab
        self.lane = lane
        self._piece = max(1, side.window_bytes // slab.stride_bytes)

    def check(self, swap_in: Moves, swap_out: Moves, copy: Copies) -> tuple[Ids, Ids, Ids]:
        """Return the three maps as ``(n, 2)`` sources and targets.

        Raises:
            ConfigurationError: An id out of range, or two sources of one target.
        """
        pages, slots = self.caches.num_pages, self.slab.num_slots
        return (
            _pairs("blocks_to_swap_in", swap_in, slots, pages),
            _pairs("blocks_to_swap_out", swap_out, pages, slots),
            _pairs("blocks_to_copy", copy, pages, pages),
        )

    def pieces(self, pairs: Ids) -> list[tuple[Ids, Ids]]:
        """Cut a map into sources and targets of at most a window."""
        return self._cut(pairs, self._piece)

    def pieces_within(self, pairs: Ids) -> list[tuple[Ids, Ids]]:
        """Cut a map between pages; as one, where a page is written that is read too: it must be read before."""
        return self._cut(pairs, max(1, len(pairs)) if np.isin(pairs[:, 0], pairs[:, 1]).any() else self._piece)

    def _cut(self, pairs: Ids, piece: int) -> list[tuple[Ids, Ids]]:
        starts = range(0, len(pairs), piece)
        return [(each[:, 0].copy(), each[:, 1].copy()) for each in (pairs[at : at + piece] for at in starts)]

    def gather(self, pages: Ids, slots: Ids) -> None:
        """Copy pages out; in the stream's turn."""
        gather_blocks(self.caches, pages, self.slab.rows, slots)

    def scatter(self, slots: Ids, pages: Ids) -> None:
        """Copy pages in; in the stream's turn."""
        scatter_blocks(self.slab.rows, slots, self.caches, pages)

    def copy(self, sources: Ids, targets: Ids) -> None:
        """Copy pages within the engine, all of them read before any is written; in the stream's turn."""
        shape, where = (len(sources), self.slab.stride_bytes // 8), self.caches.torch_device
        rows = torch.empty(shape, dtype=torch.int64, device=where)
        at = np.arange(len(sources))
        gather_blocks(self.caches, sources, rows, at)
        scatter_blocks(rows, at, self.caches, targets)


class Swap(Revocable):
    """A swap: pages out, then in, then copied. The first piece that fails, or is revoked, is the last."""

    def __init__(
        self, space: SwapSpace, swap_in: Ids, swap_out: Ids, copy: Ids, after: object, deadline: float
    ) -> None:
        """Submit all of it, after ``after``; what has not begun by ``deadline``, on the loop's clock, does not."""
        super().__init__()
        self._space = space  # and so the engine's tensors, until it has ended
        self._deadline = deadline
        self._counts = len(swap_out), len(swap_in), len(copy)
        self._errors: dict[int, BaseException] = {}
        self._is_stopped = False
        if (error := space.side.device.error) is not None:
            self._errors[0] = error
        self._is_unusable = error is not None
        if self._is_unusable:
            return
        space.lane.begin()
        if after is not None:
            space.lane.wait(after)
        # Out before in: a page that leaves may be another's at once. Copies last: a sequence that comes back may be
        # forked in the same step.
        for part, (move, pieces) in enumerate(
            (
                (space.gather, space.pieces(swap_out)),
                (space.scatter, space.pieces(swap_in)),
                (space.copy, space.pieces_within(copy)),
            )
        ):
            for sources, targets in pieces:
                work = partial(self._move, move, sources, targets)
                self.watch(submit_copy(space.lane, work, space.side.loop_calls), partial(self._ended, part))

    def revoke_copies(self) -> None:
        """Let no copy begin that has not begun: not one after another that does not begin either."""
        self._is_stopped = True
        super().revoke_copies()

    async def run(self) -> SwapResult:
        """Wait for its end; never raises."""
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.revoked = True
        finally:
            in_time = await self.drain_copies(self._deadline)
        if not self._errors:
            return SwapResult(*self._counts)
        part, error = min(self._errors.items())
        reason = Reason.DEVICE_UNUSABLE if self._is_unusable else Reason.COPY_FAILED
        if isinstance(error, RevokedError):
            reason = Reason.REVOKED if in_time else Reason.DEADLINE
        fault = TierFault("engine", reason, sum(self._counts[part:]), in_words(error))
        num_out, num_in, num_copied = (count if number < part else 0 for number, count in enumerate(self._counts))
        return SwapResult(num_out, num_in, num_copied, fault, _PARTS[part])

    def _move(self, move: Callable[[Ids, Ids], None], sources: Ids, targets: Ids) -> None:
        """Move the pages of one piece, in the stream's turn."""
        if self._is_stopped:
            raise RevokedError
        try:
            move(sources, targets)
        except BaseException:
            self._is_stopped = True
            raise

    def _ended(self, part: int, error: BaseException | None) -> None:
        if error is not None:
            self._is_stopped = True
            self._errors.setdefault(part, error)


def _pairs(name: str, moves: Copies, num_sources: int, num_targets: int) -> Ids:
    try:
        if isinstance(moves, Mapping):
            pairs = [(source, each) for source, targets in moves.items() for each in np.atleast_1d(targets).tolist()]
        else:
            pairs = [tuple(pair) for pair in (moves.tolist() if hasattr(moves, "tolist") else moves)]
        array = np.array(pairs) if pairs else np.empty((0, 2), np.int64)
    except (TypeError, ValueError):  # no pairs, or of several lengths
        array = np.empty(0)
    if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iu":
        raise ConfigurationError(f"{name} must map ints to ints, or be pairs of them")
    for what, ids, end in (("source", array[:, 0], num_sources), ("target", array[:, 1], num_targets)):
        if len(ids) and (ids.min() < 0 or ids.max() >= end):
            raise ConfigurationError(f"{name}: {what}s from {ids.min()} to {ids.max()} are not all in [0, {end})")
    targets, counts = np.unique(array[:, 1], return_counts=True)
    if (counts > 1).any():
        raise ConfigurationError(f"{name}: target {targets[counts > 1][0]} is there twice")
    return array.astype(np.int64)
