"""Serve conversations with tiered_kv under a paged engine, from every tier, and prove that no bit changes.

The same multi-turn conversations are served again and again: first everything is recomputed and stored, then every
prefix is loaded from one tier: from the GPU pool, from CPU memory, and, in a new process, from NVMe. Each time the
generated tokens and the last logits of every request have to be those of the recomputation, to the bit.

    python examples/chat.py            # about a minute on two cores; --help says what can be changed
"""

import argparse
import asyncio
import json
import logging
import shutil
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, cast

import structlog
import torch
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from chat_engine import BLOCK_SIZE, CHUNK, LLAMA_100M, Completion, Engine, NoPrefixCache, build_model, weights_digest
from tiered_kv import GPULoadStoreSpec, KVLayout, ModelIdentity, TieredKV, TieredKVSettings, hash_blocks

TIERS: dict[str, dict[str, Any]] = {
    "gpu": {"medium": "gpu", "capacity": "256MiB"},
    "cpu": {"medium": "cpu", "capacity": "512MiB"},
    "nvme": {"medium": "nvme", "capacity": "1GiB"},
}
"""Fastest first. To serve from one, the chain that begins with it is opened: nothing above can answer."""
PERSISTENT = ("nvme",)
"""These keep their blocks without a process, so they are served from in a new one."""
RECOMPUTE = "recompute"
LEGEND = """Conversations at once: {}. TTFT is the mean time to first token, waiting for others included; GB/s are those
of a load among others. Output is equal if tokens and last logits are the recomputation's to the bit, and all KV that
can be reused came from the tier named.""".replace("\n", " ")

BOS, USER, ASSISTANT, END = range(256, 260)
"""The vocabulary is all bytes and these marks."""
SYSTEM_BYTES, MESSAGE_BYTES = 512, 384


def label_of(source: str) -> str:
    """Return a source as people are shown it."""
    return f"{source}, new process" if source in PERSISTENT else source


@dataclass(frozen=True)
class Load:
    """What one `TieredKV.load` brought; ``by_tier`` counts blocks."""

    num_blocks: int
    by_tier: dict[str, int]
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Run:
    """All conversations, served once."""

    source: str
    """The tier their prefixes were loaded from, or ``RECOMPUTE``."""
    requests: list[Completion]
    """One after the other the turns of the first conversation, those of the second, and so on."""
    loads: list[Load]

    @property
    def mean_ttft_s(self) -> float:
        """Mean time to first token."""
        return statistics.mean(request.ttft_s for request in self.requests)

    def write(self, path: Path) -> None:
        """Write the run as JSON."""
        path.write_text(json.dumps(asdict(self), default=torch.Tensor.tolist))

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Read what `write` wrote, logits to the bit."""
        run = json.loads(path.read_text())
        requests = [
            Completion(**fields | {"last_logits": torch.tensor(fields["last_logits"])}) for fields in run["requests"]
        ]
        return cls(run["source"], requests, [Load(**fields) for fields in run["loads"]])


class TieredPrefix:
    """The engine's prefix cache is a `TieredKV`. This is all of the integration."""

    def __init__(self, kv: TieredKV, *, may_load: bool) -> None:
        self.kv = kv
        self.may_load = may_load
        self.loads: list[Load] = []

    async def load(self, tokens: Sequence[int], block_ids: Sequence[int]) -> int:
        """Fill leading blocks with the KV of ``tokens`` from whichever tiers have it; return how many."""
        if not self.may_load:
            return 0
        keys = hash_blocks(tokens, block_size=BLOCK_SIZE)
        found = await self.kv.lookup(keys)
        n = found.num_blocks
        loaded = await self.kv.load(keys[:n], GPULoadStoreSpec(block_ids[:n]))
        self.loads.append(Load(loaded.num_blocks, dict(loaded.by_tier), loaded.num_bytes, loaded.seconds))
        return loaded.num_blocks

    async def store(self, tokens: Sequence[int], block_ids: Sequence[int]) -> None:
        """Keep the KV of ``tokens``; what is there already is not copied again."""
        await self.kv.store(hash_blocks(tokens, block_size=BLOCK_SIZE), GPULoadStoreSpec(block_ids))


