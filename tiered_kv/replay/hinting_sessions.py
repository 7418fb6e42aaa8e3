"""Hints beside a replay: sessions say when they will be back, as agents know of their tools, or are wrong at random."""

import heapq
from random import Random
from typing import Final, Literal

import numpy as np

from tiered_kv.cache.hinted import Favours
from tiered_kv.replay.simulated_chain import SimulatedChain
from tiered_kv.replay.surveys import sessions_of
from tiered_kv.traces import Request, Trace, names_of
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.keys import Names, rows_of
from tiered_kv.values.results import num_found

HintsAre = Literal["none", "right", "random"]
_AHEAD_S: Final = 1.0
"""So long before a session is back its blocks are brought to memory."""
_LONG_S: Final = 15.0
"""For a session that is back sooner nothing is brought."""
_FAVOURED_S: Final = 10.0
_SHARE: Final = 1 / 2
"""At most this part of memory is for blocks that were brought and not asked for yet."""
_SESSION: Final = ""


class SimulatedHints:
    """What sessions say at the end of each request, and what is done with it, as a cache with `Hints` does it."""

    def __init__(self, trace: Trace, chain: SimulatedChain, are: HintsAre) -> None:
        """Learn from the trace when each session comes back; ``random`` hints draw such a time by chance."""
        self._chain = chain
        self._is_right = are == "right"
        self._chance = Random(0)  # noqa: S311 - nothing is secret here
        self._back_s: list[float | None] = []
        following: dict[int, float] = {}
        for request, session in reversed([*zip(trace.requests, sessions_of(trace), strict=True)]):
            self._back_s.append(following.get(session))
            following[session] = request.at_s
        self._back_s.reverse()
        waits = [b - r.at_s for r, b in zip(trace.requests, self._back_s, strict=True) if b is not None]
        self._waits_s = waits or [1.0]
        self._ended = 1 - len(waits) / max(1, len(trace.requests))
        most = int(_SHARE * chain.memory[0].index.num_slots) if chain.memory else 0
        self._favours = Favours(most, most)
        self._due: list[tuple[float, int, Names]] = []

    def before(self, request: Request) -> None:
        """Bring the blocks that are due by now, and note which blocks a request asks for."""
        while self._due and self._due[0][0] <= request.at_s:
            at_s, _, names = heapq.heappop(self._due)
            self._chain.go_on(at_s)
            self._bring(at_s, names)
        self._favours.use(_SESSION, rows_of(names_of(request.ids)), now_s=request.at_s)

    def after(self, number: int, request: Request) -> None:
        """Hint at when the session of a request that was served will be back."""
        names, back_s = names_of(request.ids), self._back_s[number]
        if not self._is_right:
            is_back = self._chance.random() >= self._ended
            back_s = request.at_s + self._chance.choice(self._waits_s) if is_back else None
        for tier in self._chain.memory:
            if back_s is None:
                tier.index.hint(names, ReuseHint(0.02, category="ended"))
            else:
                tier.index.hint(names, ReuseHint(0.95, max(0.1, back_s - request.at_s), "comes back"))
        if back_s is not None and back_s - request.at_s > _LONG_S:
            heapq.heappush(self._due, (back_s - _AHEAD_S, number, names))

    def _bring(self, at_s: float, names: Names) -> None:
        found = names[: num_found(self._chain.located(names))]
        memory = self._chain.memory[0]
        missing = found[~memory.index.ready(found)]
        num_taken = self._favours.take(_SESSION, rows_of(missing), now_s=at_s, for_s=_FAVOURED_S)
        if num_taken:
            memory.promoted += memory.add(np.ascontiguousarray(missing[:num_taken]))
