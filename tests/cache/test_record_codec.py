"""A cache with ``codec="exponent"``: three quarters of the bytes in storage, and every bit of every block."""

import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.any_layout import MODEL, nvme, prompt
from tests.support.caches import AnyTier, Recorder, until_idle
from tiered_kv import (
    BlocksNotEncoded,
    ConfigurationError,
    CPULoadStoreSpec,
    Encryption,
    GPULoadStoreSpec,
    KVGroup,
    KVLayout,
    TieredKV,
    TieredKVSettings,
    Worker,
)
from tiered_kv.media.record import HEADER_BYTES
from tiered_kv.memory.codec import CodecName
from tiered_kv.tiers.records import ExponentCodec

N = 12
NHD = KVGroup(8, 8, 64, "bfloat16", 4)  # blocks of 64 KiB
MLA = KVGroup(3, 1, 1032, "bfloat16", 4, "MLA")
KEYS, PAGES = prompt(N), GPULoadStoreSpec([5, 2, 9, 0, 1, 11, 10, 3, 4, 8, 7, 6])
KEY = "01" * 32


def caches_of(group: KVGroup) -> list[Tensor]:
    """Return an engine's tensors, a layer each, of other sizes and with a few values that are not finite."""
    n, h, d = group.page_size, group.num_kv_heads, group.head_dim
    shape = (N, n, d) if group.order == "MLA" else (2, N, n, h, d)
    generator = torch.Generator().manual_seed(0)
    layers = [(torch.randn(shape, generator=generator) * 4.0**layer).bfloat16() for layer in range(group.num_layers)]
    for layer in layers:
        layer.view(-1)[:3] = torch.tensor([torch.nan, -torch.inf, -0.0])
    return layers


def open_with(group: KVGroup, *tiers: AnyTier, codec: CodecName = "exponent", emit: Recorder | None = None) -> TieredKV:
    """Return a cache for blocks of ``group``, not open yet."""
    emit = emit or Recorder()
    return TieredKV(tiers, model=MODEL, layout=KVLayout((group,)), codec=codec, device="cpu", emit=emit)


def register(kv: TieredKV, group: KVGroup, caches: list[Tensor]) -> None:
    """Register an engine's tensors."""
    kv.register_kv_caches(caches, axes="BND" if group.order == "MLA" else "PBNHD")


def bits_of(caches: list[Tensor]) -> list[Tensor]:
    """Return the bits of all values, which compare equal where NaNs do not."""
    return [tensor.view(torch.int16).clone() for tensor in caches]


def all_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Compare."""
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("group", [NHD, MLA], ids=lambda group: group.order)
@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("chain", ["cpu", "memory", "nvme", "cpu nvme", "gpu cpu nvme", "sealed"])
async def test_every_bit_comes_back_from_every_tier(
    group: KVGroup,
    chain: str,
    layerwise: bool,  # noqa: FBT001 - pytest passes it by name
    tmp_path: Path,
) -> None:
    """Through each medium, encrypted or not, at once and layer by layer."""
    tiers: dict[str, AnyTier] = {
        "gpu": {"medium": "gpu", "capacity": 2 * group.stride_bytes},
        "cpu": {"medium": "cpu", "capacity": (6 if "nvme" in chain else N) * group.stride_bytes},
        "memory": {"medium": "memory", "capacity": "4MiB"},
        "nvme": nvme(tmp_path),
        "sealed": {**nvme(tmp_path), "encryption": Encryption(keys=[KEY])},
    }
    caches = caches_of(group)
    before = bits_of(caches)
    async with open_with(group, *(tiers[name] for name in chain.split())) as kv:
        register(kv, group, caches)
        await (await kv.store(KEYS, PAGES)).settled()
        for tensor in caches:
            tensor.zero_()
        assert (await kv.start_load(KEYS, PAGES, layerwise=layerwise)).num_blocks == N
        assert all_equal(bits_of(caches), before)
        await until_idle(kv)


async def test_storage_holds_more_and_says_how(tmp_path: Path) -> None:
    """More blocks in the same bytes, in memory as many as ever; the header has the codec and both lengths."""
    num_slots = []
    codecs: tuple[CodecName, ...] = ("none", "exponent")
    for codec in codecs:
        caches = caches_of(NHD)
        tiers: list[AnyTier] = [{"medium": "cpu", "capacity": 4 << 20}, nvme(tmp_path / codec)]
        async with open_with(NHD, *tiers, codec=codec) as kv:
            register(kv, NHD, caches)
            await (await kv.store(KEYS, PAGES)).settled()
            num_slots.append([tier.num_slots for tier in kv.stats().tiers])
    assert num_slots[0][0] == num_slots[1][0]
    assert num_slots[1][1] / num_slots[0][1] > 1.19  # slots are whole pages
    slab = next((tmp_path / "exponent").rglob("slab")).read_bytes()
    header = slab[(at := slab.index(b"TIEREDKV")) : at + HEADER_BYTES]
    assert header[168:184] == b"exponent".ljust(16, b"\0")
    assert int.from_bytes(header[16:24], "little") == ExponentCodec(NHD.payload_bytes).stored_bytes
    assert int.from_bytes(header[24:32], "little") == NHD.payload_bytes


@pytest.mark.parametrize("chain", ["cpu nvme", "nvme", "cpu memory"])
async def test_a_block_that_does_not_fit_is_not_written(chain: str, tmp_path: Path) -> None:
    """It stays in the CPU tier if there is one; the others are written; an event says so; what is served is right."""
    tiers: dict[str, AnyTier] = {
        "cpu": {"medium": "cpu", "capacity": N * NHD.stride_bytes},
        "memory": {"medium": "memory", "capacity": "4MiB"},
        "nvme": nvme(tmp_path),
    }
    caches, told = caches_of(NHD), Recorder()
    for layer in caches:  # any bits at all in the seventh block of the prompt, and the last
        for page in (10, 6):
            shape = layer[:, page].shape
            layer.view(torch.int16)[:, page] = torch.randint(-(1 << 15), 1 << 15, shape).short()
    before = bits_of(caches)
    async with open_with(NHD, *(tiers[name] for name in chain.split()), emit=told) as kv:
        register(kv, NHD, caches)
        reports = await (await kv.store(KEYS, PAGES)).settled()
        assert (reports[-1].written, reports[-1].dropped) == (N - 2, 2)
        assert sum(event.blocks for event in told.of(BlocksNotEncoded)) == 2
        for tensor in caches:
            tensor.zero_()
        loaded = await kv.load(KEYS, PAGES)
        assert loaded.num_blocks == (N if "cpu" in chain else 6)
        pages = PAGES.ids[: loaded.num_blocks].tolist()
        right = [after[:, pages].equal(old[:, pages]) for after, old in zip(bits_of(caches), before, strict=True)]
        assert all(right)
        await until_idle(kv)


async def test_nobody_is_served_what_was_kept_another_way(tmp_path: Path) -> None:
    """Each codec finds its own blocks, and none of another's."""
    codecs: tuple[CodecName, ...] = ("none", "fp8", "exponent")
    for codec, found in [(codec, found) for found in (0, N) for codec in codecs]:
        async with open_with(NHD, nvme(tmp_path, "16MiB"), codec=codec) as kv:
            register(kv, NHD, caches_of(NHD))
            assert (await kv.lookup(KEYS)).num_blocks == found
            await (await kv.store(KEYS, PAGES)).settled()


