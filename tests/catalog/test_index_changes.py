"""Changing capacity, age, dirty blocks, and who is told of changes; test_index_model.py tries every order."""

import numpy as np
import pytest

from tests.catalog.indexed import every_policy, ids_of, names_of, store
from tiered_kv.catalog import Change, TierIndex
from tiered_kv.catalog.leases import Lease
from tiered_kv.values.errors import CapacityError, ClosedError, ConfigurationError


@every_policy
def test_shrinking_gives_up_slots_at_their_last_release(policy: str) -> None:
    """Blocks beyond the new end are gone at once; the slot of one in use is given up by its last user, never reused."""
    index = TierIndex(4, policy=policy)
    store(index, 1, 2, 3)
    reader = index.lease(names_of(2))
    with index.reserve(names_of(4)) as reservation:
        assert sorted(ids_of(index.resize(1))) == [2, 3]
        assert index.ready(names_of(1, 2, 3, 4)).tolist() == [True, False, False, False]
        assert (index.num_slots, index.statistics().retired, index.statistics().doomed) == (1, 1, 2)
        assert reservation.commit().num_prefix == 0
    reader.release()
    assert (index.statistics().retired, index.statistics().doomed) == (3, 0)
    assert store(index, 5) == [1]
    with pytest.raises(CapacityError):
        index.reserve(names_of(6, 7))


def test_what_leaves_is_handed_over_with_its_slots() -> None:
    """By name, by age, by another capacity: nothing is put there until they are let go of, whoever reads it."""
    now, left = [0.0], list[tuple[list[int], Lease]]()
    index = TierIndex(6, ttl_s=5.0, clock=lambda: now[0])
    index.on_left = lambda names, lease: left.append((sorted(ids_of(names)), lease))
    store(index, 1, 2, 3)
    now[0] = 3.0
    store(index, 4, 5, 6)
    reader = index.lease(names_of(1))
    index.remove(names_of(1, 7))
    now[0] = 6.0
    index.expire()
    index.resize(5)
    assert [ids for ids, _ in left] == [[1], [2, 3], [6]]
    assert (index.statistics().free, index.statistics().doomed, index.statistics().retired) == (0, 4, 0)
    for _, lease in left:
        lease.release()
    assert (index.statistics().free, index.statistics().doomed, index.statistics().retired) == (2, 1, 1)
    reader.release()
    assert (index.statistics().free, index.statistics().doomed, index.statistics().leased) == (3, 0, 0)


def test_what_is_lost_is_not_handed_over() -> None:
    """Its medium is away. What is evicted is filled at once."""
    index = TierIndex(2)
    index.on_left = lambda names, _: pytest.fail(f"{names} were handed over")
    store(index, 1, 2)
    store(index, 3)
    assert index.withhold(np.ones(2, np.bool_)) == 2
    assert (index.statistics().withheld, index.statistics().doomed) == (2, 0)


@every_policy
def test_growing_makes_room(policy: str) -> None:
    """A raised capacity is there at once, up to the slots that are still in use from before."""
    index = TierIndex(3, max_slots=4, policy=policy)
    store(index, 1, 2, 3)
    reader = index.lease(names_of(3))
    index.resize(2)
    assert index.resize(4).tolist() == []
    assert (index.statistics().free, index.statistics().doomed) == (1, 1)
    reader.release()
    assert (index.statistics().free, index.statistics().doomed) == (2, 0)
    assert store(index, 4, 5) == []
    assert store(index, 6) != []


def test_bounce_slots_stay_where_they_are() -> None:
    """Resizing moves no bounce slot: they begin at ``max_slots``, whatever the capacity."""
    index = TierIndex(1, max_slots=3, num_bounce=2)
    index.resize(0)
    with index.reserve(names_of(1, 2), bounce=True) as reservation:
        assert reservation.slots.tolist() == [3, 4]
        assert index.is_bounce(np.array([-1, 0, 2, 3, 4])).tolist() == [False, False, False, True, True]
        index.resize(3)
        assert reservation.commit().num_prefix == 2


@pytest.mark.parametrize("num_slots", [-1, 5])
def test_impossible_capacities(num_slots: int) -> None:
    """A capacity below nothing or above what is allocated is refused, and changes nothing."""
    index = TierIndex(2, max_slots=4)
    store(index, 1, 2)
    with pytest.raises(ConfigurationError):
        index.resize(num_slots)
    assert index.ready(names_of(1, 2)).all()


def test_arc_keeps_to_a_changed_capacity() -> None:
    """After shrinking, ARC goes on evicting within the slots that are left, and remembers no more ghosts than those."""
    index = TierIndex(8, policy="arc")
    for turn in range(5):
        store(index, *range(10 * turn, 10 * turn + 8))
        index.lease(names_of(10 * turn)).release()
    index.resize(3)
    for block in range(100, 130):
        store(index, block)
    assert index.statistics().ready == 3
    index.resize(8)
    for block in range(200, 230):
        store(index, block)
    assert index.statistics().ready == 8


