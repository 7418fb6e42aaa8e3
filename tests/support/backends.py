"""Backends in memory that do as a test says: their calls are counted, and can be held, fail or answer falsely."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from anyio.lowlevel import checkpoint
from numpy.typing import NDArray

from tiered_kv import BackendContext, Block, BlockKey, Outcome, SlotBackend, StorageTierSettings
from tiered_kv.media.backend import Recovered
from tiered_kv.settings.tier_settings import OwnedTierSettings
from tiered_kv.values.keys import Names
from tiered_kv_backends.memory import MemoryBackend

T = TypeVar("T")
_HARMLESS = {("read", "read"), ("read", "forget"), ("forget", "read")}
"""What `SlotBackend` allows: whoever reads what is being forgotten verifies it."""


class Act:
    """One method of a scripted backend: counts its calls, and can hold, fail or falsify them."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_blocks = 0
        self.num_held = 0
        self._gate = asyncio.Event()
        self._gate.set()
        self._errors: deque[BaseException] = deque()
        self._changes: deque[Callable[[Any], Any]] = deque()

    def hold(self) -> None:
        """Have calls wait, before they do anything, until `release`."""
        self._gate.clear()

    def release(self) -> None:
        """Let held calls, and those to come, go on."""
        self._gate.set()

    def calm(self) -> None:
        """Release, and let calls to come do as they should."""
        self._errors.clear()
        self._changes.clear()
        self.release()

    def fail_next(self, error: BaseException) -> None:
        """Have one more call raise, having done nothing."""
        self._errors.append(error)

    def change_next(self, change: Callable[[Any], Any]) -> None:
        """Have one more call answer something else than the truth."""
        self._changes.append(change)

    async def play(self, num_blocks: int, work: Callable[[], Awaitable[T]]) -> T:
        """Make one call."""
        self.num_calls += 1
        self.num_blocks += num_blocks
        error = self._errors.popleft() if self._errors else None
        change = self._changes.popleft() if self._changes else None
        self.num_held += 1
        try:
            await self._gate.wait()
        finally:
            self.num_held -= 1
        if error is not None:
            raise error
        answer = await work()
        return answer if change is None else change(answer)


def only(position: int, outcome: Outcome) -> Callable[[list[Outcome]], list[Outcome]]:
    """Return a change of the outcome of one block, for `Act.change_next`."""
    return lambda outcomes: [*outcomes[:position], outcome, *outcomes[position + 1 :]]


class ScriptedBackend(MemoryBackend):
    """A keyed backend whose calls go through an `Act` each."""

    def __init__(
        self, *, name: str = "keyed", timeout_s: float = 10.0, capacity: int = 1 << 30, **more: object
    ) -> None:
        fields = {"name": name, "timeout_s": timeout_s, "capacity": capacity, **more}
        super().__init__(MemoryBackend.Settings.model_validate(fields))
        self.on_open, self.on_lookup, self.on_read, self.on_write = (Act() for _ in range(4))
        self.on_delete, self.on_close = Act(), Act()

    async def open(self, context: BackendContext) -> None:
        """Go through `on_open`."""
        await self.on_open.play(0, lambda: MemoryBackend.open(self, context))

    async def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Go through `on_lookup`."""
        return await self.on_lookup.play(len(keys), lambda: MemoryBackend.lookup(self, keys))

    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        """Go through `on_read`."""
        return await self.on_read.play(len(keys), lambda: MemoryBackend.read(self, keys, into))

    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        """Go through `on_write`."""
        return await self.on_write.play(len(keys), lambda: MemoryBackend.write(self, keys, blocks))

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Go through `on_delete`."""
        await self.on_delete.play(len(keys), lambda: MemoryBackend.delete(self, keys))

    async def aclose(self) -> None:
        """Go through `on_close`."""
        await self.on_close.play(0, lambda: MemoryBackend.aclose(self))

    @property
    def num_records(self) -> int:
        """How many blocks it holds."""
        return len(self._records)

    def keys(self) -> list[BlockKey]:
        """Return the keys of what it holds, in the order of writing."""
        return list(self._records)

    def flip_byte(self, position: int) -> None:
        """Break the ``position``-th record, in the order of writing."""
        key, record = list(self._records.items())[position]
        self._records[key] = _flipped(record)