def flip_a_bit(path: Path, digest: bytes) -> None:
    """Flip one in the payload of a block's record on NVMe."""
    slab = next(path.rglob("slab"))
    stored = bytearray(slab.read_bytes())
    stored[stored.index(digest) - 128 + HEADER_BYTES + 9000] ^= 1  # the hash is byte 128 of the header
    slab.write_bytes(stored)


async def test_a_broken_record_is_no_block(tmp_path: Path) -> None:
    """One bit on the medium: the blocks before it are served as they were, that one is a miss."""
    caches = caches_of(NHD)
    before = bits_of(caches)
    async with open_with(NHD, nvme(tmp_path)) as kv:
        register(kv, NHD, caches)
        await (await kv.store(KEYS, PAGES)).settled()
    flip_a_bit(tmp_path, KEYS[1])
    async with open_with(NHD, nvme(tmp_path)) as kv:
        register(kv, NHD, caches)
        for tensor in caches:
            tensor.zero_()
        assert (await kv.load(KEYS, PAGES)).num_blocks == 1
        first = int(PAGES.ids[0])
        assert all(after[:, first].equal(old[:, first]) for after, old in zip(bits_of(caches), before, strict=True))


def test_what_it_cannot_keep_is_refused() -> None:
    """When the cache is made; settings take its name."""
    with pytest.raises(ConfigurationError, match="bfloat16, not of float16"):
        open_with(KVGroup(1, 1, 8, "float16", 4), {"medium": "memory", "capacity": "4MiB"})
    assert TieredKVSettings(codec="exponent").codec == "exponent"


async def test_a_direct_pool_gets_blocks_as_the_engine_has_them(tmp_path: Path) -> None:
    """What is read straight into the engine's own slots is decoded there."""
    caches, slots = caches_of(NHD), mmap.mmap(-1, N * NHD.stride_bytes)
    async with open_with(NHD, nvme(tmp_path)) as kv:
        register(kv, NHD, caches)
        kv.register_host_pool("mine", slots, slot_bytes=NHD.stride_bytes, direct=True)
        await (await kv.store(KEYS, PAGES)).settled()
        assert (await kv.load(KEYS, CPULoadStoreSpec(range(N), pool="mine"))).num_blocks == N
        await until_idle(kv)
    planes = [plane for layer in bits_of(caches) for plane in layer]
    expected = [b"".join(plane[page].numpy().tobytes() for plane in planes) for page in PAGES.ids.tolist()]
    assert [bytes(slots[at : at + NHD.payload_bytes]) for at in range(0, len(slots), NHD.stride_bytes)] == expected


async def test_workers_need_not_know() -> None:
    """Memory that they copy from and to has blocks as the engine has them."""
    theirs, ours = caches_of(NHD), caches_of(NHD)
    before = bits_of(ours)
    async with open_with(NHD, {"medium": "cpu", "capacity": "1MiB"}, {"medium": "memory", "capacity": "4MiB"}) as kv:
        register(kv, NHD, ours)
        planner = kv.planner()
        planner.register_worker()
        with Worker(planner.slabs(), layout=KVLayout((NHD,)), device="cpu") as worker:
            worker.register_kv_caches(theirs, axes="PBNHD")
            job = planner.plan_store(KEYS, PAGES)
            planner.complete(worker.execute(await job.planned()))
            await job.ended()
            await kv.flush()
            await kv.evict(KEYS, tier="cpu")
            for tensor in ours:
                tensor.zero_()
            assert (await kv.load(KEYS, PAGES)).num_blocks == N
            assert all_equal(bits_of(ours), before)
