"""What the connector for vLLM stores, and when: imitated, step by step. A real vLLM is in `tests/engines`."""

import asyncio
import itertools
import random
import re
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from typing_extensions import override

from tests.support.caches import inside
from tests.support.late_copies import LateCopies
from tests.support.serving import serving
from tests.support.small_vllm import BLOCK_SIZE, STRIDE, VLLM, Request, SmallVLLM, group, small_vllm
from tiered_kv import BlockKeys, BlockState, ClosedError, ConfigurationError, KVLayout, Outcomes, Worker
from tiered_kv.catalog.copy_budget import CopyBudget
from tiered_kv.replay import BlockCost, TierPlan, replay
from tiered_kv.traces import Request as Asked
from tiered_kv.traces import Trace
from tiered_kv.values.loop_calls import LoopCalls

ROOMY = {"medium": "cpu", "capacity": 1024 * STRIDE}
opened = contextmanager(small_vllm)


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for plans however long they take: here it is no matter of the machine's speed."""
    monkeypatch.setattr(VLLM.loading, "_PATIENCE_S", 60.0)


def stored(engine: SmallVLLM) -> int:
    """Count the blocks that were stored."""
    count: int = engine.scheduling.kv.stats().stored
    return count


def found(engine: SmallVLLM, request: Request) -> int:
    """Count the blocks of a request that the tiers have."""
    keys = BlockKeys.from_hashes(request.block_hashes, block_size=BLOCK_SIZE, salt=request.cache_salt or "")
    return int((engine.scheduling.kv.membership(keys) == BlockState.HIT).sum())


class Turns:
    """Counts the turns of a cache's event loop."""

    def __init__(self, engine: SmallVLLM) -> None:
        self.count = 0
        loop: Any = engine.scheduling.kv.call(asyncio.get_running_loop)
        turn = loop._run_once  # noqa: SLF001 - there is no other way to see one

        def counted() -> None:
            self.count += 1
            turn()

        loop._run_once = counted  # noqa: SLF001 - as above


