"""One cache for a host: calls through its socket beside the same calls of a cache in one's own process.

A server, `tiered-kv serve`, runs in a process of its own, on the same cores. Medians, by turns:

- ``lookup`` of 1,000 blocks, and ``await load`` of one resident block of 32 KiB: microseconds more than embedded;
- resident loads of 2 MiB blocks by 1, 2 and 4 client processes at once, and by as many with a cache of their own, over
  copies of the same blocks by as many without a cache;
- lookups of 8 client processes that ask as fast as they can: how many a second, and how long the slowest took;
- bytes through the socket and CPU of the server, for a lookup and for a load.
"""

import argparse
import asyncio
import json
import multiprocessing as mp
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from tiered_kv import BlockCache, GPULoadStoreSpec, KVLayout, ModelIdentity, TieredKV, hash_blocks
from tiered_kv.host import protocol, wire

SMALL, LARGE = (16, 2, 64, 4), (16, 8, 128, 32)
"""Tokens, heads, dimension and layers of blocks of 32 KiB and of 2 MiB."""
NUM_BLOCKS: Final = 1000
PROCESSES: Final = (1, 2, 4)
LARGE_BLOCKS: Final = 64
"""Of each process: 128 MiB."""
AT_ONCE: Final = 16
"""Loads of each process between two words with the one that measures."""
ASKING: Final = 8
CONFIG = """
[[tiers]]
medium = "cpu"
capacity = "{capacity}"
[host]
socket = "{socket}"
"""


def caches_of(shape: tuple[int, int, int, int], num_blocks: int) -> list[torch.Tensor]:
    """Return an engine's tensors."""
    tokens, heads, dimension, layers = shape
    return [torch.ones(num_blocks, 2, tokens, heads, dimension, dtype=torch.bfloat16) for _ in range(layers)]


@asynccontextmanager
async def attached(url: str, caches: list[torch.Tensor]) -> AsyncIterator[BlockCache]:
    """Yield a client of the server, or without a URL a cache of one's own, with these tensors."""
    layout, model = KVLayout.from_tensors(caches, block_size=16), ModelIdentity("bench", weights="none")
    if url:
        connected = TieredKV.connect(url, model=model, layout=layout, device="cpu", timeout_s=60.0)
        async with connected as kv:
            kv.register_kv_caches(caches)
            yield kv
    else:
        tiers = [{"medium": "cpu", "capacity": 2 * len(caches[0]) * layout.payload_bytes}]
        async with TieredKV(tiers, model=model, layout=layout, device="cpu") as own:
            own.register_kv_caches(caches)
            yield own


async def calls(url: str, rounds: int) -> dict[str, float]:
    """Return microseconds of a lookup of many blocks, and of a load of one."""
    caches = caches_of(SMALL, 2 * NUM_BLOCKS)
    keys, rng = hash_blocks(range(NUM_BLOCKS * 16), block_size=16), np.random.default_rng(0)
    async with attached(url, caches) as kv:
        await kv.store(keys, GPULoadStoreSpec(range(NUM_BLOCKS)))

        async def lookup() -> None:
            check((await kv.lookup(keys)).num_blocks == NUM_BLOCKS)

        async def load() -> None:
            at = int(rng.integers(NUM_BLOCKS))
            loaded = await kv.load(keys[at : at + 1], GPULoadStoreSpec([NUM_BLOCKS + at]))
            check(loaded.num_blocks == 1)

        return {name: await us(call, rounds) for name, call in (("lookup", lookup), ("load", load))}


async def us(call: Callable[[], Awaitable[None]], rounds: int) -> float:
    """Return the median of a call, in microseconds."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - started)
    return median(seconds) * 1e6


def load_large(tell: Connection, url: str, number: int) -> None:
    """Load blocks of one's own again and again, when told how often."""
    torch.set_num_threads(1)
    caches = caches_of(LARGE, 2 * LARGE_BLOCKS)

    async def load() -> None:
        async with attached(url, caches) as kv:
            keys = hash_blocks(range(number << 20, (number << 20) + LARGE_BLOCKS * 16), block_size=16)
            await kv.store(keys, GPULoadStoreSpec(range(LARGE_BLOCKS)))
            into = GPULoadStoreSpec(range(LARGE_BLOCKS, 2 * LARGE_BLOCKS))
            tell.send("ready")
            while rounds := await asyncio.to_thread(tell.recv):
                for _ in range(rounds):
                    check((await kv.load(keys, into)).num_blocks == LARGE_BLOCKS)
                tell.send("done")

    asyncio.run(load())


