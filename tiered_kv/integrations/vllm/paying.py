"""What pays: whether to load what was found or to compute it, and whether to store at all.

Computing is as fast as this engine's own prompts were, under the load that they met; loading as the tiers' reads of
late were, with what waits in their lines. Called by the scheduler's thread only.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any, Final

from tiered_kv.cache.blocking import BlockingTieredKV
from tiered_kv.cache.groups import GroupNeed
from tiered_kv.integrations.vllm.configuration import Configuration
from tiered_kv.integrations.vllm.counts import Counts
from tiered_kv.integrations.vllm.messages import Tracked
from tiered_kv.values.keys import BlockKeys
from tiered_kv.values.results import LoadCost, LookupResult, split

_LEAST_TOKENS: Final = 64
"""Of a prompt that is measured: fewer say what a step takes, and not what a token does."""
_REMEMBERED: Final = 0.9
"""Of what was measured before, for each prompt more."""
_TURNOVERS: Final = 4
"""So many times the memory tiers are filled with blocks that nobody asks for again, before stores stop."""
_PATIENCE: Final = 4
"""So many times what computing takes a load may take before it is given up: it was to take less than that."""
_LEAST_PATIENCE_S: Final = 0.25
"""For what is computed sooner than that: to wait longer would cost more than to compute it after all."""
_LEAST_LOOKUP_S: Final = 0.01
"""Likewise, for what is asked of tiers that others use too: an answer takes some milliseconds."""
_LATE: Final = 4
"""So many times what answers took of late, and a request computes."""
_ASKING_S: Final = 0.001
"""What it takes the engine's thread and the event loop to ask tiers that others use too: that is to save more."""
_ASKED: Final = 16
"""One of so many requests asks them all the same: others may have stored there meanwhile."""
_KEPT_S: Final = 0.02
"""For so long what they cost is not asked for again: of a host's server that is a question too."""
_LEAST_REQUESTS: Final = 64
_SAMPLED: Final = 16
"""One of so many prompts is stored all the same, by its first block: the same ones each time they come."""


