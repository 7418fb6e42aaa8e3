"""The promises of `TierIndex`, one by one; test_index_model.py checks them in every order."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.catalog.indexed import every_policy, ids_of, names_of, store
from tiered_kv.catalog import SlotState, TierIndex
from tiered_kv.values.errors import CapacityError, ClosedError, ConfigurationError
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.keys import Names

ordered_by_use = pytest.mark.parametrize("policy", ["lru", "arc", "mq", "lhd"])
"""Those that evict first what was used longest ago, all else being equal: one that draws lots is not of them."""


def everything(index: TierIndex) -> object:
    """Return all that can be seen of an index with names up to 9."""
    slots, states = index.find(names_of(*range(10)))
    return index.statistics(), slots.tolist(), states.tolist(), index.names_in_order()[1].tolist()


@every_policy
def test_pending_until_committed(policy: str) -> None:
    """A reserved block is pending: found, not readable; from its commit on it is ready, under a lease, with no gap."""
    index = TierIndex(4, policy=policy)
    with index.reserve(names_of(1, 2)) as reservation:
        assert index.find(names_of(1, 2, 3))[1].tolist() == [SlotState.PENDING, SlotState.PENDING, SlotState.FREE]
        assert index.lease(names_of(1, 2)).num_prefix == 0
        lease = reservation.commit(np.array([True, False]))
        assert lease.slots.tolist() == [reservation.slots[0], -1]
        assert index.ready_prefix(names_of(1, 2)) == 1
        assert index.statistics().leased == 1
        assert index.statistics().evictable == 0
    assert index.find(names_of(2))[0].tolist() == [-1]
    assert index.statistics().free == 3
    lease.release()
    assert index.statistics().evictable == 1


def test_who_asks_again_about_the_same_names_hears_of_every_change() -> None:
    """What was found is kept for whoever asks again, until it is no longer so."""
    index = TierIndex(4, num_bounce=2)
    asked = names_of(1, 2, 3)

    def is_as_if_asked_anew() -> bool:
        kept, anew = index.find(asked), index.find(asked.copy())
        return (kept[0].tolist(), kept[1].tolist()) == (anew[0].tolist(), anew[1].tolist())

    def changes() -> Iterator[object]:
        with index.reserve(asked) as reservation:
            yield "reserved"
            lease = reservation.commit(np.array([True, True, False]))
            yield "committed"
        yield "given back"
        lease.release()
        with index.reserve(names_of(3), bounce=True) as reservation:
            yield "reserved to pass"
            lease = reservation.commit()
        yield "passing"
        lease.release()
        yield "passed"
        yield index.remove(names_of(1))
        yield store(index, 4, 5, 6)
        yield index.resize(2)
        yield index.resize(4)
        yield store(index, 1, 2, 3)
        yield index.withhold(np.array([True, True, False, False]))
        yield index.withhold(None)
        index.clear()
        yield "clear"
        index.restore(asked, np.arange(3))
        yield "restore"
        yield index.take_dirty(0)

    assert is_as_if_asked_anew()
    index.find(asked)  # what is found is kept when the next change comes
    for change in changes():
        assert is_as_if_asked_anew(), change
        index.find(asked)
    slots, _ = index.find(asked)
    with pytest.raises(ValueError, match="read-only"):
        slots[0] = 3


@every_policy
def test_error_gives_everything_back(policy: str) -> None:
    """An error inside the ``with`` blocks gives back every slot and every lease."""
    index = TierIndex(4, policy=policy)
    store(index, 1)
    before = index.statistics()
    with pytest.raises(OSError, match="disk"), index.lease(names_of(1)), index.reserve(names_of(1, 2, 3)):
        raise OSError("disk on fire")
    assert index.statistics() == before


@every_policy
def test_infeasible_batch_changes_nothing(policy: str) -> None:
    """A batch that cannot be had says by how much, and leaves slots, names and the order of use as they were."""
    index = TierIndex(4, policy=policy)
    store(index, 1, 2, 3, 4)
    with index.lease(names_of(2, 3)):
        before = everything(index)
        with pytest.raises(CapacityError, match=r"^3 more slots needed, 1 evictable$"):
            index.reserve(names_of(1, 5, 6, 7))
        assert everything(index) == before


@every_policy
def test_batch_never_evicts_its_own(policy: str) -> None:
    """Blocks of the batch that are there already stay, though they are the coldest."""
    index = TierIndex(4, policy=policy)
    for block in (1, 2, 3, 4):
        store(index, block)
    assert store(index, 1, 5, 2) in ([3], [4])
    assert index.ready_prefix(names_of(1, 5, 2)) == 3


def test_what_is_leased_takes_none_of_the_room() -> None:
    """A long batch fits as far as its head, there or to be added, has the free slots and those of what nobody holds."""
    index, batch = TierIndex(6), names_of(1, 2, 3, 4, 5, 6, 7, 8)
    store(index, 2, 3, 5, 10, 11, 12)
    assert (index.num_fitting(batch), index.room_for(batch)) == (6, 3)
    with index.lease(names_of(2, 3)):
        assert (index.num_fitting(batch), index.room_for(batch)) == (6, 3)
    with index.lease(names_of(10, 11)):
        assert (index.num_fitting(batch), index.room_for(batch)) == (4, 2)


@every_policy
def test_duplicates_are_harmless(policy: str) -> None:
    """A repeated name gets one slot and counts one lease."""
    index = TierIndex(4, policy=policy)
    with index.reserve(names_of(1, 1, 2, 1)) as reservation:
        assert (reservation.slots >= 0).tolist() == [True, False, True, False]
        reservation.commit().release()
    lease = index.lease(names_of(1, 1, 2))
    assert lease.num_prefix == 3
    assert index.statistics().leased == 2
    lease.release()
    index.touch(names_of(2, 2, 1))
    assert index.remove(names_of(1, 1)) == 1
    assert index.statistics().evictable == index.statistics().ready == 1


def test_tail_goes_before_head() -> None:
    """Of a prefix that was stored or used as a whole, the last block is evicted first."""
    index = TierIndex(4)
    store(index, 1, 2, 3, 4)
    assert store(index, 5) == [4]
    index.lease(names_of(1, 2, 3)).release()
    assert store(index, 6) == [5]
    index.touch(names_of(1, 2, 3))
    assert store(index, 7, 8) == [6, 3]


def test_release_in_any_order_frees_at_the_last() -> None:
    """A block with several readers stays put until the last of them is done, removed or not."""
    index = TierIndex(2)
    store(index, 1, 2)
    first, second = index.lease(names_of(1)), index.lease(names_of(1, 2))
    first.release()
    first.release()
    assert index.statistics().leased == 2
    index.remove(names_of(1))
    assert index.find(names_of(1))[0].tolist() == [-1]
    assert index.statistics().free == 0
    second.release()
    assert index.statistics().free == 1
    assert index.statistics().doomed == 0


def test_a_split_lease_is_given_back_slot_by_slot() -> None:
    """Each slot is held until its own right is given back; the lease itself holds nothing any more."""
    index = TierIndex(4)
    store(index, 1, 2, 3)
    lease = index.lease(names_of(1, 2, 3, 2))
    give_back = lease.split()
    lease.release()
    assert index.statistics().leased == 3
    give_back(lease.slots[[1]])
    assert (index.statistics().leased, index.statistics().evictable) == (2, 1)
    give_back(lease.slots[[0, 2]])
    assert (index.statistics().leased, index.statistics().evictable) == (0, 3)
    with pytest.raises(ClosedError):
        lease.split()


@pytest.mark.parametrize("policy", ["mq", "lhd", "arc"])
def test_to_be_leased_is_no_use_unless_the_release_says_so(policy: str) -> None:
    """Blocks that are moved, written down or looked at count as used no more often for it; what is served does."""
    touched, leased, moved = (TierIndex(64, policy=policy) for _ in range(3))
    for index in (touched, leased, moved):
        store(index, *range(64))
    for _ in range(8):
        touched.touch(names_of(*range(16)))
        leased.lease(names_of(*range(16))).release(is_use=True)
        moved.lease(names_of(*range(16))).release()
        moved.lease(names_of(*range(16, 32))).release()
    for index in (touched, leased):
        assert set(store(index, *range(100, 148))) == set(range(16, 64))
    assert set(store(moved, *range(100, 148))) == set(range(48)) - set(range(16, 32)) | set(range(48, 64))


@every_policy
def test_what_the_engine_has_goes_first_until_it_leaves_there(policy: str) -> None:
    """Whoever reads it meanwhile; what has left stays like others, but for what nobody expects any more."""
    index = TierIndex(4, policy=policy)
    store(index, 1, 2, 3, 4)
    lease = index.lease(names_of(3, 4))
    index.resident(names_of(2, 3, 9))
    lease.release()
    assert {*store(index, 5), *store(index, 6)} == {2, 3}
    index.resident(names_of(1, 4))
    index.hint(names_of(1), ReuseHint(0.0))
    index.leaving(names_of(1, 4))
    assert store(index, 7) == [1]


@every_policy
def test_removed_while_pending_never_commits(policy: str) -> None:
    """A fill in flight of a removed block is not committed; its name can be stored anew at once, elsewhere."""
    index = TierIndex(4, policy=policy)
    with index.reserve(names_of(1, 2)) as doomed:
        assert index.remove(names_of(1)) == 1
        with index.reserve(names_of(1)) as again:
            assert again.slots[0] not in doomed.slots
            lease = doomed.commit()
            assert lease.slots.tolist() == [-1, doomed.slots[1]]
            again.commit().release()
        lease.release()
    assert index.find(names_of(1))[0].tolist() == again.slots.tolist()
    assert index.statistics().ready == 2
    assert index.statistics().free == 2


@every_policy
def test_clear_dooms_what_is_in_use(policy: str) -> None:
    """After a clear nothing is found, and each slot is free once its user is done."""
    index = TierIndex(4, num_bounce=1, policy=policy)
    store(index, 1, 2)
    lease = index.lease(names_of(1))
    reservation = index.reserve(names_of(3))
    index.clear()
    assert (index.find(names_of(1, 2, 3))[0] == -1).all()
    assert index.statistics().free == 2
    assert index.statistics().doomed == 2
    assert reservation.commit().num_prefix == 0
    reservation.close()
    lease.release()
    assert index.statistics().free == 4
    assert index.statistics().bounce_free == 1


def test_bounce_slots_are_counted_for_whoever_took_them() -> None:
    """Until they are free again, however they become so: by the last lease, uncommitted, or removed meanwhile."""
    index = TierIndex(2, num_bounce=8)
    with index.reserve(names_of(1, 2, 3, 4), bounce=True, taker=1) as mine:
        with index.reserve(names_of(5, 6), bounce=True, taker=2), index.reserve(names_of(7), taker=2):
            assert [index.num_bounce_taken(taker) for taker in range(4)] == [0, 4, 2, 0]
        assert [index.num_bounce_taken(taker) for taker in range(3)] == [0, 4, 0]
        index.remove(names_of(2))
        lease = mine.commit(np.array([True, True, True, False]))
        index.remove(names_of(3))
    assert index.num_bounce_taken(1) == 2
    lease.release()
    assert [index.num_bounce_taken(taker) for taker in range(3)] == [0, 0, 0]
    assert index.statistics().bounce_free == 8


@every_policy
@pytest.mark.parametrize("num_slots", [0, 2])
def test_blocks_in_bounce_slots_live_by_their_leases(policy: str, num_slots: int) -> None:
    """A block in a bounce slot can be read by all who lease it, and is gone with the last of them."""
    index = TierIndex(num_slots, num_bounce=2, policy=policy)
    with index.reserve(names_of(1, 2), bounce=True) as reservation:
        assert (reservation.slots >= num_slots).all()
        first = reservation.commit()
    second = index.lease(names_of(1))
    first.release()
    assert index.ready_prefix(names_of(1, 2)) == 1
    with pytest.raises(CapacityError, match=r"^1 more bounce slots needed, none evictable$"):
        index.reserve(names_of(3, 4), bounce=True)
    second.release()
    assert (index.find(names_of(1, 2))[0] == -1).all()
    assert index.statistics().bounce_free == 2


def test_blocks_in_bounce_slots_do_not_fill_the_tier() -> None:
    """Counts are of the tier's own slots, however many blocks pass through the others: no tier is fuller than full."""
    index = TierIndex(2, num_bounce=8)
    store(index, 1, 2)
    with index.reserve(names_of(3, 4, 5, 6, 7), bounce=True) as reservation:
        arrived = reservation.commit(np.array([True, True, True, False, False]))
        index.remove(names_of(5))
        counts = index.statistics()
        assert (counts.ready, counts.pending, counts.doomed, counts.leased, counts.free) == (2, 0, 0, 0, 0)
        assert counts.bounce_free == 8 - 5
    arrived.release()