class Counted:
    """Counts the calls of a method."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, of: type, name: str) -> None:
        self.count = 0
        method = getattr(of, name)

        def counted(*args: object, **options: object) -> object:
            self.count += 1
            return method(*args, **options)

        monkeypatch.setattr(of, name, counted)


def test_stores_of_many_requests_go_together() -> None:
    """However many requests fill blocks, and whoever's they are: what some steps fill is one job, and all goes."""
    with opened(ROOMY) as engine:
        for number in range(12):  # of which three fill a block in each step
            engine.ask(f"r{number}", 1 + number, 64, salt=f"tenant {number % 3}")
        for _ in range(64):
            engine.step()
            engine.settle_copies()
            engine.settle_loop()  # a step takes long enough for that, else too many blocks would be held
        num_blocks = sum((1 + number + 63) // BLOCK_SIZE for number in range(12))
        assert 0 < sum(engine.orders) <= num_blocks // VLLM.storing.MOST_DUE
        engine.settle()
        engine.settle_copies()
        engine.settle_loop()
        engine.step()  # which tells of the last copies
        engine.settle_loop()
        assert stored(engine) == num_blocks


def ask_each_step(engine: SmallVLLM, num_requests: int, num_steps: int = 1) -> None:
    """Have a request of one block come with each so many steps, and end some later; copies and loops take no time."""
    for number in range(num_requests):
        engine.ask(f"r{number}", BLOCK_SIZE, 4)
        step_settled(engine, num_steps)


def test_blocks_of_requests_that_have_ended_wait_while_there_are_others() -> None:
    """A job for each would cost more than what many short requests compute; all are stored, and given back, at last."""
    num_requests = 2 * VLLM.storing.MOST_STEPS
    with opened(ROOMY) as engine:
        num_free = engine.num_free
        ask_each_step(engine, num_requests)
        assert sum(engine.orders) <= 1 + num_requests // VLLM.storing.MOST_STEPS  # and the first, which waits for none
        stored_at_last(engine)
        assert stored(engine) == num_requests
        assert engine.num_free == num_free


@pytest.mark.parametrize(("wanted", "num_steps"), [({"num_blocks": 12}, 1), ({"role": "kv_producer"}, 1), ({}, 2)])
def test_blocks_of_requests_that_have_ended_do_not_wait_else(wanted: dict[str, Any], num_steps: int) -> None:
    """Where vLLM needs them soon, or others wait for what is stored, or it has few requests, and perhaps none soon."""
    with opened(ROOMY, **wanted) as engine:
        ask_each_step(engine, VLLM.storing.MOST_STEPS, num_steps)
        assert sum(engine.orders) >= VLLM.storing.MOST_STEPS // 8
        stored_at_last(engine)
        assert stored(engine) == VLLM.storing.MOST_STEPS


LACKING = {
    "a request that waits": lambda engine: engine.ask("long", (engine.num_free + 1) * BLOCK_SIZE, 1),
    "one that is computed": lambda engine: engine.scheduling.frees_soon(),
    "one that was preempted": lambda engine: engine.preempt("new"),
}


@pytest.mark.parametrize("whom", LACKING)
def test_blocks_of_requests_that_have_ended_do_not_wait_once_vllm_lacks_some(whom: str) -> None:
    """However many others are free."""
    with opened(ROOMY) as engine:
        for number in range(4):
            engine.ask(f"r{number}", 1, 400)
        while not (engine.orders and engine.orders[-1]):
            step_settled(engine, 1)
        engine.ask("ended", BLOCK_SIZE, 1)
        engine.ask("new", 1, 64)
        step_settled(engine, 2)
        assert engine.num_kept == 1
        LACKING[whom](engine)
        for _ in range(3):
            engine.settle_copies()
            step_settled(engine, 1)
        assert engine.num_kept == 0


def test_many_blocks_do_not_wait() -> None:
    """A long prompt is stored by the step after the one that computed it."""
    with opened(ROOMY) as engine:
        engine.ask("first", 3 * BLOCK_SIZE, 64)
        step_settled(engine, 2)
        engine.ask("long", VLLM.storing.MOST_DUE * BLOCK_SIZE, 64)
        engine.step()
        engine.settle_loop()
        engine.step()
        assert engine.orders[-1] == 1


class Copies:
    """Has a worker's copies out of the engine, or into it, end when the test says so."""

    def __init__(self, engine: SmallVLLM, direction: str = "store") -> None:
        self._held: list[tuple[Future[Outcomes], Future[Outcomes]]] = []
        self._is_held = True
        worker = engine.workers[0]
        start = worker._start  # noqa: SLF001 - ours

        def started(plan: Any, after: object, ahead_of: object = None) -> "Future[Outcomes]":  # noqa: ANN401 - likewise
            copying: Future[Outcomes] = start(plan, after, ahead_of)
            if not self._is_held or plan is None or plan.direction != direction:
                return copying
            told: Future[Outcomes] = Future()
            self._held.append((copying, told))
            return told

        worker._start = started  # noqa: SLF001 - likewise

    @property
    def num_held(self) -> int:
        """How many have not ended."""
        return len(self._held)

    def end(self) -> None:
        """Have those that were held end, and all others from now on."""
        self._is_held = False
        for copying, told in self._held:
            told.set_result(copying.result())

    def fail(self) -> None:
        """Have those that were held say that they failed, and no other held from now on."""
        self._is_held = False
        for copying, told in self._held:
            told.set_result(replace(copying.result(), num_moved=0, error="it failed"))


class LateStarts:
    """Has a worker's copies out of the engine begin when the test says so."""

    def __init__(self, engine: SmallVLLM) -> None:
        self._held: list[tuple[Any, object, Future[Outcomes]]] = []
        self._worker = engine.workers[0]
        self._start = self._worker._start  # noqa: SLF001 - ours

        def start_late(plan: Any, after: object, ahead_of: object = None) -> "Future[Outcomes]":  # noqa: ANN401 - of ours
            if plan is None or plan.direction != "store":
                started: Future[Outcomes] = self._start(plan, after, ahead_of)
                return started
            self._held.append((plan, after, Future()))
            return self._held[-1][2]

        self._worker._start = start_late  # noqa: SLF001 - likewise

    @property
    def num_held(self) -> int:
        """How many have not begun."""
        return len(self._held)

    def begin(self) -> None:
        """Have those that were held begin and end, and all others at once from now on."""
        self._worker._start = self._start  # noqa: SLF001 - likewise
        for plan, after, told in self._held:
            told.set_result(self._start(plan, after).result())


def fall_silent(engine: SmallVLLM) -> None:
    """Have the client of a host's server find that it has said nothing for too long."""
    there = engine.scheduling.kv.cache._connection.there  # noqa: SLF001 - nothing else does it in no time

    async def look() -> None:
        for _ in range(2):
            there.look(1e9)

    engine.scheduling.kv.call(look)


def hear_again(engine: SmallVLLM) -> None:
    """Wait until the server has said something: until then whatever it is asked has no answer."""
    while engine.scheduling.kv.cache._connection.there.is_silent:  # noqa: SLF001 - as above
        engine.settle_loop()


def step_settled(engine: SmallVLLM, count: int) -> None:
    """Do so many steps, with plans there as soon as they can be."""
    for _ in range(count):
        engine.step()
        engine.settle_loop()


def test_a_scheduler_that_ends_waits_for_no_copy(tmp_path: Path) -> None:
    """Nobody brings its answer any more; what is in memory is on the disk, whatever the time for it."""
    tiers = ROOMY, {"medium": "nvme", "path": tmp_path, "capacity": "8MiB", "write": "back"}
    with opened(*tiers, limits={"close_timeout_s": 3600.0}) as engine:
        stored_first = engine.ask("stored", 8 * BLOCK_SIZE, 1, prompt="p")
        stored_at_last(engine)
        copies = Copies(engine)
        engine.ask("being copied", 8 * BLOCK_SIZE, 64)
        step_settled(engine, 12)
        assert copies.num_held
        engine.scheduling.close()
        copies.end()
    with opened(*tiers) as engine:
        assert found(engine, stored_first) == 8


def test_a_request_may_end_after_the_scheduler_has() -> None:
    """Though the tiers have not heard yet that it used what vLLM's own cache had."""
    with opened(ROOMY, has_cache=True) as engine:
        engine.ask("first", 8 * BLOCK_SIZE + 1, 1, prompt="p")
        engine.settle()
        engine.ask("again", 8 * BLOCK_SIZE + 1, 20, prompt="p")
        engine.step()
        assert engine.num_here == 8
        engine.scheduling.close()
        engine.abort("again")


def test_copies_that_are_slow_become_fewer() -> None:
    """While one is under way others gather for 32 steps, and so give way to decoding; nothing is lost by it."""
    with opened(ROOMY, num_blocks=2048) as engine:
        copies = Copies(engine)
        for number in range(8):  # of which two fill a block in each step
            engine.ask(f"r{number}", 1 + number, 100)
        step_settled(engine, 72)
        steps = [step for step, num_jobs in enumerate(engine.orders) if num_jobs]
        assert np.diff(steps).tolist() == [32, 32]
        copies.end()
        engine.settle()
        engine.settle_loop()
        assert stored(engine) == sum((1 + number + 99) // BLOCK_SIZE for number in range(8))


def test_what_is_due_of_a_request_that_ends_does_not_wait_for_slow_copies() -> None:
    """Its blocks are kept meanwhile, and others wait for what is stored."""
    with opened(ROOMY, role="kv_producer") as engine:
        copies = Copies(engine)
        engine.ask("one", BLOCK_SIZE, 100)
        engine.ask("two", BLOCK_SIZE, 20)
        step_settled(engine, 11)
        assert sum(engine.orders) == 1
        step_settled(engine, 12)
        assert sum(engine.orders) == 2
        copies.end()
        engine.settle()


def test_stores_that_do_not_get_on_leave_vllm_its_blocks() -> None:
    """A quarter of them at most, and what some steps fill; what is passed over is counted, and computed again."""
    with opened(ROOMY, num_blocks=400) as engine:
        copies = Copies(engine)
        for number in range(40):
            engine.ask(f"r{number}", 16 * BLOCK_SIZE, 1)
            step_settled(engine, 2)
        assert engine.num_free >= 400 - 100 - 4 * 16
        assert engine.num_preemptions == 0
        copies.end()
        engine.settle()
        engine.settle_loop()
        engine.step()
        said = engine.scheduling.counts.take().data
        assert said["store_blocks"] + said["store_blocks_skipped"] == 40 * 16
        assert 100 <= said["store_blocks"] < 200
        assert engine.num_free == 400


@pytest.mark.parametrize("storage", [False, True], ids=["memory", "storage too"])
def test_a_step_costs_the_event_loop_two_turns_at_most(tmp_path: Path, *, storage: bool) -> None:
    """In the middle of many steps of many requests, of which some fill a block in each. None is preempted."""
    below = [{"medium": "nvme", "path": tmp_path, "capacity": "8MiB"}] if storage else []
    with opened(ROOMY, *below, num_blocks=1024) as engine:
        for number in range(12):
            engine.ask(f"r{number}", 1 + number, 200, salt=f"tenant {number % 3}")
        engine.step(8)
        turns = Turns(engine)
        engine.step(160)
        engine.settle_loop()
        assert turns.count <= 2 * 160
        assert not engine.num_preemptions


@pytest.mark.parametrize("when", ["computed", "evicted"])
def test_a_step_in_which_no_block_is_full_names_and_asks_nothing(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """However many requests it has: most fill none, in most steps. What some steps have filled is told together."""
    with opened(ROOMY, store_when=when, num_blocks=512, has_cache=True) as engine:
        for number in range(16):
            engine.ask(f"r{number}", 1, 8 * BLOCK_SIZE, prompt=str(number))
        engine.step(2)
        named, told = Counted(monkeypatch, VLLM.naming.RequestNaming, "keys"), Counted(monkeypatch, CopyBudget, "ask")
        engine.step(BLOCK_SIZE - 3)
        assert named.count == told.count == 0
        step_settled(engine, 4 * BLOCK_SIZE)  # while an event loop comes to nothing, stores are passed over
        assert 3 * 16 <= named.count <= 4 * 16
        assert told.count <= (when == "evicted") * (4 * 16 // VLLM.storing.MOST_DUE)


@pytest.mark.parametrize("is_async", [False, True], ids=["at once", "async"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num_steps", [2, 3, 6, 11])
def test_what_is_due_of_a_preempted_request_is_stored(num_steps: int, num_ranks: int, *, is_async: bool) -> None:
    """After each number of steps: it is copied before its blocks are another's, and comes back from the tiers."""
    with opened(ROOMY, num_ranks=num_ranks, is_async=is_async, num_blocks=16) as engine:
        engine.ask("one", 2 * BLOCK_SIZE, 100)
        engine.ask("two", 2 * BLOCK_SIZE - 1, 30)
        engine.step(num_steps)
        one = engine.running[0]
        num_full = min(one.num_computed_tokens, one.num_tokens) // BLOCK_SIZE
        engine.preempt("one")
        engine.ask("three", 7 * BLOCK_SIZE, 1)
        engine.waiting.rotate(1)  # it takes the blocks before the preempted one comes again
        engine.step(1 + is_async)  # a flush would wait for what the next steps tell
        engine.settle_loop()
        assert found(engine, one) >= num_full
        engine.abort("one", "two", "three")
        engine.settle()


def test_what_others_have_behind_what_was_overwritten_is_stored_again() -> None:
    """Of a job of several requests what comes behind the blocks of one that was preempted counts as not copied."""
    with opened(ROOMY, num_blocks=20, writes_first=True) as engine:
        copies = Copies(engine)
        requests = [engine.ask(name, 4 * BLOCK_SIZE + 1, 14) for name in ("one", "two", "three")]
        while not copies.num_held:
            step_settled(engine, 1)
        engine.preempt("two")
        engine.ask("four", 8 * BLOCK_SIZE, 1)
        engine.waiting.rotate(1)
        copies.end()  # the workers wait for it as they hear who was preempted
        engine.settle()
        engine.settle_copies()
        engine.settle_loop()
        assert [found(engine, each) for each in requests] == [(each.num_tokens - 1) // BLOCK_SIZE for each in requests]


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True], ids=["at once", "async"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num_steps", [2, 6, 9])
@pytest.mark.parametrize(("shape", "num_blocks"), [("full", 14), ("full", 32), ("states", 8)])
def test_what_vllm_overwrites_before_we_hear_of_it_is_not_kept(
    shape: str, num_blocks: int, num_steps: int, num_ranks: int, *, is_async: bool
) -> None:
    """Due, planned or being copied: what others write to where a preempted request had it. The rest is stored.

    vLLM's second model runner empties blocks, and begins states in them, before its workers hear whose they were.
    """
    groups = SHAPES["states"] if shape == "states" else ()
    with opened(
        ROOMY, num_ranks=num_ranks, is_async=is_async, num_blocks=num_blocks, groups=groups, writes_first=True
    ) as engine:
        for worker in engine.workers:
            LateCopies(worker, random.Random(num_steps))
        engine.ask("one", 5 * BLOCK_SIZE, 100)
        engine.step(num_steps)
        one = engine.running[0]
        engine.preempt("one")
        engine.ask("three", 11 * BLOCK_SIZE, 1)
        engine.waiting.rotate(1)  # it takes blocks that the other one had, where there are few
        for _ in range(16):  # that comes back, and what it loads is looked at
            engine.step()
            engine.settle_loop()
        if num_blocks == 32:
            assert found(engine, one) >= min(num_steps + 4, 16) // BLOCK_SIZE
        engine.abort("one", "three")
        engine.settle()


def test_what_is_not_planned_before_its_blocks_are_anothers_is_told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the event loop takes: it is counted, and no worker hears of a plan that holds nothing."""
    monkeypatch.setattr(VLLM.storing, "_PLAN_TIMEOUT_S", 0.0)
    monkeypatch.setattr(VLLM.loading, "_PATIENCE_S", 0.0)
    with opened(ROOMY, num_blocks=8, writes_first=True) as engine:
        engine.step()  # which asks what memory there is
        busy = threading.Event()
        engine.scheduling.kv.call(asyncio.get_running_loop).call_soon_threadsafe(busy.wait)
        try:
            engine.ask("one", 6 * BLOCK_SIZE, 100)
            engine.step()
            engine.preempt("one")
            engine.ask("other", 5 * BLOCK_SIZE, 100)
            engine.waiting.rotate(1)  # it writes to some of the blocks
            engine.step(3)
            orders, said = sum(engine.orders), engine.scheduling.counts.take()
        finally:
            busy.set()
        assert (orders, said.data["store_blocks_skipped"]) == (0, 6)
        engine.abort("one", "other")
        engine.settle()


def test_blocks_of_a_request_that_has_ended_are_kept_until_they_are_copied() -> None:
    """Meanwhile vLLM is told that they will be free soon, and so preempts nobody; then they are free."""
    with opened(ROOMY, num_blocks=8) as engine:
        engine.ask("short", 3 * BLOCK_SIZE, 9)
        engine.ask("long", BLOCK_SIZE, 28)  # needs a fourth block when the other one, which has five, has just ended
        engine.step(9)
        assert engine.num_free == 0
        assert engine.scheduling.frees_soon()
        engine.settle()
        assert not engine.scheduling.frees_soon()
        assert (engine.num_free, engine.num_preemptions) == (8, 0)
        engine.settle_loop()
        assert stored(engine) == (3 * BLOCK_SIZE + 8) // BLOCK_SIZE + (BLOCK_SIZE + 27) // BLOCK_SIZE


def test_blocks_are_kept_until_every_rank_has_copied_them() -> None:
    """One rank has, and another has not: then the request's blocks may not be another's yet."""
    with opened(ROOMY, num_ranks=2) as engine:
        num_free, slow, copying = engine.num_free, engine.workers[1], Future[Outcomes]()
        slow._start = lambda _plan, _after: copying  # noqa: SLF001 - ours
        engine.ask("one", 3 * BLOCK_SIZE, 100)
        engine.step()
        engine.settle_loop()
        engine.step()
        wait(engine.workers[0]._stores)  # noqa: SLF001 - likewise
        engine.step()
        engine.abort("one")
        (job,) = engine.scheduling._storing._stores  # noqa: SLF001 - likewise
        engine.step(3)
        assert engine.num_free < num_free
        copying.set_result(Outcomes(job, 1, 3))
        engine.settle()
        assert engine.num_free == num_free


@pytest.mark.parametrize("is_wrong", [False, True])
def test_what_a_server_forgets_that_says_nothing_is_kept_until_it_is_copied(tmp_path: Path, *, is_wrong: bool) -> None:
    """It may speak again, and keep what workers have copied: vLLM's blocks, as they were, and none that were wrong."""
    wanted = {"num_blocks": 16, "store_when": "evicted", "has_cache": True}
    with serving(tmp_path, ROOMY), opened(connect=f"unix://{tmp_path / 'kv.sock'}", **wanted) as engine:
        copies = LateStarts(engine)
        requests = [engine.ask(prompt, 6 * BLOCK_SIZE + 1, 1, prompt=prompt) for prompt in "abcd"]
        for _ in requests:
            step_settled(engine, 3)
        assert copies.num_held
        fall_silent(engine)
        engine.scheduling._hear_of_jobs()  # noqa: SLF001 - ours
        if is_wrong:
            engine.scheduling.take(VLLM.messages.Report(is_wrong=True))
        for prompt in "ef":  # which take what is free
            engine.ask(prompt, 2 * BLOCK_SIZE + 1, 1, prompt=prompt)
            step_settled(engine, 3)
        assert engine.scheduling.holds_blocks
        copies.begin()
        while engine.scheduling.holds_blocks:
            step_settled(engine, 1)
        kv = engine.scheduling.kv
        kv.flush()
        assert (kv.stats()["cpu"].ready > 0) is not is_wrong
        for request in requests:
            serve(engine, request.prompt, 6)  # and what is loaded is looked at
        assert engine.num_free == 16
        assert engine.scheduling._storing.num_held == 0  # noqa: SLF001 - likewise


def test_memory_that_cannot_be_attached_anew_is_attached_in_a_later_step() -> None:
    """A server restarts while the worker's process has no descriptor to be had: the engine computes what it needs."""
    with opened(ROOMY) as engine:
        (worker,), slabs = engine.workers, engine.scheduling._planner.slabs()  # noqa: SLF001 - ours
        serve(engine, "a", 6)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            worker._attach(slabs)  # noqa: SLF001 - as a step has it do that brings other memory
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert worker._slabs is slabs  # noqa: SLF001 - ours
        engine.settle()  # of a step that has nothing to compute nobody is told
        serve(engine, "a", 6)
        assert worker._slabs is None  # noqa: SLF001 - ours
        assert engine.scheduling.counts.take().data["loaded_tokens"] == 6 * BLOCK_SIZE


def test_the_first_memory_that_cannot_be_attached_is_attached_in_a_later_step() -> None:
    """A process that has no descriptor to spare serves, and says once why it does so without a cache."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with opened(ROOMY) as engine, capture_logs() as logs:
        (worker,), slabs = engine.workers, engine.scheduling._planner.slabs()  # noqa: SLF001 - ours
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            worker._attach(slabs)  # noqa: SLF001 - as the first step has it do
            worker._attach(None)  # noqa: SLF001 - and the next
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        serve(engine, "a", 6)
        engine.settle_loop()
        serve(engine, "a", 6)
        assert engine.scheduling.counts.take().data["loaded_tokens"] == 6 * BLOCK_SIZE
    assert [each["event"] for each in logs if each["log_level"] != "info"] == ["vllm.no_host_memory"]


def test_a_worker_whose_tensors_cannot_be_bound_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may have no room for copies: the engine computes, and each try to attach leaves nothing behind."""
    made: list[Worker] = []

    class Refusing(Worker):
        def __init__(self, *args: Any, **wanted: Any) -> None:  # noqa: ANN401 - as the class has it
            super().__init__(*args, **wanted)
            made.append(self)

        @override
        def register_kv_caches(self, *_: object, **__: object) -> None:
            raise ConfigurationError("the GPU has not 128 MiB left")

    with opened(ROOMY) as engine, capture_logs() as logs:
        with monkeypatch.context() as patched:
            patched.setattr(VLLM.moving, "Worker", Refusing)
            serve(engine, "a", 6)
            engine.settle_loop()
        assert made
        for worker in made:
            with pytest.raises(ClosedError):
                worker.attach([])
        serve(engine, "b", 6)
        assert engine.scheduling.kv.stats().stored == 6
    assert [each["event"] for each in logs if each["log_level"] != "info"] == ["vllm.no_host_memory"]


def test_memory_that_cannot_be_attached_is_tried_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may never have room for copies, and say each time how little it has: steps go on, and so does the log."""
    made: list[object] = []

    class Refusing(Worker):
        @override
        def register_kv_caches(self, *_: object, **__: object) -> None:
            made.append(self)
            raise ConfigurationError(f"the GPU has {len(made)} MiB left")

    with opened(ROOMY) as engine, capture_logs() as logs:
        (worker,), slabs = engine.workers, engine.scheduling._planner.slabs()  # noqa: SLF001 - ours
        with monkeypatch.context() as patched:
            patched.setattr(VLLM.moving, "Worker", Refusing)
            for step in range(1000):
                worker._attach(None if step else slabs)  # noqa: SLF001 - as steps have it do
            assert 10 < len(made) < 40
            before = len(made)
            worker._attach(slabs)  # noqa: SLF001 - other memory is tried at once
            assert len(made) == before + 1
            for _ in range(1000):
                worker._attach(None)  # noqa: SLF001 - as above
        for _ in range(256):
            worker._attach(None)  # noqa: SLF001 - as above
        serve(engine, "a", 6)
        engine.settle_loop()
        serve(engine, "a", 6)
        assert engine.scheduling.counts.take().data["loaded_tokens"] == 6 * BLOCK_SIZE
    assert [each["event"] for each in logs].count("vllm.no_host_memory") == len(made)


@pytest.mark.parametrize("part", ["use_pool", "_watch_pool", "_hear_hints", "_memory"])
def test_a_cache_that_could_not_be_opened_whole_is_opened_anew(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever part of it failed, nothing of it stays, and nobody else is kept from its disk: the next try serves."""
    disk = {"medium": "nvme", "path": tmp_path, "capacity": 64 * STRIDE}
    with opened(ROOMY, disk) as engine:
        wanted = engine.scheduling._configuration  # noqa: SLF001 - ours
        hellos = [worker.hello() for worker in engine.workers]
    scheduling = VLLM.scheduling.SchedulingSide(wanted)

    def fails(*_: object) -> None:
        raise OSError("planted")

    of = VLLM.storing.PendingStores if part == "use_pool" else VLLM.scheduling.SchedulingSide
    with monkeypatch.context() as patched:
        patched.setattr(of, part, fails)
        with pytest.raises(OSError, match="planted"):
            scheduling.open(hellos)
    with pytest.raises(ConfigurationError):
        _ = scheduling.kv
    try:
        scheduling.open(hellos)
        assert scheduling.num_bringing == 0
        assert scheduling.find(Request("r", 4, 1, num_tokens=4), 0) == (0, False)
    finally:
        scheduling.close()


def test_an_engine_that_is_interrupted_as_it_ends_keeps_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody does not wait until all is written: the next engine has it at once, in the same process too."""
    disk = {"medium": "nvme", "path": tmp_path, "capacity": 64 * STRIDE}

    def fails() -> None:
        raise KeyboardInterrupt("planted")

    with opened(ROOMY, disk) as engine:
        serve(engine, "a", 6)
        monkeypatch.setattr(engine.scheduling.kv, "drain", fails)
        with pytest.raises(KeyboardInterrupt, match="planted"):
            engine.scheduling.close()
        with opened(ROOMY, disk) as another:
            serve(another, "a", 6)


def test_what_cannot_be_described_to_routers_is_stored_and_loaded_all_the_same() -> None:
    """A request may have what nobody has thought of: routers do not hear of it, and the engine goes on."""

    def fails(*_: object) -> None:
        raise RuntimeError("planted")

    with opened(ROOMY) as engine, capture_logs() as logs:
        engine.scheduling._events = SimpleNamespace(describe=fails)  # noqa: SLF001 - ours
        serve(engine, "a", 6)
        engine.settle_loop()
        serve(engine, "a", 6)
        assert engine.scheduling.counts.take().data["loaded_tokens"] == 6 * BLOCK_SIZE
    assert {(each["event"], each["task"]) for each in logs} == {("background.failed", "KV events")}


def test_each_stage_of_a_pipeline_has_parts_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages of two ranks have four parts of a block, of which none is read as another's or as a whole model's.

    Stages that keep different numbers of layers are refused, with these.
    """
    moving = VLLM.moving
    with opened(ROOMY) as engine:
        one = engine.workers[0]
        wanted = replace(one._configuration, num_ranks=4, num_stages=2)  # noqa: SLF001 - ours
        ranks, tags = [], {one.hello().layout.groups[0].tag}
        for stage, rank in itertools.product(range(2), range(2)):
            monkeypatch.setattr(moving, "get_pp_group", lambda stage=stage: SimpleNamespace(rank_in_group=stage))
            monkeypatch.setattr(moving, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
            worker = moving.MovingSide(None, wanted)
            worker.register_kv_caches(engine.memory[0])
            ranks.append(worker.hello().rank)
            tags.add(worker.hello().layout.groups[0].tag)
        assert ranks == [0, 1, 2, 3]
        assert len(tags) == 2
        (uneven,) = wanted.groups
        more = replace(uneven, layer_names=(*uneven.layer_names, "another"))
        layout = replace(one.hello().layout.groups[0], num_layers=len(more.layer_names))
        others = [
            replace(one.hello(), rank=rank, **({"layout": KVLayout((layout,)), "groups": (more,)} if rank > 1 else {}))
            for rank in range(4)
        ]
        with pytest.raises(ConfigurationError, match=r"layers of each KV group.*all stages must have as many"):
            VLLM.scheduling.SchedulingSide(wanted).open(others)


def test_what_another_connector_has_said_of_its_workers_is_refused() -> None:
    """VLLM's MultiConnector hands all of its connectors what the first has to say: ours names whose that is."""

    class Handshake:
        pass

    with opened(ROOMY) as engine:
        wanted = engine.workers[0]._configuration  # noqa: SLF001 - ours
        with pytest.raises(ConfigurationError, match="have said Handshake of another connector: MultiConnector"):
            VLLM.scheduling.SchedulingSide(wanted).open([Handshake()])


def test_a_request_whose_copies_have_ended_leaves_at_once() -> None:
    """Its blocks are vLLM's again in the step that ends it: a reset of vLLM's cache then finds nothing in use."""
    with opened(ROOMY) as engine:
        engine.ask("one", 3 * BLOCK_SIZE, 100)
        num_free = engine.num_free
        engine.step()
        engine.settle_loop()
        engine.step()
        engine.settle_copies()
        engine.step()
        engine.abort("one")
        assert engine.num_free == num_free
        assert not engine.scheduling.frees_soon()


def test_what_other_weights_have_computed_is_not_stored_under_the_new_ones() -> None:
    """Nor what a request goes on to compute after them; one that begins anew is stored again."""
    with opened(ROOMY) as engine:
        engine.ask("one", 3 * BLOCK_SIZE, 30)
        engine.step(5)
        engine.scheduling.forget()
        one = engine.running[0]
        engine.settle()
        engine.settle_loop()
        assert found(engine, one) == 0
        engine.ask("two", 3 * BLOCK_SIZE, 30)
        two = engine.waiting[0]
        engine.settle()
        engine.settle_loop()
        assert found(engine, two) == (3 * BLOCK_SIZE + 29) // BLOCK_SIZE


def test_what_no_worker_was_told_of_is_not_copied_after_a_reset() -> None:
    """Planned or only due: vLLM may have slept since, and its memory has other bytes then."""
    with opened(ROOMY) as engine:
        engine.ask("one", 3 * BLOCK_SIZE, 40)
        engine.step()
        engine.settle_loop()  # the first job has its plan, which goes with the next step
        engine.step(0)
        engine.scheduling.forget()
        step_settled(engine, 12)
        assert sum(engine.orders) == 0
        engine.settle()
        engine.settle_loop()
        assert (stored(engine), engine.num_free) == (0, 256)


def test_vllm_may_sleep() -> None:
    """Copies end first; what was stored before is loaded into the tensors after, and the cache stays open."""
    with opened(ROOMY) as engine:
        engine.ask("one", 6 * BLOCK_SIZE, 1, prompt="a")
        engine.settle()
        engine.settle_loop()
        kv, (worker,) = engine.scheduling.kv, engine.workers
        for _ in range(2):
            worker.unregister_kv_caches()
        assert all(copy.done() for copy in worker._stores)  # noqa: SLF001 - ours
        for layer in engine.memory[0].values():
            layer.zero_()
        for _ in range(2):
            worker.restore_kv_caches()
        engine.scheduling.open([worker.hello()])  # as vLLM says anew
        assert engine.scheduling.kv is kv
        two = engine.ask("two", 6 * BLOCK_SIZE + 1, 1, prompt="a")
        engine.settle()
        engine.settle_loop()
        engine.step()
        assert two.num_tokens == 6 * BLOCK_SIZE + 2
        assert engine.scheduling.counts.take().data["loaded_tokens"] == 6 * BLOCK_SIZE


def test_storage_is_written_by_windows_unless_somebody_says_when() -> None:
    """Tiers that others use too; where a setting says when anything is written, all is as the settings say."""
    below_of = VLLM.configuration.below_of
    cpu, nvme, shared = "cpu://?capacity=1MiB", "file:///kv?capacity=1GiB", {"medium": "memory", "capacity": "1MiB"}
    settings = below_of({"tiers": [cpu, nvme, shared]}).settings
    assert [tier.write for tier in settings.tiers] == ["through", "back", "back"]
    assert settings.limits.clean_after_s == 1.0
    for said in (
        {"tiers": [cpu, nvme + "&write=through", shared]},
        {"tiers": [cpu, nvme, shared], "limits": {"clean_after_s": 30}},
    ):
        assert [tier.write for tier in below_of(said).settings.tiers] == ["through"] * 3
    assert below_of({"connect": "unix:///run/kv.sock"}).settings is None


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"tier": []}, ": did you mean 'tiers'?"),
        ({"tires": []}, ": did you mean 'tiers'?"),
        ({"conect": "unix:///run/kv.sock"}, ": did you mean 'connect'?"),
        ({"store_generate": False}, ": did you mean 'store_generated'?"),
        ({"clean_after_s": 1}, ": did you mean 'limits.clean_after_s'?"),
        ({"write": "back"}, ": known are codec, connect, hint_share, limits, "),
    ],
)
def test_who_misspells_a_setting_reads_which_was_meant(given: dict[str, object], meant: str) -> None:
    """Of the cache below, and of the connector; and what may be there is all of both."""
    with pytest.raises(ConfigurationError, match=re.escape(f"{next(iter(given))}: there is no such setting")) as raised:
        VLLM.configuration.settings_of(given)
    assert meant in str(raised.value)


def test_tokens_that_are_in_place_are_counted_beside_those_that_were_found() -> None:
    """Hits are counted when they are looked up; what was gone by then, or was not copied, is no token of ours."""
    with opened(ROOMY) as engine:
        engine.ask("one", 6 * BLOCK_SIZE, 1, prompt="a")
        engine.settle()
        engine.settle_loop()
        engine.ask("two", 6 * BLOCK_SIZE + 1, 1, prompt="a")
        two = engine.waiting[0]
        worker = engine.workers[0]
        start = worker._start  # noqa: SLF001 - ours

        def start_short(plan: Any, after: object, ahead_of: object = None) -> Any:  # noqa: ANN401 - likewise
            ended = start(plan, after, ahead_of)
            if plan.direction == "store":
                return ended
            short: Future[Outcomes] = Future()
            short.set_result(replace(ended.result(), num_moved=4))
            return short

        worker._start = start_short  # noqa: SLF001 - likewise
        engine.settle()
        engine.settle_loop()
        engine.step()
        assert two.num_tokens == 6 * BLOCK_SIZE + 2
        assert engine.scheduling.counts.take().data["loaded_tokens"] == 4 * BLOCK_SIZE


def test_only_copies_that_fail_are_errors() -> None:
    """What was cancelled, or was there already, is none."""
    with opened({"medium": "cpu", "capacity": 8 * STRIDE}) as engine:  # no room for most
        for number in range(4):
            engine.ask(f"r{number}", 6 * BLOCK_SIZE, 8)
        engine.step(3)
        engine.preempt("r3", "r2")
        engine.abort("r1")
        engine.settle()
        assert engine.scheduling.counts.take().data.get("errors", 0) == 0
        engine.scheduling.take(VLLM.messages.Report([Outcomes(1, 0, 0, "it stumbled")]))
        assert engine.scheduling.counts.take().data["errors"] == 1


SHAPES = {
    "windows": (group(0), group(1, num_blocks=2), group(2, num_blocks=5, page=1024)),
    "windows first": (group(0, num_blocks=1), group(1, size=2 * BLOCK_SIZE)),
    "larger windows": (group(0), group(1, size=2 * BLOCK_SIZE, num_blocks=3, page=256)),
    "states": (group(0, size=2 * BLOCK_SIZE), group(1, size=2 * BLOCK_SIZE, is_state=True, page=1536)),
    "only states": (group(0, is_state=True),),
    "pages": (group(0), group(1, page=128, table=0)),
    "all": (group(0), group(1, num_blocks=3), group(2, size=2 * BLOCK_SIZE, is_state=True)),
}


def test_states_have_room_by_tokens() -> None:
    """What vLLM keeps at few places takes no room from what attention needs of every block."""
    with opened(ROOMY, groups=SHAPES["states"], tokens_per_state=8 * BLOCK_SIZE) as engine:
        chains = inside(engine.scheduling.kv.cache).chains
        assert [chain.group.slots_per_block for chain in chains] == [1.0, 0.25]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_comes_back_to_the_last_end_that_all_groups_have(shape: str) -> None:
    """Of each KV group comes what the request needs there, and no more; and the tiers keep all that it left behind."""
    with opened(ROOMY, groups=SHAPES[shape]) as engine:
        step = max(each.block_size for each in engine.groups)
        engine.ask("one", 12 * BLOCK_SIZE + 1, 1, prompt="a")
        engine.settle()
        engine.settle_loop()
        engine.ask("two", 12 * BLOCK_SIZE + 1, 1, prompt="a")
        two, copies = engine.waiting[0], Copies(engine, "load")
        engine.step()
        assert two.is_loading
        assert two.num_computed_tokens == 12 * BLOCK_SIZE
        copies.end()
        assert engine.hits == {"host": 12 * BLOCK_SIZE}
        engine.settle()
        engine.settle_loop()
        engine.step()
        counted = engine.scheduling.counts.take().data
        needed = [12 * BLOCK_SIZE // each.block_size for each in engine.groups]
        needed = [min(each.num_blocks or n, n) for each, n in zip(engine.groups, needed, strict=True)]
        assert counted["load_blocks"] == sum(needed)
        assert counted["loaded_tokens"] == 12 * BLOCK_SIZE
        for end in range(step, 12 * BLOCK_SIZE, step):  # any other prompt that begins like it finds its own end
            engine.ask(f"to {end}", end + 1, 1, prompt="a")
            three = engine.waiting[0]
            engine.step()
            assert three.num_computed_tokens == end
            engine.settle()


@pytest.mark.parametrize("shape", [None, *SHAPES])
def test_of_answers_nothing_is_stored_where_that_is_not_wanted(shape: str | None) -> None:
    """Nor where a request is preempted in the middle of its answer: of it is stored what of its prompt alone is."""

    def num_stored(num_wanted: int, **wanted: bool) -> int:
        with opened(ROOMY, groups=SHAPES[shape] if shape else (), has_cache=shape is None, **wanted) as engine:
            engine.ask("one", 12 * BLOCK_SIZE + 1, num_wanted, prompt="a")
            if num_wanted > 6 * BLOCK_SIZE:
                step_settled(engine, 6 * BLOCK_SIZE)
                engine.preempt("one")
            stored_at_last(engine)
            return stored(engine)

    of_prompt = num_stored(1)
    assert of_prompt > 0
    assert num_stored(12 * BLOCK_SIZE, store_generated=False) == of_prompt
    assert num_stored(12 * BLOCK_SIZE) > of_prompt


@pytest.mark.parametrize("shape", SHAPES)
def test_a_load_that_lacks_a_block_of_one_group_is_computed(shape: str) -> None:
    """What is gone between look-up and load costs the load of all groups, and no right answer."""
    with opened(ROOMY, groups=SHAPES[shape]) as engine:
        engine.ask("one", 12 * BLOCK_SIZE + 1, 1, prompt="a")
        one = engine.waiting[0]
        engine.settle()
        engine.settle_loop()
        planner, num_tokens = engine.scheduling._planner, 12 * BLOCK_SIZE  # noqa: SLF001 - ours
        plan_load = planner.plan_load

        def evict_and_plan(*args: object) -> object:
            engine.scheduling.kv.evict(engine.scheduling.naming.need(engine.groups[-1], one, 0, num_tokens).needed)
            return plan_load(*args)

        planner.plan_load = evict_and_plan
        num_free = engine.num_free
        engine.ask("two", 12 * BLOCK_SIZE + 1, 1, prompt="a")
        engine.settle()
        engine.settle_loop()
        engine.step()
        assert engine.num_free == num_free
        assert engine.scheduling.counts.take().data["load_blocks_lost"] > 0
        assert [(tier.leased, tier.pending) for tier in engine.scheduling.kv.stats().tiers] == [(0, 0)]


@pytest.mark.parametrize("shape", [None, *SHAPES])
def test_vllm_may_take_less_than_it_was_told_of(shape: str | None) -> None:
    """Of windows and states other blocks are needed then."""
    with opened(ROOMY, groups=SHAPES[shape] if shape else ()) as engine:
        engine.ask("one", 12 * BLOCK_SIZE + 1, 1, prompt="a")
        engine.settle()
        engine.settle_loop()
        engine.settle_copies()
        find, size = engine.scheduling.find, max(each.block_size for each in engine.groups)

        def found(request: Request, num_tokens: int) -> tuple[int | None, bool]:
            num_found, is_async = find(request, num_tokens)
            return max(0, num_found - size) if num_found else num_found, is_async

        engine.scheduling.find = found
        engine.ask("two", 12 * BLOCK_SIZE + 1, 1, prompt="a")
        engine.settle()
        engine.settle_loop()
        engine.step()
        assert engine.scheduling.counts.take().data["loaded_tokens"] == 12 * BLOCK_SIZE - size
        assert [tier.leased for tier in engine.scheduling.kv.stats().tiers] == [0]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [None, *SHAPES])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_bytes_are_right_and_nothing_is_held(seed: int, shape: str | None, tmp_path: Path) -> None:
    """Requests of several tenants come, end, are preempted and aborted at any step, in caches with room and without.

    Under a vLLM that writes to new blocks before its workers hear whose they were, too, and with copies that are late.
    """
    chance = random.Random(seed)
    below = [{"medium": "nvme", "path": tmp_path, "capacity": "8MiB"}] if seed % 3 == 0 else []
    cpu = {"medium": "cpu", "capacity": chance.choice([16, 64, 1024]) * STRIDE * (1 + seed % 2)}
    with opened(
        cpu,
        *below,
        num_ranks=1 + seed % 2,
        is_async=seed % 4 > 1,
        num_blocks=chance.choice([24, 200]) * (3 if shape else 1),
        groups=SHAPES[shape] if shape else (),
        writes_first=seed % 3 > 0,
    ) as engine:
        for worker in engine.workers if seed % 3 > 1 else ():
            LateCopies(worker, random.Random(seed))
        num_free, names = engine.num_free, 0
        for _ in range(100):
            running = [each.request_id for each in engine.running]
            match chance.randrange(12):
                case 0 | 1 if len(engine.waiting) < 4:
                    prompt = chance.choice(["", "a", "b"])
                    length = chance.randrange(1, 40)
                    engine.ask(f"r{names}", length, chance.randrange(1, 30), chance.choice([None, "t"]), prompt)
                    names += 1
                case 2 if running:
                    engine.preempt(*chance.sample(running, chance.randrange(1, len(running) + 1)))
                case 3 if running:
                    engine.abort(chance.choice(running))
            engine.step()
        engine.settle()
        assert engine.num_free == num_free
        engine.settle_loop()
        engine.step()  # it hears of how the last jobs have ended
        assert engine.scheduling._storing.num_held == 0  # noqa: SLF001 - ours
        held = [(tier.leased, tier.pending) for tier in engine.scheduling.kv.stats().tiers]
        engine.scheduling.kv.flush()
        assert engine.scheduling.kv.stats()["cpu"].pending == 0, held


# Stores of what vLLM is about to drop.


@contextmanager
def evicting(num_blocks: int, num_below: int, **wanted: Any) -> Iterator[SmallVLLM]:  # noqa: ANN401 - as `small_vllm`
    """Open one with a prefix cache of its own over a memory tier, which stores what it is about to drop."""
    tier = {"medium": "cpu", "capacity": num_below * STRIDE, "policy": "lru"}
    wanted = {"store_when": "evicted", "has_cache": True} | wanted
    with opened(tier, num_blocks=num_blocks, **wanted) as engine:
        yield engine


def serve(engine: SmallVLLM, prompt: str, num_blocks: int) -> None:
    """Serve a prompt of full blocks, and one token more, which is computed whatever is there."""
    engine.ask(f"{prompt}, {len(engine.orders)}", num_blocks * BLOCK_SIZE + 1, 1, prompt=prompt)
    engine.settle()
    num_rounds = 0
    while num_rounds < 3 or engine.scheduling._storing.num_held:  # noqa: SLF001 - ours
        engine.settle_loop()  # what is being copied ends before the next prompt comes, however slow the machine
        engine.step()
        engine.settle_copies()
        num_rounds += 1
        assert num_rounds < 1000, "blocks are held for good"


def test_vllm_steps_until_nothing_is_held() -> None:
    """Though it has no requests any more: else it can't reset its cache, or sleep, before others come."""
    with evicting(16, 64) as engine:
        copies = Copies(engine)
        for prompt in "abcd":
            engine.ask(prompt, 6 * BLOCK_SIZE + 1, 1)
            step_settled(engine, 3)
        assert not engine.running
        assert engine.scheduling.holds_blocks
        copies.end()
        step_settled(engine, 3)
        assert not engine.scheduling.holds_blocks
        assert engine.num_free == 16


def said(engine: SmallVLLM) -> dict[str, float]:
    """Return what was counted since the last time."""
    stats = engine.scheduling.counts.take()
    return {} if stats is None else dict(stats.data)


def stored_at_last(engine: SmallVLLM) -> None:
    """Serve what was asked for, and have all of it stored that is to be."""
    engine.settle()
    free_at_last(engine)


def free_at_last(engine: SmallVLLM) -> int:
    """Count the blocks that are free once what is being copied is copied, and nothing is left to do."""
    for _ in range(8):
        engine.settle_loop()
        engine.step()
        engine.settle_copies()
    engine.step()
    engine.settle()
    return engine.num_free


@pytest.mark.parametrize("num_wanted", [1, 64])
def test_what_vllm_s_own_cache_has_and_the_tiers_have_lost_is_stored_again(num_wanted: int) -> None:
    """Whether the request that shows it ends in its first step or goes on."""
    with opened(ROOMY, has_cache=True) as engine:
        first = engine.ask("first", 8 * BLOCK_SIZE + 1, 1, prompt="p")
        stored_at_last(engine)
        engine.scheduling.kv.clear()
        assert not found(engine, first)
        engine.ask("again", 8 * BLOCK_SIZE + 1, num_wanted, prompt="p")
        stored_at_last(engine)
        assert engine.num_here == 8
        assert found(engine, first) == 8


@pytest.mark.parametrize("num_wanted", [1, 8])
def test_the_tiers_hear_what_vllm_s_own_cache_serves(num_wanted: int) -> None:
    """So that it is not the first to go there, whether requests end in their first step or go on."""
    with opened({"medium": "cpu", "capacity": 16 * STRIDE, "policy": "lru"}, has_cache=True) as engine:
        hot = engine.ask("hot", 8 * BLOCK_SIZE + 1, 1, prompt="hot")
        stored_at_last(engine)
        for number in range(6):
            engine.ask(f"other {number}", 4 * BLOCK_SIZE + 1, 1, prompt=str(number))
            engine.ask(f"hot {number}", 8 * BLOCK_SIZE + 1, num_wanted, prompt="hot")
            stored_at_last(engine)
        assert found(engine, hot) == 8


def test_a_request_that_loads_is_kept_for_that_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for a store too of what vLLM's own cache had before it was preempted: vLLM takes its blocks back once."""
    monkeypatch.setattr(VLLM.loading, "_FIRST_BYTES", 1)  # loads go on beside steps
    with opened(ROOMY, has_cache=True, num_blocks=20) as engine:
        first = engine.ask("first", 10 * BLOCK_SIZE + 1, 1, prompt="p")
        stored_at_last(engine)
        serve(engine, "other", 12)
        two = engine.ask("two", 10 * BLOCK_SIZE + 1, 64, prompt="p")
        while two.num_tokens == two.num_prompt_tokens:
            step_settled(engine, 1)
        assert 0 < engine.num_here < 10
        engine.preempt("two")
        engine.ask("another", 12 * BLOCK_SIZE + 1, 1)
        engine.waiting.rotate(1)  # it takes the blocks before the preempted one comes again
        keys = BlockKeys.from_hashes(first.block_hashes, block_size=BLOCK_SIZE)
        engine.scheduling.kv.evict(keys[:2])
        copies = Copies(engine, "load")
        while not two.is_loading:
            step_settled(engine, 1)
        engine.abort("two")
        copies.end()
        assert free_at_last(engine) == 20


def test_uses_of_several_requests_are_told_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As each call may wake the event loop, which takes the interpreter from the step."""
    with opened(ROOMY, has_cache=True) as engine:
        engine.ask("first", 8 * BLOCK_SIZE + 1, 1, prompt="p")
        stored_at_last(engine)
        calls = Counted(monkeypatch, LoopCalls, "call")
        for number in range(4):
            engine.ask(f"again {number}", 8 * BLOCK_SIZE + 1, 64, prompt="p")
        engine.step()
        assert engine.num_here == 4 * 8
        assert calls.count == 1


def test_what_vllm_holds_is_not_stored_and_what_it_is_about_to_drop_is() -> None:
    """So both together have more; what comes back is right, and no block of vLLM's is held for good."""
    with evicting(512, 1024) as engine:
        serve(engine, "a", 16)
        assert stored(engine) == 0
        for number in range(36):
            serve(engine, f"b{number}", 16)
        assert 100 < stored(engine) < 300
        serve(engine, "a", 16)
        counted = said(engine)
        assert counted["loaded_tokens"] // BLOCK_SIZE + engine.num_here == 16
        assert engine.num_here < 16
        assert counted.get("store_blocks_late", 0) == 0
        assert free_at_last(engine) == 512


def test_of_answers_that_vllm_drops_nothing_is_stored_where_that_is_not_wanted() -> None:
    """Of what comes so often that it is worth a copy: the blocks of prompts alone."""

    def num_stored(**wanted: bool) -> int:
        with evicting(32, 64, **wanted) as engine:
            for turn in range(12):
                engine.ask(f"{turn}", 4 * BLOCK_SIZE + 1, 8 * BLOCK_SIZE, prompt="abc"[turn % 3])
                stored_at_last(engine)
            return stored(engine)

    assert 0 < num_stored(store_generated=False) <= 3 * 4 < num_stored()


@pytest.mark.slow
def test_vllm_s_own_cache_has_as_much_as_without_copies() -> None:
    """What was held while it was copied goes when it would have: not before what was to go earlier.

    Give or take a few, as how long it is held depends on when it is copied; 21 fewer when it went first of all.
    """
    chance = random.Random(4)
    prompts = [int(chance.paretovariate(0.5)) % 256 for _ in range(300)]
    had = {}
    for when in ("evicted", "computed"):
        with evicting(161, 160, store_when=when) as engine:
            for prompt in prompts:
                serve(engine, str(prompt), 8)
            had[when] = engine.num_here
    assert abs(had["evicted"] - had["computed"]) <= 5


@pytest.mark.slow
def test_two_caches_have_as_much_as_a_replay_says() -> None:
    """Hits over vLLM's own cache and the tier are within 0.02 of what is foretold of both, one request at a time.

    A little fewer, as what vLLM is soon to drop is in both: so their size is many times what is looked at in a step.
    """
    chance = random.Random(3)
    prompts = [int(chance.paretovariate(0.5)) % 256 for _ in range(600)]
    ids = [np.arange(8) + 100 * prompt for prompt in prompts]
    trace = Trace("t", [Asked(float(at), each, 8) for at, each in enumerate(ids)], 1)
    plan = TierPlan("cpu", 320 * 4096, is_memory=True)
    foretold = replay(trace, [plan], BlockCost(4096, 1.0), engine_blocks=320, store_when="evicted").hit_rate
    with evicting(321, 320) as engine:
        for prompt in prompts:
            serve(engine, str(prompt), 8)
        hits = engine.num_here + said(engine)["loaded_tokens"] / BLOCK_SIZE
        assert hits / trace.num_references == pytest.approx(foretold, abs=0.02)


def test_what_is_dropped_sooner_than_it_is_looked_at_is_counted() -> None:
    """Prompts that take more blocks in a step than are looked at: what lay behind these is lost, and nothing else."""
    with evicting(512, 1024) as engine:
        for prompt in "abcdefgh":
            serve(engine, prompt, 60)
        assert said(engine).get("store_blocks_late", 0) == 0
        for prompt in "ijklm":
            engine.ask(prompt, 60 * BLOCK_SIZE + 1, 1, prompt=prompt)
        engine.settle()
        assert said(engine)["store_blocks_late"] > 100
        assert free_at_last(engine) == 512


def test_whatever_happens_all_bytes_are_right_and_all_blocks_come_back() -> None:
    """Requests that are preempted and aborted, of shared prompts, with several ranks and a step behind."""
    for seed in range(4):
        chance = random.Random(seed)
        with evicting(40, 60, num_ranks=1 + seed % 2, is_async=seed > 1) as engine:
            for number in range(40):
                engine.ask(
                    f"r{number}", chance.randint(2, 60), chance.randint(1, 12), prompt=f"p{chance.randint(0, 5)}"
                )
                engine.step(chance.randint(1, 4))
                if engine.running and chance.random() < 0.2:
                    end = chance.choice([engine.abort, engine.preempt])
                    end(chance.choice(engine.running).request_id)
            engine.settle()
            assert free_at_last(engine) == 40


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_when_to_store_goes_by_what_is_below(num_ranks: int, tmp_path: Path) -> None:
    """Of memory alone that is small beside vLLM's cache: what is about to be dropped; else what is computed.

    A block of vLLM's takes a slot for each rank.
    """
    nvme = {"medium": "nvme", "path": str(tmp_path / "kv"), "capacity": "8MiB"}
    for tiers, when, expected in (
        ([{"medium": "cpu", "capacity": num_ranks * 192 * STRIDE}], "auto", 0),
        ([{"medium": "cpu", "capacity": num_ranks * 512 * STRIDE}], "auto", 16),
        ([{"medium": "cpu", "capacity": num_ranks * 128 * STRIDE}], "computed", 16),
        ([{"medium": "cpu", "capacity": num_ranks * 128 * STRIDE}, nvme], "auto", 16),
        ([{"medium": "cpu", "capacity": num_ranks * 128 * STRIDE}, nvme], "evicted", 0),
    ):
        with opened(*tiers, num_blocks=64, store_when=when, has_cache=True, num_ranks=num_ranks) as engine:
            serve(engine, "a", 16)
            assert stored(engine) == num_ranks * expected


def test_a_block_is_named_by_where_a_prefix_ends_in_it() -> None:
    """By the hash of all tokens until there: a whole block is another name, and who needs less of it finds less."""
    naming, of = VLLM.naming.RequestNaming(), group(size=4 * BLOCK_SIZE)
    request = Request("r", 12 * BLOCK_SIZE, 1)
    request.know(12 * BLOCK_SIZE)
    ends = [size * BLOCK_SIZE for size in (5, 6, 7, 8)]
    names = list(naming.tails(of, request, ends))
    assert len(set(names)) == 4
    assert names == [naming.need(of, request, 0, end).needed[1] for end in ends]
    assert names[-1] == naming.keys(of, request, 0, 2)[1]
    assert naming.keys(of, request, 1, 2, end=ends[0])[0] == names[0]


def test_a_block_is_stored_by_all_its_names() -> None:
    """Prompts end inside of it, one goes on, and by the next job it is full: no worker copies it twice at once."""
    with opened(ROOMY, groups=(group(0, size=4 * BLOCK_SIZE), group(1, size=4 * BLOCK_SIZE, is_state=True))) as engine:
        engine.ask("one", 8 * BLOCK_SIZE, 4, prompt="a")
        one, attention, scheduling = engine.waiting[0], engine.groups[0], engine.scheduling
        engine.step(2)
        tracked, storing = scheduling._tracked["one"], scheduling._storing  # noqa: SLF001 - as vLLM hands over states
        block = one.tables[0][1]
        for end in (5, 6):
            storing.gather(tracked, attention, 1, [block], end=end * BLOCK_SIZE)
        storing.gather(tracked, attention, 1, [block])
        storing.plan()
        free_at_last(engine)
        names = [scheduling.naming.keys(attention, one, 1, 2, end=end * BLOCK_SIZE) for end in (5, 6, 8)]
        assert [scheduling.kv.lookup(each).num_blocks for each in names] == [1, 1, 1]
        assert storing.num_held == 0


@pytest.mark.parametrize(
    ("groups", "num_tokens"),
    [
        ((group(0, size=16), group(1, size=16, is_state=True)), BLOCK_SIZE),
        ((group(0), group(1, is_state=True)), 0),  # vLLM's hashes are of whole blocks
        ((group(0, size=16), group(1, num_blocks=3, size=16)), 0),  # of a window vLLM has whole blocks only
        ((group(0, size=16), group(1, size=16, is_state=True), group(2, num_blocks=3, size=16)), 0),
        ((group(0, size=8), group(1, size=16, is_state=True)), 0),
    ],
)
def test_prefixes_end_inside_of_blocks_where_vllm_has_states_there(groups: tuple[Any, ...], num_tokens: int) -> None:
    """Beside full attention, where its hashes are finer than its blocks."""
    with opened(ROOMY, groups=groups) as engine:
        assert engine.scheduling._configuration.tail_tokens == num_tokens  # noqa: SLF001 - there is no other way


def test_a_prompt_of_many_windows_is_kept_until_all_of_it_is_copied() -> None:
    """A job of the connector's is of all its blocks at once, however small the windows of other transfers are."""
    with opened(ROOMY, limits={"window": 2 * STRIDE, "bounce": 20 * STRIDE}) as engine:
        LateCopies(engine.workers[0], random.Random(0))
        engine.ask("long", 100 * BLOCK_SIZE, 1, prompt="long")
        for number in range(8):  # which take blocks as soon as they are free, and scribble there
            engine.ask(f"other {number}", 30 * BLOCK_SIZE, 2)
        engine.settle()
        engine.settle_loop()
        again = engine.ask("again", 100 * BLOCK_SIZE + 1, 2, prompt="long")
        assert found(engine, again) == 100
        engine.settle()  # which looks at what was loaded
        assert engine.scheduling.counts.take().data["load_blocks"] == 100
