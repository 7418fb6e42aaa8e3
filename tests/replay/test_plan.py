from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pydantic import ByteSize

from tiered_kv import ConfigurationError
from tiered_kv.replay import BlockCost, Choice, Medium, Prices, choices, lru_curve, replay
from tiered_kv.replay.pages import headline, page, picture
from tiered_kv.traces import Request, Trace, chat

COST = BlockCost(token_bytes=128 * 1024, prefill_tokens_a_s=10_000.0)


def prices(cpu: float, nvme: float, engine: float = 2.5, **fields: object) -> Prices:
    """Return prices of two media, memory 20 GB/s fast and the drive 3."""
    media = (
        Medium(name="cpu", price_per_gib_month=cpu, read_bandwidth=ByteSize(20 * 10**9)),
        Medium.model_validate({"name": "nvme", "price_per_gib_month": nvme, "read_bandwidth": "3GB"} | fields),
    )
    return Prices(engine_price_per_hour=engine, media=media)


def best(trace: Trace, costs: Prices) -> Choice:
    """Return what comes out best."""
    return choices(trace, {"lru": lru_curve(trace)}, costs, COST)[0]


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Make conversations."""
    return chat(num_requests=500)


def test_what_is_foretold_is_what_a_replay_finds(trace: Trace) -> None:
    """Of each set of tiers, within 0.01, each tier by itself too."""
    for choice in choices(trace, {"lru": lru_curve(trace)}, prices(2.5, 0.1), COST):
        if not choice.tiers:
            continue
        report = replay(trace, [each.as_tier() for each in choice.tiers], COST)
        assert report.hit_rate == pytest.approx(choice.hit_rate, abs=0.01)
        for tier, found in zip(choice.tiers, report.tiers, strict=True):
            assert found.hit_rate == pytest.approx(tier.hit_rate, abs=0.01)
            assert found.capacity_blocks == tier.num_blocks


def test_choosing_takes_time_by_sizes_and_not_by_requests(trace: Trace) -> None:
    """Some hundred sizes are weighed: the requests are gone through a few times in all, however many there are."""

    class Watched(list[Request]):
        num_passes = 0

        def __iter__(self) -> Iterator[Request]:
            self.num_passes += 1
            return super().__iter__()

    requests, curve = Watched(trace.requests), lru_curve(trace)
    choices(Trace("watched", requests, trace.block_size), {"lru": curve}, prices(2.5, 0.1), COST)
    assert requests.num_passes < 10


def test_prices_decide(trace: Trace) -> None:
    """What costs nothing is bought whole, what costs too much not at all, and a slow engine is worth more of it."""
    assert not best(trace, prices(1e9, 1e9)).tiers
    free = best(trace, prices(0.0, 1e9))
    assert [each.name for each in free.tiers] == ["cpu"]
    assert free.hit_rate == pytest.approx(lru_curve(trace).rates[-1])
    cheap, dear = best(trace, prices(2.5, 1e9, engine=2.5)), best(trace, prices(2.5, 1e9, engine=0.5))
    assert cheap.tiers[0].num_blocks > dear.tiers[0].num_blocks
    both = best(trace, prices(2.5, 0.1))
    assert [each.name for each in both.tiers] == ["cpu", "nvme"]
    assert both.gain_a_month == both.saved_a_month - both.price_a_month > cheap.gain_a_month


def test_a_medium_that_is_slower_than_computing_is_worth_nothing(trace: Trace) -> None:
    """A hit that takes longer to load than to compute saves no time."""
    slow = prices(1e9, 0.0, read_bandwidth="1MB")
    assert not best(trace, slow).tiers or best(trace, slow).saved_s == 0.0


def test_a_month_is_the_trace_over_and_over(trace: Trace) -> None:
    """What is saved is hits times what a block takes, less the time to load it."""
    choice = best(trace, prices(0.0, 1e9))
    hits = choice.hit_rate * trace.num_references
    seconds = hits * (512 / 10_000 - 2**26 / 20e9)
    assert choice.saved_s == pytest.approx(seconds * 3600 / trace.seconds)
    assert choice.saved_a_month == pytest.approx(choice.saved_s * 730 * 2.5 / 3600)


def test_wear_and_bounds_count(trace: Trace) -> None:
    """What is written has a price, and no more is planned than can be had."""
    worn = best(trace, prices(1e9, 0.1, price_per_tib_written=1e6))
    assert not worn.tiers
    bounded = best(trace, prices(1e9, 0.0001, most="1GiB"))
    assert bounded.tiers[0].num_bytes <= 2**30


def test_prices_are_read_from_toml(tmp_path: Path) -> None:
    """Sizes as in settings; what is wrong is named."""
    file = tmp_path / "prices.toml"
    file.write_text(
        'engine_price_per_hour = 4\n[[media]]\nname = "cpu"\nprice_per_gib_month = 3\nread_bandwidth = "10GB"\n'
        'policy = "mq"\nmost = "512GiB"\n'
    )
    read = Prices.from_toml(file)
    assert (read.engine_price_per_hour, read.media[0].policy, read.media[0].most) == (4.0, "mq", 512 * 2**30)
    file.write_text('[[media]]\nname = "cpu"\nprice_per_gib_month = -3\nread_bandwidth = "10GB"\n')
    with pytest.raises(ConfigurationError, match=r"media\[0\]\.price_per_gib_month"):
        Prices.from_toml(file)
    file.write_text("media = [")
    with pytest.raises(ConfigurationError, match="is no TOML"):
        Prices.from_toml(file)


def test_a_trace_that_takes_no_time_says_nothing_of_a_month() -> None:
    """Rather than a division by zero."""
    burst = Trace("burst", [Request(0.0, np.array([1, 2]), 32)] * 3, 16)
    with pytest.raises(ConfigurationError, match="came at once"):
        choices(burst, {"lru": lru_curve(burst)}, Prices(), COST)


def test_a_trace_without_blocks_says_nothing_either() -> None:
    """Nothing is asked for, so no tier can be worth anything."""
    empty = Trace("empty", [Request(at, np.empty(0, np.int64), 3) for at in (0.0, 1.0)], 16)
    with pytest.raises(ConfigurationError, match="no request of the trace has a block"):
        choices(empty, {"lru": lru_curve(empty)}, Prices(), COST)


def test_a_page_needs_nothing_beside_it(trace: Trace) -> None:
    """Its picture is inside; what a trace is called is text."""
    named = Trace("<b>", trace.requests, trace.block_size)
    curves = {"lru": lru_curve(trace)}
    options = choices(named, curves, Prices(), COST)
    image = picture(named, curves, options[0], COST)
    assert image.startswith(b"\x89PNG")
    text = page(named, options, Prices(), COST, image, None)
    assert "data:image/png;base64," in text
    assert "http" not in text
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert headline(options[0]) in text
    nothing = choices(named, curves, prices(1e9, 1e9), COST)
    assert "No tier is worth its price" in page(named, nothing, prices(1e9, 1e9), COST, image, None)
