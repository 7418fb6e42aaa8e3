"""Prefetches of conversations in a replay: `SessionForecast` decides, as it does for a `SessionPlanner` of a cache."""

import math
from collections.abc import Hashable, Iterator
from typing import Final

import numpy as np

from tiered_kv.cache.sessions import SessionForecast
from tiered_kv.catalog import Change, locate
from tiered_kv.replay.chain import SimulatedChain
from tiered_kv.replay.report import PrefetchReport
from tiered_kv.traces import Request, Trace, names_of
from tiered_kv.values.keys import Names

_LEAST_CHANCE: Final = 0.6
_SHARE: Final = 0.5
_MEASURED_S: Final = 60.0


def sessions_of(trace: Trace) -> Iterator[Hashable]:
    """Yield the conversation of each request: what the trace says, else that of the longest prompt it continues."""
    known: dict[int, int] = {}
    seen: set[int] = set()
    for number, request in enumerate(trace.requests):
        if request.session is not None:
            yield request.session
            continue
        ids = request.ids.tolist()
        session = next((known[each] for each in reversed(ids) if each in known), number)
        # The last block may be partly filled: another one in the next turn. What others have too tells nothing.
        known.update((each, session) for each in ids[-2:] if each not in seen or known.get(each) == session)
        seen.update(ids)
        yield session


class SimulatedPlanner:
    """Brings blocks of conversations to the slowest memory tier before they come back."""

    def __init__(self, chain: SimulatedChain) -> None:
        """Make one of a chain that has a memory tier."""
        self._chain = chain
        self._tier = chain.memory[-1]
        self._forecast = SessionForecast()
        self._prompts: dict[Hashable, Names] = {}
        self._unused: set[int] = set()
        self._moved = self._wasted = 0
        self._stay_s = math.inf
        self._before = (0.0, 0)
        self._tier.index.on_change = self._changed

    def before(self, at_s: float) -> None:
        """Prefetch what is due when a request comes."""
        self._measure(at_s)
        for session in self._forecast.due(at_s):
            names = self._prompts[session]
            if self._forecast.chance(session, at_s, self._stay_s) < _LEAST_CHANCE:
                continue
            if len(self._unused) + len(names) > _SHARE * self._tier.index.num_slots:
                self._forecast.look_again(session, at_s)
                continue
            names = names[: locate([tier.index for tier in self._chain.tiers], names).num_blocks]
            missing = names[~self._tier.index.ready(names)]
            self._unused.update(missing[:, 0].tolist())
            self._moved += self._chain.promote(self._tier, names)
            self._tier.index.touch(names)

    def after(self, session: Hashable, request: Request) -> None:
        """Learn from a request that was served."""
        self._unused.difference_update(request.ids.tolist())
        self._forecast.turn(session, request.at_s)
        self._prompts[session] = names_of(request.ids)

    def report(self, payload_bytes: int) -> PrefetchReport:
        """Say what it was good for; what has not been used by the end is wasted."""
        wasted = self._wasted + len(self._unused)
        return PrefetchReport(self._moved, wasted, wasted * payload_bytes)

    def _changed(self, change: Change, names: Names) -> None:
        if change is not Change.ADDED:
            gone = self._unused.intersection(names[:, 0].tolist())
            self._wasted += len(gone)
            self._unused -= gone

    def _measure(self, now_s: float) -> None:
        """Learn how long blocks stay in the tier."""
        since_s, before = self._before
        filled = self._tier.written + self._tier.promoted
        if now_s > since_s and (filled - before >= self._tier.index.num_slots // 8 or now_s - since_s > _MEASURED_S):
            stay_s = self._tier.index.num_slots * (now_s - since_s) / max(1, filled - before)
            self._stay_s = float(np.minimum(stay_s, 2.0 * self._stay_s))
            self._before = now_s, filled