def test_blocks_expire_by_their_commit() -> None:
    """A block goes ``ttl_s`` after its commit, used or not; one that is read then is unfindable, and freed later."""
    now = [1e6]
    index = TierIndex(4, ttl_s=10, clock=lambda: now[0])
    index.restore(names_of(4), np.array([3]))
    now[0] += 3
    store(index, 1)
    now[0] += 6
    store(index, 2, 3)
    assert ids_of(index.expire()) == []
    now[0] += 3
    assert ids_of(index.expire()) == [4]
    now[0] += 1
    reader = index.lease(names_of(1))
    assert ids_of(index.expire()) == [1]
    assert not index.ready(names_of(1)).any()
    assert index.statistics().free == 1
    reader.release()
    assert index.statistics().free == 2
    store(index, 1)
    now[0] += 9
    assert sorted(ids_of(index.expire())) == [2, 3]
    assert index.ready(names_of(1)).all()


def test_expiry_goes_round_in_pieces() -> None:
    """A call looks at so many slots only, and removes 4,096 blocks at most; the next one goes on from there."""
    now = [0.0]
    index = TierIndex(10_000, ttl_s=1, clock=lambda: now[0])
    store(index, *range(10_000))
    now[0] = 2
    assert len(index.expire(limit=100)) == 100
    assert len(index.expire()) == 4_096
    assert len(index.expire()) == 4_096
    assert len(index.expire()) == 10_000 - 100 - 2 * 4_096
    assert index.statistics().free == 10_000


def test_no_ttl_no_expiry() -> None:
    """Without a TTL nothing expires; a TTL of nothing is refused."""
    index = TierIndex(1)
    store(index, 1)
    assert index.expire().shape == (0, 4)
    with pytest.raises(ConfigurationError):
        TierIndex(1, ttl_s=0)


@every_policy
def test_dirty_blocks_are_not_evicted(policy: str) -> None:
    """Dirty blocks stay until they are taken and released; the oldest are taken first."""
    index = TierIndex(3, policy=policy, write_back=True)
    for block in (1, 2):
        with index.reserve(names_of(block)) as reservation, reservation.commit() as lease:
            index.mark_dirty(lease)
            index.mark_dirty(lease)
    store(index, 3)
    assert (index.statistics().dirty, index.statistics().evictable) == (2, 1)
    with pytest.raises(CapacityError, match=r"^2 more slots needed, 1 evictable$"):
        index.reserve(names_of(4, 5))
    names, lease = index.take_dirty(1)
    assert ids_of(names) == [1]
    index.mark_dirty(lease)  # it could not be written
    lease.release()
    names, lease = index.take_dirty(1)
    assert ids_of(names) == [2]
    lease.release()
    assert index.statistics().dirty == 1
    index.reserve(names_of(4, 5)).close()


def test_it_is_told_what_is_dirty_no_more_though_nobody_took_it() -> None:
    """Once for each block, with its slot and the reason; and who marks blocks hears which of them were not dirty."""
    index, told = TierIndex(6, write_back=True), list[tuple[list[int], list[int], Change]]()
    index.on_undirtied = lambda names, slots, why: told.append((ids_of(names), slots.tolist(), why))
    with index.reserve(names_of(*range(6))) as reservation, reservation.commit() as lease:
        assert index.mark_dirty(lease, lease.slots[:2]).tolist() == [0, 1]
        assert index.mark_dirty(lease).tolist() == [2, 3, 4, 5]
    index.take_dirty(1)[1].release()
    index.remove(names_of(0, 1))
    index.resize(4)
    index.clear()
    assert told == [
        ([1], [1], Change.REMOVED),
        ([5, 4], [5, 4], Change.EVICTED),
        ([2, 3], [2, 3], Change.CLEARED),
    ]


def test_only_leased_blocks_are_marked() -> None:
    """Marking by a lease that is released, or in a tier without write-back, is refused before anything changes."""
    index = TierIndex(1, write_back=True)
    with index.reserve(names_of(1)) as reservation, reservation.commit() as lease:
        pass
    with pytest.raises(ClosedError):
        index.mark_dirty(lease)
    assert (index.statistics().dirty, index.statistics().evictable) == (0, 1)
    plain = TierIndex(1)
    store(plain, 1)
    with plain.lease(names_of(1)) as lease, pytest.raises(ConfigurationError):
        plain.mark_dirty(lease)
    assert plain.take_dirty(1)[1].slots.tolist() == []


def test_a_part_of_a_lease_is_marked_and_the_oldest_can_be_looked_at() -> None:
    """Only the slots that are named are dirty; to look takes nothing out."""
    index = TierIndex(4, write_back=True)
    with index.reserve(names_of(1, 2, 3)) as reservation, reservation.commit() as lease:
        index.mark_dirty(lease, lease.slots[1:])
    assert (index.statistics().dirty, index.statistics().evictable) == (2, 1)
    assert index.oldest_dirty(1).tolist() == index.oldest_dirty(2).tolist()[:1] == lease.slots[1:2].tolist()
    names, taken = index.take_dirty(4)
    assert ids_of(names) == [2, 3]
    taken.release()


