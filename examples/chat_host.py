"""Two engines in two processes share one cache that outlives them: what ``make demo HOST=1`` runs.

A server, ``tiered-kv serve``, keeps the cache: CPU memory and NVMe. Engine one computes the conversations of
``chat.py`` and stores what it computed; engine two, another process, loads every prefix. Then the server is restarted
under them, and both serve once more, engine one from NVMe, which is all that is left, and engine two from memory again.
Each time all tokens and last logits have to be those that engine one computed, to the bit; else the exit code is 1.

    pip install '.[demo]'
    python examples/chat_host.py        # about two minutes on two cores; the options of chat.py
"""

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import cast

from rich.progress import Progress

from chat import make_progress, open_engine, parse_arguments, quiet, serve
from chat_engine import BLOCK_SIZE, weights_digest
from chat_results import LABELS, RECOMPUTE, Run, find_faults, make_console, show
from tiered_kv import BlockCache, KVLayout, ModelIdentity, TieredKV, hash_blocks

FROM = {
    RECOMPUTE: "Engine one computes",
    "shared": "Engine two",
    "restarted": "Engine one, new server",
    "again": "Engine two",
}
TIER_OF = {"shared": "cpu", "restarted": "nvme", "again": "cpu"}
"""Of the server's: where the KV of each run has to come from."""
SETTINGS = """
[[tiers]]
medium = "cpu"
capacity = "512MiB"

[[tiers]]
medium = "nvme"
path = "{folder}/nvme"
capacity = "1GiB"

[host]
socket = "{folder}/kv.sock"
"""
ATTACH_S = 30.0


@asynccontextmanager
async def started_server(folder: Path, log: Path) -> AsyncIterator[None]:
    """Run a server as an operator does, until it has written what was stored."""
    config, socket = folder / "tiered-kv.toml", folder / "kv.sock"
    config.write_text(SETTINGS.format(folder=folder))
    command = [sys.executable, "-m", "tiered_kv", "serve", "--config", str(config)]
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out)
    try:
        async with asyncio.timeout(ATTACH_S):
            while not socket.exists():
                if process.returncode is not None:
                    raise RuntimeError(f"the server ended with {process.returncode}; {log} says why")
                await asyncio.sleep(0.05)
        yield
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        code = await process.wait()
    if code:
        raise RuntimeError(f"the server ended with {code}; {log} says why")


class EngineProcess:
    """An engine in a process of its own, which this file runs as well: `serve_when_told`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._said = cast("asyncio.StreamReader", process.stdout)

    @classmethod
    @asynccontextmanager
    async def started(cls, name: str, folder: Path, options: argparse.Namespace) -> AsyncIterator["EngineProcess"]:
        """Start one, and wait until it is attached to the server of this folder."""
        told = [f"--dtype={options.dtype}", f"--engine={name}", f"--socket={folder}/kv.sock"]
        command, pipe = [sys.executable, __file__, *sys.argv[1:], *told], asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        engine = cls(process)
        try:
            await engine._hear("ready", lambda: None)
            yield engine
        finally:
            if process.returncode is None:
                cast("asyncio.StreamWriter", process.stdin).close()
            await process.wait()

    async def serve(self, source: str, out: Path, on_served: Callable[[], object]) -> Run:
        """Have it serve all conversations; ``on_served`` is called after each request."""
        cast("asyncio.StreamWriter", self._process.stdin).write(f"{source}\n".encode())
        await self._hear("served", on_served)
        return Run.read(out / f"{source}.json")

    async def _hear(self, what: str, on_request: Callable[[], object]) -> None:
        async for line in self._said:
            if line.decode().strip() == what:
                return
            if line == b"\n":
                on_request()
            else:
                sys.stderr.buffer.write(line)  # a warning, that the server is away
        raise RuntimeError(f"an engine ended with {await self._process.wait()}")


async def serve_when_told(options: argparse.Namespace, name: str, socket: str) -> None:
    """Be an engine: serve all conversations for each line on standard input, which says where KV is to come from."""
    async with open_engine(options) as engine:
        layout = KVLayout.from_tensors(engine.kv_caches, block_size=BLOCK_SIZE)
        model = ModelIdentity("llama-100m", weights=weights_digest(engine.model))
        # In one's own process it would be TieredKV.from_settings(settings, ...). That is all that differs.
        async with TieredKV.connect(f"unix://{socket}", model=model, layout=layout, name=name) as kv:
            kv.register_kv_caches(engine.kv_caches)
            print("ready", flush=True)
            prompts: list[list[int]] = []
            while source := (await asyncio.to_thread(sys.stdin.readline)).strip():
                await until_attached(kv, prompts[:1])
                run = await serve(engine, kv, source, options, partial(print, flush=True))
                await kv.flush()
                run.write(options.out / f"{source}.json")
                prompts = [request.prompt for request in run.requests]
                print("served", flush=True)


async def until_attached(kv: BlockCache, prompts: list[list[int]]) -> None:
    """Wait until the server has come back: what was served before is found. Requests would only miss meanwhile."""
    async with asyncio.timeout(ATTACH_S):
        for prompt in prompts:
            keys = hash_blocks(prompt, block_size=BLOCK_SIZE)
            while (await kv.lookup(keys)).num_blocks < len(keys) // 2:  # noqa: ASYNC110 - no event of this process
                await asyncio.sleep(0.05)


async def serve_from_both(options: argparse.Namespace, folder: Path, progress: Progress) -> list[Run]:
    """Return the runs of `FROM`."""

    async def served(engine: EngineProcess, source: str) -> Run:
        task = progress.add_task(LABELS[source], total=options.conversations * options.turns)
        return await engine.serve(source, options.out, partial(progress.advance, task))

    log = options.out / "server.log"
    async with AsyncExitStack() as engines:
        async with started_server(folder, log):
            one = await engines.enter_async_context(EngineProcess.started("one", folder, options))
            computed = await served(one, RECOMPUTE)
            two = await engines.enter_async_context(EngineProcess.started("two", folder, options))
            shared = await served(two, "shared")
        async with started_server(folder, log):  # they attach to it by themselves
            restarted = await served(one, "restarted")
            again = await served(two, "again")
            await engines.aclose()
    return [computed, shared, restarted, again]


def main() -> None:
    """Serve, compare, show; exit with 1 if anything is not as it has to be."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--engine")  # what the engines' processes are told
    own.add_argument("--socket")
    told, rest = own.parse_known_args()
    options = parse_arguments(rest)
    quiet()
    if told.engine:
        asyncio.run(serve_when_told(options, told.engine, told.socket))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    LABELS.update(FROM)
    console = make_console()
    with tempfile.TemporaryDirectory(prefix="tiered-kv-") as folder, make_progress(console) as progress:
        runs = asyncio.run(serve_from_both(options, Path(folder), progress))
    faults = {
        run.source: find_faults(run, runs[0], tier=TIER_OF[run.source], may_pass_on=run.source == "restarted")
        for run in runs[1:]
    }
    show(console, runs, faults)
    sys.exit(1 if any(faults.values()) else 0)


if __name__ == "__main__":
    main()
