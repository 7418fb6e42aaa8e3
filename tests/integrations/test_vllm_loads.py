"""When the connector for vLLM loads: what memory has in the step that computes the rest, what is much beside steps."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.test_vllm_paying import SMALL, until_it_answers_later_than
from tests.integrations.test_vllm_stores import (
    ROOMY,
    SHAPES,
    Copies,
    Counted,
    fall_silent,
    found,
    hear_again,
    opened,
    serve,
    step_settled,
)
from tests.support.caches import inside
from tests.support.serving import serving
from tests.support.small_vllm import BLOCK_SIZE, STRIDE, VLLM, SmallVLLM
from tiered_kv import Outcomes

LENGTH = 6 * BLOCK_SIZE + 1


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for plans however long they take: here it is no matter of the machine's speed."""
    monkeypatch.setattr(VLLM.loading, "_PATIENCE_S", 60.0)


@contextmanager
def stored_once(*tiers: object, **wanted: object) -> Iterator[SmallVLLM]:
    """Open a vLLM without a prefix cache of its own, whose tiers have a prompt of six blocks."""
    with opened(*tiers, **wanted) as engine:
        engine.ask("one", LENGTH, 1, prompt="a")
        engine.settle()
        engine.settle_loop()
        engine.settle_copies()
        yield engine


def loads_of(engine: SmallVLLM) -> list[bool]:
    """Have the loads of the steps to come noted: whether each comes first."""
    noted, next_step = list[bool](), engine.scheduling.next_step

    def note(scheduled: object) -> object:
        step = next_step(scheduled)
        noted.extend(order.comes_first for order in step.loads)
        return step

    engine.scheduling.next_step = note
    return noted


@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_in_memory_is_loaded_by_the_step_that_computes_the_rest(*, is_async: bool) -> None:
    """A request has its first token after one step, as if it had come to an engine that had its prompt."""
    with stored_once(ROOMY, is_async=is_async) as engine:
        loads = loads_of(engine)
        two = engine.ask("two", LENGTH, 2, prompt="a")
        engine.step()  # which looks at what attention reads
        assert (loads, two.num_computed_tokens, two.is_loading) == ([True], LENGTH, False)
        engine.settle()
        engine.settle_loop()
        engine.step()
        assert engine.scheduling.num_bringing == 0


def keep_first(engine: SmallVLLM) -> None:
    """Have the tiers of a server keep the blocks of a first request."""
    engine.step()
    engine.ask("one", LENGTH, 1, prompt="a")
    engine.settle()
    engine.settle_copies()
    engine.step(2)  # which tell of the copies
    engine.scheduling.kv.flush()


@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_server_has_in_memory_is_loaded_first_too(tmp_path: Path, *, is_async: bool) -> None:
    """Its plans come by a socket, sooner than a step. Not where the next step is scheduled by then: it may have died.

    A vLLM that is a step ahead of its output answers with what is computed with a load that failed.
    """
    connect = f"unix://{tmp_path / 'kv.sock'}"
    with serving(tmp_path, ROOMY), opened(connect=connect, is_async=is_async) as engine:
        keep_first(engine)
        loads = loads_of(engine)
        two = engine.ask("two", LENGTH, 2, prompt="a")
        engine.step()
        assert (loads, two.is_loading) == ([not is_async], is_async)
        engine.settle()


def test_every_rank_loads_first() -> None:
    """Each its own part."""
    with stored_once(ROOMY, num_ranks=2) as engine:
        two = engine.ask("two", LENGTH, 2, prompt="a")
        engine.step()
        assert all(engine.is_right(two, number, rank) for number in range(6) for rank in range(2))
        engine.settle()


@contextmanager
def stored_below(path: Path, **wanted: object) -> Iterator[SmallVLLM]:
    """Open such a vLLM whose storage has that prompt, and whose memory has another."""
    capacity = (64 if "groups" in wanted else 16) * STRIDE
    tiers = [{"medium": "cpu", "capacity": capacity}, {"medium": "nvme", "path": path, "capacity": "4MiB"}]
    with stored_once(*tiers, **wanted) as engine:
        fill_memory(engine, "b")
        yield engine


