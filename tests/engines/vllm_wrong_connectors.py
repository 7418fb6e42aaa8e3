"""Connectors that are wrong on purpose, by what is wrong: each is to be seen by `vllm_without_model`."""

import itertools
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vllm_without_model import Engine


def _wider(engine: "Engine", **changes: Any) -> None:
    """Have the connector's scheduler believe something else of its groups."""
    from dataclasses import replace  # noqa: PLC0415 - of faults only

    side = engine.scheduling
    groups = tuple(replace(group, **{k: v(group) for k, v in changes.items()}) for group in side._configuration.groups)  # noqa: SLF001 - ours
    wanted = replace(side._configuration, groups=groups)  # noqa: SLF001 - ours
    side._configuration = side._storing._configuration = side._loads._configuration = wanted  # noqa: SLF001 - ours


def _shift_load(engine: "Engine", by: int) -> None:
    """Load into the blocks before or behind those that are meant."""
    begin = engine.scheduling.begin
    engine.scheduling.begin = lambda request, tables, n: begin(
        request, [table[by:] + table[:by] for table in tables], n
    )


def _find_more(engine: "Engine", by: int) -> None:
    """Say that more was found."""
    find, step = engine.scheduling.find, engine.scheduling._configuration.step  # noqa: SLF001 - ours

    def more(request: Any, num_computed: int) -> Any:
        found, is_beside = find(request, num_computed)
        if found and num_computed + found + by * step < request.num_tokens:
            found += by * step
        return found, is_beside

    engine.scheduling.find = more


def _no_hold(engine: "Engine") -> None:
    """Hold no block that a request leaves behind."""

    class Pool:
        blocks = engine._pool.blocks  # noqa: SLF001 - ours
        get_num_free_blocks = engine._pool.get_num_free_blocks  # noqa: SLF001 - ours

        def touch(self, blocks: Any) -> None:
            pass

        free_blocks = touch

    engine.scheduling.use_pool(Pool())


def _never_fail(engine: "Engine") -> None:
    """Tell nobody of loads that have failed, of which each third does."""
    start, count = engine.worker._start, [0]  # noqa: SLF001 - ours

    def start_some(plan: Any, after: object, ahead_of: object = None) -> Any:
        if plan is not None and plan.direction == "load":
            count[0] += 1
            return start(None if count[0] % 3 == 0 else plan, after, ahead_of)
        return start(plan, after, ahead_of)

    engine.worker._start = start_some  # type: ignore[method-assign]  # noqa: SLF001
    engine.worker.take_failed = set  # type: ignore[method-assign]
    engine.worker.take_lost = set  # type: ignore[method-assign]


def _swap_groups(engine: "Engine") -> None:
    """Store the blocks of one group as another's."""
    storing = engine.scheduling._storing  # noqa: SLF001 - ours
    gather, groups = storing.gather, engine.scheduling._configuration.groups  # noqa: SLF001
    storing.gather = lambda tracked, group, first, ids, **end: gather(
        tracked, groups[group.number - 1], first, ids, **end
    )


def _shift_keys(engine: "Engine") -> None:
    """Name blocks by what comes behind them."""
    storing = engine.scheduling._storing  # noqa: SLF001 - ours
    gather = storing.gather
    storing.gather = lambda tracked, group, first, ids, **end: gather(tracked, group, first + 1, ids[:-1], **end)


def _state_before(engine: "Engine") -> None:
    """Store each state as that of the endpoint before."""
    storing = engine.scheduling._storing  # noqa: SLF001 - ours
    gather = storing.gather
    storing.gather = lambda tracked, group, first, ids, **end: gather(
        tracked, group, max(0, first - 1) if group.is_handed_over else first, ids, **end
    )


def _end_before(engine: "Engine") -> None:
    """Store the state inside of a block as that of a prefix that is shorter by one hash."""
    storing = engine.scheduling._storing  # noqa: SLF001 - ours
    gather, by = storing.gather, engine.scheduling._configuration.tail_tokens  # noqa: SLF001

    def gather_before(tracked: Any, group: Any, first: int, ids: list[int], *, end: int | None = None) -> None:
        gather(tracked, group, first, ids, end=end - by if end and end % group.block_size > by else end)

    storing.gather = gather_before


def _complete_hits(engine: "Engine") -> None:
    """Say that vLLM may ask behind its own attention blocks, where it has fewer states."""
    connector = engine.scheduler.connector
    claims = {"supports_divergent_local_hybrid_hits": property(lambda _: True)}
    connector.__class__ = type("Claiming", (type(connector),), claims)


