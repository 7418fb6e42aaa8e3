"""Load a prompt's KV from a slow disk, compute it, or both at once: what is fastest depends on both, and is chosen.

One prompt is served from an NVMe tier that is held to so many megabytes a second, in three ways: all of it is loaded,
all of it is computed, or as the cache advises, from what the tier and the engine did lately. The logits have to be
equal to the bit, whichever part was loaded; else the exit code is 1.

    pip install '.[demo]'
    python examples/load_or_recompute.py                  # some minutes on two cores
    python examples/load_or_recompute.py --tokens 1024 --megabytes-per-s 4 64
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaForCausalLM

from chat_engine import BLOCK_SIZE, CHUNK, LLAMA_100M, Engine, build_model, faster_dtype, weights_digest
from tiered_kv import GPULoadStoreSpec, KVLayout, ModelIdentity, TieredKV, hash_blocks

STEP = CHUNK // BLOCK_SIZE
"""Blocks that the engine computes at once."""


class Request(Engine):
    """An engine that serves one prompt, whose blocks are its own from the beginning."""

    def __init__(self, model: LlamaForCausalLM, prompt: Sequence[int]) -> None:
        super().__init__(model, num_blocks=len(prompt) // BLOCK_SIZE)
        self.prompt = list(prompt)
        self.num_blocks = (len(prompt) - CHUNK) // BLOCK_SIZE  # the last chunk is always computed, for its logits
        self.keys = hash_blocks(self.prompt[: self.num_blocks * BLOCK_SIZE], block_size=BLOCK_SIZE)
        self.blocks = GPULoadStoreSpec(range(self.num_blocks))
        self.table = torch.arange(len(prompt) // BLOCK_SIZE, device=model.device)
        self.tokens_per_s = 1.0

    async def compute(self, start: int, stop: int) -> Tensor:
        """Compute blocks, whole chunks of them; return the logits of the last token."""
        logits = torch.empty(0)
        for first in range(start * BLOCK_SIZE, stop * BLOCK_SIZE, CHUNK):
            started = time.perf_counter()
            logits = await self._step(self.prompt[first : first + CHUNK], first, CHUNK - 1, self.table)
            self.tokens_per_s = CHUNK / (time.perf_counter() - started)
        return logits

    async def finish(self) -> Tensor:
        """Compute the last chunk."""
        return await self.compute(self.num_blocks, self.num_blocks + STEP)

    async def load_all(self, kv: TieredKV) -> str:
        """Load what there is."""
        loaded = await kv.load(self.keys, self.blocks)
        return f"{loaded.num_blocks} / 0"

    async def compute_all(self, _: TieredKV) -> str:
        """Load nothing."""
        await self.compute(0, self.num_blocks)
        return f"0 / {self.num_blocks}"

    async def as_advised(self, kv: TieredKV) -> str:
        """Load as much as pays; from the back, while the rest is computed, if that is faster still."""
        found = await kv.lookup(self.keys)
        advice = found.split(prefill_tokens_per_s=self.tokens_per_s, chunk_tokens=CHUNK)
        if advice.order == "front":
            n = advice.num_blocks // STEP * STEP
            loaded = (await kv.load(self.keys[:n], self.blocks[:n])).num_blocks // STEP * STEP
            await self.compute(loaded, self.num_blocks)
            return f"{loaded} / {self.num_blocks - loaded}"
        at, handle = 0, kv.start_load(self.keys, self.blocks, order="back")
        while (mine := handle.stop_before(min(at + STEP, self.num_blocks))) > at:
            if mine % STEP:
                break  # a step that computed less would round otherwise: leave the rest to the load
            await self.compute(at, mine)
            at = mine
        loaded = int((await handle).mask.sum())
        await self.compute(at, max(at, self.num_blocks - loaded))  # only if a tier failed
        return f"{self.num_blocks - at} / {at} at once"


@asynccontextmanager
async def opened(request: Request, path: str, megabytes_per_s: float) -> AsyncIterator[TieredKV]:
    """Yield a cache on a disk that is so slow. It has no CPU tier, so that every load reads the disk."""
    disk = {"medium": "nvme", "path": path, "capacity": "1GiB", "read_bandwidth": int(megabytes_per_s * 1e6)}
    model = ModelIdentity("llama-100m", weights=weights_digest(request.model))
    layout = KVLayout.from_tensors(request.kv_caches, block_size=BLOCK_SIZE)
    limits = {"window": "4MiB", "load_timeout_s": 600}
    async with TieredKV([disk], model=model, layout=layout, limits=limits, device=request.model.device) as kv:
        kv.register_kv_caches(request.kv_caches)
        yield kv


async def serve(request: Request, path: str, megabytes_per_s: float, table: Table) -> bool:
    """Serve the prompt in every way; return whether the logits were always the same."""
    async with opened(request, path, megabytes_per_s) as kv:

        async def timed(way: Callable[[TieredKV], Awaitable[str]]) -> tuple[float, str, Tensor]:
            for pages in request.kv_caches.values():
                pages.zero_()
            started = time.perf_counter()
            what = await way(kv)
            return time.perf_counter() - started, what, await request.finish()

        computed_s, _, expected = await timed(request.compute_all)
        await (await kv.store(request.keys, request.blocks)).settled()
        loaded_s, _, loaded = await timed(request.load_all)
        advised_s, what, advised = await timed(request.as_advised)
    is_equal = torch.equal(loaded, expected) and torch.equal(advised, expected)
    best = min(loaded_s, computed_s)
    table.add_row(
        f"{megabytes_per_s:g}", f"{loaded_s:.2f}", f"{computed_s:.2f}", f"{advised_s:.2f}", f"{advised_s / best:.2f}",
        what, "equal" if is_equal else "OTHER",
    )  # fmt: skip
    return is_equal


async def run(options: argparse.Namespace) -> bool:
    """Serve from disks of all these speeds."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(LLAMA_100M, device, dtype=faster_dtype(device))
    prompt = torch.randint(1, 250, (options.tokens // CHUNK * CHUNK,), generator=torch.Generator().manual_seed(0))
    request, console = Request(model, prompt.tolist()), Console()
    await request.compute(0, STEP)  # what is set up at first is no part of the comparison
    table = Table(title=f"{request.num_blocks} blocks of {BLOCK_SIZE} tokens, seconds until they are in place")
    for name in ("MB/s", "load", "compute", "as advised", "over better", "loaded / computed", "logits"):
        table.add_column(name, justify="right")
    is_equal = True
    for megabytes_per_s in options.megabytes_per_s:
        with tempfile.TemporaryDirectory() as path, console.status(f"at {megabytes_per_s:g} MB/s"):
            is_equal &= await serve(request, path, megabytes_per_s, table)
    console.print(table)
    return is_equal


def main() -> None:
    """Serve, compare, show; exit with 1 if anything is not equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt: 256 to 4096, or 2048")
    parser.add_argument("--megabytes-per-s", type=float, nargs="+", default=[3, 10, 30, 300], help="of the disk")
    options = parser.parse_args()
    if not 2 * CHUNK <= options.tokens <= LLAMA_100M.max_position_embeddings:
        parser.error(f"--tokens: {2 * CHUNK} to {LLAMA_100M.max_position_embeddings}")
    sys.exit(0 if asyncio.run(run(options)) else 1)


if __name__ == "__main__":
    main()