def fill_memory(engine: SmallVLLM, prompt: str) -> None:
    """Have prompts computed that take all of the memory; all is on storage then."""
    engine.scheduling.kv.flush()
    for number in range(4 if len(engine.groups) > 1 else 1):
        engine.ask(f"{prompt} {number}", 16 * BLOCK_SIZE, 1, prompt=f"{prompt} {number}")
        engine.settle()
        engine.settle_loop()
        engine.settle_copies()
        engine.step()  # which tells of the copies
        engine.settle_loop()
        engine.scheduling.kv.flush()


@contextmanager
def nothing_planned(engine: SmallVLLM) -> Iterator[None]:
    """Keep the cache's event loop busy, and have what was to be planned meanwhile planned behind that."""
    kv, loads, ended = engine.scheduling.kv, engine.scheduling._loads, threading.Event()  # noqa: SLF001 - ours
    kv.call(asyncio.get_running_loop).call_soon_threadsafe(ended.wait)
    patience_s, VLLM.loading._PATIENCE_S, loads._patience_s = VLLM.loading._PATIENCE_S, 0.0, 0.0  # noqa: SLF001 - ours
    try:
        yield
    finally:
        VLLM.loading._PATIENCE_S = patience_s  # noqa: SLF001 - likewise
        ended.set()
    jobs = [job for each in loads._bringing.values() for job in each.jobs.values()]  # noqa: SLF001 - likewise
    assert engine.scheduling._planner.wait_planned(jobs, 30)  # noqa: SLF001 - likewise


@pytest.mark.parametrize("where", ["memory", "storage"])
def test_what_takes_longer_is_brought_to_memory_before_its_request_has_blocks(tmp_path: Path, where: str) -> None:
    """Nobody else waits for it, and its first token comes with the first step that begins once memory has it."""
    with stored_once(ROOMY) if where == "memory" else stored_below(tmp_path) as engine:
        loads, num_free = loads_of(engine), engine.num_free
        two = engine.ask("two", LENGTH, 2, prompt="a")
        with nothing_planned(engine):
            engine.step(2)
            assert (loads, engine.num_free, engine.scheduling.num_bringing) == ([], num_free, 6)
        engine.step()
        assert (loads, two.num_computed_tokens) == ([True], LENGTH)
        engine.settle()
        engine.settle_loop()
        engine.step()
        assert engine.scheduling.num_bringing == 0


def slow_to_compute(monkeypatch: pytest.MonkeyPatch, engine: SmallVLLM) -> None:
    """Have storage be read once, so that it is known how long that takes, and computing take longer by far."""
    monkeypatch.setattr(VLLM.loading, "_READ_PATIENCE_S", 60.0)
    monkeypatch.setattr(type(engine.scheduling._paying), "tokens_per_s", 1.0)  # noqa: SLF001 - ours
    read = engine.ask("read", LENGTH, 2, prompt="a")
    engine.settle()
    fill_memory(engine, "c")
    found = engine.scheduling.kv.lookup_nowait(engine.scheduling.naming.keys(engine.groups[0], read, 0, 6))
    assert found.by_tier == {"nvme": 6}


def test_a_step_waits_for_storage_that_is_sooner_than_computing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A first token comes after one step, which takes no longer than without us."""
    with stored_below(tmp_path) as engine:
        slow_to_compute(monkeypatch, engine)
        loads = loads_of(engine)
        two = engine.ask("two", LENGTH, 2, prompt="a")
        engine.step()
        assert (loads, two.num_computed_tokens) == ([True], LENGTH)
        engine.settle()


def test_of_several_groups_such_a_load_begins_in_the_step_that_plans_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """VLLM cannot take a part of it, so that its request waits for the end; it is no step later than it has to be."""
    with stored_below(tmp_path, groups=SHAPES["windows"]) as engine:
        slow_to_compute(monkeypatch, engine)
        loads = loads_of(engine)
        engine.ask("two", LENGTH, 2, prompt="a")
        engine.step()
        assert loads == [False]
        engine.settle()


def test_a_step_that_computes_nothing_waits_for_what_is_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment, so that the cache's event loop has the interpreter; others compute meanwhile, if there are any."""
    with stored_once(ROOMY) as engine:
        monkeypatch.setattr(VLLM.messages.Bringing, "is_over", False)
        waits, loads = list[int](), engine.scheduling._loads  # noqa: SLF001 - ours

        def wait(jobs: Sequence[object], _: float) -> bool:
            waits.append(len(jobs))
            return False

        engine.scheduling._planner.wait_planned = wait  # noqa: SLF001 - ours
        engine.ask("two", LENGTH, 1, prompt="a")
        engine.step()  # which begins to bring it
        waits.clear()
        engine.step()
        assert waits == [len(loads._bringing)] == [1]  # noqa: SLF001 - likewise
        engine.ask("computes", BLOCK_SIZE, 1)
        engine.step()
        assert waits == [1]
        engine.abort("two")
        engine.settle()


