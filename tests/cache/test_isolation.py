"""Two caches that differ in one field of what names a block never see each other's blocks, in memory and on disk."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.any_layout import MODEL, SMALL, AnyEngine, cpu, memory, nvme, open_any, prompt
from tests.support.caches import Recorder, until_idle
from tiered_kv import BlockKeys, KVGroup, KVLayout, ModelIdentity, Shard
from tiered_kv.media.backend import RecordShape
from tiered_kv.values.events import BlocksCorrupted
from tiered_kv.values.keys import Namespace, epoch_digest, salt_digest
from tiered_kv.values.layout import fingerprint

N = 6
HASHES = list(prompt(N))
BASE = SMALL.groups[0]
WHOLE = Shard()


@dataclass(frozen=True)
class Identity:
    """All that names a block beside its hash. Both sides of every test use the same hashes."""

    model: ModelIdentity = MODEL
    group: KVGroup = BASE
    salt: str = "tenant"
    shard: Shard = WHOLE
    others: tuple[KVGroup, ...] = ()

    @property
    def layout(self) -> KVLayout:
        """The layout with this group, and perhaps others behind it."""
        return KVLayout((self.group, *self.others))

    @property
    def keys(self) -> BlockKeys:
        """The same hashes, as this identity's keys."""
        return BlockKeys.from_hashes(HASHES, block_size=self.group.block_size, salt=self.salt)

    @property
    def namespace(self) -> Namespace:
        """What the cache makes of it."""
        digest = fingerprint(self.model, self.layout, 0)
        return Namespace(digest, epoch_digest(self.model.weights), salt_digest(self.salt), self.shard)


THIS = Identity()
OTHERS = {
    "model.name": Identity(replace(MODEL, name="another model")),
    "model.weights": Identity(replace(MODEL, weights="w1")),
    "model.extra": Identity(replace(MODEL, extra=(("rope", "yarn"),))),
    "group.num_layers": Identity(group=replace(BASE, num_layers=1)),
    "group.num_kv_heads": Identity(group=replace(BASE, num_kv_heads=2)),
    "group.head_dim": Identity(group=replace(BASE, head_dim=40)),
    "group.dtype": Identity(group=replace(BASE, dtype="float16")),
    "group.block_size": Identity(group=replace(BASE, block_size=8, page_size=4)),
    "group.order": Identity(group=replace(BASE, order="HND")),
    "group.page_size": Identity(group=replace(BASE, page_size=2)),
    "another group beside": Identity(others=(KVGroup(1, 1, 16, "float16", 4),)),
    "salt": Identity(salt="another tenant"),
    "no salt": Identity(salt=""),
    "shard.size": Identity(shard=Shard(0, 2)),
    "shard.rank": Identity(shard=Shard(1, 2)),
}
PAIRS = [pytest.param(THIS, other, id=name) for name, other in OTHERS.items()]
PAIRS += [
    pytest.param(OTHERS["shard.size"], OTHERS["shard.rank"], id="two ranks"),
    pytest.param(THIS, Identity(group=KVGroup(4, 1, 48, "bfloat16", 4, "MLA")), id="MLA of as many bytes"),
]


async def fill(who: Identity, *tiers: dict[str, object], version: str) -> None:
    """Have a cache of this identity store all blocks, with bytes of this version."""
    engine = AnyEngine(who.layout)
    async with open_any(engine, *tiers, model=who.model, shard=who.shard) as kv:
        result = await kv.store(who.keys, engine.fill(who.keys, range(N), version))
        assert [tier.written for tier in await result.settled()][-1] == N


async def served(who: Identity, *tiers: dict[str, object], version: str) -> int:
    """Count the blocks that a cache of this identity serves; each must be of this version."""
    engine = AnyEngine(who.layout)
    async with open_any(engine, *tiers, model=who.model, shard=who.shard) as kv:
        n = (await kv.lookup(who.keys)).num_blocks
        loaded = await kv.load(who.keys, engine.spec(range(N)))
        assert loaded.num_blocks == engine.count_right(who.keys, range(N), version)
        assert loaded.num_blocks == n
    return n


@pytest.mark.parametrize(("one", "two"), PAIRS)
def test_no_two_identities_have_a_name_in_common(one: Identity, two: Identity) -> None:
    """What differs in one field differs in every name and in the path of every external object."""
    ours, theirs = one.namespace, two.namespace
    assert not set(map(bytes, ours.names(one.keys))) & set(map(bytes, theirs.names(two.keys)))
    assert ours.path != theirs.path


@pytest.mark.parametrize(("one", "two"), PAIRS)
async def test_one_directory(one: Identity, two: Identity, tmp_path: Path) -> None:
    """In the directory where one has stored, the other finds nothing, and neither ever gets the other's bytes."""
    tiers = cpu(8, 1 << 14), nvme(tmp_path)
    await fill(one, *tiers, version="one")
    assert await served(two, *tiers, version="two") == 0
    await fill(two, *tiers, version="two")
    assert await served(one, *tiers, version="one") == N
    assert await served(two, *tiers, version="two") == N


@pytest.mark.parametrize(("one", "two"), PAIRS)
async def test_records_copied_by_hand(one: Identity, two: Identity, tmp_path: Path) -> None:
    """One's records in the other's slab, where its index expects its own, are a miss, each of them, and no error."""
    await fill(one, nvme(tmp_path / "one"), version="one")
    await fill(two, nvme(tmp_path / "two"), version="two")
    folders = [RecordShape(who.namespace.fingerprint, 1, who.shard).folder for who in (one, two)]
    slabs = [tmp_path / name / folder / "slab" for name, folder in zip(("one", "two"), folders, strict=True)]
    theirs = slabs[0].read_bytes()
    assert theirs.count(b"TIEREDKV") >= N
    with slabs[1].open("r+b") as slab:
        slab.write(theirs[: slabs[1].stat().st_size])
    engine, recorder = AnyEngine(two.layout), Recorder()
    async with open_any(engine, nvme(tmp_path / "two"), model=two.model, shard=two.shard, emit=recorder) as kv:
        assert (await kv.lookup(two.keys)).num_blocks == N
        assert (await kv.load(two.keys, engine.spec(range(N)))).num_blocks == 0
        await until_idle(kv)  # windows that were read ahead
        assert sum(event.blocks for event in recorder.of(BlocksCorrupted)) == N
        assert (await kv.lookup(two.keys)).num_blocks == 0


@pytest.mark.parametrize("chain", ["cpu", "memory", "gpu"])
async def test_in_memory(chain: str) -> None:
    """In one cache, tenants and epochs of one hash are different blocks, in each kind of memory."""
    engine = AnyEngine()
    tiers = {"cpu": [cpu(64)], "memory": [memory()], "gpu": [{"medium": "gpu", "capacity": 64 * 4096}]}[chain]
    async with open_any(engine, *tiers) as kv:
        for weights in ("w0", "w1"):
            kv.advance_epoch(weights)
            for salt in ("a", "b", ""):
                keys = Identity(salt=salt).keys
                assert (await kv.lookup(keys)).num_blocks == 0
                await (await kv.store(keys, engine.fill(keys, range(N), weights + salt))).settled()
        for weights in ("w0", "w1"):
            kv.advance_epoch(weights)
            for salt in ("a", "b", ""):
                keys = Identity(salt=salt).keys
                engine.wipe()
                assert (await kv.load(keys, engine.spec(range(N)))).num_blocks == N
                assert engine.count_right(keys, range(N), weights + salt) == N
