"""The directories of one tier, which of them are in use, and which have been used together.

One that fails or hangs is let go of. It is tried again once in a while, and begins empty: what was evicted while it was
away must not come back with it. What hangs there may go on for ever, in threads of that disk alone.

So that none brings back after a restart what was evicted while it was away, each directory has a file ``member``
(`Member`): an identity of its own, and those of all that were in use when the tier was opened, or one came or went,
last, under a number that grows by the time; and the numbers before it. Who is not named under the last number was away
while blocks may have been evicted, and begins empty. Where directories were used apart there are several last numbers,
of which none knows the others: who is not named under each begins empty, and that may be all. So do the fewer where
directories of two tiers are used together. One that is away and was never used with the others has no name that they
know: they note its place, and beside them it begins empty there.

Killed at any moment, all directories that were in use stay what they were: the first one that has the new number names
the others, whether they have it yet or not. So each has its identity on its disk, from when it is first used, before
any is named. One that is emptied says of the others what all that was read has come to: killed meanwhile, those which
have to be emptied with it still are. The file has two copies, in places of its own that are written in turn: a disk
that others have filled takes it, and a copy that is cut leaves the other.
"""

import asyncio
import contextlib
import enum
import errno
import json
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import xxhash
from pydantic import Field, TypeAdapter, ValidationError

from tiered_kv.media.backend import BackendContext, Missing
from tiered_kv.system import files, system
from tiered_kv.values.errors import BackendError, BackendUnavailableError, ConfigurationError
from tiered_kv.values.log import log
from tiered_kv_backends.nvme.directory import (
    MEMBER,
    NO_DESCRIPTOR,
    DirectoryShape,
    check_place,
    explained,
    fit,
    folders_in,
    open_file,
    open_root,
    remove_folder,
    taken,
)
from tiered_kv_backends.nvme.directory_store import DirectoryStore, DirectoryThreads
from tiered_kv_backends.nvme.ledger import Entries, Order
from tiered_kv_backends.nvme.nvme_settings import NVMeSettings

_COPY_BYTES: Final = 4096
_NUM_COPIES: Final = 2
_MOST_TURNS: Final = 64
"""Remembered before the last: of an older one, which of two came first is told by who was in use."""
_MOST_AWAY: Final = 32
"""Places remembered: of one that was away before so many others, the tier of most counts."""
_CHANCE_BITS: Final = 32
"""Of a turn's number: no two are alike that are said apart."""


@dataclass(frozen=True)
class Member:
    """What a directory says of itself.

    Attributes:
        id: Its identity: 16 hexadecimal digits.
        turn: When the tier was opened, or one came or went: greater is later; 0 in one that was never in use.
        ids: Of those in use since.
        tier: The identity of the first directory that the tier had: turns of two tiers say nothing of each other.
        before: The turns that this one came after, ascending.
        away: Places (`place_of`) where one was away and none of the tier has been in use since.
    """

    id: str = field(default_factory=lambda: system().token_bytes(8).hex())
    turn: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = 0
    ids: frozenset[str] = frozenset()
    tier: str = ""
    before: tuple[int, ...] = ()
    away: tuple[str, ...] = ()

    def is_after(self, other: "Member") -> bool:
        """Whether who said it knew of the other: of what is too old to be remembered, if any was in use in both."""
        is_too_old = other.turn < min((*self.before, self.turn))
        knows = not self.ids.isdisjoint(other.ids) if is_too_old else other.turn in self.before
        return knows and other.turn < self.turn


_MEMBER = TypeAdapter(Member)


