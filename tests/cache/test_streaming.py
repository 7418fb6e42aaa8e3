"""Prefixes longer than the memory they pass through arrive whole, in order, however many at once."""

from pathlib import Path

import anyio
import pytest

from tests.support.any_layout import STRIDE, AnyEngine, cpu, nvme, open_any, prompt
from tests.support.caches import until_idle
from tiered_kv import BlockKeys, CacheLimits, LoadHandle, TieredKV

CPU_BLOCKS = 16
LONG = 4 * CPU_BLOCKS
TINY = CacheLimits(window=STRIDE, bounce=4 * STRIDE)
"""The fewest bounce slots there can be: four, one block a window."""
SMALL = CacheLimits(window=4 * STRIDE, bounce=16 * STRIDE)


async def fill(path: Path, *prompts: BlockKeys) -> None:
    """Put prompts on the disk."""
    engine = AnyEngine(num_blocks=LONG)
    async with open_any(engine, cpu(2 * LONG), nvme(path, "16MiB")) as kv:
        for keys in prompts:
            assert (await kv.store(keys, engine.fill(keys, range(len(keys))))).num_stored == len(keys)
            await kv.flush()
        assert kv.stats()["nvme"].written == sum(map(len, prompts))


async def check_loads(kv: TieredKV, engine: AnyEngine, keys: BlockKeys, times: int = 2) -> None:
    """Load a prompt, backwards in the engine, a few times: always whole and right."""
    blocks = range(len(keys) - 1, -1, -1)
    for _ in range(times):
        engine.wipe()
        loaded = await kv.load(keys, engine.spec(blocks))
        assert (loaded.num_blocks, loaded.faults) == (len(keys), ())
        assert engine.count_right(keys, blocks) == len(keys)


@pytest.mark.parametrize("limits", [SMALL, TINY], ids=["small", "tiny"])
@pytest.mark.parametrize("cpu_blocks", [CPU_BLOCKS, 1, 0])
async def test_four_times_the_memory(cpu_blocks: int, limits: CacheLimits, tmp_path: Path) -> None:
    """A prefix of 4 x the CPU tier, or with none at all, is loaded whole from the disk; the tier then has its head."""
    keys = prompt(LONG)
    await fill(tmp_path, keys)
    engine = AnyEngine(num_blocks=LONG)
    async with open_any(engine, cpu(cpu_blocks), nvme(tmp_path, "16MiB"), limits=limits) as kv:
        loaded = await kv.load(keys, engine.spec(range(LONG)))
        assert (loaded.num_blocks, loaded.by_tier) == (LONG, {"nvme": LONG})
        expected = [("cpu", cpu_blocks)] * bool(cpu_blocks) + [("nvme", LONG)]
        assert [(run.tier, run.stop) for run in (await kv.lookup(keys)).runs] == expected
        await check_loads(kv, engine, keys)
        assert [(run.tier, run.stop) for run in (await kv.lookup(keys)).runs] == expected
        await until_idle(kv)
        stats = kv.stats()
        assert stats["cpu"].hits + stats["nvme"].hits == 3 * LONG
        assert stats["cpu"].evicted == 0


@pytest.mark.parametrize("limits", [SMALL, TINY], ids=["small", "tiny"])
@pytest.mark.parametrize("cpu_blocks", [CPU_BLOCKS, 0])
async def test_eight_at_once(cpu_blocks: int, limits: CacheLimits, tmp_path: Path) -> None:
    """Eight long loads of different prompts through the same few slots all end, whole: none waits for another's."""
    prompts = [prompt(LONG, seed=seed) for seed in range(8)]
    await fill(tmp_path, *prompts)
    engines = [AnyEngine(num_blocks=LONG) for _ in prompts]
    async with open_any(engines[0], cpu(cpu_blocks), nvme(tmp_path, "16MiB"), limits=limits) as kv:
        handles: list[LoadHandle] = []
        for engine, keys in zip(engines, prompts, strict=True):
            kv.register_kv_caches(engine.caches[0])
            handles.append(kv.start_load(keys, engine.spec(range(LONG))))
        for handle in handles:
            assert (await handle).num_blocks == LONG
        for engine, keys in zip(engines, prompts, strict=True):
            assert engine.count_right(keys, range(LONG)) == LONG
        await until_idle(kv)


@pytest.mark.parametrize("cpu_blocks", [CPU_BLOCKS, 0])
async def test_eight_of_one_prompt_at_once(cpu_blocks: int, tmp_path: Path) -> None:
    """Loads of the same long prompt share its slots while it passes through, and all get all of it."""
    keys = prompt(LONG)
    await fill(tmp_path, keys)
    engines = [AnyEngine(num_blocks=LONG) for _ in range(8)]
    async with open_any(engines[0], cpu(cpu_blocks), nvme(tmp_path, "16MiB"), limits=TINY) as kv:
        handles: list[LoadHandle] = []
        for engine in engines:
            kv.register_kv_caches(engine.caches[0])
            handles.append(kv.start_load(keys, engine.spec(range(LONG))))
        for engine, handle in zip(engines, handles, strict=True):
            assert (await handle).num_blocks == LONG
            assert engine.count_right(keys, range(LONG)) == LONG
        await until_idle(kv)


async def test_stores_and_loads_at_once(tmp_path: Path) -> None:
    """Long stores and long loads pass each other in the same few slots, and all end."""
    old, new = prompt(LONG), [prompt(LONG, seed=seed) for seed in (1, 2, 3)]
    await fill(tmp_path, old)
    engine = AnyEngine(num_blocks=4 * LONG)
    async with open_any(engine, nvme(tmp_path, "16MiB"), limits=SMALL) as kv:
        async with anyio.create_task_group() as tasks:

            async def store(keys: BlockKeys, number: int) -> None:
                at = range(number * LONG, (number + 1) * LONG)
                result = await kv.store(keys, engine.fill(keys, at))
                assert result.num_stored == LONG
                (settled,) = await result.settled()
                assert (settled.tier, settled.written) == ("nvme", LONG)

            for number, keys in enumerate(new, start=1):
                tasks.start_soon(store, keys, number)
            for _ in range(4):
                assert (await kv.load(old, engine.spec(range(LONG)))).num_blocks == LONG
                assert engine.count_right(old, range(LONG)) == LONG
        for keys in new:
            await check_loads(kv, engine, keys, 1)
        await until_idle(kv)
