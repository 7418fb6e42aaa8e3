"""Backends in memory that do as a test says: their calls are counted, and can be held, fail or answer falsely."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from anyio.lowlevel import checkpoint
from numpy.typing import NDArray

from tiered_kv import BackendContext, Block, BlockKey, Outcome, SlotBackend, TierSettings
from tiered_kv.backend import Recovered
from tiered_kv.keys import Names
from tiered_kv_backends.memory import MemoryBackend

T = TypeVar("T")


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

    def __init__(self, *, name: str = "keyed", timeout_s: float = 10.0, capacity: int = 1 << 30) -> None:
        super().__init__(
            MemoryBackend.Settings.model_validate({"name": name, "timeout_s": timeout_s, "capacity": capacity})
        )
        self.on_lookup, self.on_read, self.on_write, self.on_delete, self.on_close = (Act() for _ in range(5))

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
    """An owned medium in memory whose calls go through an `Act` each. Opened again, it finds what it held."""

    Settings = TierSettings

    def __init__(self, num_slots: int = 64, *, name: str = "slots", timeout_s: float = 10.0) -> None:
        self.settings = TierSettings(medium="slots", name=name, timeout_s=timeout_s)
        self.records: dict[int, tuple[bytes, bytes]] = {}
        """By slot: the block's name and its record."""
        self.num_slots = num_slots
        self.on_read, self.on_write, self.on_forget, self.on_checkpoint, self.on_close = (Act() for _ in range(5))

    async def open(self, context: BackendContext) -> list[Recovered]:
        """Find what is there, of one KV group."""
        names = np.frombuffer(b"".join(name for name, _ in self.records.values()), np.uint64).reshape(-1, 4)
        return [Recovered(self.num_slots, names, np.array(list(self.records), np.int64))]

    async def read(self, group: int, slots: NDArray[np.int64], into: Sequence[Block]) -> list[Outcome]:
        """Go through `on_read`."""
        return await self.on_read.play(len(slots), lambda: self._read(slots, into))

    async def write(self, group: int, slots: NDArray[np.int64], names: Names, blocks: Sequence[Block]) -> list[Outcome]:
        """Go through `on_write`."""
        return await self.on_write.play(len(slots), lambda: self._write(slots, names, blocks))

    async def forget(self, group: int, slots: NDArray[np.int64]) -> None:
        """Go through `on_forget`."""
        await self.on_forget.play(len(slots), lambda: self._forget(slots))

    async def checkpoint(self, group: int, names: Names, slots: NDArray[np.int64], *, sync: bool = False) -> None:
        """Go through `on_checkpoint`."""
        kept = {int(slot): self.records[int(slot)] for slot in slots if int(slot) in self.records}
        await self.on_checkpoint.play(len(slots), lambda: self._keep(kept))

    async def aclose(self) -> None:
        """Go through `on_close`."""
        await self.on_close.play(0, checkpoint)

    @property
    def num_records(self) -> int:
        """How many blocks it holds."""
        return len(self.records)

    def flip_byte(self, position: int) -> None:
        """Break the ``position``-th record, in the order of writing."""
        slot = list(self.records)[position]
        name, record = self.records[slot]
        self.records[slot] = name, _flipped(record)

    async def _read(self, slots: NDArray[np.int64], into: Sequence[Block]) -> list[Outcome]:
        outcomes = []
        for slot, block in zip(slots.tolist(), into, strict=True):
            _, record = self.records.get(slot, (b"", b""))
            outcomes.append(Outcome.HIT if block.fill(record) else Outcome.MISS)
        return outcomes

    async def _write(self, slots: NDArray[np.int64], names: Names, blocks: Sequence[Block]) -> list[Outcome]:
        for slot, name, block in zip(slots.tolist(), names, blocks, strict=True):
            self.records.pop(slot, None)
            self.records[slot] = name.tobytes(), bytes(block)
        return [Outcome.STORED] * len(blocks)

    async def _forget(self, slots: NDArray[np.int64]) -> None:
        for slot in slots.tolist():
            self.records.pop(slot, None)

    async def _keep(self, kept: dict[int, tuple[bytes, bytes]]) -> None:
        self.records = kept


def _flipped(record: bytes) -> bytes:
    return record[:-1] + bytes([record[-1] ^ 1])
