import asyncio
import errno
import gc
import hashlib
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from tests.support.nvme_tier import (
    MIB,
    PAYLOAD,
    STRIDE,
    AdversePools,
    Tier,
    backend_at,
    content_of,
    count_up,
    disk_usage,
    key_of,
    ledger_of,
    open_tier,
    shape_of,
    slab_of,
    slots_of,
)
from tiered_kv.media.backend import Block, Outcome, RecordShape
from tiered_kv.media.record import encode
from tiered_kv.testing import SlotBackendTests, block_names, make_block, open_backend, open_context
from tiered_kv.values.errors import BackendUnavailableError, ClosedError, ConfigurationError, LayoutMismatchError
from tiered_kv.values.keys import BlockKey, Namespace
from tiered_kv_backends.nvme import NVMeBackend

FileLimit = Callable[[int], AbstractContextManager[None]]


@pytest.mark.parametrize("direct", ["auto", "never"])
class TestNVMeBackend(SlotBackendTests):
    @pytest.fixture
    async def backend(self, tmp_path: Path, direct: str) -> AsyncIterator[NVMeBackend]:
        """One on the disk of the tests' folder."""
        async with open_backend(backend_at(tmp_path, direct=direct, capacity="32MiB")) as backend:
            yield backend


@pytest.mark.parametrize("offset", [0, 100, 4090, 4096 + 7, 4096 + PAYLOAD - 1])
async def test_a_flipped_byte_is_never_a_hit(tmp_path: Path, offset: int) -> None:
    """Wherever in a record a byte changes, that block is corrupt, or no record at all, and its neighbours are right."""
    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(3))
    with slab_of(tmp_path).open("r+b") as slab:
        slab.seek(STRIDE + offset)
        byte = slab.read(1)[0]
        slab.seek(STRIDE + offset)
        slab.write(bytes([byte ^ 1]))
    async with open_tier(tmp_path) as tier:
        first, flipped, last = await tier.verified(count_up(3))
        assert (first, last) == (Outcome.HIT, Outcome.HIT)
        # The unused rest of a header is covered by no checksum: nothing there is ever read.
        assert flipped is (Outcome.HIT if offset == 4090 else Outcome.CORRUPT)


@pytest.mark.parametrize("what", ["forget", "resize", "checkpoint"])
async def test_a_call_that_is_cancelled_before_it_begins_leaves_nothing_to_await(tmp_path: Path, what: str) -> None:
    """As a loop that ends cancels its tasks: Python warns of a coroutine that nobody has awaited, an error here."""
    async with open_tier((tmp_path / "0", tmp_path / "1")) as tier:
        before = asyncio.all_tasks()
        backend, slots = tier.backend, slots_of(count_up(4))
        calls = {
            "forget": lambda: backend.forget(0, slots),
            "resize": lambda: backend.resize(1),
            "checkpoint": lambda: backend.checkpoint(0, block_names([key_of(n) for n in range(4)]), slots),
        }
        call = asyncio.ensure_future(calls[what]())
        await asyncio.sleep(0)
        begun = asyncio.all_tasks() - before - {call}
        assert begun
        for task in begun:
            task.cancel()
        await asyncio.wait({call})
        assert call.cancelled()
        del call, calls, begun, task
        gc.collect()


async def test_a_batch_is_shared_among_the_threads_that_are_free(tmp_path: Path) -> None:
    """All of them where nothing is under way; while none is free, a batch of neighbours waits as one long call."""
    threads, backend = AdversePools(), backend_at(tmp_path, num_threads=4)
    ((found,),) = await threads.end(backend.open(threads.context()))
    tier = Tier(backend, found, "a")
    await threads.end(tier.write(count_up(48)))
    parts = [{n: n for n in range(start, start + 16)} for start in (0, 16, 32)]
    begun = [await threads.begin(tier.verified(part)) for part in parts[:2]]
    assert [num_calls for _, num_calls in begun] == [4, 1]
    assert await threads.end(*(task for task, _ in begun)) == [[Outcome.HIT] * 16] * 2
    last, num_calls = await threads.begin(tier.verified(parts[2]))
    assert num_calls == 4
    assert await threads.end(last) == [[Outcome.HIT] * 16]
    await threads.end(backend.aclose())


