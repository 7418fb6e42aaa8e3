"""``tiered-kv bench``: how fast each configured tier is here, beside its ceiling: what the medium does without a cache.

A cache is opened with each tier alone, and its stores and loads are awaited. Rounds of these and of the ceiling take
turns, as the speed of media drifts, and each moves its blocks until it has a time worth telling. What is stored is
deleted again. A tier that a cache owns may be open: a folder beside it is measured in its place.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final, Literal

import numpy as np
import torch
import typer
from pydantic import ByteSize
from rich.markup import escape
from rich.progress import Progress

from tiered_kv.cache.tiered_kv import TieredKV
from tiered_kv.cli.common import (
    AsJSON,
    ConfigFile,
    err,
    one_line_errors,
    print_json,
    print_table,
    say,
    settings_of,
    size_of,
)
from tiered_kv.media.backend import Backend, Block, RecordShape
from tiered_kv.memory.host import check_host_memory
from tiered_kv.settings.chain_settings import CPUTier, GPUTier, tier_name
from tiered_kv.settings.registry import make_backend
from tiered_kv.settings.setting_errors import size_in_words
from tiered_kv.settings.settings import CacheLimits, TieredKVSettings
from tiered_kv.settings.tier_settings import OwnedTierSettings, StorageTierSettings, TierSettings, paths_of
from tiered_kv.testing import open_backend
from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError, TieredKVError
from tiered_kv.values.keys import BlockKey, BlockKeys, ModelIdentity, Namespace, epoch_digest, hash_blocks
from tiered_kv.values.layout import PAGE_BYTES, KVLayout
from tiered_kv.values.specs import GPULoadStoreSpec

_BLOCK_SIZE: Final = 16
_THREADS: Final = 8
_ABOVE_1: Final = (
    "Above 1: bare files take a call a block, where a cache merges neighbours; else what two runs differ by."
)
_NOTES: Final = 1 << 20
"""Bytes beside the blocks, for what an owned tier keeps about them."""
_ROUND_S: Final = 0.05
"""How long a round takes at least: what few blocks take is mostly when which thread got a processor."""
Direction = Literal["store", "load"]
Move = Callable[[Direction], Awaitable[float]]
"""Moves all blocks once, and returns the seconds."""


@dataclass(frozen=True)
class Measured:
    """One tier in one direction; bytes a second, medians of the rounds.

    Attributes:
        tier: Its name.
        direction: ``"store"`` or ``"load"``.
        bytes_per_s: Through a cache.
        ceiling_bytes_per_s: Of what it is compared with.
        ratio: The first over the second in the same round.
        ceiling: What it is compared with.
        problem: Why there is no figure; empty where there is.
    """

    tier: str
    direction: str
    bytes_per_s: float = 0.0
    ceiling_bytes_per_s: float = 0.0
    ratio: float = 0.0
    ceiling: str = ""
    problem: str = ""


def bench_command(
    config: ConfigFile = None,
    *,
    block: Annotated[str, typer.Option(help="Bytes of a block.")] = "1MiB",
    blocks: Annotated[int, typer.Option(min=1, help="How many are moved at once.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Of each tier, 50 ms or longer; medians are shown.")] = 3,
    as_json: AsJSON = False,
) -> None:
    """Measure every configured tier beside its own ceiling: memory, plain files, or the medium's client alone.

    Stores and loads, through a cache, and deletes what it stored. Speeds are medians of the rounds, and the ratio is
    the median of theirs, as media drift from one to the next; a first round does not count. Exits 1 if a tier could not
    be measured.
    """
    with one_line_errors():
        settings, num_bytes = settings_of(config), size_of("--block", block)
        with Progress(console=err, transient=True, disable=as_json or not err.is_terminal) as bar:
            task = bar.add_task("measuring", total=len(settings.tiers) * rounds)
            found = asyncio.run(measure(settings, num_bytes, blocks, rounds, lambda: bar.advance(task)))
    if as_json:
        print_json([asdict(each) for each in found])
    else:
        rows = [
            (escape(each.tier), each.direction, f"[red]{escape(each.problem)}[/]", "", "", "")
            if each.problem
            else (
                escape(each.tier),
                each.direction,
                _speed(each.bytes_per_s),
                _speed(each.ceiling_bytes_per_s),
                f"{each.ratio:.2f}",
                each.ceiling,
            )
            for each in found
        ]
        print_table(("tier", "", "through a cache", "bare", "ratio", "which is"), rows)
        say(_ABOVE_1)
    raise typer.Exit(int(any(each.problem for each in found)))


async def measure(
    settings: TieredKVSettings, block_bytes: int, num_blocks: int, rounds: int, on_round: Callable[[], object]
) -> list[Measured]:
    """Measure each tier, one after another; go on whatever one of them does."""
    work = _Work(block_bytes, num_blocks)
    found: list[Measured] = []
    for tier in settings.tiers:
        name = tier_name(tier)
        try:
            found += await _measured(name, tier, settings.limits, work, rounds, on_round)
        except (TieredKVError, OSError) as error:
            found += [
                Measured(name, direction, problem=" ".join(str(error).split())) for direction in ("store", "load")
            ]
    return found


class _Work:
    """The blocks that are moved: an engine's tensor of them, and their layout."""

    def __init__(self, block_bytes: int, num_blocks: int) -> None:
        head_dim = max(1, round(block_bytes / (2 * _BLOCK_SIZE * 8 * 2)))
        of_engine_and_ceiling = 2 * num_blocks * 2 * _BLOCK_SIZE * 8 * head_dim * 2
        check_host_memory(of_engine_and_ceiling, less="give a smaller --block, or fewer --blocks")
        self.caches = [torch.ones(num_blocks, 2, _BLOCK_SIZE, 8, head_dim, dtype=torch.bfloat16)]
        self.layout = KVLayout.from_tensors(self.caches, block_size=_BLOCK_SIZE, axes="BPNHD")
        self.num_blocks = num_blocks
        self.record = RecordShape(os.urandom(32), self.layout.groups[0].payload_bytes)
        self.num_bytes = num_blocks * self.record.payload_bytes
        self.model = ModelIdentity("bench", weights="none")

    def keys(self) -> BlockKeys:
        """Name blocks that nobody has."""
        return hash_blocks([*os.urandom(_BLOCK_SIZE)] * self.num_blocks, block_size=_BLOCK_SIZE)


