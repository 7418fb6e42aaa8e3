"""What is evicted of a pack that the evicting process cannot name: nobody serves it who comes later."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.any_layout import STRIDE, AnyEngine, open_any, prompt
from tiered_kv import BlockKeys, CacheLimits
from tiered_kv.values.keys import Namespace, epoch_digest, hash_blocks

pytest.importorskip("obstore", reason="obstore is missing: pip install 'tiered-kv[s3]'")

from tiered_kv_backends.paths import keep_quota
from tiered_kv_backends.s3 import S3Backend, collect_epochs, doomed, s3_backend
from tiered_kv_backends.s3.doomed import Doomed, is_mark, mark_of
from tiered_kv_backends.s3.packing import Unit

LIMITS = CacheLimits(window=16 * STRIDE, bounce=64 * STRIDE)
TENANT = "ann"
PREFIX = prompt(16)
Tier = dict[str, Any]


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    """Return a tier of files, of whose answers none is believed for longer than its call."""
    return {"medium": "s3", "url": f"file://{tmp_path}", "answer_ttl_s": 0}


def marks_in(path: Path) -> int:
    """Count the marks on the store."""
    return sum(each.is_file() for each in path.glob("gone/**/*"))


def packs_in(path: Path) -> int:
    """Count the packs on the store."""
    return len(list(path.rglob("*.x16")))


async def stored(tier: Tier, keys: BlockKeys = PREFIX) -> None:
    """Have a process store a prompt as one pack, and end."""
    engine = AnyEngine()
    async with open_any(engine, tier, limits=LIMITS) as kv:
        await kv.store(keys, engine.fill(keys, range(16)))
        await kv.flush()


async def evicted(tier: Tier, keys: BlockKeys) -> None:
    """Have a process evict blocks that has seen nothing else of their prompt, and end."""
    async with open_any(AnyEngine(), tier, limits=LIMITS) as kv:
        assert (await kv.evict(keys)).kept_by == ("s3",)
        assert not await kv.drain()


async def loaded(tier: Tier, keys: BlockKeys = PREFIX) -> tuple[int, int]:
    """Say how many blocks a new process finds and loads."""
    engine = AnyEngine()
    async with open_any(engine, tier, limits=LIMITS) as kv:
        found = (await kv.lookup(keys)).num_blocks
        return found, (await kv.load(keys, engine.spec(range(len(keys))))).num_blocks


@pytest.mark.parametrize("part", [slice(0, 1), slice(0, 15), slice(4, 9)], ids=str)
async def test_what_was_evicted_stays_away_from_whoever_opens_later(tmp_path: Path, tier: Tier, part: slice) -> None:
    """The first that asks for the pack deletes it; what is stored then stays, and the drain of none waits for it."""
    await stored(tier)
    await evicted(tier, PREFIX[part])
    assert (packs_in(tmp_path), marks_in(tmp_path)) == (1, len(PREFIX[part]))
    assert await loaded(tier) == (0, 0)
    assert (packs_in(tmp_path), marks_in(tmp_path)) == (0, 0)
    await stored(tier)
    assert await loaded(tier) == (16, 16)


async def test_a_load_that_asks_nothing_before_finds_nothing_either(tier: Tier) -> None:
    """It is the read itself that looks for marks, in whichever call it comes."""
    await stored(tier)
    await evicted(tier, PREFIX[4:9])
    engine = AnyEngine()
    async with open_any(engine, tier, limits=LIMITS) as kv:
        assert (await kv.load(PREFIX, engine.spec(range(16)))).num_blocks == 0


async def test_what_was_not_evicted_is_served_until_the_block_and_its_pack_meet(tmp_path: Path, tier: Tier) -> None:
    """A call that has none of the evicted blocks reads the others of the pack."""
    await stored(tier)
    await evicted(tier, PREFIX[:3])
    assert await loaded(tier, PREFIX[3:]) == (13, 13)
    assert packs_in(tmp_path) == 1


async def test_a_process_that_is_running_hears_of_it(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it reads the marks again."""
    monkeypatch.setattr(s3_backend, "_READ_MARKS_EVERY_S", 0.0)
    await stored(tier)
    async with open_any(AnyEngine(), tier, limits=LIMITS) as kv:
        assert (await kv.lookup(PREFIX)).num_blocks == 16
        await evicted(tier, PREFIX[:3])
        assert (await kv.lookup(PREFIX)).num_blocks == 0
        assert await kv.drain()


async def test_a_store_after_the_eviction_stays(tmp_path: Path, tier: Tier) -> None:
    """The old pack goes before the new one is written, and the mark with it."""
    await stored(tier)
    await evicted(tier, PREFIX[:3])
    engine = AnyEngine()
    async with open_any(engine, tier, limits=LIMITS) as kv:
        await kv.store(PREFIX, engine.fill(PREFIX, range(16)))
        await kv.flush()
    assert (packs_in(tmp_path), marks_in(tmp_path)) == (1, 0)
    assert await loaded(tier) == (16, 16)


