"""For each promise of a `Backend` one that breaks it: the conformance tests have to say so."""
# ruff: noqa: D102 - the names of the classes say what is broken

import asyncio
import ctypes
import time
from collections.abc import Sequence

import numpy as np
import pytest

from tiered_kv.media.backend import Block, Outcome, check_lengths
from tiered_kv.testing import BackendTests, open_backend
from tiered_kv.values.keys import BlockKey
from tiered_kv.values.specs import FileLoadStoreSpec
from tiered_kv_backends.memory import MemoryBackend


class LosesTheEnd(MemoryBackend):
    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        outcomes = await super().read(keys, into)
        for block in into:
            block.payload[-1:] = b"\0"
        return outcomes


class GivesTheFirstOfABatch(MemoryBackend):
    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        return await super().read([keys[0]] * len(keys), into)


class RaisesForAbsentKeys(MemoryBackend):
    async def delete(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            del self._records[key]


class StopsAtAHole(MemoryBackend):
    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        outcomes = await super().read(keys, into)
        hits = outcomes.index(Outcome.MISS) if Outcome.MISS in outcomes else len(outcomes)
        return outcomes[:hits] + [Outcome.MISS] * (len(outcomes) - hits)


class AnswersOncePerName(MemoryBackend):
    async def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return await super().lookup(list(dict.fromkeys(keys)))


class ChokesOnNothing(MemoryBackend):
    async def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return [Outcome.MISS] if not keys else await super().lookup(keys)


class SkipsWhatExists(MemoryBackend):
    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        check_lengths(keys, blocks)
        for key, block in zip(keys, blocks, strict=True):
            if key not in self._records:
                await super().write([key], [block])
        return [Outcome.STORED] * len(keys)


class DeletesNothing(MemoryBackend):
    async def delete(self, keys: Sequence[BlockKey]) -> None:
        pass


class KnowsHashesOnly(MemoryBackend):
    async def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        hashes = {key.hash for key in self._records}
        return [Outcome.HIT if key.hash in hashes else Outcome.MISS for key in keys]


class FillsWhatFits(MemoryBackend):
    def _read_one(self, key: BlockKey, block: Block) -> Outcome:
        if key not in self._records:
            return Outcome.MISS
        record = self._records[key].ljust(block.num_bytes, b"\0")[: block.num_bytes]
        return Outcome.HIT if block.fill(record) else Outcome.CORRUPT


class TakesAnyLengths(MemoryBackend):
    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        return await super().write(keys[: len(blocks)], blocks)


class KeepsTheBuffers(MemoryBackend):
    def __init__(self, settings: MemoryBackend.Settings) -> None:
        super().__init__(settings)
        self._blocks: dict[BlockKey, Block] = {}

    def _write_one(self, key: BlockKey, block: Block) -> Outcome:
        self._blocks[key] = block
        return super()._write_one(key, block)

    def _read_one(self, key: BlockKey, block: Block) -> Outcome:
        if (kept := self._blocks.get(key)) is not None and key in self._records:
            self._records[key] = bytes(kept)
        return super()._read_one(key, block)


class MarksWhatItHasWritten(MemoryBackend):
    def _write_one(self, key: BlockKey, block: Block) -> Outcome:
        outcome = super()._write_one(key, block)
        memory = np.frombuffer(block.header, np.uint8)
        ctypes.memset(memory.ctypes.data, 0x77, 1)  # as a client library may that is given a pointer
        return outcome


class FillsLater(MemoryBackend):
    """Returns as soon as it knows what is there, and lets a task of its own copy."""

    def __init__(self, settings: MemoryBackend.Settings) -> None:
        super().__init__(settings)
        self._copies: set[asyncio.Task[None]] = set()

    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        self._copies.add(asyncio.create_task(self._copy(list(keys), list(into))))
        return await super().read(keys, into)

    async def _copy(self, keys: list[BlockKey], into: list[Block]) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        await super().read(keys, into)


class CountsOneTooMany(MemoryBackend):
    async def lookup_prefix(self, keys: Sequence[BlockKey]) -> int:
        return min(await super().lookup_prefix(keys) + 1, len(keys))


class LooksAtTheLastAlone(MemoryBackend):
    async def lookup_prefix(self, keys: Sequence[BlockKey]) -> int:
        there = await self.lookup(keys)
        return max((n + 1 for n, outcome in enumerate(there) if outcome is Outcome.HIT), default=0)


class NeverEvicts(MemoryBackend):
    def _write_one(self, key: BlockKey, block: Block) -> Outcome:
        self._records[key] = bytes(block)
        return Outcome.STORED


class WritesInPlace(MemoryBackend):
    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        check_lengths(keys, blocks)
        for key, block in zip(keys, blocks, strict=True):
            old, new = self._records.get(key, b""), bytes(block)
            self._write_one(key, block)
            if len(old) == len(new):
                self._records[key] = new[: len(new) // 2] + old[len(new) // 2 :]
                await asyncio.sleep(0)
                self._records[key] = new
        return [Outcome.STORED] * len(keys)


class ForgetsDeletionsAtClose(MemoryBackend):
    def __init__(self, settings: MemoryBackend.Settings) -> None:
        super().__init__(settings)
        self._deleted: dict[BlockKey, bytes] = {}

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        self._deleted |= {key: self._records[key] for key in keys if key in self._records}
        await super().delete(keys)

    async def aclose(self) -> None:
        self._records.update(self._deleted)


class NamesAnotherFile(MemoryBackend):
    async def locate(self, keys: Sequence[BlockKey]) -> FileLoadStoreSpec:
        return FileLoadStoreSpec([0] * len(keys), [__file__], [0] * len(keys), [8] * len(keys))


class SleepsOnTheLoop(MemoryBackend):
    async def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        time.sleep(0.3)  # noqa: ASYNC251 - what it must not do
        return await super().lookup(keys)


BROKEN = {
    "test_returns_every_byte": LosesTheEnd,
    "test_keeps_many_blocks_apart": GivesTheFirstOfABatch,
    "test_an_absent_key_is_a_miss": RaisesForAbsentKeys,
    "test_one_outcome_per_key_whatever_is_missing": StopsAtAHole,
    "test_duplicates_in_a_batch_are_harmless": AnswersOncePerName,
    "test_an_empty_batch_is_harmless": ChokesOnNothing,
    "test_a_write_replaces": SkipsWhatExists,
    "test_a_deleted_key_is_gone": DeletesNothing,
    "test_keys_of_other_namespaces_do_not_meet": KnowsHashesOnly,
    "test_another_length_is_corrupt": FillsWhatFits,
    "test_one_block_per_key": TakesAnyLengths,
    "test_buffers_are_lent_for_the_call_only": KeepsTheBuffers,
    "test_what_is_written_is_not_changed": MarksWhatItHasWritten,
    "test_nothing_touches_a_buffer_after_its_call": FillsLater,
    "test_a_prefix_is_not_longer_than_what_is_there": CountsOneTooMany,
    "test_it_keeps_no_more_than_its_capacity": NeverEvicts,
    "test_readers_and_writers_of_one_key": WritesInPlace,
    "test_locate_says_where_the_records_are": NamesAnotherFile,
    "test_no_call_holds_up_the_loop": SleepsOnTheLoop,
    "test_reopening": ForgetsDeletionsAtClose,
}


@pytest.mark.parametrize("promise", BROKEN)
async def test_a_broken_promise_is_caught(promise: str) -> None:
    """The test of a promise fails on a backend that breaks it."""
    backend = BROKEN[promise](MemoryBackend.Settings(capacity="16MiB"))
    async with open_backend(backend):
        with pytest.raises((AssertionError, LookupError, pytest.fail.Exception)):
            await getattr(BackendTests(), promise)(backend)


@pytest.mark.parametrize("broken", [LooksAtTheLastAlone])
async def test_other_ways_to_claim_too_much_are_caught(broken: type[MemoryBackend]) -> None:
    """Also a prefix whose beginning is missing, of which the end is there."""
    async with open_backend(broken(MemoryBackend.Settings(capacity="16MiB"))) as backend:
        with pytest.raises(AssertionError, match=r"^`lookup_prefix` counts the leading keys that are there"):
            await BackendTests().test_a_prefix_is_not_longer_than_what_is_there(backend)


def test_no_promise_is_left_out() -> None:
    """There is a broken backend for each promise."""
    assert set(BROKEN) == {name for name in vars(BackendTests) if name.startswith("test_")}
