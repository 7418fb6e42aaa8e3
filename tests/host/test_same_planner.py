"""The promises of a planner, kept by a client of a server as by a cache of one's own: the same tests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.cache import test_binding, test_jobs, test_plans
from tests.support.any_layout import AnyEngine
from tests.support.caches import AnyTier, until
from tests.support.planned import CPU, KEYS, N
from tests.support.serving import attached, serving
from tiered_kv import ConnectedKV, Shard

SAME = {
    test_binding: ("test_no_block_of_the_engine_is_planned_for_two_keys",),
    test_plans: (
        "test_a_round_trip_through_two_ranks",
        "test_what_one_rank_has_not_copied_is_readable_on_none",
        "test_fewer_than_none_moved_is_none",
        "test_one_store_holds_blocks_of_several_prompts",
        "test_what_is_answered_for_one_salt_is_not_of_another",
        "test_several_prompts_that_cannot_be_stored_together",
        "test_a_plan_holds_what_it_names",
        "test_what_is_being_copied_out_is_loaded_from_where_it_is",
        "test_a_plan_is_executed_once",
        "test_a_planned_load_names_what_a_tier_has_lost",
        "test_a_load_overtaken_by_new_weights_brings_nothing",
        "test_what_cannot_be_waited_for_uses_up_no_job",
        "test_an_execution_cannot_be_cancelled",
        "test_outcomes_that_say_nothing_leave_the_job_as_it_was",
    ),
    test_jobs: (
        "test_a_closed_planner_ends_what_no_worker_has_the_plan_of",
        "test_a_closed_planner_says_so",
        "test_a_flush_waits_for_no_worker_of_a_closed_planner",
        "test_a_planned_store_of_who_drains_is_dropped_for_that",
        "test_what_was_planned_before_it_is_removed_never_becomes_readable",
        "test_after_a_cancellation_nobody_is_handed_what_was_to_be_moved",
        "test_a_plan_is_handed_out_or_its_job_is_cancelled",
        "test_the_plan_of_a_cancelled_job_is_not_polled",
        "test_a_scheduler_without_an_event_loop",
        "test_a_job_is_awaited_on_the_loop_of_its_cache",
    ),
}
"""Those that need to see nothing but the face."""


async def until_idle(kv: ConnectedKV) -> None:
    """Wait until the server holds nothing for anyone."""
    await until(lambda: not any(tier.leased or tier.pending for tier in kv.stats().tiers))


@pytest.fixture(autouse=True)
def far(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have these tests open a client of a server where they would open a cache."""

    @asynccontextmanager
    async def open_far(
        engine: AnyEngine, *tiers: AnyTier, shard: Shard | tuple[Shard, ...] | None = None
    ) -> AsyncIterator[ConnectedKV]:
        with serving(tmp_path_factory.mktemp("served"), *tiers) as server:  # type: ignore[arg-type]  # settings, here
            is_one = not isinstance(shard, tuple)
            async with attached(server, engine if is_one else None, shard=shard) as kv:
                yield kv

    for module in SAME:
        monkeypatch.setattr(module, "open_any", open_far)
        monkeypatch.setattr(module, "until_idle", until_idle)


async def test_whoever_awaits_a_job_and_is_cancelled_leaves_it_to_others(tmp_path: Path) -> None:
    """Even at the moment when it has an answer: somebody is told of it."""
    engine = AnyEngine()
    with serving(tmp_path, CPU) as server:
        async with attached(server, engine) as kv:
            planner = kv.planner()
            planner.register_worker()
            job = planner.plan_store(KEYS, engine.spec(range(N)))
            await test_jobs.cancel_at_the_answer(planner, job, asyncio.create_task(job.planned()))
            await until_idle(kv)


for _module, _names in SAME.items():
    for _name in _names:
        globals()[_name] = getattr(_module, _name)
