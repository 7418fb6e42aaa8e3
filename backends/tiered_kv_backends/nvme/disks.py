"""The directories of one tier, and which of them are in use. `members.py` says what that is to a restart.

One that fails is let go of. It is tried again once in a while, and begins empty: what was evicted while it was away
must not come back with it.
"""

import asyncio
import errno
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from tiered_kv.backend import BackendContext, Missing
from tiered_kv.errors import BackendError, ConfigurationError
from tiered_kv.log import log
from tiered_kv_backends.nvme.directory import fit
from tiered_kv_backends.nvme.ledger import Entries, Order
from tiered_kv_backends.nvme.members import (
    Member,
    are_settled,
    make_empty,
    next_turn,
    read_member,
    were_away,
    write_member,
)
from tiered_kv_backends.nvme.settings import NVMeSettings
from tiered_kv_backends.nvme.store import Store, Threads

_TRY_AGAIN_S: Final = 5.0


@dataclass(eq=False)
class Disk:
    """One of the directories.

    Attributes:
        number: Which one.
        store: What has it; None while it is away.
        why: It is.
        member: What it says of itself.
    """

    number: int
    path: Path
    threads: Threads
    store: Store | None = None
    why: str = ""
    member: Member = field(default_factory=Member)


class Disks:
    """All of them, in the order of the settings. For the event loop's thread.

    Attributes:
        num_slots: Of each KV group in each directory.
        max_slots: The most that there may be.
        missing: What is away, if anything is.
        order: Of all that is written.
    """

    def __init__(self, settings: NVMeSettings, context: BackendContext) -> None:
        self._settings = settings
        self._shapes = context.groups
        self._clock = context.clock
        self.num_slots = fit(settings.capacity, self._shapes)
        self.max_slots = fit(settings.max_capacity or settings.capacity, self._shapes)
        self.missing: Missing | None = None
        self.order = Order()
        self._disks = [
            Disk(n, path, Threads(*map(context.workers, (settings.num_threads, settings.num_threads, 1))))
            for n, path in enumerate(settings.paths)
        ]
        self._changing = asyncio.Lock()  # which are in use
        self._returning: asyncio.Task[None] | None = None
        self._retry_at = 0.0
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._disks)

    def __iter__(self) -> Iterator[Disk]:
        return iter(self._disks)

    def stores(self) -> list[Store]:
        """Those of the directories that are in use."""
        return [disk.store for disk in self._disks if disk.store is not None]

    async def open(self) -> list[tuple[Disk, list[Entries]]]:
        """Take the directories; return what is in each, by KV group, save those whose disk fails.

        Raises:
            ConfigurationError, BackendUnavailableError: All do; or one cannot be used for another reason.
        """
        found: list[tuple[Disk, list[Entries]]] = []
        problems: list[Exception] = []
        for disk, was_away in await self._look(problems):
            try:
                if was_away:
                    await self._empty(disk)
                disk.store = Store(disk.path, self._settings, disk.threads, self.order)
                found.append((disk, await disk.store.open(self._shapes)))
            except (ConfigurationError, BackendError, OSError) as error:
                disk.store, disk.why = None, _why_away(error)
                problems.append(error)
        if not found:
            raise problems[0]
        for disk in self._disks:
            if disk.store is None:
                log("error", "nvme.directory_away", path=str(disk.path), error=disk.why)
        await self._join()
        return found

    async def lose(self, disk: Disk, store: Store, why: str) -> None:
        """Let go of a directory that fails. When this returns no restart finds what was in it."""
        async with self._changing:
            if disk.store is not store:
                return
            disk.store, disk.why = None, why
            log("error", "nvme.directory_away", path=str(disk.path), error=why)
            await store.aclose()
            await self._join()
            self._retry_at = self._clock() + _TRY_AGAIN_S

    async def until_settled(self) -> None:
        """Return when the others have noted that a directory is away."""
        async with self._changing:
            return

    def try_again(self) -> None:
        """Try to have back what is away, every five seconds, in a task that nobody waits for."""
        is_idle = self._returning is None or self._returning.done()
        if is_idle and not self._is_closed and self._clock() >= self._retry_at:
            self._returning = asyncio.ensure_future(self._return())

    async def aclose(self) -> None:
        """Close the files and release the directories, or leave that to the last call still under way."""
        self._is_closed = True
        for store in self.stores():
            await store.aclose()
        if self._returning is not None:
            await asyncio.wait({self._returning})

    async def _look(self, problems: list[Exception]) -> list[tuple[Disk, bool]]:
        """Read what the directories say of themselves: which of them were not in use when others were last."""
        there = []
        for disk in self._disks:
            try:
                disk.member = await disk.threads.clerk.run(read_member, disk.path)
                there.append(disk)
            except ConfigurationError as error:
                disk.why = _why_away(error)
                problems.append(error)
        return list(zip(there, were_away([disk.member for disk in there]), strict=True))

    async def _empty(self, disk: Disk) -> None:
        await disk.threads.clerk.run(make_empty, disk.path)
        disk.member = Member()

    async def _join(self) -> None:
        """Have those that are in use say so, if they are others than before; see what is missing."""
        disks = [disk for disk in self._disks if disk.store is not None]
        if disks and not are_settled([disk.member for disk in disks]):
            for disk, member in zip(disks, next_turn([disk.member for disk in disks]), strict=True):
                disk.member = member
                try:
                    await disk.threads.clerk.run(write_member, disk.path, member)
                except OSError as error:  # its own calls will fail too
                    log("error", "nvme.directory_failed", path=str(disk.path), error=str(error))
        away = [disk for disk in self._disks if disk.store is None]
        slots = np.tile(np.isin(np.arange(len(self)), [disk.number for disk in away]), self.max_slots if away else 0)
        why = "; ".join(f"{disk.path} is away: {disk.why}" for disk in away)
        self.missing = Missing(slots, why) if away else None

    async def _return(self) -> None:
        for disk in [disk for disk in self._disks if disk.store is None]:
            store = Store(disk.path, self._settings, disk.threads, self.order)
            try:
                await self._empty(disk)
                await store.open(self._shapes)
                await store.resize(self.num_slots)
            except (ConfigurationError, BackendError, OSError) as error:
                disk.why = str(error)
                await store.aclose()
                continue
            async with self._changing:
                if self._is_closed:
                    await store.aclose()
                    return
                disk.store, disk.why = store, ""
                await self._join()
            log("info", "nvme.directory_back", path=str(disk.path))
        self._retry_at = self._clock() + _TRY_AGAIN_S


def _why_away(error: Exception) -> str:
    """Say why a directory cannot be used; raise the error if it is not for its disk.

    What is wrong with the settings or the owner, or is another process's, does not get better by itself.
    """
    cause = error if isinstance(error, OSError) else error.__cause__
    if not isinstance(cause, OSError) or cause.errno == errno.EPERM:
        raise error
    return str(error)
