"""A cache that keeps blocks as fp8: half the bytes in every tier, and nobody is served what was kept another way."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import virtual
from tests.support.any_layout import MODEL, nvme, prompt
from tests.support.backends import ScriptedBackend
from tests.support.caches import AnyTier, until
from tiered_kv import CPULoadStoreSpec, GPULoadStoreSpec, KVGroup, KVLayout, TieredKV, TieredKVSettings, Worker
from tiered_kv.media.record import HEADER_BYTES
from tiered_kv.memory.codec import CodecName, FP8Codec
from tiered_kv.values.errors import ConfigurationError

NUM_BLOCKS = 12
NHD = KVGroup(3, 2, 16, "bfloat16", 4)
HND = KVGroup(2, 2, 16, "float16", 4, "HND", page_size=2)
MLA = KVGroup(3, 1, 40, "bfloat16", 4, "MLA")
WIDE = KVGroup(8, 8, 64, "bfloat16", 4)  # blocks of 64 KiB
AXES = {"NHD": "PBNHD", "HND": "PBHND", "MLA": "BND"}
CODECS: tuple[CodecName, ...] = ("none", "fp8")
MEMORY = {"medium": "memory", "capacity": "4MiB"}


def caches_of(group: KVGroup) -> list[Tensor]:
    """Return an engine's tensors, one a layer, whose heads differ in size."""
    sizes = {**group.axis_sizes, "B": NUM_BLOCKS * group.pages_per_block}
    shape = [sizes[axis] for axis in AXES[group.order]]
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(shape, generator=generator) * 4.0**layer).to(getattr(torch, group.dtype))
        for layer in range(group.num_layers)
    ]


def open_fp8(group: KVGroup, *tiers: AnyTier, codec: CodecName = "fp8") -> TieredKV:
    """Return a cache for blocks of ``group``, not open yet."""
    return TieredKV(tiers, model=MODEL, layout=KVLayout((group,)), codec=codec, device="cpu")


def register(kv: TieredKV, group: KVGroup, caches: list[Tensor]) -> None:
    """Register an engine's tensors."""
    kv.register_kv_caches(caches, axes=AXES[group.order])


def pages_of(group: KVGroup, num_blocks: int = NUM_BLOCKS) -> list[int]:
    """Return the pages of so many blocks, in no order."""
    num_pages = num_blocks * group.pages_per_block
    pages: list[int] = np.random.default_rng(0).permutation(num_pages).tolist()
    return pages


def written(path: Path) -> bytes:
    """Return what an NVMe tier has written."""
    return next(path.rglob("slab")).read_bytes()


