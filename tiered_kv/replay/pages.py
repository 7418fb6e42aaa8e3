"""A plan as a picture and as a page. matplotlib is the extra ``plan``."""

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from importlib import import_module
from typing import Any, Final

import numpy as np

from tiered_kv.replay.choices import Choice, Prices
from tiered_kv.replay.curves import Curve
from tiered_kv.replay.report import GIB, ReplayReport, gib
from tiered_kv.replay.simulated import BlockCost
from tiered_kv.traces import Trace
from tiered_kv.values.errors import ConfigurationError

_MOST_POINTS: Final = 400
CHOICE_COLUMNS: Final = ("tiers", "hit rate", "price a month", "saves", "gain")
_STYLE: Final = """
:root { color-scheme: light dark; --faint: color-mix(in srgb, currentColor 14%, transparent); }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 52rem; margin: 2.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--faint); text-align: right; }
th:first-child, td:first-child { text-align: left; } tr.best td { font-weight: 600; }
img { width: 100%; height: auto; background: #fff; border-radius: .4rem; } small { opacity: .75; }
"""


def picture(trace: Trace, curves: Mapping[str, Curve], best: Choice, cost: BlockCost) -> bytes:
    """Draw the curves, and where the best choice lies on them; return a PNG.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    figure: Any = _matplotlib().Figure(figsize=(8.0, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    block_gib = cost.token_bytes * trace.block_size / GIB
    for name, curve in curves.items():
        last = len(curve.rates) - 1
        at = np.unique(np.geomspace(1, max(1, last), _MOST_POINTS).astype(np.int64))
        axes.plot(at * block_gib, curve.rates[at], label=name, linewidth=1.8)
    found = 0.0
    for tier in best.tiers:
        found += tier.hit_rate
        axes.plot([tier.num_blocks * block_gib], [found], "o", color="black")
        axes.annotate(
            f"{tier.name} {tier.num_bytes / GIB:,.0f} GiB", (tier.num_blocks * block_gib, found),
            textcoords="offset points", xytext=(-6, 7), ha="right",
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("size of a tier, GiB")
    axes.set_ylabel("hit rate, of blocks asked for")
    axes.set_title(trace.name)
    axes.grid(alpha=0.25)
    axes.legend(title="policy", frameon=False)
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()


def page(
    trace: Trace,
    options: Sequence[Choice],
    prices: Prices,
    cost: BlockCost,
    png: bytes,
    checked: ReplayReport | None,
) -> str:
    """Write one HTML page that needs nothing beside it."""
    best = options[0]
    image = base64.b64encode(png).decode()
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Capacity for {escape(trace.name)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(headline(best))}</h1>
<p>{len(trace.requests):,} requests in {trace.seconds / 3600:,.1f} hours asked for {trace.num_references:,} blocks of
{trace.block_size:,} tokens; {trace.num_blocks:,} of these blocks differ. {escape(_verdict(best, prices))}</p>
<h2>Hit rate by size</h2>
<img alt="Hit rate by size of a tier, by policy" src="data:image/png;base64,{image}">
<h2>What each set of tiers is worth</h2>
{_table([CHOICE_COLUMNS, *map(choice_row, options)], best=1)}
<p><small>A month; sizes of each set are those with the largest gain. A hit saves the time of computing a block less the
time of loading it.</small></p>
{_tiers(best)}{_check(best, checked)}
<h2>What was assumed</h2>
{_table([("what", "value"), *assumed(prices, cost)], best=0)}
<p><small>Not counted: requests that overlap, blocks of answers, what the engine's own prefix cache holds.</small></p>
</body></html>
"""


def headline(best: Choice) -> str:
    """Say in a line what to buy."""
    if not best.tiers:
        return "No tier is worth its price"
    tiers = (f"{gib(each.num_bytes)} GiB of {each.name} ({each.policy})" for each in best.tiers)
    return f"Buy {' and '.join(tiers)}"


def _verdict(best: Choice, prices: Prices) -> str:
    if not best.tiers:
        return "At these prices every hit costs more than it saves."
    return (
        f"These tiers find {best.hit_rate:.1%} of all blocks. They cost {best.price_a_month:,.0f} a month and save "
        f"{best.saved_a_month:,.0f}, at {prices.engine_price_per_hour:g} for an hour of the engine."
    )


def choice_row(each: Choice) -> tuple[str, ...]:
    """Return what `CHOICE_COLUMNS` are of a choice."""
    tiers = " + ".join(f"{tier.name} {gib(tier.num_bytes)} GiB" for tier in each.tiers) or "none"
    return (
        tiers, f"{each.hit_rate:.3f}", f"{each.price_a_month:,.0f}", f"{each.saved_a_month:,.0f}",
        f"{each.gain_a_month:,.0f}",
    )  # fmt: skip


def _tiers(best: Choice) -> str:
    if not best.tiers:
        return ""
    rows = [
        (each.name, f"{gib(each.num_bytes)} GiB", f"{each.num_blocks:,}", each.policy, f"{each.hit_rate:.3f}",
         f"{each.price_a_month:,.0f}")
        for each in best.tiers
    ]  # fmt: skip
    columns = ("tier", "size", "blocks", "policy", "hit rate", "price a month")
    return f"<h2>The tiers to buy</h2>\n{_table([columns, *rows], best=0)}\n"


def _check(best: Choice, checked: ReplayReport | None) -> str:
    if checked is None:
        return ""
    return (
        f"<p>A replay of the trace on these tiers found {checked.tiers_hit_rate:.3f}, where {best.hit_rate:.3f} was "
        f"foretold. In it {checked.tiers[-1].written_bytes_a_day / GIB:,.0f} GiB a day were written to "
        f"{escape(checked.tiers[-1].name)}.</p>"
    )


def assumed(prices: Prices, cost: BlockCost) -> list[tuple[str, str]]:
    """Say what a plan rests on besides its trace: what, and how much."""
    return [
        ("keys and values of a token", f"{cost.token_bytes / 1024:,.0f} KiB"),
        ("prefill", f"{cost.prefill_tokens_a_s:,.0f} tokens/s"),
        ("an hour of the engine", f"{prices.engine_price_per_hour:g}, in the currency of all prices"),
        *(
            (
                each.name,
                f"a GiB {each.price_per_gib_month:g} a month, {each.read_bandwidth / 1e9:g} GB/s, {each.policy}",
            )
            for each in prices.media
        ),
    ]


def _table(rows: Sequence[Sequence[str]], *, best: int) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in rows[0])
    body = "\n".join(
        f"<tr{' class=best' if number == best else ''}>" + "".join(f"<td>{escape(each)}</td>" for each in row) + "</tr>"
        for number, row in enumerate(rows[1:], start=1)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _matplotlib() -> Any:  # noqa: ANN401 - a module of an extra
    try:
        return import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ConfigurationError("a picture needs matplotlib: pip install 'tiered-kv[plan]'") from error