def test_steps_wait_once_for_storage_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it took before says nothing then; a moment later one step tries again."""
    with stored_below(tmp_path) as engine:
        slow_to_compute(monkeypatch, engine)
        monkeypatch.setattr(VLLM.messages.Bringing, "is_over", False)
        monkeypatch.setattr(VLLM.loading, "_PATIENCE_S", 0.0)  # and not for memory
        engine.step()
        looked, waits = Looked(engine), list[float]()

        def wait(*_: object) -> bool:
            waits.append(looked.now)
            return False

        engine.scheduling._planner.wait_planned = wait  # noqa: SLF001 - ours
        keys = engine.scheduling.naming.keys(engine.groups[0], engine.ask("a", LENGTH, 1, prompt="a"), 0, 6)
        engine.abort("a")
        for now in (0.0, 0.1, 1.5):
            looked.now = now
            engine.scheduling.kv.evict(keys, tier="cpu")  # to which it has come meanwhile, or not
            engine.ask(f"at {now}", LENGTH, 1, prompt="a")
            engine.step()
            engine.abort(f"at {now}")
        assert waits == [0.0, 1.5]


def test_steps_wait_again_once_storage_that_was_late_has_answered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One read that takes longer than the others costs no later request a step."""
    with stored_below(tmp_path) as engine:
        slow_to_compute(monkeypatch, engine)
        looked, planner = Looked(engine), engine.scheduling._planner  # noqa: SLF001 - ours
        wait, waits = planner.wait_planned, list[str]()

        def wait_in_vain(*_: object) -> bool:
            waits.append("in vain")
            return False

        planner.wait_planned = wait_in_vain
        engine.ask("late", LENGTH, 1, prompt="a")
        with nothing_planned(engine):
            engine.step()
            engine.ask("beside", LENGTH, 1, prompt="a")
            engine.step()
            planner.wait_planned = wait
        engine.settle()
        assert (waits, looked.now) == (["in vain"], 0.0)
        fill_memory(engine, "d")
        loads = loads_of(engine)
        engine.ask("next", LENGTH, 1, prompt="a")
        engine.step()
        assert loads == [True]
        engine.settle()


@pytest.mark.parametrize(
    ("why", "num_lost"), [("given up", 0), ("late", 6), ("other weights", 0), ("not asked for", 6)]
)
def test_what_is_brought_in_vain_is_let_go(monkeypatch: pytest.MonkeyPatch, why: str, num_lost: int) -> None:
    """Its request ends, or computes it; its slots are others' again."""
    monkeypatch.setattr(VLLM.messages.Bringing, "is_over", False)
    with stored_once(ROOMY) as engine:
        looked, loads = Looked(engine), engine.scheduling._loads  # noqa: SLF001 - ours
        two = engine.ask("two", LENGTH, 2, prompt="a")
        engine.step()
        (bringing,) = loads._bringing.values()  # noqa: SLF001 - ours
        engine.scheduling.counts.take()
        if why == "given up":
            engine.abort("two")
        elif why == "other weights":
            engine.scheduling.forget()
        else:
            looked.now = 60.0
            engine.waiting = deque([two] if why == "late" else [])
            engine.step()
        assert (engine.scheduling.num_bringing, bringing.jobs[0].plan.moves) == (0, ())
        said = engine.scheduling.counts.take()
        assert (said.data.get("load_blocks_lost", 0) if said is not None else 0) == num_lost
        assert two.num_computed_tokens == (LENGTH if why == "late" else 0)
        engine.settle()


