"""The state of one job, on the event loop: what it holds, who is to move what, who has answered, and how it ends.

`HeldLoad` and `HeldStore` hold host memory of one rank: leased blocks of a load, reserved slots of a store. `Underway`
is the whole job. It decides and waits for nothing; `jobs.Jobs` says when each step happens.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.leases import Lease, Reservation
from tiered_kv.catalog.uses import Fate
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.tier import Batch, Prompt, Tally, prefix_of
from tiered_kv.transfers.load import count_uses
from tiered_kv.transfers.prefetch import Brought, lease_each, lease_prefix
from tiered_kv.transfers.transfer_requests import JobRequest
from tiered_kv.transfers.writedown import write_down
from tiered_kv.values.errors import ConfigurationError, LayoutMismatchError, Reason, TierFault
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.integers import Mask
from tiered_kv.values.keys import StoredKeys
from tiered_kv.values.plan import JobResult, Move, Plan, TierShare
from tiered_kv.values.specs import CPULoadStoreSpec, GPULoadStoreSpec, repeats


class HeldLoad:
    """Blocks leased on the host for one rank.

    Attributes:
        chain: Of the rank.
        spec: Where they are.
        positions: Which of the job's keys they are.
        present: Which blocks of the job need no move: none.
        kept: Of which that goes on to hold in the end: all.
        faults: What kept others from being brought.
        answers: What a flush waits for: nothing.
    """

    answers: "tuple[asyncio.Future[None], ...]" = ()

    def __init__(
        self,
        chain: Chain,
        batch: Batch,
        lease: Lease,
        brought: Brought,
        positions: NDArray[np.int64] | None = None,
    ) -> None:
        """Take over a lease on a prefix of ``batch``, or on its blocks at these positions; ``brought`` is about all."""
        self.chain = chain
        self.spec = CPULoadStoreSpec(lease.slots, chain.host.slab.name)
        self.positions = np.arange(len(lease.slots)) if positions is None else positions
        self.present: Mask = np.zeros(len(brought.source), np.bool_)
        self.kept = ~self.present
        self.faults = tuple(brought.faults)
        self._batch = batch
        self._lease = lease
        self._brought = brought
        self._is_overtaken = False

    def overtaken(self) -> None:
        """Take note that the weights have changed, before `end`: what was wanted counts as missed for that."""
        self._is_overtaken = True

    def end(self, moved: Mask, wanted: slice) -> None:
        """Let go of the slots; ``moved`` is what all ranks have in place, ``wanted`` what they were asked for."""
        chain = self.chain
        source = self._source_of(moved)
        chain.fates.count_load(self._batch[wanted], len(source), self._why_missing(moved, wanted))
        chain.fates.load_faults.update(f"{fault.tier}: {fault.reason}" for fault in self.faults)
        for tier, count in zip(chain.tiers, np.bincount(source, minlength=len(chain.tiers)), strict=True):
            tier.counters.hits += int(count)
        chain.release(self._lease)
        if len(used := self._batch[moved]):
            came = chain.unwritten.begin()  # a flush waits for what it admits, though the job has ended
            counting = chain.tasks.spawn(count_uses(chain, used, came=came), f"count uses of {len(used)} blocks")
            counting.add_done_callback(lambda _: chain.unwritten.end(came))

    def shares(self, moved: Mask, now: float) -> Iterator[tuple[str, int, float]]:
        """Yield the tiers that had what has moved: their names, how many blocks, when these were on the host."""
        source, arrived = self._source_of(moved), self._brought.arrived[moved]
        for number in np.unique(source).tolist():
            of_tier = source == number
            yield self.chain.tiers[number].name, int(np.count_nonzero(of_tier)), float(arrived[of_tier].max())

    def _why_missing(self, moved: Mask, wanted: slice) -> str:
        """Say what befell the first block that is not in place: before it was on the host, or there."""
        first = wanted.start + prefix_of(moved[wanted])
        if first >= min(wanted.stop, len(moved)):
            return ""
        if self._is_overtaken:
            return Reason.EPOCH_ADVANCED
        if self.chain.host.index.ready(self._batch.names[first : first + 1])[0]:
            return Reason.NOT_MOVED
        befell, last = self._brought.befell, self.faults[-1] if self.faults else None
        if last is not None and (befell is None or not last.tier):  # of no tier is what ended all of it
            return last.reason
        return (befell and befell.get(first)) or self.chain.why_missing(self._batch[first : first + 1])

    def _source_of(self, moved: Mask) -> NDArray[np.int8]:
        source = self._brought.source[moved]
        source[source < 0] = len(self.chain.memory) - 1  # what another call brought meanwhile was on the host
        return source

    def abandon(self, wanted: slice) -> None:
        """End the part while a worker may still be reading the slots: what that brings counts for nothing."""
        self.end(np.zeros_like(self.present), wanted)

    def disown(self) -> None:
        """Do nothing: nobody waits for a worker that reads, and what it reads all may read."""


class HeldStore:
    """Slots reserved on the host for what one rank is to copy out.

    Attributes:
        chain: Of the rank.
        spec: Where it goes.
        positions: Which of the job's keys go there.
        present: Which blocks of the job were there already, or are for another store to bring.
        kept: Which are there in the end.
        faults: Of a tier: none, as the host takes them first.
        answers: What a flush waits for, if a worker may be copying: done once it has answered and what it copied counts
            as not written yet, or nobody will say so; cancelled if the cache was closed before.
    """

    faults: tuple[TierFault, ...] = ()

    def __init__(
        self, chain: Chain, batch: Batch, reservation: Reservation, present: Mask, hint: ReuseHint | None
    ) -> None:
        """Take over what was reserved for ``batch``: all keys of the job, or none where there is no room.

        Of all keys ``present`` says which get no slot, as they are there already or another store has one.
        """
        self.chain = chain
        self.positions = (reservation.slots >= 0).nonzero()[0]
        self.spec = CPULoadStoreSpec(reservation.slots[self.positions], chain.host.slab.name)
        self.present = self.kept = present
        self._batch = batch
        self._reservation = reservation
        self._hint = hint
        self._is_left = np.zeros_like(present)  # to another store, and not there yet
        if len(batch) and present.any():
            self._is_left = present & ~chain.host.index.ready(batch.names)
        left = self._is_left[: len(batch)]
        self._is_wanted = chain.host.left.add(batch.names[left])  # of what is left, what nobody has evicted
        self._why_nothing = Reason.NO_ROOM if chain.quotas.takes_stores else Reason.DRAINING
        self._came = chain.unwritten.now
        self._is_given_up = np.zeros(len(batch), np.bool_)
        chain.unwritten.held[self] = self._given_up
        self._answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.answers = (self._answer,)

    def end(self, moved: Mask, wanted: slice) -> None:
        """Make readable what all ranks have copied out, give back the other slots, and write down."""
        chain = self.chain
        lease = self._reservation.commit(moved[: len(self._batch)])
        self._reservation.close()
        self._count(moved, wanted)
        chain.room.changed()
        live = lease.slots >= 0
        chain.unwritten.has_lost |= bool(chain.written) and bool((moved[: len(live)] & self._is_given_up).any())
        if len(live):  # some of the others were stored or read meanwhile, and what was there, or coming, may not be
            self.kept = chain.host.index.ready(self._batch.names)
        n, num_moved = int(np.count_nonzero(live)), int(np.count_nonzero(moved[self.positions]))
        tally = Tally(chain.tiers)
        dropped = {Reason.NOT_MOVED: len(self.spec) - num_moved, Reason.REMOVED: num_moved - n}
        tally.add(chain.host, written=n, dropped=dropped)
        present = self.present[: len(live)]
        if num_moved > n:
            removed = moved[: len(live)] & ~live & ~present
            chain.fates.note(self._batch.names[removed], Fate.REMOVED, chain.host.name)
        came = chain.unwritten.begin(self._came)  # from here on a flush waits for it as for any store
        _send_on(chain, self._batch[~live & present], came)
        chain.count_use(self._batch[live | present], came)
        ended = partial(chain.unwritten.end, came)
        prompt = Prompt(chain.booked, self._batch.names)
        write_down(chain, tally, chain.host, self._batch[live], lease.slots[live], lease, came, ended, prompt)
        if self._hint is not None:  # last: whoever leases what was hinted at wants it after all
            chain.host.index.hint(self._batch.names[live], self._hint)
        if not self._answer.done():
            self._answer.set_result(None)

    def _given_up(self, start: int) -> None:
        """Take note that the host has no slots from ``start`` on any more: what comes there, and is wanted, is lost."""
        slots = self._reservation.slots
        found, _ = self.chain.host.index.find(self._batch.names)
        self._is_given_up |= (slots >= start) & (found == slots)

    def abandon(self, wanted: slice) -> None:
        """End the part while a worker may still be writing to the slots: nobody gets them any more."""
        self._count(np.zeros_like(self.present), wanted)
        self._answer.cancel()

    def overtaken(self) -> None:
        """Do nothing: what is stored is named by the weights that computed it."""

    def disown(self) -> None:
        """Have nobody wait for the blocks: what becomes of them nobody will say. The slots are held until `end`."""
        index, names = self.chain.host.index, self._batch.names[self.positions]
        index.remove(names[index.find(names)[0] == self.spec.ids])  # others may store them meanwhile
        self._answer.set_result(None)

    def shares(self, moved: Mask, now: float) -> Iterator[tuple[str, int, float]]:
        """Yield the host's name, how many blocks it has got, and when."""
        if num_blocks := int(np.count_nonzero(moved[self.positions])):
            yield self.chain.host.name, num_blocks, now

    def _count(self, moved: Mask, wanted: slice) -> None:
        del self.chain.unwritten.held[self]
        known, removed = self.present.copy(), np.zeros_like(self.present)
        self.chain.host.left.drop(self._is_wanted)
        if self._is_left.any():  # who was to bring it may have failed, or may hang: nobody is told that it is there
            is_there = self.chain.has_or_brings(self.chain.host, self._batch.names[self._is_left])
            known[self._is_left], removed[self._is_left] = is_there, ~is_there & ~self._is_wanted
        stored, present = int(np.count_nonzero(moved[self.positions])), int(np.count_nonzero(known[wanted]))
        requested, num_removed = len(moved[wanted]), int(np.count_nonzero(removed[wanted]))
        why = Reason.NOT_MOVED if len(self._batch) else self._why_nothing
        dropped = {Reason.REMOVED: num_removed, why: requested - stored - present - num_removed}
        reasons = {reason: count for reason, count in dropped.items() if count}
        self.chain.fates.count_store(requested, stored=stored, present=present, dropped=reasons)