@pytest.mark.parametrize("num_directories", [1, 2])
async def test_records_are_made_and_verified_by_the_threads_that_move_them(
    tmp_path: Path, num_directories: int
) -> None:
    """Each position once, made before it is written and verified after it was read; what is said of it is answered."""
    async with open_tier(tuple(tmp_path / f"disk{n}" for n in range(num_directories))) as tier:
        keys, slots = [key_of(n) for n in range(5)], np.array([3, 9, 4, 0, 5])
        blocks = [Block.empty(PAYLOAD) for _ in keys]
        made, seen, threads = list[int](), dict[int, Outcome](), set[int]()

        def make(at: Sequence[int]) -> None:
            threads.add(threading.get_ident())
            for n in at:
                made.append(n)
                blocks[n].payload[:] = content_of(n)
                encode(keys[n], blocks[n])

        def verify(at: Sequence[int], outcomes: list[Outcome]) -> list[Outcome]:
            threads.add(threading.get_ident())
            seen.update(zip(at, outcomes, strict=True))
            return [Outcome.CORRUPT if n == 2 else outcome for n, outcome in zip(at, outcomes, strict=True)]

        written = await tier.backend.write(0, slots, block_names(keys), blocks, make)
        assert (written, sorted(made)) == ([Outcome.STORED] * 5, [0, 1, 2, 3, 4])
        assert await tier.verified(dict(zip(slots.tolist(), range(5), strict=True))) == [Outcome.HIT] * 5
        answer = await tier.backend.read(0, slots, [Block.empty(PAYLOAD) for _ in keys], verify)
        assert answer == [Outcome.HIT, Outcome.HIT, Outcome.CORRUPT, Outcome.HIT, Outcome.HIT]
        assert seen == dict.fromkeys(range(5), Outcome.HIT)
        assert threading.get_ident() not in threads


async def test_a_truncated_slab_loses_what_was_cut_off(tmp_path: Path) -> None:
    """Blocks within the file are served, those cut off, in part or whole, are not there; their slots work again."""
    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(8))
    os.truncate(slab_of(tmp_path), 3 * STRIDE + 5000)
    async with open_tier(tmp_path) as tier:
        assert tier.recovered(8) == count_up(3)
        assert await tier.verified(count_up(8)) == [Outcome.HIT] * 3 + [Outcome.MISS] * 5
        assert await tier.write({3: 3, 7: 7}) == [Outcome.STORED] * 2
        assert await tier.verified({3: 3, 7: 7}) == [Outcome.HIT] * 2


async def test_a_slab_cut_while_open_is_a_miss(tmp_path: Path) -> None:
    """A file that ends before the slot that is read says that nothing is there."""
    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(8))
        os.truncate(slab_of(tmp_path), 3 * STRIDE + 5000)
        assert await tier.verified(count_up(8)) == [Outcome.HIT] * 3 + [Outcome.MISS] * 5


async def test_a_stale_ledger_costs_misses(tmp_path: Path) -> None:
    """Slots that were written over since the ledger was are no hits under the names that it remembers."""
    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(4))
        stale = ledger_of(tmp_path).read_bytes()
        await tier.write({1: 11, 2: 12})
    ledger_of(tmp_path).write_bytes(stale)
    async with open_tier(tmp_path) as tier:
        assert tier.recovered(4) == count_up(4)
        assert await tier.verified(count_up(4)) == [Outcome.HIT, Outcome.MISS, Outcome.MISS, Outcome.HIT]


