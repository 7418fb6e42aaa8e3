"""Stores: blocks copied out of the engine into the first tier that has room, then written down to every tier below.

The source is free again after the first copy. What follows is the cache's: a block is leased where it is until each
lower tier has written it or given it up. A full queue drops what would go below, and counts it; it never delays a load.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tiered_kv.catalog.leases import Reservation
from tiered_kv.catalog.uses import Fate
from tiered_kv.memory.device import attempt, raise_the_programs
from tiered_kv.memory.lanes import LaneCopy, RevokedError
from tiered_kv.tiers.chain import FROM_ENGINE, Head
from tiered_kv.tiers.fills import Fill
from tiered_kv.tiers.gate import Kind, Priority, Waiter
from tiered_kv.tiers.storage import StorageTier
from tiered_kv.tiers.tier import Batch, MemoryTier, Prompt, Tally
from tiered_kv.transfers.engine_memory import EngineMemory
from tiered_kv.transfers.handles import LAST_COPIES_S, Handle, Revocable, check_layer, until_done
from tiered_kv.transfers.transfer_requests import MOST_AT_ONCE, StoreRequest, may_copy_at_once
from tiered_kv.transfers.writedown import write_down
from tiered_kv.values.errors import ConfigurationError, Reason
from tiered_kv.values.events import BlocksSettled, BlocksStored
from tiered_kv.values.integers import Mask
from tiered_kv.values.results import StoreResult, TierStore

_NONE_WANTED: Final[Mask] = np.ones(0, np.bool_)


class Storing(Protocol):
    """The store behind a `StoreHandle`.

    Attributes:
        num_layers: Of its KV group.
        missing: The layers that were not given yet; None of a store that takes none.
    """

    num_layers: int
    missing: set[int] | None

    def revoke(self) -> None:
        """Stop as soon as possible."""

    def store_layer(self, layer: int, after: object) -> None:
        """Start to copy one layer of all blocks out, a missing one, once ``after`` has passed."""


class StoreHandle(Handle[StoreResult]):
    """A store under way. Await it for its result: the source may be reused."""

    def __init__(self, ended: "asyncio.Future[StoreResult]", store: Storing) -> None:
        super().__init__(ended, store.revoke)
        self._store = store

    def store_layer(self, layer: int, *, after: object = None) -> None:
        """Start to copy one layer of all blocks out, of a store started with ``layerwise=True``; each layer once.

        Does nothing once the store has ended. The blocks are kept when the last layer has been copied.

        Args:
            layer: Its position in the KV group.
            after: An event after the layer's computation. The wait is enqueued before this returns. None is as for
                `TieredKV.start_load`.

        Raises:
            ConfigurationError: The store is not layer-wise, there is no such layer, or it was given before.
        """
        missing = self._store.missing
        if missing is None:
            raise ConfigurationError("store_layer() is for start_store(..., layerwise=True)")
        if (layer := check_layer(layer, self._store.num_layers)) not in missing:
            raise ConfigurationError(f"layer {layer} was stored already")
        self._store.store_layer(layer, after)


@dataclass
class Placed:
    """The new blocks of one window, with the slots they go to.

    Attributes:
        batch: The new blocks.
        pages: ``(len(batch) * pages_per_block,)``, where they are in the engine.
        fresh: Which blocks of the reservation they are.
        fill: By which loads join, if the slots are on the host.
    """

    tier: MemoryTier
    reservation: Reservation
    batch: Batch
    pages: NDArray[np.int64]
    fresh: NDArray[np.bool_]
    fill: Fill | None

    def gather(self, memory: EngineMemory) -> None:
        """Copy the blocks out of the engine; in a stream's turn."""
        memory.gather(self.pages, self.tier.rows, self.reservation.slots[self.fresh])