def bytes_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Compare bit for bit."""
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("group", [NHD, HND, MLA], ids=lambda group: group.order)
@pytest.mark.parametrize("chain", ["cpu", "gpu cpu", "memory", "cpu nvme", "gpu cpu nvme"])
async def test_blocks_come_back_within_the_error_from_every_tier(group: KVGroup, chain: str, tmp_path: Path) -> None:
    """Once through a cache they are rounded, and never again: what is stored and loaded a second time is the same."""
    tiers: dict[str, AnyTier] = {
        "gpu": {"medium": "gpu", "capacity": 6 * 4096},
        "cpu": {"medium": "cpu", "capacity": (6 if "nvme" in chain else 32) * 4096},
        "memory": MEMORY,
        "nvme": nvme(tmp_path),
    }
    caches, pages = caches_of(group), pages_of(group)
    original = [tensor.clone() for tensor in caches]
    keys, again = prompt(NUM_BLOCKS), prompt(NUM_BLOCKS, seed=1)
    async with open_fp8(group, *(tiers[name] for name in chain.split())) as kv:
        register(kv, group, caches)
        seen = []
        for names in (keys, again):
            await (await kv.store(names, GPULoadStoreSpec(pages))).settled()
            for tensor in caches:
                tensor.zero_()
            assert (await kv.load(names, GPULoadStoreSpec(pages))).num_blocks == NUM_BLOCKS
            seen.append([tensor.clone() for tensor in caches])
    for before, after in zip(original, seen[0], strict=True):
        assert ((after - before).abs() <= before.abs() / 14 + before.abs().max() / 2**18).all()
    assert not bytes_equal(original, seen[0])
    assert bytes_equal(seen[0], seen[1])


async def test_layers_can_be_waited_for_one_by_one() -> None:
    """A load layer by layer brings the same bytes as one at once."""
    caches, pages, keys = caches_of(NHD), pages_of(NHD), prompt(NUM_BLOCKS)
    async with open_fp8(NHD, "cpu://?capacity=1MiB") as kv:
        register(kv, NHD, caches)
        await kv.store(keys, GPULoadStoreSpec(pages))
        await kv.load(keys, GPULoadStoreSpec(pages))
        at_once = [tensor.clone() for tensor in caches]
        for tensor in caches:
            tensor.zero_()
        loaded = await kv.start_load(keys, GPULoadStoreSpec(pages), layerwise=True)
        assert loaded.num_blocks == NUM_BLOCKS
        assert bytes_equal(caches, at_once)


async def test_a_tier_holds_twice_the_blocks_in_the_same_bytes() -> None:
    """But for the scales, and for slots being whole pages."""
    group = KVGroup(8, 8, 64, "bfloat16", 16)
    num_slots = []
    for codec in CODECS:
        async with open_fp8(group, {"medium": "cpu", "capacity": "4MiB"}, codec=codec) as kv:
            num_slots.append(kv.stats().tiers[0].num_slots)
    assert num_slots == [(4 << 20) // group.payload_bytes, (4 << 20) // (group.payload_bytes // 2 + 4096)]


@pytest.mark.parametrize("codec", CODECS)
def test_a_load_is_estimated_by_what_is_moved(codec: CodecName) -> None:
    """What took two seconds will take two seconds, however many bytes it is decoded."""

    async def program() -> float:
        backend, keys = ScriptedBackend(timeout_s=60.0), prompt(4)
        caches = caches_of(WIDE)
        async with open_fp8(WIDE, backend, codec=codec) as kv:
            kv.register_kv_caches(caches, axes="PBNHD")
            await (await kv.store(keys, GPULoadStoreSpec(range(4)))).settled()
            backend.on_read.hold()
            loading = kv.start_load(keys, GPULoadStoreSpec(range(4)), deadline_s=60.0)
            await until(lambda: backend.on_read.num_held > 0)
            await virtual.advance(2.0)
            backend.on_read.release()
            assert (await loading).num_blocks == 4
            found = await kv.lookup(keys)
            assert found.num_bytes == 4 * WIDE.payload_bytes
            return found.estimated_load_s

    assert virtual.run(program) == pytest.approx(2.0)


async def test_records_say_how_they_are_kept(tmp_path: Path) -> None:
    """Codec and both lengths are in the header, for whoever reads it without this library."""
    caches, pages, keys = caches_of(NHD), pages_of(NHD), prompt(NUM_BLOCKS)
    async with open_fp8(NHD, nvme(tmp_path)) as kv:
        register(kv, NHD, caches)
        await (await kv.store(keys, GPULoadStoreSpec(pages))).settled()
    slab = written(tmp_path)
    at = slab.index(b"TIEREDKV")
    header = slab[at : at + HEADER_BYTES]
    assert header[168:184] == b"fp8".ljust(16, b"\0")
    assert int.from_bytes(header[16:24], "little") == FP8Codec(NHD).stored_bytes
    assert int.from_bytes(header[24:32], "little") == NHD.payload_bytes


async def test_nobody_is_served_what_was_kept_another_way(tmp_path: Path) -> None:
    """A cache without the codec does not find the blocks, nor one with it those of one without."""
    keys, pages = prompt(NUM_BLOCKS), pages_of(NHD)
    for codec, found in [(codec, found) for found in (0, NUM_BLOCKS) for codec in CODECS]:
        caches = caches_of(NHD)
        async with open_fp8(NHD, nvme(tmp_path), codec=codec) as kv:
            register(kv, NHD, caches)
            assert (await kv.lookup(keys)).num_blocks == found
            await (await kv.store(keys, GPULoadStoreSpec(pages))).settled()


async def test_workers_encode_too() -> None:
    """What a worker stores, the cache's own engine loads, and the other way round."""
    theirs, ours, pages, keys = caches_of(NHD), caches_of(NHD), pages_of(NHD), prompt(NUM_BLOCKS)
    expected = [tensor.clone() for tensor in ours]
    async with open_fp8(NHD, "cpu://?capacity=1MiB") as kv:
        register(kv, NHD, ours)
        planner = kv.planner()
        planner.register_worker()
        with Worker(planner.slabs(), layout=KVLayout((NHD,)), device="cpu") as worker:
            worker.register_kv_caches(theirs, axes="PBNHD")
            job = planner.plan_store(keys, GPULoadStoreSpec(pages))
            planner.complete(worker.execute(await job.planned()))
            await job.ended()
            for tensor in ours:
                tensor.zero_()
            assert (await kv.load(keys, GPULoadStoreSpec(pages))).num_blocks == NUM_BLOCKS
            for before, after in zip(expected, ours, strict=True):
                assert ((after - before).abs() <= before.abs() / 14 + before.abs().max() / 2**18).all()