async def test_a_mark_that_has_gone_since_it_was_read_dooms_nothing(tmp_path: Path, tier: Tier) -> None:
    """Another process has seen to it, and has stored the blocks anew."""
    await stored(tier)
    await evicted(tier, PREFIX[:3])
    async with open_any(AnyEngine(), tier, limits=LIMITS) as kv:
        assert await loaded(tier) == (0, 0)
        await stored(tier)
        assert (await kv.lookup(PREFIX)).num_blocks == 16
    assert packs_in(tmp_path) == 1


async def test_who_only_reads_serves_none_of_it_and_deletes_nothing(tmp_path: Path, tier: Tier) -> None:
    """That is for those who write."""
    await stored(tier)
    await evicted(tier, PREFIX[:3])
    for _ in range(2):
        assert await loaded({**tier, "read_only": True}) == (0, 0)
        assert (packs_in(tmp_path), marks_in(tmp_path)) == (1, 3)


async def test_more_marks_than_are_remembered_are_asked_for_one_by_one(
    tmp_path: Path, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slower, and as right: by whoever reads them, and by whoever has evicted more than it remembers."""
    monkeypatch.setattr(doomed, "MOST_MARKS", 2)
    monkeypatch.setattr(s3_backend, "MOST_MARKS", 2)
    monkeypatch.setattr(s3_backend, "_LISTED_AT_ONCE", 1)
    others = [prompt(16, seed=seed) for seed in range(1, 4)]
    for keys in (PREFIX, *others):
        await stored(tier, keys)
    async with open_any(AnyEngine(), tier, limits=LIMITS) as kv:
        for keys in (PREFIX, *others):
            await kv.evict(keys[4:5])
        for keys in (PREFIX, *others[1:]):
            assert (await kv.lookup(keys)).num_blocks == 0
        assert not await kv.drain()
    assert await loaded(tier, others[0]) == (0, 0)
    assert (packs_in(tmp_path), marks_in(tmp_path)) == (0, 0)


@pytest.mark.parametrize("by", ["tenant", "epoch"])
async def test_marks_go_with_a_tenant_and_with_old_weights(tmp_path: Path, tier: Tier, by: str) -> None:
    """They name blocks; and an eviction is no use that keeps an epoch."""
    keys = hash_blocks(range(16 * PREFIX.block_size), block_size=PREFIX.block_size, salt=TENANT)
    await stored(tier, keys)
    await evicted(tier, keys[:3])
    if by == "tenant":
        assert await S3Backend.delete_tenant(tier, TENANT) == 16  # blocks, of one pack
    else:
        assert await collect_epochs(tier, keep_weights=["served"], idle_s=0) == 4  # objects
    assert (packs_in(tmp_path), marks_in(tmp_path)) == (0, 0)


async def test_a_mark_is_no_block_of_a_quota(tmp_path: Path, tier: Tier) -> None:
    """It has no bytes that count, and stays as long as its pack does."""
    await stored(tier)
    await evicted(tier, PREFIX[:3])
    assert await keep_quota(S3Backend, tier, 1 << 30) == 0
    assert (packs_in(tmp_path), marks_in(tmp_path)) == (1, 3)
    async with S3Backend.inventory(S3Backend.Settings.of(tier)) as inventory:
        found = [each async for some in inventory.found() for each in some]
    assert sorted(each.num_blocks for each in found) == [0, 0, 0, 16]
    assert len({each.place for each in found}) == 1


def test_only_what_is_named_as_a_mark_is_one() -> None:
    """Others may put anything into the folder."""
    (key,) = Namespace(b"f" * 32, epoch_digest("w")).keys(prompt(1))
    assert is_mark(mark_of(key))
    for name in (key.path, "gone/", f"gone/{key.path}.x16", f"gone/gone/{key.path}", f"{mark_of(key)}/more"):
        assert not is_mark(name)


def test_what_is_forgotten_is_still_owed() -> None:
    """Beyond what a process remembers of its own evictions it asks, and says that packs may have some."""
    keys = Namespace(b"f" * 32, epoch_digest("w")).keys(prompt(2))
    of_mine = Doomed()
    of_mine.add(keys[:1], may_be_packed=False)
    assert not of_mine.may_be_served
    assert of_mine.suspects(keys, [Unit(0, 2, "pack", 0, 2)]) == {"pack": [mark_of(keys[0])]}
    of_mine.add(keys[1:], may_be_packed=True)
    assert of_mine.may_be_served
    of_mine.spare([mark_of(key) for key in keys])
    assert not of_mine.may_be_served
