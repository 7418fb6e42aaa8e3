from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.values.errors import ConfigurationError, LayoutMismatchError
from tiered_kv.values.keys import ModelIdentity
from tiered_kv.values.layout import PAGE_BYTES, KVGroup, KVLayout, blocks_within, fingerprint, layer_tensors

NHD = KVGroup(num_layers=3, num_kv_heads=4, head_dim=8, dtype="bfloat16", block_size=16)
HND = replace(NHD, order="HND")
MLA = KVGroup(num_layers=3, num_kv_heads=1, head_dim=72, dtype="bfloat16", block_size=16, order="MLA")


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Make a tensor of a shape, of no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("kv_caches", "wanted"),
    [
        pytest.param([tensor(2, 9, 16, 4, 8)] * 3, NHD, id="PBNHD, as in FlashAttention"),
        pytest.param([tensor(9, 2, 16, 4, 8)] * 3, NHD, id="BPNHD, as in FlashInfer"),
        pytest.param([tensor(9, 2, 4, 16, 8)] * 3, HND, id="BPHND"),
        pytest.param({"a": tensor(2, 9, 4, 16, 8), "b": tensor(2, 9, 4, 16, 8)}, replace(HND, num_layers=2), id="dict"),
        pytest.param([(tensor(9, 16, 4, 8), tensor(9, 16, 4, 8))] * 3, NHD, id="K and V apart"),
        pytest.param([(tensor(9, 4, 16, 8), tensor(9, 4, 16, 8))] * 3, HND, id="K and V apart, HND"),
        pytest.param(tensor(3, 2, 9, 16, 4, 8), NHD, id="one tensor for all layers"),
        pytest.param([tensor(9, 16, 72)] * 3, MLA, id="latents"),
        pytest.param(
            [tensor(2, 9, 16, 4, 8, dtype=torch.float8_e4m3fn)] * 3, replace(NHD, dtype="float8_e4m3fn"), id="fp8"
        ),
    ],
)
def test_a_layout_is_read_off_the_engines_tensors(kv_caches: object, wanted: KVGroup) -> None:
    """However the engine lays out its pages, the layout is found, and is that of the bytes and not of the tensors."""
    assert KVLayout.from_tensors(kv_caches, block_size=16) == KVLayout((wanted,))


def test_a_key_may_name_several_pages() -> None:
    """Small pages of an engine are put together to blocks."""
    group = KVLayout.from_tensors([tensor(2, 9, 16, 4, 8)], block_size=64, page_size=16).groups[0]
    assert (group.pages_per_block, group.page_size, group.block_size) == (4, 16, 64)


def test_groups_of_different_shapes_make_one_layout() -> None:
    """A hybrid model is read group by group, in the order given."""
    layout = KVLayout.from_groups([[tensor(2, 9, 16, 4, 8)] * 3, [tensor(9, 16, 72)] * 3], block_size=16)
    assert layout.groups == (NHD, MLA)
    assert layout.payload_bytes == NHD.payload_bytes + MLA.payload_bytes


@pytest.mark.parametrize("slots", [0, -1, 1.5, float("nan"), float("inf"), True, "1", None])
def test_a_share_of_slots_is_a_part(slots: object) -> None:
    """Of the blocks: none, more than all, or no number is refused."""
    with pytest.raises(ConfigurationError, match="slots_per_block"):
        replace(NHD, slots_per_block=slots)  # type: ignore[arg-type]  # as a newcomer writes it


def test_of_slots_the_largest_group_has_one_for_each_block() -> None:
    """Whatever the numbers, which are no part of what a block is."""
    tensors = [[tensor(2, 9, 16, 4, 8)] * 3, [tensor(9, 16, 72)] * 3]
    layout = KVLayout.from_groups(tensors, block_size=16, slots_per_block=[0.5, 0.125])
    assert [group.slots_per_block for group in layout.groups] == [1, 0.25]
    plain = KVLayout.from_groups(tensors, block_size=16)
    assert layout == plain
    model = ModelIdentity("m", weights="w")
    assert [fingerprint(model, layout, n) for n in (0, 1)] == [fingerprint(model, plain, n) for n in (0, 1)]
    with pytest.raises(ConfigurationError, match="3 slots_per_block for 2 KV groups"):
        KVLayout.from_groups(tensors, block_size=16, slots_per_block=[1, 1, 1])


