"""The hash table of names, under kind and hostile names."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_kv.catalog.table import NameTable, first_occurrences, hash_names
from tiered_kv.values.keys import Names


def random_names(n: int, seed: int = 0) -> Names:
    """Return names as digests are."""
    return np.random.default_rng(seed).integers(0, 2**64, (n, 4), dtype=np.uint64)


def small_integers(n: int) -> Names:
    """Return names as some engines make them."""
    names = np.zeros((n, 4), dtype=np.uint64)
    names[:, 0] = np.arange(n)
    return names


def shifted_integers(n: int) -> Names:
    """Return names whose low 40 bits are zero, and so are the tags that are made of them."""
    names = np.zeros((n, 4), dtype=np.uint64)
    names[:, 3] = np.arange(n, dtype=np.uint64) << np.uint64(40)
    return names


def names_of_one_hash(n: int) -> Names:
    """Return names that all have the same 64-bit hash: what the first word adds, the second takes away."""
    names = np.zeros((n, 4), dtype=np.uint64)
    unit = hash_names(np.eye(4, dtype=np.uint64))
    inverse = np.uint64(pow(int(unit[1]), -1, 1 << 64))
    names[:, 0] = np.arange(n)
    names[:, 1] = np.uint64(0) - names[:, 0] * unit[0] * inverse
    return names


KINDS = {
    "random": random_names,
    "small integers": small_integers,
    "shifted integers": shifted_integers,
    "one hash": names_of_one_hash,
}


def test_hostile_names_are_hostile() -> None:
    """The names that the other tests call hostile do share one hash."""
    assert len(np.unique(hash_names(names_of_one_hash(100)))) == 1
    assert len(np.unique(names_of_one_hash(100), axis=0)) == 100


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(
    steps=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 39), unique=True, max_size=40)), max_size=12),
    order=st.permutations(range(40)),
)
def test_table_is_a_dict(kind: str, steps: list[tuple[bool, list[int]]], order: list[int]) -> None:
    """Whatever is inserted and removed in whatever batches, each name is found in its slot, and no other is."""
    pool = KINDS[kind](40)
    table = NameTable(40)
    model: dict[int, int] = {}
    for is_insert, batch in steps:
        chosen = [i for i in batch if (i in model) != is_insert]
        slots = np.array([order[i] for i in chosen], dtype=np.int64)
        if is_insert:
            table.insert(pool[chosen], slots)
            model.update(zip(chosen, slots.tolist(), strict=True))
        else:
            table.remove(slots)
            for i in chosen:
                del model[i]
        expected = [model.get(i, -1) for i in range(40)]
        assert table.find(pool).tolist() == expected
        assert [table.find_one(pool[i].tobytes()) for i in range(40)] == expected
        assert table.find(pool[::-1].copy()).tolist() == expected[::-1]
    assert (table.names(np.array([order[i] for i in model], dtype=np.int64)) == pool[list(model)]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_full_table_finds_everything(kind: str) -> None:
    """A table filled to its capacity, in one batch, finds each name and none that differs in one bit."""
    names = KINDS[kind](5_000)
    table = NameTable(5_000)
    slots = np.random.default_rng(1).permutation(5_000)
    table.insert(names, slots)
    assert (table.find(names) == slots).all()
    others = names.copy()
    others[:, 2] ^= np.uint64(1 << 63)
    assert (table.find(others) == -1).all()
    table.remove(slots[:2_500])
    assert (table.find(names) == np.where(np.arange(5_000) < 2_500, -1, slots)).all()


def test_repeats_in_a_lookup_are_harmless() -> None:
    """A name that a batch asks for twice is found twice."""
    names = random_names(10)
    table = NameTable(10)
    table.insert(names, np.arange(10))
    assert table.find(names[[3, 3, 9, 3]]).tolist() == [3, 3, 9, 3]


def test_cleared_table_finds_nothing() -> None:
    """Clearing forgets spilled names too, and leaves a table that works."""
    names = names_of_one_hash(50)
    table = NameTable(50)
    table.insert(names, np.arange(50))
    table.clear()
    assert (table.find(names) == -1).all()
    table.insert(names, np.arange(50)[::-1])
    assert table.find(names).tolist() == list(range(50))[::-1]


def test_empty_table_and_empty_batches() -> None:
    """A table of no slots finds nothing, and a batch of no names is no trouble."""
    table = NameTable(0)
    assert table.find(small_integers(3)).tolist() == [-1] * 3
    assert table.find(small_integers(0)).tolist() == []
    table.insert(small_integers(0), np.arange(0))
    table.remove(np.arange(0))


def test_run_at_counts_neighbours() -> None:
    """A run ends where the names differ, and where the table does."""
    names = random_names(20)
    table = NameTable(10)
    table.insert(names[:10], np.arange(10))
    assert [table.run_at(slot, names[slot:]) for slot in (0, 4, 9)] == [10, 6, 1]
    assert table.run_at(0, names[1:]) == 0
    assert table.run_at(0, names[[0, 1, 2, 7, 4]]) == 3
    assert table.run_at(3, names[3:6]) == 3


@given(batch=st.lists(st.integers(0, 5), max_size=30), hostile=st.booleans())
def test_first_occurrences(*, batch: list[int], hostile: bool) -> None:
    """Each name counts once, where it comes first, also among names of one hash."""
    pool = names_of_one_hash(6) if hostile else random_names(6)
    assert first_occurrences(pool[np.array(batch, dtype=np.int64)]).tolist() == [
        position for position, i in enumerate(batch) if batch.index(i) == position
    ]
