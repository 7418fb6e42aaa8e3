from pathlib import Path

import pytest

from tests.support.any_layout import STRIDE, AnyEngine, open_any, prompt
from tiered_kv import BlockKeys, CacheLimits, RemovalResult
from tiered_kv.media.backend import RecordShape
from tiered_kv.values.keys import BlockKey, Namespace, epoch_digest, hash_blocks

pytest.importorskip("obstore", reason="obstore is missing: pip install 'tiered-kv[s3]'")

from tiered_kv_backends.s3.packing import Packing, Unit

SHAPE = RecordShape(b"f" * 32, 4096)
SPACE = Namespace(SHAPE.fingerprint, epoch_digest("w"))
PER_PACK = 4
LIMITS = CacheLimits(window=16 * STRIDE, bounce=64 * STRIDE)


def chain(num_blocks: int, seed: int = 0) -> list[BlockKey]:
    """Return the keys of a prompt."""
    return SPACE.keys(hash_blocks([seed] * num_blocks, block_size=1))


def new_packing() -> Packing:
    """Return one with four records of 8 KiB in a pack."""
    return Packing([SHAPE], PER_PACK * 8192)


def pack_of(key: BlockKey) -> str:
    """Name the pack whose last key this is."""
    return f"{key.path}.x{PER_PACK}"


def test_groups_are_aligned_to_positions_and_named_by_their_last_key() -> None:
    """Whoever has a group's last key names its pack, wherever the batch begins; the rest are single keys."""
    keys = chain(10)
    first, second = pack_of(keys[3]), pack_of(keys[7])
    whole = [Unit(0, 4, first, 0, 4), Unit(4, 8, second, 0, 4), Unit(8, 9), Unit(9, 10)]
    assert new_packing().units(keys) == whole
    assert new_packing().units(keys[2:6]) == [Unit(0, 2, first, 2, 4), Unit(2, 3), Unit(3, 4)]


def test_last_keys_are_remembered() -> None:
    """A batch that ends within a group finds the pack, once a batch with the group's last key has been seen."""
    seen, keys = new_packing(), chain(8)
    seen.units(keys)
    assert seen.units(keys[4:6]) == [Unit(0, 2, pack_of(keys[7]), 0, 4)]


def test_neighbours_of_other_prompts_share_no_pack() -> None:
    """Where a prompt leaves another within a group, only what they share is sought in the pack that is known."""
    seen, keys, other = new_packing(), chain(4), chain(4, seed=1)
    seen.units(keys)
    assert seen.units([keys[0], keys[1], other[2]]) == [Unit(0, 2, pack_of(keys[3]), 0, 4), Unit(2, 3)]


def test_blocks_of_no_group_of_the_cache_are_single() -> None:
    """Nobody knows how long they are, and so how many a pack would hold."""
    keys = Namespace(b"g" * 32, epoch_digest("w")).keys(hash_blocks([0] * 4, block_size=1))
    assert new_packing().units(keys) == [Unit(n, n + 1) for n in range(4)]


def test_holes_and_duplicates_are_no_whole_group() -> None:
    """Positions must follow each other for keys to be written as a pack."""
    keys = chain(4)
    for batch in ([keys[0], keys[1], keys[3]], [keys[0], keys[1], keys[1], keys[2], keys[3]], keys[::-1]):
        units = new_packing().units(batch)
        assert not any(unit.is_whole for unit in units)
        assert [n for unit in units for n in range(unit.start, unit.stop)] == list(range(len(batch)))


@pytest.mark.parametrize(("pack_bytes", "num_blocks"), [(0, 1), (8191, 1), (16384, 2), (8192 * 7, 4), (1 << 30, 16)])
def test_a_pack_holds_a_power_of_two_of_blocks(pack_bytes: int, num_blocks: int) -> None:
    """As many as fit, 16 at most; one, where two do not fit or packing is off."""
    units = Packing([SHAPE], pack_bytes).units(chain(16))
    assert {unit.stop - unit.start for unit in units} == {num_blocks}
    assert all((unit.pack is None) == (num_blocks == 1) for unit in units)


def packs_in(path: Path) -> list[str]:
    """Return how the objects there are called, at the end of their names; marks of evictions are none."""
    return [each.suffix for each in path.rglob("*") if each.is_file() and "gone" not in each.parts]


async def opened_anew(tmp_path: Path, engine: AnyEngine, evicted: BlockKeys, prefix: BlockKeys) -> tuple[int, int]:
    """Evict as a process does that has seen no more of a prompt; say what it finds and loads of all of it then."""
    tier = {"medium": "s3", "url": f"file://{tmp_path}", "answer_ttl_s": 0}
    async with open_any(engine, tier, limits=LIMITS) as kv:
        await kv.evict(evicted)
        assert (await kv.lookup(evicted)).num_blocks == 0
        loaded = await kv.load(prefix, engine.spec(range(16)))
        return (await kv.lookup(prefix)).num_blocks, loaded.num_blocks


@pytest.mark.parametrize("evicted", [slice(0, 1), slice(0, 15), slice(4, 9), slice(15, 16), slice(0, 16)], ids=str)
async def test_what_is_evicted_of_a_pack_stays_away_though_the_pack_is_not_known(
    tmp_path: Path, evicted: slice
) -> None:
    """By whoever has evicted it; and by all, once that one has met the pack's last key: then the pack goes."""
    engine, prefix = AnyEngine(), prompt(16)
    async with open_any(engine, {"medium": "s3", "url": f"file://{tmp_path}"}, limits=LIMITS) as kv:
        await kv.store(prefix, engine.fill(prefix, range(16)))
        await kv.flush()
    assert packs_in(tmp_path) == [".x16"]
    found, loaded = await opened_anew(tmp_path, engine, prefix[evicted], prefix)
    assert (found, loaded) == (0, 0)
    assert not packs_in(tmp_path)


async def test_who_evicts_of_an_unknown_pack_is_told(tmp_path: Path) -> None:
    """Another start could serve it: the eviction and the drain say so, until the pack is met, and goes.

    Of what this process knows to lie singly, or in a pack that it can name, nothing is left.
    """
    engine, prefix = AnyEngine(num_blocks=40), prompt(19)
    tier = {"medium": "s3", "url": f"file://{tmp_path}", "answer_ttl_s": 0}
    async with open_any(engine, tier, limits=LIMITS) as kv:
        await kv.store(prefix, engine.fill(prefix, range(19)))
        await kv.flush()
        assert await kv.evict(prefix[16:]) == RemovalResult(0)
    async with open_any(engine, tier, limits=LIMITS) as kv:
        assert (await kv.evict(prefix[:3])).kept_by == ("s3",)
        assert not await kv.drain()
        assert packs_in(tmp_path) == [".x16"]
        await kv.lookup(prefix[:16])
        assert packs_in(tmp_path) == []
        assert await kv.drain()
        assert await kv.evict(prefix[:16]) == RemovalResult(0)


async def test_what_is_stored_again_is_spared(tmp_path: Path) -> None:
    """An eviction is of what was there before it."""
    engine, prefix, tier = AnyEngine(), prompt(16), {"medium": "s3", "url": f"file://{tmp_path}"}
    async with open_any(engine, tier, limits=LIMITS) as kv:
        await kv.evict(prefix[:3])
        await kv.store(prefix, engine.fill(prefix, range(16)))
        await kv.flush()
        assert (await kv.load(prefix, engine.spec(range(16)))).num_blocks == 16
    async with open_any(engine, tier, limits=LIMITS) as kv:
        assert (await kv.load(prefix, engine.spec(range(16)))).num_blocks == 16
