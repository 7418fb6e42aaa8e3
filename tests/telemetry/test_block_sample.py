"""Which blocks are sampled, and how much is remembered of them."""

import tracemalloc

import numpy as np

from tiered_kv.telemetry import block_sample
from tiered_kv.telemetry.block_sample import Sampler
from tiered_kv.values.keys import Names

FILE = block_sample.__file__


def some(num_blocks: int, seed: int = 0) -> Names:
    """Return names as a hash would make them."""
    return np.random.default_rng(seed).integers(2**64, size=(num_blocks, 4), dtype=np.uint64)


def test_of_few_blocks_all_are_sampled_in_order() -> None:
    """What happened, when and where, however many calls were made before somebody looks."""
    times = iter(range(100))
    sampler = Sampler(1.0, clock=lambda: float(next(times)))
    for number in range(20):
        sampler.note("added" if number % 2 else "load", some(200, number), f"tier {number}")
    taken = sampler.take()
    assert [at for (at, _, _), _ in taken] == list(range(20))
    assert [tier for (_, _, tier), _ in taken] == [f"tier {number}" for number in range(20)]
    assert [len(set(blocks)) for _, blocks in taken] == [200] * 20
    assert sampler.take() == []


def test_a_block_is_sampled_always_or_never() -> None:
    """In whatever call it is; and about as many as was asked for."""
    sampler, names = Sampler(0.1), some(10_000)
    sampler.note("load", names)
    for start in range(0, len(names), 100):
        sampler.note("store", names[start : start + 100])
    (_, first), *others = sampler.take()
    assert [block for _, blocks in others for block in blocks] == first
    assert 800 < len(first) < 1200


def test_memory_is_bounded_though_nobody_looks() -> None:
    """The latest 65,536 sampled blocks are remembered, and little besides."""
    sampler = Sampler(1.0)
    for number in range(200):
        sampler.note("load", some(1000), str(number))
    taken = sampler.take()
    assert taken[-1][0][2] == "199"
    assert sum(len(blocks) for _, blocks in taken) <= (1 << 16) + 2048


def test_calls_without_a_sampled_block_leave_nothing_behind() -> None:
    """However many they are: neither those of no blocks, nor those of blocks that are not sampled."""
    sampler, names = Sampler(1 / 1024), some(1 << 14)
    tracemalloc.start()
    try:
        for n in range(len(names)):
            sampler.note("load", names[n : n + 1])
            sampler.note("load", names[:0])
        there = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(inclusive=True, filename_pattern=FILE)])
    finally:
        tracemalloc.stop()
    assert sum(each.size for each in there.traces) < 200_000


def test_so_much_can_be_taken_at_once() -> None:
    """The rest waits for the next call, in order."""
    sampler = Sampler(1.0)
    for number in range(4):
        sampler.note("load", some(2000, number), str(number))
    assert [[tier for (_, _, tier), _ in sampler.take(3000)] for _ in range(3)] == [["0", "1"], ["2", "3"], []]
