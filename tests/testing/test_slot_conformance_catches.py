"""For each promise of a `SlotBackend` one that breaks it: the conformance tests have to say so."""
# ruff: noqa: D102 - the names of the classes say what is broken

import asyncio
import ctypes
import time
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from tiered_kv.media.backend import BackendContext, Block, Outcome, Recovered, SlotBackend, check_lengths
from tiered_kv.settings.tier_settings import StorageTierSettings
from tiered_kv.testing import SlotBackendTests, open_backend
from tiered_kv.values.errors import ConfigurationError, LayoutMismatchError
from tiered_kv.values.keys import Names
from tiered_kv.values.specs import FileLoadStoreSpec

Slots = NDArray[np.int64]


class SlotMemory(SlotBackend):
    """A `SlotBackend` that keeps its promises: numbered records in memory, which outlive a close."""

    Settings = StorageTierSettings

    def __init__(self) -> None:
        self.records: dict[tuple[int, int], bytes] = {}
        self.names: dict[tuple[int, int], bytes] = {}

    async def open(self, context: BackendContext) -> list[Recovered]:
        self.shapes = context.groups
        return [self.recovered(group) for group in range(len(context.groups))]

    def recovered(self, group: int) -> Recovered:
        slots = [slot for owner, slot in self.names if owner == group]
        names = b"".join(self.names[group, slot] for slot in slots)
        return Recovered(200, np.frombuffer(names, np.uint64).reshape(-1, 4), np.array(slots, np.int64))

    def check(self, group: int, slots: Slots, blocks: Sequence[Block]) -> None:
        check_lengths(slots, blocks)
        for block in blocks:
            if len(block.payload) != self.shapes[group].payload_bytes:
                raise LayoutMismatchError(f"a block of {len(block.payload)} bytes")

    async def read(self, group: int, slots: Slots, into: Sequence[Block]) -> list[Outcome]:
        self.check(group, slots, into)
        return [self.read_one(group, slot, block) for slot, block in zip(slots.tolist(), into, strict=True)]

    def read_one(self, group: int, slot: int, block: Block) -> Outcome:
        record = self.records.get((group, slot))
        return Outcome.HIT if record is not None and block.fill(record) else Outcome.MISS

    async def write(self, group: int, slots: Slots, names: Names, blocks: Sequence[Block]) -> list[Outcome]:
        self.check(group, slots, blocks)
        for slot, name, block in zip(slots.tolist(), names, blocks, strict=True):
            self.names.pop((group, slot), None)
            self.names[group, slot] = name.tobytes()
            self.records[group, slot] = bytes(block)
        return [Outcome.STORED] * len(slots)

    async def forget(self, group: int, slots: Slots) -> None:
        for slot in slots.tolist():
            self.names.pop((group, slot), None)

    async def checkpoint(self, group: int, names: Names, slots: Slots, *, sync: bool = False) -> None:
        kept = {place: name for place, name in self.names.items() if place[0] != group}
        pairs = zip(slots.tolist(), names, strict=True)
        self.names = kept | {(group, slot): name.tobytes() for slot, name in pairs}


