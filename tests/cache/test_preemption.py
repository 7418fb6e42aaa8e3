"""Preempted sequences: swapped out whole, partial block and all, and back; and an engine's own swaps by number."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from tests.support.caches import AnyTier, Recorder, inside, open_cache, until, until_idle
from tests.support.engine import BLOCK_SIZE, MODEL, PAYLOAD_BYTES, Engine, contents, prompt
from tests.support.watching import pages
from tiered_kv import CacheLimits, ConfigurationError, GPULoadStoreSpec, KVLayout, TieredKV, hash_blocks, hash_tail
from tiered_kv.memory.copies import gather_blocks, scatter_blocks
from tiered_kv.memory.cpu import CPUDevice
from tiered_kv.system import Files, System, running_in
from tiered_kv.testing import ScriptedDevice, ScriptedEvent
from tiered_kv.transfers import swap
from tiered_kv.values.events import SequencePreempted

TOKENS = list(range(5 * BLOCK_SIZE + 3))
FULL = hash_blocks(TOKENS, block_size=BLOCK_SIZE)
KEYS = FULL + hash_tail(TOKENS[5 * BLOCK_SIZE :], parent=FULL)
INTO = GPULoadStoreSpec(range(20, 26))
CPU: AnyTier = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}
LIMITS = CacheLimits(window=4 * PAYLOAD_BYTES, bounce=16 * PAYLOAD_BYTES, swap_space=8 * PAYLOAD_BYTES)

# By name.


async def test_a_sequence_comes_back_whole() -> None:
    """Its partial block too, though others have filled the tier meanwhile; it counts as one preemption."""
    engine, emit = Engine(), Recorder()
    async with open_cache(CPU, engine=engine, emit=emit) as kv:
        stored = await kv.swap_out(KEYS, engine.compute(KEYS))
        assert stored.num_stored == len(KEYS) == 6
        assert stored.num_pinned == 6
        assert len(await stored.settled()) == 1
        for seed in range(1, 4):
            others = prompt(8, seed=seed)
            await kv.store(others, engine.compute(others))
        loaded = await kv.swap_in(KEYS, INTO)
        assert loaded.num_blocks == 6
        assert engine.read(INTO) == contents(KEYS)
        assert kv.stats().num_preemptions == 1
        assert emit.of(SequencePreempted) == [SequencePreempted(6, 0, 6)]
        for seed in range(4, 7):  # back, it may be evicted like everything else
            others = prompt(16, seed=seed)
            await kv.store(others, engine.compute(others))
        assert (await kv.lookup(KEYS)).num_blocks == 0
        await until_idle(kv)


async def test_a_sequence_that_is_not_pinned_whole_says_so() -> None:
    """Pins hold half of a tier at most; what is behind them is there until others need the room."""
    engine = Engine()
    async with open_cache({"medium": "cpu", "capacity": 8 * PAYLOAD_BYTES}, engine=engine) as kv:
        swapped = await kv.swap_out(KEYS, engine.compute(KEYS))
        assert (swapped.num_stored, swapped.num_pinned) == (6, 4)
        assert (await kv.swap_in(KEYS, INTO)).num_blocks == 6
        assert engine.read(INTO) == contents(KEYS)


async def test_what_did_not_come_back_stays_pinned() -> None:
    """A load that is short, here because the engine's time is up, can be tried again."""
    engine, device, never = Engine(), ScriptedDevice(), ScriptedEvent()
    async with open_cache(CPU, engine=engine, device=device) as kv:
        out = asyncio.create_task(kv.swap_out(KEYS, engine.compute(KEYS)))
        await until(out.done, on_wait=device.run_all)
        assert (await kv.swap_in(KEYS, INTO, after=never, deadline_s=0.02)).num_blocks == 0
        others = prompt(16, seed=1)
        storing = asyncio.create_task(kv.store(others, engine.compute(others)))
        await until(storing.done, on_wait=device.run_all)
        back = asyncio.create_task(kv.swap_in(KEYS, INTO))
        await until(back.done, on_wait=device.run_all)
        assert back.result().num_blocks == 6
        await until_idle(kv)


# By number.


