"""A cache that is told to end takes no more stores, writes what it has, and serves until it is closed."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from anyio.lowlevel import checkpoint

from tests.support import virtual
from tests.support.any_layout import AnyEngine, cpu, nvme, open_any, prompt
from tests.support.backends import ScriptedBackend, ScriptedSlotBackend
from tests.support.caches import keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, SMALL_LIMITS, Engine
from tests.support.engine import prompt as small_prompt
from tests.support.planned import WAIT_S
from tests.support.programs import Program, started
from tests.support.virtual import CountingDevice, advance, pools_of, run, watch
from tiered_kv import (
    BackendUnavailableError,
    ClosedError,
    ConfigurationError,
    GPULoadStoreSpec,
    Outcome,
    Outcomes,
    TieredKV,
)
from tiered_kv.media.backend import Block
from tiered_kv_backends.nvme.slab import Moved, Slab

KEYS = small_prompt(4)
INTO = GPULoadStoreSpec(range(4))
CPU = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}
REPOSITORY = Path(__file__).parents[2]


async def test_what_is_queued_is_written_and_nothing_new_is_taken() -> None:
    """Loads and lookups go on meanwhile and afterwards; stores say why they drop."""
    engine, disk = Engine(), ScriptedSlotBackend(name="disk")
    async with open_cache(CPU, disk, engine=engine) as kv:
        disk.on_write.hold()
        stored = await kv.store(KEYS, engine.compute(KEYS))
        draining = asyncio.create_task(kv.drain())
        await asyncio.sleep(0)
        other = small_prompt(4, seed=1)
        refused = await kv.store(other, engine.compute(other))
        assert (refused.num_dropped, refused.drop_reasons) == (4, {"draining": 4})
        assert (await kv.load(KEYS, INTO)).num_blocks == 4
        assert not draining.done()
        disk.on_write.release()
        assert await draining
        assert [(each.tier, each.written) for each in await stored.settled()] == [("cpu", 4), ("disk", 4)]
        assert disk.on_checkpoint.num_calls == 1
        assert (await kv.load(KEYS, INTO)).num_blocks == 4
        assert [str(each) for each in await kv.explain(other)] == ["dropped (draining)"] * 4
        await until_idle(kv)


async def test_layer_wise_stores_and_plans_are_refused_too() -> None:
    """Whatever the engine's shape."""
    engine = Engine()
    async with open_cache(CPU, engine=engine) as kv:
        planner = kv.planner()
        planner.register_worker()
        assert await kv.drain()
        handle = kv.start_store(KEYS, engine.compute(KEYS), layerwise=True)
        for layer in range(2):
            handle.store_layer(layer)
        assert (await handle).drop_reasons == {"draining": 4}
        assert len((await planner.plan_store(KEYS, INTO).planned()).moves[0].host.ids) == 0


def test_a_drain_is_bounded() -> None:
    """By its own time, or the time that closing may take; the cache is not closed by it."""

    async def program() -> None:
        engine, disk = Engine(), ScriptedSlotBackend(name="disk", timeout_s=100)
        async with open_cache(CPU, disk, engine=engine) as kv:
            disk.on_write.hold()
            await kv.store(KEYS, engine.compute(KEYS))
            for timeout_s, limit_s in ((3.0, 3.0), (None, 10.0)):
                draining = asyncio.create_task(kv.drain(timeout_s=timeout_s))
                await advance(0)
                await advance(limit_s - 0.1)
                assert not draining.done()
                await advance(0.2)
                assert not await draining
            disk.on_write.release()
            await until_idle(kv)

    virtual.run(program)


