"""What the connector for vLLM stores, and when: imitated, step by step. A real vLLM is in `tests/engines`."""

import asyncio
import random
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_vllm import BLOCK_SIZE, STRIDE, VLLM, Request, SmallVLLM, small_vllm
from tiered_kv import BlockKeys, BlockState, Outcomes

ROOMY = {"medium": "cpu", "capacity": 1024 * STRIDE}
opened = contextmanager(small_vllm)


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


def test_stores_of_many_requests_are_one_job_in_eight_steps() -> None:
    """However many requests fill blocks, and whoever's they are: what some steps fill goes together, and all goes."""
    with opened(ROOMY) as engine:
        for number in range(12):  # of which three fill a block in each step
            engine.ask(f"r{number}", 1 + number, 64, salt=f"tenant {number % 3}")
        engine.step(64)
        assert sum(engine.orders) <= 64 // VLLM.storing.MOST_STEPS
        engine.settle()
        engine.settle_loop()
        assert stored(engine) == sum((1 + number + 63) // BLOCK_SIZE for number in range(12))


def test_many_blocks_do_not_wait() -> None:
    """A long prompt is stored by the step after the one that computed it."""
    with opened(ROOMY) as engine:
        engine.ask("first", 3 * BLOCK_SIZE, 64)
        engine.step(2)
        engine.ask("long", VLLM.storing.MOST_DUE * BLOCK_SIZE, 64)
        engine.step()
        engine.settle_loop()
        engine.step()
        assert engine.orders[-1] == 1


@pytest.mark.parametrize("storage", [False, True], ids=["memory", "storage too"])
def test_a_step_costs_the_event_loop_two_turns_at_most(tmp_path: Path, *, storage: bool) -> None:
    """In the middle of many steps of many requests, of which some fill a block in each."""
    below = [{"medium": "nvme", "path": tmp_path, "capacity": "8MiB"}] if storage else []
    with opened(ROOMY, *below) as engine:
        for number in range(12):
            engine.ask(f"r{number}", 1 + number, 200, salt=f"tenant {number % 3}")
        engine.step(8)
        turns = Turns(engine)
        engine.step(160)
        engine.settle_loop()
        assert turns.count <= 2 * 160


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


def test_blocks_of_a_request_that_has_ended_are_kept_until_they_are_copied() -> None:
    """Meanwhile vLLM is told that they will be free soon, and so preempts nobody; then they are free."""
    with opened(ROOMY, num_blocks=8) as engine:
        engine.ask("short", 3 * BLOCK_SIZE, 9)
        engine.ask("long", BLOCK_SIZE, 28)  # needs a fourth block when the other one, which has five, has just ended
        engine.step(9)
        assert engine.num_free == 0
        assert engine.scheduling.frees_soon
        engine.settle()
        assert not engine.scheduling.frees_soon
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
        assert not engine.scheduling.frees_soon


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

        def start_short(plan: Any, after: object) -> Any:  # noqa: ANN401 - likewise
            ended = start(plan, after)
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


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_bytes_are_right_and_nothing_is_held(seed: int, tmp_path: Path) -> None:
    """Requests of several tenants come, end, are preempted and aborted at any step, in caches with room and without."""
    chance = random.Random(seed)
    below = [{"medium": "nvme", "path": tmp_path, "capacity": "8MiB"}] if seed % 3 == 0 else []
    cpu = {"medium": "cpu", "capacity": chance.choice([16, 64, 1024]) * STRIDE * (1 + seed % 2)}
    with opened(
        cpu, *below, num_ranks=1 + seed % 2, is_async=seed % 4 > 1, num_blocks=chance.choice([24, 200])
    ) as engine:
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
