"""Models with several KV groups: the longest length that satisfies all, whatever holes lie outside every window."""

import asyncio
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.any_layout import AnyEngine, cpu, open_any, prompt
from tests.support.backends import ScriptedBackend
from tests.support.caches import until, until_idle
from tiered_kv import (
    CacheLimits,
    ConfigurationError,
    GPULoadStoreSpec,
    GroupNeed,
    KVGroup,
    KVLayout,
    LayoutMismatchError,
    TieredKV,
    chunk,
    full,
    state,
    window,
)
from tiered_kv.cache.groups import find_longest, length_in_place
from tiered_kv.values.results import LoadResult

LAYOUT = KVLayout(
    (KVGroup(2, 1, 48, "bfloat16", 4), KVGroup(3, 2, 16, "bfloat16", 8), KVGroup(1, 1, 64, "int8", 4, "MLA"))
)
"""Full attention, a sliding window in larger blocks, and latents."""
TOKENS = 96
KEYS = [
    prompt(TOKENS // group.block_size, group=n, block_size=group.block_size) for n, group in enumerate(LAYOUT.groups)
]
TIERS = (cpu(64, sum(group.stride_bytes for group in LAYOUT.groups)),)


def satisfied(needs: Sequence[GroupNeed], there: Sequence[Sequence[bool]], num_tokens: int) -> bool:
    """The definition: at this length each group has each block it needs."""
    for need, has in zip(needs, there, strict=True):
        keys = need.at(num_tokens)
        start = keys.start - need.keys.start
        if not all(has[start : start + len(keys)]):
            return False
    return True


@given(st.integers(2, 40), st.integers(0, TOKENS // 8))
def test_a_window_counts_tokens_in_front_of_the_next(width: int, num_blocks: int) -> None:
    """Where a query sees ``width`` tokens, itself included, the blocks of the last ``width - 1`` are all it needs."""
    keys, position = KEYS[1], num_blocks * 8
    seen = {token // 8 for token in range(max(0, position - width + 1), position)}
    needed = window(keys, width - 1).at(position)
    assert set(range(needed.start, needed.start + len(needed))) == seen


@given(st.integers(1, 40), st.integers(0, 24), st.integers(0, 24))
def test_a_chunk_needs_what_lies_in_it(width: int, first: int, num_blocks: int) -> None:
    """Of a whole prompt or its rest: the blocks with tokens of the chunk of the next token, which may be none."""
    keys, position = KEYS[0][first:], (first + num_blocks) * 4
    seen = {token // 4 for token in range(position // width * width, position) if token // 4 >= first}
    needed = chunk(keys, width).at(num_blocks * 4)
    assert set(range(needed.start, needed.start + len(needed))) == {each for each in seen if each < 24}


def found(needs: Sequence[GroupNeed], there: Sequence[Sequence[bool]], *, is_prefix: bool = False) -> tuple[int, int]:
    """Return what a search finds where these blocks are there, and how often it asks."""
    search, num_asked = find_longest(needs), 0
    try:
        asked = next(search)
        while True:
            num_asked += 1
            masks = []
            for need in asked:
                start = need.keys.start - needs[0].keys.start * needs[0].keys.block_size // need.keys.block_size
                mask = np.array(there[need.keys.group][start : start + len(need.keys)], np.bool_)
                masks.append(np.logical_and.accumulate(mask) if is_prefix and need.is_whole else mask)
            asked = search.send(masks)
    except StopIteration as end:
        return int(end.value), num_asked


@given(st.data())
def test_the_longest_length_that_satisfies_all(data: st.DataObject) -> None:
    """It is the one that trying every length finds, of a whole prompt and of its rest, and three questions find it."""
    sizes = data.draw(st.lists(st.sampled_from([4, 8, 12]), min_size=1, max_size=3))
    first = data.draw(st.sampled_from([0, 24]))
    needs, there = [], []
    for group, size in enumerate(sizes):
        keys = prompt((TOKENS + first) // size, group=group, block_size=size)[first // size :]
        width = data.draw(st.none() | st.just(0) | st.integers(1, 40))
        last = data.draw(st.sampled_from([window, chunk]))
        needs.append(full(keys) if width is None else last(keys, width) if width else state(keys))
        has = st.sampled_from([True, True, True, False]) if data.draw(st.booleans()) else st.booleans()
        there.append(data.draw(st.lists(has, min_size=len(keys), max_size=len(keys))))
    expected = max(n for n in range(0, TOKENS + 1, math.lcm(*sizes)) if satisfied(needs, there, n))
    length, num_asked = found(needs, there, is_prefix=data.draw(st.booleans()))
    assert length == expected
    assert num_asked <= 3


def test_of_a_state_one_block_is_needed() -> None:
    """That in which the prompt's last token lies: it holds what all before it have left."""
    assert list(state(KEYS[0]).at(40)) == list(KEYS[0][9:10])
    assert len(state(KEYS[0]).at(0)) == 0


async def test_a_shared_tier_is_asked_a_few_times_whatever_holes_it_has() -> None:
    """Every other block of a window's group is gone there: no length needs a question of its own."""
    engine, below = AnyEngine(LAYOUT), ScriptedBackend()
    async with open_any(engine, below) as kv:
        await store(engine, kv, 0, range(24))
        await store(engine, kv, 1, [0, 1, 2, 4, 6, 8, 10])
        num_asked = below.on_lookup.num_calls
        assert (await kv.lookup_groups([full(KEYS[0]), window(KEYS[1], 16)])).num_tokens == 24
        assert (await kv.lookup_groups([full(KEYS[0]), state(KEYS[1])])).num_tokens == 88
        assert (await kv.presence(KEYS[1])).tolist() == [n in {0, 1, 2, 4, 6, 8, 10} for n in range(12)]
        assert below.on_lookup.num_calls - num_asked < 64
        await until_idle(kv)


async def store(engine: AnyEngine, kv: TieredKV, group: int, blocks: Sequence[int]) -> None:
    """Keep some blocks of one group."""
    for block in blocks:
        keys = KEYS[group][block : block + 1]
        await (await kv.store(keys, engine.fill(keys, [block]))).settled()


async def test_a_hole_outside_every_window_costs_nothing() -> None:
    """All 96 tokens are found and loaded although the window's group has lost what its window has left behind."""
    engine = AnyEngine(LAYOUT)
    async with open_any(engine, *TIERS) as kv:
        await store(engine, kv, 0, range(24))
        await store(engine, kv, 1, range(9, 12))
        await store(engine, kv, 2, range(24))
        needs = [full(KEYS[0]), window(KEYS[1], 20), full(KEYS[2])]
        found = await kv.lookup_groups(needs)
        assert found.num_tokens == TOKENS
        assert [len(keys) for keys in found.needed] == [24, 3, 24]
        engine.wipe()
        into = [engine.spec(range(keys.start, keys.start + len(keys)), keys.group) for keys in found.needed]
        loaded = await kv.load_groups(needs, into)
        assert loaded.num_tokens == TOKENS
        for keys in found.needed:
            assert all(engine.right(keys, range(keys.start, keys.start + len(keys))))
        await until_idle(kv)


async def test_a_block_that_one_group_lacks_counts_for_none() -> None:
    """A store that reached two of three groups makes no hit."""
    engine = AnyEngine(LAYOUT)
    async with open_any(engine, *TIERS) as kv:
        await store(engine, kv, 0, range(24))
        await store(engine, kv, 1, range(12))
        needs = [full(KEYS[0]), window(KEYS[1], 20), full(KEYS[2])]
        assert (await kv.lookup_groups(needs)).num_tokens == 0
        await store(engine, kv, 2, range(5))
        assert (await kv.lookup_groups(needs)).num_tokens == 16  # whole blocks of 8 tokens too
        await until_idle(kv)


async def test_one_group_that_comes_short_shortens_the_load() -> None:
    """What is evicted between lookup and load shortens the length for all groups, never to one that lacks a block."""
    engine = AnyEngine(LAYOUT)
    async with open_any(engine, *TIERS) as kv:
        for group in range(3):
            await store(engine, kv, group, range(len(KEYS[group])))
        needs = [full(KEYS[0]), full(KEYS[1]), full(KEYS[2])]
        await kv.evict(KEYS[2][10:11])
        into = [engine.spec(range(len(keys)), group) for group, keys in enumerate(KEYS)]
        assert (await kv.load_groups(needs, into)).num_tokens == 40
        await until_idle(kv)


async def test_a_shorter_length_at_which_a_chunk_begins_is_in_place() -> None:
    """There the chunked group needs nothing of what was before; what was loaded of it is of no use."""
    layout = KVLayout((KVGroup(2, 1, 48, "bfloat16", 4), KVGroup(2, 1, 48, "bfloat16", 4)))
    engine, whole, chunked = AnyEngine(layout), prompt(10), prompt(10, group=1)
    async with open_any(engine, cpu(64, 2 * layout.groups[0].stride_bytes)) as kv:
        await kv.store(whole, engine.fill(whole, range(10)))
        await kv.store(chunked[8:], engine.fill(chunked[8:], range(8, 10)))
        needs = [full(whole), chunk(chunked, 16)]
        assert (await kv.lookup_groups(needs)).num_tokens == 40
        await kv.evict(whole[5:6])
        loaded = await kv.load_groups(needs, [engine.spec(range(10)), engine.spec(range(8, 10), 1)])
        assert ([each.num_blocks for each in loaded.results], loaded.num_tokens) == ([5, 2], 16)
        with pytest.raises(ConfigurationError, match="KV group 1: block id 99"):
            await kv.load_groups(needs, [engine.spec(range(10)), GPULoadStoreSpec([8, 99], 1)])
        await until_idle(kv)


async def test_what_was_found_in_part_is_cut_before_it_is_loaded() -> None:
    """Block ids for the found length do not fit the whole prompt's needs: the error says how to cut those."""
    engine = AnyEngine(LAYOUT)
    async with open_any(engine, *TIERS) as kv:
        await store(engine, kv, 0, range(10))
        await store(engine, kv, 1, range(12))
        needs = [full(KEYS[0]), window(KEYS[1], 20)]
        found = await kv.lookup_groups(needs)
        engine.wipe()
        into = [engine.spec(range(keys.start, keys.start + len(keys)), keys.group) for keys in found.needed]
        with pytest.raises(LayoutMismatchError, match=r"KV group 0: 24 keys need 24 .* got 10.* \[need.until\(found"):
            await kv.load_groups(needs, into)
        with pytest.raises(ConfigurationError, match="2 KV groups need a list of as many specs, got a GPULoadStoreSp"):
            await kv.load_groups(needs, into[0])  # type: ignore[arg-type]  # wrong on purpose
        loaded = await kv.load_groups([need.until(found.num_tokens) for need in needs], into)
        assert loaded.num_tokens == found.num_tokens == 40
        assert all(all(engine.right(keys, range(keys.start, keys.start + len(keys)))) for keys in found.needed)
        await until_idle(kv)


@pytest.mark.parametrize(
    ("need", "arrived", "length"),
    [
        pytest.param(full(KEYS[0]), 6, 24, id="full"),
        pytest.param(window(KEYS[0], 8), 2, TOKENS, id="a whole window"),
        pytest.param(window(KEYS[0], 8), 1, 0, id="a part of a window"),
        pytest.param(window(KEYS[0], TOKENS), 6, 24, id="a part of a window from the start"),
        pytest.param(chunk(KEYS[0], 40), 4, TOKENS, id="a whole chunk"),
        pytest.param(chunk(KEYS[0], 40), 1, 84, id="a part of a chunk"),
        pytest.param(chunk(KEYS[0], 48), 0, TOKENS, id="a chunk that is over"),
    ],
)
def test_what_is_in_place(need: GroupNeed, arrived: int, length: int) -> None:
    """A window that arrived in part is of use only from the start of the prompt: else its own head is missing."""
    wanted = need.at(TOKENS)
    assert length_in_place([need], [wanted], [LoadResult(arrived, len(wanted))]) == length


def test_needs_that_cannot_be() -> None:
    """A group twice, keys of other prompts, other salts or no window at all are said so, with numbers."""
    with pytest.raises(ConfigurationError, match=r"once, got groups \[0, 0\]"):
        next(find_longest([full(KEYS[0]), full(KEYS[0])]))
    with pytest.raises(ConfigurationError, match=r"from one token on; these start at \[0, 4\]"):
        next(find_longest([full(KEYS[0]), full(KEYS[2][1:])]))
    with pytest.raises(ConfigurationError, match="a window, in tokens, must be a positive int, got 0"):
        window(KEYS[0], 0)
    with pytest.raises(ConfigurationError, match="what each KV group needs"):
        next(find_longest([]))
    with pytest.raises(ConfigurationError, match="what each KV group needs"):
        next(find_longest(full(KEYS[0])))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="said by its BlockKeys, got list"):
        window([b""], 8)  # type: ignore[arg-type]  # wrong on purpose


async def test_groups_whose_load_is_cancelled_wait_for_no_medium() -> None:
    """The loads of all groups end, though what they read is still on its way."""
    engine, below = AnyEngine(LAYOUT), ScriptedBackend(timeout_s=900.0)
    async with open_any(engine, below, limits=CacheLimits(load_timeout_s=900.0)) as kv:
        needs = [full(keys) for keys in KEYS]
        for keys in KEYS:
            await (await kv.store(keys, engine.fill(keys, range(len(keys))))).settled()
        below.on_read.hold()
        into = [engine.spec(range(len(keys)), keys.group) for keys in KEYS]
        loading = asyncio.create_task(kv.load_groups(needs, into))
        await until(lambda: below.on_read.num_held > 0)
        loading.cancel()
        async with asyncio.timeout(30):
            with pytest.raises(asyncio.CancelledError):
                await loading
        assert below.on_read.num_held > 0
        below.on_read.release()
        await until_idle(kv)


async def test_new_weights_that_overtake_a_lookup_leave_nothing_of_it() -> None:
    """What one question found is of the old weights, and the next would be about the new ones'."""
    engine, below = AnyEngine(LAYOUT), ScriptedBackend()
    async with open_any(engine, below) as kv:
        kv.advance_epoch("new")
        await store(engine, kv, 1, range(12))
        kv.advance_epoch("old")
        await store(engine, kv, 0, range(24))
        await store(engine, kv, 1, [4])
        below.on_lookup.hold()
        asking = asyncio.create_task(kv.lookup_groups([full(KEYS[0]), window(KEYS[1], 16)]))
        await until(lambda: below.on_lookup.num_held > 0)
        kv.advance_epoch("new")
        below.on_lookup.release()
        assert (await asking).num_tokens == 0
        await until_idle(kv)