def test_slots_given_up_are_idle_once_nobody_uses_them() -> None:
    """So that their memory can be given back, and not before."""
    index = TierIndex(4)
    with index.reserve(names_of(1, 2, 3, 4)) as reservation:
        lease = reservation.commit()
    held = index.lease(names_of(3))
    lease.release()
    index.resize(1)
    slot = int(held.slots[0])
    assert index.idle_retired(0, 9).tolist() == [each for each in (1, 2, 3) if each != slot]
    held.release()
    assert index.idle_retired(0, 9).tolist() == [1, 2, 3]
    assert index.idle_retired(0, 1).tolist() == []


def test_no_block_goes_to_slots_that_are_withheld() -> None:
    """Their blocks are gone at once, a leased one's slot with its last lease; none is used until it can be again."""
    heard: list[tuple[str, list[int]]] = []
    index = TierIndex(4, max_slots=5)
    index.on_change = lambda change, names: heard.append((change, ids_of(names)))
    store(index, 1, 2, 3, 4)
    reader = index.lease(names_of(1))
    assert index.withhold(np.array([True, False, True, False, False])) == 2
    assert index.ready(names_of(1, 2, 3, 4)).tolist() == [False, True, False, True]
    assert heard[1:] == [(Change.LOST, [3, 1])]
    reader.release()
    assert (index.statistics().free, index.statistics().withheld) == (0, 2)
    assert store(index, 5, 6) == [4, 2]
    with pytest.raises(CapacityError):
        index.reserve(names_of(7, 8, 9))
    index.clear()
    assert index.statistics().free == 2
    index.resize(5)
    assert index.statistics().free == 3
    index.withhold(None)
    assert (index.statistics().free, index.statistics().withheld) == (5, 0)


def test_nobody_writes_down_what_was_removed() -> None:
    """A dirty block that is removed, by name, by resizing or with all, is dirty no longer, and frees its slot."""
    index = TierIndex(4, write_back=True)
    with index.reserve(names_of(1, 2, 3, 4)) as reservation, reservation.commit() as lease:
        index.mark_dirty(lease)
    index.remove(names_of(2))
    assert (index.statistics().dirty, index.statistics().free) == (3, 1)
    index.resize(3)
    assert ids_of(index.take_dirty(0)[0]) == []
    assert index.statistics().dirty == 2
    index.clear()
    assert (index.statistics().dirty, index.statistics().free, index.statistics().leased) == (0, 3, 0)


def test_what_is_held_beyond_the_end_stays_until_nobody_holds_it() -> None:
    """It can be found and is written down; what comes meanwhile is not put there; then it goes, and is told of."""
    heard: list[tuple[str, list[int]]] = []
    index = TierIndex(6, write_back=True)
    index.on_change = lambda change, names: heard.append((change, ids_of(names)))
    store(index, 1, 2)
    with index.reserve(names_of(3, 4)) as dirty, dirty.commit() as lease:
        index.mark_dirty(lease)
    filling = index.reserve(names_of(5))
    reader = index.lease(names_of(2))
    assert ids_of(index.resize(1, keep_held=True)) == []
    assert index.ready(names_of(1, 2, 3, 4)).all()
    assert store(index, 6) == [1]
    assert not index.fits(names_of(7, 8))
    filling.commit().release()
    reader.release()
    names, writing = index.take_dirty(2)
    assert ids_of(names) == [3, 4]
    writing.release()
    filling.close()
    assert ids_of(index.names_in_order()[0]) == [6]
    assert heard[2:] == [
        (Change.EVICTED, [1]),
        (Change.ADDED, [6]),
        (Change.ADDED, [5]),
        (Change.EVICTED, [5]),
        (Change.EVICTED, [2]),
        (Change.EVICTED, [4, 3]),
    ]
    assert sorted(ids_of(index.give_up(1))) == [2, 3, 4, 5]
    counts = index.statistics()
    assert (counts.ready, counts.leased, counts.pending, counts.doomed, counts.retired) == (1, 0, 0, 0, 5)


def test_changes_are_told_in_order_with_their_reasons() -> None:
    """Whoever listens hears of each of the tier's own readable blocks that comes or goes, and why; of nothing else."""
    now = [0.0]
    heard: list[tuple[str, list[int]]] = []
    index = TierIndex(
        3,
        num_bounce=1,
        ttl_s=5,
        clock=lambda: now[0],
    )
    index.on_change = lambda change, names: heard.append((change, ids_of(names)))
    store(index, 1, 2)
    store(index, 3)
    store(index, 4, 5)
    index.reserve(names_of(1)).close()
    with index.reserve(names_of(9), bounce=True) as passing:
        passing.commit().release()
    index.remove(names_of(4, 7))
    index.resize(2)
    now[0] = 6
    index.expire()
    index.restore(names_of(6), np.array([1]))
    index.clear()
    assert heard == [
        (Change.ADDED, [1, 2]),
        (Change.ADDED, [3]),
        (Change.EVICTED, [2, 1]),
        (Change.ADDED, [4, 5]),
        (Change.EVICTED, [3]),
        (Change.REMOVED, [4]),
        (Change.EXPIRED, [5]),
        (Change.ADDED, [6]),
        (Change.CLEARED, []),
    ]