def test_what_memory_has_no_room_for_is_computed() -> None:
    """As much of a prompt is loaded as could be brought, and counted; the rest is not looked for again."""
    with stored_once(ROOMY) as engine:
        planner = engine.scheduling._planner  # noqa: SLF001 - ours
        plan_load = planner.plan_load
        planner.plan_load = lambda keys: plan_load(keys[:4])
        engine.scheduling.counts.take()
        loads = loads_of(engine)
        two = engine.ask("two", LENGTH, 2, prompt="a")
        engine.step()
        assert (loads, two.num_computed_tokens) == ([True], LENGTH)
        said = engine.scheduling.counts.take().data
        assert (said["load_blocks"], said["load_blocks_lost"]) == (4, 2)
        assert not engine.scheduling._tracked["two"].may_load  # noqa: SLF001 - ours
        engine.settle()


def test_what_is_much_goes_on_beside_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is copied once memory has it; until then its request has no blocks, and then it waits alone."""
    monkeypatch.setattr(VLLM.loading, "_FIRST_BYTES", 6)
    with stored_once(ROOMY) as engine:
        loads, num_free = loads_of(engine), engine.num_free
        two = engine.ask("two", LENGTH, 2, prompt="a")
        with nothing_planned(engine):
            engine.step(2)
            assert (loads, engine.num_free) == ([], num_free)
        engine.step()
        assert (loads, two.num_computed_tokens, engine.num_free) == ([False], 6 * BLOCK_SIZE, num_free - 6)
        engine.settle()


def test_a_load_beside_begins_before_the_step_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the end of that step it can be over: vLLM itself would have it begin then."""
    monkeypatch.setattr(VLLM.loading, "_FIRST_BYTES", 6)
    with stored_once(ROOMY) as engine:
        engine.scheduling._loads._patience_s = 0.0  # noqa: SLF001 - its plan comes with the next step
        worker, begun = engine.workers[0], list[int]()
        load_first = worker.load_first

        def look(step: object) -> None:
            begun.append(len(worker._loads))  # noqa: SLF001 - ours
            load_first(step)

        worker.load_first = look
        engine.ask("two", LENGTH, 2, prompt="a")
        engine.step()
        engine.settle_loop()
        engine.step()
        assert 1 in begun
        engine.settle()


def test_what_was_planned_for_a_request_without_blocks_is_let_go() -> None:
    """VLLM asks again in each step until it has blocks: its slots are not held, nor is it planned each time."""
    with stored_once(ROOMY, num_blocks=8) as engine:
        engine.ask("long", 5 * BLOCK_SIZE, 2 * BLOCK_SIZE)
        engine.step()
        planned, loads = list[object](), loads_of(engine)
        plan_load = engine.scheduling._planner.plan_load  # noqa: SLF001 - ours

        def noted(*keys: object) -> object:
            planned.append(plan_load(*keys))
            return planned[-1]

        engine.scheduling._planner.plan_load = noted  # noqa: SLF001 - ours
        engine.ask("two", LENGTH, 2, prompt="a")
        engine.step(4)
        assert (len(planned), engine.scheduling._loads._bringing) == (1, {})  # noqa: SLF001 - ours
        assert planned[0].plan.moves == ()  # type: ignore[attr-defined]
        engine.settle()
        assert loads == [False]


class Looked:
    """Counts what the scheduler's side asks the cache, and has no time go by but by ``now``."""

    def __init__(self, engine: SmallVLLM) -> None:
        self.count, self.now = 0, 0.0
        engine.scheduling._loads._clock = lambda: self.now  # noqa: SLF001 - ours
        kv = engine.scheduling.kv
        for name in ("membership", "lookup_nowait"):
            setattr(kv, name, self._counted(getattr(kv, name)))

    def _counted(self, call: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **options: object) -> object:
            self.count += 1
            return call(*args, **options)

        return counted