async def test_flush_and_drain_wait_for_what_workers_copy_out() -> None:
    """A planned store that somebody was handed is a store: it ends by its answer, or by the end of its worker."""
    engine, below = AnyEngine(), ScriptedBackend()
    async with open_any(engine, cpu(32), below) as kv:
        planner, spec = kv.planner(), engine.spec(range(8))
        with idle_process() as process:
            planner.register_worker(pid=process.pid)
            unseen, unbound = planner.plan_store(prompt(8, 1), spec), planner.plan_store(prompt(8, 2))
            await unbound.planned()
            await kv.flush()  # nobody copies these
            with_worker = [planner.plan_store(prompt(4, seed), spec[:4]) for seed in (3, 4)]
            for job in with_worker:
                await job.planned()
            waiting = [asyncio.create_task(kv.flush()), asyncio.create_task(kv.drain(timeout_s=WAIT_S))]
            await until_quiet()
            assert not any(each.done() for each in waiting)
            planner.complete(Outcomes(with_worker[0].number, 0, 4))
            await with_worker[0].ended()
            await until_quiet()
            assert not any(each.done() for each in waiting)
            process.kill()
            assert await asyncio.gather(*waiting) == [True, True]
        assert below.num_records == 4
        unseen.cancel(undelivered=True)
        await unseen.ended()
        await until_idle(kv)


@contextmanager
def idle_process() -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process that does nothing until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with process:
        try:
            yield process
        finally:
            process.kill()


async def until_quiet() -> None:
    """Let everything go on that does not wait for anything else."""
    for _ in range(50):
        await checkpoint()


def test_a_drain_does_not_wait_for_ever_for_a_worker() -> None:
    """Its time is its own: what a worker may be writing to goes on, and the answer is that not all is written."""

    async def program() -> None:
        engine = Engine()
        async with open_cache(CPU, engine=engine) as kv:
            planner = kv.planner()
            planner.register_worker()
            job = planner.plan_store(KEYS, engine.compute(KEYS))
            await job.planned()
            draining = asyncio.create_task(kv.drain(timeout_s=3.0))
            await advance(0)
            await advance(2.9)
            assert not draining.done()
            await advance(0.2)
            assert not await draining
            planner.complete(Outcomes(job.number, 0, 4))
            assert (await job.ended()).num_blocks == 4
            await until_idle(kv)

    virtual.run(program)


async def test_a_worker_that_does_not_answer_keeps_nothing_else_from_the_disk() -> None:
    """What is in memory is written while its answer is waited for, and what it has copied out after that."""
    engine, disk = Engine(), ScriptedSlotBackend(name="disk")
    disk.settings = disk.settings.model_copy(update={"write": "back"})
    async with open_cache(CPU, disk, engine=engine) as kv:
        planner, other = kv.planner(), small_prompt(4, seed=1)
        planner.register_worker()
        job = planner.plan_store(other, engine.compute(other))
        await job.planned()
        await kv.store(KEYS, engine.compute(KEYS))
        draining = asyncio.create_task(kv.drain(timeout_s=WAIT_S))
        await until(lambda: disk.num_records == 4)
        assert not draining.done()
        planner.complete(Outcomes(job.number, 0, 4))
        assert await draining
        assert disk.num_records == 8
        await until_idle(kv)


async def test_nobody_waits_for_the_workers_of_a_planner_that_was_closed() -> None:
    """Their answers come no more; jobs of which they were told nothing end, and what is in memory is written."""
    engine, disk = Engine(), ScriptedSlotBackend(name="disk")
    disk.settings = disk.settings.model_copy(update={"write": "back"})
    async with open_cache(CPU, disk, engine=engine) as kv:
        planner, other = kv.planner(), small_prompt(4, seed=1)
        planner.register_worker()
        job, unseen = planner.plan_store(other, engine.compute(other)), planner.plan_store(small_prompt(4, seed=2))
        await job.planned()
        await kv.store(KEYS, engine.compute(KEYS))
        flushing = asyncio.create_task(kv.flush())
        await until_quiet()
        assert not flushing.done()
        planner.close()
        with pytest.raises(ClosedError, match="planner"):
            planner.plan_store(other)
        assert await flushing
        assert await kv.drain()
        assert (await unseen.ended()).errors == ("the planner has ended",)
        planner.complete(Outcomes(job.number, 0, 4))
        await until_quiet()
        assert kv.lookup_nowait(other).num_blocks == 0
        assert disk.num_records == 4


