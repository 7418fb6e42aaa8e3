"""Serve conversations with tiered_kv under a paged engine, from every tier, and prove that no bit changes.

The same multi-turn conversations are served again and again: first everything is recomputed and stored, then every
prefix is loaded from one tier: from the GPU pool, from CPU memory, and, in a new process, from NVMe, or, where asked
for, from an S3-compatible store or from Redis (``chat_servers.py`` says which). Each time the generated tokens and the
last logits of every request have to be those of the recomputation, to the bit, and all KV that can be reused has to
come from that tier; else the exit code is 1.

    pip install '.[demo]'
    python examples/chat.py                     # about two minutes on two cores; --help says what can be changed
    python examples/chat.py --tiers s3,redis
"""

import argparse
import asyncio
import json
import logging
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, cast

import structlog
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import LlamaConfig

from chat_engine import (
    BLOCK_SIZE,
    CHUNK,
    LLAMA_100M,
    Completion,
    Engine,
    NoPrefixCache,
    build_model,
    faster_dtype,
    weights_digest,
)
from chat_results import LABELS, RECOMPUTE, Run, device_of, draw_plot, find_faults, make_console, show
from chat_servers import SERVED, serve_tiers
from tiered_kv import (
    BlockCache,
    GPULoadStoreSpec,
    KVLayout,
    LoadResult,
    ModelIdentity,
    TieredKV,
    TieredKVSettings,
    hash_blocks,
)

TIERS: dict[str, dict[str, Any]] = {
    "gpu": {"medium": "gpu", "capacity": "512MiB"},
    "cpu": {"medium": "cpu", "capacity": "512MiB"},
    "nvme": {"medium": "nvme", "capacity": "1GiB"},
}
"""Fastest first, and behind them those of `SERVED` that are asked for. To serve from one, the chain that begins with it
is opened, or, of the latter, it alone: nothing else can answer."""
PERSISTENT = ("nvme", *SERVED)
"""These keep their blocks without a process, so they are served from in a new one that has nothing else."""

BOS, USER, ASSISTANT, END = range(256, 260)
"""The vocabulary is all bytes and these marks."""
SYSTEM_BYTES, MESSAGE_BYTES = 512, 384


class TieredPrefix:
    """The engine's prefix cache is a `TieredKV`, or what a server keeps. This is all of the integration."""

    def __init__(self, kv: BlockCache, *, may_load: bool) -> None:
        self.kv = kv
        self.may_load = may_load
        self.loads: list[LoadResult] = []

    async def load(self, tokens: Sequence[int], block_ids: Sequence[int]) -> int:
        """Fill leading blocks with the KV of ``tokens`` from whichever tiers have it; return how many."""
        if not self.may_load:
            return 0
        keys = hash_blocks(tokens, block_size=BLOCK_SIZE)
        found = await self.kv.lookup(keys)
        n = found.num_blocks
        loaded = await self.kv.load(keys[:n], GPULoadStoreSpec(block_ids[:n]))
        self.loads.append(loaded)
        return loaded.num_blocks

    async def store(self, tokens: Sequence[int], block_ids: Sequence[int]) -> None:
        """Keep the KV of ``tokens``; what is there already is not copied again."""
        await self.kv.store(hash_blocks(tokens, block_size=BLOCK_SIZE), GPULoadStoreSpec(block_ids))


@asynccontextmanager
async def open_engine(options: argparse.Namespace) -> AsyncIterator[Engine]:
    """Yield an engine that has run once, so that no request pays for first-time set-up."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = LlamaConfig.from_dict(LLAMA_100M.to_dict() | {"num_hidden_layers": options.layers})
    model = build_model(config, device, dtype=getattr(torch, options.dtype))
    async with Engine.open(model, num_blocks=512) as engine:
        await engine.generate([BOS] * 2 * CHUNK, max_new_tokens=2, prefix=NoPrefixCache())
        yield engine


@asynccontextmanager
async def open_tiers(engine: Engine, first: str, options: argparse.Namespace) -> AsyncIterator[TieredKV]:
    """Yield the cache whose fastest tier is ``first``, bound to the engine's pages."""
    own = {**TIERS, "nvme": TIERS["nvme"] | {"path": str(blocks_folder(options) / "nvme")}, **options.served}
    tiers = [own[first]] if first in SERVED else list(own.values())[list(own).index(first) :]
    model = ModelIdentity("llama-100m", weights=weights_digest(engine.model))
    layout = KVLayout.from_tensors(engine.kv_caches, block_size=BLOCK_SIZE)
    async with TieredKV.from_settings(TieredKVSettings(tiers=tiers), model=model, layout=layout) as kv:
        kv.register_kv_caches(engine.kv_caches)
        yield kv


def blocks_folder(options: argparse.Namespace) -> Path:
    """Return where tiers on disk keep their blocks; it is removed at the end."""
    return cast("Path", options.out) / "kv-blocks"