def place_of(path: Path) -> str:
    """Name the place of a directory by 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(str(path.absolute()).encode())


class Site(enum.Enum):
    """Where a directory lies."""

    OWN_DISK = "on a filesystem that is mounted"
    SYSTEM_DISK = "on that of the system"
    EMPTY_ON_SYSTEM_DISK = "on that of the system, and nothing is in it"


def look_into(path: Path) -> tuple[Member | None, Site]:
    """Return what the directory at ``path`` says, or None where that is nothing readable, and where it lies.

    It is made if need be.

    Raises:
        ConfigurationError: It cannot be read, is not this user's alone, or is in or above another tier's.
    """
    with explained(path), contextlib.ExitStack() as opened:
        root = open_root(path)
        opened.callback(files().close, root)
        check_place(path)
        there = {entry.name for entry in files().entries(root)}
        site = Site.OWN_DISK
        if files().is_on_system_disk(root):
            site = Site.SYSTEM_DISK if there else Site.EMPTY_ON_SYSTEM_DISK
        if MEMBER not in there:
            return None, site
        file = open_file(root, MEMBER)
        opened.callback(files().close, file)
        return max(filter(None, _copies(file)), key=lambda copy: copy.turn, default=None), site


def write_member(path: Path, member: Member) -> None:
    """Have the directory at ``path`` say this, from one moment to the next, if it is of a later turn than before.

    Raises:
        OSError: It cannot be written.
    """
    with contextlib.ExitStack() as opened:
        root = open_root(path)
        opened.callback(files().close, root)
        file = open_file(root, MEMBER)
        opened.callback(files().close, file)
        said = json.dumps({**asdict(member), "ids": sorted(member.ids)}).encode()
        copy = b"%s %b" % (xxhash.xxh3_64_hexdigest(said).encode(), said)
        if files().fstat(file).st_size < _NUM_COPIES * _COPY_BYTES:
            files().pwrite(file, bytes(_NUM_COPIES * _COPY_BYTES), 0)
        turns = [there.turn if there and there.id == member.id else -1 for there in _copies(file)]
        files().pwrite(file, copy.ljust(_COPY_BYTES, b"\0"), turns.index(min(turns)) * _COPY_BYTES)
        files().fsync(file)


def _copies(file: int) -> list[Member | None]:
    return [_parsed(files().pread(file, _COPY_BYTES, n * _COPY_BYTES)) for n in range(_NUM_COPIES)]


def _parsed(copy: bytes) -> Member | None:
    checksum, _, said = copy.rstrip(b"\0").partition(b" ")
    if checksum != xxhash.xxh3_64_hexdigest(said).encode():
        return None
    try:
        return _MEMBER.validate_json(said)
    except ValidationError:
        return None


def are_settled(members: Sequence[Member]) -> bool:
    """Whether just these were in use together last."""
    ids = frozenset(member.id for member in members)
    return all(member.ids == ids and member.turn == members[0].turn for member in members)


def come_to(members: Sequence[Member], places: Sequence[str] = ()) -> Member:
    """Return what all of these say together, to be said by one of no name: who was never away while others were in use.

    Of directories of two tiers those of most count, or of the first one's; but none that another tier has missed at its
    place.
    """
    used = [member for member in members if member.turn]
    if not used:
        return Member("")
    missed = _missed(members, places)
    counted = [member for member in used if member.id not in missed] or used
    [(tier, _)] = Counter(member.tier for member in counted).most_common(1)  # of equal numbers the first
    ours = [member for member in used if member.tier == tier]
    last = [member for member in ours if not any(other.is_after(member) for other in ours)]
    before = sorted({turn for member in used for turn in (*member.before, member.turn)})[-_MOST_TURNS:]
    ids = frozenset.intersection(*(member.ids for member in last)) - missed
    away = tuple(dict.fromkeys(place for member in ours for place in member.away))[-_MOST_AWAY:]
    return Member("", _turn_after(member.turn for member in used), ids, tier, tuple(before), away)


def _missed(members: Sequence[Member], places: Sequence[str]) -> set[str]:
    """Return who was away, at its place, while one of another tier was in use, and was not emptied for that since."""
    return {
        member.id
        for member, place in zip(members, places, strict=False)
        for other in members
        if other.tier != member.tier and place in other.away and other.turn not in member.before
    }


def next_turn(members: Sequence[Member], last: Member | None = None) -> list[Member]:
    """Return what each is to say, where just these are in use from now on, and ``last`` may have been said."""
    last = last or come_to(members)
    turn, ids = _turn_after((last.turn, *(each.turn for each in members))), frozenset(each.id for each in members)
    before = (*last.before, last.turn)[-_MOST_TURNS:] if last.turn else ()
    said = Member("", turn, ids, last.tier or members[0].id, before, last.away)
    return [replace(said, id=member.id) for member in members]


def _turn_after(turns: Iterable[int]) -> int:
    chance = int.from_bytes(system().token_bytes(_CHANCE_BITS // 8))
    return ((max(turns) >> _CHANCE_BITS) + 1 << _CHANCE_BITS) + chance


def were_away(members: Sequence[Member], places: Sequence[str] = ()) -> list[bool]:
    """Say which of them were not in use when others were, or are of another tier than most, or than the first.

    All, if each was in use while the others were not: each of them has what was evicted while it was away.
    """
    said = come_to(members, places)
    return [bool(said.turn) and (member.id not in said.ids or member.tier not in {"", said.tier}) for member in members]


def are_copies(members: Sequence[Member]) -> list[bool]:
    """Say which of them are another one's copies: of those with one identity all but that of the latest turn."""
    originals: dict[str, Member] = {}
    for member in sorted(members, key=lambda member: -member.turn):
        originals.setdefault(member.id, member)
    return [member is not originals[member.id] for member in members]