@pytest.mark.parametrize("says", ["flush", "drain"])
@pytest.mark.parametrize("removes", ["evict", "clear"])
async def test_it_says_that_a_write_that_hangs_may_bring_back_what_was_removed(removes: str, says: str) -> None:
    """Until it has ended, and what it brought was forgotten; and the removal itself names the tier."""
    hung, well = ScriptedSlotBackend(name="hung", timeout_s=0.3), ScriptedSlotBackend(name="well", timeout_s=3.0)
    engine = Engine()
    async with open_cache(CPU, hung, well, engine=engine) as kv:
        hung.on_write.hold()
        await kv.store(KEYS, engine.compute(KEYS))
        await until(lambda: hung.on_write.num_held > 0 and well.num_records == 4)
        removed = await (kv.evict(KEYS) if removes == "evict" else kv.clear())
        assert removed.kept_by == ("hung",)
        assert not await (kv.flush(sync=True) if says == "flush" else kv.drain(timeout_s=1.0))
        hung.on_write.release()
        await until_idle(kv)
        assert hung.num_records == 0
        assert await kv.flush(sync=True)


def test_a_write_that_ends_after_the_close_is_not_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could have it forgotten any more: it may have been evicted."""
    goes_on, has_begun, has_ended = threading.Event(), threading.Event(), threading.Event()
    write, close = Slab.write, Slab.close

    def hung(self: Slab, slots: list[int], blocks: Sequence[Block]) -> Moved:
        has_begun.set()
        goes_on.wait(WAIT_S)
        return write(self, slots, blocks)

    def closed(self: Slab) -> None:
        close(self)
        has_ended.set()

    monkeypatch.setattr(Slab, "close", closed)
    disk = {"medium": "nvme", "path": tmp_path / "kv", "capacity": "4MiB", "timeout_s": 0.3}
    limits = SMALL_LIMITS.model_copy(update={"close_timeout_s": 0.5})

    async def stores() -> None:
        async with open_cache(CPU, disk, engine=(engine := Engine()), limits=limits) as kv:
            await keep(kv, engine, small_prompt(4, seed=1))
            monkeypatch.setattr(Slab, "write", hung)
            await kv.store(KEYS, engine.compute(KEYS))
            await until(has_begun.is_set)
            assert (await kv.evict(KEYS)).kept_by == ("nvme",)
            assert not await kv.flush(sync=True)
            assert not await kv.drain()

    async def finds() -> int:
        async with open_cache(CPU, disk, engine=Engine()) as kv:
            return (await kv.lookup(KEYS)).num_blocks

    asyncio.run(stores())
    goes_on.set()
    assert has_ended.wait(WAIT_S)
    monkeypatch.setattr(Slab, "write", write)
    assert asyncio.run(finds()) == 0


async def test_closing_ends_the_wait_for_a_worker() -> None:
    """At once, and nobody is told that what the worker was copying is written."""
    async with open_any(AnyEngine(), cpu(32)) as kv:
        planner = kv.planner()
        planner.register_worker()
        await planner.plan_store(prompt(8), AnyEngine().spec(range(8))).planned()
        flushing, draining = asyncio.create_task(kv.flush()), asyncio.create_task(kv.drain(timeout_s=WAIT_S))
        await until_quiet()
        closing = asyncio.create_task(kv.aclose())
        with pytest.raises(ClosedError):
            await flushing
        assert not await draining
        await closing


@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_a_drain_whose_checkpoint_does_not_go_well_says_so(how: str) -> None:
    """What was stored may not survive a loss of power."""
    engine, disk = Engine(), ScriptedSlotBackend(name="disk", timeout_s=0.05)
    async with open_cache(CPU, disk, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        if how == "fails":
            disk.on_checkpoint.fail_next(BackendUnavailableError("full"))
        else:
            disk.on_checkpoint.hold()
        assert not await kv.drain()
        disk.on_checkpoint.release()
        await until_idle(kv)
        assert await kv.drain()


async def test_a_drain_past_a_tier_that_is_bypassed_says_so() -> None:
    """It has noted nothing."""
    engine, disk = Engine(), ScriptedSlotBackend(name="disk", timeout_s=0.05)
    async with open_cache(CPU, disk, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        await kv.evict(KEYS, tier="cpu")
        disk.on_read.hold()
        await kv.load(KEYS, INTO)
        assert kv.stats()["disk"].is_bypassed
        assert not await kv.drain()
        disk.on_read.release()
        await until_idle(kv)


@pytest.mark.both_loops
async def test_a_signal_begins_it_and_handlers_are_put_back() -> None:
    """The first signal drains; leaving the block leaves nothing of it behind."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        async with open_cache(CPU, engine=Engine()) as kv:
            with kv.drain_on(signal.SIGTERM) as draining:
                waiting = asyncio.create_task(draining.wait())
                await asyncio.sleep(0)
                assert not draining.begun.is_set()
                os.kill(os.getpid(), signal.SIGTERM)
                assert await waiting
                assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: seen == [signal.SIGTERM])
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("first_to_end", [0, 1])
async def test_a_signal_begins_it_for_every_cache_of_the_program(first_to_end: int) -> None:
    """In whichever order they end; in the end who had the signal before has it again."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        async with open_cache(CPU, engine=Engine()) as one, open_cache(CPU, engine=Engine()) as two:
            blocks = [one.drain_on(signal.SIGTERM), two.drain_on(signal.SIGTERM)]
            both = [block.__enter__() for block in blocks]
            os.kill(os.getpid(), signal.SIGTERM)
            assert [await draining.wait() for draining in both] == [True, True]
            for block in reversed(blocks) if first_to_end else blocks:
                assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "a second signal ends the process"
                block.__exit__(None, None, None)
            assert signal.getsignal(signal.SIGTERM) not in {signal.SIG_DFL, before}
            blocks = [one.drain_on(signal.SIGTERM), two.drain_on(signal.SIGTERM)]
            both = [block.__enter__() for block in blocks]
            blocks.pop(first_to_end).__exit__(None, None, None)
            os.kill(os.getpid(), signal.SIGTERM)
            await both[1 - first_to_end].wait()
            assert not both[first_to_end].begun.is_set()
            blocks.pop().__exit__(None, None, None)
        assert not seen
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: seen == [signal.SIGTERM])
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_who_comes_as_another_drains_gives_the_signal_back_to_whom_that_had_it_from() -> None:
    """And a signal that is named twice is one."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    users = signal.getsignal(signal.SIGTERM)
    try:
        async with open_cache(CPU, engine=Engine()) as one, open_cache(CPU, engine=Engine()) as two:
            first, second = one.drain_on(signal.SIGTERM, signal.SIGTERM), two.drain_on(signal.SIGTERM)
            draining = first.__enter__()
            os.kill(os.getpid(), signal.SIGTERM)
            assert await draining.wait()
            second.__enter__()
            first.__exit__(None, None, None)
            assert signal.getsignal(signal.SIGTERM) is not users
            second.__exit__(None, None, None)
            assert signal.getsignal(signal.SIGTERM) is users
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_a_drain_that_is_closed_over_does_not_claim_to_be_done() -> None:
    """Who closes the cache meanwhile ends it; the transfers end as closing ends them."""
    engine, disk = Engine(), ScriptedSlotBackend(name="disk")
    limits = SMALL_LIMITS.model_copy(update={"close_timeout_s": 0.05})
    async with open_cache(CPU, disk, engine=engine, limits=limits) as kv:
        disk.on_write.hold()
        await kv.store(KEYS, engine.compute(KEYS))
        draining = asyncio.create_task(kv.drain(timeout_s=60))
        await asyncio.sleep(0)
        await kv.aclose()
        assert not await draining