def test_who_waits_for_blocks_is_looked_up_now_and_then() -> None:
    """VLLM asks in each step until it has room; what has changed meanwhile is found all the same."""
    with stored_once(ROOMY, num_blocks=15) as engine:
        engine.ask("first", 8 * BLOCK_SIZE, 1, prompt="b")
        engine.settle()
        engine.settle_loop()
        engine.settle_copies()
        engine.scheduling.counts.take()
        long = engine.ask("long", 11 * BLOCK_SIZE, 6 * BLOCK_SIZE)
        two = engine.ask("two", 12 * BLOCK_SIZE, 1, prompt="b")
        looked, tracked = Looked(engine), engine.scheduling._tracked  # noqa: SLF001 - ours
        engine.step()
        assert (looked.count > 0, tracked["two"].num_found) == (True, 8 * BLOCK_SIZE)
        looked.count = 0
        engine.step(8)
        assert (looked.count, two in engine.waiting) == (0, True)
        keys = engine.scheduling.naming.keys(engine.groups[0], two, 4, 8)
        engine.scheduling.kv.evict(keys)
        looked.now = 1.0
        engine.step()
        assert tracked["two"].num_found == 4 * BLOCK_SIZE
        engine.abort(long.request_id)
        engine.settle()
        assert engine.scheduling.counts.take().data["load_blocks"] == 4


def test_of_many_that_come_at_once_a_step_looks_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others decode, and wait for each look-up; those who wait in any case are looked up in steps to come."""
    monkeypatch.setattr(VLLM.loading, "_AHEAD_S", 1e-9)  # as long as one takes
    with stored_once(ROOMY) as engine:
        looked = Looked(engine)
        for name in "bcde":
            engine.ask(name, LENGTH, 1, prompt="a")
        with nothing_planned(engine):
            for num_waiting in (1, 2, 3):
                looked.count = 0
                engine.step()
                assert (looked.count > 0, len(engine.scheduling._loads._bringing)) == (True, num_waiting)  # noqa: SLF001 - ours
        engine.scheduling.counts.take()
        engine.settle()
        assert engine.scheduling.counts.take().data["load_blocks"] == 4 * 6


def test_who_computes_at_once_is_looked_up_however_many_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of which nothing is to be had takes no time of those who wait."""
    monkeypatch.setattr(VLLM.loading, "_AHEAD_S", 1e-9)
    with stored_once(ROOMY) as engine:
        asked = [engine.ask(name, LENGTH, 2, prompt=name) for name in "bcde"]
        engine.step()
        assert [each.num_computed_tokens for each in asked] == [LENGTH] * 4
        engine.settle()


def test_what_is_on_its_way_is_found_once_it_is_there() -> None:
    """Of a request that waits, as another with its prompt, whose blocks are being copied, has taken the room."""
    with opened(ROOMY, num_blocks=13) as engine:
        copies = Copies(engine)
        long = engine.ask("long", 11 * BLOCK_SIZE, 2 * BLOCK_SIZE, prompt="a")
        Looked(engine)
        step_settled(engine, 2)
        engine.ask("two", 12 * BLOCK_SIZE, 1, prompt="a")
        tracked = engine.scheduling._tracked  # noqa: SLF001 - ours
        step_settled(engine, 2)
        assert tracked["two"].num_found == 0
        copies.end()
        step_settled(engine, 3)
        assert tracked["two"].num_found == 11 * BLOCK_SIZE
        engine.abort(long.request_id)
        engine.settle()


@pytest.mark.parametrize("what", ["cleared", "other weights"])
def test_who_is_told_again_what_is_gone_computes_it(what: str) -> None:
    """It has waited for blocks of vLLM's, and what was found for it is evicted meanwhile: nobody reads it."""
    with stored_once(ROOMY, num_blocks=8) as engine:
        long = engine.ask("long", 5 * BLOCK_SIZE, 2 * BLOCK_SIZE)
        two = engine.ask("two", LENGTH, 2, prompt="a")
        Looked(engine)
        engine.step(2)
        assert two in engine.waiting
        if what == "cleared":
            engine.scheduling.kv.clear()
        else:
            engine.scheduling.forget()
        engine.scheduling.counts.take()
        engine.abort(long.request_id)
        engine.settle()
        said = engine.scheduling.counts.take()
        assert said is None or not said.data.get("load_blocks")


