"""The codec fp8: half the bytes, within the error it states, on every layout and layer by layer."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.memory.engines import NUM_SLOTS, ORDERS, Engine, engines, places
from tests.support.fake_cuda import fake_cuda
from tiered_kv.memory import CPUDevice, PagedCaches, gather_blocks, scatter_blocks, staging
from tiered_kv.memory.codec import FP8Codec, make_codec
from tiered_kv.values.errors import ConfigurationError, LayoutMismatchError
from tiered_kv.values.layout import KVGroup, Order

NHD = KVGroup(2, 3, 8, "bfloat16", 4)
TINY = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
"""The smallest positive value of each dtype."""


def rows_for(caches: PagedCaches) -> Tensor:
    """Return slots as long as the codec needs, full of a pattern."""
    return torch.full((NUM_SLOTS, -(-caches.stored_bytes // 4096) * 512), 0x5A5A, dtype=torch.int64)


def there_and_back(values: Tensor, group: KVGroup) -> Tensor:
    """Encode and decode blocks of values ``(n, L, P, pages, ...)``."""
    payloads = values.reshape(len(values), -1).view(torch.uint8)
    codec = FP8Codec(group)
    return codec.decode(codec.encode(payloads)).view(values.dtype).view(values.shape)


def heads(values: Tensor, order: Order) -> Tensor:
    """Return ``(scales, values under each)`` of blocks ``(n, L, P, pages, ...)``, by loops' plain meaning."""
    if order == "MLA":
        return values.flatten(0, -2)
    return values.movedim(5 if order == "NHD" else 4, 3).flatten(0, 3).flatten(1)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[KVGroup, Tensor]:
    """Draw a group, and blocks of it whose heads differ in size by orders of magnitude; any bits at all among them."""
    order = draw(st.sampled_from(ORDERS))
    pages, page_size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_heads = 1 if order == "MLA" else draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(("bfloat16", "float16")))
    group = KVGroup(
        draw(st.integers(1, 2)), num_heads, draw(st.integers(1, 9)), dtype, pages * page_size, order, page_size
    )
    n, h, d = page_size, num_heads, group.head_dim
    inner = {"NHD": (n, h, d), "HND": (h, n, d), "MLA": (n, d)}[order]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    shape = (draw(st.integers(1, 2)), group.num_layers, group.num_planes, pages, *inner)
    if draw(st.booleans()):
        bits = torch.randint(0, 1 << 16, shape, generator=generator, dtype=torch.int32)
        return group, bits.to(torch.uint16).view(getattr(torch, dtype))
    exponents = torch.randint(-140 if dtype == "bfloat16" else -26, 16, shape, generator=generator)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 2.0**exponents
    return group, values.to(getattr(torch, dtype))


@settings(max_examples=300)
@given(drawn=blocks())
def test_the_error_is_within_what_is_stated(drawn: tuple[KVGroup, Tensor]) -> None:
    """Of every finite value, whatever else is under its scale; what is not finite comes back as NaN."""
    group, values = drawn
    found = there_and_back(values, group)
    assert found.isnan().equal(~values.isfinite())
    before, after = heads(values.double(), group.order), heads(found.double(), group.order)
    finite = before.isfinite()
    magnitudes = before.abs().where(finite, 0)
    largest = magnitudes.amax(-1, keepdim=True).clamp_min(2.0**-117)
    errors = (after - before).abs().where(finite, 0)
    bounds = magnitudes / 14 + largest / 2**18 + TINY[values.dtype] / 2
    assert (errors <= bounds).all()
    assert (errors <= largest / 13 + TINY[values.dtype] / 2).all()


@settings(max_examples=200)
@given(drawn=blocks())
def test_what_came_back_once_stays_as_it_is(drawn: tuple[KVGroup, Tensor]) -> None:
    """A block that goes down and up again and again does not drift."""
    group, values = drawn
    smallest_normal = torch.finfo(values.dtype).smallest_normal
    values = values.where(values.abs() >= smallest_normal * 2**20, 0)
    once = there_and_back(values, group)
    once = once.where(once.abs() >= smallest_normal, 0)
    assert there_and_back(once, group).view(torch.int16).equal(once.view(torch.int16))


