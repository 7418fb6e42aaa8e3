"""How old blocks get, and how long they lie idle before they go."""

import numpy as np

from tiered_kv.catalog.books import Change
from tiered_kv.telemetry.block_sample import SampledLives
from tiered_kv.tiers.fates import IndexPlace
from tiered_kv.values.keys import Names

CPU, NVME = IndexPlace("cpu", 0, 0), IndexPlace("nvme", 0, 0)


def name(block: int) -> Names:
    """Return the name of one block."""
    return np.random.default_rng(block).integers(2**64, size=(1, 4), dtype=np.uint64)


class Clock:
    """Says what it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def test_an_evicted_block_tells_its_age_and_how_long_it_was_idle() -> None:
    """By tier: since it came there, and since it was used last."""
    clock = Clock()
    lives = SampledLives(64, clock=clock)
    lives.use("store", name(1))
    lives.changed(CPU, Change.ADDED, name(1))
    clock.now = 20.0
    lives.changed(NVME, Change.ADDED, name(1))
    clock.now = 70.0
    lives.use("load", name(1))
    clock.now = 90.0
    lives.changed(CPU, Change.EVICTED, name(1))
    clock.now = 120.0
    lives.changed(NVME, Change.EVICTED, name(1))
    counts = lives.counts()
    assert {tier: ages_s.total for tier, ages_s in counts.ages_s.items()} == {"cpu": 90.0, "nvme": 100.0}
    assert {tier: idle_s.total for tier, idle_s in counts.idle_s.items()} == {"cpu": 20.0, "nvme": 50.0}


def test_only_an_eviction_has_an_age() -> None:
    """Not what was removed, nor what was there before anybody watched; a block that comes back is young again."""
    clock = Clock()
    lives = SampledLives(64, clock=clock)
    lives.changed(CPU, Change.EVICTED, name(1))
    for change in (Change.REMOVED, Change.EXPIRED, Change.CORRUPT, Change.LOST):
        lives.changed(CPU, Change.ADDED, name(2))
        lives.changed(CPU, change, name(2))
    assert lives.counts().ages_s == {}
    clock.now = 5.0
    lives.changed(CPU, Change.CLEARED, name(2)[:0])
    lives.changed(CPU, Change.ADDED, name(2))
    clock.now = 6.0
    lives.changed(CPU, Change.EVICTED, name(2))
    assert lives.counts().ages_s["cpu"].total == 1.0


def test_memory_is_bounded() -> None:
    """Of the blocks that are there, so many are remembered."""
    lives = SampledLives(1 << 20, most_samples=256)
    for seed in range(40):
        names = np.random.default_rng(seed).integers(2**64, size=(1 << 18, 4), dtype=np.uint64)
        lives.changed(CPU, Change.ADDED, names)
    lives.counts()
    assert len(lives._since) == 256  # noqa: SLF001 - no public call tells it


def test_an_event_loop_replays_a_little_at_a_time() -> None:
    """It goes on with the rest when it asks again; other threads replay all."""
    lives = SampledLives(1 << 12)
    for seed in range(4):
        lives.use("load", np.random.default_rng(seed).integers(2**64, size=(1 << 10, 4), dtype=np.uint64))
    assert lives.counts(on_loop=True).ghost.requested == 1 << 10
    assert lives.counts(on_loop=True).ghost.requested == 2 << 10
    assert lives.counts().ghost.requested == 4 << 10


def test_an_event_loop_waits_for_no_thread_that_replays() -> None:
    """It gets what was counted before."""
    lives = SampledLives(64)
    lives.use("load", name(1))
    before = lives.counts()
    lives.use("load", name(2))
    with lives._lock:  # noqa: SLF001 - as a thread has it while it replays
        assert lives.counts(on_loop=True) is before
    assert lives.counts().ghost.requested == 2
