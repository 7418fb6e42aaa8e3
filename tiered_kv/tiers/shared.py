"""A tier that finds and evicts for itself, and that others may share: what it says it has, a read decides.

What it says is taken with four kinds of doubt, all of them plain data for the event loop's thread:

- `Answers`: what it has said of blocks lately, for engines that ask key by key, every step, and cannot wait. Any thread
  may look: what is not known is to be asked, by whoever is told so first. An answer is forgotten after a second, and as
  soon as something happens that it does not know of.
- `Suspects`: blocks that are said to be there and could not be read. They are absent for a while, each time for longer,
  so that one that is broken or lost costs one load now and then, not every load. A store in that while finds it absent
  and writes it anew, which is how it is repaired, but for a medium that keeps what it has; only what is broken a second
  time is to be deleted, for the bytes may be right on the medium and others may read them.
- `Tombstones`: what was evicted while its medium could not be told. It is absent, whatever the medium says, until it
  has been told.
- `FailedWrites`: blocks that somebody on the way may write yet, behind a deletion. Of these a tombstone stays until
  they have been deleted once more, when that is over.

And of what it is known to lack, as it was evicted here or never got it, the names: a store of what memory has sends it.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tiered_kv.media.backend import Backend, Block, Blocks, CutPrefix, Outcome
from tiered_kv.system import system
from tiered_kv.tiers.calls import Answer, Turn, all_failed, outcomes_problem
from tiered_kv.tiers.records import Refusals
from tiered_kv.tiers.storage import BlockIO, StorageTier, TierParts, Writing
from tiered_kv.tiers.tier import Batch, ReadReport, WriteReport
from tiered_kv.tiers.tombstones import MOST_NAMES, Tombstones
from tiered_kv.values.errors import Reason, TierFault
from tiered_kv.values.integers import Mask
from tiered_kv.values.keys import BlockKey, Names, rows_of
from tiered_kv.values.results import BlockState
from tiered_kv.values.specs import LoadStoreSpec

_KEPT_S: Final = 1.0
_MISS, _ASKING, _HIT = int(BlockState.MISS), int(BlockState.ASKING), int(BlockState.HIT)


_QUESTIONS: Final = 0.8
"""Of what questions before took and found, for each one more."""


class Answers:
    """The answers of one tier about at most ``most_names`` blocks, the oldest going first; and what asking takes."""

    def __init__(self, clock: Callable[[], float], asking_s: float, *, most_names: int = MOST_NAMES) -> None:
        """Know nothing; what whoever looked has not begun to ask after ``asking_s``, the next one is to ask."""
        self._clock = clock
        self._asking_s = asking_s
        self._most_names = most_names
        self._said: OrderedDict[bytes, tuple[int, float, object]] = OrderedDict()  # the state, until when, the question
        self._lock = system().rlock()  # re-entrant: a signal's handler may look while its thread does
        self._asked: dict[object, tuple[float, int]] = {}  # questions without an answer: since when, of how many
        self._answer_s, self._found_part = 0.0, 1.0

    def look(self, names: Names, *, prefix_only: bool = False) -> tuple[NDArray[np.int8], Mask]:
        """Say what is known, a `BlockState` each (MISS, ASKING or HIT), and which blocks the caller is to ask for.

        If only a prefix matters, nobody asks for what is behind a block that is known to be absent: it is a MISS.
        """
        states, to_ask = np.full(len(names), _ASKING, np.int8), np.zeros(len(names), np.bool_)
        now = self._clock()
        with self._lock:
            for i, name in enumerate(rows_of(names)):
                state, until, _ = self._said.get(name, (_ASKING, now, None))
                if until > now:
                    states[i] = state
                    if prefix_only and state == _MISS:
                        states[i:] = _MISS
                        break
                else:
                    to_ask[i] = True
                    self._say(name, _ASKING, now + self._asking_s, None)
        return states, to_ask

    def cost(self) -> tuple[float, float]:
        """Say how many seconds an answer takes now, and which part of what was asked for was there."""
        with self._lock:
            waited_s = self._clock() - next(iter(self._asked.values()))[0] if self._asked else 0.0
            return max(self._answer_s, waited_s), self._found_part

    @contextmanager
    def asking(self, names: Names) -> Iterator[object]:
        """Note that blocks are being asked for, however long it takes; yield the question, for `take`."""
        question = object()
        with self._lock:
            self._asked[question] = self._clock(), len(names)
            for name in rows_of(names):
                self._say(name, _ASKING, math.inf, question)
        try:
            yield question
        finally:
            with self._lock:
                self._asked.pop(question, None)
            self._drop(names, lambda said: said[2] is question)  # it raised: nobody is asking for them any more

    def take(self, names: Names, is_there: Mask, question: object) -> None:
        """Keep what was said to a question, but of blocks of which something has happened since it was asked."""
        now = self._clock()
        until = now + _KEPT_S
        with self._lock:
            if question in self._asked:
                since, num_asked = self._asked.pop(question)
                kept = _QUESTIONS if self._answer_s else 0.0
                self._answer_s = kept * self._answer_s + (1 - kept) * (now - since)
                found_part = int(np.count_nonzero(is_there)) / num_asked
                self._found_part = _QUESTIONS * self._found_part + (1 - _QUESTIONS) * found_part
            for name, there in zip(rows_of(names), is_there.tolist(), strict=True):
                if name in self._said and self._said[name][2] is question:
                    self._say(name, _HIT if there else _MISS, until, None)

    def forget(self, names: Names) -> None:
        """Believe no older answer."""
        self._drop(names, lambda _: True)

    def doubt(self, names: Names) -> None:
        """Believe no longer that these are there; who asks for them goes on."""
        self._drop(names, lambda said: said[0] == _HIT)

    def _drop(self, names: Names, is_meant: Callable[[tuple[int, float, object]], bool]) -> None:
        with self._lock:
            for name in rows_of(names) if self._said else ():
                if name in self._said and is_meant(self._said[name]):
                    del self._said[name]

    def _say(self, name: bytes, state: int, until: float, question: object) -> None:
        self._said[name] = state, until, question
        self._said.move_to_end(name)
        if len(self._said) > self._most_names:
            self._said.popitem(last=False)


_MOST_KEYS: Final = 1024
_FAILURES: Final = 3
"""In a row, before a block that is neither read nor broken is taken for absent."""
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 4.0
"""So that what can be read again is in use again within five seconds, as a tier is."""
_REPAIR_S: Final = 60.0
"""How long a broken or refused block is absent: an engine that misses it has computed and stored it by then."""
_MEMORY_S: Final = 60.0


_Why = Literal["", "corrupt", "refused"]


@dataclass(slots=True)
class _Suspect:
    num_failures: int = 0
    why: _Why = ""
    pause_s: float = 0.0
    absent_until: float = 0.0
    seen_at: float = 0.0


class Suspects:
    """The blocks of one tier that did not go well lately, at most ``most_keys`` of them: the oldest go first."""

    def __init__(self, clock: Callable[[], float], *, most_keys: int = _MOST_KEYS) -> None:
        self._clock = clock
        self._most_keys = most_keys
        self._suspects: OrderedDict[bytes, _Suspect] = OrderedDict()
        self._refuses_until = -math.inf

    def __len__(self) -> int:
        return len(self._suspects)

    @property
    def refuses(self) -> bool:
        """Whether a record was refused for its seal lately: others there may have to be."""
        return self._clock() < self._refuses_until

    def absent(self, names: Names) -> NDArray[np.bool_]:
        """Say which blocks to take for absent now, whatever the medium says."""
        if not self._suspects:
            return np.zeros(len(names), np.bool_)
        now = self._clock()
        found = (self._suspects.get(name.tobytes()) for name in names)
        return np.array([each is not None and now < each.absent_until for each in found], np.bool_)

    def why(self, names: Names) -> list[str]:
        """Say of each block why it is absent, where that is known: ``"corrupt"``, or ``"refused"`` for its seal."""
        return [
            self._suspects[name.tobytes()].why if is_absent else ""
            for name, is_absent in zip(names, self.absent(names), strict=True)
        ]

    def saw(
        self, names: Names, outcomes: Sequence[Outcome], refused: Collection[int] = frozenset()
    ) -> NDArray[np.bool_]:
        """Take into account how reads of blocks went that the medium had said it has.

        What was refused for its seal is not deleted: others may have its key. A store replaces it.

        Returns:
            Which blocks were broken before, too, and never right in between: delete them.
        """
        delete = np.zeros(len(names), np.bool_)
        if outcomes.count(Outcome.FAILED) == len(outcomes) > 1:
            return delete  # the medium's trouble, not these blocks': the breaker's to count
        for n, outcome in enumerate(outcomes):
            if outcome is Outcome.HIT:
                if self._suspects:
                    self._suspects.pop(names[n].tobytes(), None)
            else:
                why: _Why = "refused" if n in refused else "corrupt" if outcome is Outcome.CORRUPT else ""
                delete[n] = self._went_badly(names[n].tobytes(), why)
        return delete

    def wrote(self, names: Names) -> None:
        """Look for blocks again that were written anew. One that was broken may be so still, as some media keep it."""
        for name in rows_of(names) if self._suspects else ():
            if (suspect := self._suspects.get(name)) is None:
                continue
            if suspect.why == "corrupt":
                self._suspects[name] = _Suspect(why="corrupt")
            else:
                del self._suspects[name]

    def _went_badly(self, name: bytes, why: _Why) -> bool:
        now = self._clock()
        suspect = self._suspects.pop(name, None)
        if suspect is None or (now - suspect.seen_at > _MEMORY_S and suspect.why != "corrupt"):
            suspect = _Suspect()
        self._suspects[name] = suspect
        if len(self._suspects) > self._most_keys:
            self._suspects.popitem(last=False)
        suspect.num_failures += 1
        suspect.seen_at = now
        before = suspect.why
        if why == "refused":
            self._refuses_until = now + _REPAIR_S
        if why:
            suspect.why = why
            suspect.absent_until = now + _REPAIR_S
        elif suspect.num_failures >= _FAILURES:
            suspect.pause_s = min(max(_FIRST_PAUSE_S, 2 * suspect.pause_s), _LONGEST_PAUSE_S)
            suspect.absent_until = max(suspect.absent_until, now + suspect.pause_s)
        return why == before == "corrupt"


_MAY_COME_S: Final = 60.0


class FailedWrites:
    """The blocks of one tier whose write failed less than a minute ago, ``most_names`` at most: the oldest go first.

    The call has ended here; what was sent of it may lie in a kernel, a link or a server that stands still.
    """

    def __init__(self, clock: Callable[[], float], *, most_names: int = MOST_NAMES) -> None:
        self._clock = clock
        self._most_names = most_names
        self._until = OrderedDict[bytes, float]()  # the first to end first

    def add(self, names: Names) -> None:
        """Take into account that the writes of these have failed now."""
        now = self._clock()
        for name in rows_of(names):
            self._until[name] = now + _MAY_COME_S
            self._until.move_to_end(name)
        while self._until and (len(self._until) > self._most_names or next(iter(self._until.values())) <= now):
            self._until.popitem(last=False)

    def may_come(self, names: Names) -> Mask:
        """Say which blocks may be written yet, though nobody here writes them."""
        if not self._until:
            return np.zeros(len(names), np.bool_)
        now = self._clock()
        return np.array([self._until.get(name, now) > now for name in rows_of(names)], np.bool_)


_DELETED_AT_ONCE: Final = 1024
_ASKED_AT_ONCE: Final = 1024
_LOOKED_UP: Final = (Outcome.HIT, Outcome.MISS, Outcome.FAILED)


@dataclass(eq=False)
class _Question:
    """A question under way, and how many wait for its answer."""

    task: "asyncio.Task[Answer[int]]"
    num_waiting: int = 0


class SharedTier(StorageTier):
    """The tier of a `Backend`, which finds and evicts blocks by itself.

    Attributes:
        answers: What it has said of single blocks lately; any thread may look there.
    """

    is_shared = True

    def __init__(self, parts: TierParts, backend: Backend) -> None:
        super().__init__(parts)
        self.backend: Backend = backend
        self.suspects = Suspects(parts.health.clock)
        self.answers = Answers(parts.health.clock, 2 * parts.health.timeout_s)
        self._tombstones = Tombstones()
        self._failed_writes = FailedWrites(parts.health.clock)
        self._missed = OrderedDict[bytes, None]()  # the first to go first, past as many as the others keep
        self._deleting: dict[object, Batch] = {}
        self._deleting_again: asyncio.Task[bool] | None = None
        self._deleted_at_once = _DELETED_AT_ONCE
        self._is_unsure = False  # whether the medium has said that it may have what it was to delete
        self._asking: dict[bytes, _Question] = {}

    async def find(self, batch: Batch, faults: list[TierFault] | None = None) -> Mask:
        """Ask the medium for a prefix. What was evicted, or could not be read lately, is absent.

        Equal questions that are under way at the same time are asked once, if nothing was written or evicted between.
        One for whose answer nobody waits any more is not asked if its turn has not come.
        """
        return (await self._find(batch, faults))[0]

    async def _find(self, batch: Batch, faults: list[TierFault] | None) -> tuple[Mask, bool]:
        """Do what `find` does, and say whether the medium can be asked for more."""
        if self.health.is_bypassed:
            return self._away(batch, faults), False
        found, asked = np.zeros(len(batch), np.bool_), self.may_have(batch).nonzero()[0]
        if not len(asked):
            return found, True
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
        is_well = True
        if not asking.task.cancelled():
            answer = asking.task.result()
            is_well, num_found = answer.is_well, 0 if answer.value is None else answer.value
            found[asked] = np.arange(len(asked)) < num_found
            if faults is not None and not is_well:
                faults.append(answer.fault(self.name, len(asked)))
            elif faults is not None and isinstance(num_found, CutPrefix):
                faults.append(self._partly(len(asked) - num_found))
        self.answers.doubt(batch.names[~found])
        return found, is_well

    def _partly(self, num_blocks: int) -> TierFault:
        return TierFault(self.name, Reason.UNREADABLE, num_blocks, self.why_partly)

    @override
    def may_have(self, batch: Batch) -> Mask:
        return ~(self.suspects.absent(batch.names) | self._tombstones.holds(batch))

    @override
    async def find_for_store(self, batch: Batch) -> Mask:
        # Where seals are refused, a block that is there may be one of those: only reading each would tell.
        if self.suspects.refuses:
            return np.zeros(len(batch), np.bool_)
        return await self.find(batch) & ~self.missed(batch)  # an estimate may look past a hole that a load has met

    def _asked(self, name: bytes, asking: "_Question", _: object = None) -> None:
        if self._asking.get(name) is asking:
            del self._asking[name]

    async def _ask(self, batch: Batch) -> Answer[int]:
        n = len(batch)

        def problem_of(num_found: int) -> str:
            is_count = isinstance(num_found, int) and not isinstance(num_found, bool)
            return "" if is_count and 0 <= num_found <= n else f"a prefix of {num_found!r} of {n} blocks"

        answer = await self.calls.make(
            "lookup",
            lambda: self.backend.lookup_prefix(self.records.keys(batch)),
            num_blocks=n,
            until_late=True,
            problem_of=problem_of,
        )
        if isinstance(answer.value, CutPrefix):
            self.tell_failed("lookup", n - answer.value)
        return answer

    def ask_later(self, batch: Batch, *, prefix_only: bool = False) -> None:
        """Ask for blocks, or how long a prefix of them is, in a task of the cache: `answers` has what comes of it."""
        answer = self._answer_prefix if prefix_only else self._answer
        for start in range(0, len(batch), _ASKED_AT_ONCE):
            part = batch[start : start + _ASKED_AT_ONCE]
            self._tasks.spawn(answer(part), f"ask {self.name} for {len(part)} blocks")

    async def find_each(self, batch: Batch, faults: list[TierFault] | None = None) -> Mask:
        """Ask for the longest prefix, and block by block for what is behind its end."""
        if self.health.is_bypassed:
            return self._away(batch, faults)
        found = np.zeros(len(batch), np.bool_)
        for start in range(0, len(batch), _ASKED_AT_ONCE):
            part = batch[start : start + _ASKED_AT_ONCE]
            found[start : start + len(part)] = await self._find_each(part, faults)
        return found

    async def _find_each(self, batch: Batch, faults: list[TierFault] | None) -> Mask:
        found, is_well = await self._find(batch, faults)
        if is_well and not found.all():
            # What is evicted is not asked for: its tombstone may be lifted before an answer comes, which is older.
            is_left = ~(found | self._tombstones.holds(batch) | self.suspects.absent(batch.names))
            is_left[: int(np.argmin(found)) + 1] = False
            behind = np.flatnonzero(is_left)
            if len(behind):
                found[behind] = await self._ask_each(batch[behind], faults)
        return found & ~self._tombstones.holds(batch)

    async def _answer(self, batch: Batch) -> None:
        with self.answers.asking(batch.names) as question:
            self.answers.take(batch.names, await self._find_each(batch, None), question)

    async def _answer_prefix(self, batch: Batch) -> None:
        names = batch.names
        with self.answers.asking(names) as question:
            found = await self.find(batch)
            num_said = int(np.argmin(np.append(found, [False]))) + 1  # with the first that is absent
            self.answers.take(names[:num_said], found[:num_said], question)
        self.answers.forget(names[num_said:])

    async def _ask_each(self, batch: Batch, faults: list[TierFault] | None) -> Mask:
        n = len(batch)
        answer = await self.calls.make(
            "lookup",
            lambda: self.backend.lookup(self.records.keys(batch)),
            num_blocks=n,
            until_late=True,
            problem_of=partial(outcomes_problem, n, _LOOKED_UP),
            is_failure=all_failed,
        )
        self.tell_failed("lookup", num_unsaid := (answer.value or []).count(Outcome.FAILED))
        if faults is not None and not answer.is_well:
            faults.append(answer.fault(self.name, n))
        elif faults is not None and num_unsaid:
            faults.append(self._partly(num_unsaid))
        if not answer.value:
            return np.zeros(n, np.bool_)
        return np.array([outcome is Outcome.HIT for outcome in answer.value], np.bool_)

    async def locate(self, batch: Batch) -> LoadStoreSpec | None:
        """Ask the medium where blocks are."""
        return await self._locate(lambda: self.backend.locate(self.records.keys(batch)), len(batch))

    @override
    def _read_blocks(self, turn: Turn, io: BlockIO[ReadReport], *, is_use: bool) -> None:
        """Read and verify. A block that is broken twice is deleted; until then a store may repair it."""
        batch = io.batch
        n, at = len(batch), (~self._tombstones.holds(batch)).nonzero()[0]  # since the medium was asked
        if not len(at):
            turn.give_back()
            io.then(ReadReport.of(n, at, [], {}))
            return
        wanted, serial = batch[at], self._tombstones.serial
        keys = self.records.keys(wanted)

        def end(outcomes: list[Outcome], refused: Refusals, error: str) -> None:
            report = ReadReport.of(n, at, outcomes, refused, error)
            self.answers.doubt(batch.names[~report.right])
            self.miss(batch.names[report.gone])
            if serial == self._tombstones.serial:  # else some of it may have been evicted behind the read
                self.miss_no_more(batch.names[report.right])
            if broken := [key.path for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.CORRUPT]:
                self.tell_corrupted(broken)
            twice = self.suspects.saw(wanted.names, outcomes, refused)
            if twice.any() and not self.settings.read_only:  # then others repair it, and it is looked for again
                self._forget_later(wanted[twice])
            io.then(report)

        there = Blocks.some(io.blocks, at.tolist())
        self._read(turn, wanted, there, None, lambda into, _: self.backend.read([*keys], into), io.on_late, end)

    @override
    def _write_blocks(self, turn: Turn, io: BlockIO[WriteReport], wanted: Mask) -> None:
        """Write. What is being deleted is dropped: which of the two came last, nobody could tell."""
        batch = io.batch
        n, wanted = len(batch), wanted & ~self._is_being_deleted(batch)
        at = wanted.nonzero()[0]
        written, dropped = np.zeros(n, np.bool_), ~wanted
        if not len(at):
            turn.give_back()
            io.then(WriteReport(written, np.zeros(n, np.bool_), dropped, self._refusal, ~wanted))
            return
        asked = batch[at]
        serial, end_writing = self._tombstones.serial, self._begin_writing(asked.names)

        def end(outcomes: list[Outcome], _: str) -> None:
            written[at] = [outcome is Outcome.STORED for outcome in outcomes]
            dropped[at] = [outcome is Outcome.REFUSED for outcome in outcomes]
            self._failed_writes.add(batch.names[wanted & ~written & ~dropped])
            self.suspects.wrote(batch.names[written])
            self._tombstones.lift(batch[written], serial)
            self._asking.clear()  # what is asked from now on is not to be answered as of before
            # What was evicted here meanwhile is deleted by who did it, after this; what left memory is not.
            is_there = written & ~self._tombstones.holds(batch)
            self.miss_no_more(batch.names[is_there])
            self.answers.forget(batch.names[is_there])
            end_writing()
            io.then(WriteReport(written, np.zeros(n, np.bool_), dropped, self._refusal, ~wanted))

        def write(kept: NDArray[np.int64] | None, records: Sequence[Block], _: object) -> Writing:
            return None, partial(self.backend.write, self.records.keys(asked if kept is None else asked[kept]), records)

        self._write(turn, asked, Blocks.some(io.blocks, at.tolist()), write, io.on_late, end)

    def lacks(self, batch: Batch) -> Mask:
        """Say that each block may be new to the tier, which keeps no books."""
        return np.ones(len(batch), np.bool_)

    @override
    def miss(self, names: Names) -> None:
        for name in rows_of(names):
            self._missed[name] = None
            self._missed.move_to_end(name)
        while len(self._missed) > MOST_NAMES:
            self._missed.popitem(last=False)

    @override
    def missed(self, batch: Batch) -> Mask:
        if not self._missed:
            return np.zeros(len(batch), np.bool_)
        return np.array([name in self._missed for name in rows_of(batch.names)], np.bool_)

    @override
    def miss_no_more(self, names: Names) -> None:
        for name in rows_of(names) if self._missed else ():
            self._missed.pop(name, None)

    def forget(self, batch: Batch) -> Coroutine[Any, Any, bool]:
        """Make blocks unfindable at once. What the medium does not delete stays so here, and it is tried again.

        In a tier that is only read it stays as long as anything of it is remembered.
        """
        num_lost = self._tombstones.num_lost
        self.miss(batch.names)
        self._tombstones.add(batch)
        self._asking.clear()
        self.answers.forget(batch.names)
        return self._delete_evicted(batch, self._tombstones.serial, num_lost)

    def tick(self) -> None:
        """Begin to delete what could not be deleted, but for what a write may bring back: that has its turn later."""
        is_under_way = self._deleting_again is not None and not self._deleting_again.done()
        if is_under_way or self.settings.read_only or self.health.is_off("delete"):
            return
        tombstones = self._tombstones
        if (batch := tombstones.next(_DELETED_AT_ONCE)) is None:
            return
        may_come = self._is_being_written(batch.names) | self._failed_writes.may_come(batch.names)
        batch = batch[~(may_come | self._is_being_deleted(batch))]
        if len(batch):
            deleting = self._delete_evicted(batch, tombstones.serial, tombstones.num_lost)
            self._deleting_again = self._tasks.spawn(deleting, f"delete again: {self.name}")

    @override
    async def pay(self) -> bool:
        tombstones, is_gone = self._tombstones, True
        num_left = 0 if self.settings.read_only else len(tombstones)
        while num_left > 0 and (batch := tombstones.next(_DELETED_AT_ONCE)) is not None:
            is_gone &= await self._delete_evicted(batch, tombstones.serial, tombstones.num_lost)
            num_left = 0 if self.health.is_off("delete") else num_left - len(batch)
        if not is_gone:
            return False
        if self._is_unsure:
            answer = await self._have_deleted([])
            self._is_unsure = not answer.is_well or answer.value is False
        return not self._is_unsure

    async def _delete_evicted(self, batch: Batch, serial: int, num_lost: int) -> bool:
        """Delete what nobody writes or has written since ``serial``, when ``num_lost`` tombstones were lost.

        Part by part, so that no turn of the loop takes long. After a part that fails the rest waits for `tick`, as does
        what a write that failed may bring back; the next part is smaller, as a slow medium may have no time for more.

        Returns:
            Whether all of it is known to be gone.
        """
        if self.settings.read_only:
            return True
        at, is_gone = 0, True
        while at < len(batch):
            part = batch[at : at + self._deleted_at_once]
            at += len(part)
            await self._until_written(part.names)
            if self._tombstones.num_lost == num_lost:  # else there is no telling what was written since
                part = part[self._tombstones.holds(part)]
            if len(part):
                stays_gone = ~self._failed_writes.may_come(part.names)
                answer = await self._delete(part)
                if not answer.is_well:
                    return False
                self._tombstones.lift(part[stays_gone], serial)
                is_gone &= answer.value is not False and bool(stays_gone.all())
        return is_gone

    async def _delete(self, batch: Batch) -> Answer[bool | None]:
        """Have the medium delete blocks: what it was told of it hides from here on."""
        deletion = object()
        self._deleting[deletion] = batch
        try:
            answer = await self._have_deleted(self.records.keys(batch))
        finally:
            del self._deleting[deletion]
        if answer.was_made:
            size = self._deleted_at_once
            self._deleted_at_once = min(_DELETED_AT_ONCE, size + size // 8 + 1) if answer.is_well else -(-size // 2)
        self._is_unsure |= answer.value is False
        return answer

    async def _have_deleted(self, keys: Sequence[BlockKey]) -> Answer[bool | None]:
        return await self.calls.make("delete", lambda: self.backend.delete(keys), num_blocks=len(keys))

    def _is_being_deleted(self, batch: Batch) -> Mask:
        names = {name for each in self._deleting.values() for name in rows_of(each.names)}
        return np.array([name in names for name in rows_of(batch.names)] if names else [False] * len(batch), np.bool_)

    def _forget_later(self, batch: Batch) -> None:
        """Delete blocks in a task of the cache: no transfer keeps its buffers for it."""
        self._tasks.spawn(self.forget(batch), f"delete {len(batch)} blocks of {self.name}")