def test_what_a_first_load_lacks_is_computed() -> None:
    """The step has computed with it: that counts for nothing, and is done again."""
    with stored_once(ROOMY) as engine:
        worker = engine.workers[0]
        worker._worker.unregister_kv_caches()  # noqa: SLF001 - so that no copy begins
        two = engine.ask("two", LENGTH, 2, prompt="a")
        engine.step()
        assert two.num_computed_tokens == 0
        worker.restore_kv_caches()
        engine.settle()


def fail_first_loads(engine: SmallVLLM) -> Callable[[], None]:
    """Have copies into vLLM fail until what is returned is called."""
    worker = engine.workers[0]
    start = worker._start  # noqa: SLF001 - ours

    def fail(plan: Any, *when: object) -> "Future[Outcomes]":  # noqa: ANN401 - likewise
        if plan.direction != "load":
            return start(plan, *when)  # type: ignore[no-any-return]
        failed: Future[Outcomes] = Future()
        failed.set_result(Outcomes(plan.job, 0, 0, "it failed"))
        return failed

    worker._start = fail  # noqa: SLF001 - likewise
    return lambda: setattr(worker, "_start", start)


@pytest.mark.parametrize("is_async", [False, True], ids=["at once", "async"])
def test_what_is_computed_with_a_first_load_that_failed_is_not_stored(*, is_async: bool) -> None:
    """Nor by the step behind it, which may be scheduled before anybody hears: who comes then loads what is right."""
    with stored_once(ROOMY, is_async=is_async, num_step_tokens=4 * BLOCK_SIZE) as engine:
        calm = fail_first_loads(engine)
        engine.ask("two", 16 * BLOCK_SIZE, 1, prompt="a")
        step_settled(engine, 10)
        assert engine.scheduling.counts.take().data["errors"] == 1
        calm()
        engine.settle()
        engine.ask("three", 16 * BLOCK_SIZE + 1, 1, prompt="a")
        engine.settle()  # which looks at what attention reads


@pytest.mark.parametrize("is_planned", [False, True], ids=["due", "planned"])
def test_what_is_not_stored_as_a_first_load_failed_is_counted(*, is_planned: bool) -> None:
    """Of whatever request, if no worker was told of it: it may have been computed with what had not come."""
    with stored_once(ROOMY) as engine:
        if not is_planned:
            engine.step(8)  # so many at least since the last plan, that the next that has something makes one
            engine.ask("before", BLOCK_SIZE + 1, 9)
            engine.step()  # which plans: others are due until the eighth behind it
            engine.settle_loop()  # so that the next step tells the workers of it
            engine.scheduling.counts.take()
        fail_first_loads(engine)
        engine.ask("lost", 4 * BLOCK_SIZE + 1, 2)
        engine.ask("two", LENGTH, 1, prompt="a")
        engine.step()
        assert engine.scheduling.counts.take().data["store_blocks_skipped"] == 4


@pytest.mark.parametrize("num_steps", range(4))
@pytest.mark.parametrize("is_async", [False, True], ids=["at once", "async"])
def test_what_goes_on_is_stored_though_a_first_load_failed(*, is_async: bool, num_steps: int) -> None:
    """All of it, whether it was due, planned or being copied then; and what was computed anew."""
    with stored_once(ROOMY, is_async=is_async) as engine:
        requests = [engine.ask("before", 4 * BLOCK_SIZE + 1, 40)]
        engine.step(num_steps)
        calm = fail_first_loads(engine)
        requests.append(engine.ask("two", LENGTH, 40, prompt="a"))
        engine.step(2)
        calm()
        engine.settle_copies()  # none lasts until its request has ended, however slow the machine
        engine.settle()
        engine.settle_copies()
        engine.settle_loop()
        assert engine.scheduling.counts.take().data["errors"] == 1
        for request in requests:
            assert found(engine, request) == (request.num_tokens - 1) // BLOCK_SIZE


