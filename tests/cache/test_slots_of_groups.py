"""KV groups that have fewer slots than others: states that are kept at few blocks leave a tier's room to the rest."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.any_layout import AnyEngine, nvme, open_any, prompt
from tests.support.backends import ScriptedSlotBackend
from tests.support.caches import Recorder, inside, until, until_idle
from tiered_kv import BackendContext, CacheLimits, KVGroup, KVLayout, TieredKV
from tiered_kv.host.shares import Share
from tiered_kv.media.backend import RecordShape, Recovered
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.events import TierFailed
from tiered_kv_backends.nvme import NVMeBackend
from tiered_kv_backends.nvme.directory import DirectoryShape

PAGES, STATES = KVGroup(2, 1, 48, "bfloat16", 4), KVGroup(1, 1, 2048, "float32", 4, "MLA")
"""Of 4 KiB and of 32 KiB a slot."""
EVEN, FEW = KVLayout((PAGES, STATES)), KVLayout((PAGES, replace(STATES, slots_per_block=1 / 16)))
CAPACITY = 16 << 20
LIMITS = CacheLimits(window="256KiB", bounce="2MiB")


def slots(kv: TieredKV, tier: str = "cpu") -> list[int]:
    """Return how many slots each group has in a tier."""
    chains = inside(kv).chains
    return [next(each for each in chain.booked if each.name == tier).index.num_slots for chain in chains]


def memory_bytes(num_slots: Sequence[int]) -> int:
    """Return what slots of both groups take in memory."""
    return sum(n * group.stride_bytes for n, group in zip(num_slots, EVEN.groups, strict=True))


def disk_bytes(path: Path) -> int:
    """Return what files take on disk."""
    return sum(each.stat().st_blocks * 512 for each in path.rglob("*") if each.is_file())


async def store(kv: TieredKV, engine: AnyEngine, num_prompts: int, first: int = 0) -> None:
    """Store prompts of 32 blocks, and the state at the end of each."""
    for number in range(first, first + num_prompts):
        pages, states = prompt(32, number), prompt(32, number, group=1)[31:]
        await (await kv.store(pages, engine.fill(pages, range(32)))).settled()
        await (await kv.store(states, engine.fill(states, [0]))).settled()


async def count_whole(kv: TieredKV, engine: AnyEngine, num_prompts: int) -> int:
    """Load all of these prompts; count those of which pages and state are there, having compared their bytes."""
    num_whole = 0
    for number in range(num_prompts):
        pages, states = prompt(32, number), prompt(32, number, group=1)[31:]
        engine.wipe()
        loaded = await kv.load(pages, engine.spec(range(32)))
        state = await kv.load(states, engine.spec([0], 1))
        n = loaded.num_blocks
        assert all(engine.right(pages[:n], range(n)))
        assert not state.num_blocks or all(engine.right(states, [0]))
        num_whole += n == 32 and state.num_blocks == 1
    return num_whole


async def test_more_prompts_have_room_where_states_are_few() -> None:
    """The capacity is used, and not exceeded; by the same number of slots most of it would wait for states."""
    kept = {}
    for layout in (EVEN, FEW):
        engine = AnyEngine(layout)
        async with open_any(engine, {"medium": "cpu", "capacity": CAPACITY, "policy": "lru"}, limits=LIMITS) as kv:
            (num_pages, num_states) = slots(kv)
            assert num_states == (num_pages if layout is EVEN else -(-num_pages // 16))
            assert memory_bytes([num_pages, num_states]) <= CAPACITY < memory_bytes([num_pages + 1, num_states + 1])
            await store(kv, engine, 60)
            kept[layout is FEW] = await count_whole(kv, engine, 60)
            await until_idle(kv)
    assert kept[False] < 20
    assert kept[True] == 60


def test_of_few_blocks_every_group_has_as_many() -> None:
    """Else a step's states would find no room in a small tier."""
    group = FEW.groups[1]
    assert [group.num_slots(n) for n in (0, 1, 64, 65, 1024, 2048, 2049)] == [0, 1, 64, 64, 64, 128, 129]


async def test_a_disk_is_shared_out_and_a_restart_may_do_so_otherwise(tmp_path: Path) -> None:
    """Never more than its capacity; what has a slot after the restart is found, byte for byte."""
    tier, seen = nvme(tmp_path / "kv", "8MiB"), Recorder()
    for turn, layout in enumerate((FEW, EVEN, FEW)):
        engine = AnyEngine(layout)
        none = {"medium": "cpu", "capacity": 0}
        async with open_any(engine, none, tier, limits=LIMITS, emit=seen) as kv:
            num_pages, num_states = slots(kv, "nvme")
            assert (num_states < num_pages) is (layout is FEW)
            before = await count_whole(kv, engine, 100)
            assert (before > 0) is (turn > 0)
            await store(kv, engine, 40, first=20 * turn)
            assert await count_whole(kv, engine, 100) > 0
            await until_idle(kv)
            assert kv.stats()["nvme"].evicted > 0
        assert disk_bytes(tmp_path / "kv") <= 8 << 20
    assert not seen.of(TierFailed)


