"""A real vLLM, step by step, whose requests are ended, preempted and stalled at each step: ``vllm_steps.py JSON``.

Runs in vLLM's environment, in one process. The JSON is that of `vllm_generate`, and ``way``, which of the ways below.
"""

import asyncio
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from vllm_generate import ONE_PROCESS, QUIET, Wanted, engine_arguments, prompt


class Stepped:
    """An engine that steps when it is told to.

    Attributes:
        engine: vLLM's.
        tokens: What each request has generated, by name.
        scheduler: vLLM's.
        scheduling: The scheduler's side of our connector.
    """

    def __init__(self, wanted: Wanted) -> None:
        from vllm import LLM  # noqa: PLC0415 - takes seconds, and the environment is set first

        self.tokens: dict[str, list[int]] = {}
        self._wanted = wanted
        self.engine: Any = LLM(**engine_arguments(wanted)).llm_engine
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler
        self.scheduling: Any = self.scheduler.connector._in_scheduler()  # noqa: SLF001 - there is no other way
        self._pool = self.scheduler.kv_cache_manager.block_pool
        self._num_free = self._pool.get_num_free_blocks()
        self._names = itertools.count()

    def ask(self, number: int, num_tokens: int | None = None, *, length: int | None = None, priority: int = 0) -> str:
        """Add a request for a prompt; return its name."""
        from vllm import SamplingParams  # noqa: PLC0415 - as above

        name = f"r{next(self._names)}"
        sampling = SamplingParams(
            temperature=0.0, max_tokens=num_tokens or self._wanted.num_tokens, ignore_eos=True, detokenize=False
        )
        tokens = {"prompt_token_ids": prompt(number, length or self._wanted.length)}
        self.engine.add_request(name, tokens, sampling, priority=priority)
        return name

    def step(self, count: int = 1) -> None:
        """Do so many steps of the engine."""
        for _ in range(count):
            for answer in self.engine.step():
                if answer.finished:
                    self.tokens[answer.request_id] = list(answer.outputs[0].token_ids)

    def abort(self, *names: str) -> None:
        """End requests, as a client that goes away does."""
        self.engine.abort_request(list(names))

    def settle(self) -> None:
        """Step until nothing is left to do."""
        while self.scheduler.has_requests():
            self.step()

    def answer(self, *numbers: int) -> list[list[int]]:
        """Return what is generated for prompts."""
        names = [self.ask(number) for number in numbers]
        self.settle()
        return [self.tokens[name] for name in names]

    def left(self) -> dict[str, int]:
        """Say what is held when nothing is left to do: nothing."""
        side = self.scheduling
        storing = side._storing  # noqa: SLF001 - ours
        while (side.num_bringing or storing.num_held) and side._hear_of_jobs(10):  # noqa: SLF001 - else by the next step
            pass
        num_tracked = len(side._tracked)  # noqa: SLF001 - ours
        kept = {"tracked": num_tracked, "loads": side.num_bringing, "stores": storing.num_held}
        self.scheduler.reset_prefix_cache()
        return {
            **{name: count for name, count in kept.items() if count},
            **({"blocks": held} if (held := self._num_free - self._pool.get_num_free_blocks()) else {}),
        }


def aborted(engine: Stepped, wanted: Wanted) -> Any:
    """Requests end after each number of steps: before their look-up, while they load, compute, and store."""
    engine.answer(*wanted.prompts)
    for cold, count in itertools.product((True, False), range(wanted.rounds)):
        engine.scheduler.reset_prefix_cache()
        names = [engine.ask(number + 100 * (count + 1) if cold else number) for number in wanted.prompts]
        engine.step(count)
        engine.abort(*names)
        if count % 2:
            engine.settle()
    engine.settle()
    return {"tokens": engine.answer(*wanted.prompts), "left": engine.left()}