def test_what_is_passed_over_is_stored_again_however_long_its_copy_takes() -> None:
    """A plan that is made while the copy runs leaves out what it is bringing, which comes to nothing."""
    with stored_once(ROOMY) as engine:
        copies = Copies(engine)
        before = engine.ask("before", 4 * BLOCK_SIZE + 1, 24)
        while not copies.num_held:
            step_settled(engine, 1)
        calm = fail_first_loads(engine)
        engine.ask("two", LENGTH, 1, prompt="a")
        step_settled(engine, 12)
        calm()
        assert before in engine.running
        copies.end()
        engine.settle()
        engine.settle_copies()
        engine.settle_loop()
        assert found(engine, before) == (before.num_tokens - 1) // BLOCK_SIZE


def test_what_goes_on_is_stored_when_vllm_drops_it_though_a_first_load_failed() -> None:
    """What it had computed before, too."""
    with stored_once(ROOMY, store_when="evicted", has_cache=True, num_blocks=40) as engine:
        for prompt in "bcde":
            serve(engine, prompt, 16)
        before = engine.ask("before", 4 * BLOCK_SIZE + 1, 8)
        engine.step()
        calm = fail_first_loads(engine)
        engine.ask("two", LENGTH, 1, prompt="a")
        engine.step()
        assert engine.scheduling.counts.take().data["errors"] == 1
        calm()
        while engine.running or engine.waiting:
            step_settled(engine, 1)
            engine.settle_copies()  # none is late, however slow the machine
        for prompt in "fghi":
            serve(engine, prompt, 16)
        assert found(engine, before) == (before.num_tokens - 1) // BLOCK_SIZE


def test_what_was_computed_with_a_first_load_that_failed_is_not_stored_when_vllm_drops_it() -> None:
    """Its request has ended before it was computed anew."""
    with stored_once(ROOMY, store_when="evicted", has_cache=True, num_blocks=40) as engine:
        for prompt in "bcde":
            serve(engine, prompt, 16)
        calm = fail_first_loads(engine)
        engine.ask("two", 16 * BLOCK_SIZE, 1, prompt="a")
        engine.step()
        assert engine.scheduling.counts.take().data["errors"] == 1
        engine.abort("two")
        calm()
        for prompt in "fghi":
            serve(engine, prompt, 16)
        engine.ask("three", 16 * BLOCK_SIZE + 1, 1, prompt="a")
        engine.settle()  # as above


def test_who_computes_as_its_first_load_failed_holds_nothing_that_was_brought_since() -> None:
    """It was preempted, and asked again, before anybody heard of that: vLLM resets its cache so."""
    with stored_once(ROOMY, is_async=True) as engine:
        calm, looked = fail_first_loads(engine), Looked(engine)
        engine.ask("two", LENGTH, 20, prompt="a")
        engine.step()
        engine.preempt("two")
        looked.now = 1.0
        with nothing_planned(engine):
            engine.step()
        assert list(engine.scheduling._loads._bringing) == ["two"]  # noqa: SLF001 - ours
        engine.step()
        assert [each.request_id for each in engine.running] == ["two"]
        assert not engine.scheduling._loads._bringing  # noqa: SLF001 - ours
        calm()
        engine.settle()


@pytest.mark.parametrize("shape", [None, "windows"])
def test_a_load_that_is_lost_with_its_server_before_it_fails_has_failed(tmp_path: Path, shape: str | None) -> None:
    """The workers say so once its job has ended: it is loaded no more, though it is there, and computed, and stored."""
    wanted = {"is_async": True, "groups": SHAPES[shape] if shape else ()}
    with serving(tmp_path, ROOMY), opened(connect=f"unix://{tmp_path / 'kv.sock'}", **wanted) as engine:
        keep_first(engine)
        loads, copies = loads_of(engine), Copies(engine, "load")
        two = engine.ask("two", LENGTH, 2, prompt="a")
        while not copies.num_held:
            step_settled(engine, 1)
        fall_silent(engine)
        engine.step()  # which hears that the job has ended
        hear_again(engine)
        if shape is None:
            engine.scheduling.kv.clear()
        copies.fail()
        engine.settle()
        engine.settle_copies()
        engine.step(2)
        engine.scheduling.kv.flush()
        assert loads == [False]
        assert found(engine, two) == 6


