"""A real vLLM to which anything happens, in any order: ``vllm_at_random.py JSON``.

Requests for prompts that begin alike come, are ended and preempted; its cache and ours are emptied, and storage stalls
and fails. Runs in vLLM's environment, in one process. The JSON is an object of `Drawn`'s fields; the answer says what
was generated otherwise than by an engine without us, what is held in the end, and how much was loaded. With no
``transfer`` it is what such an engine generates, for ``alone``.
"""

import contextlib
import json
import os
import pathlib
import random
import sys
from dataclasses import dataclass, field
from typing import Any, Final

from vllm_generate import ONE_PROCESS, QUIET, Wanted, engine_arguments, prompt
from vllm_steps import Stepped

KINDS: Final = [(number, length) for number in range(8) for length in (1, 31, 32, 33, 64, 101, 128, 192, 193, 287, 288)]
"""Numbers of prompts, and lengths at blocks' ends and about them: one is the beginning of others."""
_MOST: Final = 12
"""Requests at a time."""


@dataclass
class Drawn(Wanted):
    """What to run.

    Attributes:
        alone: What an engine without us generates for each of `KINDS`, ``num_tokens`` of each.
        seed: Of what happens.
        num_steps: Of the engine.
        stalling: The folder of a `StallingBackend`, which then stalls now and then, and fails to write.
    """

    alone: list[list[int]] = field(default_factory=list)
    seed: int = 0
    num_steps: int = 3000
    stalling: str = ""


class AtRandom:
    """An engine, and what happens to it.

    Attributes:
        wrong: Of each answer that was another: its prompt, what it was, and what it should have been.
        num_ended: How many were compared.
    """

    def __init__(self, drawn: Drawn) -> None:
        self.wrong: list[Any] = []
        self.num_ended = 0
        self._drawn = drawn
        self._random = random.Random(drawn.seed)
        self._engine = Stepped(drawn)
        self._asked: dict[str, tuple[int, int]] = {}
        self._num_steps = 0

    def run(self) -> dict[str, Any]:
        """Have all of it happen; return what came of it."""
        happenings = [self._ask] * 30 + [self._abort] * 5 + [self._reset] * 3 + [self._stall] * 2 + [self._clear]
        happenings += [self._step] * 60
        while self._num_steps < self._drawn.num_steps and not self.wrong:
            self._random.choice(happenings)()
        self._stall(ends=True)
        self._engine.settle()
        self._compare()
        hits = sum(tier.hits for tier in self._engine.scheduling.kv.stats().tiers)
        left = self._engine.left()
        return {"wrong": self.wrong[:3], "left": left, "hits": hits, "ended": self.num_ended}

    def _ask(self) -> None:
        if len(self._asked) < _MOST:
            kind, num_tokens = self._random.randrange(len(KINDS)), self._random.randint(1, self._drawn.num_tokens)
            number, length = KINDS[kind]
            name = self._engine.ask(number, num_tokens, length=length, priority=self._random.randrange(3))
            self._asked[name] = kind, num_tokens

    def _step(self) -> None:
        for _ in range(self._random.choice((1, 1, 2, 4, 8))):
            if self._engine.scheduler.has_requests():
                self._engine.step()
                self._num_steps += 1
        self._compare()

    def _abort(self) -> None:
        if self._asked:
            names = self._random.sample(sorted(self._asked), min(len(self._asked), self._random.choice((1, 1, 3))))
            self._engine.abort(*names)
            for name in names:
                del self._asked[name]

    def _reset(self) -> None:
        with contextlib.suppress(RuntimeError):  # vLLM's, while requests wait for a load
            self._engine.scheduler.reset_prefix_cache(reset_running_requests=self._random.random() < 0.5)

    def _clear(self) -> None:
        self._engine.scheduling.kv.clear()

    def _stall(self, *, ends: bool = False) -> None:
        if self._drawn.stalling:
            for name, text in (("stall", "1"), ("full", "")):
                path = pathlib.Path(self._drawn.stalling, name)
                if ends or path.exists():
                    path.unlink(missing_ok=True)
                elif self._random.random() < 0.5:
                    path.write_text(text)

    def _compare(self) -> None:
        for name in self._asked.keys() & self._engine.tokens.keys():
            kind, num_tokens = self._asked.pop(name)
            self.num_ended += 1
            if (tokens := self._engine.tokens[name]) != (wanted := self._drawn.alone[kind][:num_tokens]):
                self.wrong.append((KINDS[kind], tokens, wanted))


def alone(drawn: Drawn) -> list[list[int]]:
    """Return what is generated for each kind of prompt, one after the other."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - takes seconds, and the environment is set first

    llm = LLM(**engine_arguments(drawn))
    sampling = SamplingParams(temperature=0.0, max_tokens=drawn.num_tokens, ignore_eos=True, detokenize=False)
    answers = (llm.generate({"prompt_token_ids": prompt(*kind)}, sampling, use_tqdm=False) for kind in KINDS)
    return [list(answer.outputs[0].token_ids) for (answer,) in answers]


def main(drawn: Drawn) -> None:
    """Run it and print the answer."""
    print(json.dumps(AtRandom(drawn).run() if drawn.transfer else alone(drawn)))


if __name__ == "__main__":
    os.environ.update({**QUIET, **ONE_PROCESS})
    main(Drawn(**json.loads(sys.argv[1])))