def copy_large(tell: Connection, _url: str, _number: int) -> None:
    """Copy as many bytes to the same places, without a cache."""
    torch.set_num_threads(1)
    caches = caches_of(LARGE, 2 * LARGE_BLOCKS)
    source = torch.ones(LARGE_BLOCKS * sum(cache[0].numel() for cache in caches) * 2, dtype=torch.uint8)
    tell.send("ready")
    while rounds := tell.recv():
        for _ in range(rounds):
            for part, cache in zip(source.view(len(caches), -1), caches, strict=True):
                cache[LARGE_BLOCKS:].view(torch.uint8).view(-1).copy_(part)
        tell.send("done")


def ask(tell: Connection, url: str, number: int) -> None:
    """Look up as fast as it goes for so many seconds, when told; say how long each took."""

    async def asking() -> None:
        caches = caches_of(SMALL, NUM_BLOCKS)
        keys = hash_blocks(range(number << 20, (number << 20) + 16 * 16), block_size=16)
        async with attached(url, caches) as kv:
            await kv.store(keys, GPULoadStoreSpec(range(16)))
            tell.send("ready")
            while seconds := await asyncio.to_thread(tell.recv):
                took, end = [], time.perf_counter() + seconds
                while (started := time.perf_counter()) < end:
                    check((await kv.lookup(keys)).num_blocks == 16)
                    took.append(time.perf_counter() - started)
                tell.send(took)

    asyncio.run(asking())


