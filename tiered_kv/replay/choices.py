"""Which tiers are worth their price: from hit rates by size, prices, and how fast blocks come from each medium.

A hit is worth the time that the engine need not compute, less the time that the block takes to come; an hour of that
is worth what an hour of the engine costs. Tiers hold what the ones above them hold, as with ``write="through"``: so a
lower one is worth what it has beyond them.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, Final

import numpy as np
from pydantic import ByteSize, Field, field_validator

from tiered_kv.replay.curves import Curve
from tiered_kv.replay.report import GIB
from tiered_kv.replay.simulated import BlockCost
from tiered_kv.replay.simulated_chain import NO_BLOCK, TierPlan, check_order
from tiered_kv.settings.registry import OWN_MEDIA
from tiered_kv.settings.setting_errors import Checked
from tiered_kv.traces import Trace
from tiered_kv.values.errors import ConfigurationError

HOURS_A_MONTH: Final = 730.0
_TIB: Final = 2**40
_MOST_MEDIA: Final = 4
_NUM_SIZES: Final = 24
"""Sizes that are tried of each medium, besides none."""

_Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Medium(Checked):
    """A medium that can be bought, and at which price."""

    name: str = Field(min_length=1)
    """A tier's name; ``cpu`` and ``gpu`` are memory."""
    price_per_gib_month: _Price
    """Of its capacity, in the currency of ``engine_price_per_hour``."""
    read_bandwidth: Annotated[ByteSize, Field(gt=0)]
    """Bytes a second that blocks come with."""
    policy: str = "lru"
    """Of eviction there."""
    most: ByteSize | None = None
    """As much as can be had; no bound if left out."""
    price_per_tib_written: _Price = 0.0
    """What wear costs: of a drive, its price by the TiB that it may be written."""

    @property
    def is_memory(self) -> bool:
        """Whether blocks lie there without a record's header."""
        return self.name in OWN_MEDIA


class Prices(Checked):
    """What things cost, in any one currency."""

    engine_price_per_hour: _Price = 2.5
    """Of what computes prompts, whose time a hit saves."""
    media: tuple[Medium, ...] = Field(
        default=(
            Medium(name="cpu", price_per_gib_month=2.5, read_bandwidth=ByteSize(20 * 10**9)),
            Medium(name="nvme", price_per_gib_month=0.1, read_bandwidth=ByteSize(3 * 10**9)),
        ),
        max_length=_MOST_MEDIA,
    )
    """Fastest first. What stands here is an example to be replaced by one's own."""

    @field_validator("media")
    @classmethod
    def _check_media(cls, media: tuple[Medium, ...]) -> tuple[Medium, ...]:
        if not media:
            raise ValueError("there is none to choose from: name one at least")
        check_order([medium.name for medium in media])
        return media

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> "Prices":
        """Read a file with ``engine_price_per_hour`` and ``[[media]]``.

        Raises:
            ConfigurationError: It is no TOML, or says what cannot be; the field is named.
            OSError: It cannot be read.
        """
        try:
            return cls.of(tomllib.loads(Path(path).read_text(encoding="utf-8")), str(path))
        except (ValueError, RecursionError) as error:  # of syntax or of encoding
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(f"{path} is no TOML: {error}") from None

    @classmethod
    def of(cls, given: Mapping[str, object], source: str) -> "Prices":
        """Make them of what ``source`` gives.

        Raises:
            ConfigurationError: It says what cannot be; source and field are named.
        """
        try:
            return cls.model_validate(given)
        except ConfigurationError as error:
            raise ConfigurationError(f"{source}: {error}") from None


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """One tier of a choice.

    Attributes:
        name: Of the medium.
        num_bytes: Of capacity, headers included.
        num_blocks: That it holds.
        policy: Of eviction.
        hit_rate: Blocks that come from here, of all asked for.
        price_a_month: Of its capacity, and of what is written.
    """

    name: str
    num_bytes: int
    num_blocks: int
    policy: str
    hit_rate: float
    price_a_month: float

    def as_tier(self) -> TierPlan:
        """Return the tier as a replay takes it."""
        return TierPlan(self.name, self.num_bytes, self.policy, is_memory=self.name in OWN_MEDIA)