def test_slots_come_in_runs() -> None:
    """Slots are neighbours, ascending in batch order, also when those of evicted blocks are given out again."""
    index = TierIndex(100)
    for start in range(0, 100, 10):
        store(index, *range(start, start + 10))
    with index.reserve(names_of(*range(1000, 1020))) as reservation:
        assert (np.diff(reservation.slots) == 1).all()


def test_commit_in_parts_and_after_closing() -> None:
    """Disjoint parts are committed one by one, each once; after closing there is nothing left to commit."""
    index = TierIndex(3)
    with index.reserve(names_of(1, 2, 3)) as reservation:
        first = reservation.commit(np.array([True, False, False]))
        second = reservation.commit(np.array([True, True, False]))
        assert first.num_prefix == 1
        assert second.slots.tolist() == [-1, reservation.slots[1], -1]
    for late in (reservation.commit, reservation.keep):
        with pytest.raises(ClosedError):
            late()
    first.release()
    second.release()
    assert index.statistics().free == 1


@ordered_by_use
def test_restore_what_was_written_down(policy: str) -> None:
    """Names and slots in order, taken from one index, make another that finds the same and evicts the same first."""
    index = TierIndex(4, policy=policy)
    store(index, 1, 2, 3)
    index.touch(names_of(3))
    leased = index.lease(names_of(2))
    names, slots = index.names_in_order()
    assert ids_of(names)[-1] == 2
    other = TierIndex(4, policy=policy)
    other.restore(names, slots)
    assert (other.find(names)[0] == slots).all()
    assert ids_of(other.names_in_order()[0]) == ids_of(names)
    assert other.statistics().evictable == 3
    assert store(other, 4, 5) == ids_of(names[:1])
    leased.release()