def make_empty(path: Path, said: Member | None = None) -> None:
    """Delete the blocks of all models in a directory, and log whose they were. From then on it says ``said`` of itself.

    Raises:
        OSError: They cannot be deleted.
        ConfigurationError: It is not this user's alone, or held by another process.
    """
    with taken(path) as root:
        if folders := folders_in(root):
            log("warning", "nvme.directory_emptied", path=str(path), folders=folders)
        for folder in folders:
            remove_folder(root, folder)
        if said is not None:
            write_member(path, said)
            return
        with contextlib.suppress(FileNotFoundError):
            files().unlink(MEMBER, dir_fd=root)


_UNMOUNTED: Final = "it is empty, and on the system's disk, as the others are not: is its own mounted?"
_TRY_AGAIN_S: Final = 5.0
_ANSWER_S: Final = 2.0
"""How long a disk may take for a page, or a small file, before it is taken to hang: others wait for it."""


@dataclass(eq=False)
class Disk:
    """One directory of a tier.

    Attributes:
        number: Which one.
        store: What has it; None while it is away.
        why: It is.
        member: What it says of itself.
        is_named: Whether that is on its disk: others may name it from then on.
        unsaid: Why it has not taken what it was to say last, if so.
        site: Where it lies; as good as unknown until it was looked into.
        underway: Calls that have not ended, and since when.
        lost: Done when it has been let go of, and no restart finds what was in it.
    """

    number: int
    path: Path
    threads: DirectoryThreads
    store: DirectoryStore | None = None
    why: str = ""
    member: Member = field(default_factory=Member)
    is_named: bool = False
    unsaid: str = ""
    site: Site = Site.SYSTEM_DISK
    underway: dict[asyncio.Future[None], float] = field(default_factory=dict)
    lost: asyncio.Future[None] = field(default_factory=asyncio.Future)

    def begin(self, call: Coroutine[Any, Any, None], now: float) -> asyncio.Future[None]:
        """Make a call, which counts as under way until it has ended, whoever waits for it."""
        task = asyncio.ensure_future(call)
        self.underway[task] = now
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Future[None]) -> None:
        del self.underway[task]
        if not task.cancelled():
            task.exception()  # none is logged as forgotten


