"""`TierIndex` against a model that is too simple to be wrong: plain lists and dicts, one block at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.catalog.indexed import ids_of, names_of
from tiered_kv.catalog import Change, Lease, Reservation, SlotState, TierIndex
from tiered_kv.values.errors import CapacityError
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.keys import Names

NUM_IDS = 14
ids = st.lists(st.integers(0, NUM_IDS - 1), max_size=10)
choice = st.integers(0, 1000)


def unique(batch: list[int]) -> list[int]:
    """Drop repeats."""
    return list(dict.fromkeys(batch))


@dataclass(eq=False)
class Block:
    id: int
    slot: int
    state: SlotState = SlotState.PENDING
    num_leases: int = 0
    """A dirty block has one more than it was given."""
    is_unwanted: bool = False
    is_resident: bool = False
    ready_since_s: int = 0

    @property
    def goes_first(self) -> bool:
        """Whether it is the first to go, once nobody leases it."""
        return self.is_unwanted or self.is_resident


@dataclass(eq=False)
class OpenLease:
    real: Lease
    blocks: list[Block]


@dataclass(eq=False)
class OpenReservation:
    real: Reservation
    blocks: list[Block | None]
    """One for each position of the batch that got a slot and has not been committed."""


@dataclass
class Model:
    """Every block in a slot, those that can be found by name, the evictable, coldest first, the dirty, oldest first."""

    occupied: dict[int, Block] = field(default_factory=dict)
    findable: dict[int, Block] = field(default_factory=dict)
    order: list[Block] = field(default_factory=list)
    dirty: list[Block] = field(default_factory=list)

    def free(self, block: Block) -> None:
        """Take a block out of its slot."""
        del self.occupied[block.slot]
        if self.findable.get(block.id) is block:
            del self.findable[block.id]

    def ready(self, batch: list[int]) -> list[Block]:
        """Return the readable blocks of a batch, each once."""
        found = [self.findable[i] for i in unique(batch) if i in self.findable]
        return [block for block in found if block.state == SlotState.READY]


class IndexMachine(RuleBasedStateMachine):
    """Random calls, in any order, on an index and on the model; after each, both must agree in everything."""

    policy: ClassVar[str]
    ttl_s = 10

    @initialize(num_slots=st.integers(0, 10), num_more=st.integers(0, 4), num_bounce=st.integers(0, 4))
    def make(self, num_slots: int, num_more: int, num_bounce: int) -> None:
        """Start empty, at any small size, none included."""
        self.num_slots, self.max_slots, self.num_bounce = num_slots, num_slots + num_more, num_bounce
        self.withheld: set[int] = set()
        self.now_s = 1000
        self.replayed: set[int] = set()
        self.gone: list[int] = []
        self.index = TierIndex(
            num_slots,
            max_slots=self.max_slots,
            num_bounce=num_bounce,
            policy=self.policy,
            ttl_s=self.ttl_s,
            clock=lambda: self.now_s,
            write_back=True,
        )
        self.index.on_change = self.replay
        self.model = Model()
        self.leases: list[OpenLease] = []
        self.reservations: list[OpenReservation] = []

    @rule(batch=ids, bounce=st.booleans())
    def reserve(self, *, batch: list[int], bounce: bool) -> None:
        """Each new name gets a slot; where that is impossible nothing changes. A batch never evicts its own."""
        model = self.model
        wanted = [i for i in unique(batch) if i not in model.findable]
        own = [block for block in model.order if block.id not in batch]
        room = self.bounce if bounce else self.usable
        num_free = sum(slot not in model.occupied for slot in room)
        shortage = max(0, len(wanted) - num_free)
        assert bounce or self.index.fits(names_of(*batch)) == (shortage <= len(own))
        if shortage > (0 if bounce else len(own)):
            before = self.snapshot()
            with pytest.raises(CapacityError, match=rf"^{shortage} more .*slots needed, (none|{len(own)}) evictable$"):
                self.index.reserve(names_of(*batch), bounce=bounce)
            assert self.snapshot() == before
            return
        real = self.index.reserve(names_of(*batch), bounce=bounce)
        evicted = ids_of(real.evicted)
        assert len(evicted) == shortage
        assert set(evicted) <= {block.id for block in own}
        if self.policy == "lru":
            assert evicted == [block.id for block in own[:shortage]]
        for i in evicted:
            block = model.findable[i]
            model.order.remove(block)
            model.free(block)
        taken = [slot for slot in real.slots.tolist() if slot >= 0]
        assert taken == sorted(taken)
        assert all(slot in room for slot in taken)
        blocks: list[Block | None] = [None] * len(batch)
        for position, slot in enumerate(real.slots.tolist()):
            assert (slot >= 0) == (batch[position] in wanted and batch.index(batch[position]) == position)
            if slot >= 0:
                assert slot not in model.occupied
                block = blocks[position] = Block(batch[position], slot)
                model.occupied[slot] = model.findable[block.id] = block
        self.reservations.append(OpenReservation(real, blocks))

    @precondition(lambda self: self.reservations)
    @rule(
        which=choice,
        mask=st.lists(st.booleans(), min_size=10, max_size=10),
        everything=st.booleans(),
        is_held=st.booleans(),
    )
    def commit(self, *, which: int, mask: list[bool], everything: bool, is_held: bool) -> None:
        """What has arrived becomes readable at once, under a lease or as if that had been released at once.

        What was removed meanwhile does not.
        """
        reservation = self.reservations[which % len(self.reservations)]
        ok = None if everything else np.array(mask[: len(reservation.blocks)], dtype=np.bool_)
        real = reservation.real.commit(ok) if is_held else None
        found = reservation.real.keep(ok) if real is None else real.slots
        leased, slots = list[Block](), list[int]()
        for position, block in enumerate(reservation.blocks):
            if block and block.state == SlotState.PENDING and (everything or mask[position]):
                block.state = SlotState.READY
                block.num_leases, block.ready_since_s = 1, self.now_s
                reservation.blocks[position] = None
                leased.append(block)
                slots.append(block.slot)
            else:
                slots.append(-1)
        assert found.tolist() == slots
        if real is None:
            self.see_released(leased)
        else:
            self.leases.append(OpenLease(real, leased))

    @precondition(lambda self: self.reservations)
    @rule(which=choice)
    def close(self, which: int) -> None:
        """A reservation gives back every slot it has not committed, whatever became of the block."""
        reservation = self.reservations.pop(which % len(self.reservations))
        reservation.real.close()
        reservation.real.close()
        for block in reservation.blocks:
            if block:
                self.model.free(block)

    @rule(batch=ids)
    def lease(self, batch: list[int]) -> None:
        """The ready blocks of a batch are held, each once, and nothing else."""
        ready = self.model.ready(batch)
        real = self.index.lease(names_of(*batch))
        slot_of = {block.id: block.slot for block in ready}
        assert real.slots.tolist() == [slot_of.get(i, -1) for i in batch]
        assert real.num_prefix == self.index.ready_prefix(names_of(*batch))
        for block in ready:
            block.num_leases += 1
            block.is_unwanted = block.is_resident = False
            if block in self.model.order:
                self.model.order.remove(block)
        self.leases.append(OpenLease(real, ready))

    @precondition(lambda self: self.leases)
    @rule(which=choice, is_use=st.booleans())
    def release(self, *, which: int, is_use: bool) -> None:
        """The last release makes blocks evictable, tail before head, or ends those that live no longer."""
        lease = self.leases.pop(which % len(self.leases))
        lease.real.release(is_use=is_use)
        lease.real.release(is_use=not is_use)
        self.see_released(lease.blocks)

    def see_released(self, blocks: Sequence[Block]) -> None:
        """A lease of these blocks is no more."""
        hot: list[Block] = []
        first: list[Block] = []
        for block in reversed(blocks):
            block.num_leases -= 1
            if block.num_leases:
                continue
            if block.state == SlotState.READY and self.num_slots <= block.slot < self.max_slots:
                self.gone.append(block.id)
            if block.state == SlotState.DOOMED or block.slot >= self.num_slots:
                self.model.free(block)
            else:
                (first if block.goes_first else hot).append(block)
        self.model.order = first + self.model.order + hot

    @rule(batch=ids)
    def touch(self, batch: list[int]) -> None:
        """Use moves blocks to the hot end, tail before head."""
        self.index.touch(names_of(*batch))
        for block in reversed(self.model.ready(batch)):
            block.is_unwanted = block.is_resident = False
            if not block.num_leases:
                self.model.order.remove(block)
                self.model.order.append(block)

    @rule(batch=ids, probability=st.sampled_from([0.0, 0.2, 0.9]), category=choice)
    def hint(self, *, batch: list[int], probability: float, category: int) -> None:
        """What is not expected goes first, once nobody leases it and unless it is asked for; all else is recent."""
        self.index.hint(names_of(*batch), ReuseHint(probability, category=str(category % 10)))
        told = [block for block in self.model.ready(batch)[::-1] if block.slot not in self.bounce]
        for block in told:
            block.is_unwanted = not probability
        self.place(told)

    @rule(batch=ids)
    def resident(self, batch: list[int]) -> None:
        """What the engine has goes first, once nobody leases it and unless it is asked for."""
        self.index.resident(names_of(*batch))
        told = [block for block in self.model.ready(batch)[::-1] if block.slot not in self.bounce]
        for block in told:
            block.is_resident = True
        self.place(told)

    @rule(batch=ids)
    def leaving(self, batch: list[int]) -> None:
        """What the engine has no more is recent, but for what nobody expects; of other blocks nothing is changed."""
        self.index.leaving(names_of(*batch))
        told = [block for block in self.model.ready(batch)[::-1] if block.is_resident]
        for block in told:
            block.is_resident = False
        self.place([block for block in told if not block.is_unwanted])

    def place(self, told: list[Block]) -> None:
        """Put those of some blocks that are evictable to the end to which they belong now."""
        idle = [block for block in told if not block.num_leases]
        rest = [block for block in self.model.order if block not in idle]
        first = [block for block in idle if block.goes_first]
        self.model.order = first + rest + [block for block in idle if not block.goes_first]

    @rule(batch=ids)
    def remove(self, batch: list[int]) -> None:
        """Removed blocks cannot be found, and their slots are free as soon as nobody uses them."""
        found = [self.model.findable[i] for i in unique(batch) if i in self.model.findable]
        assert self.index.remove(names_of(*batch)) == len(found)
        self.doom(found)

    @rule()
    def clear(self) -> None:
        """Clearing is removing everything."""
        self.index.clear()
        self.doom(list(self.model.findable.values()))

    @rule(batch=ids)
    def restore(self, batch: list[int]) -> None:
        """Restored blocks are evictable, the first one coldest."""
        unknown = [i for i in unique(batch) if i not in self.model.findable]
        slots = [slot for slot in self.usable if slot not in self.model.occupied][::-1]
        pairs = list(zip(unknown, slots, strict=False))
        self.index.restore(names_of(*(i for i, _ in pairs)), np.array([slot for _, slot in pairs], dtype=np.int64))
        for i, slot in pairs:
            block = Block(i, slot, SlotState.READY, ready_since_s=self.now_s)
            self.model.occupied[slot] = self.model.findable[i] = block
            self.model.order.append(block)

    @rule(data=st.data(), keep_held=st.booleans())
    def resize(self, *, data: st.DataObject, keep_held: bool) -> None:
        """Blocks beyond the new end go, at once or when nobody holds them; what is in use there is given up then."""
        self.num_slots = data.draw(st.integers(0, self.max_slots))
        beyond = self.beyond(self.num_slots)
        if keep_held:
            beyond = [block for block in beyond if block.state == SlotState.READY and not block.num_leases]
        gone = self.index.resize(self.num_slots, keep_held=keep_held)
        self.check_gone(beyond, gone, with_others=not keep_held)

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """What was held beyond the end goes."""
        start = data.draw(st.integers(self.num_slots, self.max_slots))
        self.check_gone(self.beyond(start), self.index.give_up(start), with_others=True)

    def beyond(self, start: int) -> list[Block]:
        """Return the blocks in slots from ``start`` on."""
        return [block for block in self.model.findable.values() if start <= block.slot < self.max_slots]

    def check_gone(self, blocks: list[Block], names: Names, *, with_others: bool) -> None:
        """See that these blocks are gone, and those named that could be read; and those that went meanwhile."""
        gone = [block.id for block in blocks if block.state == SlotState.READY]
        if with_others:
            gone += self.gone
            self.gone = []
        assert sorted(ids_of(names)) == sorted(gone)
        self.doom(blocks)

    @rule(data=st.data())
    def withhold(self, data: st.DataObject) -> None:
        """Blocks in some slots go; no such slot is used until others are named, or none."""
        own = st.integers(0, max(0, self.max_slots - 1))
        self.withheld = data.draw(st.sets(own)) & set(range(self.max_slots))
        held = [block for block in self.model.findable.values() if block.slot in self.withheld]
        is_withheld = np.isin(np.arange(self.max_slots), list(self.withheld))
        num_lost = self.index.withhold(is_withheld if self.withheld else None)
        assert num_lost == sum(block.state == SlotState.READY for block in held)
        self.doom(held)

    @property
    def usable(self) -> list[int]:
        """The own slots that blocks may go to."""
        return [slot for slot in range(self.num_slots) if slot not in self.withheld]

    @rule(seconds=st.integers(1, 8))
    def wait(self, seconds: int) -> None:
        """Time passes."""
        self.now_s += seconds

    @rule(limit=st.integers(1, 20))
    def expire(self, limit: int) -> None:
        """A round of the tier removes just the blocks that are ready for ``ttl_s`` or longer."""
        own = [block for block in self.model.findable.values() if block.slot not in self.bounce]
        ready = [block for block in own if block.state == SlotState.READY]
        ready = [block for block in ready if block.slot < self.num_slots]
        old = [block for block in ready if self.now_s - block.ready_since_s >= self.ttl_s]
        gone = [i for _ in range(2 * self.num_slots // limit + 2) for i in ids_of(self.index.expire(limit=limit))]
        assert sorted(gone) == sorted(block.id for block in old)
        self.doom(old)

    @precondition(lambda self: self.leases)
    @rule(which=choice)
    def mark_dirty(self, which: int) -> None:
        """A dirty block of the tier's own is not evicted, whatever becomes of the lease it was marked under."""
        lease = self.leases[which % len(self.leases)]
        self.index.mark_dirty(lease.real)
        for block in lease.blocks:
            if block.state == SlotState.READY and block.slot not in self.bounce and block not in self.model.dirty:
                block.num_leases += 1
                self.model.dirty.append(block)

    @rule(n=st.integers(0, 10))
    def take_dirty(self, n: int) -> None:
        """Dirty blocks are taken the oldest first, under a lease, and are dirty no longer."""
        taken, self.model.dirty = self.model.dirty[:n], self.model.dirty[n:]
        names, lease = self.index.take_dirty(n)
        assert ids_of(names) == [block.id for block in taken]
        assert lease.slots.tolist() == [block.slot for block in taken]
        self.leases.append(OpenLease(lease, taken))

    @property
    def bounce(self) -> range:
        """The bounce slots."""
        return range(self.max_slots, self.max_slots + self.num_bounce)

    def replay(self, change: Change, names: Names) -> None:
        """Follow the change log as one who sees nothing else."""
        ids = set(ids_of(names))
        if change is Change.CLEARED:
            assert not ids
            self.replayed.clear()
        elif change is Change.ADDED:
            assert len(ids) == len(names) > 0
            assert not ids & self.replayed
            self.replayed |= ids
        else:
            assert len(ids) == len(names) > 0
            assert ids <= self.replayed
            self.replayed -= ids

    def doom(self, blocks: list[Block]) -> None:
        """Make blocks unfindable, and free those that nobody uses."""
        for block in blocks:
            del self.model.findable[block.id]
            if block in self.model.dirty:
                self.model.dirty.remove(block)
                block.num_leases -= 1
            if block in self.model.order:
                self.model.order.remove(block)
            if block.state == SlotState.READY and not block.num_leases:
                self.model.free(block)
            else:
                block.state = SlotState.DOOMED

    def snapshot(self) -> object:
        """Return everything that can be seen of the index."""
        slots, states = self.index.find(names_of(*range(NUM_IDS)))
        names, order = self.index.names_in_order()
        return self.index.statistics(), slots.tolist(), states.tolist(), names.tolist(), order.tolist()

    @invariant()
    def same_blocks_in_the_same_slots(self) -> None:
        """Every name is found just where it was put: a leased block, or one in flight, never moves."""
        slots, states = self.index.find(names_of(*range(NUM_IDS)))
        expected = [self.model.findable.get(i) for i in range(NUM_IDS)]
        assert slots.tolist() == [block.slot if block else -1 for block in expected]
        assert states.tolist() == [block.state if block else SlotState.FREE for block in expected]

    @invariant()
    def same_counts(self) -> None:
        """Slots are conserved, and every count is that of the model."""
        counts = self.index.statistics()
        blocks = [block for block in self.model.occupied.values() if block.slot not in self.bounce]
        states = [block.state for block in blocks]
        assert counts.num_slots == self.num_slots
        assert counts.ready == states.count(SlotState.READY)
        assert counts.pending == states.count(SlotState.PENDING)
        assert counts.doomed == states.count(SlotState.DOOMED)
        assert counts.leased == sum(block.num_leases > 0 for block in blocks)
        assert counts.evictable == len(self.model.order)
        assert counts.dirty == len(self.model.dirty)
        empty = [slot for slot in range(self.max_slots + self.num_bounce) if slot not in self.model.occupied]
        assert counts.free == sum(slot in self.usable for slot in empty)
        assert counts.withheld == sum(slot < self.num_slots and slot in self.withheld for slot in empty)
        assert counts.retired == sum(self.num_slots <= slot < self.max_slots for slot in empty)
        assert counts.bounce_free == sum(slot in self.bounce for slot in empty)

    @invariant()
    def same_order(self) -> None:
        """The order of use holds each evictable block once, then the leased ones; that of the slots the same."""
        names, slots = self.index.names_in_order()
        num_evictable = len(self.model.order)
        order = [(block.id, block.slot) for block in self.model.order]
        own = [block for block in self.model.findable.values() if block.slot not in self.bounce]
        leased = [block for block in own if block.num_leases]
        real = list(zip(ids_of(names), slots.tolist(), strict=True))
        names, slots = self.index.readable()
        assert list(zip(ids_of(names), slots.tolist(), strict=True)) == sorted(real, key=lambda each: each[1])
        assert sorted(real[num_evictable:]) == sorted((block.id, block.slot) for block in leased)
        if self.policy == "lru":
            assert real[:num_evictable] == order
        else:
            assert sorted(real[:num_evictable]) == sorted(order)

    @invariant()
    def same_by_the_change_log(self) -> None:
        """What the change log adds up to is what is there: the tier's own readable blocks."""
        assert self.replayed == set(ids_of(self.index.names_in_order()[0]))

    def teardown(self) -> None:
        """When every right is given back, nothing is leased, pending or doomed."""
        while self.reservations:
            self.close(0)
        self.take_dirty(len(self.model.dirty))
        while self.leases:
            self.release(which=0, is_use=False)
        counts = self.index.statistics()
        assert counts.leased == counts.pending == counts.doomed == counts.dirty == 0
        assert counts.evictable == counts.ready
        assert counts.free + counts.ready == len(self.usable)
        assert counts.bounce_free == self.num_bounce


class LRUMachine(IndexMachine):
    policy = "lru"


class ARCMachine(IndexMachine):
    policy = "arc"


class MQMachine(IndexMachine):
    policy = "mq"


class LHDMachine(IndexMachine):
    policy = "lhd"


TestLRU = pytest.mark.slow(LRUMachine.TestCase)
TestARC = pytest.mark.slow(ARCMachine.TestCase)
TestMQ = pytest.mark.slow(MQMachine.TestCase)
TestLHD = pytest.mark.slow(LHDMachine.TestCase)
TestLRU.settings = TestARC.settings = TestMQ.settings = TestLHD.settings = settings(
    max_examples=150, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)