class ResizableMemory(SlotMemory):
    """One that can be resized, and keeps its promises."""

    def fit(self, capacity_bytes: int) -> int:
        """Count by the longest records there are."""
        if not (num_slots := min(200, capacity_bytes // 160_000)):
            raise ConfigurationError(f"{capacity_bytes} bytes hold no block")
        return num_slots

    async def resize(self, num_slots: int) -> None:
        for place in [place for place in self.records if place[1] >= num_slots]:
            self.names.pop(place, None)
            del self.records[place]


class TestSlotMemory(SlotBackendTests):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[SlotMemory]:
        """A whole one: what the broken ones below differ from."""
        async with open_backend(SlotMemory()) as backend:
            yield backend


class TestResizableMemory(SlotBackendTests):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[ResizableMemory]:
        """The same, with other sizes."""
        async with open_backend(ResizableMemory()) as backend:
            yield backend


class LosesTheEnd(SlotMemory):
    def read_one(self, group: int, slot: int, block: Block) -> Outcome:
        outcome = super().read_one(group, slot, block)
        block.payload[-1:] = b"\0"
        return outcome


class MixesGroups(SlotMemory):
    def read_one(self, group: int, slot: int, block: Block) -> Outcome:
        record = next((r for (_, s), r in self.records.items() if s == slot), b"")
        return Outcome.HIT if block.fill(record.ljust(block.num_bytes)[: block.num_bytes]) else Outcome.MISS


class SortsBatches(SlotMemory):
    async def write(self, group: int, slots: Slots, names: Names, blocks: Sequence[Block]) -> list[Outcome]:
        return await super().write(group, np.sort(slots), names, blocks)


class AnswersOncePerSlot(SlotMemory):
    async def read(self, group: int, slots: Slots, into: Sequence[Block]) -> list[Outcome]:
        return (await super().read(group, slots, into))[: len(set(slots.tolist()))]


class InventsBlocks(SlotMemory):
    def read_one(self, group: int, slot: int, block: Block) -> Outcome:
        record = self.records.get((group, slot)) or next(iter(self.records.values()))
        return Outcome.HIT if block.fill(record) else Outcome.MISS


class KeepsOldNames(SlotMemory):
    async def write(self, group: int, slots: Slots, names: Names, blocks: Sequence[Block]) -> list[Outcome]:
        old = dict(self.names)
        outcomes = await super().write(group, slots, names, blocks)
        self.names |= old
        return outcomes


class TakesAnyNumber(SlotMemory):
    async def read(self, group: int, slots: Slots, into: Sequence[Block]) -> list[Outcome]:
        return await super().read(group, slots[: len(into)], into)


class TakesAnyLength(SlotMemory):
    def check(self, group: int, slots: Slots, blocks: Sequence[Block]) -> None:
        check_lengths(slots, blocks)


class MixesUpCalls(SlotMemory):
    async def read(self, group: int, slots: Slots, into: Sequence[Block]) -> list[Outcome]:
        self.slots = slots
        await asyncio.sleep(0)
        return await super().read(group, self.slots[: len(into)], into)


class ForgetsOrder(SlotMemory):
    def recovered(self, group: int) -> Recovered:
        found = super().recovered(group)
        return Recovered(found.num_slots, found.names[::-1], found.slots[::-1])


class MarksWhatItHasWritten(SlotMemory):
    async def write(self, group: int, slots: Slots, names: Names, blocks: Sequence[Block]) -> list[Outcome]:
        outcomes = await super().write(group, slots, names, blocks)
        for block in blocks:
            ctypes.memset(np.frombuffer(block.header, np.uint8).ctypes.data, 0x77, 1)  # as a client library may
        return outcomes


class FillsLater(SlotMemory):
    def read_one(self, group: int, slot: int, block: Block) -> Outcome:
        read = super().read_one
        asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(read, group, slot, block))
        return read(group, slot, block)


class StartsAnewWhenResized(ResizableMemory):
    async def resize(self, num_slots: int) -> None:
        self.records.clear()
        self.names.clear()


class FitsAnything(ResizableMemory):
    def fit(self, capacity_bytes: int) -> int:
        return 200


class RemembersForgotten(SlotMemory):
    async def forget(self, group: int, slots: Slots) -> None:
        pass


class IgnoresCheckpoints(SlotMemory):
    async def checkpoint(self, group: int, names: Names, slots: Slots, *, sync: bool = False) -> None:
        pass


class NamesAnotherFile(SlotMemory):
    async def locate(self, group: int, slots: Slots) -> FileLoadStoreSpec:
        return FileLoadStoreSpec([0] * len(slots), [__file__], [0] * len(slots), [8] * len(slots))


class SleepsOnTheLoop(SlotMemory):
    async def forget(self, group: int, slots: Slots) -> None:
        time.sleep(0.3)  # noqa: ASYNC251 - what it must not do
        await super().forget(group, slots)


BROKEN = {
    "test_returns_every_byte": LosesTheEnd,
    "test_groups_do_not_meet": MixesGroups,
    "test_keeps_many_blocks_apart": SortsBatches,
    "test_one_outcome_per_slot": AnswersOncePerSlot,
    "test_an_unwritten_slot_is_no_block": InventsBlocks,
    "test_a_write_replaces": KeepsOldNames,
    "test_one_block_per_slot": TakesAnyNumber,
    "test_a_block_of_another_length_goes_nowhere": TakesAnyLength,
    "test_many_calls_at_once": MixesUpCalls,
    "test_what_is_written_is_not_changed": MarksWhatItHasWritten,
    "test_nothing_touches_a_buffer_after_its_call": FillsLater,
    "test_a_medium_that_can_be_resized_keeps_what_stays": StartsAnewWhenResized,
    "test_locate_says_where_the_records_are": NamesAnotherFile,
    "test_no_call_holds_up_the_loop": SleepsOnTheLoop,
    "test_what_was_stored_is_recovered": ForgetsOrder,
    "test_what_was_forgotten_is_not_recovered": RemembersForgotten,
    "test_a_checkpoint_is_what_is_recovered": IgnoresCheckpoints,
}


@pytest.mark.parametrize("promise", BROKEN)
async def test_a_broken_promise_is_caught(promise: str) -> None:
    """The test of a promise fails on a backend that breaks it."""
    backend = BROKEN[promise]()
    async with open_backend(backend):
        with pytest.raises((AssertionError, LookupError, pytest.fail.Exception)):
            await getattr(SlotBackendTests(), promise)(backend)


async def test_a_size_that_fits_anything_is_caught() -> None:
    """As many slots for few bytes as for many, or for none at all, are no answer."""
    async with open_backend(FitsAnything()) as backend:
        with pytest.raises(AssertionError, match="more bytes have more slots"):
            await SlotBackendTests().test_a_medium_that_can_be_resized_keeps_what_stays(backend)


def test_no_promise_is_left_out() -> None:
    """There is a broken backend for each promise."""
    assert set(BROKEN) == {name for name in vars(SlotBackendTests) if name.startswith("test_")}
