"""A cache that lives as long as a web application: opened and closed by FastAPI's lifespan.

    pip install . fastapi uvicorn httpx
    uvicorn --app-dir examples fastapi_app:app     serves it
    python examples/fastapi_app.py                 sends it two prompts and shows the answers

The tiers come from the environment (``TIERED_KV_TIERS``, or a TOML file named by ``TIERED_KV_CONFIG``). In place of a
model stands `compute`, which is all an engine would have to bring.
"""

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

import httpx
import torch
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, Field

from tiered_kv import GPULoadStoreSpec, KVLayout, ModelIdentity, TieredKV, hash_blocks

BLOCK_SIZE = 16
NUM_BLOCKS = 256
MODEL = ModelIdentity("example", weights="none")


class Engine:
    """The paged KV cache of an engine, and which of its blocks are free."""

    def __init__(self) -> None:
        self.kv_caches = [torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, 2, 64) for _layer in range(4)]
        self._free = list(range(NUM_BLOCKS))

    @asynccontextmanager
    async def blocks(self, n: int) -> AsyncIterator[list[int]]:
        """Lend ``n`` block ids for one request."""
        if n > len(self._free):
            raise HTTPException(503, f"{n} blocks wanted, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(n)]
        try:
            yield taken
        finally:
            self._free += taken

    def compute(self, token_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Fill blocks with what a model would make of their tokens."""
        values = torch.tensor(token_ids, dtype=torch.float32).view(-1, BLOCK_SIZE, 1, 1)
        for number, layer in enumerate(self.kv_caches):
            layer[:, list(block_ids)] = values + number


class Prompt(BaseModel):
    """What a client sends."""

    token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(max_length=BLOCK_SIZE * NUM_BLOCKS)]
    tenant: str = ""
    """Equal prompts of different tenants share nothing."""


class Answer(BaseModel):
    """Where the KV of a prompt's full blocks came from."""

    loaded_blocks: int
    by_tier: dict[str, int]
    computed_blocks: int


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    """Open the cache before the first request; close it, with what is still to be written, behind the last."""
    app.state.engine = engine = Engine()
    layout = KVLayout.from_tensors(engine.kv_caches, block_size=BLOCK_SIZE)
    async with TieredKV.from_settings(model=MODEL, layout=layout) as app.state.kv:
        app.state.kv.register_kv_caches(engine.kv_caches)
        gc.freeze()  # torch's objects live as long as this: else a collection walks them all, for 60 ms, in a request
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/prompts")
async def prefill(prompt: Prompt, request: Request) -> Answer:
    """Get a prompt's KV into the engine: load the prefix that is known, compute and store the rest."""
    engine: Engine = request.app.state.engine
    kv: TieredKV = request.app.state.kv
    keys = hash_blocks(prompt.token_ids, block_size=BLOCK_SIZE, salt=prompt.tenant)
    async with engine.blocks(len(keys)) as ids:
        loaded = await kv.load(keys, GPULoadStoreSpec(ids))
        n = loaded.num_blocks
        if n < len(keys):
            engine.compute(prompt.token_ids[n * BLOCK_SIZE : len(keys) * BLOCK_SIZE], ids[n:])
            await kv.store(keys[n:], GPULoadStoreSpec(ids[n:]))
        return Answer(loaded_blocks=n, by_tier=dict(loaded.by_tier), computed_blocks=len(keys) - n)


@app.get("/stats")
async def stats(request: Request) -> list[dict[str, Any]]:
    """Say what is in each tier."""
    kv: TieredKV = request.app.state.kv
    return [{"tier": tier.tier, "blocks": tier.ready, "hits": tier.hits} for tier in kv.stats().tiers]


async def main() -> None:
    """Send two prompts that share their first 100 tokens, and show what was reused."""
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://kv") as client:
        for question in (range(1000, 1060), range(2000, 2060)):
            answer = await client.post("/prompts", json={"token_ids": [*range(100), *question]})
            print(answer.json())
        print((await client.get("/stats")).json())


if __name__ == "__main__":
    asyncio.run(main())