async def test_signals_are_for_the_main_thread() -> None:
    """Elsewhere Python would refuse them, and without one there is nothing to wait for."""
    async with open_cache(CPU) as kv:
        for wrong in ([], ["SIGTERM"], [9], [signal.SIGTERM, 15], [signal.SIGKILL]):
            with pytest.raises(ConfigurationError, match=r"write drain_on\(signal.SIGTERM\)"), kv.drain_on(*wrong):
                pass

    errors: list[Exception] = []

    async def drain_on_a_signal() -> None:
        async with open_cache(CPU) as kv:
            with kv.drain_on(signal.SIGTERM):
                pass

    def enter() -> None:
        try:
            asyncio.run(drain_on_a_signal())
        except ConfigurationError as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert len(errors) == 1


@contextmanager
def serving(argument: Path | str) -> Iterator[Program]:
    """Start the server, and wait until it serves."""
    with started("-m", "tests.cache.drain_process", argument, folder=REPOSITORY) as server:
        assert line_of(server) == "ready"
        yield server


def line_of(server: Program) -> str:
    """Return the next line that it prints."""
    return server.stdout.readline().strip()


@pytest.mark.slow
async def test_after_sigterm_under_load_a_restart_finds_what_was_reported_written(tmp_path: Path) -> None:
    """The process ends by itself, having written what it had; the next one starts warm, every byte right."""
    with serving(tmp_path) as server:
        lines = [line_of(server) for _ in range(20)]
        server.send_signal(signal.SIGTERM)
        lines += server.stdout.read().split("\n")
        assert server.wait() == 0
    assert "drained True" in lines
    assert "loaded 8" in lines
    seeds = [int(line.split()[1]) for line in lines if line.startswith("written")][-50:]
    assert len(seeds) >= 20
    engine = AnyEngine(num_blocks=8)
    async with open_any(engine, cpu(32), nvme(tmp_path)) as kv:
        for seed in seeds:
            await assert_right(kv, engine, seed)