@asynccontextmanager
async def open_engine() -> AsyncIterator[Engine]:
    """Yield an engine that has run once, so that no request pays for first-time set-up."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    async with Engine.open(build_model(LLAMA_100M, device), num_blocks=512) as engine:
        await engine.generate([BOS] * 2 * CHUNK, max_new_tokens=2, prefix=NoPrefixCache())
        yield engine


@asynccontextmanager
async def open_tiers(engine: Engine, first: str, folder: Path) -> AsyncIterator[TieredKV]:
    """Yield the cache whose fastest tier is ``first``, bound to the engine's pages; disks are under ``folder``."""
    names = list(TIERS)[list(TIERS).index(first) :]
    tiers = [TIERS[name] | ({"path": str(folder / name)} if name in PERSISTENT else {}) for name in names]
    model = ModelIdentity("llama-100m", weights=weights_digest(engine.model))
    layout = KVLayout.from_tensors(engine.kv_caches, block_size=BLOCK_SIZE)
    async with TieredKV.from_settings(TieredKVSettings(tiers=tiers), model=model, layout=layout) as kv:
        kv.register_kv_caches(engine.kv_caches)
        yield kv


async def serve(
    engine: Engine, kv: TieredKV, source: str, options: argparse.Namespace, on_served: Callable[[], None]
) -> Run:
    """Serve all conversations at once, each turn upon the answer before; call ``on_served`` after each."""
    prefix = TieredPrefix(kv, may_load=source != RECOMPUTE)
    texts = sorted(topics.values(), key=len)
    system = texts[-1][-SYSTEM_BYTES:].encode()[:SYSTEM_BYTES]

    async def converse(text: bytes) -> list[Completion]:
        prompt, completions = [BOS, *system], []
        for turn in range(options.turns):
            message = text[turn * MESSAGE_BYTES : (turn + 1) * MESSAGE_BYTES]
            prompt += [USER, *message, END, ASSISTANT]
            completion = await engine.generate(prompt, max_new_tokens=options.new_tokens, prefix=prefix)
            prompt += [*completion.tokens, END]
            completions.append(completion)
            on_served()
        return completions

    async with asyncio.TaskGroup() as group:
        chats = [group.create_task(converse(text.encode())) for text in texts[-options.conversations :]]
    return Run(source, [completion for chat in chats for completion in chat.result()], prefix.loads)