def preempted(engine: Stepped, wanted: Wanted) -> Any:
    """All requests are preempted after each number of steps, and go on; then what they have stored is loaded."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415 - takes seconds

    moving: Any = get_kv_transfer_group()._moving  # noqa: SLF001 - ours
    started: list[bool] = []
    flushed: list[int] = []
    start, before_computing = moving._start, moving.before_computing  # noqa: SLF001 - as above

    def start_noted(plan: Any, after: object, ahead_of: object = None) -> Any:
        started.append(plan is None or after is not None)
        return start(plan, None, ahead_of)

    def before_computing_noted(step: Any) -> None:
        flushed.append(len(step.flushes))
        before_computing(step)

    moving._start, moving.before_computing = start_noted, before_computing_noted  # noqa: SLF001 - as above
    moving._event = object  # noqa: SLF001 - as on a device that works behind its engine
    tokens = []
    for count in range(wanted.rounds):
        engine.scheduling.kv.clear()
        names = [engine.ask(number) for number in wanted.prompts]
        engine.step(count)
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.settle()
        tokens.append([engine.tokens[name] for name in names])
        engine.scheduler.reset_prefix_cache()
        tokens.append(engine.answer(*wanted.prompts))
        engine.scheduler.reset_prefix_cache()
    hits = engine.scheduling.kv.stats()["cpu"].hits
    return {
        "tokens": tokens, "left": engine.left(), "flushed": sum(flushed), "waited": all(started), "hits": hits,
    }  # fmt: skip


def kept(engine: Stepped, wanted: Wanted) -> Any:
    """A request needs a block as another ends, whose blocks are to be copied yet; then again, with vLLM not told so."""
    preempt, names = engine.scheduler._preempt_request, list[str]()  # noqa: SLF001 - there is no other way

    def preempt_noted(request: Any, *args: Any, **more: Any) -> Any:
        names.append(request.request_id)
        return preempt(request, *args, **more)

    engine.scheduler._preempt_request = preempt_noted  # noqa: SLF001 - as above
    tokens, preemptions = [], []
    for _ in range(2):
        engine.scheduling.kv.clear()
        asked = engine.ask(0, 320 - wanted.length + 1), engine.ask(1)
        engine.settle()
        tokens.append(engine.tokens[asked[1]])
        preemptions.append(len(names))
        engine.scheduler.reset_prefix_cache()
        engine.scheduler.connector.has_pending_block_frees = lambda: False
    return {"tokens": tokens, "preemptions": preemptions, "left": engine.left()}


def reset(engine: Stepped, wanted: Wanted) -> Any:
    """The cache is reset beneath running requests, and between them, after each number of steps: it never fails."""
    tokens = []
    for count in range(wanted.rounds):
        names = [engine.ask(number) for number in wanted.prompts]
        engine.step(count)
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.settle()
        tokens.append([engine.tokens[name] for name in names])
        assert engine.scheduler.reset_prefix_cache(), "blocks are held when nothing is left to do"
    return {"tokens": tokens, "left": engine.left()}


def hot(engine: Stepped, wanted: Wanted) -> Any:
    """One prompt comes again and again, always found in vLLM's own cache, between others that come once."""
    for count in range(wanted.rounds):
        engine.answer(0, 100 + count)
        engine.scheduling.kv.flush()
    has_waited = waited_for(engine.scheduling.kv.call(asyncio.get_running_loop), lambda: engine.answer(0))
    engine.scheduler.reset_prefix_cache()
    before = engine.scheduling.kv.stats().stored
    engine.ask(0)
    engine.settle()
    is_there = engine.scheduling.kv.stats().stored == before
    return {"has_waited": has_waited, "is_there": is_there, "left": engine.left()}


def waited_for(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> bool:
    """Make a call while an event loop is busy; say whether it ended only when the loop was free again."""
    is_busy, is_over, is_free, in_time = threading.Event(), threading.Event(), threading.Event(), list[bool]()

    def busy() -> None:
        is_busy.set()
        in_time.append(is_over.wait(20.0))
        is_free.set()

    loop.call_soon_threadsafe(busy)
    is_busy.wait()
    call()
    is_over.set()
    is_free.wait()
    return not in_time[0]


WAYS: dict[str, Callable[[Stepped, Wanted], Any]] = {
    each.__name__: each for each in (aborted, preempted, kept, reset, hot)
}


def main(way: str, **wanted: Any) -> None:
    """Go one of the ways and print what came of it."""
    said = Wanted(**wanted)
    print(json.dumps(WAYS[way](Stepped(said), said)))


if __name__ == "__main__":
    os.environ.update({**QUIET, **ONE_PROCESS})
    main(**json.loads(sys.argv[1]))