class Disks:
    """All directories of one tier, in the order of the settings. For the event loop's thread.

    Attributes:
        shapes: Of the records in each directory.
        num_blocks: Blocks of prompts that each directory holds.
        max_blocks: The most that it may.
        missing: What is away, or has no room, of each KV group; nothing where all can be used.
        order: Of all that is written.
    """

    def __init__(self, settings: NVMeSettings, context: BackendContext) -> None:
        self._settings = settings
        self.shapes = [DirectoryShape.of(each, len(settings.paths)) for each in context.groups]
        self._kinds = context.groups
        self._clock = context.clock
        try:
            self.num_blocks = fit(settings.capacity, self.shapes)
        except ConfigurationError as error:
            paths = ", ".join(map(str, settings.paths))
            raise ConfigurationError(f"the NVMe tier at {paths}: {error}") from error
        self.max_blocks = fit(settings.max_capacity or settings.capacity, self.shapes)
        self.missing: tuple[Missing, ...] = ()
        self._away_for = [""] * len(settings.paths)  # by number, why those are that the others know to be away
        self.order = Order()
        self._disks = [
            Disk(n, path, DirectoryThreads(*map(context.workers, (settings.num_threads, settings.num_threads, 1))))
            for n, path in enumerate(settings.paths)
        ]
        self._changing = asyncio.Lock()  # which are in use
        self._last = Member("")  # that any says, or was to say: what fails may be on its disk all the same
        self._turn_of_others = 0  # the last that others than those now in use say, or may say, of themselves
        self._returning = set[asyncio.Future[None]]()
        self._finding: asyncio.Task[None] | None = None
        self._retry_at = 0.0
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._disks)

    def __iter__(self) -> Iterator[Disk]:
        return iter(self._disks)

    def stores(self) -> list[DirectoryStore]:
        """Those of the directories that are in use."""
        return [disk.store for disk in self._disks if disk.store is not None]

    async def open(self) -> list[tuple[Disk, list[Entries]]]:
        """Take the directories; return what is in each, by KV group, save those whose disk fails.

        Raises:
            ConfigurationError, BackendUnavailableError: All do; or one cannot be used for another reason.
        """
        found: list[tuple[Disk, list[Entries]]] = []
        problems: list[Exception] = []
        looked_into = await self._look(problems)
        for disk, was_away in sorted(looked_into, key=lambda each: each[1]):  # if another is refused, none is emptied
            try:
                if was_away:
                    await self._empty(disk)
                disk.store = self._store_of(disk)
                found.append((disk, await disk.store.open(self.shapes)))
            except (ConfigurationError, BackendError, OSError) as error:
                disk.store, disk.why = None, _why_away(error)
                problems.append(error)
        if not found:
            raise problems[0]
        for disk in self._disks:
            if disk.store is None:
                disk.lost.set_result(None)
                log("error", "nvme.directory_away", path=str(disk.path), error=disk.why)
        await self._join(is_news=True)  # who cannot say it may have been named by one that is not there now
        return found

    async def lose(self, disk: Disk, store: DirectoryStore, why: str) -> None:
        """Let go of a directory that fails. When this returns no restart finds what was in it."""
        async with self._changing:
            if disk.store is not store:
                return
            disk.store, disk.why = None, why
            log("error", "nvme.directory_away", path=str(disk.path), error=why)
            await store.aclose()
            await self._join()
            disk.lost.set_result(None)
            self._retry_at = self._clock() + _TRY_AGAIN_S

    def _store_of(self, disk: Disk) -> DirectoryStore:
        return DirectoryStore(disk.path, self._settings, disk.threads, self.order, self._see_missing)

    def _see_missing(self) -> None:
        """Take note of what is away, and of what has no room on a disk that is full, or has some again."""
        words = [f"{disk.path} is away: {why}" for disk, why in zip(self._disks, self._away_for, strict=True) if why]
        words += [f"{disk.path} is full" for disk in self._disks if disk.store is not None and disk.store.is_full]
        why = "; ".join(words)
        self.missing = tuple(self._missing_of(why, group) for group in range(len(self._kinds))) if words else ()

    def _missing_of(self, why: str, group: int) -> Missing:
        is_missing = np.zeros(self._kinds[group].num_slots(self.max_blocks * len(self)), np.bool_)
        for disk, away_for in zip(self._disks, self._away_for, strict=True):
            room = None if disk.store is None else disk.store.num_with_room(group)
            if away_for or room is not None:
                is_missing[disk.number :: len(self)][0 if away_for else room :] = True
        return Missing(is_missing, why)

    async def until_settled(self) -> None:
        """Return when the others have noted that a directory is away: one that has will do.

        Raises:
            BackendUnavailableError: None has: what was there would come back with it.
        """
        async with self._changing:
            if not self._is_noted():
                away = ", ".join(str(disk.path) for disk in self._disks if disk.store is None)
                problem = (
                    f"other directory could note that {away} is away" if away else "directory could note who is in use"
                )
                raise BackendUnavailableError(f"no {problem}")

    async def until_known(self) -> None:
        """Return when a restart knows that all of these are in use, and no others that the tier may have had.

        Raises:
            BackendUnavailableError: It does not: what others have would come back with them.
        """
        if len(self.stores()) == len(self) and not self._is_noted():
            await self.until_settled()

    def _is_noted(self) -> bool:
        """Whether a restart knows whom it has to, of those that are in use now."""
        members = [disk.member for disk in self._to_name()]
        if not members:
            return len(self.stores()) == len(self)
        ids = frozenset(member.id for member in members)
        return any(member.ids == ids and member.turn > self._turn_of_others for member in members)

    def _to_name(self) -> list[Disk]:
        """The directories that are to be named: all in use that can be. The next start empties the others.

        So it is none as long as none was ever named, nothing is missing, and one cannot be named yet. One that is used
        alone names itself: it is another one's tier, should they be used together, and only one of both goes on.
        """
        named = [disk for disk in self._disks if disk.store is not None and disk.is_named]
        is_as_ever = not self._last.turn and len(self.stores()) == len(self)
        return [] if is_as_ever and len(named) < len(self) else named

    async def each(self, calls: Iterable[tuple[Disk, Coroutine[Any, Any, None]]], *, are_lent: bool = False) -> None:
        """Make calls at once and wait for all of them, whatever one raises; not for those of disks that are let go of.

        Args:
            calls: Whose, and which.
            are_lent: Buffers are lent to them: each is waited for, however long it takes.
        """
        now = self._clock()
        made = [(disk.begin(call, now), disk.lost) for disk, call in calls]
        waiting = made
        while waiting:
            watched = {task for task, _ in waiting} | (set() if are_lent else {lost for _, lost in waiting})
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            waiting = [(task, lost) for task, lost in waiting if not (task.done() or (lost.done() and not are_lent))]
        for task, _ in made:
            if task.done():
                task.result()

    def try_again(self) -> None:
        """Try to have back what is away, and to note what is not, every five seconds, in tasks nobody waits for."""
        if self._is_closed or self._clock() < self._retry_at:
            return
        self._retry_at = self._clock() + _TRY_AGAIN_S
        if not (self._is_noted() and all(disk.is_named for disk in self._disks if disk.store is not None)):
            self._until_ended(asyncio.ensure_future(self._note_again()))
        for disk in self._disks:
            if disk.store is not None:
                disk.store.find_room()
            elif not disk.underway:  # else its threads hang
                self._until_ended(disk.begin(self._return(disk), self._clock()))

    def _until_ended(self, task: asyncio.Future[None]) -> None:
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    def find_hung(self) -> None:
        """Have those that calls have been waiting for answer for a page, and let go of those that do not."""
        if len(self) > 1 and (self._finding is None or self._finding.done()):
            self._finding = asyncio.create_task(self._find_hung(), name="find what hangs")

    async def _find_hung(self) -> None:
        late = self._clock() - self._settings.timeout_s / 2
        suspects = [
            (disk, disk.store)
            for disk in self._disks
            if disk.store is not None and any(since < late for since in disk.underway.values())
        ]
        probes = {disk.begin(self._probe(disk, store), self._clock()): (disk, store) for disk, store in suspects}
        if not probes:
            return
        _, hanging = await asyncio.wait(probes, timeout=_ANSWER_S)
        if len(hanging) == len(self.stores()):
            return  # no part of the tier, but all of it: there is nothing to go on with
        for probe in hanging:
            disk, store = probes[probe]
            await self.lose(disk, store, f"it hangs: no answer within {_ANSWER_S:g} s")

    async def _probe(self, disk: Disk, store: DirectoryStore) -> None:
        if problem := await store.problem():
            await self.lose(disk, store, problem)

    async def aclose(self) -> None:
        """Close the files and release the directories, or leave that to the last call still under way."""
        self._is_closed = True
        for store in self.stores():
            await store.aclose()
        if self._returning:
            await asyncio.wait(self._returning, timeout=_ANSWER_S)
        if self._finding is not None:
            self._finding.cancel()

    async def _look(self, problems: list[Exception]) -> list[tuple[Disk, bool]]:
        """Read what the directories say of themselves: which of them were not in use when others were last."""
        there = []

        looks = [(disk, disk.begin(self._look_into(disk), self._clock())) for disk in self._disks]
        limit_s = self._settings.timeout_s if len(looks) > 1 else None
        await asyncio.wait([looking for _, looking in looks], timeout=limit_s)
        for disk, looking in looks:
            if not looking.done():
                disk.why = f"it hangs: no answer within {limit_s:g} s"
                problems.append(BackendUnavailableError(f"{disk.path}: {disk.why}"))
                continue
            try:
                looking.result()
                there.append(disk)
            except ConfigurationError as error:
                disk.why = _why_away(error)
                problems.append(error)
        if any(disk.member.turn for disk in there):
            for disk in [disk for disk in there if self._is_unmounted(disk)]:
                there.remove(disk)
                disk.why = _UNMOUNTED
                problems.append(BackendUnavailableError(f"{disk.path}: {disk.why}"))
        for disk, is_copy in zip(there, are_copies([disk.member for disk in there]), strict=True):
            if is_copy:  # it is a directory of its own, which nobody has named
                disk.member, disk.is_named = Member(), False
        members, places = [disk.member for disk in there], [place_of(disk.path) for disk in there]
        self._last = come_to(members, places)
        self._turn_of_others = self._last.turn
        return list(zip(there, were_away(members, places), strict=True))

    async def _look_into(self, disk: Disk) -> None:
        said, disk.site = await disk.threads.clerk.run(look_into, disk.path)
        disk.member, disk.is_named = said or Member(), said is not None

    def _is_unmounted(self, disk: Disk) -> bool:
        """Whether a directory, of a tier that has been used, looks like the mount point of a disk that is away."""
        others = [each for each in self._disks if each is not disk]
        return disk.site is Site.EMPTY_ON_SYSTEM_DISK and any(each.site is Site.OWN_DISK for each in others)

    async def _empty(self, disk: Disk) -> None:
        if disk.member.turn > self._last.turn:  # others have used it since the tier was opened
            before = (*self._last.before, self._last.turn)
            self._last = replace(self._last, turn=_turn_after([disk.member.turn]), before=before)
        said = replace(self._last, id=Member().id) if disk.member.turn else None
        try:
            await disk.threads.clerk.run(make_empty, disk.path, said)
        except OSError as error:
            raise BackendUnavailableError(f"{disk.path} could not be emptied: {error.strerror}") from error
        disk.member, disk.is_named = said or Member(), said is not None

    async def _join(self, *, is_news: bool = False) -> None:
        """Have those that are in use say so, if that is news, or they are others than before; see what is missing."""
        is_news |= len(self.stores()) < len(self)  # also where a copy, which has its identity, is in its place
        await self._note(is_news=is_news)
        self._away_for = ["" if disk.store is not None else disk.why or "it is not known why" for disk in self._disks]
        self._see_missing()

    async def _note_again(self) -> None:
        async with self._changing:
            if not self._is_closed:
                await self._note()

    async def _note(self, *, is_news: bool = False) -> None:
        """Have those that are in use say who they are, and then who all are, if that is news or not said by all."""
        unnamed = [disk for disk in self._disks if disk.store is not None and not disk.is_named]
        await self._say_each([(disk, disk.member) for disk in unnamed])
        disks = self._to_name()
        members = [disk.member for disk in disks]
        if disks and (is_news or not (self._is_noted() and are_settled(members))):
            said = next_turn(members, replace(self._last, away=self._away()))
            if said[0].ids != self._last.ids:
                self._turn_of_others = self._last.turn
            self._last = said[0]
            await self._say_each(zip(disks, said, strict=True))

    def _away(self) -> tuple[str, ...]:
        """Return the places of all that are away, behind those of who was and is not back: the oldest are let go."""
        places = {place_of(disk.path): disk.store is None for disk in self._disks}
        before = [place for place in self._last.away if place not in places]
        return (*before, *(place for place, is_away in places.items() if is_away))[-_MOST_AWAY:]

    async def _say_each(self, what: Iterable[tuple[Disk, Member]]) -> None:
        if says := [disk.begin(self._say(disk, member), self._clock()) for disk, member in what]:
            _, late = await asyncio.wait(says, timeout=_ANSWER_S)  # one that hangs too will be found to
            for each in late:
                each.add_done_callback(self._said_late)

    def _said_late(self, _: asyncio.Future[None]) -> None:
        if not (self._is_closed or self._is_noted()):
            self._until_ended(asyncio.ensure_future(self._note_again()))

    async def _say(self, disk: Disk, member: Member) -> None:
        try:
            await disk.threads.clerk.run(write_member, disk.path, member)
        except OSError as error:
            if disk.unsaid != (why := str(error)):  # it is tried again without end
                log("error", "nvme.directory_failed", path=str(disk.path), error=why)
            disk.unsaid = why
        else:
            disk.member, disk.is_named, disk.unsaid = member, True, ""

    async def _return(self, disk: Disk) -> None:
        store, num_blocks = self._store_of(disk), self.num_blocks
        try:
            await self._look_into(disk)
            if self._is_unmounted(disk):
                raise BackendUnavailableError(_UNMOUNTED)
            await self._empty(disk)
            await store.open(self.shapes)
            await store.resize(num_blocks)
        except (ConfigurationError, BackendError, OSError) as error:
            disk.why = str(error)
            await store.aclose()
            return
        async with self._changing:
            if self._is_closed or num_blocks != self.num_blocks:  # all were resized meanwhile: it is tried again
                await store.aclose()
                return
            disk.store, disk.why, disk.lost = store, "", asyncio.Future()
            await self._join()
        log("info", "nvme.directory_back", path=str(disk.path))


def _why_away(error: Exception) -> str:
    """Say why a directory cannot be used; raise the error if it is not for its disk.

    What is wrong with the settings or the owner, or is another process's, does not get better by itself. That this
    process has no descriptor left says nothing of a disk, and would cost its blocks.
    """
    cause = error if isinstance(error, OSError) else error.__cause__
    if not isinstance(cause, OSError) or cause.errno in {errno.EPERM, *NO_DESCRIPTOR}:
        raise error
    return str(error)
