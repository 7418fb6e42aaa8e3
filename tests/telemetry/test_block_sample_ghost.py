"""The ghost curve beside an exact replay of the same requests."""

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from tiered_kv.telemetry.block_sample import SIZES, GhostCaches, SampledLives
from tiered_kv.values.keys import Names


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


def asked_and_hit(lives: SampledLives) -> tuple[int, int]:
    """Return how many requests were counted, and what a cache of this size would have had."""
    counts = lives.counts().ghost
    return counts.requested, counts.hits[1.0]


@pytest.mark.parametrize("direction", ["load", "store"])
def test_the_curve_is_within_two_hundredths_of_an_exact_replay(direction: str) -> None:
    """At each size, from a sample that holds a fraction of the blocks."""
    requests, num_blocks = trace(4000), 2000
    lives = SampledLives(num_blocks, most_samples=2048)
    assert lives.rate < 0.3
    blocks = sorted({block for prompt in requests for block in prompt})
    table = dict(zip(blocks, names_of(blocks), strict=True))
    for start in range(0, len(requests), 1000):
        for prompt in requests[start : start + 1000]:
            lives.use("load" if direction == "load" else "store", np.stack([table[block] for block in prompt]))
        counts = lives.counts().ghost
    for size in SIZES:
        exact = exact_hit_rate(requests, int(num_blocks * size))
        assert abs(counts.hits[size] / counts.requested - exact) <= 0.02, (size, exact)
    assert counts.hits[0.25] < 0.9 * counts.hits[4.0]  # it is a curve


def test_what_a_load_missed_and_a_store_brought_was_asked_for_once() -> None:
    """One request of the engine counts once, however many calls it makes; what is stored unasked counts as well."""
    lives = SampledLives(64)
    lives.use("load", names_of(range(8)))
    lives.use("store", names_of(range(8)))
    assert asked_and_hit(lives) == (8, 0)
    lives.use("load", names_of(range(8)))
    lives.use("store", names_of(range(8, 10)))
    assert asked_and_hit(lives) == (18, 8)


def test_gaps_between_uses_are_seen() -> None:
    """How long a block was not used before it was used again."""
    times = iter([0.0, 50.0])
    lives = SampledLives(64, clock=lambda: next(times))
    for _ in range(2):
        lives.use("load", names_of([1]))
    assert lives.counts().ghost.gaps_s.total == 50.0
    assert dict(lives.counts().ghost.gaps_s.cumulated())["100"] == 1
    assert dict(lives.counts().ghost.gaps_s.cumulated())["30"] == 0


def test_memory_is_bounded() -> None:
    """Whatever is used: so many blocks."""
    ghost, chance = GhostCaches(1 << 20, most_samples=256), random.Random(0)
    for at in range(2_000):
        ghost.use(at, "load", [chance.randrange(2**64) for _ in range(10)])
    held = [len(part) for part in ghost._parts]  # noqa: SLF001 - no public call tells it
    assert sum(held) == len(ghost._asked) == 256  # noqa: SLF001 - what it holds is nowhere else to be seen
