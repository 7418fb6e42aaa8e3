"""Bytes that are almost right: what a reader has to take from a medium, a server or a network.

A test draws a seed by Hypothesis and makes `NUM_VARIANTS` inputs of it, as drawing costs more than most readers take:
some 1,600 inputs by `make test`, over a million by `make fuzz`.
"""

import random
import re
from collections.abc import Iterator
from itertools import islice

from hypothesis import settings

NUM_VARIANTS = 128 if settings.get_current_profile_name() == "torture" else 16
_INSERTED = (b"\r\n", b"$-1", b"0", b"")
_DIGIT = re.compile(b"[0-9]")
_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 1000, 4096, 0x7FFFFFFF, 0xFFFFFFFF, 2**62, 2**63, 2**64 - 1)


def variants(original: bytes, seed: int, *, times: int = 1) -> Iterator[bytearray]:
    """Yield bytes that differ from the original in few places, or in their length; none is the original."""
    rng = random.Random(seed)
    left = times * NUM_VARIANTS
    while left:
        changed = bytearray(original)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            _change(changed, rng)
        if changed != original:
            left -= 1
            yield changed


def pieces(data: bytes, rng: random.Random) -> list[bytes]:
    """Cut bytes as a network might, into some 200 pieces at most."""
    size = max(rng.choice((1, 7, 100, 5000, len(data) + 1)), len(data) // 200)
    return [data[start : start + size] for start in range(0, len(data), size)]


def _change(data: bytearray, rng: random.Random) -> None:
    at = int(rng.random() * (len(data) + 1))
    match int(rng.random() * 7):
        case 0 if at < len(data):
            data[at] ^= 1 << rng.getrandbits(3)
        case 1 if at < len(data):
            data[at] = rng.getrandbits(8)
        case 2:  # a number where a number may be
            width = rng.choice((1, 2, 4, 8))
            at -= at % width
            data[at : at + width] = (rng.choice(_NUMBERS) % 256**width).to_bytes(width, "little")
        case 3:  # a sector or a part of one is lost, or another's
            length, source = rng.choice((8, 16, 64, 512)), rng.randrange(len(data) + 1)
            found = rng.choice((bytes(length), b"", data[source : source + length]))
            data[at : at + length] = found or rng.randbytes(length)
        case 4:
            del data[at : at + rng.choice((1, 2, 64, len(data)))]
        case 5:
            data[at:at] = rng.choice(_INSERTED) or rng.randbytes(rng.choice((1, 8, 600)))
        case _:  # a decimal number, as text protocols have them
            digits = [found.start() for found in islice(_DIGIT.finditer(data), 32)]
            if digits:
                data[rng.choice(digits)] = rng.choice(b"0123456789-")
