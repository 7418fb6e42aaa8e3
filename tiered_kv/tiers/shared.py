"""A tier that finds and evicts for itself, and that others may share: what it says it has, a read decides."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from tiered_kv.backend import Backend, Block, Outcome
from tiered_kv.keys import rows_of
from tiered_kv.results import TierFault
from tiered_kv.specs import LoadStoreSpec
from tiered_kv.tiers.answers import Answers
from tiered_kv.tiers.base import Mask
from tiered_kv.tiers.batch import Batch
from tiered_kv.tiers.budget import Kind, Waiter
from tiered_kv.tiers.calls import Answer, outcomes_problem
from tiered_kv.tiers.reports import WriteReport
from tiered_kv.tiers.storage import StorageTier, TierParts
from tiered_kv.tiers.suspects import Suspects
from tiered_kv.tiers.tombstones import Tombstones

_DELETED_AT_ONCE: Final = 1024
_ASKED_AT_ONCE: Final = 1024
_LOOKED_UP: Final = frozenset({Outcome.HIT, Outcome.MISS})


@dataclass(eq=False)
class _Question:
    """One under way, and how many wait for its answer."""

    task: "asyncio.Task[Answer[int]]"
    num_waiting: int = 0


class SharedTier(StorageTier):
    """A `Backend`: it finds and evicts for itself.

    Attributes:
        answers: What it has said of single blocks lately; any thread may look there.
    """

    is_shared = True

    def __init__(self, parts: TierParts, backend: Backend) -> None:
        super().__init__(parts)
        self.backend = backend
        self.suspects = Suspects(parts.health.clock)
        self.answers = Answers(parts.health.clock, 2 * parts.health.timeout_s)
        self._evicted = Tombstones()
        self._deleting: dict[object, Batch] = {}
        self._asking: dict[bytes, _Question] = {}

    async def find(self, batch: Batch, faults: list[TierFault] | None = None) -> Mask:
        """See `StorageTier.find`. What was evicted, or could not be read lately, is absent.

        Equal questions that are under way at the same time are asked once, if nothing was written or evicted between.
        One for whose answer nobody waits any more is not asked if its turn has not come.
        """
        found = np.zeros(len(batch), np.bool_)
        asked = np.flatnonzero(~(self.suspects.absent(batch.names) | self._evicted.holds(batch)))
        if self.health.is_bypassed or not len(asked):
            return found
        question = batch if len(asked) == len(batch) else batch[asked]
        name = question.names.tobytes()
        asking = self._asking.get(name)
        if asking is None:
            asking = _Question(self._tasks.spawn(self._ask(question), f"lookup in {self.name}"))
            self._asking[name] = asking
            asking.task.add_done_callback(partial(self._asked, name, asking))
        asking.num_waiting += 1
        try:
            await asyncio.wait({asking.task})
        finally:
            asking.num_waiting -= 1
            if not asking.num_waiting:
                self._asked(name, asking)
                asking.task.cancel()  # it may wait for its turn; a call that has been made goes on
        if not asking.task.cancelled():
            answer = asking.task.result()
            found[asked] = np.arange(len(asked)) < (answer.value or 0)
            if faults is not None and not answer.is_well:
                faults.append(answer.fault(self.name, len(asked)))
        self.answers.doubt(batch.names[~found])
        return found

    def _asked(self, name: bytes, asking: "_Question", _: object = None) -> None:
        if self._asking.get(name) is asking:
            del self._asking[name]

    async def _ask(self, batch: Batch) -> Answer[int]:
        n, keys = len(batch), batch.keys()

        def problem_of(num_found: int) -> str:
            is_count = isinstance(num_found, int) and not isinstance(num_found, bool)
            return "" if is_count and 0 <= num_found <= n else f"a prefix of {num_found!r} of {n} blocks"

        return await self.calls.make(
            "lookup", lambda: self.backend.lookup_prefix(keys), num_blocks=n, until_late=True, problem_of=problem_of
        )

    def ask_later(self, batch: Batch) -> None:
        """Ask for blocks in a task of the cache: `answers` has what comes of it."""
        for start in range(0, len(batch), _ASKED_AT_ONCE):
            part = batch[start : start + _ASKED_AT_ONCE]
            self._tasks.spawn(self._answer(part), f"ask {self.name} for {len(part)} blocks")

    async def find_each(self, batch: Batch, faults: list[TierFault] | None = None) -> Mask:
        """See `StorageTier.find_each`: ask for the longest prefix, and block by block for what is behind its end."""
        found = np.zeros(len(batch), np.bool_)
        for start in range(0, len(batch), _ASKED_AT_ONCE):
            part = batch[start : start + _ASKED_AT_ONCE]
            found[start : start + len(part)] = await self._find_each(part, faults)
        return found

    async def _find_each(self, batch: Batch, faults: list[TierFault] | None) -> Mask:
        silent: list[TierFault] = []
        found = await self.find(batch, silent)
        if not silent and not found.all():
            behind = np.arange(int(np.argmin(found)) + 1, len(batch))
            behind = behind[~(found[behind] | self.suspects.absent(batch.names[behind]))]
            if len(behind):
                found[behind] = await self._ask_each(batch[behind], silent)
        if faults is not None:
            faults += silent
        return found & ~self._evicted.holds(batch)

    async def _answer(self, batch: Batch) -> None:
        question = self.answers.ask(batch.names)
        self.answers.take(batch.names, await self._find_each(batch, None), question)

    async def _ask_each(self, batch: Batch, faults: list[TierFault]) -> Mask:
        n, keys = len(batch), batch.keys()
        answer = await self.calls.make(
            "lookup",
            lambda: self.backend.lookup(keys),
            num_blocks=n,
            until_late=True,
            problem_of=outcomes_problem(n, _LOOKED_UP),
        )
        if not answer.is_well:
            faults.append(answer.fault(self.name, n))
        if not answer.value:
            return np.zeros(n, np.bool_)
        return np.array([outcome is Outcome.HIT for outcome in answer.value], np.bool_)

    async def locate(self, batch: Batch) -> LoadStoreSpec | None:
        """See `Tier.locate`: the medium knows."""
        return await self._locate(partial(self.backend.locate, batch.keys()), len(batch))

    async def _read_blocks(
        self, batch: Batch, blocks: list[Block], waiter: Waiter, on_late: Callable[[], None]
    ) -> Mask:
        """See `StorageTier.read`. A block that is broken twice is deleted; until then a store may repair it."""
        right = np.zeros(len(batch), np.bool_)
        at = np.flatnonzero(~self._evicted.holds(batch))  # since the medium was asked
        if not len(at):
            return right
        wanted, there = batch[at], [blocks[i] for i in at]
        keys = wanted.keys()
        outcomes, _ = await self._read(lambda into: self.backend.read(keys, into), keys, there, waiter, on_late)
        right[at] = [outcome is Outcome.HIT for outcome in outcomes]
        self.answers.doubt(batch.names[~right])
        if broken := [key.path for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.CORRUPT]:
            self.tell_corrupted(broken)
        twice = self.suspects.saw(wanted.names, outcomes)
        if twice.any() and not self.settings.read_only:  # then others repair it, and it is looked for again
            self._forget_later(wanted[twice])
        return right

    async def _write_blocks(
        self, batch: Batch, blocks: list[Block], wanted: Mask, on_late: Callable[[], None], kind: Kind
    ) -> WriteReport:
        """See `StorageTier.write`. What is being deleted is dropped: which of the two came last, nobody could tell."""
        n, wanted = len(batch), wanted & ~self._is_being_deleted(batch)
        at = np.flatnonzero(wanted)
        written, dropped = np.zeros(n, np.bool_), ~wanted
        if len(at):
            there, chosen, serial = [blocks[i] for i in at], batch[at], self._evicted.serial
            with self._is_writing(chosen.names):
                async with self._encoded(chosen, there) as made:
                    write = partial(self.backend.write, made.keys, made.records)
                    outcomes = made.outcomes(await self._write(write, len(made.at), kind, on_late))
                written[at] = [outcome is Outcome.STORED for outcome in outcomes]
                dropped[at] = [outcome is Outcome.REFUSED for outcome in outcomes]
                self.suspects.wrote(batch.names[written])
                self._evicted.lift(batch[written], serial)
                self._asking.clear()  # what is asked from now on is not to be answered as of before
                # What was evicted here meanwhile is deleted by who did it, after this; what left memory is not.
                self.answers.forget(batch.names[written & ~self._evicted.holds(batch)])
        return WriteReport(written, np.zeros(n, np.bool_), dropped)

    def lacks(self, batch: Batch) -> Mask:
        """See `StorageTier.lacks`: nothing is known."""
        return np.ones(len(batch), np.bool_)

    def touch(self, batch: Batch) -> None:
        """See `StorageTier.touch`: such a medium keeps its own recency, by what is read."""

    def forget(self, batch: Batch) -> Coroutine[Any, Any, None]:
        """See `StorageTier.forget`. What the medium does not delete stays unfindable here, and it is tried again.

        In a tier that is only read it stays as long as anything of it is remembered.
        """
        num_lost = self._evicted.num_lost
        self._evicted.add(batch)
        self._asking.clear()
        self.answers.forget(batch.names)
        return self._delete_evicted(batch, self._evicted.serial, num_lost)

    def tick(self) -> None:
        """See `StorageTier.tick`: delete what could not be deleted."""
        if self._deleting or self.settings.read_only or self.health.is_off("delete"):
            return
        if (batch := self._evicted.oldest(_DELETED_AT_ONCE)) is not None:
            evicted = self._evicted
            self._tasks.spawn(
                self._delete_evicted(batch, evicted.serial, evicted.num_lost), f"delete again: {self.name}"
            )

    async def _delete_evicted(self, batch: Batch, serial: int, num_lost: int) -> None:
        """Delete what nobody writes or has written since ``serial``, when ``num_lost`` tombstones were lost.

        Part by part, so that no turn of the loop takes long. After a part that fails the rest waits for `tick`.
        """
        if self.settings.read_only:
            return
        for start in range(0, len(batch), _DELETED_AT_ONCE):
            part = batch[start : start + _DELETED_AT_ONCE]
            await self._until_written(part.names)
            if self._evicted.num_lost == num_lost:  # else there is no telling what was written since
                part = part[self._evicted.holds(part)]
            if len(part) and not await self._delete(part, serial):
                return

    async def _delete(self, batch: Batch, serial: int) -> bool:
        """Have the medium delete blocks; say whether it did."""
        keys, deletion = batch.keys(), object()
        self._deleting[deletion] = batch
        try:
            answer = await self.calls.make("delete", lambda: self.backend.delete(keys), num_blocks=len(keys))
        finally:
            del self._deleting[deletion]
        if answer.is_well:
            self._evicted.lift(batch, serial)
        return answer.is_well

    def _is_being_deleted(self, batch: Batch) -> Mask:
        busy = np.zeros(len(batch), np.bool_)
        if self._deleting:
            names = {name for each in self._deleting.values() for name in rows_of(each.names)}
            busy |= [name in names for name in rows_of(batch.names)]
        return busy

    def _forget_later(self, batch: Batch) -> None:
        """Delete blocks in a task of the cache: no transfer keeps its buffers for it."""
        self._tasks.spawn(self.forget(batch), f"delete {len(batch)} blocks of {self.name}")
