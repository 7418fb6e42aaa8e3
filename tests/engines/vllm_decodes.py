"""What vLLM's own decoder makes of the KV events that our publisher sends: ``vllm_decodes.py FOLDER``.

Runs in vLLM's environment. No engine is started: what any engine stores is told by `KVEventPublisher`.
"""

import asyncio
import json
import sys
from typing import Any

from tiered_kv import CPULoadStoreSpec, KVGroup, KVLayout, ModelIdentity, TieredKV, hash_blocks
from tiered_kv.telemetry import KVEventPublisher
from vllm_events import Router

BLOCK_BYTES, BLOCK_SIZE, NUM_BLOCKS = 4096, 16, 4


async def main(folder: str) -> None:
    """Store four blocks, evict two of them, and print what was heard after each."""
    tokens = list(range(NUM_BLOCKS * BLOCK_SIZE))
    keys = hash_blocks(tokens, block_size=BLOCK_SIZE)
    layout = KVLayout((KVGroup.opaque(BLOCK_BYTES, tag="test", block_size=BLOCK_SIZE),))
    tiers = ["cpu://?capacity=1MiB", f"file://{folder}/nvme?capacity=1MiB"]
    kv = TieredKV(tiers, model=ModelIdentity("test", weights="1"), layout=layout, device="cpu")
    endpoint = f"ipc://{folder}/events"
    heard: list[Any] = []
    async with kv, KVEventPublisher(kv, endpoint) as publisher:
        router = Router(endpoint)
        await asyncio.to_thread(router.listen)
        kv.register_host_pool("pages", bytearray(NUM_BLOCKS * BLOCK_BYTES))
        publisher.describe(keys, tokens)
        await kv.store(keys, CPULoadStoreSpec(range(NUM_BLOCKS), pool="pages"))
        await kv.flush()
        for left in (NUM_BLOCKS, 2):
            await kv.evict(keys[left:])
            await asyncio.to_thread(router.listen)
            heard.append({medium: len(hashes) for medium, hashes in router.index.items() if hashes})
    named = [int.from_bytes(digest[-8:], "big") for digest in keys]
    told = [router.others.get(own) for own in named]
    right = [(parent, tokens[n * BLOCK_SIZE :][:BLOCK_SIZE]) for n, parent in enumerate([None, *named[:-1]])]
    print(json.dumps({"heard": heard, "is_told_right": told == right}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