def test_zeros_and_the_largest_values_come_back_exactly() -> None:
    """With their signs; a head of zeros is no division by zero."""
    values = torch.zeros(1, 2, 2, 1, 4, 3, 8, dtype=torch.bfloat16)
    assert there_and_back(values, NHD).view(torch.int16).eq(0).all()
    values[..., 0] = -0.0
    values[..., 1, 3] = torch.finfo(torch.bfloat16).max
    values[..., 2, 3] = -1.375
    assert there_and_back(values, NHD).view(torch.int16).equal(values.view(torch.int16))


def test_what_is_not_finite_harms_no_other_value() -> None:
    """NaN and infinities come back as NaN; their neighbours keep their precision."""
    values = torch.randn(1, 2, 2, 1, 4, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    clean = there_and_back(values, NHD)
    largest = values.abs().argmax()
    for bad in (math.nan, math.inf, -math.inf):
        spoilt = values.clone()
        spoilt[0, 1, 0, 0, 2, 1, 5] = bad
        found = there_and_back(spoilt, NHD)
        assert found[0, 1, 0, 0, 2, 1, 5].isnan()
        found[0, 1, 0, 0, 2, 1, 5] = clean[0, 1, 0, 0, 2, 1, 5]
        assert found.flatten()[largest] == values.flatten()[largest]
        assert found.isfinite().all()


@pytest.mark.parametrize(
    ("group", "num_bytes"),
    [
        (KVGroup(32, 8, 128, "bfloat16", 16), 32 * (64 + 2 * 16 * 8 * 128)),  # Llama-3-8B: 1 MiB and 2 KiB
        (KVGroup(61, 1, 576, "bfloat16", 16, "MLA"), 61 * (64 + 16 * 576)),
        (KVGroup(1, 3, 5, "float16", 3), 24 + 96),  # 90 values
    ],
)
def test_sizes(group: KVGroup, num_bytes: int) -> None:
    """Half the payload and the scales, each part of a layer rounded up to 8 bytes."""
    codec = FP8Codec(group)
    assert codec.stored_bytes == num_bytes
    payloads = torch.zeros(2, group.payload_bytes, dtype=torch.uint8)
    assert codec.encode(payloads).shape == (2, num_bytes // 8)


def test_a_gpu_keeps_the_same_bytes() -> None:
    """As a CPU of the same block, though it divides by numbers otherwise."""
    pytest.importorskip("triton", reason="Triton: pip install 'tiered-kv[cuda]'")
    payloads = torch.randn(32, NHD.payload_bytes // 2, generator=torch.Generator().manual_seed(0)).bfloat16()
    payloads, codec = payloads.view(torch.uint8), FP8Codec(NHD)
    with fake_cuda() as fake:
        theirs = torch.empty(payloads.shape, dtype=torch.uint8, device="cuda:0")
        theirs.copy_(payloads)
        with torch.cuda.stream(torch.cuda.Stream("cuda:0")):  # type: ignore[no-untyped-call]  # of torch
            stored = codec.encode(theirs)
        fake.run()
        assert stored.device.type == "cuda"
        assert torch.equal(stored, codec.encode(payloads))


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "int8"])
def test_other_dtypes_are_refused(dtype: str) -> None:
    """When the cache is opened, with the dtype."""
    with pytest.raises(ConfigurationError, match=f"bfloat16 or float16, not of {dtype}"):
        FP8Codec(KVGroup(1, 1, 8, dtype, 4))


def test_codecs_by_name() -> None:
    """None of a codec is no codec; an unknown one is an error that says what there is."""
    assert make_codec("none", NHD) is None
    assert isinstance(make_codec("fp8", NHD), FP8Codec)
    with pytest.raises(ConfigurationError, match="one of none, fp8, exponent, got 'zstd'"):
        make_codec("zstd", NHD)


@given(engine=engines(dtypes=("bfloat16", "float16")), data=st.data())
def test_pages_go_through_slots_whatever_the_layout(engine: Engine, data: st.DataObject) -> None:
    """Slots hold the encoded payload and nothing else changes; layer by layer gives the same bytes, there and back."""
    codec, num_layers = FP8Codec(engine.group), engine.group.num_layers
    caches = engine.bind(codec)
    pages, slots = data.draw(places(engine.group))
    parts = data.draw(st.permutations([slice(layer, layer + 1) for layer in range(num_layers)]))
    rows, by_layer, untouched = rows_for(caches), rows_for(caches), rows_for(caches)
    gather_blocks(caches, pages, rows, slots)
    for part in parts:
        gather_blocks(caches, pages, by_layer, slots, layers=part)
    assert torch.equal(rows, by_layer)
    words = caches.stored_bytes // 8
    raw = [bytearray(engine.block(block.tolist())) for block in pages.reshape(len(slots), -1 if len(slots) else 1)]
    for slot, payload in zip(slots.tolist(), raw, strict=True):
        encoded = codec.encode(torch.frombuffer(payload, dtype=torch.uint8)[None])
        assert torch.equal(rows[slot, :words], encoded[0])
        untouched[slot, :words] = encoded[0]
    assert torch.equal(rows, untouched)

    scatter_blocks(rows, slots, caches, pages)
    at_once = [each.clone() for each in engine.memory]
    if len(slots):
        decoded = codec.decode(rows[slots, :words]).numpy()
        blocks = pages.reshape(len(slots), -1).tolist()
        assert [engine.block(block) for block in blocks] == [each.tobytes() for each in decoded]
    engine.wipe(pages)
    for part in parts:
        scatter_blocks(rows, slots, caches, pages, layers=part)
    assert all(torch.equal(*pair) for pair in zip(engine.memory, at_once, strict=True))


def test_a_slot_of_the_payloads_half_is_enough() -> None:
    """But not a shorter one."""
    group = KVGroup(1, 1, 4096, "bfloat16", 2)
    kv = [torch.ones(2, 4, 2, 1, 4096).bfloat16()]
    caches = PagedCaches.bind(kv, group, axes="PBNHD", device=CPUDevice(), codec=FP8Codec(group))
    assert caches.stored_bytes == 4 * 4096 + 8
    gather_blocks(caches, np.array([1]), torch.zeros(1, 2049, dtype=torch.int64), np.array([0]))
    with pytest.raises(LayoutMismatchError, match="a block of 16392 bytes does not fit a slot of 16384"):
        gather_blocks(caches, np.array([1]), torch.zeros(1, 2048, dtype=torch.int64), np.array([0]))


def test_more_blocks_than_a_buffer_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are encoded piece by piece, to the same bytes, and come back by pieces too."""
    kv = [torch.randn(2, 13, 4, 3, 8, dtype=torch.bfloat16) for _layer in range(2)]
    caches = PagedCaches.bind(kv, NHD, device=CPUDevice(), codec=FP8Codec(NHD))
    at_once, in_pieces = rows_for(caches), rows_for(caches)
    pages, slots = np.array([3, 12, 0, 7, 5]), np.array([6, 0, 4, 1, 2])
    gather_blocks(caches, pages, at_once, slots)
    scatter_blocks(at_once, slots, caches, pages)
    expected = [each.clone() for each in kv]
    monkeypatch.setattr(staging, "PIECE_BYTES", 2 * NHD.payload_bytes)
    gather_blocks(caches, pages, in_pieces, slots)
    for each in kv:
        each[:, torch.from_numpy(pages)] = 0
    scatter_blocks(at_once, slots, caches, pages)
    assert all(torch.equal(*pair) for pair in zip(kv, expected, strict=True))
    gather_blocks(caches, pages, at_once, slots)
    scatter_blocks(in_pieces, slots, caches, pages)
    assert all(torch.allclose(*pair, rtol=0.2, atol=0.1) for pair in zip(kv, expected, strict=True))