async def serve(
    engine: Engine, kv: BlockCache, source: str, options: argparse.Namespace, on_served: Callable[[], object]
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
    requests = [completion for chat in chats for completion in chat.result()]
    io = str(kv.stats()[source].facts.get("io", "")) if source in PERSISTENT else ""
    return Run(source, device_of(engine.model.device, engine.model.dtype), io, requests, prefix.loads)


async def serve_from_every_tier(options: argparse.Namespace, progress: Progress) -> list[Run]:
    """Return the recomputation and then one run a tier."""

    def bar(source: str) -> Callable[[], object]:
        task = progress.add_task(LABELS[source], total=options.conversations * options.turns)
        return partial(progress.advance, task)

    runs = []
    fastest, *below = (tier for tier in TIERS if tier not in PERSISTENT)
    async with open_engine(options) as engine:
        async with open_tiers(engine, fastest, options) as kv:
            runs.append(await serve(engine, kv, RECOMPUTE, options, bar(RECOMPUTE)))
            await kv.flush()
            if fastest in options.tiers:
                runs.append(await serve(engine, kv, fastest, options, bar(fastest)))
        for tier in (tier for tier in below if tier in options.tiers):
            async with open_tiers(engine, tier, options) as kv:
                for request in runs[0].requests:  # the process has kept nothing: bring it up from below
                    await kv.prefetch(hash_blocks(request.prompt, block_size=BLOCK_SIZE), to=tier)
                runs.append(await serve(engine, kv, tier, options, bar(tier)))
    persistent = (tier for tier in PERSISTENT if tier in options.tiers)
    return runs + [await serve_in_new_process(tier, options, bar(tier), progress.console) for tier in persistent]


async def serve_in_new_process(
    tier: str, options: argparse.Namespace, on_served: Callable[[], object], console: Console
) -> Run:
    """Start this file again to `serve` from ``tier``: it prints an empty line a request, and writes the run to a file.

    Raises:
        RuntimeError: It failed; what it had to say is on the console.
    """
    command = [sys.executable, __file__, *sys.argv[1:], f"--dtype={options.dtype}", f"--only={tier}"]
    pipe, out = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=out)
    stdin = cast("asyncio.StreamWriter", process.stdin)
    stdin.write(json.dumps(options.served).encode())  # there may be secrets in it: no argument of a command
    stdin.write_eof()
    async for line in cast("asyncio.StreamReader", process.stdout):
        if line == b"\n":
            on_served()
        else:
            console.print(line.decode(errors="replace").rstrip(), markup=False, highlight=False)
    if code := await process.wait():
        raise RuntimeError(f"the process that served from {tier} ended with {code}")
    return Run.read(options.out / f"{tier}.json")


async def serve_as_new_process(options: argparse.Namespace) -> None:
    """Do what `serve_in_new_process` waits for."""
    async with open_engine(options) as engine, open_tiers(engine, options.only, options) as kv:
        run = await serve(engine, kv, options.only, options, partial(print, flush=True))
    run.write(options.out / f"{options.only}.json")


def split(tiers: str) -> list[str]:
    """Return the names in a list with commas."""
    return [tier for tier in tiers.split(",") if tier]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--conversations", type=int, choices=range(1, 7), default=4, metavar="N", help="served at once: 1 to 6, or 4")
    add("--turns", type=int, choices=range(1, 5), default=3, metavar="N", help="requests each: 1 to 4, or 3")
    add("--new-tokens", type=int, choices=range(1, 129), default=16, metavar="N", help="per request: 1 to 128, or 16")
    add("--tiers", nargs="+", type=split, default=[list(TIERS)], help=f"to serve from: {', '.join([*TIERS, *SERVED])}")
    add("--layers", type=int, choices=range(1, 13), default=12, metavar="N", help="of the model: 1 to 12, or 12")
    add("--dtype", choices=("bfloat16", "float32"), help="of weights and KV (whichever is faster here)")
    add("--out", type=Path, default=Path("out/chat"), help="folder for results (out/chat)")
    add("--only", choices=PERSISTENT, help=argparse.SUPPRESS)  # what the new process is told
    options = parser.parse_args(arguments)
    options.tiers = list(dict.fromkeys(chain.from_iterable(options.tiers)))
    if unknown := [tier for tier in options.tiers if tier not in (*TIERS, *SERVED)]:
        parser.error(f"--tiers: there is no {', '.join(unknown)}")
    options.served = {}
    if options.dtype is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        options.dtype = str(faster_dtype(device)).removeprefix("torch.")
    return options


def quiet() -> None:
    """Log what went wrong alone: the library logs an event per operation, and leaves the choice to the program."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


def make_progress(console: Console) -> Progress:
    """Return a bar for each run."""
    columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def main() -> None:
    """Serve, compare, show; exit with 1 if anything is not as it has to be."""
    options = parse_arguments()
    quiet()
    if options.only:
        options.served = json.load(sys.stdin)
        asyncio.run(serve_as_new_process(options))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(blocks_folder(options), ignore_errors=True)  # left by a demo that was stopped: they would be hits
    console = make_console()
    remote = [tier for tier in options.tiers if tier in SERVED]
    try:
        with serve_tiers(remote, blocks_folder(options)) as (options.served, notes):
            console.print(*notes, sep="\n", end="\n" if notes else "", highlight=False, markup=False)
            with make_progress(console) as progress:
                runs = asyncio.run(serve_from_every_tier(options, progress))
    finally:
        shutil.rmtree(blocks_folder(options), ignore_errors=True)
    for run in runs:
        run.write(options.out / f"{run.source}.json")
    draw_plot(runs, plot := options.out / "ttft.png")
    faults = {run.source: find_faults(run, runs[0], may_pass_on=run.source in PERSISTENT) for run in runs[1:]}
    show(console, runs, faults)
    console.print(f"Plot: {plot}", highlight=False)
    sys.exit(1 if any(faults.values()) else 0)


if __name__ == "__main__":
    main()
