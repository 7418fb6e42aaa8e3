"""Damage of a ledger is repaired from the records, said aloud, and brings nothing back that was evicted."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from structlog.testing import capture_logs

from tests.support.any_layout import AnyEngine, nvme, open_any, prompt
from tests.support.nvme_tier import (
    PAYLOAD,
    STRIDE,
    AdversePools,
    Tier,
    backend_at,
    content_of,
    count_up,
    key_of,
    ledger_of,
    open_tier,
    slab_of,
    slots_of,
)
from tiered_kv.media.backend import Block, Outcome
from tiered_kv.system import Files
from tiered_kv.testing import block_names, make_block
from tiered_kv_backends.nvme import ledger as ledger_module

T = TypeVar("T")
ENTRY_BYTES = 64


def flip(path: Path, at: int) -> None:
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("at", [0, 20, ENTRY_BYTES - 1, 7 * ENTRY_BYTES + 50])
async def test_a_flipped_bit_costs_no_block(tmp_path: Path, at: int) -> None:
    """Wherever a bit of the ledger flips, every block is found; what was repaired is logged, once."""
    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(8))
    flip(ledger_of(tmp_path), at)
    with capture_logs() as logs:
        async with open_tier(tmp_path) as tier:
            assert tier.recovered(8) == count_up(8)
            assert await tier.verified(count_up(8)) == [Outcome.HIT] * 8
            facts = tier.backend.describe()
            assert (facts["num_damaged"], facts["num_rebuilt"]) == (1, 1)
        async with open_tier(tmp_path) as tier:
            assert tier.recovered(8) == count_up(8)
            assert tier.backend.describe()["num_damaged"] == 0
    assert [(log["event"], log["damaged"], log["rebuilt"]) for log in logs] == [("nvme.ledger_damaged", 1, 1)]


@pytest.mark.parametrize(
    "destroy",
    [
        lambda ledger: ledger.unlink(),
        lambda ledger: ledger.write_bytes(b""),
        lambda ledger: ledger.write_bytes(b"garbage" * 1000),
        lambda ledger: ledger.write_bytes(ledger.read_bytes()[: 3 * ENTRY_BYTES + 10]),
        lambda ledger: ledger.write_bytes(bytes(ledger.stat().st_size)),
    ],
    ids=["deleted", "emptied", "garbage", "cut", "zeros"],
)
async def test_a_lost_ledger_is_rebuilt(tmp_path: Path, destroy: Callable[[Path], object]) -> None:
    """Without its ledger, or most of it, a slab is read header by header; what was evicted stays away."""
    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(20))
        await tier.backend.forget(0, slots_of({5: 5, 17: 17}))
    destroy(ledger_of(tmp_path))
    expected = count_up(20)
    del expected[5], expected[17]
    for _ in range(2):  # the second time from the new ledger
        async with open_tier(tmp_path) as tier:
            assert tier.recovered(20) == expected
            assert await tier.verified(expected) == [Outcome.HIT] * 18


@pytest.mark.parametrize("num_left", [0, 7, None], ids=["deleted", "cut", "zeros"])
async def test_a_lost_ledger_is_rebuilt_whoever_was_killed_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_left: int | None
) -> None:
    """Whichever write to it was the last one: what it does not say yet is not taken for never written."""
    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(20))
        await tier.backend.forget(0, slots_of({5: 5, 17: 17}))
    expected = count_up(20)
    del expected[5], expected[17]
    ledger = ledger_of(tmp_path)
    whole, pwrite, num_writes, num_done = ledger.read_bytes(), Files.pwrite, 1, 0
    monkeypatch.setattr(ledger_module, "_CHUNK", 3)
    lost = bytes(len(whole)) if num_left is None else whole[: num_left * ENTRY_BYTES]

    def write_some(self: Files, fd: int, data: memoryview, offset: int) -> int:
        nonlocal num_done
        is_ledgers = os.fstat(fd).st_ino == ledger.stat().st_ino
        num_done += is_ledgers
        if is_ledgers and num_done > num_writes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pwrite(self, fd, data, offset)

    while True:
        num_done = 0
        ledger.write_bytes(lost)
        with monkeypatch.context() as patched:
            patched.setattr(Files, "pwrite", write_some)
            async with open_tier(tmp_path) as tier:
                assert tier.recovered(20) == expected
        async with open_tier(tmp_path) as tier:
            assert tier.recovered(20) == expected
        if num_done <= num_writes:
            break
        num_writes += 1
    assert num_writes > 10


async def test_a_tier_that_was_emptied_is_not_damaged(tmp_path: Path) -> None:
    """Its ledger says so: what was forgotten stays away even where a loss of power brought its headers back."""
    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(8))
    slab = slab_of(tmp_path)
    before = slab.read_bytes()
    async with open_tier(tmp_path) as tier:
        await tier.backend.forget(0, slots_of(count_up(8)))
    slab.write_bytes(before)
    with capture_logs() as logs:
        async with open_tier(tmp_path) as tier:
            assert tier.recovered(8) == {}
            assert tier.backend.describe()["num_damaged"] == 0
    assert logs == []


async def test_a_tier_of_which_nothing_is_left_says_so(tmp_path: Path) -> None:
    """Neither its ledger nor a header can be read: that is damage, though nothing is found."""
    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(8))
    for file in (slab_of(tmp_path), ledger_of(tmp_path)):
        file.write_bytes(b"x" * file.stat().st_size)
    with capture_logs() as logs:
        async with open_tier(tmp_path) as tier:
            assert tier.recovered(8) == {}
            assert int(str(tier.backend.describe()["num_damaged"])) >= 8
    assert "nvme.ledger_damaged" in [each["event"] for each in logs]


async def test_a_rebuild_believes_no_header_that_is_not_whole(tmp_path: Path) -> None:
    """A header with a flipped bit, or of another model, is no block."""
    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(4))
        foreign = [make_block(content_of(9), key_of(9, "another"))]
        await tier.backend.write(0, np.array([2]), block_names([key_of(9, "another")]), foreign)
    flip(slab_of(tmp_path), STRIDE + 40)
    ledger_of(tmp_path).unlink()
    async with open_tier(tmp_path) as tier:
        assert tier.recovered(4) == {0: 0, 3: 3}


async def test_what_was_evicted_stays_away_whatever_is_damaged(tmp_path: Path) -> None:
    """A block that was forgotten comes back by no flipped bit of the ledger, and by no lost checkpoint."""
    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(4))
        await tier.backend.forget(0, slots_of({1: 1}))
        await tier.backend.checkpoint(0, block_names([key_of(2), key_of(0)]), np.array([2, 0]), sync=True)
    whole = ledger_of(tmp_path).read_bytes()
    for at in range(0, 4 * ENTRY_BYTES, 5):
        ledger_of(tmp_path).write_bytes(whole)
        flip(ledger_of(tmp_path), at)
        async with open_tier(tmp_path) as tier:
            assert tier.recovered(4) == {2: 2, 0: 0}


@pytest.mark.parametrize("before", [None, 1, 2], ids=["never used", "emptied", "another block's"])
async def test_a_record_that_was_never_entered_does_not_come_back_by_a_flipped_bit(
    tmp_path: Path, before: int | None
) -> None:
    """Who is killed before the entry leaves a block that is found no more; nor once it was stored anew, and evicted.

    Seeds 5004074 and 8000892 (a loss of power) and 8001071 (kill -9) had such ends.
    """
    async with open_tier(tmp_path) as tier:
        await tier.write({0: 0} if before is None else {0: 0, 3: before})
        if before == 1:
            await tier.backend.forget(0, slots_of({3: before}))
    whole = ledger_of(tmp_path).read_bytes()
    async with open_tier(tmp_path) as tier:
        await tier.write({3: 7})
    ledger_of(tmp_path).write_bytes(whole)
    async with open_tier(tmp_path) as tier:
        await tier.write({1: 7})
        await tier.backend.forget(0, slots_of({1: 7}))
    whole = ledger_of(tmp_path).read_bytes()
    for at in range(3 * ENTRY_BYTES, 4 * ENTRY_BYTES, 3):
        ledger_of(tmp_path).write_bytes(whole)
        for i in range(6):  # bits all over the entry
            flip(ledger_of(tmp_path), 3 * ENTRY_BYTES + (at + 11 * i) % ENTRY_BYTES)
        async with open_tier(tmp_path) as tier:
            assert tier.recovered(8) == {0: 0}


async def test_of_two_records_of_a_block_the_later_counts_for_good(tmp_path: Path) -> None:
    """When the later one is evicted, the earlier does not come back at the next start."""
    async with open_tier(tmp_path) as tier:
        await tier.write({3: 7})
        await tier.write({1: 7})
    async with open_tier(tmp_path) as tier:
        assert tier.recovered(8) == {1: 7}
        await tier.backend.forget(0, slots_of({1: 7}))
        await tier.backend.checkpoint(0, block_names([]), slots_of({}))
    async with open_tier(tmp_path) as tier:
        assert tier.recovered(8) == {}
    ledger_of(tmp_path).unlink()
    async with open_tier(tmp_path) as tier:
        assert tier.recovered(8) == {}


async def test_an_earlier_record_is_gone_before_the_later_one_is(tmp_path: Path) -> None:
    """From the start on that found both: evicting the later one is enough, whatever becomes of the process."""
    async with open_tier(tmp_path) as tier:
        await tier.write({3: 7})
        await tier.write({1: 7})
    async with open_tier(tmp_path) as tier:
        await tier.backend.forget(0, slots_of({1: 7}))
    async with open_tier(tmp_path) as tier:
        assert tier.recovered(8) == {}


async def test_a_failed_write_leaves_nothing_of_what_was_there(tmp_path: Path) -> None:
    """The block that had the slot before was evicted for it: it is not found after a restart, though it is whole."""
    async with open_tier(tmp_path) as tier:
        await tier.write(count_up(2))
        memory = memoryview(bytearray(STRIDE + 4097))[1:]
        crooked = Block(memory[:4096], memory[4096:STRIDE], PAYLOAD)
        if tier.backend.describe()["io"] != "direct":
            pytest.skip("no O_DIRECT here: set TMPDIR to a folder on a disk")
        assert await tier.backend.write(0, np.array([1]), block_names([key_of(9)]), [crooked]) == [Outcome.FAILED]
    async with open_tier(tmp_path) as tier:
        assert tier.recovered(2) == {0: 0}


@pytest.mark.parametrize("direct", ["auto", "never"])
async def test_erase_leaves_no_byte(tmp_path: Path, direct: str) -> None:
    """With ``erase`` the payload of what is forgotten is overwritten; without, its header is, and neighbours never."""
    for erase, path in ((True, tmp_path / "erased"), ("punch", tmp_path / "punched"), (False, tmp_path / "not")):
        async with open_tier(path, direct=direct, erase=erase) as tier:
            await tier.write(count_up(4))
            await tier.backend.forget(0, slots_of({1: 1}))
            await tier.backend.checkpoint(0, block_names([key_of(0), key_of(3)]), np.array([0, 3]), sync=True)
            slab = slab_of(path).read_bytes()
            for n in (1, 2):
                assert slab[n * STRIDE : n * STRIDE + 4096] == bytes(4096)
                assert (content_of(n) in slab) == (not erase)
            assert await tier.verified({0: 0, 3: 3}) == [Outcome.HIT] * 2


def only_slab_in(path: Path) -> Path:
    """Return where the records of the only model are."""
    (slab,) = path.rglob("slab")
    return slab


@pytest.mark.parametrize("can_punch", [True, False])
@pytest.mark.parametrize("erase", [True, "punch"])
async def test_what_was_evicted_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, erase: object, *, can_punch: bool
) -> None:
    """After ``evict`` and ``flush(sync=True)`` no byte of the blocks is in the slab, and the others are all there."""
    if not can_punch:  # as NFS before 4.2, and others
        monkeypatch.setattr(Files, "fallocate", lambda *_: False)
    engine, settings = AnyEngine(), {**nvme(tmp_path), "erase": erase}
    keys, kept = prompt(8), prompt(8, 1)
    contents = [engine.content(digest, keys.group, "") for digest in (*keys, *kept)]
    async with open_any(engine, settings) as kv:
        for each in (keys, kept):
            await kv.store(each, engine.fill(each, range(8)))
        await kv.flush(sync=True)
        slab = only_slab_in(tmp_path)
        there, had_blocks = slab.read_bytes(), slab.stat().st_blocks
        assert all(content in there for content in contents)
        await kv.evict(keys)
        await kv.flush(sync=True)
        there = slab.read_bytes()
        assert [content in there for content in contents] == [False] * 8 + [True] * 8
        assert (slab.stat().st_blocks < had_blocks) == (erase == "punch" and can_punch)
        await kv.store(keys, engine.fill(keys, range(8)))
    async with open_any(engine, settings) as kv:
        for each in (keys, kept):
            engine.wipe()
            await kv.load(each, engine.spec(range(8)))
            assert engine.count_right(each, range(8)) == 8


@pytest.mark.parametrize("direct", ["auto", "never"])
async def test_many_neighbours_go_at_once(tmp_path: Path, direct: str) -> None:
    """Of a hundred blocks in a row that are forgotten no header is left, and those beside them are as they were."""
    async with open_tier(tmp_path, direct=direct, capacity="16MiB") as tier:
        await tier.write(count_up(200))
        await tier.backend.forget(0, np.arange(20, 195))
        assert await tier.verified({19: 19, 20: 20, 194: 194, 195: 195}) == [
            Outcome.HIT, Outcome.MISS, Outcome.MISS, Outcome.HIT,
        ]  # fmt: skip
    ledger_of(tmp_path).unlink()
    async with open_tier(tmp_path, direct=direct, capacity="16MiB") as tier:
        assert tier.recovered(200) == {n: n for n in range(200) if not 20 <= n < 195}


async def test_a_write_waits_for_the_erasure_of_what_was_there(tmp_path: Path) -> None:
    """A slot that is given to another block while it is forgotten, by name or by a checkpoint, holds that block."""
    threads = AdversePools()
    backend = backend_at(tmp_path)
    ((found,),) = await threads.end(backend.open(threads.context()))
    tier = Tier(backend, found, "a")
    await threads.end(tier.write(count_up(4)))
    forgetting = backend.forget(0, slots_of({0: 0, 1: 1}))
    checkpoint = backend.checkpoint(0, block_names([key_of(3)]), np.array([3]))
    _, _, stored = await threads.end(forgetting, checkpoint, tier.write({0: 10, 1: 11, 2: 12}))
    assert stored == [Outcome.STORED] * 3
    blocks = {0: 10, 1: 11, 2: 12, 3: 3}
    assert await threads.end(tier.verified(blocks)) == [[Outcome.HIT] * 4]
    await threads.end(backend.aclose())
    async with open_tier(tmp_path) as tier:
        assert tier.recovered(13) == blocks


async def test_no_slot_is_erased_while_it_is_written(tmp_path: Path) -> None:
    """What is forgotten meanwhile is forgotten by the ledger alone: the records are whole, and not zeros in part."""
    threads = AdversePools()
    backend = backend_at(tmp_path)
    ((found,),) = await threads.end(backend.open(threads.context()))
    tier = Tier(backend, found, "a")
    stored, _ = await threads.end(tier.write(count_up(4)), backend.forget(0, np.arange(4)))
    assert stored == [Outcome.STORED] * 4
    assert await threads.end(tier.verified(count_up(4))) == [[Outcome.HIT] * 4]
    await threads.end(backend.aclose())


async def test_what_is_written_behind_a_checkpoint_is_what_a_restart_finds(tmp_path: Path) -> None:
    """A block takes a slot whose old block is just being remembered: whichever thread is faster, it is found."""
    threads = AdversePools()
    backend = backend_at(tmp_path)
    ((found,),) = await threads.end(backend.open(threads.context()))
    tier = Tier(backend, found, "a")
    await threads.end(tier.write(count_up(3)))
    checkpoint = backend.checkpoint(0, block_names([key_of(n) for n in range(3)]), np.arange(3))
    _, stored = await threads.end(checkpoint, tier.write({1: 11}))
    assert stored == [Outcome.STORED]
    checkpoint = backend.checkpoint(0, block_names([key_of(n) for n in (0, 11, 2)]), np.arange(3))
    remembering, _ = await threads.begin(checkpoint)
    made = make_block(content_of(12), key_of(12))
    if not backend.begin_write(0, np.array([2]), block_names([key_of(12)]), [made], lambda _: None, lambda _: None):
        await threads.end(tier.write({2: 12}))
    await threads.end(remembering)
    await threads.end(backend.aclose())
    async with open_tier(tmp_path) as tier:
        assert tier.recovered(13) == {0: 0, 1: 11, 2: 12}