def _forget_group(engine: "Engine") -> None:
    """Load nothing of the last group, as of a draft's that nobody thinks of."""
    planner = engine.scheduling._planner  # noqa: SLF001 - ours
    last = len(engine.scheduling._configuration.groups) - 1  # noqa: SLF001
    plan_load = planner.plan_load

    def plan_others(keys: Any, into: Any, **more: Any) -> Any:
        job = plan_load(keys, into, **more)
        if keys.group == last:
            forgotten.add(job.number)
        return job

    forgotten: set[int] = set()
    planner.plan_load = plan_others
    _claim_loads(engine, forgotten)


def _load_anothers(engine: "Engine") -> None:
    """Load the blocks of the request before."""
    planner, before = engine.scheduling._planner, dict[int, Any]()  # noqa: SLF001 - ours
    plan_load = planner.plan_load

    def plan_anothers(keys: Any, into: Any, **more: Any) -> Any:
        anothers, before[keys.group] = before.get(keys.group, keys), keys
        return plan_load(anothers[: len(keys)] if len(anothers) >= len(keys) else keys, into, **more)

    planner.plan_load = plan_anothers


def _keep_nothing(engine: "Engine") -> None:
    """Let go of the blocks of requests that have ended, whatever is due of them, and copy them some steps later."""
    end, storing = engine.scheduling.end, engine.scheduling._storing  # noqa: SLF001 - ours
    start, ended, waiting = engine.worker.start_stores, set[str](), list[tuple[int, Any]]()
    steps = itertools.count()

    def end_at_once(request: Any) -> bool:
        end(request)
        storing._leaving.pop(request.request_id, None)  # noqa: SLF001 - ours
        storing._kept.discard(request.request_id)  # noqa: SLF001 - ours
        ended.add(request.request_id)
        return False

    def start_late(step: Any) -> None:
        now = next(steps)
        late = [order for order in step.stores if order.request_ids and order.request_ids <= ended]
        waiting.extend((now + 4, order) for order in late)
        step.stores = [order for order in step.stores if order not in late]
        step.stores += [order for at, order in waiting if at == now]
        start(step)

    engine.scheduling.end = end_at_once
    engine.worker.start_stores = start_late  # type: ignore[method-assign]


def _flush_too_late(engine: "Engine") -> None:
    """Copy blocks of preempted requests behind the step that computes what others have there."""
    before = engine.worker.before_computing

    def begin(step: Any) -> None:
        step.stores, step.flushes = step.flushes + step.stores, []
        before(step)

    engine.worker.before_computing = begin  # type: ignore[method-assign]


def _keep_overwritten(engine: "Engine") -> None:
    """Take note of nothing that vLLM's second runner writes to before it says whose it was."""
    engine.scheduling._storing._drop = lambda *_: None  # noqa: SLF001 - ours


def _claim_loads(engine: "Engine", jobs: Container[int] = range(1 << 62)) -> None:
    """Say that loads have brought all, and copy nothing of them."""
    from concurrent.futures import Future  # noqa: PLC0415 - of faults only

    from tiered_kv import Outcomes  # noqa: PLC0415 - takes seconds, and the environment is set first

    start = engine.worker._start  # noqa: SLF001 - ours

    def claim(plan: Any, after: object, ahead_of: object = None) -> Any:
        if plan is None or plan.direction != "load" or plan.job not in jobs:
            return start(plan, after, ahead_of)
        claimed: Future[Outcomes] = Future()
        claimed.set_result(Outcomes(plan.job, 0, plan.num_blocks))
        return claimed

    engine.worker._start = claim  # type: ignore[method-assign]  # noqa: SLF001


FAULTS: Final[dict[str, Callable[["Engine"], None]]] = {
    "one window block short": lambda engine: _wider(
        engine, num_blocks=lambda g: (g.num_blocks and g.num_blocks - 1) or g.num_blocks
    ),
    "full attention as a window": lambda engine: _wider(engine, num_blocks=lambda g: g.num_blocks or 2),
    "half a chunk": lambda engine: _wider(engine, chunk_tokens=lambda g: g.chunk_tokens and g.chunk_tokens // 2),
    "one end too far": lambda engine: _find_more(engine, 1),
    "the block before": lambda engine: _shift_load(engine, -1),
    "the block behind": lambda engine: _shift_load(engine, 1),
    "nothing held": _no_hold,
    "failures untold": _never_fail,
    "groups swapped": _swap_groups,
    "keys shifted": _shift_keys,
    "tables swapped": lambda engine: _wider(engine, table=lambda _: 0),
    "the state before": _state_before,
    "the end before": _end_before,
    "a group forgotten": _forget_group,
    "a draft forgotten": _forget_group,
    "an indexer forgotten": _forget_group,
    "another's blocks": _load_anothers,
    "nothing kept": _keep_nothing,
    "flushed too late": _flush_too_late,
    "loads claimed": _claim_loads,
    "the overwritten kept": _keep_overwritten,
    "hits completed": _complete_hits,
    "room for all": lambda engine: engine.scheduling._room.use_pool(None),  # noqa: SLF001 - ours
}
