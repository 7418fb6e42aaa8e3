from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.values.keys import BlockKey, Namespace, epoch_digest, hash_blocks

pytest.importorskip("obstore", reason="obstore is missing: pip install 'tiered-kv[s3]'")

from tiered_kv.media.backend import RecordShape
from tiered_kv_backends.s3 import presence
from tiered_kv_backends.s3.packing import Packing

KEYS = Namespace(b"f" * 32, epoch_digest("w")).keys(hash_blocks(range(8), block_size=1))


class Clock:
    """Seconds that a test turns."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """Return its time."""
        return self.now_s


@given(st.integers(1, 5000), st.data())
async def test_a_prefix_is_counted_by_few_questions(num_items: int, data: st.DataObject) -> None:
    """Bisection finds where a prefix ends, whatever of it is known, asking at most 2 + log2(n) times."""
    num_there = data.draw(st.integers(0, num_items))
    num_known = data.draw(st.integers(0, num_there))
    asked: list[int] = []

    async def is_there(number: int) -> bool:
        asked.append(number)
        return number < num_there

    assert await presence.count_prefix(num_known, num_items, is_there) == num_there
    assert len(asked) <= 2 + num_items.bit_length()
    assert all(num_known <= number < num_items for number in asked)


async def test_a_thousand_blocks_need_twelve_questions() -> None:
    """No prefix of 1,000 blocks takes more than 12 questions."""
    for num_there in range(1001):
        asked: list[int] = []

        async def is_there(number: int, num_there: int = num_there, asked: list[int] = asked) -> bool:
            asked.append(number)
            return number < num_there

        assert await presence.count_prefix(0, 1000, is_there) == num_there
        assert len(asked) <= 12


PACKED = RecordShape(b"f" * 32, 4096)
PROMPT: list[BlockKey] = Namespace(PACKED.fingerprint, epoch_digest("w")).keys(hash_blocks(range(1000), block_size=1))


async def count(num_stored: int, in_parts: Callable[[int], bool], num_known: int = 0) -> tuple[int, int]:
    """Store so many blocks, 8 to a pack but for groups in parts; count them as a stranger does, and the questions."""
    units = Packing([PACKED], 8 * 8192).units(PROMPT)
    stored = set[str]()
    for number, unit in enumerate(units):
        if unit.stop <= num_stored and not in_parts(number):
            stored.add(str(unit.pack))
        else:
            stored.update(key.path for key in PROMPT[unit.start : min(unit.stop, num_stored)])
    asked: list[str] = []

    async def exists(name: str) -> bool:
        asked.append(name)
        return name in stored

    counted = await presence.count_blocks(PROMPT, units, num_known, exists, lambda _: False)
    return counted, len(asked)


@given(st.integers(0, 1000), st.data())
async def test_a_prefix_of_packs_is_counted_by_few_questions(num_stored: int, data: st.DataObject) -> None:
    """What one store has left takes 2 questions if it is all, 4 if it is nothing, else 14 at most, most often fewer."""
    num_known = data.draw(st.integers(0, min(num_stored, 999)))
    counted, num_asked = await count(num_stored, lambda _: False, num_known)
    assert counted == num_stored
    assert num_asked <= (2 if num_stored == 1000 else 14 if num_stored else 4)


async def test_a_prefix_that_ends_between_packs_is_counted_by_fewer() -> None:
    """Where a prompt leaves what is stored, as most do, between two groups: 11 at most."""
    for num_stored in range(0, 1001, 8):
        assert (await count(num_stored, lambda _: False))[1] <= 11


@given(st.integers(0, 1000), st.sets(st.integers(0, 124)))
async def test_groups_in_parts_are_counted(num_stored: int, in_parts: set[int]) -> None:
    """Whichever groups of a prefix were stored block by block, it is counted to its end."""
    counted, _ = await count(num_stored, in_parts.__contains__)
    assert counted == num_stored


def answers(ttl_s: float = 2.0) -> tuple[presence.PresenceAnswers, Clock]:
    """Return answers and their clock."""
    clock = Clock()
    return presence.PresenceAnswers(clock, ttl_s), clock


def test_answers_bound_a_prefix() -> None:
    """What is there vouches for what is before it; what is not there ends the prefix."""
    known, _ = answers()
    assert known.bounds(KEYS) == (0, 8)
    known.put(KEYS[2], is_there=True)
    known.put(KEYS[5], is_there=False)
    known.put(KEYS[7], is_there=True)
    assert known.bounds(KEYS) == (3, 5)
    assert known.bounds([]) == (0, 0)


def test_answers_are_short_lived() -> None:
    """An answer is believed for its time, and not at all if that is zero."""
    for ttl_s, bounds in ((2.0, (3, 8)), (0.5, (3, 8)), (0.0, (0, 8))):
        known, clock = answers(ttl_s)
        known.put(KEYS[2], is_there=True)
        assert known.bounds(KEYS) == bounds
        clock.now_s += 2.0
        assert known.bounds(KEYS) == (0, 8)


def test_a_store_ends_a_verdict() -> None:
    """A key that was missing and is stored is asked about anew."""
    known, _ = answers()
    known.put(KEYS[5], is_there=False)
    known.drop([KEYS[4], KEYS[5]])
    assert known.bounds(KEYS) == (0, 8)


def test_a_failed_load_drops_what_was_said() -> None:
    """Nothing that was said before a load failed is believed, except of what the load itself saw missing."""
    known, _ = answers()
    known.put(KEYS[7], is_there=True)
    known.refute(KEYS[:4], [KEYS[3]])
    assert known.bounds(KEYS) == (0, 3)


def test_an_answer_knows_nothing_of_what_came_after_its_question() -> None:
    """What was stored meanwhile may be there though it says not, and what was refuted may not be though it says so."""
    known, _ = answers()
    with known.asking() as late, known.asking() as later:
        known.drop([KEYS[2]])
        known.put(KEYS[2], is_there=False, question=late)
        known.put(KEYS[1], is_there=True, question=late)
        assert known.bounds(KEYS) == (2, 8)
        known.refute(KEYS, [KEYS[2], KEYS[3]], later)
        assert known.bounds(KEYS) == (0, 3)
        known.put(KEYS[1], is_there=True, question=late)
    assert known.bounds(KEYS) == (0, 3)
    with known.asking() as new:
        known.put(KEYS[1], is_there=True, question=new)
        known.put(KEYS[2], is_there=False, question=new)
    assert known.bounds(KEYS) == (2, 2)


def test_answers_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many keys are asked about, a bounded number of answers is kept."""
    monkeypatch.setattr(presence, "_MAX_ANSWERS", 4)
    known, _ = answers()
    keys: list[BlockKey] = Namespace(b"f" * 32, epoch_digest("w")).keys(hash_blocks(range(100), block_size=1))
    for key in keys:
        known.put(key, is_there=True)
    believed = [key for key in keys if known.bounds([key]) == (1, 1)]
    assert 1 <= len(believed) <= 4
