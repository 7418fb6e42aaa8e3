"""Traces that are made up: the same for the same seed, in every process.

They state a kind of traffic in its simplest form. What holds on them need not hold on yours: record that.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, count, islice
from random import Random
from typing import Final

import numpy as np

from tiered_kv.traces.requests import Request, Trace

_TOKENS: Final = 512
"""A block, in all of them: as in Mooncake's traces."""


def zipf_prompts(
    *, seed: int = 0, num_requests: int = 8_000, num_prompts: int = 2_000, exponent: float = 1.0, per_s: float = 3.0
) -> Trace:
    """Make requests that each ask something new after one of many prompts, the popular ones by Zipf's law.

    Args:
        seed: Of the chance in it.
        num_requests: How many.
        num_prompts: Of 1 to about 60 blocks, 8 in the middle.
        exponent: The prompt of rank r is chosen as often as ``r ** -exponent``.
        per_s: Requests a second, independent of each other.
    """
    chance, blocks = Random(seed), count()
    prompts = [_new(blocks, _length(chance, 8)) for _ in range(num_prompts)]
    weights = list(accumulate((rank + 1) ** -exponent for rank in range(num_prompts)))
    requests, at_s = [], 0.0
    for _ in range(num_requests):
        at_s += chance.expovariate(per_s)
        (prompt,) = chance.choices(prompts, cum_weights=weights)
        requests.append(_request(at_s, [*prompt, *_new(blocks, _length(chance, 2))], chance))
    return Trace("synthetic:zipf", requests, _TOKENS)


def chat(
    *, seed: int = 0, num_requests: int = 8_000, mean_turns: float = 4.0, think_s: float = 40.0, per_s: float = 3.0
) -> Trace:
    """Make conversations: each turn has all before it, and comes after the reader has thought.

    Args:
        seed: Of the chance in it.
        num_requests: How many turns, of all conversations together.
        mean_turns: Of a conversation. Half of the conversations begin with one of ten system prompts.
        think_s: Half of the turns come sooner after the one before, half later: lognormal, with a sigma of 1.
        per_s: Requests a second, on average.
    """
    chance, blocks, sessions = Random(seed), count(), count()
    systems = [_new(blocks, _length(chance, 4)) for _ in range(10)]
    due: list[tuple[float, int, int, list[int]]] = []
    requests: list[Request] = []
    begins_s = 0.0
    while len(requests) < num_requests:
        if not due or begins_s <= due[0][0]:
            system = chance.choice(systems) if chance.random() < 0.5 else []
            heapq.heappush(due, (begins_s, next(sessions), 1, system))
            begins_s += chance.expovariate(per_s / mean_turns)
        at_s, session, turn, history = heapq.heappop(due)
        prompt = [*history, *_new(blocks, _length(chance, 3 if turn == 1 else 1))]
        requests.append(_request(at_s, prompt, chance, session, turn, "chat"))
        if chance.random() < 1 - 1 / mean_turns:
            answer = _new(blocks, _length(chance, 1))
            think = chance.lognormvariate(math.log(think_s), 1.0)
            heapq.heappush(due, (at_s + think, session, turn + 1, prompt + answer))
    return Trace("synthetic:chat", requests, _TOKENS)