@given(st.integers(0, 1 << 24), st.lists(st.floats(1e-6, 1), min_size=1, max_size=4), st.integers(1, 5))
def test_a_tier_holds_as_many_blocks_as_fit(capacity: int, shares: list[float], pages: int) -> None:
    """Not one more has room, and these have."""
    groups = KVLayout(tuple(replace(NHD, slots_per_block=share) for share in shares)).groups

    def needed(num_blocks: int) -> int:
        return sum(group.num_slots(num_blocks) * pages * PAGE_BYTES for group in groups)

    num_blocks = blocks_within(capacity, needed)
    assert needed(num_blocks) <= capacity < needed(num_blocks + 1)


@pytest.mark.parametrize(
    ("group", "fragment_bytes", "payload_bytes", "stride_bytes"),
    [
        (NHD, 16 * 4 * 8 * 2, 16 * 4 * 8 * 2 * 2 * 3, 8192),
        (HND, 1024, 6144, 8192),
        (MLA, 16 * 72 * 2, 6912, 8192),
        (replace(NHD, dtype="int8", page_size=4), 4 * 4 * 8, 3072, 4096),
        (KVGroup(32, 8, 128, "bfloat16", 16), 32768, 2 * 1024**2, 2 * 1024**2),
    ],
)
def test_sizes(group: KVGroup, fragment_bytes: int, payload_bytes: int, stride_bytes: int) -> None:
    """A payload is every byte of the block once, and a slot is whole pages of memory."""
    assert (group.fragment_bytes, group.payload_bytes, group.stride_bytes) == (
        fragment_bytes, payload_bytes, stride_bytes
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kv_caches", "axes", "message"),
    [
        pytest.param([tensor(2, 2, 16, 4, 8)], None, "may be read as PBNHD or BPNHD", id="two pages"),
        pytest.param([tensor(2, 9, 16, 16, 8)], None, "may be read as PBNHD or PBHND", id="as many heads as tokens"),
        pytest.param(tensor(3, 9, 2, 16, 4, 8), None, "may be read as LBPNHD or BLPNHD", id="layers or pages first"),
        pytest.param(tensor(3, 9, 16, 72), None, "LBND", id="packed latents"),
        pytest.param(
            [tensor(2, 9, 8, 4, 8)],
            None,
            "pages of 16 tokens is no arrangement known here: no axis that may be a page's tokens has 16 elements",
            id="other page size",
        ),
        pytest.param(tensor(2, 9, 16, 4, 8), None, "those of single layers go into a list", id="no list"),
        pytest.param([tensor(1024, 16, 32)] * 2, None, "or as 1024 tokens of 16 heads: pass axes='BND'", id="no pages"),
        pytest.param([tensor(16, 8)], None, "no arrangement known here", id="too few axes"),
        pytest.param([tensor(2, 9, 16, 4, 8)], "PBNH", "do not name each axis", id="an axis left out"),
        pytest.param([tensor(2, 9, 16, 4, 8)], "PBNHX", r"by letters of LPBNHD \(capitals\)", id="unknown letter"),
        pytest.param([tensor(2, 9, 16, 4, 8)], "PBLHD", "B, N and D included", id="no tokens"),
        pytest.param([tensor(2, 9, 16, 4, 8)], "LBNHD", "leave out L", id="layers named twice"),
        pytest.param([tensor(9, 16, 4, 8)], "BNHD", "make 1 planes, not 2", id="only K"),
        pytest.param([(tensor(9, 16, 72), tensor(9, 16, 72))], None, "make 2 planes, not 1", id="K and V as latents"),
        pytest.param([tensor(3, 9, 16, 4, 8)], "PBNHD", r"has 3 planes \(K and V\) instead of 2", id="three planes"),
        pytest.param([tensor(9, 16, 72), tensor(9, 16, 64)], None, "layer 1 is", id="layers of two shapes"),
        pytest.param([tensor(9, 16, 72), tensor(9, 16, 72, dtype=torch.int8)], None, "of int8", id="of two dtypes"),
        pytest.param([], None, "no tensors", id="nothing"),
        pytest.param([tensor(9, 16, 72, dtype=torch.complex64)], None, "'complex64' is not kept", id="dtype"),
    ],
)
def test_what_shapes_do_not_tell_is_not_guessed(kv_caches: object, axes: str | None, message: str) -> None:
    """A layout that could be read in two ways, or in none, is an error that says which and what to pass."""
    with pytest.raises(ConfigurationError, match=message):
        KVLayout.from_tensors(kv_caches, block_size=16, axes=axes)