async def test_a_smaller_capacity_keeps_what_fits(tmp_path: Path) -> None:
    """After a change of capacity, blocks in slots that still exist are found."""
    async with open_tier(tmp_path) as tier:
        num_slots = tier.found.num_slots
        await tier.write(count_up(num_slots))
    async with open_tier(tmp_path, capacity=2 * MIB) as tier:
        assert tier.found.num_slots < num_slots
        assert tier.recovered(num_slots) == count_up(tier.found.num_slots)
        assert disk_usage(tmp_path) <= 2 * MIB
    async with open_tier(tmp_path, capacity=8 * MIB) as tier:
        assert tier.found.num_slots > num_slots
        blocks = tier.recovered(num_slots)
        assert blocks
        assert set(await tier.verified(blocks)) == {Outcome.HIT}


@pytest.mark.parametrize("later", ["cut off", "erased"])
async def test_what_could_not_be_cut_off_is_so_later_or_erased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    """A disk fails as the tier is made smaller: a start with the former capacity finds none of what had to go."""

    def fail(fd: int, length: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with open_tier(tmp_path) as tier:
        num_slots = tier.found.num_slots
        await tier.write(count_up(num_slots))
        with monkeypatch.context() as patch:
            patch.setattr(os, "ftruncate", fail)
            with pytest.raises(BackendUnavailableError, match="resize"):
                await tier.backend.resize(num_slots // 2)
        if later == "cut off":
            await tier.backend.resize(num_slots // 2)
        else:
            kept = count_up(num_slots // 2)
            await tier.backend.checkpoint(0, block_names(list(map(key_of, kept))), slots_of(kept))
            ledger_of(tmp_path).unlink()  # so that the headers say what is there
    async with open_tier(tmp_path) as tier:
        assert tier.recovered(num_slots) == count_up(num_slots // 2)


async def test_the_limit_holds_whatever_is_done(tmp_path: Path) -> None:
    """Everything under the path together stays within the capacity: full, written over, forgotten, checkpointed."""
    async with open_tier(tmp_path) as tier:
        num_slots = tier.found.num_slots
        assert num_slots * STRIDE > 3.5 * MIB
        for number in range(5):
            assert set(await tier.write({slot: slot + number * num_slots for slot in range(num_slots)}))
            for slot in range(num_slots):
                await tier.backend.forget(0, slots_of({slot: slot}))
            await tier.backend.checkpoint(0, block_names([]), slots_of({}), sync=True)
            assert disk_usage(tmp_path) <= 4 * MIB


async def test_several_groups_share_the_capacity(tmp_path: Path) -> None:
    """Each KV group gets the same number of slots, however long its records are."""
    shapes = [RecordShape(hashlib.sha256(b"%d" % size).digest(), size) for size in (PAYLOAD, 1000)]
    backend = backend_at(tmp_path)
    with open_context(*shapes) as context:
        first, second = await backend.open(context)
        assert first.num_slots == second.num_slots
        assert first.num_slots * sum(shape.stride_bytes for shape in shapes) > 3.5 * MIB
        for group, (shape, found) in enumerate(zip(shapes, (first, second), strict=True)):
            keys = [BlockKey(Namespace(shape.fingerprint, bytes(32)), n.to_bytes(32)) for n in range(found.num_slots)]
            blocks = [make_block(bytes(shape.payload_bytes), key) for key in keys]
            outcomes = await backend.write(group, np.arange(found.num_slots), block_names(keys), blocks)
            assert set(outcomes) == {Outcome.STORED}
        await backend.aclose()
    assert disk_usage(tmp_path) <= 4 * MIB


async def test_other_models_make_room_when_it_is_needed(tmp_path: Path) -> None:
    """Another fingerprint's blocks stay while there is room, and then go oldest first, no more than needed."""
    for model in ("oldest", "older"):
        async with open_tier(tmp_path, model) as tier:
            await tier.write(count_up(20))
    used = disk_usage(tmp_path)
    async with open_tier(tmp_path, "new", capacity=used + MIB) as tier:
        await tier.write(count_up(1))
        assert tier.backend.describe()["reclaimed_fingerprints"] == 0
        await tier.write(count_up(16))
        assert tier.backend.describe()["reclaimed_fingerprints"] == 1
        assert not slab_of(tmp_path, "oldest").exists()
        assert slab_of(tmp_path, "older").exists()
        assert disk_usage(tmp_path) <= used + MIB
    async with open_tier(tmp_path, "older", capacity=used + MIB) as tier:
        assert tier.recovered(20) == count_up(20)
        assert tier.backend.describe()["reclaimed_fingerprints"] == 0
        assert await tier.verified(count_up(20)) == [Outcome.HIT] * 20


async def test_what_can_never_work_is_said_with_numbers(tmp_path: Path) -> None:
    """A path that is a file, a capacity below one block or beyond the disk are errors before anything is made."""
    file = tmp_path / "file"
    file.touch()
    free_bytes = shutil.disk_usage(tmp_path).free
    cases = [
        (file, 4 * MIB, "write"),
        (tmp_path / "b", 5000, "5000"),
        (tmp_path / "c", 3 * free_bytes, "lower capacity"),
    ]
    for path, capacity, message in cases:
        with pytest.raises(ConfigurationError, match=message):
            async with open_tier(path, capacity=capacity):
                pass
    async with open_tier(tmp_path / "c"):  # the one that failed holds nothing
        pass


async def test_closed_is_said(tmp_path: Path) -> None:
    """Before opening and after closing every call says so; a second close is harmless."""
    unopened = backend_at(tmp_path)
    await unopened.aclose()
    async with open_tier(tmp_path) as tier:
        pass
    await tier.backend.aclose()
    for backend in (unopened, tier.backend):
        with pytest.raises(ClosedError):
            await backend.read(0, np.arange(1), [Block.empty(PAYLOAD)])
        with pytest.raises(ClosedError):
            await backend.forget(0, np.arange(1))
        assert backend.describe() == {}


async def test_names_are_as_many_as_blocks(tmp_path: Path) -> None:
    """Else nobody could say which is whose: nothing is written."""
    async with open_tier(tmp_path) as tier:
        keys = [key_of(0), key_of(1)]
        for names in (block_names(keys), block_names(keys[:0])):
            with pytest.raises(LayoutMismatchError, match=f"{len(names)} keys but 1 blocks"):
                await tier.backend.write(0, np.array([0]), names, [make_block(content_of(0), keys[0])])
        assert await tier.verified({0: 0}) == [Outcome.MISS]


async def test_a_slot_that_is_none(tmp_path: Path) -> None:
    """Slots outside the slab are an error before anything moves."""
    async with open_tier(tmp_path) as tier:
        for slot in (-1, tier.found.num_slots):
            with pytest.raises(ConfigurationError, match=str(slot)):
                await tier.write({0: 0, slot: 1})
        assert await tier.verified({0: 0}) == [Outcome.MISS]


@pytest.mark.parametrize("direct", ["auto", "never"])
async def test_a_place_that_fails_is_one_block(tmp_path: Path, direct: str, files_no_longer_than: FileLimit) -> None:
    """In one batch, blocks whose place cannot be written fail, and only the others are found after a restart."""
    async with open_tier(tmp_path, direct=direct) as tier:
        await tier.write(count_up(8))
        with files_no_longer_than(5 * STRIDE + 8192):
            outcomes = await tier.write({slot: slot + 8 for slot in range(8)})
        assert outcomes == [Outcome.STORED] * 5 + [Outcome.FAILED] * 3
        assert tier.backend.describe()["last_error"]
        assert await tier.verified({0: 8, 4: 12, 6: 6, 7: 7}) == [Outcome.HIT] * 4
    async with open_tier(tmp_path) as tier:
        assert tier.recovered(16) == {slot: slot + 8 for slot in range(5)}


async def test_a_slab_that_cannot_grow(tmp_path: Path, files_no_longer_than: FileLimit) -> None:
    """Blocks whose slots get no place on the disk fail, and are stored once there is one."""
    async with open_tier(tmp_path) as tier:
        with files_no_longer_than(STRIDE):
            assert await tier.write(count_up(4)) == [Outcome.FAILED] * 4
        assert await tier.write(count_up(4)) == [Outcome.STORED] * 4
        assert await tier.verified(count_up(4)) == [Outcome.HIT] * 4


async def test_a_block_that_the_ledger_could_not_note_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are written, but a restart would not find them: it has failed, and may be stored again."""

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    async with open_tier(tmp_path) as tier:
        assert await tier.write({0: 0}) == [Outcome.STORED]
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fails)
            assert await tier.write({1: 1, 2: 2}) == [Outcome.FAILED] * 2
        assert "Input/output error" in str(tier.backend.describe()["last_error"])
        assert await tier.write({1: 1}) == [Outcome.STORED]
    async with open_tier(tmp_path) as tier:
        assert tier.recovered(3) == {0: 0, 1: 1}


async def test_a_full_disk_fails_blocks_and_recovers(small_disk: Path) -> None:
    """ENOSPC fails what it hits, reads go on, and when there is room again so do writes."""
    path = small_disk / "tier"
    async with open_tier(path, capacity=8 * MIB) as tier:
        with pytest.raises(OSError, match="No space"):
            (small_disk / "filler").write_bytes(bytes(17 * MIB))
        assert await tier.write(count_up(4)) == [Outcome.FAILED] * 4
        assert "No space" in str(tier.backend.describe()["last_error"])
        (small_disk / "filler").unlink()
        assert await tier.write(count_up(4)) == [Outcome.STORED] * 4
    async with open_tier(path, capacity=8 * MIB) as tier:
        assert tier.recovered(4) == count_up(4)


async def test_a_small_disk_is_known_at_start(small_disk: Path) -> None:
    """A capacity that the filesystem cannot hold says by how much."""
    with pytest.raises(ConfigurationError, match="lower capacity by at least"):
        async with open_tier(small_disk / "tier", capacity=17 * MIB):
            pass


async def test_the_mode_in_use_is_said(tmp_path: Path) -> None:
    """``describe`` says whether I/O is direct, and why not."""
    async with open_tier(tmp_path, direct="never") as tier:
        facts = tier.backend.describe()
        assert facts["io"] == "buffered"
        assert facts["io_reason"]
        assert facts["num_slots"] == tier.found.num_slots


@pytest.mark.parametrize("what", ["open", "pwritev", "preadv"])
async def test_a_disk_that_direct_io_fails_on_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Where a file cannot be opened so or written so, or reads back otherwise; `describe` says which."""
    call = getattr(os, what)

    def refuses(name: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return int(call(name, flags, *args, **kwargs))

    def forgets(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if what == "pwritev":
            raise OSError(errno.EINVAL, "Invalid argument")
        return sum(map(len, buffers))

    with monkeypatch.context() as patch:
        patch.setattr(os, what, refuses if what == "open" else forgets)
        backend = backend_at(tmp_path)
        with open_context(shape_of("a")) as context:
            await backend.open(context)
    assert backend.describe()["io"] == "buffered"
    assert ("not read back" if what == "preadv" else "Invalid argument") in str(backend.describe()["io_reason"])
    await backend.aclose()


async def test_memory_that_direct_io_cannot_take_fails_alone(tmp_path: Path) -> None:
    """A block in memory that is not page-aligned is refused by the kernel; the rest of its batch arrives."""
    async with open_tier(tmp_path) as tier:
        if tier.backend.describe()["io"] != "direct":
            pytest.skip("no O_DIRECT here: set TMPDIR to a folder on a disk")
        await tier.write(count_up(3))
        memory = memoryview(bytearray(STRIDE + 4097))[1:]
        crooked = Block(memory[:4096], memory[4096:STRIDE], PAYLOAD)
        into = [Block.empty(PAYLOAD), crooked, Block.empty(PAYLOAD)]
        outcomes = await tier.backend.read(0, np.arange(3), into)
        assert outcomes == [Outcome.HIT, Outcome.FAILED, Outcome.HIT]