def agents(
    *, seed: int = 0, num_requests: int = 8_000, num_agents: int = 60, mean_steps: float = 40.0, tool_s: float = 6.0
) -> Trace:
    """Make agents with long sessions: a step every few seconds, each after the result of a tool.

    Args:
        seed: Of the chance in it.
        num_requests: How many steps, of all agents together.
        num_agents: At work at once; where one ends, another begins. All share one of three prompts with tools.
        mean_steps: Of a session. Every twentieth waits for a human, for ten minutes or so.
        tool_s: How long a tool takes in the middle: lognormal, with a sigma of 1.
    """
    chance, blocks, sessions = Random(seed), count(), count()
    tools = [_new(blocks, 12 + 4 * kind) for kind in range(3)]

    def begin(at_s: float) -> tuple[float, int, int, list[int]]:
        return at_s, next(sessions), 1, [*chance.choice(tools), *_new(blocks, _length(chance, 4))]

    due = [begin(chance.uniform(0.0, 60.0)) for _ in range(num_agents)]
    heapq.heapify(due)
    requests: list[Request] = []
    while len(requests) < num_requests:
        at_s, session, step, prompt = heapq.heappop(due)
        requests.append(_request(at_s, prompt, chance, session, step, "agent"))
        if chance.random() < 1 / mean_steps:
            heapq.heappush(due, begin(at_s + chance.expovariate(1 / 30.0)))
            continue
        waits_s = chance.lognormvariate(math.log(600.0 if chance.random() < 0.05 else tool_s), 1.0)
        heapq.heappush(due, (at_s + waits_s, session, step + 1, prompt + _new(blocks, _length(chance, 1))))
    return Trace("synthetic:agents", requests, _TOKENS)


def api_batches(
    *,
    seed: int = 0,
    num_requests: int = 8_000,
    num_templates: int = 40,
    mean_batch: float = 64.0,
    every_s: float = 20.0,
) -> Trace:
    """Make batches of a program: one template, many documents, each seen once; templates come back now and then.

    Args:
        seed: Of the chance in it.
        num_requests: How many, of all batches together.
        num_templates: Of 2 to about 100 blocks, 16 in the middle.
        mean_batch: Requests of one batch, which come within a second or two.
        every_s: From the beginning of one batch to the next, on average.
    """
    chance, blocks, batches = Random(seed), count(), count()
    templates = [_new(blocks, 1 + _length(chance, 16)) for _ in range(num_templates)]
    requests: list[Request] = []
    begins_s = 0.0
    while len(requests) < num_requests:
        batch, template = next(batches), chance.choice(templates)
        for _ in range(min(num_requests - len(requests), 1 + int(chance.expovariate(1 / mean_batch)))):
            document = _new(blocks, _length(chance, 6))
            requests.append(
                _request(begins_s + chance.uniform(0.0, 2.0), [*template, *document], chance, batch, 1, "batch")
            )
        begins_s += chance.expovariate(1 / every_s)
    return Trace("synthetic:batches", sorted(requests, key=lambda each: each.at_s), _TOKENS)


def timers(
    *, seed: int = 0, num_requests: int = 8_000, num_sessions: int = 200, period_s: float = 60.0, jitter: float = 0.05
) -> Trace:
    """Make agents that wake up by a timer: each comes back after the same time, with a little more to say.

    Args:
        seed: Of the chance in it.
        num_requests: How many turns, of all together.
        num_sessions: At work at once. One that has grown to a hundred blocks begins anew.
        period_s: From one turn to the next.
        jitter: Standard deviation of that, as a part of it.
    """
    chance, blocks, sessions = Random(seed), count(), count()

    def begin(at_s: float) -> tuple[float, int, int, list[int]]:
        return at_s, next(sessions), 1, _new(blocks, _length(chance, 8))

    due = [begin(chance.uniform(0.0, period_s)) for _ in range(num_sessions)]
    heapq.heapify(due)
    requests: list[Request] = []
    while len(requests) < num_requests:
        at_s, session, turn, prompt = heapq.heappop(due)
        requests.append(_request(at_s, prompt, chance, session, turn, "timer"))
        at_s += max(0.1, chance.gauss(period_s, jitter * period_s))
        heapq.heappush(due, begin(at_s) if len(prompt) > 100 else (at_s, session, turn + 1, prompt + _new(blocks, 1)))
    return Trace("synthetic:timers", requests, _TOKENS)


