"""Copies out of vLLM that begin late, as where a device has much else to do: at the latest when they are waited for."""

import random
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

MOST_STEPS: Final = 4


@dataclass(eq=False)
class _Late:
    plan: Any
    after: object
    num_steps: int
    told: "Future[Any]" = field(default_factory=Future)


class LateCopies:
    """Has the stores of a worker of vLLM's connector begin some steps after the worker was told of them."""

    def __init__(self, worker: Any, chance: random.Random) -> None:  # noqa: ANN401 - of a package beside vLLM only
        self._late: list[_Late] = []
        start, before_computing = worker._start, worker.before_computing  # noqa: SLF001 - ours
        is_waited_for = False

        def start_late(plan: Any, after: object, ahead_of: object = None) -> "Future[Any]":  # noqa: ANN401 - likewise
            may_be_late = plan is not None and plan.direction == "store" and not is_waited_for
            if num_steps := chance.randrange(MOST_STEPS) if may_be_late else 0:
                self._late.append(_Late(plan, after, num_steps))
                return self._late[-1].told
            started: Future[Any] = start(plan, after, ahead_of)
            return started

        def begin(step: Any) -> None:  # noqa: ANN401 - likewise
            nonlocal is_waited_for
            for late in list(self._late):
                late.num_steps -= 1
                if late.num_steps and worker._stores[late.told].isdisjoint(step.preempted):  # noqa: SLF001 - ours
                    continue
                self._late.remove(late)
                told = late.told.set_result
                start(late.plan, late.after).add_done_callback(lambda ended, told=told: told(ended.result()))
            is_waited_for = True
            before_computing(step)
            is_waited_for = False

        worker._start, worker.before_computing = start_late, begin  # noqa: SLF001 - ours
