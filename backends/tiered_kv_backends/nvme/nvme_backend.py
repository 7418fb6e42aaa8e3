"""`NVMeBackend`: one directory, or several that blocks are spread over; each is a `DirectoryStore` of its own.

Slot ``n`` of the tier is slot ``n // d`` in directory ``n % d`` of ``d``, so that neighbours lie on different disks and
are moved at once.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from typing_extensions import override

from tiered_kv.media.backend import (
    BackendContext,
    Block,
    Blocks,
    Make,
    Missing,
    Outcome,
    RecordBackend,
    RecordShape,
    Recovered,
    Then,
    Verify,
    check_lengths,
)
from tiered_kv.media.inventory import Inventory
from tiered_kv.values.errors import BackendUnavailableError, ClosedError, ConfigurationError
from tiered_kv.values.keys import Names
from tiered_kv.values.specs import FileLoadStoreSpec
from tiered_kv_backends.nvme.directory import check_place, fit
from tiered_kv_backends.nvme.directory_store import DirectoryStore
from tiered_kv_backends.nvme.directory_upkeep import cut_left, delete_left, has_left, has_used, open_inventory
from tiered_kv_backends.nvme.disks import Disk, Disks
from tiered_kv_backends.nvme.ledger import Entries, Slots
from tiered_kv_backends.nvme.nvme_settings import NVMeSettings

_NAMED: Final = ("io", "io_reason", "last_error")
"""Facts of a directory that are listed for all."""

_Call = Callable[[DirectoryStore, Slots, Slots], Awaitable[list[Outcome]]]


class NVMeBackend(RecordBackend):
    """Directories on local disks that one process owns and that outlive it; `DirectoryStore` has what each promises."""

    Settings = NVMeSettings

    def __init__(self, settings: NVMeSettings | Mapping[str, Any] | str) -> None:
        self.settings = self.Settings.of(settings)
        self._open_disks: Disks | None = None
        self._only_store: DirectoryStore | None = None
        """The directory in use of a tier that has only one, which is never let go of."""
        self._shapes: tuple[RecordShape, ...] = ()

    @classmethod
    @override
    def inventory(cls, settings: NVMeSettings) -> AbstractAsyncContextManager[Inventory]:
        return open_inventory(settings)

    @classmethod
    @override
    def has_used(cls, path: Path) -> bool:
        return has_used(path)

    @classmethod
    @override
    def check_place(cls, path: Path) -> None:
        check_place(path)

    @classmethod
    def has_left(cls, path: Path) -> bool:
        """Say whether an NVMe tier has used a directory: it is no link, and has the file of its holder."""
        return has_left(path)

    @classmethod
    def delete_left(cls, path: Path) -> bool:
        """Delete a directory if it is this user's alone, no tier has it open, and all in it is what tiers make."""
        return delete_left(path)

    @classmethod
    def cut_left(cls, path: Path, capacity_bytes: int) -> bool:
        """Leave as many slots in it as a tier of this capacity has, if `delete_left` would delete it."""
        return cut_left(path, capacity_bytes)

    async def open(self, context: BackendContext) -> list[Recovered]:
        """Take the directories and read their ledgers; where those are damaged, the headers of the records too.

        Of several, one that cannot be read or written is left out. One that was left out while others were used is
        emptied.

        Raises:
            ConfigurationError: None can be used; or one is not this user's alone, is held by another process, or is too
                small for one block.
        """
        self._shapes = context.groups
        self._open_disks = disks = Disks(self.settings, context)
        try:
            found = await disks.open()
            self._only_store = found[0][0].store if len(disks) == 1 else None
            return [
                await self._merged(n, [(disk, each[n]) for disk, each in found]) for n in range(len(context.groups))
            ]
        except BaseException:
            await self.aclose()
            raise

    async def locate(self, group: int, slots: Slots) -> FileLoadStoreSpec:
        """Say which bytes of the slabs are the records in these slots."""
        shape, d = self._shapes[group], len(self._disks)
        names = [str(disk.path.absolute() / shape.folder / "slab") for disk in self._disks]
        return FileLoadStoreSpec(
            slots % d, names, slots // d * shape.stride_bytes, np.full(len(slots), shape.record_bytes)
        )

    async def read(
        self, group: int, slots: Slots, into: Sequence[Block], verify: Verify | None = None
    ) -> list[Outcome]:
        """Fill ``into[i]`` from ``slots[i]``: HIT, MISS where nothing was ever written, or FAILED each.

        Args:
            group: Whose.
            slots: Which.
            into: Gets what is there.
            verify: Says what each is, by its position, in the thread that has read it.

        Raises:
            BackendUnavailableError: The only disk is gone.
        """
        check_lengths(slots, into)

        def read(store: DirectoryStore, at: Slots, local: Slots) -> Awaitable[list[Outcome]]:
            return store.read(group, local, [into[i] for i in at], verify and _verify_there(verify, at))

        return await self._move(slots, read)

    def begin_read(self, group: int, slots: Slots, into: Sequence[Block], verify: Verify, then: Then) -> bool:
        """See `RecordBackend.begin_read`: of several directories each can be lost, which has to be waited for."""
        if (store := self._only_store) is None:
            return False
        store.begin_read(group, slots, into, then, verify)
        return True

    def begin_write(
        self, group: int, slots: Slots, names: Names, blocks: Sequence[Block], make: Make, then: Then
    ) -> bool:
        """See `RecordBackend.begin_write`."""
        if (store := self._only_store) is None:
            return False
        return store.begin_write(group, slots, names, blocks, self._disks.order.take(len(slots)), then, make)

    async def peek(self, group: int, slots: Slots, into: Sequence[Block]) -> list[Outcome]:
        """See `SlotBackend.peek`: slots that are gone by now are misses.

        Raises:
            BackendUnavailableError: The only disk is gone.
        """
        check_lengths(slots, into)
        return await self._move(slots, lambda store, at, local: store.peek(group, local, [into[i] for i in at]))

    async def write(
        self, group: int, slots: Slots, names: Names, blocks: Sequence[Block], make: Make | None = None
    ) -> list[Outcome]:
        """Write ``blocks[i]`` to ``slots[i]`` and remember that it is ``names[i]``: STORED or FAILED each.

        A slot whose write fails holds nothing. ``make`` makes the records, by their positions, in the thread that
        writes them.

        Raises:
            BackendUnavailableError: The only disk, or its directory, is gone.
        """
        check_lengths(slots, blocks)
        check_lengths(names, blocks)
        sequences = self._disks.order.take(len(slots))

        def write(store: DirectoryStore, at: Slots, local: Slots) -> Awaitable[list[Outcome]]:
            made = None if make is None else lambda positions: make(at[positions].tolist())
            return store.write(group, local, names[at], Blocks.some(blocks, at.tolist()), sequences[at], made)

        return await self._move(slots, write)

    async def forget(self, group: int, slots: Slots) -> None:
        """Make sure that what these slots hold is not found after a restart: see `DirectoryStore.forget`.

        Raises:
            BackendUnavailableError: A disk did not take it, or none that others have to forget what they may have.
        """
        await self._forget(group, slots)
        await self._disks.until_known()

    async def checkpoint(self, group: int, names: Names, slots: Slots, *, sync: bool = False) -> None:
        """Remember exactly these blocks, least recently used first; with ``sync``, survive a loss of power.

        A block whose write begins while this is called may be remembered too.

        Raises:
            BackendUnavailableError: A disk did not take it. Any of these and of those remembered before may be.
        """
        sequences = self._disks.order.take(len(slots))
        await self._on_each(
            slots,
            lambda store, at, local: store.checkpoint(group, names[at], local, sequences[at], sync=sync),
            everywhere=True,
        )
        await self._disks.until_known()

    def fit(self, capacity_bytes: int) -> int:
        """See `SlotBackend.fit`: up to ``max_capacity``, for each directory."""
        if self._open_disks is None:
            raise ConfigurationError(f"the NVMe tier at {self._where} is not open yet: resize it later")
        most_bytes = self.settings.max_capacity or self.settings.capacity
        if capacity_bytes > most_bytes:
            raise ConfigurationError(
                f"{self._where} takes {most_bytes} bytes at most, got {capacity_bytes}: set max_capacity"
            )
        return fit(capacity_bytes, self._disks.shapes) * len(self._disks)

    async def resize(self, num_blocks: int) -> None:
        """See `SlotBackend.resize`: what is given up is free on the disk when this returns.

        Raises:
            BackendUnavailableError: A disk is too small, or the only one fails.
        """
        disks = self._disks
        was_blocks, disks.num_blocks = disks.num_blocks, -(-num_blocks // len(disks))

        def resized(num_blocks: int) -> Iterator[tuple[Disk, Coroutine[Any, Any, None]]]:
            for disk in disks:
                if (store := disk.store) is not None:
                    yield disk, self._change(disk, store, partial(store.resize, num_blocks))

        try:
            await disks.each(resized(disks.num_blocks))
        except BackendUnavailableError:
            if was_blocks < disks.num_blocks:  # others may have grown, for nothing
                disks.num_blocks = was_blocks
                await disks.each(resized(was_blocks))
            raise

    def missing(self, group: int) -> Missing | None:
        """See `SlotBackend.missing`: the slots of directories that are away, and what has no room on a full disk."""
        missing = () if self._open_disks is None else self._open_disks.missing
        return missing[group] if missing else None

    def try_again(self) -> None:
        """See `SlotBackend.try_again`: what comes back is empty, and so is what has room again."""
        if self._open_disks is not None:
            self._open_disks.try_again()

    def find_hung(self) -> None:
        """See `SlotBackend.find_hung`: a directory that does not answer for a page either."""
        self._disks.find_hung()

    async def aclose(self) -> None:
        """Close the files and release the directories, or leave that to the last call still under way."""
        disks, self._open_disks, self._only_store = self._open_disks, None, None
        if disks is not None:
            await disks.aclose()

    def describe(self) -> dict[str, object]:
        """Return where and how blocks are kept: ``io`` is "direct" or "buffered", ``io_reason`` says why not direct.

        Of several directories, sums; each is in ``directories``, and its ``away`` says why it is, if so: blocks of its
        fail for that, so it is in ``last_error``, too.
        """
        if self._open_disks is None:
            return {}
        each: dict[str, dict[str, object]] = {
            str(disk.path): disk.store.describe() if disk.store else {"away": disk.why} for disk in self._disks
        }
        if len(each) == 1:
            return next(iter(each.values()))
        sums: Counter[str] = Counter()
        texts: dict[str, dict[str, None]] = {name: {} for name in _NAMED}
        for path, said in each.items():
            sums.update({name: value for name, value in said.items() if isinstance(value, int)})
            if "away" in said:
                texts["last_error"] |= {f"{path} is away: {said['away']}": None}
            for name in _NAMED:
                texts[name] |= {str(said[name]): None} if said.get(name) else {}
        named = {name: ", ".join(all_said) for name, all_said in texts.items()}
        return {"path": self._where, "directories": each, **sums, **named}

    @property
    def _where(self) -> str:
        return ", ".join(map(str, self.settings.paths))

    @property
    def _disks(self) -> Disks:
        if self._open_disks is None:
            raise ClosedError(f"the NVMe tier at {self._where} is not open")
        return self._open_disks

    async def _merged(self, group: int, found: Sequence[tuple[Disk, Entries]]) -> Recovered:
        """Return what all directories hold of one group, the last written last."""
        disks, d, shape = self._disks, len(self._disks), self._shapes[group]
        num_slots, max_slots = (shape.num_slots(d * n) for n in (disks.num_blocks, disks.max_blocks))
        latest = found[0][1]
        if d > 1:
            parts = [Entries(each.names, each.slots * d + disk.number, each.sequences) for disk, each in found]
            latest, replaced = Entries.joined(*parts).latest()
            is_in = latest.slots < num_slots  # a directory may have one slot more than the tier goes by
            await self._forget(group, np.concatenate([replaced, latest.slots[~is_in]]))
            latest = Entries(latest.names[is_in], latest.slots[is_in], latest.sequences[is_in])
        return Recovered(num_slots, latest.names, latest.slots, max_slots)

    async def _forget(self, group: int, slots: Slots) -> None:
        await self._on_each(slots, lambda store, _, local: partial(store.forget, group, local))

    def _shares(self, slots: Slots) -> list[tuple[Disk, Slots, Slots]]:
        """Say which positions of a batch are whose, and their slots there."""
        d = len(self._disks)
        whose, local = slots % d, slots // d
        shares = [(disk, (whose == disk.number).nonzero()[0]) for disk in self._disks]
        return [(disk, at, local[at]) for disk, at in shares]

    async def _move(self, slots: Slots, call: _Call) -> list[Outcome]:
        """Read or write a batch: the blocks of a directory that is away, or fails as a whole, are FAILED."""
        shares = self._shares(slots)
        if len(shares) == 1 and (only := shares[0][0].store) is not None:
            return await call(only, np.arange(len(slots)), slots)
        outcomes = [Outcome.FAILED] * len(slots)

        async def move(disk: Disk, at: Slots, local: Slots) -> None:
            store = disk.store
            if store is None:
                return
            try:
                found = await call(store, at, local)
            except (BackendUnavailableError, ClosedError) as error:
                await self._disks.lose(disk, store, str(error))
                return
            for i, outcome in zip(at.tolist(), found, strict=True):
                outcomes[i] = outcome
            if all(outcome is Outcome.FAILED for outcome in found) and (problem := await store.problem()):
                await self._disks.lose(disk, store, problem)

        await self._disks.each(((share[0], move(*share)) for share in shares if len(share[1])), are_lent=True)
        return outcomes

    async def _on_each(
        self,
        slots: Slots,
        begin: Callable[[DirectoryStore, Slots, Slots], Callable[[], Awaitable[None]]],
        *,
        everywhere: bool = False,
    ) -> None:
        """Make a call that changes what is remembered; a directory that is away needs none: it will come back empty.

        Args:
            slots: That it is about.
            begin: Does what has to be done before anything else is, and returns what does the rest.
            everywhere: Whether directories hear of it that have none of them.
        """
        disks = self._disks
        shares = [share for share in self._shares(slots) if everywhere or len(share[1])]
        await disks.each(
            (disk, self._change(disk, store, begin(store, at, local)))
            for disk, at, local in shares
            if (store := disk.store) is not None
        )
        if any(disk.store is None for disk, _, _ in shares):  # also one that was let go of meanwhile
            await disks.until_settled()

    async def _change(self, disk: Disk, store: DirectoryStore, call: Callable[[], Awaitable[None]]) -> None:
        """Make a call; where that fails with its whole directory, and there are others, let go of this one."""
        try:
            await call()  # made here: who is cancelled before this has left no coroutine that nobody awaits
        except (BackendUnavailableError, ClosedError):
            if len(self._disks) > 1 and (problem := await store.problem()):
                await self._disks.lose(disk, store, problem)
                await self._disks.until_settled()
                return
            raise


def _verify_there(verify: Verify, at: Slots) -> Verify:
    """Return what verifies positions of a directory's share ``at`` of a batch."""
    return lambda positions, outcomes: verify(at[positions].tolist(), outcomes)
