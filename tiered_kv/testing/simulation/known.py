"""The model: which blocks could be served. A cache may forget any of them at any time, and may know nothing else."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from tiered_kv.values.keys import BlockKeys

T = TypeVar("T")
Name = tuple[str, int, bytes]
"""Of a block: its version (weights and tenant), KV group and hash."""


_MOST_BETWEEN_USES: Final = 12
"""After more, a small cache may have forgotten the first."""


class WrongAnswer(AssertionError):  # noqa: N818 - what a run finds is a finding
    """The code under test has broken a promise.

    Attributes:
        what: Which promise, in one word: failures of one kind are counted together.
    """

    def __init__(self, what: str, words: str) -> None:
        super().__init__(f"{what}: {words}")
        self.what = what


async def within(limit_s: float, what: str, call: Awaitable[T]) -> T:
    """Make a call, or wait for one; it is to end in time."""
    task = asyncio.ensure_future(call)
    await asyncio.wait({task}, timeout=limit_s)
    if not task.done():
        raise WrongAnswer("never ends", f"{what} has not ended after {limit_s:g} s")
    return task.result()


def check_lent(before: list[bytes], now: list[bytes], what: str, found: Callable[[WrongAnswer], object]) -> None:
    """See that nobody has written to memory that a medium was lent, since its call began."""
    if before != now:
        found(WrongAnswer("lent memory", f"somebody has written to memory that was lent to a {what} under way"))


@dataclass(slots=True)
class _Block:
    """What was done with a block.

    Attributes:
        num_storing: Stores of it that are under way.
        stored_at: At which moment the last one began or ended; 0: none ever began.
        gone_at: When it had gone for good, if nothing stored it since.
        gone_why: By which call.
        is_gone_weakly: A restart may bring it back: the medium could not be told.
        is_gone_synced: Nor does a loss of power bring it back: media were told, and have synced that.
        is_whole: The last store of it said that it was kept, and no call took it away meanwhile.
        is_taken: A call took it away while it was being stored, or a store beside it that it may count on kept nothing.
        is_apart: A tier may lack it that another has.
        is_sent: The stores of it that are under way send below what a tier lacks: none lost it since they began.
        is_doubtful: It may be in memory only, or lost, as media failed when it was stored or after that.
        is_damaged: A bit of it was changed on a disk, where an older copy may come back.
        kept: It was promised to survive the end of the process.
        is_in_memory: It is in memory with room for all, and none of the calls that take it away was made since.
        used: When it was last asked for.
        num_uses: Stores and loads that had it: 2 at most, and only if they came shortly one after the other.
        used_again_at: At which moment they became 2.
        last_use: Which of all uses was its last.
    """

    num_storing: int = 0
    stored_at: int = 0
    gone_at: float = math.inf
    gone_why: str = ""
    is_gone_weakly: bool = False
    is_gone_synced: bool = False
    is_whole: bool = False
    is_taken: bool = False
    is_apart: bool = False
    is_sent: bool = False
    is_doubtful: bool = False
    is_damaged: bool = False
    kept: str = ""
    is_in_memory: bool = False
    used: float = -math.inf
    num_uses: int = 0
    used_again_at: int = 0
    last_use: int = 0

    @property
    def promised(self) -> str:
        return self.kept or ("in memory" if self.is_in_memory else "")

    @property
    def is_gone(self) -> bool:
        return self.gone_at < math.inf


@dataclass(frozen=True)
class Asked:
    """What was known when a load or lookup began.

    Attributes:
        names: Of its blocks.
        gone: Why it must not find each; empty where it may.
        at: At which moment it began.
    """

    names: list[Name]
    gone: list[str]
    at: int
    kept: list[str] = field(default_factory=list)


def names_of(keys: BlockKeys, weights: str) -> list[Name]:
    """Name blocks as computed by these weights."""
    version = f"{weights} {keys.salt_id.hex()}"
    return [(version, keys.group, digest) for digest in keys]


class Known:
    """What could be there, in all processes of one cache's media."""

    def __init__(self, *, sends_below: bool = False) -> None:
        """Know nothing yet; ``sends_below`` says that each tier gets what it lacks of what is stored again."""
        self._sends_below = sends_below
        self._blocks: dict[Name, _Block] = {}
        self._moment = 0
        self._num_uses = 0

    def moment(self) -> int:
        """Return a number greater than all before: virtual time may stand still between two calls."""
        self._moment += 1
        return self._moment

    def _of(self, name: Name) -> _Block:
        return self._blocks.setdefault(name, _Block())

    def store_begins(self, names: Sequence[Name], now: float, *, is_computed: bool = True) -> None:
        """Blocks are being stored: they may be served from now on, or from when they are `computed`."""
        for block in map(self._of, names):
            if not block.num_storing:
                block.is_taken, block.is_sent = False, self._sends_below
            block.num_storing += 1
            block.is_whole = False
            block.used = now
        if is_computed:
            self.computed(names)

    def computed(self, names: Sequence[Name]) -> None:
        """What is being stored of these blocks is there to be copied: from now on they may be served."""
        for block in map(self._of, names):
            block.gone_at, block.gone_why = math.inf, ""
            block.is_gone_weakly = block.is_gone_synced = False
            block.stored_at = self.moment()

    def store_ends(
        self, names: Sequence[Name], now: float, *, is_whole: bool, is_use: bool = True, may_be_lost: bool = False
    ) -> None:
        """Their store has returned, and says whether all are kept; or was cancelled. Some stores count as no use.

        What it kept in memory may be lost on its way to others without a word, where that is said.
        """
        for block in map(self._of, names):
            block.num_storing -= 1
            block.is_whole = is_whole and not block.is_taken
            block.is_taken |= block.num_storing > 0 and not is_whole
            block.is_doubtful |= may_be_lost
            block.is_apart &= not (block.is_whole and block.is_sent)
            if not block.is_whole:
                block.kept, block.is_in_memory = "", False
            block.used = now
            if block.stored_at and not block.is_gone:
                block.stored_at = self.moment()
            if block.is_whole and is_use:
                self._use(block)

    def used(self, names: Iterable[Name], now: float) -> None:
        """Blocks were asked for, so that their time to live may have begun anew."""
        for name in names:
            self._of(name).used = now

    def loaded(self, names: Iterable[Name]) -> None:
        """Blocks were loaded: a use."""
        for name in names:
            self._use(self._of(name))

    def removing(self, names: Iterable[Name] | None = None) -> None:
        """A call begins that takes blocks away, or any: who flushes meanwhile is promised none, if it never returns."""
        self.forget_kept(names)
        for name in self._blocks if names is None else names:
            block = self._of(name)
            block.is_whole, block.is_taken = False, block.num_storing > 0

    def removed(self, names: Iterable[Name], since: int, now: float, why: str, *, weakly: bool) -> None:
        """A call that takes blocks away, begun at the moment ``since``, has returned."""
        for block in map(self._of, names):
            block.kept, block.is_in_memory, block.is_whole = "", False, False
            block.is_taken = block.num_storing > 0
            if not block.num_storing and block.stored_at < since:
                block.gone_at, block.gone_why, block.is_gone_weakly = now, why, weakly
                block.is_gone_synced = False
                block.is_apart = block.is_doubtful = False
            block.num_uses = block.last_use = 0

    def taken_apart(self, names: Iterable[Name]) -> None:
        """Some tier may have lost these, and not every one: nothing is promised of them before all have."""
        for block in map(self._of, names):
            block.kept, block.is_in_memory = "", False
            block.is_apart, block.is_sent = True, False

    def taken_from_memory(self, names: Iterable[Name]) -> None:
        """A memory tier has lost these: what is promised of those below is promised on."""
        for block in map(self._of, names):
            block.is_in_memory, block.is_sent = False, False
            block.is_apart |= not block.kept

    def _use(self, block: _Block) -> None:
        self._num_uses += 1
        is_soon = block.last_use and self._num_uses - block.last_use <= _MOST_BETWEEN_USES
        if is_soon and block.num_uses < 2:
            block.used_again_at = self.moment()
        block.num_uses = 2 if is_soon else max(1, block.num_uses)
        block.last_use = self._num_uses

    def damaged(self, names: Iterable[Name]) -> None:
        """A disk has something else than these now: nothing is promised of them any more."""
        self.forget_kept(names)
        for block in map(self._of, names):
            block.is_damaged = True

    def all_names(self) -> list[Name]:
        """Name all blocks that were ever stored."""
        return list(self._blocks)

    def forget_kept(self, names: Iterable[Name] | None = None) -> None:
        """Nothing was promised of these blocks, or of any."""
        for name in self._blocks if names is None else names:
            block = self._of(name)
            block.kept, block.is_in_memory = "", False

    def remember(self, names: Iterable[Name]) -> None:
        """Blocks whose store was whole just now are in memory that has room for all."""
        for block in map(self._of, names):
            block.is_in_memory = block.is_whole and not block.num_storing and not block.is_gone

    def trouble_begins(self) -> None:
        """From now on media may fail: what was promised no longer is."""
        for block in self._blocks.values():
            block.kept, block.is_in_memory, block.is_doubtful = "", False, True

    def keep(
        self,
        names: Iterable[Name],
        before: int,
        why: str,
        *,
        since: int = 0,
        num_uses: int = 1,
        despite_trouble: bool = False,
    ) -> None:
        """Blocks stored and used so often by the moment ``before`` are promised to survive the end of the process."""
        for block in map(self._of, names):
            if (
                since <= block.stored_at <= before
                and block.num_uses >= num_uses
                and (num_uses == 1 or block.used_again_at <= before)
                and block.is_whole
                and not block.is_apart
                and not block.is_damaged
                and (despite_trouble or not block.is_doubtful)
                and not block.num_storing
                and not block.is_gone
            ):
                block.kept = why

    def opened(self, now: float) -> None:
        """A cache was opened: uses before are forgotten, and what is there gets no older than from now on."""
        for block in self._blocks.values():
            block.num_uses, block.last_use = 0, 0
            block.is_in_memory = block.is_apart = block.is_doubtful = False
            if not block.is_gone:
                block.used = now

    def restarted(self, *, lost_power: bool) -> None:
        """A process has ended suddenly."""
        for block in self._blocks.values():
            if block.num_storing:
                block.num_storing = 0
                block.is_whole = False
            if block.is_gone and (block.is_gone_weakly or (lost_power and not block.is_gone_synced)):
                block.gone_at = math.inf
            if lost_power and block.kept != "synced":
                block.kept = ""

    def media_are_old(self) -> None:
        """What media have lost is there again: in another process it may be found, and nothing else is promised."""
        self.forget_kept()
        for block in self._blocks.values():
            block.is_gone_weakly, block.is_doubtful = block.is_gone, True
            block.is_gone_synced = False

    def ledgers_are_lost(self) -> None:
        """Disks know what they have by its records alone: what was evicted by name has none, and stays away."""
        for block in self._blocks.values():
            if block.gone_why != "evicted" or block.is_gone_weakly:
                block.gone_at = math.inf

    def may_be_back(self) -> None:
        """What had gone may be found by who begins now: its media have not heard of that."""
        for block in self._blocks.values():
            block.gone_at = math.inf

    def expire(self, idle_s: float, now: float, *, weakly: bool) -> None:
        """What nobody asked for in so long is too old to be served."""
        for block in self._blocks.values():
            if not block.num_storing and block.used < now - idle_s and not block.is_gone:
                block.kept = ""
                block.gone_at, block.gone_why, block.is_gone_weakly = now, "expired", weakly
                block.is_gone_synced = False

    def told(self, before: float, *, is_synced: bool = False) -> None:
        """The media have been told of all that had gone before: no restart brings it back, or no loss of power."""
        for block in self._blocks.values():
            if block.gone_at < before:
                block.is_gone_weakly = False
                block.is_gone_synced |= is_synced

    def ask(self, names: Sequence[Name]) -> Asked:
        """Note what must not be found from now on."""
        gone, kept = [], []
        for name in names:
            block = self._blocks.get(name)
            kept.append("" if block is None else block.promised)
            if block is None or not block.stored_at:
                gone.append("was never stored")
            elif block.is_gone:
                gone.append(f"{block.gone_why} at {block.gone_at:.3f}")
            else:
                gone.append("")
        return Asked(list(names), gone, self.moment(), kept)

    def check(self, asked: Asked, found: NDArray[np.bool_], what: str) -> None:
        """Raise if something was found that had gone before the call, and was not stored again since."""
        for i in np.flatnonzero(found).tolist():
            block = self._blocks.get(asked.names[i])
            is_still = block is None or block.stored_at < asked.at
            if asked.gone[i] and is_still:
                raise WrongAnswer("came back", f"{what} found block {i}, which {asked.gone[i]}")

    def were_stored(self, names: Iterable[Name]) -> NDArray[np.bool_]:
        """Say of each block whether a store of it ever began."""
        return np.array([self._of(name).stored_at > 0 for name in names], np.bool_)

    def kept_of(self, names: Sequence[Name]) -> list[str]:
        """Say of each block what was promised of it, if anything."""
        return [self._of(name).promised for name in names]
