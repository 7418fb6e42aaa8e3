"""The order of use against a plain list."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.catalog.slots import FreeSlots, SlotQueue

NUM_SLOTS = 12
batches = st.lists(st.integers(0, NUM_SLOTS - 1), unique=True, max_size=NUM_SLOTS)


@given(steps=st.lists(st.tuples(st.sampled_from(["push", "push_cold", "remove", "remove in order"]), batches)))
def test_queue_is_a_list(steps: list[tuple[str, list[int]]]) -> None:
    """Slots come out coldest first, however they went in and whatever left in between, neighbours or not."""
    queue = SlotQueue(NUM_SLOTS)
    model: list[int] = []
    for step, batch in steps:
        if step == "push":
            new = [slot for slot in batch if slot not in model]
            queue.push(np.array(new, dtype=np.int64))
            model = model + new
        elif step == "push_cold":
            new = [slot for slot in batch if slot not in model]
            queue.push_cold(np.array(new, dtype=np.int64))
            model = new + model
        else:
            old = [slot for slot in batch if slot in model]
            if step == "remove in order":
                old.sort(key=model.index)
            queue.remove(np.array(old, dtype=np.int64))
            model = [slot for slot in model if slot not in old]
        assert queue.head(len(model)).tolist() == model
        assert len(queue) == len(model)
        assert [slot in queue for slot in range(NUM_SLOTS)] == [slot in model for slot in range(NUM_SLOTS)]


@given(order=batches, n=st.integers(0, 15), skip=batches)
def test_head_skips_and_takes_nothing_out(order: list[int], n: int, skip: list[int]) -> None:
    """The head is what is coldest but for what is skipped; asking changes nothing, and asking for more gives all."""
    queue = SlotQueue(NUM_SLOTS)
    queue.push(np.array(order, dtype=np.int64))
    skipped = [slot for slot in skip if slot in order]
    expected = [slot for slot in order if slot not in skipped][:n]
    assert queue.head(n, skip=np.array(skipped, dtype=np.int64)).tolist() == expected
    assert queue.head(NUM_SLOTS).tolist() == order


def test_cleared_queue_is_empty() -> None:
    """Clearing takes every slot out and leaves a queue that works."""
    queue = SlotQueue(NUM_SLOTS)
    queue.push(np.arange(5))
    queue.clear()
    assert len(queue) == 0
    assert 3 not in queue
    queue.push(np.array([4, 2]))
    assert queue.head(9).tolist() == [4, 2]


def test_free_slots_come_in_ascending_runs() -> None:
    """The lowest ids go first, and what was freed together is given out together, in order."""
    free = FreeSlots(10, range(100, 110))
    assert free.take(4).tolist() == [100, 101, 102, 103]
    assert free.take(3).tolist() == [104, 105, 106]
    free.give(np.array([103, 101, 102]))
    assert free.take(3).tolist() == [101, 102, 103]
    assert free.num == 3
    free.reset(np.array([100, 105]))
    assert free.take(2).tolist() == [100, 105]