@pytest.mark.parametrize(("shape", "axes"), [((32, 16, 576), None), ((32, 16, 128), "BND"), ((33, 16, 128), None)])
def test_latents_are_told_from_tokens_without_pages(shape: tuple[int, ...], axes: str | None) -> None:
    """No head is as wide as the latents of large models, and tokens without pages are a multiple of a page's."""
    (group,) = KVLayout.from_tensors([tensor(*shape)], block_size=16, axes=axes).groups
    assert (group.order, group.head_dim, group.num_planes) == ("MLA", shape[2], 1)


@pytest.mark.parametrize("axes", ["PBNHD", "BPNHD"])
def test_axes_say_what_shapes_do_not_tell(axes: str) -> None:
    """With axes given, an ambiguous shape is read as told."""
    assert KVLayout.from_tensors([tensor(2, 2, 16, 4, 8)], block_size=16, axes=axes).groups[0].num_planes == 2


@pytest.mark.parametrize(
    ("group", "shape", "packed", "axes"),
    [
        (NHD, (2, 9, 16, 4, 8), False, "PBNHD"),
        (NHD, (9, 2, 16, 4, 8), False, "BPNHD"),
        (NHD, (9, 16, 4, 8), False, "BNHD"),
        (HND, (9, 3, 2, 4, 16, 8), True, "BLPHND"),
        (MLA, (9, 16, 72), False, "BND"),
        (MLA, (3, 9, 16, 72), True, "LBND"),
    ],
)
def test_axes_of_a_known_group_are_found(group: KVGroup, shape: tuple[int, ...], packed: bool, axes: str) -> None:  # noqa: FBT001
    """At registration the group is known, and so are the axes of tensors that hold it."""
    assert group.find_axes(shape, packed=packed) == axes


def test_axes_that_do_not_fit_the_group_are_refused() -> None:
    """What tensors of another model have otherwise is said in words; two readings are both named."""
    for shape, packed, message in (
        ((2, 9, 16, 5, 8), False, "read as PBNHD, it has 5 KV heads instead of 4$"),
        ((2, 9, 16, 4, 9), False, "read as PBNHD, it has 9 elements a head instead of 8$"),
        ((2, 9, 32, 5, 8), False, "has 32 tokens a page instead of 16 and 5 KV heads instead of 4$"),
        ((9, 2, 2, 16, 4, 8), True, "read as BLPNHD, it has 2 layers instead of 3$"),
        ((9, 16), False, "it has 2 axes, not 4$"),
    ):
        with pytest.raises(LayoutMismatchError, match=message):
            NHD.find_axes(shape, packed=packed)
    with pytest.raises(LayoutMismatchError, match="any of BPNHD, PBNHD: pass axes="):
        NHD.find_axes((2, 2, 16, 4, 8), packed=False)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_layers", 0, "positive int, got 0"),
        ("head_dim", 8.0, "positive int, got 8.0"),
        ("num_kv_heads", True, "positive int, got True"),
        ("dtype", "float64", "one of float32"),
        ("dtype", "bf16", "write 'bfloat16'"),
        ("num_layers", "3", "positive int, got '3'"),
        ("order", "DNH", "'NHD', 'HND', 'MLA' or 'opaque'"),
        ("order", "MLA", "must be 1, got 4"),
        ("order", "opaque", "no heads and no dtype are known: write KVGroup.opaque"),
        ("opaque_bytes", 64, "for opaque groups, this one is NHD"),
        ("tag", "mine", "for opaque groups, this one is NHD"),
        ("page_size", 5, "block_size 16 is not a multiple of the engine's page_size 5"),
        ("page_size", -16, "page_size must be an int, 0 or more, got -16"),
    ],
)
def test_a_group_that_cannot_be_is_refused(field: str, value: object, message: str) -> None:
    """Each wrong field is named with what it was."""
    fields = {"num_layers": 3, "num_kv_heads": 4, "head_dim": 8, "dtype": "int8", "block_size": 16, field: value}
    if value == "opaque":
        fields["opaque_bytes"] = 64
    with pytest.raises(ConfigurationError, match=message):
        KVGroup(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_bytes": 0}, "opaque_bytes must be a positive int, got 0"),
        ({"tag": "\ud800"}, "tag must be text that UTF-8 can hold"),
        ({"num_layers": 0}, "num_layers must be a positive int, got 0"),
        ({"tag": ""}, "needs a tag that says what its bytes are"),
        ({"tag": 7}, "share nothing; got 7"),
        ({"page_size": 5}, "block_size 16 is not a multiple of the engine's page_size 5"),
    ],
)
def test_an_opaque_group_says_its_size_and_what_it_is(fields: dict[str, object], message: str) -> None:
    """Without a tag nothing would keep two engines' bytes of one size apart."""
    with pytest.raises(ConfigurationError, match=message):
        KVGroup.opaque(**{"num_bytes": 96, "tag": "test", "block_size": 16} | fields)  # type: ignore[arg-type]