async def test_pages_go_out_and_come_back_where_the_engine_says() -> None:
    """To its own slots, and from there to whichever pages."""
    engine = Engine()
    async with open_cache(CPU, engine=engine, limits=LIMITS) as kv:
        engine.compute(KEYS)
        moved = await kv.swap(blocks_to_swap_out={page: 7 - page for page in range(6)})
        assert (moved.num_out, moved.num_in, moved.num_copied, moved.fault) == (6, 0, 0, None)
        engine.poison()
        moved = await kv.swap({7 - page: 20 + page for page in range(6)})
        assert moved.num_in == 6
        assert engine.read(INTO) == contents(KEYS)
        await until_idle(kv)


async def test_tensors_that_are_let_go_of_are_nobodys_after_a_swap_either() -> None:
    """An engine that sleeps, or unmaps them, has their memory back; those that come next have the same slots."""
    engine = Engine()
    async with open_cache(CPU, engine=engine, limits=LIMITS) as kv:
        engine.compute(KEYS)
        assert (await kv.swap(blocks_to_swap_out={0: 3})).num_out == 1
        space = weakref.ref(inside(kv).swaps._spaces[0])  # noqa: SLF001 - no public call tells of it
        kv.unregister_kv_caches()
        gc.collect()
        assert space() is None
        engine.poison()
        kv.register_kv_caches(engine.caches)
        assert (await kv.swap({3: 20})).num_in == 1
        assert engine.read(INTO[:1]) == contents(KEYS)[:1]
        await until_idle(kv)