class Processes:
    """Some that do the same at the same time."""

    def __init__(self, work: Callable[[Connection, str, int], None], url: str, number: int) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tiered_kv.host.client", "torch"])
        self._ends: list[Connection] = []
        self._processes = []
        for each in range(number):
            ours, theirs = context.Pipe()
            self._processes.append(context.Process(target=work, args=(theirs, url, each), daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._ends.append(ours)
        for end in self._ends:
            check(end.recv() == "ready")

    def do(self, amount: float) -> tuple[float, list[Any]]:
        """Have them do it; return the seconds it took them all, and what they say."""
        started = time.perf_counter()
        for end in self._ends:
            end.send(amount)
        said = [end.recv() for end in self._ends]
        return time.perf_counter() - started, said

    def close(self) -> None:
        """End them."""
        for end in self._ends:
            end.send(0)
        for process in self._processes:
            process.join()


def check(is_right: bool) -> None:  # noqa: FBT001 - what is checked
    """End, unless the cache did what is measured."""
    if not is_right:
        sys.exit("a block is missing: nothing can be compared")


def throughput(url: str, rounds: int) -> dict[str, float]:
    """Return what loads reach of the copies' throughput, by number of processes, embedded and through the server."""
    ratios = {}
    for number in PROCESSES:
        kinds = Processes(copy_large, "", number), Processes(load_large, "", number), Processes(load_large, url, number)
        took = [[each.do(AT_ONCE)[0] for each in kinds] for _ in range(rounds)]
        for each in kinds:
            each.close()
        ratios[f"own_load_over_copies_{number}"] = median(copied / loaded for copied, loaded, _ in took)
        ratios[f"load_over_copies_{number}"] = median(copied / loaded for copied, _, loaded in took)
    return ratios


def lookups(url: str, seconds: float) -> tuple[float, float]:
    """Return how many lookups a second many clients get, and the 99th percentile of their milliseconds."""
    clients = Processes(ask, url, ASKING)
    took, said = clients.do(seconds)
    clients.close()
    every = np.concatenate(said)
    return len(every) / took, float(np.percentile(every, 99)) * 1e3


async def costs(url: str, pid: int, rounds: int) -> dict[str, float]:
    """Return the server's CPU, and the bytes through its socket, for a lookup of many blocks and a load of one."""
    caches, keys = caches_of(SMALL, 2 * NUM_BLOCKS), hash_blocks(range(NUM_BLOCKS * 16), block_size=16)
    figures = {}
    with counted() as numbers:
        async with attached(url, caches) as kv:
            await kv.store(keys, GPULoadStoreSpec(range(NUM_BLOCKS)))
            for name in ("lookup", "load"):
                before = numbers[0], cpu_us(pid)
                for _ in range(rounds):
                    if name == "lookup":
                        await kv.lookup(keys)
                    else:
                        await kv.load(keys[:1], GPULoadStoreSpec([NUM_BLOCKS]))
                figures[f"{name}_bytes"] = (numbers[0] - before[0]) / rounds
                figures[f"{name}_cpu_us"] = (cpu_us(pid) - before[1]) / rounds
    return figures


@contextmanager
def counted() -> Iterator[list[int]]:
    """Have this process count the bytes of all frames that it sends and gets, in the list."""
    numbers, frame, reply_from = [0], wire.frame, protocol.reply_from

    def sent(message: wire.Message) -> bytes:
        data = frame(message)
        numbers[0] += len(data)
        return data

    def got(body: bytes | memoryview) -> protocol.Reply:
        numbers[0] += len(body) + wire.LENGTH.size
        return reply_from(body)

    vars(wire).update(frame=sent)
    vars(protocol).update(reply_from=got)
    yield numbers
    vars(wire).update(frame=frame)
    vars(protocol).update(reply_from=reply_from)


def cpu_us(pid: int) -> float:
    """Return the CPU time of a process, all its threads together."""
    return sum(int(each.read_text().split()[0]) for each in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e3


def main() -> None:
    """Measure, print a table, and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="tiered-kv-") as folder:
        socket, config = Path(folder) / "kv.sock", Path(folder) / "kv.toml"
        capacity = 3 * NUM_BLOCKS * (32 << 10) + 2 * max(PROCESSES) * LARGE_BLOCKS * (2 << 20)
        config.write_text(CONFIG.format(capacity=2 * capacity, socket=socket))
        command = [sys.executable, "-m", "tiered_kv", "serve", "--config", str(config)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not socket.exists():
                check(server.poll() is None)
                time.sleep(0.05)
            figures = measure(f"unix://{socket}", server.pid, rounds)
        finally:
            server.terminate()
            server.wait()
    table = Table(title="Through the socket of a server on the same cores")
    for column in ("what", "embedded", "server", "bar"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows_of(figures):
        table.add_row(*row)
    Console().print(table)
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


def measure(url: str, pid: int, rounds: int) -> dict[str, float]:
    """Return all figures."""
    figures: dict[str, float] = {}
    pairs = [(asyncio.run(calls("", 100 * rounds)), asyncio.run(calls(url, 100 * rounds))) for _ in range(3)]
    for name in ("lookup", "load"):
        figures[f"{name}_embedded_us"] = median(own[name] for own, _ in pairs)
        figures[f"{name}_server_us"] = median(far[name] for _, far in pairs)
        figures[f"{name}_more_us"] = median(far[name] - own[name] for own, far in pairs)
    figures |= throughput(url, rounds)
    figures["lookups_per_s"], figures["lookups_p99_ms"] = lookups(url, float(rounds))
    return figures | {f"server_{name}": value for name, value in asyncio.run(costs(url, pid, 100)).items()}


def rows_of(figures: dict[str, float]) -> list[tuple[str, str, str, str]]:
    """Return the rows of the table."""
    rows = [
        (f"{what}, us", f"{figures[f'{name}_embedded_us']:.0f}", f"{figures[f'{name}_server_us']:.0f}", f"+{bar}")
        for name, what, bar in (
            ("lookup", f"lookup of {NUM_BLOCKS:,} blocks", 150),
            ("load", "await load of a resident block", 200),
        )
    ]
    rows += [
        (
            f"resident loads by {number} processes, over copies",
            f"{figures[f'own_load_over_copies_{number}']:.2f}",
            f"{figures[f'load_over_copies_{number}']:.2f}",
            "0.95",
        )
        for number in PROCESSES
    ]
    rows += [
        (f"lookups a second of {ASKING} clients", "", f"{figures['lookups_per_s']:,.0f}", "10,000"),
        ("99th percentile of them, ms", "", f"{figures['lookups_p99_ms']:.1f}", ""),
    ]
    return rows + [
        (f"server: {what} of a {name}", "", f"{figures[f'server_{name}_{key}']:,.0f}", "")
        for name in ("lookup", "load")
        for key, what in (("bytes", "bytes"), ("cpu_us", "us of CPU"))
    ]


if __name__ == "__main__":
    main()
