"""Serve a trace's requests from a vLLM with a small cache, over a small CPU tier: ``vllm_replayed.py JSON...``.

Runs in vLLM's environment, one run after the other; each JSON is that of an `Asked`, and the answer is a list. What is
counted is what ``tiered-kv replay --engine-cache`` foretells: of the blocks asked for, those that vLLM's own prefix
cache had, and those that came from the tier. vLLM is the real one, or the one without a model, where a block of wrong
bytes is seen; its scheduler, pool and prefix cache are real either way.

A block of the trace becomes a small one of vLLM's, of tokens that its id tells. A prompt has one token more, as vLLM
computes a prompt's last one in any case: else nobody would have the last block of a prompt that comes again.
"""

import asyncio
import hashlib
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from tiered_kv.traces import Request, open_trace
from vllm_generate import ONE_PROCESS, QUIET, Wanted, engine_arguments
from vllm_without_model import Engine
from vllm_without_model import Wanted as WithoutModel

NOBODYS: Final = 2
"""Blocks of vLLM's that have nothing of the trace: its empty one, and one for a prompt's last token."""

_NUM_TURNS: Final = 8
"""Of the event loop, in which whatever it was asked for in a step is begun."""


@dataclass(frozen=True)
class Asked:
    """What to run.

    Attributes:
        model: A checkpoint.
        trace: As `open_trace` reads it.
        engine_blocks: How many of the trace's blocks vLLM's own cache holds, beside one for each request at a time.
        transfer: For the connector; None for vLLM alone, which must be real.
        at_once: Requests that it has at a time; the next one comes when one has ended.
        is_real: Whether there is a model.
        num_tokens: To generate for each request.
        engine: More arguments of the engine.
    """

    model: str
    trace: str
    engine_blocks: int
    transfer: dict[str, Any] | None = None
    at_once: int = 1
    is_real: bool = False
    num_tokens: int = 1
    engine: dict[str, Any] = field(default_factory=dict)

    @property
    def block_size(self) -> int:
        """Tokens of a block of vLLM's, which on a CPU come by 32."""
        return 32 if self.is_real else 16


class WithModel:
    """A real vLLM in this process: `vllm_without_model.Engine`, as far as it is used here."""

    def __init__(self, wanted: Wanted) -> None:
        from vllm import LLM  # noqa: PLC0415 - takes seconds, and the environment is set first

        self.tokens: dict[str, list[int]] = {}
        self._engine: Any = LLM(**engine_arguments(wanted)).llm_engine
        self.scheduler: Any = self._engine.engine_core.engine_core.scheduler

    def ask(self, tokens: list[int], num_wanted: int, _salt: str | None) -> str:
        """Add a request."""
        from vllm import SamplingParams  # noqa: PLC0415 - as above

        name = f"r{len(self.tokens)}"
        self.tokens[name] = []
        sampling = SamplingParams(temperature=0.0, max_tokens=num_wanted, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
        return name

    def step(self) -> None:
        """Do one."""
        for each in self._engine.step():
            self.tokens[each.request_id] = list(each.outputs[0].token_ids)


def serve(asked: Asked) -> dict[str, Any]:
    """Serve all requests; say what was had of them, in blocks, and what was generated."""
    trace = open_trace(asked.trace)
    engine = _engine(asked, max(len(request.ids) for request in trace.requests))
    counted = _count(engine.scheduler)
    alive: list[str] = []
    for request in trace.requests:
        while len(alive) >= asked.at_once:
            step(engine, asked)
            alive = [name for name in alive if name in engine.scheduler.requests]
        alive.append(engine.ask(_prompt(request, asked.block_size), asked.num_tokens, None))
    while engine.scheduler.has_requests():
        step(engine, asked)
    return {
        "here": counted["here"] // asked.block_size,
        "loaded": int(counted["loaded_tokens"]) // asked.block_size,
        "counted": counted,
        "wrong": getattr(engine, "wrong", [])[:3],
        "tokens": hashlib.sha256(repr(sorted(getattr(engine, "tokens", {}).items())).encode()).hexdigest(),
    }


def step(engine: Any, asked: Asked) -> None:
    """Do one. One without a model takes no time: so the event loop is waited for, which has time beside others."""
    engine.step()
    if not asked.is_real:
        engine.scheduling.kv.call(_turns)


async def _turns() -> None:
    for _ in range(_NUM_TURNS):
        await asyncio.sleep(0)


def _engine(asked: Asked, most_blocks: int) -> Any:
    num_blocks = asked.engine_blocks + NOBODYS - 1 + asked.at_once
    most_tokens = (most_blocks + 1) * asked.block_size + asked.num_tokens
    more = {"max_model_len": most_tokens, "max_num_batched_tokens": 8 * asked.block_size} | asked.engine
    if not asked.is_real:
        return Engine(WithoutModel(asked.model, asked.transfer or {}, "full", num_blocks=num_blocks, engine=more))
    sizes = {"num_gpu_blocks_override": num_blocks, "block_size": asked.block_size, "async_scheduling": False}
    return WithModel(Wanted(asked.model, asked.transfer, engine=sizes | more))


def _count(scheduler: Any) -> "Counter[str]":
    """Count from now on what vLLM's cache had of prompts, in tokens, and all that our connector counts."""
    counted: Counter[str] = Counter()
    update = scheduler.update_from_output

    def updated(*arguments: Any) -> Any:
        outputs = update(*arguments)
        for each in outputs.values():
            stats = [one.prefill_stats for one in each.outputs if one.prefill_stats is not None]
            counted["here"] += sum(one.num_local_cached_tokens for one in stats)
        return outputs

    scheduler.update_from_output = updated
    if scheduler.connector is not None:
        counts = scheduler.connector._in_scheduler().counts  # noqa: SLF001 - there is no other way
        take = counts.take

        def taken() -> Any:
            if (stats := take()) is not None:
                counted.update(stats.data)
            return stats

        counts.take = taken
    return counted


def _prompt(request: Request, block_size: int) -> list[int]:
    return [token for block in request.ids.tolist() for token in _tokens(block, block_size)] + [3]


@cache
def _tokens(block: int, block_size: int) -> list[int]:
    return [3 + byte for byte in hashlib.blake2b(str(block).encode(), digest_size=block_size).digest()]


if __name__ == "__main__":
    os.environ.update({**QUIET, **ONE_PROCESS})
    print(json.dumps([serve(Asked(**json.loads(each))) for each in sys.argv[1:]]))