@dataclass(frozen=True, slots=True)
class Choice:
    """Tiers, what they cost and what they are worth in a month like the trace.

    Attributes:
        tiers: Fastest first; none of them is a choice, too.
        hit_rate: Of all together.
        saved_s: Seconds of the engine that an hour of the trace saves, loading taken into account.
        price_a_month: Of all tiers.
        saved_a_month: What the engine's time is worth.
    """

    tiers: tuple[PlannedTier, ...]
    hit_rate: float
    saved_s: float
    price_a_month: float
    saved_a_month: float

    @property
    def gain_a_month(self) -> float:
        """What is saved beyond the price."""
        return self.saved_a_month - self.price_a_month


def choices(trace: Trace, curves: Mapping[str, Curve], prices: Prices, cost: BlockCost) -> list[Choice]:
    """Return the best choice of sizes for each set of media, the best of all first.

    Args:
        trace: The requests.
        curves: By policy: those of all media.
        prices: Of the engine and the media.
        cost: Of a token.

    Raises:
        ConfigurationError: The trace takes no time, so that nothing can be said of a month, or has no blocks.
    """
    if not trace.num_references:
        raise ConfigurationError(NO_BLOCK)
    if not trace.seconds:
        raise ConfigurationError("all requests of the trace came at once: a plan needs to know how many come in a day")
    best: dict[tuple[str, ...], Choice] = {}
    for sizes in product(*(_sizes(each, trace, cost) for each in prices.media)):
        if any(lower <= upper for upper, lower in pairwise(each for each in sizes if each)):
            continue  # a tier no larger than one above it has nothing of its own
        choice = _choice(sizes, trace, curves, prices, cost)
        names = tuple(each.name for each in choice.tiers)
        if names not in best or choice.gain_a_month > best[names].gain_a_month:
            best[names] = choice
    return sorted(best.values(), key=lambda each: -each.gain_a_month)


def _sizes(medium: Medium, trace: Trace, cost: BlockCost) -> list[int]:
    """Return the numbers of blocks to try of a medium: none, then from the longest prompt to all that there are."""
    most = trace.num_blocks
    if medium.most is not None:
        most = min(most, int(medium.most) // _block_bytes(medium, trace, cost))
    if most < 1:
        return [0]
    least = min(most, max(len(each.ids) for each in trace.requests))
    return [0, *np.unique(np.geomspace(max(1, least), most, _NUM_SIZES).round().astype(np.int64)).tolist()]


def _choice(sizes: Sequence[int], trace: Trace, curves: Mapping[str, Curve], prices: Prices, cost: BlockCost) -> Choice:
    blocks_a_s = trace.num_references / trace.seconds
    payload_bytes = cost.token_bytes * trace.block_size
    compute_s = trace.block_size / cost.prefill_tokens_a_s * _fill_of(trace)
    tiers, found, saved = [], 0.0, 0.0
    chosen = [(medium, n) for medium, n in zip(prices.media, sizes, strict=True) if n]
    total = max((curves[medium.policy].at(n) for medium, n in chosen), default=0.0)
    for medium, n in chosen:
        here = max(found, curves[medium.policy].at(n))
        block_bytes = _block_bytes(medium, trace, cost)
        written_a_month = (1.0 - total) * blocks_a_s * block_bytes * 3600.0 * HOURS_A_MONTH
        price = n * block_bytes / GIB * medium.price_per_gib_month
        price += written_a_month / _TIB * medium.price_per_tib_written
        tiers.append(PlannedTier(medium.name, n * block_bytes, n, medium.policy, here - found, price))
        saved += (here - found) * blocks_a_s * max(0.0, compute_s - payload_bytes / int(medium.read_bandwidth))
        found = here
    return Choice(
        tuple(tiers),
        found,
        saved * 3600.0,
        sum(each.price_a_month for each in tiers),
        saved * HOURS_A_MONTH * prices.engine_price_per_hour,
    )


def _fill_of(trace: Trace) -> float:
    """Return how full blocks are: the last one of a prompt may be partly filled."""
    return min(1.0, trace.input_tokens / (trace.num_references * trace.block_size))


def _block_bytes(medium: Medium, trace: Trace, cost: BlockCost) -> int:
    return TierPlan(medium.name, None, is_memory=medium.is_memory).block_bytes(cost.token_bytes * trace.block_size)
