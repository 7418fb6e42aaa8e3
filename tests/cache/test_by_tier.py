"""Which tier served a block is told right, wherever the blocks of one prefix lie and however they are loaded."""

import mmap

import pytest

from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import AnyTier, Recorder, keep, open_cache, until
from tests.support.engine import PAYLOAD_BYTES, Engine, contents, prompt
from tiered_kv import CPULoadStoreSpec, GPULoadStoreSpec, TieredKV
from tiered_kv.values.events import BlocksLoaded

GPU = {"medium": "gpu", "capacity": 16 * PAYLOAD_BYTES}
CPU = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}
KEYS = prompt(12)
Scripted = ScriptedBackend | ScriptedSlotBackend


async def media_with_parts(engine: Engine) -> list[Scripted]:
    """Return three media that have blocks 2 and 3, 4 to 8, and 9 to 11: the second an owned one."""
    media: list[Scripted] = [
        ScriptedBackend(name="a"),
        ScriptedSlotBackend(name="b"),
        ScriptedBackend(name="c"),
    ]
    for medium, part in zip(media, (KEYS[2:4], KEYS[4:9], KEYS[9:]), strict=True):
        async with open_cache(medium, engine=engine) as kv:
            await keep(kv, engine, part)
    return media


@pytest.mark.parametrize(("above", "head"), [([], 0), ([CPU], 2), ([GPU, CPU], 2)], ids=["", "cpu", "gpu, cpu"])
async def test_each_block_is_credited_to_the_tier_that_had_it(above: list[AnyTier], head: int) -> None:
    """In the result, in the event and in the statistics, for blocks of memory and of three media in one load."""
    engine, recorder = Engine(), Recorder()
    media = await media_with_parts(engine)
    async with open_cache(*above, *media, engine=engine, emit=recorder) as kv:
        if head:
            await keep(kv, engine, KEYS[:head])
        keys, engine_pages = KEYS[2 - head :], range(10 + head)
        first = {kv.stats().tiers[0].tier: head} if head else {}
        assert (await kv.lookup(keys)).by_tier == {**first, "a": 2, "b": 5, "c": 3}
        engine.poison()
        loaded = await kv.load(keys, GPULoadStoreSpec(engine_pages))
        assert loaded.by_tier == {**first, "a": 2, "b": 5, "c": 3}
        assert engine.read(engine_pages) == contents(keys)
        assert hits(kv) == loaded.by_tier
        assert recorder.of(BlocksLoaded)[-1].by_tier == loaded.by_tier


async def test_what_has_left_the_gpu_pool_is_credited_to_the_cpu_tier() -> None:
    """Block by block."""
    engine = Engine()
    async with open_cache(GPU, CPU, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS[3:7], tier="gpu")
        loaded = await kv.load(KEYS, GPULoadStoreSpec(range(12)))
        assert loaded.by_tier == {"gpu": 8, "cpu": 4}


async def test_a_direct_load_credits_the_media_that_it_read() -> None:
    """Though no block passes through a tier of memory."""
    engine = Engine()
    media = await media_with_parts(engine)
    memory = mmap.mmap(-1, 16 * PAYLOAD_BYTES)
    async with open_cache(CPU, *media, engine=engine) as kv:
        kv.register_host_pool("pool", memory, direct=True)
        loaded = await kv.load(KEYS[2:], CPULoadStoreSpec(range(10), pool="pool"))
        assert loaded.by_tier == {"a": 2, "b": 5, "c": 3}
        assert hits(kv) == loaded.by_tier
        assert [memory[i * PAYLOAD_BYTES : (i + 1) * PAYLOAD_BYTES] for i in range(10)] == contents(KEYS[2:])


async def test_a_block_that_another_load_brings_is_credited_to_where_it_came_from() -> None:
    """Whoever joins a fill has the block from the medium too, and not from the memory that it passes through."""
    engine = Engine()
    media = await media_with_parts(engine)
    async with open_cache(CPU, *media, engine=engine) as kv:
        media[1].on_read.hold()
        loads = [kv.start_load(KEYS[4:9], GPULoadStoreSpec(range(start, start + 5))) for start in (0, 5)]
        await until(lambda: media[1].on_read.num_held > 0)
        media[1].on_read.release()
        assert [(await load).by_tier for load in loads] == [{"b": 5}] * 2


def hits(kv: TieredKV) -> dict[str, int]:
    """Return the blocks that each tier served, by name, of those that served any."""
    return {tier.tier: tier.hits for tier in kv.stats().tiers if tier.hits}
