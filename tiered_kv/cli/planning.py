"""``tiered-kv plan``: which tiers a trace makes worth their price."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.markup import escape

from tiered_kv.cli.benching import Measured
from tiered_kv.cli.common import AsJSON, one_line_errors, out, print_json, print_table, read_whole, say, size_of
from tiered_kv.cli.replaying import (
    KV_BYTES,
    BlockSize,
    EngineBlocks,
    PrefillRate,
    TokenBytes,
    TraceFile,
    progress,
    read,
    tell_if_guessed,
)
from tiered_kv.replay import BlockCost, Choice, Curve, Medium, Prices, Survey, choices, lru_curve, replay
from tiered_kv.replay.pages import CHOICE_COLUMNS, assumed, choice_row, headline, page, picture
from tiered_kv.replay.report import gib
from tiered_kv.traces import Trace
from tiered_kv.values.errors import ConfigurationError

_SHOWN: Final = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Sizes in the table, as parts of all blocks of the trace."""
_ROUNDS: Final = 4
_BENCH: Final = TypeAdapter(list[Measured])

Media = Annotated[
    list[str] | None,
    typer.Option(
        "--medium",
        metavar="NAME=PRICE@RATE",
        help="cpu=2.5@20GB: price of a GiB a month, bytes a second; fastest first.",
    ),
]
Bench = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="What `bench --json` printed, - for stdin: instead of RATEs."),
]


def plan_command(
    trace: TraceFile,
    medium: Media = None,
    *,
    prices: Annotated[Path | None, typer.Option(help="A TOML file: engine_price_per_hour, and [[media]].")] = None,
    bench: Bench = None,
    engine_price: Annotated[float | None, typer.Option(min=0.0, help="Of an hour of what computes prompts.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Policies to compare, besides those of the media.")] = None,
    block_size: BlockSize = None,
    kv_bytes: TokenBytes = None,
    prefill_rate: PrefillRate = 10_000.0,
    engine_cache: EngineBlocks = 0,
    check: Annotated[bool, typer.Option(help="Replay the trace on the tiers that come out best.")] = True,
    png: Annotated[Path | None, typer.Option(help="Draw the curves into this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page into this file that needs nothing beside it.")] = None,
    as_json: AsJSON = False,
) -> None:
    """Find the hit rate at every size, and which sizes of which tiers are worth their price.

    Exact for LRU; for other policies from a sample of the blocks. With --engine-cache hit rates are what tiers add to
    what the engine's own cache finds, if blocks are stored when it is about to drop them.
    """
    with one_line_errors():
        cost = BlockCost(size_of("--token-bytes", KV_BYTES if kv_bytes is None else kv_bytes), prefill_rate)
        costs = _prices(prices, medium or [], engine_price, _measured(bench))
        found = read(trace, block_size)
        policies = dict.fromkeys(["lru", *(each.policy for each in costs.media), *(policy or [])])
        foretold = _Foretold(found, list(policies), engine_cache, is_shown=not as_json)
        options = foretold.choices(costs, cost)
        curves, best, checked = foretold.curves(), options[0], None
        if check and best.tiers:
            with progress("checking", len(found.requests), is_shown=not as_json) as advance:
                checked = replay(
                    found, [each.as_tier() for each in best.tiers], cost,
                    engine_blocks=engine_cache, store_when="evicted", on_request=advance,
                )  # fmt: skip
        if png or html:
            image = picture(found, curves, best, cost)
            if png:
                png.write_bytes(image)
            if html:
                html.write_text(page(found, options, costs, cost, image, checked), encoding="utf-8")
    tell_if_guessed(kv_bytes)
    if as_json:
        print_json(
            {
                "trace": found.name,
                "prices": costs.model_dump(mode="json"),
                "token_bytes": cost.token_bytes,
                "prefill_tokens_a_s": cost.prefill_tokens_a_s,
                "curves": {name: _points(found, each) for name, each in curves.items()},
                "choices": [asdict(each) | {"gain_a_month": each.gain_a_month} for each in options],
                "checked_hit_rate": None if checked is None else checked.tiers_hit_rate,
            }
        )
        return
    _show(found, curves, options, costs, cost)
    told = headline(best)
    if checked is not None:
        told += f": foretold hit rate {best.hit_rate:.3f}, replayed {checked.tiers_hit_rate:.3f}"
    out.print()
    say(told)