class ScriptedSlotBackend(SlotBackend):
    """An owned medium in memory whose calls go through an `Act` each. Opened again, it finds what it held.

    Attributes:
        records: By KV group and slot: the block's name and its record.
        clashes: Slots that were in two calls at once of which one may change them, and in which: there must be none.
    """

    Settings = StorageTierSettings

    def __init__(self, num_slots: int = 64, *, name: str = "slots", timeout_s: float = 10.0, **more: object) -> None:
        fields = {"medium": "slots", "name": name, "timeout_s": timeout_s, **more}
        self.settings: StorageTierSettings = OwnedTierSettings.model_validate(fields)
        self.num_slots = num_slots
        self.records: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        self.clashes: list[tuple[int, str, str]] = []
        self.on_open, self.on_read, self.on_write, self.on_forget = (Act() for _ in range(4))
        self.on_checkpoint, self.on_resize, self.on_close = (Act() for _ in range(3))
        self._busy: dict[tuple[int, int], list[str]] = {}

    async def open(self, context: BackendContext) -> list[Recovered]:
        """Go through `on_open`; find what is there, of each KV group."""
        groups = range(len(context.groups))
        return await self.on_open.play(0, lambda: self._open(groups))

    async def read(self, group: int, slots: NDArray[np.int64], into: Sequence[Block]) -> list[Outcome]:
        """Go through `on_read`."""
        with self._in_call("read", group, slots):
            return await self.on_read.play(len(slots), lambda: self._read(group, slots, into))

    async def write(self, group: int, slots: NDArray[np.int64], names: Names, blocks: Sequence[Block]) -> list[Outcome]:
        """Go through `on_write`."""
        with self._in_call("write", group, slots):
            return await self.on_write.play(len(slots), lambda: self._write(group, slots, names, blocks))

    async def forget(self, group: int, slots: NDArray[np.int64]) -> None:
        """Go through `on_forget`."""
        with self._in_call("forget", group, slots):
            await self.on_forget.play(len(slots), lambda: self._forget(group, slots))

    async def checkpoint(self, group: int, names: Names, slots: NDArray[np.int64], *, sync: bool = False) -> None:
        """Go through `on_checkpoint`; what is written meanwhile is remembered too."""
        listed = {(group, slot) for slot in slots.tolist()}
        gone = {at: record for at, record in self.records.items() if at[0] == group and at not in listed}
        await self.on_checkpoint.play(len(slots), lambda: self._drop(gone))

    async def resize(self, num_slots: int) -> None:
        """Go through `on_resize`. For media that override `fit`."""
        await self.on_resize.play(0, lambda: self._resize(num_slots))

    async def aclose(self) -> None:
        """Go through `on_close`."""
        await self.on_close.play(0, checkpoint)

    @property
    def num_records(self) -> int:
        """How many blocks it holds."""
        return len(self.records)

    def flip_byte(self, position: int) -> None:
        """Break the ``position``-th record, in the order of writing."""
        at = list(self.records)[position]
        name, record = self.records[at]
        self.records[at] = name, _flipped(record)

    @contextmanager
    def _in_call(self, doing: str, group: int, slots: NDArray[np.int64]) -> Iterator[None]:
        taken = [(group, slot) for slot in slots.tolist()]
        for at in taken:
            busy = self._busy.setdefault(at, [])
            self.clashes += [(at[1], other, doing) for other in busy if (other, doing) not in _HARMLESS]
            busy.append(doing)
        try:
            yield
        finally:
            for at in taken:
                self._busy[at].remove(doing)

    async def _open(self, groups: range) -> list[Recovered]:
        found = []
        for group in groups:
            here = {slot: name for (of, slot), (name, _) in self.records.items() if of == group}
            names = np.frombuffer(b"".join(here.values()), np.uint64).reshape(-1, 4)
            found.append(Recovered(self.num_slots, names, np.array(list(here), np.int64)))
        return found

    async def _read(self, group: int, slots: NDArray[np.int64], into: Sequence[Block]) -> list[Outcome]:
        outcomes = []
        for slot, block in zip(slots.tolist(), into, strict=True):
            _, record = self.records.get((group, slot), (b"", b""))
            outcomes.append(Outcome.HIT if block.fill(record) else Outcome.MISS)
        return outcomes

    async def _write(
        self, group: int, slots: NDArray[np.int64], names: Names, blocks: Sequence[Block]
    ) -> list[Outcome]:
        for slot, name, block in zip(slots.tolist(), names, blocks, strict=True):
            self.records.pop((group, slot), None)
            self.records[group, slot] = name.tobytes(), bytes(block)
        return [Outcome.STORED] * len(blocks)

    async def _forget(self, group: int, slots: NDArray[np.int64]) -> None:
        for slot in slots.tolist():
            self.records.pop((group, slot), None)

    async def _drop(self, gone: dict[tuple[int, int], tuple[bytes, bytes]]) -> None:
        for at, record in gone.items():
            if self.records.get(at) is record:
                del self.records[at]

    async def _resize(self, num_slots: int) -> None:
        self.num_slots = num_slots


def _flipped(record: bytes) -> bytes:
    return record[:-1] + bytes([record[-1] ^ 1])
