"""The ghost curve beside an exact replay of the same requests."""

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from tiered_kv.keys import Names
from tiered_kv.telemetry.ghost import SIZES, GhostCache


def names_of(blocks: Iterable[int]) -> Names:
    """Return names as a hash would make them: the same for the same block, and all else chance."""
    return np.stack([np.random.default_rng(block).integers(2**64, size=4, dtype=np.uint64) for block in blocks])


def exact_hit_rate(requests: Iterable[Sequence[int]], room: int) -> float:
    """Replay all requests in one LRU cache."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    for prompt in requests:
        for block in prompt:
            total += 1
            if block in held:
                hits += 1
                held.move_to_end(block)
            else:
                held[block] = None
                if len(held) > room:
                    held.popitem(last=False)
    return hits / total


def trace(num_requests: int) -> list[list[int]]:
    """Return prompts of chats: a system prompt that many share, a history that grows; some come back."""
    chance = random.Random(1)
    weights = [1 / (n + 1) for n in range(300)]
    turns = [0] * 300
    requests = []
    for _ in range(num_requests):
        (chat,) = chance.choices(range(300), weights)
        turns[chat] = turns[chat] % 12 + 1
        system = [1_000_000 + 100 * (chat % 5) + n for n in range(20)]
        requests.append(system + [1_000 * chat + n for n in range(4 * turns[chat])])
    return requests


@pytest.mark.parametrize("direction", ["load", "store"])
def test_the_curve_is_within_two_hundredths_of_an_exact_replay(direction: str) -> None:
    """At each size, from a sample that holds a fraction of the blocks."""
    requests, num_blocks = trace(4000), 2000
    ghost = GhostCache(num_blocks, most_samples=2048)
    assert ghost.rate < 0.3
    blocks = sorted({block for prompt in requests for block in prompt})
    table = dict(zip(blocks, names_of(blocks), strict=True))
    for start in range(0, len(requests), 1000):
        for prompt in requests[start : start + 1000]:
            ghost.use("load" if direction == "load" else "store", np.stack([table[block] for block in prompt]))
        counts = ghost.counts()
    for size in SIZES:
        exact = exact_hit_rate(requests, int(num_blocks * size))
        assert abs(counts.hits[size] / counts.requested - exact) <= 0.02, (size, exact)
    assert counts.hits[0.25] < 0.9 * counts.hits[4.0]  # it is a curve


def test_what_a_load_missed_and_a_store_brought_was_asked_for_once() -> None:
    """One request of the engine counts once, however many calls it makes; what is stored unasked counts as well."""
    ghost = GhostCache(64)
    ghost.use("load", names_of(range(8)))
    ghost.use("store", names_of(range(8)))
    assert (ghost.counts().requested, ghost.counts().hits[1.0]) == (8, 0)
    ghost.use("load", names_of(range(8)))
    ghost.use("store", names_of(range(8, 10)))
    assert (ghost.counts().requested, ghost.counts().hits[1.0]) == (18, 8)


def test_gaps_between_uses_are_seen() -> None:
    """How long a block was not used before it was used again."""
    times = iter([0.0, 50.0])
    ghost = GhostCache(64, clock=lambda: next(times))
    for _ in range(2):
        ghost.use("load", names_of([1]))
    assert ghost.counts().gaps_s.total == 50.0
    assert dict(ghost.counts().gaps_s.cumulated())["100"] == 1
    assert dict(ghost.counts().gaps_s.cumulated())["30"] == 0


def test_memory_is_bounded() -> None:
    """Whatever is used, however seldom anybody looks: so many blocks, and so many calls."""
    ghost = GhostCache(1 << 20, most_samples=256)
    chance = np.random.default_rng(0)
    for _ in range(200):
        ghost.use("load", chance.integers(2**64, size=(10_000, 4), dtype=np.uint64))
    ghost.counts()
    assert max(*(len(each) for each in ghost._held), len(ghost._asked)) <= 256  # noqa: SLF001 - no public call tells it
    one = chance.integers(2**64, size=(1, 4), dtype=np.uint64)
    one[:] = 0  # of the sample, whatever that is
    for _ in range(20_000):
        ghost.use("store", one)
    assert len(ghost._pending) <= 1 << 14  # noqa: SLF001