@pytest.mark.parametrize("medium", ["cpu", "nvme"])
async def test_a_tier_is_resized_by_its_shares(tmp_path: Path, medium: str) -> None:
    """Down and up again: what a resize answers has slots of each group, within the capacity."""
    engine, more = AnyEngine(FEW), {"capacity": CAPACITY, "max_capacity": 2 * CAPACITY}
    tier = nvme(tmp_path / "kv") | more if medium == "nvme" else {"medium": "cpu", **more}
    tiers = [{"medium": "cpu", "capacity": 0}, tier] if medium == "nvme" else [tier]
    async with open_any(engine, *tiers, limits=LIMITS) as kv:
        first = slots(kv, medium)
        await store(kv, engine, 30)
        for capacity in (4 << 20, 2 * CAPACITY, CAPACITY):
            num_blocks = await kv.resize(medium, capacity)
            assert slots(kv, medium) == [group.num_slots(num_blocks) for group in FEW.groups]
            assert medium != "cpu" or memory_bytes(slots(kv, medium)) <= capacity
            assert medium != "nvme" or disk_bytes(tmp_path / "kv") <= capacity
            await store(kv, engine, 5)
            assert await count_whole(kv, engine, 5) == 5
        assert slots(kv, medium) == first
        await until_idle(kv)