def test_an_opaque_group_is_its_bytes() -> None:
    """A page of one layer is so many bytes, a block those of all its pages and layers; there are no planes."""
    group = KVGroup.opaque(96, tag="test", block_size=64, page_size=16, num_layers=3)
    assert (group.fragment_bytes, group.payload_bytes, group.stride_bytes) == (96, 96 * 4 * 3, 4096)
    assert (group.num_planes, group.pages_per_block) == (1, 4)


def test_opaque_groups_share_what_all_agree_on() -> None:
    """Another size, tag, number of layers or pages is another fingerprint, and so is a group that is no bytes."""
    model = ModelIdentity("m", weights="w")

    def digest(group: KVGroup) -> bytes:
        return fingerprint(model, KVLayout((group,)), 0)

    one = KVGroup.opaque(96, tag="one", block_size=16)
    others = [
        KVGroup.opaque(96, tag="two", block_size=16),
        KVGroup.opaque(48, tag="one", block_size=16, num_layers=2),
        KVGroup.opaque(48, tag="one", block_size=16, page_size=8),
        KVGroup(1, 1, 6, "uint8", block_size=16, order="MLA"),
    ]
    assert len({digest(each) for each in (one, *others)}) == 5
    assert digest(one) == digest(KVGroup.opaque(96, tag="one", block_size=16, page_size=16))


def test_fingerprints_of_other_groups_are_as_old_as_the_format() -> None:
    """What opaque groups brought is not in them: what was stored before is found."""
    layout = KVLayout((NHD, MLA))
    assert (
        fingerprint(ModelIdentity("m", weights="w"), layout, 0).hex()
        == "056a5b25130e9f2334022329ff5cb3ac0e7dfeb7ed0c1aaaf92098bd7b569f0b"
    )


def test_a_group_is_made_of_what_torch_and_numpy_have() -> None:
    """Sizes read off arrays and a tensor's dtype make the same group, and so the same fingerprint, as plain ones."""
    like = KVGroup(np.int64(3), torch.tensor(4), 8, torch.int8, np.uint8(16))  # type: ignore[arg-type]
    assert like == KVGroup(3, 4, 8, "int8", 16)
    assert repr(like) == repr(KVGroup(3, 4, 8, "torch.int8", 16))


def test_a_layout_has_groups() -> None:
    """One is as good as a tuple of one; none, or something else in its place, is refused."""
    for one in (NHD, [NHD]):
        layout = KVLayout(one)  # type: ignore[arg-type]  # as a newcomer writes it
        assert layout == KVLayout((NHD,))
        assert hash(layout) == hash(KVLayout((NHD,)))
    for groups in ((), (NHD, "NHD"), 7, "NHD"):
        with pytest.raises(ConfigurationError, match="non-empty tuple of KVGroup"):
            KVLayout(groups)  # type: ignore[arg-type]


def test_tensors_keep_the_order_of_layers() -> None:
    """A dict's order, a list's order and a pair's order are the order of the payload."""
    k, v = tensor(9, 16, 4, 8), tensor(9, 16, 4, 8)
    layers, packed = layer_tensors({"1": (k, v), "0": (v, k)})
    assert not packed
    assert [layer[0] is k for layer in layers] == [True, False]
    assert layer_tensors(k)[1]