async def test_a_swap_that_gets_no_thread_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is tried; once there is one it works."""
    engine = Engine()

    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    def num_mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:tiered_kv-swap0")

    async with open_cache(CPU, engine=engine, limits=LIMITS) as kv:
        engine.compute(KEYS)
        with monkeypatch.context() as patch:
            patch.setattr(CPUDevice, "page_lock", refused)
            for _ in range(3):
                with pytest.raises(RuntimeError, match="new thread"):
                    await kv.swap(blocks_to_swap_out={0: 0})
        gc.collect()
        assert num_mapped() == 0
        assert (await kv.swap(blocks_to_swap_out={0: 0})).num_out == 1
        assert num_mapped() == 1
        await until_idle(kv)


async def test_the_maps_of_one_step_are_done_out_in_copy() -> None:
    """A page that leaves takes another at once, and one that comes is forked in the same step."""
    engine = Engine()
    a, b = prompt(1, seed=1), prompt(1, seed=2)
    async with open_cache(CPU, engine=engine, limits=LIMITS) as kv:
        engine.compute(a, [0])
        await kv.swap(blocks_to_swap_out={0: 3})
        engine.compute(b, [0])
        moved = await kv.swap({3: 0}, {0: 4}, {0: [1, 2]})
        assert (moved.num_out, moved.num_in, moved.num_copied) == (1, 1, 2)
        assert engine.read([0, 1, 2]) == contents(a) * 3
        await kv.swap([(4, 9)])
        assert engine.read([9]) == contents(b)


async def test_copies_read_before_any_writes() -> None:
    """Two pages change places."""
    engine = Engine()
    async with open_cache(CPU, engine=engine, limits=LIMITS) as kv:
        engine.compute(KEYS[:2])
        await kv.swap(blocks_to_copy={0: 1, 1: 0})
        assert engine.read([1, 0]) == contents(KEYS[:2])


async def test_a_permutation_longer_than_a_window_is_one() -> None:
    """No piece of it writes a page that another has yet to read."""
    engine, keys = Engine(), prompt(12)
    async with open_cache(CPU, engine=engine, limits=LIMITS) as kv:
        engine.compute(keys)
        moved = await kv.swap(blocks_to_copy={page: (page + 5) % 12 for page in range(12)})
        assert moved.num_copied == 12
        assert engine.read([(page + 5) % 12 for page in range(12)]) == contents(keys)


@pytest.mark.parametrize("as_given", [list, torch.tensor, dict])
async def test_maps_come_as_schedulers_have_them(as_given: type) -> None:
    """As a dict, as pairs, as a tensor of pairs."""
    engine = Engine()
    async with open_cache(CPU, engine=engine, limits=LIMITS) as kv:
        engine.compute(KEYS[:2])
        await kv.swap(as_given([]), as_given([(0, 5), (1, 6)]), as_given([]))
        await kv.swap(as_given([(5, 11), (6, 10)]))
        assert engine.read([11, 10]) == contents(KEYS[:2])


async def test_slots_are_as_large_as_the_engines_pages() -> None:
    """Also where a block of ours is several pages of the engine's."""
    caches = [torch.randint(0, 100, (12, 2, BLOCK_SIZE, 2, 16), dtype=torch.int8) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    layout = KVLayout.from_tensors(caches, block_size=4 * BLOCK_SIZE, page_size=BLOCK_SIZE)
    async with TieredKV([CPU], model=MODEL, layout=layout, limits=LIMITS, device="cpu") as kv:
        kv.register_kv_caches(caches)
        await kv.swap(blocks_to_swap_out={3: 0, 5: 1})
        for cache in caches:
            cache.zero_()
        await kv.swap({0: 5, 1: 3})
        for cache, old in zip(caches, before, strict=True):
            assert torch.equal(cache[5], old[3])
            assert torch.equal(cache[3], old[5])


async def test_swaps_are_ordered_behind_their_event_and_each_other() -> None:
    """A slot filled by one call is read by the next, and neither touches a page that is still computed."""
    engine, device = Engine(), ScriptedDevice()
    async with open_cache(CPU, engine=engine, limits=LIMITS, device=device) as kv:
        compute = device.stream("compute")
        engine.compute(KEYS)
        out = kv.start_swap(blocks_to_swap_out={0: 0, 1: 1}, after=compute.writes(pages([0, 1])))
        back = kv.start_swap({0: 8, 1: 9}, after=compute.reads(pages([8, 9])))
        await until(lambda: out.done and back.done, on_wait=device.step)
        compute.reads(pages([8, 9]))
        compute.writes(pages([0, 1]))
        device.run_all()
        assert engine.read([8, 9]) == contents(KEYS[:2])


async def test_a_swap_that_fails_says_so() -> None:
    """A copy that fails, and a device that is lost."""
    engine, device = Engine(), ScriptedDevice()
    async with open_cache(CPU, engine=engine, limits=LIMITS, device=device) as kv:
        handle = kv.start_swap(blocks_to_swap_out={0: 0})
        device.fail_next(OSError("lost"))
        await until(lambda: handle.done, on_wait=device.step)
        moved = await handle
        assert moved.fault
        assert (moved.num_out, moved.fault.reason, moved.failed) == (0, "copy failed", "out")
        handle = kv.start_swap(blocks_to_swap_out={0: 0}, after=ScriptedEvent())
        handle.cancel()
        assert (fault := (await handle).fault)
        assert fault.reason == "revoked"
        device.fail(OSError("lost"))
        assert (fault := (await kv.swap(blocks_to_swap_out={0: 0})).fault)
        assert fault.reason == "device unusable"
        await until_idle(kv, on_wait=device.run_all)


async def test_an_event_that_fails_fails_its_own_swap_only() -> None:
    """The next one, with no event of its own, moves its pages."""
    engine, device = Engine(), ScriptedDevice()
    async with open_cache(CPU, engine=engine, limits=LIMITS, device=device) as kv:
        lost = ScriptedEvent()
        first, second = kv.start_swap({}, {0: 0}, after=lost), kv.start_swap({}, {1: 1})
        lost.fail(OSError("lost"))
        await until(lambda: first.done and second.done, on_wait=device.run_all)
        assert ((await first).num_out, (await second).num_out) == (0, 1)


@pytest.mark.parametrize("failing", ["out", "in"])
async def test_nothing_moves_behind_a_page_that_failed(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages come in over those that have left, so they do not if one could not leave; the result says what failed."""
    engine, sevens = Engine(), prompt(6, seed=7)
    move: Callable[..., None] = gather_blocks if failing == "out" else scatter_blocks
    calls = []

    def fail_second(*args: Any) -> None:  # noqa: ANN401 - passed on as they are
        calls.append(args)
        if len(calls) == 2:
            raise OSError("lost")
        move(*args)

    async with open_cache(CPU, engine=engine, limits=LIMITS) as kv:
        engine.compute(KEYS)
        engine.compute(sevens[:2], [10, 11])
        await kv.swap(blocks_to_swap_out={10: 6, 11: 7})
        monkeypatch.setattr(swap, move.__name__, fail_second)
        out = {page: page for page in range(6)}
        if failing == "out":
            moved = await kv.swap({6: 0, 7: 1}, out, {2: 12})
        else:
            moved = await kv.swap({slot: 20 + slot for slot in range(6)}, out, {2: 12})
        assert moved.fault
        assert (moved.failed, moved.num_out) == (failing, 0 if failing == "out" else 6)
        assert (moved.num_in, moved.num_copied) == (0, 0)
        assert moved.fault.detail == "OSError: lost"
        assert moved.fault.num_blocks == (9 if failing == "out" else 7)
        assert engine.read(range(6)) == contents(KEYS)
        assert engine.read([12]) != contents(KEYS[2:3])
        monkeypatch.undo()
        assert (await kv.swap({6: 10, 7: 11})).num_in == 2
        assert engine.read([10, 11]) == contents(sevens[:2])
        await until_idle(kv)


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        (({8: 0}, {}, {}), r"blocks_to_swap_in: sources from 8 to 8 are not all in \[0, 8\)"),
        (({}, {0: 8}, {}), "blocks_to_swap_out: targets from 8"),
        (({}, {64: 0}, {}), "blocks_to_swap_out: sources from 64"),
        (({}, {}, {0: [1, 1]}), "blocks_to_copy: target 1 is there twice"),
        (({0: 3, 1: 3}, {}, {}), "blocks_to_swap_in: target 3 is there twice"),
        (({}, {}, [(0, 1, 2)]), "pairs"),
        (({-1: 0}, {}, {}), "from -1"),
        (([("a", "b")], {}, {}), "ints to ints"),
        (({}, None, {}), "blocks_to_swap_out must map ints to ints"),
        (([0, 1], {}, {}), "blocks_to_swap_in must map ints to ints"),
        (({}, {}, [(0, 1), (2,)]), "blocks_to_copy must map ints to ints"),
    ],
)
async def test_maps_that_cannot_be_are_refused(maps: tuple[Any, Any, Any], message: str) -> None:
    """Before anything moves."""
    engine = Engine()
    async with open_cache(CPU, engine=engine, limits=LIMITS) as kv:
        engine.poison()
        with pytest.raises(ConfigurationError, match=message):
            await kv.swap(*maps)
        assert engine.is_poisoned()


async def test_without_a_space_there_is_no_swap() -> None:
    """It says which limit to set."""
    engine = Engine()
    async with open_cache(CPU, engine=engine) as kv:
        with pytest.raises(ConfigurationError, match="swap_space"):
            await kv.swap({0: 0})
    async with open_cache(CPU, limits=LIMITS) as kv:
        with pytest.raises(ConfigurationError, match="register_kv_caches"):
            await kv.swap({0: 0})


@pytest.mark.parametrize("num_bytes", [1 << 60, 1 << 63])
async def test_a_space_that_the_machine_lacks_the_memory_for_is_refused(num_bytes: int) -> None:
    """When the cache is opened, by what to lower, though it is taken at the first swap."""
    limits = LIMITS.model_copy(update={"swap_space": num_bytes})
    with pytest.raises(ConfigurationError, match=r"host memory are wanted, but .* or limits\.swap_space"):
        async with open_cache(CPU, engine=Engine(), limits=limits):
            pass


class CrowdedFiles(Files):
    """Those of a machine of which others have all memory."""

    @override
    def lines(self, path: Path) -> list[str]:
        return ["MemAvailable:       0 kB"] if path.name == "meminfo" else super().lines(path)


class CrowdedSystem(System):
    """That machine."""

    files = CrowdedFiles()


async def test_a_space_that_others_have_taken_the_memory_for_is_refused() -> None:
    """Before it is taken, each time it is asked for, and by what to lower; once they are gone it is had."""
    engine = Engine()
    async with open_cache(CPU, engine=engine, limits=LIMITS) as kv:
        for _ in range(2):
            refused = pytest.raises(ConfigurationError, match=r"host memory are wanted, but .*lower limits\.swap_space")
            with running_in(CrowdedSystem()), refused:
                kv.start_swap({0: 0})
        assert (await kv.swap({0: 0})).num_in == 1


async def test_a_swap_ends_at_its_deadline() -> None:
    """Where the event before it never fires: nothing moves any more, also when it does."""
    engine, never = Engine(), threading.Event()
    async with open_cache(CPU, engine=engine, limits=LIMITS) as kv:
        engine.compute(KEYS)
        moved = await kv.swap(blocks_to_swap_out={0: 0}, blocks_to_copy={0: 20}, after=never, deadline_s=0.01)
        assert moved.fault
        assert (moved.fault.reason, moved.failed, moved.num_out, moved.num_copied) == ("deadline", "out", 0, 0)
        never.set()
        assert (await kv.swap(blocks_to_swap_out={1: 1})).num_out == 1
        assert engine.read([20]) == [bytes(PAYLOAD_BYTES)]
        with pytest.raises(ConfigurationError, match="deadline_s must be a number of seconds"):
            await kv.swap({0: 0}, deadline_s=-1.0)
