"""The codec exponent: every bit comes back, whatever it is, in a length that is known before."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tiered_kv.tiers.records import CHUNK, ExponentCodec, make_record_codec
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.layout import KVGroup

U16 = NDArray[np.uint16]


def encoded(values: U16) -> bytearray | None:
    """Encode bf16 values, given as their bits; None if they do not fit."""
    codec = ExponentCodec(values.nbytes)
    out = bytearray(b"\xa5" * codec.stored_bytes)
    return out if codec.encode(values.data.cast("B"), memoryview(out)) else None


def decoded(stored: bytearray, num_values: int) -> U16 | None:
    """Undo it; None if it is refused."""
    values = np.full(num_values, 0xA5A5, np.uint16)
    is_right = ExponentCodec(2 * num_values).decode(memoryview(stored), values.data.cast("B"))
    return values if is_right else None


def like_kv(num_values: int, seed: int = 0) -> U16:
    """Return bits of values as keys and values have them: each chunk of another size."""
    chance = np.random.default_rng(seed)
    sizes = np.repeat(2.0 ** chance.integers(-6, 6, -(-num_values // CHUNK)), CHUNK)[:num_values]
    values = (chance.standard_normal(num_values) * sizes).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


@st.composite
def any_values(draw: st.DrawFn) -> U16:
    """Draw bits like KV, with zeros and any bits at all here and there."""
    num_values = draw(st.integers(1, 3 * CHUNK + 5))
    values = like_kv(num_values, draw(st.integers(0, 1000)))
    chance = np.random.default_rng(draw(st.integers(0, 1000)))
    values[chance.random(num_values) < draw(st.sampled_from((0.0, 0.3, 1.0)))] &= 0x8000
    odd = chance.random(num_values) < draw(st.sampled_from((0.0, 0.001, 0.01, 1.0)))
    values[odd] = chance.integers(0, 1 << 16, int(odd.sum()), dtype=np.uint16)
    return values


@given(values=any_values())
def test_every_bit_comes_back_or_nothing_is_kept(values: U16) -> None:
    """NaNs with their payloads, infinities, both zeros, subnormals, random bits; and the same bytes each time."""
    before = values.copy()
    stored = encoded(values)
    assert np.array_equal(values, before)
    if stored is not None:
        back = decoded(stored, len(values))
        assert back is not None
        assert np.array_equal(back, values)
        assert encoded(values) == stored


@given(num_values=st.integers(1, 3 * CHUNK), special=st.sampled_from((0x7F80, 0xFF80, 0x7FC1, 0x0001, 0x8000, 0x7F7F)))
def test_a_few_odd_values_always_fit(num_values: int, special: int) -> None:
    """The list holds one value in 256, and 16 in any block; of zeros any number fits."""
    values = like_kv(num_values)
    values[:: 2 * CHUNK] = special
    assert encoded(values) is not None
    values[1::2] = 0x8000
    assert encoded(values) is not None


@pytest.mark.parametrize("num_values", [CHUNK, 64 * CHUNK, 100 * CHUNK + 7])
def test_the_length_is_known_before(num_values: int) -> None:
    """12 bits a value, the list, and a byte a chunk: below 77 % of a large block."""
    codec = ExponentCodec(2 * num_values)
    listed = max(16, num_values // 256)
    assert codec.stored_bytes == 4 + 5 * listed - (-num_values // CHUNK) + num_values - (-num_values // 2)
    assert codec.stored_bytes <= 0.775 * 2 * num_values + 80
    stored = encoded(like_kv(num_values))
    assert stored is not None
    assert len(stored) == codec.stored_bytes


def test_random_bits_do_not_fit_and_say_so() -> None:
    """Their exponents have no 15 that are most of them."""
    assert encoded(np.random.default_rng(0).integers(0, 1 << 16, 8 * CHUNK, dtype=np.uint16)) is None


def of_exponents(counts: dict[int, int]) -> U16:
    """Return a chunk with so many values of each exponent, in no order."""
    exponents = np.repeat(list(counts), list(counts.values())).astype(np.uint16)
    assert len(exponents) == CHUNK
    return np.random.default_rng(0).permutation(exponents << np.uint16(7))


def test_the_15_exponents_are_the_commonest_neighbours() -> None:
    """Not 14 of them, nor 16; what is above them is listed as what is below."""
    counts = {100: 20, 115: 5, **dict.fromkeys(range(101, 114), 100)}
    values = of_exponents({**counts, 114: CHUNK - sum(counts.values())})
    stored = encoded(values)
    assert stored is not None
    assert int.from_bytes(stored[:4], "little") == 5
    back = decoded(stored, CHUNK)
    assert back is not None
    assert np.array_equal(back, values)


def test_the_list_holds_as_many_as_it_says() -> None:
    """And no more: of one chunk, 16."""
    values = of_exponents({120: CHUNK - 16, 1: 16})
    stored = encoded(values)
    assert stored is not None
    back = decoded(stored, CHUNK)
    assert back is not None
    assert np.array_equal(back, values)
    assert encoded(of_exponents({120: CHUNK - 17, 1: 17})) is None
    stored[0] = 17
    assert decoded(stored, CHUNK) is None


def test_large_blocks_come_back() -> None:
    """Listed values are found again wherever in a block they are."""
    values = like_kv(100 * CHUNK + 7)
    values[[3, 70 * CHUNK + 11, 100 * CHUNK + 6]] = 0x0080, 0x7FC1, 0x8080
    stored = encoded(values)
    assert stored is not None
    back = decoded(stored, len(values))
    assert back is not None
    assert np.array_equal(back, values)


def test_one_infinity_does_not_spoil_its_chunk() -> None:
    """The 15 exponents are those that most values have, and not always the largest."""
    values = like_kv(8 * CHUNK)
    values[7::CHUNK] = 0x7F80
    stored = encoded(values)
    assert stored is not None
    back = decoded(stored, len(values))
    assert back is not None
    assert np.array_equal(back, values)


def test_decoding_in_place_is_decoding() -> None:
    """What was read into the beginning of a slot becomes the block that the slot is for."""
    values = like_kv(5 * CHUNK)
    stored = encoded(values)
    assert stored is not None
    slot = np.zeros(values.nbytes, np.uint8)
    slot[: len(stored)] = np.frombuffer(stored, np.uint8)
    memory = slot.data
    assert ExponentCodec(values.nbytes).decode(memory[: len(stored)], memory)
    assert np.array_equal(slot.view(np.uint16), values)


@given(data=st.data())
def test_what_nothing_is_encoded_as_is_refused(data: st.DataObject) -> None:
    """Too long a list, places that are none or out of order, exponents that have a code, rests of another block."""
    num_values = 2 * CHUNK
    values = like_kv(num_values)
    values[[5, 900]] = 0x0100, 0x7FC0
    stored = encoded(values)
    assert stored is not None
    listed = max(16, num_values // 256)
    places = np.frombuffer(stored, np.uint32, 1 + listed)
    exponents = np.frombuffer(stored, np.uint8, listed, 4 + 4 * listed)
    assert places[0] >= 2
    bases = np.frombuffer(stored, np.uint8, 2, 4 + 5 * listed)
    n = int(places[0])
    harm = data.draw(st.sampled_from(range(8)))
    if harm == 0:
        places[0] = data.draw(st.integers(listed + 1, 2**32 - 1))
    elif harm == 1:
        places[n] = data.draw(st.integers(num_values, 2**32 - 1))
    elif harm == 2:
        places[1] = places[2]
    elif harm == 3:
        exponents[0] = 0
    elif harm == 4:
        bases[0] = data.draw(st.integers(241, 255))
    elif harm == 5:
        places[1 + n] = data.draw(st.integers(1, 2**32 - 1))
    elif harm == 6:
        exponents[n] = data.draw(st.integers(1, 255))
    else:
        places[1] = data.draw(st.integers(6, 100))  # which has a code
    assert decoded(stored, num_values) is None


@given(stored=st.binary(min_size=200, max_size=200))
def test_any_bytes_are_decoded_or_refused(stored: bytes) -> None:
    """Never an error, and never past the end of the block."""
    num_values = 1
    while ExponentCodec(2 * num_values).stored_bytes < len(stored):
        num_values += 1
    memory = np.full(2 * num_values + 64, 0x5A, np.uint8)
    fitting = bytearray(stored.ljust(ExponentCodec(2 * num_values).stored_bytes, b"\0"))
    ExponentCodec(2 * num_values).decode(memoryview(fitting), memory.data[: 2 * num_values])
    assert (memory[2 * num_values :] == 0x5A).all()


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (KVGroup(1, 1, 8, "float16", 4), "not of float16"),
        (KVGroup(1, 1, 8, "float8_e4m3fn", 4), "not of float8_e4m3fn"),
        (KVGroup.opaque(4096, tag="t", block_size=4), "not of an opaque KV group"),
    ],
)
def test_other_groups_are_refused(group: KVGroup, message: str) -> None:
    """When the cache is opened, with the dtype; fp16 has too few bits of exponent to save any worth it."""
    with pytest.raises(ConfigurationError, match=message):
        make_record_codec("exponent", group)
    assert make_record_codec("none", group) is None
