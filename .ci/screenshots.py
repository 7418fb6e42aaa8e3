"""Make the pictures of the page in docs/images: a real cache with some minutes of traffic, in headless Chromium.

    python .ci/screenshots.py [--seconds 60]

Needs Chromium: apt-get install chromium-headless-shell.
"""

import argparse
import asyncio
import random
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path

import torch
from PIL import Image
from playwright.async_api import async_playwright

from tiered_kv import GPULoadStoreSpec, KVLayout, ModelIdentity, TieredKV, hash_blocks
from tiered_kv.telemetry import Metrics
from tiered_kv.values.events import Event, PageServed

IMAGES = Path(__file__).parents[1] / "docs" / "images"
BLOCK_SIZE = 16
SALTS = ("chat", "search")
VIEWS = {"page": (1180, 900, "light"), "page-dark": (1180, 900, "dark"), "page-phone": (390, 844, "light")}


async def main(seconds: float) -> None:
    """Open a cache, keep it busy, and look at it."""
    async with busy_cache(page="127.0.0.1:0") as address, async_playwright() as driver:
        program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
        browser = await driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        await (await browser.new_page()).goto(address)  # somebody looks all the while, and nothing is forgotten
        await asyncio.sleep(seconds)
        for name, (width, height, scheme) in VIEWS.items():
            window = await browser.new_page(
                viewport={"width": width, "height": height}, color_scheme="dark" if scheme == "dark" else "light"
            )
            await window.goto(address)
            await window.wait_for_selector("#chain svg")
            taken = await window.screenshot(full_page=True)
            Image.open(BytesIO(taken)).quantize(128).save(IMAGES / f"{name}.png", optimize=True)
        await browser.close()


@asynccontextmanager
async def busy_cache(page: str, *, metrics: Metrics | bool = False) -> AsyncIterator[str]:
    """Yield the address of the page of a cache of three tiers that prompts of some popular beginnings keep busy."""
    kv_caches = [torch.randn(2, 64, BLOCK_SIZE, 2, 64) for _layer in range(4)]
    layout, model = KVLayout.from_tensors(kv_caches, block_size=BLOCK_SIZE), ModelIdentity("llama-3.1-8b", weights="v1")
    served: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def emit(event: Event) -> None:
        if isinstance(event, PageServed) and not served.done():
            served.set_result(event.address)

    with tempfile.TemporaryDirectory() as folder:
        tiers = [
            {"medium": "cpu", "capacity": "32MiB"},
            {"medium": "nvme", "path": f"{folder}/nvme", "capacity": "192MiB"},
            {"medium": "shared_fs", "path": f"{folder}/shared", "capacity": "320MiB"},
        ]
        cache = TieredKV(tiers, model=model, layout=layout, device="cpu", emit=emit, page=page, metrics=metrics)
        async with cache as kv:
            kv.register_kv_caches(kv_caches)
            serving = asyncio.ensure_future(serve(kv))
            try:
                yield await served
            finally:
                serving.cancel()
                await asyncio.wait({serving})


async def serve(kv: TieredKV) -> None:
    """Look up, load and store one prompt after another."""
    chance = random.Random(0)
    while True:
        topic, blocks = int(chance.paretovariate(0.45)) % 4000, chance.randrange(8, 48)
        tokens = [topic * 7919 % 30_000 + number for number in range(blocks * BLOCK_SIZE)]
        keys = hash_blocks(tokens, block_size=BLOCK_SIZE, salt=SALTS[topic % 3 == 0])
        found = (await kv.lookup(keys)).num_blocks
        if found:
            await kv.load(keys[:found], GPULoadStoreSpec(range(found)))
        await kv.store(keys, GPULoadStoreSpec(range(blocks)))
        await asyncio.sleep(0.02)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    asyncio.run(main(parser.parse_args().seconds))
