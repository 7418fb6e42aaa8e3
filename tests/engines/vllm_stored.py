"""What is stored of requests that a `vllm_without_model` has served: each block holds what it is named by, or not."""

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_without_model import Engine


def look_at_stored(engine: "Engine", start: Any) -> tuple[int, list[str]]:
    """Load all that is stored, and return how many blocks that are, and what is wrong with which.

    A request that loads sees only what it needs: of what nobody has asked for again a fault would not be noticed.

    Args:
        engine: That has nothing left to do: its blocks are overwritten.
        start: Begins a worker's copy.
    """
    from tiered_kv import GPULoadStoreSpec  # noqa: PLC0415 - takes seconds, and the environment is set first

    side = engine.scheduling
    side.kv.flush()
    num_blocks, wrong, seen = 0, list[str](), set[tuple[bytes, bytes, int]]()
    for name, request in engine.asked.items():
        for group, keys, end in _stored(side, request):
            if (told := (keys.digests, keys.salt_id, group.number)) in seen:
                continue
            seen.add(told)
            job = side._planner.plan_load(keys, GPULoadStoreSpec(range(1, len(keys) + 1), group.number))  # noqa: SLF001 - ours
            side._planner.wait_planned([job], 10.0)  # noqa: SLF001 - ours
            if job.plan is None:
                continue  # it has been dropped
            outcomes = start(job.plan, None).result()
            side._planner.complete(outcomes)  # noqa: SLF001 - ours
            num_blocks += outcomes.num_moved
            for at in range(outcomes.num_moved):
                for layer in group.layer_names:
                    if not engine.holds(layer, group.table, 1 + at, request, keys.start + at, end):
                        wrong.append(f"block {keys.start + at} of {name}, to token {end}, {layer}")
    return num_blocks, wrong


def _stored(side: Any, request: Any) -> Iterator[tuple[Any, Any, int | None]]:
    """Yield runs of a request's blocks that are stored, and blocks of which a prefix that ends inside is."""
    from tiered_kv import BlockState  # noqa: PLC0415 - as above

    wanted, naming, kv = side._configuration, side.naming, side.kv  # noqa: SLF001 - ours
    main, tail = wanted.groups[0], wanted.tail_tokens
    num_tokens = len(request.block_hashes) * (main.block_size // main.hashes_per_block)
    most = wanted.num_engine_blocks - 1
    for group in wanted.groups:
        keys = naming.keys(group, request, 0, num_tokens // group.block_size)
        are_there = (kv.membership(keys) == BlockState.HIT).tolist()
        for (_, is_there), run in groupby(enumerate(are_there), lambda each: (each[0] // most, each[1])):
            if is_there:
                numbers = [number for number, _ in run]
                yield group, keys[numbers[0] : numbers[-1] + 1], None
        for end in range(tail, num_tokens + 1, tail) if tail else ():
            number = end // group.block_size
            keys = naming.keys(group, request, number, number + 1, end=end)
            if end % group.block_size and kv.membership(keys)[0] == BlockState.HIT:
                yield group, keys, end