class _Foretold:
    """The curves of all policies, and what they say is best."""

    def __init__(self, trace: Trace, policies: Sequence[str], engine_blocks: int, *, is_shown: bool) -> None:
        self._trace = trace
        with progress("lru", len(trace.requests), is_shown=is_shown) as advance:
            self._lru = lru_curve(trace, on_request=advance).below(engine_blocks)
        # LRU's curve is exact unless an engine above chooses what it copies out.
        replayed = [each for each in dict.fromkeys(["lru", *policies]) if each != "lru" or engine_blocks]
        self._surveys = {each: Survey(trace, each, self._lru, engine_blocks=engine_blocks) for each in replayed}
        for name, survey in self._surveys.items():
            with progress(name, survey.most_sizes, is_shown=is_shown) as advance:
                survey.explore(advance)

    def curves(self) -> dict[str, Curve]:
        """Return the curves by policy, LRU's first."""
        return {"lru": self._lru} | {name: each.curve for name, each in self._surveys.items()}

    def choices(self, prices: Prices, cost: BlockCost) -> list[Choice]:
        """Return what is best, once the sizes that it has were served themselves, if that goes in a few rounds."""
        options = choices(self._trace, self.curves(), prices, cost)
        for _ in range(_ROUNDS):
            served = [
                self._surveys[each.policy].serve(each.num_blocks)
                for each in options[0].tiers
                if each.policy in self._surveys
            ]
            if not any(served):
                break
            options = choices(self._trace, self.curves(), prices, cost)
        return options


def _prices(
    path: Path | None, given: Sequence[str], engine_price: float | None, measured: Mapping[str, ByteSize]
) -> Prices:
    prices = Prices() if path is None else Prices.from_toml(path)
    media = tuple(_medium(each, measured) for each in given) or prices.media
    if measured and not any(each.name in measured for each in media):
        raise ConfigurationError(f"--bench has {', '.join(measured)}, none of which is a --medium")
    media = tuple(
        each.model_copy(update={"read_bandwidth": measured.get(each.name, each.read_bandwidth)}) for each in media
    )
    priced = prices.engine_price_per_hour if engine_price is None else engine_price
    return Prices.of({"engine_price_per_hour": priced, "media": media}, "--engine-price and --medium")


def _measured(path: Path | None) -> dict[str, ByteSize]:
    """Return by tier how many bytes a second loads were measured to bring."""
    if path is None:
        return {}
    try:
        found = _BENCH.validate_json(read_whole(str(path)))
    except ValidationError:
        raise ConfigurationError(f"--bench {path}: this is not what `tiered-kv bench --json` prints") from None
    loads = [each for each in found if each.direction == "load"]
    for each in loads:
        if each.problem or not 1 <= each.bytes_per_s < math.inf:
            why = each.problem or f"{each.bytes_per_s:g} bytes a second"
            raise ConfigurationError(f"--bench {path}: tier {each.tier!r} was not measured: {why}")
    return {each.tier: ByteSize(round(each.bytes_per_s)) for each in loads}


def _medium(text: str, measured: Mapping[str, ByteSize]) -> Medium:
    name, _, rest = text.partition("=")
    price, _, rate = rest.partition("@")
    rate, _, policy = rate.partition(":")
    if measured and not rate and name not in measured:
        of = ", ".join(measured)
        raise ConfigurationError(
            f"--medium {text}: the bench has no rate of {name!r}, but of {of}: write NAME=PRICE@RATE"
        )
    try:
        fields = {
            "name": name,
            "price_per_gib_month": float(price),
            "read_bandwidth": rate or measured[name],
            "policy": policy or "lru",
        }
        return Medium.model_validate(fields)
    except (ValueError, KeyError):  # pydantic's errors are such, too
        raise ConfigurationError(
            f"--medium {text}: write NAME=PRICE@RATE, the rate in bytes a second, e.g. nvme=0.1@3GB, or "
            "nvme=0.1@3GB:lru with a policy"
        ) from None


def _points(trace: Trace, curve: Curve) -> list[tuple[int, float]]:
    sizes = dict.fromkeys(round(part * trace.num_blocks) for part in _SHOWN)
    return [(size, curve.at(size)) for size in sizes]


def _show(trace: Trace, curves: dict[str, Curve], options: Sequence[Choice], prices: Prices, cost: BlockCost) -> None:
    block_bytes = cost.token_bytes * trace.block_size
    sizes = [size for size, _ in _points(trace, curves["lru"])]
    rows = [
        (f"{size:,}", gib(size * block_bytes), *(f"{each.at(size):.3f}" for each in curves.values())) for size in sizes
    ]
    print_table(("blocks", "GiB", *map(escape, curves)), rows)
    out.print()
    print_table(CHOICE_COLUMNS, [tuple(map(escape, choice_row(each))) for each in options])
    out.print()
    print_table(("assumed", "value"), [(escape(what), escape(value)) for what, value in assumed(prices, cost)])