Held = HeldLoad | HeldStore


class Underway:
    """A job that is under way: what it holds, and which ranks have answered.

    Attributes:
        request: What it is about.
        plan: What ranks are to do, once it holds something.
        is_bound: Whether the engine's blocks are said. Set by any thread, once.
    """

    def __init__(self, number: int, request: JobRequest, clock: Callable[[], float]) -> None:
        self.request = request
        self.plan: Plan | None = None
        self.is_bound = request.engine is not None
        self._number = number
        self._held: Sequence[Held] = ()
        self._wanted = slice(0, len(request.keys))  # of the keys; less once it is bound to less
        self._counted = self._wanted  # and what was moved before that
        self._copies = 1  # workers of each part
        # Over the keys; of a load by rank, as each moves all, and of a store by part, as those who have it take turns.
        self._given: list[Mask] = []  # what need not be moved
        self._moved: list[Mask] = []  # that, and what has been
        self._unanswered: dict[int, Mask] = {}  # by rank, over the keys; only ranks that must answer
        self._errors: dict[int, str] = {}  # by rank
        self._clock = clock
        self._begun = self._planned = clock()
        self._moved_s = 0.0

    def hold(self, pids: Sequence[int], brought: Sequence[Brought]) -> Plan:
        """Hold host memory for every rank, and say who moves what.

        Args:
            pids: The process of each rank.
            brought: Of a load, by rank, which tier had each key's block.
        """
        request, keys = self.request, self.request.keys
        for chain, batch in request.parts:
            chain.fates.use(request.direction, batch.names)
        if request.direction == "store":
            self._held = reserve_all(request.parts, request.hint)
        else:
            leases, at = lease_each(request.parts) if request.gaps else (lease_prefix(request.parts), None)
            self._held = [
                HeldLoad(chain, batch, lease, of_rank, at)
                for (chain, batch), lease, of_rank in zip(request.parts, leases, brought, strict=True)
            ]
        moves = tuple(self._moves(pids))
        by_rank = [self._of(move.rank) for move in moves]
        self._given = [held.present for held in (self._held if request.direction == "store" else by_rank)]
        self._moved = [each.copy() for each in self._given]
        num_blocks = len(moves[0].positions) if request.direction == "load" and not request.gaps else len(keys)
        plan = Plan(self._number, request.direction, num_blocks, moves)
        if request.engine is not None:
            per_block = request.pages_per_block
            plan = bind(plan, per_block, request.engine[: num_blocks * per_block])
        self._unanswered = {move.rank: self._mask_of(move.positions) for move in moves if move.positions}
        self.plan = plan
        self._planned = self._clock()
        return plan

    def _moves(self, pids: Sequence[int]) -> Iterator[Move]:
        """Yield each worker's part: of those that hold the same each loads all, and stores its turn."""
        copies = self._copies = len(pids) // len(self._held)
        for rank, pid in enumerate(pids):
            held, turn = self._of(rank), slice(None)
            if self.request.direction == "store":
                turn = slice(rank % copies, None, copies)
            host = CPULoadStoreSpec(held.spec.ids[turn], held.spec.pool)
            yield Move(rank, pid, None, host, tuple(held.positions[turn].tolist()))

    def _of(self, rank: int) -> Held:
        """Return what is held for a worker's part of the blocks."""
        return self._held[rank // self._copies]

    def _moved_by(self, rank: int) -> Mask:
        return self._moved[rank // self._copies if self.request.direction == "store" else rank]

    def follow(self, plan: Plan, wanted: slice) -> None:
        """Have ranks do what a plan says that was bound to a part of the keys, and expect no answer for the rest."""
        self.plan, self._wanted = plan, wanted
        moved = np.logical_or.reduce([each & ~given for each, given in zip(self._moved, self._given, strict=True)])
        ends = [wanted.start, wanted.stop - 1] if wanted.start < wanted.stop else []
        at = [*moved.nonzero()[0].tolist(), *ends]
        self._counted = slice(min(at), max(at) + 1) if at else wanted
        for move in plan.moves:
            self.take_keys(move.rank, ~self._mask_of(move.positions), moved=False)

    @property
    def may_be_out(self) -> bool:
        """Whether a worker may have its plan: it is bound, or may have been where it is planned."""
        return self.is_bound or self.request.is_far

    @property
    def answers(self) -> "list[asyncio.Future[None]]":
        """What a flush waits for once workers have its plan."""
        return [each for held in self._held for each in held.answers]

    @property
    def is_over(self) -> bool:
        """Whether every answer has come."""
        return not self._unanswered

    def waits_for(self, rank: int, pid: int) -> bool:
        """Say whether a process has not answered for its rank."""
        return self.plan is not None and rank in self._unanswered and self.plan.move_of(rank).pid == pid

    def take(self, rank: int, num_moved: int, error: str, seconds: float = 0.0) -> None:
        """Take a rank's answer: it has moved the first slots of its part, and will touch none any more."""
        if self.plan is not None and (unanswered := self._unanswered.pop(rank, None)) is not None:
            positions = self.plan.move_of(rank).positions[: max(0, num_moved)]
            moved = self._moved_by(rank)
            moved |= unanswered & self._mask_of(positions)
            self._moved_s = max(self._moved_s, seconds)
            if error:
                self._errors[rank] = error

    def take_keys(self, rank: int, answered: Mask, *, moved: bool) -> None:
        """Take an answer for some keys of a rank's part."""
        if (unanswered := self._unanswered.get(rank)) is None:
            return
        if moved:
            so_far = self._moved_by(rank)
            so_far |= answered & unanswered
        unanswered &= ~answered
        if not unanswered.any():
            del self._unanswered[rank]

    def disown(self) -> None:
        """Who planned it is gone, and answers no more: it ends with nothing, once its workers have ended."""
        for moved in self._moved:
            moved[:] = False
        for held in self._held:
            held.disown()

    def end(self) -> JobResult:
        """Let go of what it holds; what every rank has moved is readable, or in place."""
        moved: Mask = np.logical_and.reduce(self._moved)
        errors = [f"rank {rank}: {error}" for rank, error in sorted(self._errors.items())]
        is_load = self.request.direction == "load"
        if is_load and not self.request.is_current():
            moved[:] = False
            errors.append(Reason.EPOCH_ADVANCED)
            for held in self._held:
                held.overtaken()
        for held in self._held:
            held.end(moved, self._counted)
        if is_load:
            num_blocks = prefix_of(moved[self._wanted])
        else:
            everywhere = np.logical_and.reduce([held.present for held in self._held])
            # What a rank was to have without a copy, and has not: another's plan, to which it was left, may yet fail.
            lost = np.logical_or.reduce([held.present & ~held.kept for held in self._held])
            num_blocks = int(np.count_nonzero(moved & ~everywhere & ~lost))
        shares = self._shares(moved)
        for held in self._held:
            moved &= held.kept
        return self._result(num_blocks, errors, moved, shares)

    def give_up(self, why: str, *, may_be_writing: bool = False) -> JobResult:
        """End the job with nothing; the slots that a worker may be writing to stay reserved for good."""
        nothing: Mask = np.zeros(len(self.request.keys), np.bool_)
        unanswered = {id(self._of(rank)) for rank in self._unanswered}
        for held in self._held:
            if may_be_writing and self.may_be_out and id(held) in unanswered:
                held.abandon(self._counted)
            else:
                held.end(nothing, self._counted)
        return self._result(0, [why], nothing)

    def _shares(self, moved: Mask) -> dict[str, TierShare]:
        """Say which tiers had, or have taken, what every rank has moved."""
        shares: dict[str, TierShare] = {}
        for held in self._held:
            for tier, num_blocks, at in held.shares(moved, self._clock()):
                so_far = shares.get(tier, TierShare(0, 0.0))
                num_bytes = so_far.num_bytes + num_blocks * held.chain.group.payload_bytes
                shares[tier] = TierShare(num_bytes, max(so_far.seconds, at - self._begun))  # 0 of what was there before
        return shares

    def _result(
        self,
        num_blocks: int,
        errors: Sequence[str],
        mask: Mask,
        shares: Mapping[str, TierShare] | None = None,
    ) -> JobResult:
        num_bytes = sum(share.num_bytes for share in (shares or {}).values())
        seconds, planned_s = self._clock() - self._begun, self._planned - self._begun
        mask.flags.writeable = False
        times = seconds, planned_s, self._moved_s
        faults = _by_reason([fault for held in self._held for fault in held.faults])
        return JobResult(self._number, num_blocks, tuple(errors), num_bytes, *times, shares or {}, mask, faults)

    def _mask_of(self, positions: Sequence[int] | NDArray[np.int64]) -> Mask:
        mask: Mask = np.zeros(len(self.request.keys), np.bool_)
        mask[np.array(positions, np.int64)] = True
        return mask


def reserve_all(batches: Sequence[tuple[Chain, Batch]], hint: ReuseHint | None) -> list[HeldStore]:
    """Reserve slots for what each rank lacks, if there is room for all of it; else for nothing."""
    # Asked of all ranks first: what one would evict for its part must not be lost because another has no room.
    fits = all(chain.quotas.takes_stores and chain.host.index.fits(batch.names) for chain, batch in batches)
    held: list[HeldStore] = []
    for chain, batch in batches:
        if fits:
            chain.fills.overtake(batch.names)
        reservation = chain.reserve(chain.host, batch if fits else batch[:0])
        assert reservation is not None  # noqa: S101 - it fits, as was said
        present = reservation.slots < 0 if fits else chain.host.index.ready(batch.names)
        if not fits and chain.quotas.takes_stores:  # what is there is stored again all the same
            there, came = batch[present], chain.unwritten.begin()
            _send_on(chain, there, came)
            chain.count_use(there, came)
            chain.unwritten.end(came)
        elif not fits:
            chain.touch_there(batch[present])
        held.append(HeldStore(chain, batch if fits else batch[:0], reservation, present, hint))
    return held


def bind(plan: Plan, per_block: int, blocks: GPULoadStoreSpec, start: int = 0) -> Plan:
    """Return a plan that has no blocks of the engine with those of ``keys[start:]``, as many as there are.

    Args:
        plan: What is held.
        per_block: Block ids of the engine per key.
        blocks: The engine's.
        start: Of the first key that they are for.

    Raises:
        ConfigurationError: It has some already.
        LayoutMismatchError: Ids for a part of a block, or for more blocks than the plan holds.
    """
    num_blocks, rest = divmod(len(blocks), per_block)
    if any(move.engine is not None for move in plan.moves):
        raise ConfigurationError(f"job {plan.job} is about blocks of the engine already: it is bound once")
    if rest or start + num_blocks > plan.num_blocks:
        raise LayoutMismatchError(
            f"{len(blocks)} block ids, {per_block} a key, from key {start} on: the plan has {plan.num_blocks} keys"
        )
    pages = blocks.ids.reshape(-1, per_block)
    moves = []
    for move in plan.moves:
        positions = np.array(move.positions, np.int64)
        chosen = ((positions >= start) & (positions < start + num_blocks)).nonzero()[0]
        engine = GPULoadStoreSpec(pages[positions[chosen] - start].ravel(), blocks.group)
        host = CPULoadStoreSpec(move.host.ids[chosen], move.host.pool)
        moves.append(replace(move, engine=engine, host=host, positions=tuple(positions[chosen].tolist())))
    return replace(plan, num_blocks=num_blocks, moves=tuple(moves))


def check_apart(
    direction: Literal["load", "store"], keys: StoredKeys, blocks: GPULoadStoreSpec, per_block: int, start: int = 0
) -> None:
    """Raise `ConfigurationError`, naming it, if a block of the engine is there twice; the arguments are as for `bind`.

    Prompts that are stored together may share blocks: of one that comes again for the same key nothing is wrong.
    """
    ids = blocks.ids
    again = repeats(ids)
    if again and direction == "store":
        named = dict[tuple[bytes, bytes], int]()
        numbers = [named.setdefault((run.salt_id, digest), len(named)) for run in keys.runs for digest in run]
        at = np.arange(start * per_block, start * per_block + len(ids))
        pages = np.array(numbers)[at // per_block] * per_block + at % per_block
        _, first, which = np.unique(ids, return_index=True, return_inverse=True)
        again = (pages != pages[first][which]).nonzero()[0].tolist()
    if again:
        raise ConfigurationError(f"block id {ids[again[0]]} at position {again[0]} is there twice")


def _send_on(chain: Chain, there: Batch, came: int) -> None:
    """Have tiers get what they lack of blocks that the host has, or is to get, and that are stored again."""
    chain.touch_there(there)
    for tier in chain.tiers:
        chain.unwritten.want(tier.name, there.names, came)  # what waits since before it was evicted
    for storage in chain.storage:
        chain.send_lacking(storage, there, came)


def _by_reason(faults: Sequence[TierFault]) -> tuple[TierFault, ...]:
    """Name each tier once for each reason, with the blocks of all ranks together."""
    merged: dict[tuple[str, Reason], TierFault] = {}
    for fault in faults:
        first = merged.get((fault.tier, fault.reason))
        num_blocks = fault.num_blocks + (first.num_blocks if first else 0)
        merged[fault.tier, fault.reason] = replace(first or fault, num_blocks=num_blocks)
    return tuple(merged.values())
