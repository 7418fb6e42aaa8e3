"""``tiered-kv replay``: what a chain of tiers would do, or does, for a trace."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Final, TypeVar, get_args

import typer
from rich.progress import Progress

from tiered_kv.cli.common import (
    AsJSON,
    ConfigFile,
    err,
    one_line_errors,
    print_json,
    print_table,
    refuse_if,
    say,
    settings_of,
    size_of,
    tell,
)
from tiered_kv.replay import BlockCost, ReplayReport, TierPlan, plans_from, replay, tier_plans
from tiered_kv.replay.hinting_sessions import HintsAre
from tiered_kv.replay.real import media_of, really, with_room_as
from tiered_kv.replay.report import gib
from tiered_kv.settings.settings import CacheLimits
from tiered_kv.settings.tier_settings import DEFAULT_POLICY
from tiered_kv.traces import BadLine, Trace, open_trace
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.hints import StoreWhen

W = TypeVar("W", bound=str)
_MOST_TOLD: Final = 5
_TELL_EVERY_S: Final = 10.0
_WHEN: Final = {"computed": "computed", "evicted": "about to be dropped"}

TraceFile = Annotated[
    str,
    typer.Argument(
        metavar="TRACE",
        help="JSON lines as Mooncake's or Bailian's, plain or gzip; or synthetic:chat, zipf, ...",
    ),
]
BlockSize = Annotated[int | None, typer.Option(min=1, help="Tokens a block; what the trace says if left out.")]
KV_BYTES: Final = "128KiB"
TokenBytes = Annotated[
    str | None,
    typer.Option("--token-bytes", help="Of keys and values of one token, all layers; 128KiB if left out."),
]
Tiers = Annotated[
    list[str] | None,
    typer.Option("--tier", metavar="NAME=SIZE", help="cpu=16GiB, nvme=1TiB:lru, s3 without a bound; fastest first."),
]
PrefillRate = Annotated[float, typer.Option(min=1.0, help="Tokens a second that the engine computes of a prompt.")]
Real = Annotated[bool, typer.Option("--real", help="Serve the same from a real cache, in folders of its own.")]
RealTokenBytes = Annotated[
    str | None,
    typer.Option("--real-token-bytes", help="Of one token in the real cache, whose tiers get as much smaller."),
]
EngineBlocks = Annotated[
    int,
    typer.Option("--engine-cache", min=0, metavar="BLOCKS", help="What the engine's own cache above the tiers holds."),
]
EngineAhead = Annotated[
    int,
    typer.Option(
        "--engine-ahead", min=0, metavar="BLOCKS", help="So many before they leave the engine's cache they are copied."
    ),
]
When = Annotated[
    str, typer.Option("--store-when", help="computed, evicted, or auto: when the engine stores, with --engine-cache.")
]
Hinted = Annotated[
    str, typer.Option("--hints", help="none, right, or random: what sessions say of when they will be back.")
]
Speed = Annotated[
    float | None,
    typer.Option(min=1e-3, help="Seconds of the trace in one of the real cache; else as fast as it goes."),
]


def replay_command(
    trace: TraceFile,
    tier: Tiers = None,
    config: ConfigFile = None,
    *,
    policy: Annotated[
        str | None, typer.Option(help=f"Of tiers of --tier that name none; {DEFAULT_POLICY} if left out.")
    ] = None,
    block_size: BlockSize = None,
    kv_bytes: TokenBytes = None,
    prefill_rate: PrefillRate = 10_000.0,
    engine_cache: EngineBlocks = 0,
    engine_ahead: EngineAhead = 0,
    store_when: When = "auto",
    hints: Hinted = "none",
    real: Real = False,
    real_kv_bytes: RealTokenBytes = None,
    speed: Speed = None,
    as_json: AsJSON = False,
) -> None:
    """Serve a trace's requests from imagined tiers: what each would hit, move and write.

    The tiers are those of --tier, else of the settings. The cache's own catalog and policies decide; no bytes move.
    With --real they do: a cache of such tiers serves the same requests, and what it loads is compared.
    """
    with one_line_errors():
        cost = BlockCost(size_of("--token-bytes", KV_BYTES if kv_bytes is None else kv_bytes), prefill_rate)
        when: StoreWhen = _one_of(get_args(StoreWhen), "--store-when", store_when)
        hinted: HintsAre = _one_of(get_args(HintsAre), "--hints", hints)
        refuse_if(
            (policy is not None and not tier, "--policy is for tiers of --tier: name these, or set it in the settings"),
            (config is not None and bool(tier), "--tier and --config both say which tiers: leave one out"),
            (engine_ahead > 0 and not engine_cache, "--engine-ahead is for --engine-cache: say what that holds"),
            (when == "evicted" and not engine_cache, "--store-when is for --engine-cache: say what that holds"),
            (real_kv_bytes is not None and not real, "--real-token-bytes is for --real"),
            (speed is not None and not real, "--speed is for --real"),
            (real and engine_cache > 0, "--engine-cache is imagined: leave out --real"),
            (real and hinted != "none", "--hints are imagined: leave out --real"),
        )
        settings = None if tier else settings_of(config)
        of_tiers = DEFAULT_POLICY if policy is None else policy
        plans = tier_plans(tier or [], of_tiers) if settings is None else plans_from(settings)
        limits = CacheLimits() if settings is None else settings.limits
        found, done = read(trace, block_size), None
        if real:
            real_bytes = cost.token_bytes if real_kv_bytes is None else size_of("--real-token-bytes", real_kv_bytes)
            real_cost = BlockCost(real_bytes, prefill_rate)
            tiers = media_of(plans) if settings is None else settings.tiers
            with progress("serving", len(found.requests), is_shown=not as_json) as advance:
                done = asyncio.run(
                    really(found, tiers, plans, cost, real_cost, limits, speed or math.inf, on_request=advance)
                )
            plans = with_room_as(done, plans, found.block_size * cost.token_bytes)
        with progress("replaying", len(found.requests), is_shown=not as_json) as advance:
            report = replay(
                found, plans, cost, promote=limits.promote,
                engine_blocks=engine_cache, engine_ahead=engine_ahead, store_when=when,
                hints=hinted, on_request=advance,
            )  # fmt: skip
    tell_if_guessed(kv_bytes)
    _tell_left_out(plans, report, found.block_size * cost.token_bytes)
    if as_json:
        print_json(asdict(report) | ({"real": asdict(done)} if done else {}))
    else:
        show(report)
        if done:
            show(done)
    raise typer.Exit(int(done is not None and done.wrong_blocks > 0))


def show(report: ReplayReport) -> None:
    """Print a table of the tiers, and a line of the whole."""
    rows = [
        (
            each.name,
            each.policy,
            f"{each.capacity_blocks:,}",
            f"{each.hit_rate:.3f}",
            gib(each.read_bytes),
            gib(each.written_bytes),
            f"{each.write_amplification:.2f}",
            gib(each.written_bytes_a_day),
            f"{each.evicted_blocks:,}",
        )
        for each in report.tiers
    ]
    print_table(
        ("tier", "policy", "blocks", "hit rate", "GiB read", "GiB written", "amplified", "GiB a day", "evicted"), rows
    )
    if engine := report.engine:
        say(f"the engine's own cache of {engine.num_blocks:,} blocks: hit rate {engine.hit_rate:.3f} of the whole")
        say(f"stored when {_WHEN[engine.stores]}: {engine.copied_rate:.3f} blocks copied out for each asked for")
    saved = report.saved_tokens / max(1, report.input_tokens)
    say(
        f"{report.num_requests:,} requests of {report.num_blocks:,} blocks in {report.trace_s:,.0f} s: "
        f"hit rate {report.hit_rate:.3f}, {saved:.1%} of the prompts' tokens "
        f"not computed: {report.saved_s:,.0f} s of prefill"
    )
    say(_told(report))


def _told(report: ReplayReport) -> str:
    """Say how many of those that found something had to wait for a slower tier."""
    if report.is_real:
        return (
            f"so much was done and not imagined, by real tiers and bytes: loads took {report.load_s:,.2f} s, and "
            f"{report.wrong_blocks:,} blocks came back wrong"
        )
    in_memory = report.loads_in_memory / max(1, report.loads)
    return f"{report.loads:,} requests found something in a tier, {in_memory:.1%} of them in memory alone"


def read(where: str, block_size: int | None) -> Trace:
    """Read a trace; tell of the first bad lines, and how many there are."""
    bad: list[BadLine] = []
    trace = open_trace(where, block_size=block_size, on_bad_line=bad.append)
    for each in bad[:_MOST_TOLD]:
        tell(f"{where}, line {each.number}: {each.why}")
    if len(bad) > _MOST_TOLD:
        tell(f"{where}: {len(bad):,} lines are no requests, and were left out")
    return trace


def _one_of(words: Sequence[W], option: str, text: str) -> W:
    """Return the word that an option has; raise `ConfigurationError` for any other."""
    if text not in words:
        raise ConfigurationError(f"{option} must be one of {', '.join(words)}, got {text!r}")
    return words[words.index(text)]


def tell_if_guessed(kv_bytes: str | None) -> None:
    """Tell what a token was taken to have, if nobody has said it: no trace does, and all sizes go by it."""
    if kv_bytes is None:
        tell(f"keys and values of a token were taken to have {KV_BYTES}: --token-bytes says what your model's have")


def _tell_left_out(plans: Sequence[TierPlan], report: ReplayReport, block_bytes: int) -> None:
    """Tell which tiers are too small to have a part in it; to have no capacity at all is no mistake."""
    there = {each.name for each in report.tiers}
    for plan in plans:
        if plan.capacity_bytes and plan.name not in there:
            tell(f"{plan.name} was left out: it holds no block of {block_bytes:,} bytes, as this trace has")


@contextmanager
def progress(doing: str, total: int, *, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """Show how far it is while the block lasts; call what it yields with how much is done.

    On a terminal's stderr that is a bar. In a file or a pipe it is a line every ten seconds, so that who waits for
    minutes knows for what.
    """
    if not is_shown:
        yield lambda _: None
        return
    if err.is_terminal:
        with Progress(console=err, transient=True) as bar:
            task = bar.add_task(doing, total=total)
            yield lambda done: bar.update(task, completed=done)
        return
    started = told = time.monotonic()

    def advance(done: int) -> None:
        nonlocal told
        if (now := time.monotonic()) - told >= _TELL_EVERY_S:
            told = now
            tell(f"{doing}: {done:,} of {total:,} in {now - started:.0f} s")

    yield advance