async def _measured(
    name: str, tier: TierSettings, limits: CacheLimits, work: _Work, rounds: int, on_round: Callable[[], object]
) -> list[Measured]:
    seconds: dict[Direction, list[tuple[float, float]]] = {"store": [], "load": []}
    with _in_a_folder_of_its_own(tier, work) as own:
        async with _through_a_cache(own, limits, work) as ours, _ceiling(own, work) as (what, bare):
            for number in range(1 + rounds):
                for direction, pairs in seconds.items():
                    pair = await by_turns(ours, bare, direction)
                    if number:  # the first of all touches memory that nobody has touched
                        pairs.append(pair)
                if number:
                    on_round()
    return [
        Measured(
            name,
            direction,
            work.num_bytes / median(ours_s for ours_s, _ in pairs),
            work.num_bytes / median(bare_s for _, bare_s in pairs),
            median(bare_s / ours_s for ours_s, bare_s in pairs),
            what,
        )
        for direction, pairs in seconds.items()
    ]


async def by_turns(ours: Move, bare: Move, direction: Direction) -> tuple[float, float]:
    """Move all blocks by ``ours`` and by ``bare`` in turns, until that took long enough to be told from noise.

    Returns:
        The seconds that one of ours takes, and of the other, on average.
    """
    sums, turns = [0.0, 0.0], 0
    while max(sums) < _ROUND_S:
        sums[0] += await ours(direction)
        sums[1] += await bare(direction)
        turns += 1
    return sums[0] / turns, sums[1] / turns


@contextmanager
def _in_a_folder_of_its_own(tier: TierSettings, work: _Work) -> Iterator[TierSettings]:
    """Yield the tier with a path and a capacity for this work: a cache may have the real one open."""
    wanted = work.num_blocks * work.record.stride_bytes
    room = {"capacity": 4 * wanted + _NOTES}
    if isinstance(tier, GPUTier) and not torch.cuda.is_available():
        raise ConfigurationError("there is no GPU here")
    if not isinstance(tier, OwnedTierSettings):
        capacity = getattr(tier, "capacity", None)  # of a medium that evicts for itself
        if isinstance(tier, StorageTierSettings) and isinstance(capacity, int) and wanted > capacity:
            raise ConfigurationError(
                f"its capacity of {capacity} bytes is below {work.num_blocks} blocks of {work.record.stride_bytes} "
                "bytes with their headers: give a smaller --block, or fewer --blocks"
            )
        yield tier.model_copy(update=room | {"max_capacity": None}) if isinstance(tier, CPUTier | GPUTier) else tier
        return
    with ExitStack() as made:
        own = [made.enter_context(_folder_beside(path)) / "tier" for path in paths_of(tier)]
        if not own:
            raise ConfigurationError("there is nothing to compare it with")
        yield tier.model_copy(update=room | {"path": own[0] if len(own) == 1 else tuple(own)})


@contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    there = next(each for each in (path, *path.parents) if each.exists())
    beside = there.parent if there == path and there.parent.stat().st_dev == there.stat().st_dev else there
    with tempfile.TemporaryDirectory(prefix=".tiered-kv-bench-", dir=beside) as folder:
        yield Path(folder)