def test_a_first_load_is_waited_for_before_its_step_ends() -> None:
    """A device's copy may end, or fail, behind the call that began it: a step later the tokens would have been told."""

    class Late(Future[Outcomes]):
        def done(self) -> bool:
            return False

        def result(self, timeout: float | None = None) -> Outcomes:
            del timeout
            return Outcomes(0, 0, 1, "it failed late")

    with opened(ROOMY) as engine:
        worker = engine.workers[0]
        worker._first.append(("one", (3, 4), None, Late()))  # noqa: SLF001 - ours
        worker.ended()
        assert worker.take_lost() == {4}


def test_a_shared_tier_that_answers_soon_is_heard_by_the_step_that_asks() -> None:
    """Its request is computed in that step, as if nobody had been asked."""
    shared = {"medium": "memory", "capacity": "8MiB"}
    with opened(ROOMY, shared) as engine:
        engine.ask("one", LENGTH, 1)
        engine.step()
        assert not engine.waiting
        engine.settle()


def test_a_step_listens_to_no_tier_that_answers_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs costs the first request's step its patience, and no other's."""
    far = {"medium": "tests.integrations.test_vllm_paying:FarAway", "capacity": "8MiB"}
    with opened(ROOMY, far, lookup_timeout_s=0.001) as engine:
        monkeypatch.setattr(VLLM.loading, "_PATIENCE_S", 0.1)
        engine.scheduling._loads.begin_step()  # noqa: SLF001 - ours
        listened = Counted(monkeypatch, VLLM.loading.PendingLoads, "_listen")
        for number in range(16):
            engine.ask(str(number), LENGTH + number, 1)
            engine.settle()
            until_it_answers_later_than(0.1, "FarAway", engine)
        assert listened.count == 1


def test_what_comes_back_is_heard_of_though_few_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where for long nothing was found few requests ask; once one of them has found its own all do again."""
    shared = {"medium": "memory", "capacity": "8MiB"}
    with opened(SMALL, shared) as engine:
        paying = engine.scheduling._paying  # noqa: SLF001 - ours
        monkeypatch.setattr(type(paying), "tokens_per_s", 100.0)
        monkeypatch.setattr(paying, "_clock", count().__next__)  # so that what tiers cost is asked for each time
        asked, asks = list[bool](), paying.asks

        def note(num_tokens: int) -> bool:
            asked.append(asks(num_tokens))
            return asked[-1]

        monkeypatch.setattr(paying, "asks", note)

        def serve(prompt: str) -> None:
            engine.ask(f"{prompt} {next(numbers)}", LENGTH, 1, prompt=prompt)
            engine.settle()
            engine.settle_loop()
            engine.scheduling.kv.flush()

        numbers = count()
        for number in range(96):
            serve(str(number))
        assert (asked[0], sum(asked[-32:])) == (True, 2)
        for number in range(32):
            serve(str(number))
        assert sum(asked[-32:]) >= 16
        assert all(asked[-4:])
        assert engine.scheduling.counts.take().data["load_requests"] >= 4


def test_shared_tiers_are_asked_when_a_request_comes_and_not_when_it_has_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What they say while it is in the queue is there by then: no step listens to them, and no request waits."""
    shared = {"medium": "memory", "capacity": "8MiB"}
    with opened(SMALL, shared) as engine:
        listened = Counted(monkeypatch, VLLM.loading.PendingLoads, "_listen")
        (tier,) = inside(engine.scheduling.kv.cache).chains[0].shared
        for number in range(24):
            request = engine.ask(f"request {number}", LENGTH, 1, prompt=f"prompt {number % 12}")
            engine.settle_loop()
            while tier.answers._asked:  # noqa: SLF001 - ours
                engine.settle_loop()
            engine.step()
            assert not engine.waiting or request.request_id in engine.scheduling._loads._bringing  # noqa: SLF001 - ours
            engine.settle()
            engine.settle_copies()
            engine.scheduling.kv.flush()
        assert not listened.count
        assert engine.scheduling.counts.take().data["load_requests"] >= 12