class Store(Revocable):
    """One store of one KV group."""

    missing: set[int] | None = None

    def __init__(self, request: StoreRequest) -> None:
        """Prepare a store; nothing moves before `run`."""
        super().__init__()
        self._request = request
        self._chain = chain = request.chain
        self.num_layers = chain.group.num_layers
        self._batch = batch = request.batch
        gpu = request.binding.gpu
        self._memory: list[MemoryTier] = [chain.host] if gpu is None else [gpu, chain.host]
        self._goes_down = bool(chain.written) or gpu is not None
        self._keeps = any(tier.index.num_slots for tier in self._memory)
        self._has_to_ask = not self._keeps and any(tier.is_shared for tier in chain.written)
        self._takes_stores = chain.quotas.takes_stores
        self._tally = Tally([*self._memory, *chain.storage])
        # A store longer than a tier must not evict its own head: past this many, blocks go to the next tier.
        self._may_keep = {tier.name: tier.index.room_for(batch.names) for tier in self._memory}
        self._prompt = Prompt(chain.booked, batch.names)
        self._head = Head(chain)
        self._head_below = Head(chain) if gpu is not None else None  # on the host, to which the pool's blocks go
        self._num_stored = self._num_present = 0
        self._present: list[Batch] = []
        self._left: list[tuple[MemoryTier, Batch, Mask]] = []  # what others have slots for, and what is wanted of it
        self._dropped: dict[Reason, int] = {}
        self._settled: asyncio.Future[tuple[TierStore, ...]] = asyncio.get_running_loop().create_future()
        self._num_windows = 0
        self._num_open = 1  # windows still on their way down, and run itself
        self._came = chain.unwritten.begin()
        self._is_waited_for = True  # by who flushes
        self._wanted = _NONE_WANTED  # of the batch, where a task is to place it

    async def run(self) -> StoreResult:
        """Copy the blocks out. Ends when the source may be reused; never raises for a tier."""
        loop = asyncio.get_running_loop()
        started, done = loop.time(), 0
        deadline = started + self._chain.limits.store_timeout_s
        try:
            self._chain.count_use(self._batch, self._came)
            if self._is_refused():
                done = len(self._batch)
            while done < len(self._batch):
                stop = done + self._window(done)
                part, pages, wanted = self._batch[done:stop], self._request.pages[done:stop], self._wanted[done:stop]
                known: Mask = np.zeros(len(part), np.bool_)
                # Where there is room nothing waits: let others run between windows.
                await self._chain.tasks.turn(Priority.STORE, at_once=not done)
                async with asyncio.timeout_at(deadline):
                    if not self._keeps:
                        known = await self._known_below(part)
                        part, pages = part[~known], pages[~known]
                    placing = await self._place(part)
                if placing is None:
                    self._drop(self._batch[done:], Reason.NO_ROOM)
                    break
                self._count_known(min(stop, len(self._batch)) - done - len(part))
                self._forget_evicted(*placing, part, wanted[~known])
                if (placed := self._begin(*placing, part, pages)) is not None:
                    self._copy_out(placed)
                done = min(stop, len(self._batch))
        except TimeoutError:
            self._drop(self._batch[done:], Reason.DEADLINE)
        except asyncio.CancelledError:
            self.revoked = True
            self._drop(self._batch[done:], Reason.REVOKED)
        finally:
            self._head.let_go()
            await self.drain_copies(deadline)
            self._count_left()
            self._close_one()
        await self._use_present()
        return self._ended(loop.time() - started)

    def start_at_once(self) -> StoreHandle | None:
        """Start without a task, if one tier has room for all now; None, with nothing changed, if not."""
        batch, request, chain = self._batch, self._request, self._chain
        n = len(batch.names)
        if not 0 < n <= min(MOST_AT_ONCE, self._window()) or self._refusal() or self._has_to_ask:
            return None
        part, pages = (batch, request.pages) if self._keeps else self._unknown_below()
        try:
            placing = self._place_now(part) or self._pass_now(part)
        except Exception:  # noqa: BLE001 - of a policy of the program's: the task will meet it, and end as it should
            return None
        if placing is None:
            return None
        self._head.let_go()  # one window is all there is
        loop = asyncio.get_running_loop()
        started, ended = loop.time(), loop.create_future()
        chain.count_use(batch, self._came)
        num_new = len(part.names)
        self._count_known(n - num_new)
        is_quick = may_copy_at_once(request, num_new)
        placed = self._begin(*placing, part, pages, can_join=not is_quick)

        def end(_: object = None) -> None:
            self._count_left()
            self._close_one()
            for part in self._present:
                chain.touch_there(part)
            request.lane.release()
            ended.set_result(self._ended(loop.time() - started))

        if placed is None:
            end()
        elif is_quick:
            error = attempt(partial(placed.gather, request.binding))
            self._copied_out(error, placed)
            end()
            raise_the_programs(error)
        else:
            copy = self._copy_out(placed)

            def stop() -> None:
                copy.revoke()
                self._is_late()

            timer = loop.call_at(started + max(chain.limits.store_timeout_s, LAST_COPIES_S), stop)
            copy.ended.add_done_callback(lambda _: timer.cancel())
            copy.ended.add_done_callback(end)
            chain.tasks.watch(ended, self.revoke)
        return StoreHandle(ended, self)

    @override
    def _is_late(self) -> None:
        """Keep nobody waiting who flushes or resizes; what is kept in the end comes only then."""
        self._is_waited_for = False
        self._chain.unwritten.is_late(self._came)

    def start_store(self, task: "asyncio.Task[StoreResult]") -> StoreHandle:
        """Give the task that runs this store, for a handle."""
        self._wanted = self._chain.expected.add(self._batch.names)
        self.start(task, self._request.lane)
        return StoreHandle(task, self)

    @override
    def _is_over(self) -> None:
        self._chain.expected.drop(self._wanted)

    def store_layer(self, layer: int, after: object) -> None:
        """Raise: only a `LayerStore` is given layers."""
        raise NotImplementedError

    def _ended(self, seconds: float) -> StoreResult:
        """Count the store, which has ended, tell of it, and say what came of it."""
        num_blocks = len(self._batch.names)
        result = StoreResult(
            num_blocks,
            self._num_stored,
            self._num_present,
            sum(self._dropped.values()),
            dict(self._dropped),
            self._num_stored * self._chain.group.payload_bytes,
            seconds,
            self._wait,
        )
        self._chain.fates.count_store(
            num_blocks, stored=result.num_stored, present=result.num_present, dropped=result.drop_reasons
        )
        self._chain.fates.store_seconds.saw(seconds)
        self._chain.fates.use("store", self._batch.names)
        self._chain.emit(
            BlocksStored(
                result.num_stored,
                result.num_present,
                result.num_dropped,
                result.drop_reasons,
                seconds * 1e3,
            )
        )
        return result

    async def _wait(self) -> tuple[TierStore, ...]:
        if not self._settled.done():
            await until_done([self._settled])
        return self._settled.result()

    def _window(self, done: int = 0) -> int:
        """Blocks of the next window: no more than the fastest tier that can keep any has room for."""
        left = len(self._batch.names) - done
        size = self._chain.next_window(done, left) if self._goes_down else self._chain.resident_blocks
        for most in self._may_keep.values():
            if most > 0:
                return min(size, most)
        return size

    async def _place(self, part: Batch) -> tuple[MemoryTier, Reservation] | None:
        """Reserve slots in the fastest tier that has room; wait for bounce slots only if something is below them."""
        if (placing := self._place_now(part)) is not None:
            return placing
        if not self._chain.through:
            return None
        self._head.let_go()  # what is left passes through: nobody's room is to wait for that
        return self._chain.host, await self._chain.reserve_host(part, Waiter(Kind.STORE), keep=False)

    def _forget_evicted(self, tier: MemoryTier, reservation: Reservation, part: Batch, wanted: Mask) -> None:
        """Have slots of what was evicted before it had any stay unreadable, as if it had been evicted while copied."""
        gone = ~wanted & (reservation.slots >= 0)
        if gone.any():
            tier.index.remove(part.names[gone])

    def _place_now(self, part: Batch) -> tuple[MemoryTier, Reservation] | None:
        """Reserve slots that stay, in the fastest tier that has room."""
        chain, names = self._chain, part.names
        for tier in self._memory:
            room = self._may_keep[tier.name]
            if tier is chain.host:
                may_pass = partial(self._may_pass, part) if chain.through else None
                chain.fills.overtake(names, workers=room >= len(names), may_pass=may_pass)
            is_short = room < len(names) and len((tier.index.find(names)[0] < 0).nonzero()[0]) > room
            if not is_short and (reservation := chain.reserve(tier, part)) is not None:
                self._may_keep[tier.name] -= len((reservation.slots >= 0).nonzero()[0])
                return tier, reservation
        return None

    def _pass_now(self, part: Batch) -> tuple[MemoryTier, Reservation] | None:
        """Reserve slots of the host for blocks that pass through it, unless others wait for such slots."""
        chain = self._chain
        if not chain.through or chain.room.is_wanted((FROM_ENGINE,)):
            return None
        reservation = chain.reserve_host_now(part, Waiter(Kind.STORE), keep=False)
        return None if reservation is None else (chain.host, reservation)

    def _may_pass(self, part: Batch) -> bool:
        """Say whether `_pass_now` would find slots."""
        chain = self._chain
        return not chain.room.is_wanted((FROM_ENGINE,)) and chain.can_pass(len(part.names), Waiter(Kind.STORE))

    def _unknown_below(self) -> tuple[Batch, NDArray[np.int64]]:
        """Return the blocks that some tier below lacks, as far as is known, and their pages."""
        batch, pages = self._batch, self._request.pages
        lacks = np.logical_or.reduce([tier.lacks(batch) for tier in self._chain.written])
        return batch[lacks], pages[lacks]

    async def _known_below(self, part: Batch) -> NDArray[np.bool_]:
        """Which blocks every tier below has that may be written: asked only where no tier above them keeps any.

        Of replicas each asks for its own share by itself: what others have still to write are holes in the whole, at
        which an answer ends, or past which it looks.
        """
        known, mine = np.ones(len(part), np.bool_), self._chain.naming.shard.writes(part.positions)
        for tier in self._chain.written:
            there = await tier.find_for_store(part)
            if tier.is_shared and not mine.all() and mine.any():
                there[mine] = await tier.find_for_store(part[mine])
            known &= there
        return known

    def _count_known(self, n: int) -> None:
        """Count blocks that are below, where no tier above keeps any."""
        if n:
            self._num_present += n
            self._tally.add_all(present=n)

    def _count_left(self) -> None:
        """Count what was left to others, now that nothing is copied any more: it may have come to nothing."""
        for tier, batch, wanted in self._left:
            tier.left.drop(wanted)
            is_there = self._chain.has_or_brings(tier, batch.names)
            if is_there.any():
                self._count_present(batch[is_there])
            self._drop(batch[~is_there & wanted], Reason.NOT_MOVED)
            self._drop(batch[~is_there & ~wanted], Reason.REMOVED)
        self._left.clear()

    def _count_present(self, batch: Batch) -> None:
        """Count what memory has. What a tier below is known to lack of it, as a write failed, say, is sent there."""
        chain, n = self._chain, len(batch)
        self._present.append(batch)
        self._num_present += n
        for tier in (*self._memory, *chain.storage):
            chain.unwritten.want(tier.name, batch.names, self._came)  # what waits since before it was evicted
            num_lacking = chain.send_lacking(tier, batch, self._came) if isinstance(tier, StorageTier) else 0
            self._tally.add(tier, present=n - num_lacking, deferred=num_lacking)

    def _is_refused(self) -> bool:
        """Drop all of it if there is a reason."""
        if (reason := self._refusal()) is not None:
            self._drop(self._batch, reason)
        return reason is not None

    def _refusal(self) -> Reason | None:
        """Say why nothing is stored: the cache was draining when it began, no tier keeps any, or the device failed."""
        if not self._takes_stores:
            return Reason.DRAINING
        if not self._keeps and not self._chain.written:
            return Reason.READ_ONLY
        return None if self._request.binding.error is None else Reason.DEVICE_UNUSABLE

    def _begin(
        self,
        tier: MemoryTier,
        reservation: Reservation,
        part: Batch,
        pages: NDArray[np.int64],
        *,
        can_join: bool = True,
    ) -> "Placed | None":
        """Announce what of a window is new, if it is copied in a later turn; None if nothing is."""
        names, fresh = part.names, reservation.slots >= 0
        if len(there := (~fresh).nonzero()[0]):
            is_ready = tier.index.ready(names[there])
            if (num_ready := len(is_ready.nonzero()[0])) < len(there):
                left = part[there[~is_ready]]
                self._left.append((tier, left, tier.left.add(left.names)))
            if num_ready:
                self._count_present(part[there[is_ready]])
                self._head.hold(tier, names[there])
            part, pages = part[fresh], pages[fresh]
        if not len(part.names):
            reservation.close()
            return None
        fill = None
        if can_join and tier is self._chain.host:
            fill = Fill(names, Waiter(Kind.STORE))
            self._chain.fills.announce(fill, reservation)
        if self._head_below is not None and tier is not self._chain.host:
            self._head_below.hold_rest(self._chain.host, self._batch.names)
        self._num_open += 1
        self._num_windows += 1
        return Placed(tier, reservation, part, pages.ravel(), fresh, fill)

    def _copy_out(self, placed: "Placed") -> LaneCopy:
        """Put the copy of a window's new blocks on the stream."""
        copy = self._chain.copy(self._request.lane, partial(placed.gather, self._request.binding))
        self.watch(copy, lambda error: self._copied_out(error, placed))
        return copy

    def _copied_out(self, error: BaseException | None, placed: "Placed") -> None:
        chain, n = self._chain, len(placed.batch.names)
        tier, reservation, batch, fresh = placed.tier, placed.reservation, placed.batch, placed.fresh
        lease, there = None, reservation.slots
        if error is None and tier is chain.tiers[-1]:
            there = reservation.keep(fresh)
        elif error is None:
            lease = reservation.commit(fresh)
            there = lease.slots
        if placed.fill is not None:
            chain.fills.conclude(placed.fill, reservation)
        else:
            reservation.close()
        if error is not None:
            late = Reason.REVOKED if self.revoked else Reason.DEADLINE
            self._drop(batch, late if isinstance(error, RevokedError) else Reason.COPY_FAILED)
            self._close_one()
            return
        if not self._is_waited_for:
            chain.unwritten.comes_anew(self._batch.names, self._came)
            self._is_waited_for, self._came = True, chain.unwritten.begin()
            chain.unwritten.late_ended()
        self._head.hold(tier, batch.names)  # before the hint, which a lease would end
        if self._request.hint is not None:
            tier.index.hint(batch.names, self._request.hint)
        self._num_stored += n
        self._tally.add_above(tier, dropped={Reason.NO_ROOM: n})
        slots = there[fresh]
        num_passing = len(tier.index.is_bounce(slots).nonzero()[0])
        num_removed = len((slots < 0).nonzero()[0])  # by name, while they were copied
        dropped = {Reason.NO_ROOM: num_passing, Reason.REMOVED: num_removed}
        self._tally.add(tier, written=n - num_passing - num_removed, dropped=dropped)
        if num_removed:
            chain.fates.note(batch.names[slots < 0], Fate.REMOVED, tier.name)
        if lease is None:
            chain.room.changed()  # what is kept there may be evicted
            self._close_one()
            return
        if num_removed:  # they go no further
            self._tally.add_below(tier, dropped={Reason.REMOVED: num_removed})
            batch, slots = batch[slots >= 0], slots[slots >= 0]
        prompt, head = self._prompt, self._head_below
        write_down(chain, self._tally, tier, batch, slots, lease, self._came, self._close_one, prompt, head)

    async def _use_present(self) -> None:
        """Count a use of what was there already, a window in each turn of the loop: the tail first, as in a load."""
        while self._present:
            self._chain.touch_there(self._present.pop())
            if self._present:
                with suppress(asyncio.CancelledError):  # all of it is done
                    await self._chain.tasks.turn(Priority.STORE)

    def _drop(self, batch: Batch, reason: Reason) -> None:
        if len(batch):
            self._count_dropped(reason, len(batch))
            self._tally.add_all(dropped={reason: len(batch)})
            self._chain.fates.note(batch.names, Fate.DROPPED, reason)

    def _count_dropped(self, reason: Reason, n: int) -> None:
        if n:
            self._dropped[reason] = self._dropped.get(reason, 0) + n

    def _close_one(self) -> None:
        self._num_open -= 1
        if not self._num_open and not self._settled.done():
            if self._head_below is not None:
                self._head_below.let_go()
            if self._num_windows > 1:
                asyncio.get_running_loop().call_soon(self._prompt.line_up)  # once the last of them is let go of
            tiers = self._tally.results()
            self._settled.set_result(tiers)
            if self._is_waited_for:
                self._chain.unwritten.end(self._came)
            else:
                self._chain.unwritten.late_ended()
            self._chain.emit(BlocksSettled.of(tiers))