@pytest.mark.parametrize(
    ("names", "slots"),
    [(names_of(5, 6), [1, 1]), (names_of(5, 5), [1, 2]), (names_of(1), [3]), (names_of(5), [0]), (names_of(5), [4])],
    ids=["slot twice", "name twice", "name known", "slot taken", "no such slot"],
)
def test_restore_refuses_contradictions(names: Names, slots: list[int]) -> None:
    """A journal that contradicts itself or the index changes nothing."""
    index = TierIndex(4)
    store(index, 1)
    before = index.statistics()
    with pytest.raises(ConfigurationError):
        index.restore(names, np.array(slots, dtype=np.int64))
    assert index.statistics() == before
    assert index.ready_prefix(names_of(1)) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: TierIndex(-1),
        lambda: TierIndex(1, num_bounce=-1),
        lambda: TierIndex(2**31),
        lambda: TierIndex(1, policy="no such policy"),
    ],
    ids=["negative", "negative bounce slots", "too many", "unknown policy"],
)
def test_impossible_indexes(make: Callable[[], TierIndex]) -> None:
    """An index that can never work is refused before anything is allocated."""
    with pytest.raises(ConfigurationError):
        make()


@every_policy
def test_long_prefixes_over_chunks(policy: str) -> None:
    """A prefix of many chunks, stored in pieces that lie apart, is counted to its exact end."""
    index = TierIndex(6_000, policy=policy)
    pieces = [range(start, start + 700) for start in range(0, 4_200, 700)]
    for piece in (pieces[3], pieces[0], pieces[5], pieces[1], pieces[4], pieces[2]):
        store(index, *piece)
    names = names_of(*range(4_500))
    assert index.ready_prefix(names) == 4_200
    index.remove(names_of(3_333))
    assert index.ready_prefix(names) == 3_333
    index.remove(names_of(0))
    assert index.ready_prefix(names) == 0
    assert index.ready(names).sum() == 4_198


def test_only_what_is_new_gets_a_slot() -> None:
    """What is there, what another fills and what is named twice get slot -1."""
    index = TierIndex(8)
    store(index, 1)
    with index.reserve(names_of(2)), index.reserve(names_of(1, 2, 3, 3)) as reservation:
        assert [slot if slot < 0 else "a slot" for slot in reservation.slots.tolist()] == [-1, -1, "a slot", -1]


def test_what_is_kept_is_held_by_nobody_and_goes_tail_first() -> None:
    """As if a lease had been released at once; bounce slots, which live as long as their lease, are free again."""
    index = TierIndex(3, num_bounce=2, policy="lru")
    with index.reserve(names_of(1, 2, 3)) as reservation:
        assert reservation.keep(np.array([True, True, False])).tolist() == [0, 1, -1]
        assert reservation.keep().tolist() == [-1, -1, 2]
    assert index.statistics().leased == 0
    assert index.names_in_order()[1].tolist() == [1, 0, 2]
    with index.reserve(names_of(4, 5), bounce=True) as passing:
        assert passing.keep().tolist() == [3, 4]
    assert (index.bounce_free.num, index.ready_prefix(names_of(4))) == (2, 0)