async def test_a_directory_that_is_away_takes_each_groups_slots_there(tmp_path: Path) -> None:
    """Of two, with shares; the other one serves what it has."""
    paths, seen = [tmp_path / "a", tmp_path / "b"], Recorder()
    tier = {"medium": "nvme", "path": paths, "capacity": "4MiB"}
    engine, none = AnyEngine(FEW), {"medium": "cpu", "capacity": 0}
    async with open_any(engine, none, tier, limits=LIMITS) as kv:
        await store(kv, engine, 4)
    paths[1].rename(tmp_path / "elsewhere")
    paths[1].touch()
    async with open_any(engine, none, tier, limits=LIMITS, emit=seen) as kv:
        withheld = [chain.owned[0].index.statistics().withheld for chain in inside(kv).chains]
        assert withheld == [n // 2 for n in slots(kv, "nvme")]
        await store(kv, engine, 4, first=10)
        for number in range(10, 14):
            keys = prompt(32, number)
            assert (await kv.load(keys, engine.spec(range(32)))).num_blocks == 32
            assert engine.count_right(keys, range(32)) == 32
        await until_idle(kv)
    assert {each.doing for each in seen.of(TierFailed)} <= {"keep"}


async def test_several_directories_have_the_slots_of_one_tier(tmp_path: Path) -> None:
    """Together, whatever they are resized to: one that grows evicts nothing, and a restart finds what had a slot."""
    paths, none, seen = [tmp_path / "a", tmp_path / "b", tmp_path / "c"], {"medium": "cpu", "capacity": 0}, Recorder()
    tier = {"medium": "nvme", "path": paths, "capacity": "3MiB", "max_capacity": "6MiB"}
    for layout in (FEW, EVEN, FEW):
        engine = AnyEngine(layout)
        async with open_any(engine, none, tier, limits=LIMITS, emit=seen) as kv:
            num_blocks = max(first := slots(kv, "nvme"))
            assert first == [group.num_slots(num_blocks) for group in layout.groups]
            await store(kv, engine, 100)
            await until_idle(kv)
            kept = await count_whole(kv, engine, 100)
            assert kept > 0
            for capacity in ("3MiB", "3.5MiB", "6MiB", "3MiB"):
                num_blocks = await kv.resize("nvme", capacity)
                assert slots(kv, "nvme") == [group.num_slots(num_blocks) for group in layout.groups]
                assert capacity == "3MiB" or await count_whole(kv, engine, 100) == kept
                assert all(disk_bytes(path) <= (6 if capacity == "6MiB" else 3.5) * 2**20 for path in paths)
            assert slots(kv, "nvme") == first
            assert await count_whole(kv, engine, 100) > 0
            await until_idle(kv)
        assert all(disk_bytes(path) <= 3 << 20 for path in paths)
    assert not seen.of(TierFailed)


class _EvenSlots(ScriptedSlotBackend):
    """A medium that has as many slots of every group, whatever shares these have."""

    async def open(self, context: BackendContext) -> list[Recovered]:
        """Say how large it may become."""
        return [replace(each, max_slots=256) for each in await super().open(context)]

    def fit(self, capacity_bytes: int) -> int:
        """Take blocks of a byte."""
        return capacity_bytes


async def test_a_medium_with_more_slots_of_a_group_than_its_share_keeps_them_as_it_grows() -> None:
    """What is there stays, and so does what is being written to one of them; made smaller, it goes by shares."""
    engine, medium, none = AnyEngine(FEW, num_blocks=100), _EvenSlots(100), {"medium": "cpu", "capacity": 0}
    states, more = prompt(90, group=1), prompt(10, 1, group=1)
    async with open_any(engine, none, medium, limits=LIMITS) as kv:
        await (await kv.store(states, engine.fill(states, range(90)))).settled()
        medium.on_write.hold()
        stored = await kv.store(more, engine.fill(more, range(10)))
        await until(lambda: medium.on_write.num_held > 0)
        for capacity in (100, 200):
            assert await kv.resize("slots", capacity) == capacity
        medium.on_write.release()
        await stored.settled()
        assert [(await kv.lookup(keys)).num_blocks for keys in (states, more)] == [90, 10]
        await kv.resize("slots", 90)
        assert slots(kv, "slots") == [90, 64]
        await until_idle(kv)


@given(st.integers(0, 1 << 30), st.floats(1e-6, 1), st.integers(1, 8))
@example(925, 0.56, 3)
def test_directories_have_a_slot_for_each_that_the_tier_goes_by(num_blocks: int, share: float, n: int) -> None:
    """And none of them more than one to spare."""
    kind = RecordShape(b"f" * 32, 4096, slots_per_block=share)
    spare = n * DirectoryShape.of(kind, n).num_slots(num_blocks) - kind.num_slots(n * num_blocks)
    assert 0 <= spare < n


async def test_a_capacity_beyond_any_machine_is_refused(tmp_path: Path) -> None:
    """Of whatever tier, when it is opened and later."""
    most = 1 << 80
    small = {"medium": "cpu", "capacity": CAPACITY}
    for tiers in ([small | {"capacity": most}], [small | {"max_capacity": most}], [small, nvme(tmp_path / "kv", most)]):
        with pytest.raises(ConfigurationError):
            async with open_any(AnyEngine(FEW), *tiers, limits=LIMITS):
                pass
    async with open_any(AnyEngine(FEW), small, limits=LIMITS) as kv:
        with pytest.raises(ConfigurationError, match="max_capacity"):
            await kv.resize("cpu", most)


async def test_a_directory_that_a_tier_has_left_is_cut_in_proportion(tmp_path: Path) -> None:
    """Of which group how many slots are left is as before: a little less of each, and not as many of both."""
    engine, none = AnyEngine(FEW), {"medium": "cpu", "capacity": 0}
    async with open_any(engine, none, nvme(tmp_path / "kv"), limits=LIMITS) as kv:
        await store(kv, engine, 60)
        await until_idle(kv)
        before = [chain.owned[0].index.statistics().ready for chain in inside(kv).chains]
    for capacity in (7 << 20, 6 << 20):
        assert NVMeBackend.cut_left(tmp_path / "kv", capacity)
        assert capacity * 7 // 8 < disk_bytes(tmp_path / "kv") <= capacity
    async with open_any(engine, none, nvme(tmp_path / "kv"), limits=LIMITS) as kv:
        after = [chain.owned[0].index.statistics().ready for chain in inside(kv).chains]
        assert all(now > was * 5 // 8 for now, was in zip(after, before, strict=True))


async def test_a_model_lends_no_slots_that_its_states_take() -> None:
    """However few they are beside those of its pages, which nothing is in."""
    engine, capacity = AnyEngine(FEW), 4 << 20
    async with open_any(engine, {"medium": "cpu", "capacity": capacity}, limits=LIMITS) as kv:
        num_states = slots(kv)[1]
        for number in range(num_states):
            state = prompt(1, number, group=1)
            await (await kv.store(state, engine.fill(state, [0]))).settled()
        share = Share("a" * 16, cache=kv, right={"cpu": capacity}, given={"cpu": capacity})
        assert share.claim("cpu", since=0).used == capacity


async def test_bounce_slots_are_shared_out_too() -> None:
    """Large states do not leave the pages of a long load few slots to pass through."""
    async with open_any(AnyEngine(FEW), {"medium": "cpu", "capacity": CAPACITY}, limits=LIMITS) as kv:
        pages, states = (chain.host.index.num_bounce for chain in inside(kv).chains)
        assert states == max(4, pages // 16)
        assert pages > 2 * (2 << 20) // (36 << 10)  # with as many of each
        assert memory_bytes([pages, states]) <= max(2 << 20, memory_bytes([pages, 4]))


def test_nobody_elses_blocks_are_others_by_that() -> None:
    """Two processes with other shares find each other's: it is no part of a block's name."""
    assert EVEN == FEW
    assert hash(EVEN) == hash(FEW)
    assert [each.facts for each in EVEN.groups] == [each.facts for each in FEW.groups]