def rounds(*, seed: int = 0, num_requests: int = 8_000, num_documents: int = 500) -> Trace:
    """Make what misleads a policy: some read the same documents round and round, some read others once, some chat.

    Args:
        seed: Of the chance in it.
        num_requests: How many: 2 of 5 of the next document of 16 blocks, 1 of 5 of something new, the others of a
            conversation that goes on soon if it does.
        num_documents: That are read round and round.
    """
    chance, blocks = Random(seed), count()
    documents = [_new(blocks, 16) for _ in range(num_documents)]
    prompts: list[list[int]] = []
    open_ones: list[list[int]] = []
    for number in range(num_requests):
        kind = chance.random()
        if kind < 0.4:
            prompts.append(documents[number * 2 // 5 % num_documents])
        elif kind < 0.6:
            prompts.append(_new(blocks, _length(chance, 20)))
        else:
            goes_on = open_ones and chance.random() < 0.75
            before = open_ones.pop(-1 - _recent(chance, len(open_ones), 40)) if goes_on else _new(blocks, 8)
            open_ones.append(before + _new(blocks, 1))
            prompts.append(open_ones[-1])
    return _evenly("rounds", prompts, chance)


def shifts(*, seed: int = 0, num_requests: int = 8_000, num_documents: int = 120, lasts: int = 800) -> Trace:
    """Make questions on documents that are all popular, and all exchanged at once now and then.

    Args:
        seed: Of the chance in it.
        num_requests: How many.
        num_documents: Of a period, of 20 blocks in the middle.
        lasts: Requests of a period.
    """
    chance, blocks = Random(seed), count()
    prompts: list[list[int]] = []
    while len(prompts) < num_requests:
        documents = [_new(blocks, _length(chance, 20)) for _ in range(num_documents)]
        prompts += [[*chance.choice(documents), *_new(blocks, _length(chance, 2))] for _ in range(lasts)]
    return _evenly("shifts", prompts[:num_requests], chance)


def twice(*, seed: int = 0, num_requests: int = 8_000, mean_lag: float = 150.0) -> Trace:
    """Make documents that are read exactly twice: what was used more often never comes back.

    Args:
        seed: Of the chance in it.
        num_requests: How many.
        mean_lag: Requests between the two, exponential.
    """
    chance, blocks = Random(seed), count()
    due: list[tuple[float, list[int]]] = []
    prompts: list[list[int]] = []
    for number in range(num_requests):
        if due and due[0][0] <= number:
            prompts.append(heapq.heappop(due)[1])
        else:
            prompts.append(_new(blocks, _length(chance, 12)))
            heapq.heappush(due, (number + 1 + chance.expovariate(1 / mean_lag), prompts[-1]))
    return _evenly("twice", prompts, chance)


SYNTHETIC: Final[Mapping[str, Callable[..., Trace]]] = {
    "agents": agents, "batches": api_batches, "chat": chat, "rounds": rounds, "shifts": shifts, "timers": timers,
    "twice": twice, "zipf": zipf_prompts,
}  # fmt: skip
"""By the names that the command line has for them."""


def _new(blocks: Iterator[int], n: int) -> list[int]:
    """Return the numbers of so many blocks that no prompt has yet."""
    return list(islice(blocks, n))


def _length(chance: Random, median: float) -> int:
    """Return a number of blocks, at least one."""
    return max(1, round(chance.lognormvariate(math.log(median), 0.7)))


def _request(
    at_s: float, prompt: list[int], chance: Random, session: int | None = None, turn: int = 1, category: str = "prompt"
) -> Request:
    ids = np.array(prompt, dtype=np.int64)
    return Request(at_s, ids, len(ids) * _TOKENS, chance.randint(20, 800), session, turn, category)


def _recent(chance: Random, n: int, mean: float) -> int:
    """Choose one of ``n``, the first ones most often."""
    return min(n - 1, int(chance.expovariate(1 / mean)))


def _evenly(name: str, prompts: list[list[int]], chance: Random) -> Trace:
    """Let prompts come three a second."""
    requests = [_request(number / 3, prompt, chance) for number, prompt in enumerate(prompts)]
    return Trace(f"synthetic:{name}", requests, _TOKENS)
