"""What is not written yet: counted by when it came, and for no longer than it is there."""

import asyncio

import pytest
import torch

from tests.support.engine import prompt
from tiered_kv.catalog.index import TierIndex
from tiered_kv.tiers import unwritten as module
from tiered_kv.tiers.tier import Batch, MemoryTier, Naming
from tiered_kv.tiers.unwritten import Unwritten
from tiered_kv.values.keys import Shard, epoch_digest

BLOCKS = Naming(bytes(32), Shard()).batch(prompt(8), epoch_digest("w0"))


class Line:
    """A memory tier of eight blocks, and what of it is not written."""

    def __init__(self) -> None:
        self.index = TierIndex(8, write_back=True)
        tier = MemoryTier("cpu", self.index, torch.zeros(8, 1, dtype=torch.int64))
        self.now_s = 0.0
        self.unwritten = Unwritten([tier], lambda: self.now_s)
        self.waiting = self.unwritten.waiting[tier]

    def add(self, batch: Batch) -> None:
        """Have blocks wait."""
        with self.index.reserve(batch.names) as reservation, reservation.commit() as lease:
            self.waiting.add(batch, lease.slots, lease)


async def test_what_leaves_the_line_is_not_waited_for() -> None:
    """Evicted by name, by another capacity, or with all else, and written: each block counts until then."""
    line = Line()
    line.add(BLOCKS)
    mark = line.unwritten.mark()
    assert line.waiting.num_before(mark) == 8
    line.index.remove(BLOCKS.names[:2])
    assert line.waiting.num_before(mark) == 6
    line.index.resize(6)
    assert line.waiting.num_before(mark) == 4
    batch, lease, came = line.waiting.take(2)
    assert (line.waiting.num_before(mark), line.unwritten.num_blocks) == (2, 4)
    line.index.clear()
    assert not line.waiting.num_before(mark)
    assert not line.unwritten.is_written(mark)
    lease.release()
    line.waiting.ended(len(batch), came)
    assert line.unwritten.is_written(mark)
    assert line.unwritten.num_blocks == 0


async def test_what_waits_already_gets_no_younger() -> None:
    """A block that is stored again keeps its place, and its time: it must not hold up those behind it by age."""
    line = Line()
    line.add(BLOCKS)
    for line.now_s in (1.0, 2.0, 3.0):
        lease = line.index.lease(BLOCKS.names[:1])
        line.waiting.add(BLOCKS[:1], lease.slots, lease)
        lease.release()
        assert line.waiting.oldest_s() == line.now_s
    assert line.unwritten.num_blocks == 8


async def test_marks_may_be_very_many() -> None:
    """Each flush and eviction makes one: of a cache that runs for years they are more than 32 bits count."""
    line = Line()
    line.unwritten.now = 1 << 40
    line.add(BLOCKS)
    assert (line.waiting.num_before(1 << 40), line.waiting.num_before((1 << 40) + 1)) == (0, 8)


async def test_a_mark_is_between_what_came_before_and_what_came_later() -> None:
    """Blocks of both are never taken together; what failed comes anew, what nobody tried does not."""
    line = Line()
    line.add(BLOCKS[:2])
    mark = line.unwritten.mark()
    line.add(BLOCKS[2:4])
    batch, lease, came = line.waiting.take(4)
    assert batch.positions.tolist() == [0, 1]
    line.waiting.put_back(batch[:1], lease.slots[:1], lease, came)
    line.waiting.again(batch[1:], lease.slots[1:], lease, came, most_tries=2)
    lease.release()
    line.waiting.ended(len(batch), came)
    assert line.waiting.num_before(mark) == 1
    assert line.waiting.num_before(line.unwritten.mark()) == 4


async def test_what_is_under_way_is_waited_for_by_when_it_came() -> None:
    """Whoever waits is told at each end."""
    unwritten = Line().unwritten
    first = unwritten.begin()
    mark = unwritten.mark()
    second, part = unwritten.begin(), unwritten.begin(first)
    assert (first, second, part) == (0, 1, 0)
    for came, is_written in ((second, False), (first, False), (part, True)):
        waiting = asyncio.create_task(unwritten.one_ended())
        await asyncio.sleep(0)
        unwritten.end(came)
        await waiting
        assert unwritten.is_written(mark) is is_written


async def test_what_was_evicted_from_a_tier_is_unwanted_there_until_all_of_that_time_is_over() -> None:
    """Also if it comes anew, or a worker has it yet; other blocks, other tiers and what comes later are wanted."""
    line = Line()
    unwritten, names = line.unwritten, BLOCKS.names
    came = unwritten.begin()
    unwritten.evict("disk", names[:2])
    assert unwritten.is_wanted("disk", names[:4], came).tolist() == [False, False, True, True]
    assert unwritten.is_wanted("store", names, came).all()
    assert unwritten.is_wanted("disk", names, unwritten.now).all()
    unwritten.comes_anew(names[:1], came)
    later = unwritten.begin() - 1
    assert unwritten.is_wanted("disk", names[:4], later).tolist() == [False, True, True, True]
    unwritten.held["job"] = lambda _: None
    unwritten.end(came)
    assert not unwritten.is_wanted("disk", names, came).all()
    del unwritten.held["job"]
    unwritten.end(later + 1)
    assert unwritten.is_wanted("disk", names, came).all()


def test_of_what_was_evicted_from_a_tier_the_last_ones_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stores go on without end their time is never over. All that can be in memory at once is."""
    monkeypatch.setattr(module, "_LEAST_UNWANTED", 0)
    unwritten, names = Line().unwritten, Naming(bytes(32), Shard()).batch(prompt(18), epoch_digest("w0")).names
    came = unwritten.begin()
    for part in (names[:2], names[:1], names[2:17]):
        unwritten.evict("disk", part)
    assert unwritten.is_wanted("disk", names, came).tolist() == [False, True, *[False] * 15, True]