@asynccontextmanager
async def _through_a_cache(tier: TierSettings, limits: CacheLimits, work: _Work) -> AsyncIterator[Move]:
    """Yield what stores and loads all blocks by a cache of this tier alone."""
    if isinstance(tier, StorageTierSettings) and tier.read_only:
        raise ConfigurationError("it is read_only: nothing can be stored to be measured")
    memory = isinstance(tier, CPUTier | GPUTier)
    chain = [tier] if memory else [CPUTier(capacity=ByteSize(0)), tier]
    keys, pages, is_stored = work.keys(), GPULoadStoreSpec(range(work.num_blocks)), False
    device = None if memory else "cpu"
    async with TieredKV(chain, model=work.model, layout=work.layout, limits=limits, device=device) as kv:
        kv.register_kv_caches(work.caches, axes="BPNHD")

        async def move(direction: Direction) -> float:
            nonlocal keys, is_stored
            started = time.perf_counter()
            if direction == "store":
                if is_stored:  # else an S3 store would note that it has to forget what nobody has ever stored
                    await kv.evict(keys)
                is_stored = True
                keys, started = work.keys(), time.perf_counter()
                stored = await (await kv.store(keys, pages)).settled()
                num_moved, why = stored[-1].written, ", ".join(kv.stats().tiers[-1].dropped_because)
            else:
                num_moved, why = (await kv.load(keys, pages)).num_blocks, ""
            seconds = time.perf_counter() - started
            if num_moved < work.num_blocks:
                raise BackendUnavailableError(
                    f"{direction} moved {num_moved} of {work.num_blocks} blocks: {why or 'run doctor'}"
                )
            return seconds

        try:
            yield move
        finally:
            await kv.evict(keys)


@asynccontextmanager
async def _ceiling(tier: TierSettings, work: _Work) -> AsyncIterator[tuple[str, Move]]:
    """Yield what moves as many bytes without the cache, and what that is."""
    if isinstance(tier, CPUTier | GPUTier):
        source, there = work.caches[0], torch.empty_like(work.caches[0])
        from_bytes, to_bytes = (each.view(torch.uint8).numpy() for each in (source, there))

        async def copy(_: Direction) -> float:
            started = time.perf_counter()
            there.copy_(source)
            by_all_threads = time.perf_counter()
            np.copyto(to_bytes, from_bytes)  # torch's threads wait for each other: for long, where cores are busy
            return min(by_all_threads - started, time.perf_counter() - by_all_threads)

        yield "one copy in memory", copy
    elif paths := paths_of(tier):
        with _plain_files(paths, work, direct=isinstance(tier, OwnedTierSettings)) as (what, move):
            yield what, lambda direction: asyncio.to_thread(move, direction)
    else:
        async with _client_alone(tier, work) as move_alone:
            yield "its client alone", move_alone


@contextmanager
def _plain_files(
    paths: Sequence[Path], work: _Work, *, direct: bool
) -> Iterator[tuple[str, Callable[[Direction], float]]]:
    """Yield what writes or reads as many blocks in plain files, one a directory, each by one call, in some threads."""
    stride = work.record.stride_bytes
    with ExitStack() as opened:
        what, fds = "a plain file" if len(paths) == 1 else f"{len(paths)} plain files", []
        for path in paths:
            path.mkdir(parents=True, exist_ok=True)
            file = opened.enter_context(tempfile.NamedTemporaryFile(dir=path, prefix=".bench-"))
            fd = -1
            if direct:
                with suppress(OSError):  # the tier goes through the page cache there too
                    fd = os.open(file.name, os.O_RDWR | os.O_DIRECT)
            direct = fd >= 0
            fds.append(fd if direct else os.open(file.name, os.O_RDWR))
            opened.callback(os.close, fds[-1])
        memory = torch.empty((work.num_blocks + 1) * stride, dtype=torch.uint8).numpy()
        aligned = memory[-memory.ctypes.data % PAGE_BYTES :][: work.num_blocks * stride]
        aligned = aligned.reshape(work.num_blocks, stride)

        def some(call: Callable[[int, list[Any], int], int], first: int) -> None:
            for number in range(first, work.num_blocks, _THREADS):
                call(fds[number % len(fds)], [aligned[number]], number // len(fds) * stride)

        def move(direction: Direction) -> float:
            call: Any = os.pwritev if direction == "store" else os.preadv
            started = time.perf_counter()
            with ThreadPoolExecutor(_THREADS) as threads:
                list(threads.map(partial(some, call), range(_THREADS)))  # which raises what one of them raises
            return time.perf_counter() - started

        yield f"{what}, direct I/O" if direct else what, move


@asynccontextmanager
async def _client_alone(tier: TierSettings, work: _Work) -> AsyncIterator[Move]:
    """Yield what writes or reads as many blocks by the medium's backend, which no cache checks or schedules."""
    backend = make_backend(tier)
    if not isinstance(backend, Backend):
        raise ConfigurationError("there is nothing to compare it with")
    blocks = [Block.empty(work.record.payload_bytes) for _ in range(work.num_blocks)]
    space = Namespace(work.record.fingerprint, epoch=epoch_digest("bench"))
    keys = [BlockKey(space, os.urandom(32), position) for position in range(work.num_blocks)]

    async def move(direction: Direction) -> float:
        started = time.perf_counter()
        await (backend.write(keys, blocks) if direction == "store" else backend.read(keys, blocks))
        return time.perf_counter() - started

    async with open_backend(backend, work.record):
        try:
            yield move
        finally:
            await backend.delete(keys)


def _speed(bytes_per_s: float) -> str:
    return f"{size_in_words(bytes_per_s)}/s"