async def serve_in_new_process(tier: str, options: argparse.Namespace, on_served: Callable[[], None]) -> Run:
    """Start this file again to `serve` from ``tier``: it prints a line a request and leaves the run in a file."""
    command = [sys.executable, __file__, *sys.argv[1:], f"--only={tier}"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async for _ in cast("asyncio.StreamReader", process.stdout):
        on_served()
    if code := await process.wait():
        raise SystemExit(f"the process that served from {tier} ended with {code}")
    return Run.read(options.out / f"{tier}.json")


async def serve_from_every_tier(options: argparse.Namespace, progress: Progress) -> list[Run]:
    """Return the recomputation and then one run a tier."""

    def bar(source: str) -> Callable[[], None]:
        task = progress.add_task(label_of(source), total=options.conversations * options.turns)
        return partial(progress.advance, task)

    runs = []
    async with open_engine() as engine:
        fastest = next(iter(TIERS))
        async with open_tiers(engine, fastest, options.out) as kv:
            runs.append(await serve(engine, kv, RECOMPUTE, options, bar(RECOMPUTE)))
            await kv.flush()
            if fastest in options.tiers:
                runs.append(await serve(engine, kv, fastest, options, bar(fastest)))
        for tier in (tier for tier in TIERS if tier in options.tiers and tier not in (fastest, *PERSISTENT)):
            async with open_tiers(engine, tier, options.out) as kv:
                for request in runs[0].requests:  # what the tier above held is gone: bring it up from below
                    await kv.prefetch(hash_blocks(request.prompt, block_size=BLOCK_SIZE), to=tier)
                runs.append(await serve(engine, kv, tier, options, bar(tier)))
    return runs + [await serve_in_new_process(tier, options, bar(tier)) for tier in PERSISTENT if tier in options.tiers]


def find_faults(run: Run, reference: Run) -> list[str]:
    """Return what is not as it has to be: other tokens or logits than the recomputation's, or KV from elsewhere."""
    faults = []
    for i, (request, recomputed) in enumerate(zip(run.requests, reference.requests, strict=True)):
        if (request.prompt, request.tokens) != (recomputed.prompt, recomputed.tokens):
            faults.append(f"request {i} from {run.source}: other tokens than recomputed")
        if not torch.equal(request.last_logits, recomputed.last_logits):
            faults.append(f"request {i} from {run.source}: other last logits than recomputed")
        if request.num_reused_tokens != (reusable := (len(request.prompt) - 1) // CHUNK * CHUNK):
            faults.append(f"request {i} from {run.source}: {request.num_reused_tokens} of {reusable} tokens loaded")
    if elsewhere := {tier for load in run.loads for tier in load.by_tier} - {run.source}:
        faults.append(f"the run from {run.source} also loaded from {', '.join(sorted(elsewhere))}")
    return faults


def draw_table(runs: list[Run], faults: dict[str, list[str]]) -> Table:
    """Return a row a run; the first is the recomputation that the others are measured against."""
    reference = runs[0]
    num_prompt_tokens = sum(len(request.prompt) for request in reference.requests)
    title = f"{len(reference.requests)} prompts of {num_prompt_tokens:,} tokens together"
    table = Table("KV from", box=box.SIMPLE_HEAD, pad_edge=False, title=title)
    for heading in ("blocks", "hit tokens", "TTFT", "speed-up", "GB/s", "output"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        seconds = sum(load.seconds for load in run.loads)
        table.add_row(
            label_of(run.source),
            f"{sum(load.num_blocks for load in run.loads):,}",
            f"{sum(request.num_reused_tokens for request in run.requests):,}",
            f"{run.mean_ttft_s * 1e3:,.0f} ms",
            f"{reference.mean_ttft_s / run.mean_ttft_s:.1f} x",
            f"{sum(load.num_bytes for load in run.loads) / seconds / 1e9:.2f}" if seconds else "",
            "" if run is reference else "[red]differs" if faults[run.source] else "[green]equal",
        )
    return table


def draw_plot(runs: list[Run], path: Path) -> None:
    """Save a bar of the mean TTFT a run, with a dot a request upon it."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for row, run in enumerate(runs):
        axes.barh(row, run.mean_ttft_s * 1e3, color="tab:blue" if row else "silver", height=0.6)
        axes.plot([request.ttft_s * 1e3 for request in run.requests], [row] * len(run.requests), "k.", alpha=0.4)
    labels = [f"{label_of(run.source)}\n{runs[0].mean_ttft_s / run.mean_ttft_s:.1f} x" for run in runs]
    axes.set_yticks(range(len(runs)), labels)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel="ms (bar: mean; dots: requests)", title="Time to first token by where the prompt's KV came from")
    figure.savefig(path, dpi=160)


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=4, help="served at once (default: 4)")
    parser.add_argument("--turns", type=int, default=3, help="requests a conversation (default: 3)")
    parser.add_argument("--new-tokens", type=int, default=24, help="generated a request (default: 24)")
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=list(TIERS), help="to serve from (default: all)")
    parser.add_argument("--out", type=Path, default=Path("out/chat"), help="folder for results (default: out/chat)")
    parser.add_argument("--only", choices=PERSISTENT, help=argparse.SUPPRESS)  # what the new process is told
    return parser.parse_args()


def remove_blocks(folder: Path) -> None:
    """Delete what persistent tiers keep under ``folder``."""
    for tier in PERSISTENT:
        shutil.rmtree(folder / tier, ignore_errors=True)


async def serve_as_new_process(tier: str, options: argparse.Namespace) -> None:
    """Do what `serve_in_new_process` waits for."""
    async with open_engine() as engine, open_tiers(engine, tier, options.out) as kv:
        run = await serve(engine, kv, tier, options, lambda: print(flush=True))
    run.write(options.out / f"{tier}.json")


def main() -> None:
    """Serve, compare, show; exit with 1 if anything is not as it has to be."""
    options = parse_arguments()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    if options.only:
        asyncio.run(serve_as_new_process(options.only, options))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    remove_blocks(options.out)  # an earlier demo that was stopped may have left some: they would be hits
    console = Console()
    columns = (TextColumn("{task.description:<26}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress:
            runs = asyncio.run(serve_from_every_tier(options, progress))
    finally:
        remove_blocks(options.out)
    for run in runs:
        run.write(options.out / f"{run.source}.json")
    draw_plot(runs, plot := options.out / "ttft.png")
    faults = {run.source: find_faults(run, runs[0]) for run in runs[1:]}
    console.print(draw_table(runs, faults))
    console.print(LEGEND.format(options.conversations))
    console.print(f"Plot: {plot}")
    for fault in chain.from_iterable(faults.values()):
        console.print(f"[red]{fault}")
    sys.exit(1 if any(faults.values()) else 0)


if __name__ == "__main__":
    main()