class Paying:
    """How fast this engine computes, how its tiers do, and whether anything has come back."""

    def __init__(
        self,
        kv: BlockingTieredKV,
        configuration: Configuration,
        counts: Counts,
        *,
        num_memory_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with nothing known: then all that is found is loaded, and all that is computed is stored.

        Args:
            kv: The cache.
            configuration: What is wanted.
            counts: What is counted.
            num_memory_blocks: That the memory tiers hold, together.
            clock: In seconds.

        Attributes:
            has_others: Whether there are tiers that others use too, as far as is known: see `know`.
        """
        self._kv = kv
        self._wanted = configuration
        self._counts = counts
        self._clock = clock
        self._num_tokens = self._seconds = 0.0
        self._num_copied = self._copy_s = 0.0
        self._computing: dict[str, tuple[Any, int, float]] = {}
        self._num_in_vain = self._num_requests = self._num_asking = 0
        main = configuration.main
        self._nothing = BlockKeys.from_hashes([], block_size=main.block_size, group=main.number)
        self.know(num_memory_blocks)

    def know(self, num_memory_blocks: int) -> None:
        """Take note of the tiers that there are: with a host's server, of those of the one that is there by now."""
        self._most_in_vain = _TURNOVERS * num_memory_blocks
        self._costs, self._costs_at = self._costs_of_others(), self._clock()
        self.has_others = bool(self._costs)

    @property
    def tokens_per_s(self) -> float:
        """How fast prompts were computed lately; 0 while that is not known."""
        return self._num_tokens / self._seconds if self._seconds else 0.0

    @property
    def _chooses(self) -> bool:
        """Whether it is known what computing takes, and what takes longer to load is to be computed."""
        return self.tokens_per_s > 0 and self._wanted.connector.load_when != "always"

    @property
    def copy_cost(self) -> float:
        """What it takes to copy a block out, as a part of what it takes to compute it; 0 while that is not known.

        It is not asked for where the user has said when to store.
        """
        if not self._num_copied or self._wanted.connector.store_when != "auto":
            return 0.0
        return self._copy_s / self._num_copied * self.tokens_per_s / self._wanted.main.block_size

    def copied(self, num_blocks: int, seconds: float) -> None:
        """Take note of how long a worker took to copy blocks out."""
        if num_blocks:
            self._num_copied = _REMEMBERED * self._num_copied + num_blocks
            self._copy_s = _REMEMBERED * self._copy_s + seconds

    def step(self, begun: Iterable[str], tracked: Mapping[str, Tracked]) -> None:
        """Measure prompts from the step that begins them to the one that knows their first token.

        Args:
            begun: Requests that the step computes, among them all that no step before it has.
            tracked: All requests.
        """
        now = self._clock()
        for name, (request, _, _) in list(self._computing.items()):
            if request.num_tokens > request.num_prompt_tokens:
                self.end(name)
        for name in begun:
            if (each := tracked.get(name)) is None or each.is_measured:
                continue
            each.is_measured = True
            num_tokens = each.request.num_prompt_tokens - each.request.num_computed_tokens
            if num_tokens >= _LEAST_TOKENS:
                self._computing[name] = each.request, num_tokens, now

    def end(self, name: str) -> None:
        """Take note that a prompt is computed, if it is measured."""
        request, num_tokens, began_s = self._computing.pop(name, (None, 0, 0.0))
        took_s = self._clock() - began_s
        if request is None or request.num_tokens <= request.num_prompt_tokens or took_s <= 0:
            return
        self._num_tokens = _REMEMBERED * self._num_tokens + num_tokens
        self._seconds = _REMEMBERED * self._seconds + took_s

    def give_up(self, name: str) -> None:
        """Take note that a request was preempted: it says nothing of how fast prompts are computed."""
        self._computing.pop(name, None)

    def patience_s(self, num_tokens: int) -> float:
        """Return how long a request waits for a load of so many tokens before it computes them."""
        most_s = self._wanted.connector.load_timeout_s
        if not self._chooses:
            return float(most_s)
        return min(float(most_s), max(_LEAST_PATIENCE_S, _PATIENCE * num_tokens / self.tokens_per_s))

    def asks(self, num_tokens: int) -> bool:
        """Say whether to ask tiers that others use too what they have of so many tokens. Asked once for each request.

        Not where that would hardly save what asking takes, by what they had and took of late.
        """
        if not self.has_others or not self._chooses or not self._wanted.loads_parts:
            return True
        self._num_asking += 1
        if (now := self._clock()) >= self._costs_at + _KEPT_S:
            self._costs, self._costs_at = self._costs_of_others(), now
        compute_s, num_blocks = num_tokens / self.tokens_per_s, num_tokens // self._wanted.main.block_size
        saved_s = [cost.found_part * (compute_s - cost.first_s - num_blocks * cost.block_s) for cost in self._costs]
        return max(saved_s, default=0.0) >= _ASKING_S or self._num_asking % _ASKED == 0

    def _costs_of_others(self) -> list[LoadCost]:
        found = self._kv.lookup_nowait(self._nothing)
        return [found.costs[tier] for tier in self.others(found)]

    def for_answers(self, needs: list[GroupNeed], num_found: int, num_more: int) -> tuple[float, float]:
        """Say how long a request waits for what tiers that others use say of so many tokens more.

        It waits where that is likely to save more than it takes, by what they took and had of late, and then no longer
        than computing takes. They are asked in any case, so that whoever does not wait learns of them all the same.

        Returns:
            Seconds, 0 for not at all; and seconds until an answer is likely to be there, as far as is known.
        """
        most_s, keys = float(self._wanted.connector.lookup_timeout_s), needs[0].needed
        found = self._kv.lookup_nowait(keys)
        costs = [found.costs[tier] for tier in self.others(found)]
        answers_s = list(accumulate(cost.answer_s for cost in costs))  # each is asked for what those before it lack
        if not self._chooses:
            return most_s, answers_s[0] if answers_s else 0.0
        compute_s = num_more / self.tokens_per_s
        most_s = min(most_s, max(_LEAST_LOOKUP_S, compute_s))
        each = zip(answers_s, costs, strict=True)
        answers_s = [answer_s for answer_s, cost in each if answer_s <= compute_s * cost.found_part]
        if not answers_s:
            return 0.0, 0.0
        if self._wanted.loads_parts and self._num_of_prefix(keys, found, num_found + num_more) <= num_found:
            return 0.0, 0.0  # what they have would be computed all the same
        late_s = max(_LEAST_LOOKUP_S, _LATE * answers_s[-1])  # it may be the first of all that is being asked
        return min(most_s, late_s if answers_s[-1] else most_s), answers_s[0]

    def others(self, found: LookupResult) -> list[str]:
        """Name the storage tiers that others use too, of a look-up's."""
        return [tier for tier in found.costs if tier not in self._kv.cache.media]

    def num_worth(self, needs: list[GroupNeed], num_found: int) -> int:
        """Return of how many of the tokens that were found the blocks are to be loaded; the others are computed.

        Where a part of a load is of no use that is all of them or none. The needs are of these tokens.
        """
        if not num_found or not self._chooses:
            return num_found
        if self._wanted.loads_parts:
            keys = needs[0].needed
            num_tokens = self._num_of_prefix(keys, self._kv.lookup_nowait(keys), num_found)
        else:
            load_s = sum(self._kv.lookup_nowait(need.needed).estimated_load_s for need in needs)
            num_tokens = num_found if load_s <= num_found / self.tokens_per_s else 0
        return num_tokens

    def declined(self, num_tokens: int) -> None:
        """Count tokens that were found, and are computed all the same."""
        if num_tokens:
            self._counts.add(load_blocks_declined=-(-num_tokens // self._wanted.main.block_size))

    def _num_of_prefix(self, keys: BlockKeys, found: LookupResult, num_found: int) -> int:
        """Return how much to load of so many tokens; what this cache's own tiers lack of the keys the others have."""
        runs = [(run.tier, run.stop - run.start) for run in found.runs]
        others = self.others(found)
        if found.num_blocks < len(keys) and others:
            slowest = max(others, key=lambda tier: found.costs[tier].block_s)
            runs.append((slowest, len(keys) - found.num_blocks))
        elif found.num_blocks < len(keys):
            return num_found
        choice = split(
            runs, found.costs, block_size=keys.block_size, prefill_tokens_per_s=self.tokens_per_s,
            queue_s=0.0, chunk_tokens=None, max_storage_tokens=None,
        )  # fmt: skip
        return choice.num_blocks * keys.block_size

    def wants(self, request: Any, num_known: int, *, has_asked: bool = True) -> bool:
        """Say whether to store what a request computes, of which so many tokens were in vLLM's cache, or in the tiers.

        Not where for long nothing that was stored was asked for again; one such request, and all are stored again.
        What a request wants may be in tiers that others use too: where it has not asked these, and has found nothing,
        that says nothing. Asked once for each request.
        """
        self._num_requests += has_asked
        if num_known:
            self._num_in_vain = self._num_requests = 0
        if self._wanted.connector.store_when != "auto" or self._num_in_vain < self._most_in_vain:
            return True
        if self._num_requests < _LEAST_REQUESTS or not request.block_hashes:
            return True
        return int.from_bytes(request.block_hashes[0][-4:], "big") % _SAMPLED == 0

    def stored(self, num_blocks: int) -> None:
        """Count blocks that were stored."""
        self._num_in_vain += num_blocks