async def assert_right(kv: TieredKV, engine: AnyEngine, seed: int) -> None:
    """Assert that a prompt is there, and what it should be."""
    loaded = await kv.load(prompt(8, seed), engine.spec(range(8)))
    assert loaded.num_blocks == engine.count_right(prompt(8, seed), range(8)) == 8


@pytest.mark.slow
def test_a_second_signal_ends_the_process() -> None:
    """Whatever the drain waits for."""
    with serving("stuck") as server:
        server.send_signal(signal.SIGTERM)
        assert line_of(server) == "begun"
        server.send_signal(signal.SIGTERM)
        assert server.wait() == -signal.SIGTERM


async def test_a_flush_that_survives_power_loss_syncs_the_slab_before_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a ledger could promise, after a loss of power, what never reached the disk."""
    synced: list[str] = []

    def fsync(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink().name)

    engine = AnyEngine(num_blocks=8)
    async with open_any(engine, cpu(32), nvme(tmp_path)) as kv:
        await (await kv.store(prompt(8), engine.fill(prompt(8), range(8)))).settled()
        monkeypatch.setattr(os, "fsync", fsync)
        await kv.flush()
        assert synced == []
        await kv.flush(sync=True)
    kinds = [name if name in {"slab", "ledger"} else "folder" for name in synced]
    assert kinds == ["slab", "ledger", "folder", "folder"], synced


async def test_a_flush_is_bounded_though_a_checkpoint_hangs() -> None:
    """By the tier's time limit, and the other tiers are flushed all the same."""
    engine = Engine()
    first, second = ScriptedSlotBackend(name="first", timeout_s=0.05), ScriptedSlotBackend(name="second")
    async with open_cache(CPU, first, second, engine=engine) as kv:
        await keep(kv, engine, KEYS)
        first.on_checkpoint.hold()
        await asyncio.wait_for(kv.flush(sync=True), 60)
        assert (first.on_checkpoint.num_held, second.on_checkpoint.num_calls) == (1, 1)
        first.on_checkpoint.release()
        await until_idle(kv)


async def test_what_waits_for_a_slower_tier_is_written_too() -> None:
    """A drain cleans all of it, whatever the cleaner would have waited for."""
    engine, disk = Engine(), ScriptedSlotBackend(name="disk")
    disk.settings = disk.settings.model_copy(update={"write": "back"})
    async with open_cache(CPU, disk, engine=engine) as kv:
        await kv.store(KEYS, engine.compute(KEYS))
        assert disk.num_records == 0
        assert await kv.drain()
        assert disk.num_records == 4
        await until_idle(kv)


