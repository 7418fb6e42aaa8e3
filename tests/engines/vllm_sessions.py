"""Requests of a real vLLM whose prompts go on while they are served (streaming input): ``vllm_sessions.py JSON``.

They come, go on and are ended at random, in few blocks. Runs in vLLM's environment, in one process. The JSON, and the
answer, are as of `vllm_at_random`; ``alone`` has what is generated for each of `SESSIONS`.
"""

import itertools
import json
import os
import random
import sys
from typing import Any, Final

from vllm_at_random import Drawn
from vllm_generate import ONE_PROCESS, QUIET, engine_arguments, prompt
from vllm_steps import Stepped

_LENGTHS: Final = (1, 5, 31, 32, 33, 64, 65, 90)
_MOST: Final = 10


def _sessions() -> list[list[tuple[list[int], int]]]:
    """Return of each session what it is asked, turn by turn, and how many tokens are generated then."""
    draw, sessions = random.Random(0), []
    for _ in range(24):
        number, begin, turns = draw.randrange(5), 0, []  # of one number are the beginnings of one text
        for _turn in range(draw.randint(1, 4)):
            end = begin + draw.choice(_LENGTHS)
            turns.append((prompt(number, end)[begin:], draw.choice((1, 2, 5, 16, 33))))
            begin = end
        sessions.append(turns)
    return sessions


SESSIONS: Final = _sessions()


class Session:
    """One session of an engine.

    Attributes:
        number: Which of `SESSIONS`.
        tokens: What was generated until now.
    """

    def __init__(self, engine: Any, name: str, number: int) -> None:
        self.number = number
        self.tokens: list[int] = []
        self._engine = engine
        self._name = name
        self._num_asked = 0
        self.go_on()

    @property
    def is_waiting(self) -> bool:
        """Whether all is generated that it was asked for."""
        turns = SESSIONS[self.number][: self._num_asked]
        return len(self.tokens) == sum(num_tokens for _, num_tokens in turns)

    @property
    def is_asked(self) -> bool:
        """Whether no turn is left, and vLLM was told so."""
        return self._num_asked > len(SESSIONS[self.number])

    def go_on(self) -> None:
        """Ask the next turn, or say that there is none."""
        from vllm import SamplingParams  # noqa: PLC0415 - takes seconds, and the environment is set first
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415 - as above

        turns = SESSIONS[self.number]
        tokens, num_tokens = turns[self._num_asked] if self._num_asked < len(turns) else ([0], 1)
        sampling = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        request = self._engine.input_processor.process_inputs(
            request_id=self._name,
            prompt={"prompt_token_ids": list(tokens)},  # vLLM writes to it
            params=sampling,
            resumable=self._num_asked < len(turns),
            supported_tasks=("generate",),
        )
        self._engine.engine_core.add_request(request)
        self._num_asked += 1


def step(engine: Any, sessions: dict[str, Session]) -> None:
    """Do a step of the engine."""
    for answer in engine.engine_core.get_output().outputs:
        if (session := sessions.get(answer.request_id)) is not None:
            session.tokens += answer.new_token_ids


def alone(drawn: Drawn) -> list[list[int]]:
    """Return what is generated for each session, one after the other."""
    from vllm import LLM  # noqa: PLC0415 - as above

    engine, answers = LLM(**engine_arguments(drawn)).llm_engine, []
    for number in range(len(SESSIONS)):
        session = Session(engine, str(number), number)
        while not session.is_asked:
            step(engine, {str(number): session})
            if session.is_waiting:
                session.go_on()
        answers.append(session.tokens)
    return answers


def pop_ended(sessions: dict[str, Session]) -> list[Session]:
    """Return the sessions of which all was generated, and that vLLM knows of; they are not among the others then."""
    total = [sum(num_tokens for _, num_tokens in turns) for turns in SESSIONS]
    ended = [name for name, each in sessions.items() if each.is_asked and len(each.tokens) == total[each.number]]
    return [sessions.pop(name) for name in ended]


def at_random(drawn: Drawn) -> dict[str, Any]:
    """Have sessions come, go on and end in any order; return what came of it."""
    stepped, draw, sessions = Stepped(drawn), random.Random(drawn.seed), dict[str, Session]()
    engine, ended, names, num_steps = stepped.engine, list[Session](), itertools.count(), 0
    while num_steps < drawn.num_steps or sessions:
        what = draw.random()
        if what < 0.3 and len(sessions) < _MOST and num_steps < drawn.num_steps:
            name = f"s{next(names)}"
            sessions[name] = Session(engine, name, draw.randrange(len(SESSIONS)))
        elif what < 0.6 and sessions:
            session = sessions[draw.choice(sorted(sessions))]
            if not session.is_asked and (session.is_waiting or draw.random() < 0.3):
                session.go_on()
        elif what < 0.62 and sessions:
            engine.engine_core.abort_requests([name := draw.choice(sorted(sessions))])
            del sessions[name]
        elif stepped.scheduler.has_requests():
            step(engine, sessions)
            num_steps += 1
        ended += pop_ended(sessions)
    stepped.settle()
    wrong = [(each.number, each.tokens) for each in ended if each.tokens != drawn.alone[each.number]]
    hits = sum(tier.hits for tier in stepped.scheduling.kv.stats().tiers)
    return {"wrong": wrong[:3], "left": stepped.left(), "hits": hits, "ended": len(ended)}


def main(drawn: Drawn) -> None:
    """Run it and print the answer."""
    print(json.dumps(at_random(drawn) if drawn.transfer else alone(drawn)))


if __name__ == "__main__":
    os.environ.update({**QUIET, **ONE_PROCESS})
    main(Drawn(**json.loads(sys.argv[1])))