@pytest.mark.parametrize("group", [NHD, HND], ids=lambda group: group.order)
async def test_host_pools_hold_blocks_as_the_engine_has_them(group: KVGroup) -> None:
    """Whole blocks in host memory are decoded as pages of a GPU are, several pages a block or one."""
    caches, pages, keys = caches_of(group), pages_of(group), prompt(NUM_BLOCKS)
    pool = torch.zeros(NUM_BLOCKS, group.payload_bytes, dtype=torch.uint8)
    async with open_fp8(group, "cpu://?capacity=1MiB") as kv:
        register(kv, group, caches)
        kv.register_host_pool("mine", pool)
        await kv.store(keys, GPULoadStoreSpec(pages))
        assert (await kv.load(keys, CPULoadStoreSpec(range(NUM_BLOCKS), pool="mine"))).num_blocks == NUM_BLOCKS
        await kv.load(keys, GPULoadStoreSpec(pages))
        planes = [plane for tensor in caches for plane in tensor]
        blocks = [
            b"".join(plane[page].contiguous().view(torch.uint8).numpy().tobytes() for plane in planes for page in each)
            for each in np.array(pages).reshape(NUM_BLOCKS, -1)
        ]
        assert [row.numpy().tobytes() for row in pool] == blocks
        with pytest.raises(ConfigurationError, match="as they are kept, which is as fp8"):
            kv.register_host_pool("direct", torch.zeros(4096, dtype=torch.uint8), direct=True)


def test_what_a_codec_cannot_keep_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is allocated, with the dtype; an unknown codec says which there are, in settings too."""
    with pytest.raises(ConfigurationError, match="bfloat16 or float16, not of int8"):
        open_fp8(KVGroup(1, 1, 8, "int8", 4), MEMORY)
    with pytest.raises(ConfigurationError, match="one of none, fp8, exponent, got 'fp4'"):
        open_fp8(NHD, MEMORY, codec="fp4")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ConfigurationError, match="codec"):
        TieredKVSettings(codec="fp4")  # type: ignore[arg-type]  # wrong on purpose
    monkeypatch.setenv("TIERED_KV_CODEC", "fp8")
    assert TieredKVSettings().codec == "fp8"
    TieredKV.from_settings(model=MODEL, layout=KVLayout((NHD,)))
    with pytest.raises(ConfigurationError, match="not of int8"):
        TieredKV.from_settings(model=MODEL, layout=KVLayout((KVGroup(1, 1, 8, "int8", 4),)))