@pytest.mark.parametrize("write", ["through", "back"])
async def test_it_says_that_a_block_is_in_no_tier_that_wants_it(write: str) -> None:
    """Also after the write was given up, and again when it is asked again."""
    engine, keyed = Engine(), ScriptedBackend(write=write)
    async with open_cache(CPU, keyed, engine=engine) as kv:
        for _ in range(3):  # then a block that waits has failed for good
            keyed.on_write.fail_next(BackendUnavailableError("not now"))
        stored = await kv.store(KEYS, engine.compute(KEYS))
        assert stored.num_stored == 4
        if write == "through":
            assert (await stored.settled())[-1].failed == 4
        for _ in range(4):
            assert not await kv.drain()
        assert (kv.stats()["cpu"].dirty, keyed.num_records) == (0, 0)
        await until_idle(kv)


async def test_it_says_that_blocks_wait_and_once_they_do_not() -> None:
    """A tier that does not take them now may take them when the drain is tried again."""
    engine, keyed = Engine(), ScriptedBackend(write="back")
    async with open_cache(CPU, keyed, engine=engine) as kv:
        keyed.on_write.fail_next(BackendUnavailableError("not now"))
        await kv.store(KEYS, engine.compute(KEYS))
        assert not await kv.drain()
        assert kv.stats()["cpu"].dirty == 4
        assert await kv.drain()
        assert keyed.num_records == 4
        await until_idle(kv)


async def test_it_says_that_a_store_was_dropped_on_its_way_down() -> None:
    """Here as the queue is full; the block is in memory, where a restart does not find it."""
    engine, keyed = Engine(), ScriptedBackend()
    limits = SMALL_LIMITS.model_copy(update={"store_queue": 4 * PAYLOAD_BYTES})
    async with open_cache(CPU, keyed, engine=engine, limits=limits) as kv:
        keyed.on_write.hold()
        other = small_prompt(4, seed=1)
        await kv.store(KEYS, engine.compute(KEYS))
        dropped = await kv.store(other, engine.compute(other))
        assert [each.dropped for each in await dropped.settled()] == [0, 4]
        keyed.on_write.release()
        assert not await kv.drain()
        await until_idle(kv)


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.FAILED])
def test_what_nobody_wants_below_any_more_is_not_missed(outcome: Outcome) -> None:
    """Evicted by name while it was written or waited; or never wanted, as by a tier that wants blocks used twice."""

    async def main() -> None:
        engine, keyed, device = Engine(), ScriptedBackend(), CountingDevice()
        rare, late = ScriptedBackend(name="rare", admit_after=2), ScriptedBackend(name="late", write="back")
        async with open_cache(CPU, keyed, rare, late, engine=engine, device=device) as kv:
            watch(device, pools_of(kv))
            keyed.on_write.hold()
            keyed.on_write.change_next(lambda outcomes: [outcome] * len(outcomes))
            await kv.store(KEYS, engine.compute(KEYS))
            await until(lambda: keyed.on_write.num_held == 1)
            evicting = asyncio.create_task(kv.evict(KEYS))
            await until(lambda: kv.lookup_nowait(KEYS).num_blocks == 0)
            keyed.on_write.release()
            await evicting
            if outcome is Outcome.FAILED:
                assert not await kv.drain()
                await asyncio.sleep(120.0)  # nothing that was sent of it comes any more
            assert await kv.drain()
            assert (keyed.num_records, rare.num_records, late.num_records) == (0, 0, 0)
            await until_idle(kv)

    run(main)


@pytest.mark.parametrize("num_blocks", [1, 4])
@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.parametrize("how", ["goes well", "fails", "hangs"])
def test_what_is_stored_again_while_it_is_written_is_not_taken_for_written(
    how: str, write: str, num_blocks: int
) -> None:
    """Though it was evicted from memory meanwhile: when its turn comes, beside that write or just behind it."""
    keys, is_lost = KEYS[:num_blocks], how != "goes well" and write == "through"

    async def main() -> None:
        engine, disk, device = Engine(), ScriptedSlotBackend(name="disk", write=write, timeout_s=1.0), CountingDevice()
        at_once = SMALL_LIMITS.model_copy(update={"low_water": 0.0, "clean_after_s": 0.001})
        async with open_cache(CPU, disk, engine=engine, device=device, limits=at_once) as kv:
            watch(device, pools_of(kv))
            disk.on_write.hold()
            if how == "fails":
                disk.on_write.fail_next(BackendUnavailableError("not now"))
            await kv.store(keys, engine.compute(keys))
            await asyncio.sleep(0.1)
            await kv.evict(keys, tier="cpu")
            again = await kv.store(keys, engine.compute(keys))
            await asyncio.sleep(0.1)
            assert (disk.on_write.num_calls, disk.on_write.num_held) == (1, 1)
            if how == "hangs":
                await asyncio.sleep(2.0)
                await again.settled()
            disk.on_write.release()
            await asyncio.sleep(60.0)  # by then the disk is used again
            below = (await again.settled())[-1]
            assert (below.present, below.deferred) == (0 if is_lost else num_blocks, 0)[:: -1 if write == "back" else 1]
            assert await kv.drain() == (not is_lost)
            assert disk.num_records == (0 if is_lost and how == "fails" else num_blocks)
            await until_idle(kv)

    run(main)


async def test_it_says_that_another_capacity_has_lost_what_waited() -> None:
    """A tier that took nothing while memory was given up has less than what was stored."""
    engine, keyed = Engine(), ScriptedBackend(write="back")
    async with open_cache(CPU, keyed, engine=engine) as kv:
        keyed.on_write.fail_next(BackendUnavailableError("not now"))
        await kv.store(KEYS, engine.compute(KEYS))
        assert await kv.resize("cpu", 2 * PAYLOAD_BYTES) == 2
        assert not await kv.drain()
        assert (kv.stats()["cpu"].dirty, keyed.num_records) == (0, 2)
        await until_idle(kv)


@pytest.mark.parametrize("how", ["moved", "not moved", "evicted", "cancelled"])
async def test_another_capacity_loses_what_a_worker_copies_to_its_slots(how: str) -> None:
    """Nothing of a worker that has copied nothing, of a plan that is cancelled, or of what nobody wants any more."""
    engine, disk = Engine(), ScriptedSlotBackend(name="disk")
    async with open_cache(CPU, disk, engine=engine) as kv:
        planner = kv.planner()
        planner.register_worker()
        await keep(kv, engine, KEYS)
        other = small_prompt(4, seed=1)
        job = planner.plan_store(other, None if how == "cancelled" else engine.compute(other))
        plan = await job.planned()
        if how == "evicted":
            await kv.evict(other)
        resizing = asyncio.create_task(kv.resize("cpu", 2 * PAYLOAD_BYTES))
        await until(lambda: kv.stats()["cpu"].num_slots == 2 and not kv.membership(other, tier="cpu").any())
        if how == "cancelled":
            job.cancel()
        else:
            planner.complete(Outcomes(plan.job, 0, 0 if how == "not moved" else 4))
        assert not (await job.ended()).mask.any()
        await resizing
        assert await kv.drain() == (how != "moved")
        await until_idle(kv)


def test_it_says_that_a_tier_has_not_noted_what_it_holds() -> None:
    """One that is bypassed is not told to: a restart may not find there what it had."""

    async def program() -> None:
        engine, disk, device = Engine(), ScriptedSlotBackend(name="disk", timeout_s=1.0), virtual.CountingDevice()
        async with open_cache(CPU, disk, engine=engine, device=device) as kv:
            virtual.watch(device, virtual.pools_of(kv))
            await keep(kv, engine, KEYS)
            assert await kv.drain()
            await kv.evict(KEYS, tier="cpu")
            disk.on_read.hold()
            await kv.load(KEYS, INTO)
            assert kv.stats()["disk"].is_bypassed
            assert not await kv.drain()
            disk.on_read.release()
            await asyncio.sleep(60.0)
            assert await kv.drain()
            await until_idle(kv)

    virtual.run(program)
