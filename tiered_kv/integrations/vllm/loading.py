"""Loads: how much of a prompt is to be had, which loads a step begins with, and which go on beside steps.

A load is planned while vLLM asks what is there, and told once host memory has it; until then its request has no blocks
of vLLM's. If it is small, and of one KV group, the step that computes the rest of the prompt copies it first; else the
request waits for its copy, beside steps. Where vLLM had no blocks then, a load is planned once it has chosen some.
Called by the scheduler's thread only, which waits for none of it, but for a moment.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.cache.blocking import BlockingTieredKV
from tiered_kv.cache.groups import GroupNeed, find_longest
from tiered_kv.cache.planner import Planner
from tiered_kv.catalog.table import counted
from tiered_kv.integrations.vllm.configuration import Configuration, EngineGroup
from tiered_kv.integrations.vllm.counts import Counts
from tiered_kv.integrations.vllm.messages import Bringing, Finding, Load, LoadOrder, Step, Tracked
from tiered_kv.integrations.vllm.naming import RequestNaming
from tiered_kv.integrations.vllm.paying import Paying
from tiered_kv.integrations.vllm.waiting_room import WaitingRoom
from tiered_kv.transfers.jobs import Job
from tiered_kv.values.keys import BlockKeys
from tiered_kv.values.plan import JobResult, Outcomes
from tiered_kv.values.results import BlockState
from tiered_kv.values.specs import GPULoadStoreSpec

_HIT: Final = bytes([BlockState.HIT])
_ASKING, _PENDING = bytes([BlockState.ASKING]), bytes([BlockState.PENDING])
_PATIENCE_S: Final = 0.002
"""A step waits so long at most for shared tiers' answers and for plans of loads from memory: most take less."""
_READ_PATIENCE_S: Final = 0.005
"""And so long for what this cache's own storage is likely to have read by then, if computing it takes twice as long."""
_READ_AGAIN_S: Final = 0.25
"""For so long no step waits for storage after a wait that was in vain, unless what it waited for has come meanwhile:
it may have come to hang."""
_LOOK_AGAIN_S: Final = 0.0003
_TOLD_AGAIN_S: Final = 0.02
"""For so long who waits for blocks of vLLM's is told what was found, and not looked for anew: that would take some
tenths of a millisecond of each step. What is gone by then is computed; what has come since is found soon."""
_WAITS_AGAIN_S: Final = 0.25
"""Likewise, who waits for room in memory: by then loading may pay no more, as a tier may have come to hang."""
_AHEAD_S: Final = 0.02
"""A step spends so long at most on requests that are looked up for the first time and then wait: hundreds may come at
once, and each takes up to a millisecond. The others are told to wait, and looked up in steps to come."""
_FIRST_BYTES: Final = 64 << 20
"""A step copies so much of a rank's at most before it computes: that takes some milliseconds, computing it longer."""


@dataclass(frozen=True)
class Beginning:
    """Jobs that were begun in this step, of so many tokens.

    Attributes:
        load_s: How long they are likely to take: 0 from memory, None if it is not known.
    """

    jobs: list[Job]
    load_s: float | None
    num_tokens: int


class PendingLoads:
    """What requests are to be loaded, from the first look-up to the end of the copies."""

    def __init__(
        self,
        kv: BlockingTieredKV,
        planner: Planner,
        configuration: Configuration,
        counts: Counts,
        naming: RequestNaming,
        paying: Paying,
        room: WaitingRoom,
        *,
        memory: dict[str, int],
        describe: Callable[[Any, EngineGroup, BlockKeys], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with none.

        Args:
            kv: The cache.
            planner: Of it.
            configuration: What is wanted.
            counts: What is counted.
            naming: Of blocks.
            paying: What pays.
            room: In vLLM's pool.
            memory: How many blocks the cache's own memory tiers hold, by name.
            describe: Tells routers what blocks are.
            clock: In seconds, by which what was found is looked for anew.
        """
        self._kv = kv
        self._planner = planner
        self._configuration = configuration
        self._counts = counts
        self._naming = naming
        self._paying = paying
        self._room = room
        self._describe = describe
        self._clock = clock
        self._loads: dict[str, Load] = {}  # not handed to the workers yet
        self._moving: dict[int, Load] = {}
        self.know(memory)
        self._beginning: list[Beginning] = []  # in this step
        self._bringing: dict[str, Bringing] = {}  # for requests that have no blocks of vLLM's yet
        self._read_again_s = -math.inf
        self._late: list[Job] = []  # what a step waited for in vain until then
        self._renew()

    def _renew(self) -> None:
        """Give a step what a step may take."""
        self._patience_s, self._read_patience_s, self._num_first_bytes = _PATIENCE_S, _READ_PATIENCE_S, _FIRST_BYTES
        self._ahead_s = _AHEAD_S
        self._is_overdue = False  # whether somebody has waited for room in memory for too long: who comes behind waits

    def know(self, memory: Mapping[str, int]) -> None:
        """Take note of the cache's own memory tiers, and of what they hold."""
        self._most_bringing = sum(memory.values()) // 2  # blocks that memory holds at once for requests that wait
        self._memory = list(memory)

    def come(self, tracked: Tracked) -> None:
        """Have shared tiers asked for what a request will want, if that may pay: by its turn they may have answered."""
        wanted, request = self._configuration, tracked.request
        if not (self._paying.has_others and wanted.loads):
            return
        tracked.asks = self._paying.asks(request.num_tokens)
        if tracked.asks:
            most = (request.num_tokens - 1) // wanted.step * wanted.step
            self._longest([self._naming.need(group, request, 0, most) for group in wanted.groups])

    def find(self, tracked: Tracked, num_computed_tokens: int, *, can_load: bool) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded behind those that are computed; None to be asked again later.

        And whether the request is to wait for that, while others compute: else the step that it is in loads them first.
        """
        self._room.ask(tracked.request)
        first = tracked.num_here = tracked.num_stored = num_computed_tokens
        tracked.num_found = tracked.num_noted = 0
        if not can_load or not self._configuration.loads or not tracked.may_load:
            self.let_go(tracked)  # it may have been preempted while nobody knew that its load had failed
            return 0, False
        bringing = self._bringing.get(tracked.request.request_id)
        if bringing is not None and bringing.of == (first, tracked.request.num_tokens):
            return self._brought(bringing)
        if bringing is not None:  # vLLM's own cache has more of it by now, or less
            self.let_go(tracked)
        if tracked.said is not None:
            return self._look_up(tracked, first)
        if self._ahead_s <= 0:
            return None, False
        began_s = time.monotonic()
        found = self._look_up(tracked, first)
        if found[0] is None:
            self._ahead_s -= time.monotonic() - began_s
        return found

    def _look_up(self, tracked: Tracked, first: int) -> tuple[int | None, bool]:
        """Do as `find`, for a request of which nothing is being brought."""
        said = tracked.said
        again = said if said is not None and self._holds(said, tracked.request, first) else None
        tracked.said = again or self._find(tracked, first)
        self._keep_in_line(tracked, tracked.said.num_more)
        if not (num_found := tracked.said.num_found):
            return num_found, False
        tracked.num_found = num_found
        if again is not None or (bringing := self._bring(tracked, num_found)) is None:
            return (num_found, True) if self._room.has_for(tracked.request) else (None, False)
        return self._brought(bringing)

    def _holds(self, said: Finding, request: Any, first: int) -> bool:
        """Say whether what was found is to be told again: vLLM, or memory, has had no room for the request since."""
        if said.of != (first, request.num_tokens) or self._clock() >= said.until_s:
            return False
        if said.num_found is not None:
            return True
        num_held = self.num_bringing
        return num_held > 0 and (self._is_overdue or num_held + said.num_more > self._most_bringing)

    def _keep_in_line(self, tracked: Tracked, num_more: int) -> None:
        """Take note of who waits for room in memory: nobody overtakes it once it has waited as long as for a load."""
        if not num_more:
            tracked.in_line_since_s = None
        elif tracked.in_line_since_s is None:
            tracked.in_line_since_s = self._clock()
        self._is_overdue |= self._waits_for_long(tracked, num_more)

    def _waits_for_long(self, tracked: Tracked, num_more: int) -> bool:
        """Say whether a request has waited for room for so many blocks for as long as it would for a load of them."""
        patience_s = self._paying.patience_s(num_more * self._configuration.main.block_size)
        return tracked.in_line_since_s is not None and self._clock() - tracked.in_line_since_s > patience_s

    def _find(self, tracked: Tracked, first: int) -> Finding:
        """Look behind so many tokens, decide what of it pays, and count the look-up once its answer is final."""
        wanted, request = self._configuration, tracked.request
        of = first, request.num_tokens
        most = (request.num_tokens - 1) // wanted.step * wanted.step
        if most <= first and not wanted.tail_tokens:
            self._want(tracked, first)
            return Finding(of, 0)
        needs = [self._naming.need(group, request, first, most) for group in wanted.groups]
        num_found, may_be_more, may_come = self._longest(needs, asks=tracked.asks)
        if may_be_more and self._hears_soon(tracked, needs, num_found, most - first - num_found):
            num_found, may_be_more, may_come = self._listen(needs)
        if wanted.tail_tokens and not may_be_more:
            num_more, may_be_more = self._tail(request, first + num_found)
            num_found += num_more
        if self._waits(tracked, needs, num_found, most - first - num_found if may_be_more else 0):
            return Finding(of, None)
        if not tracked.is_counted:
            tracked.is_counted = True
            main = needs[wanted.main.number].keys
            self._kv.count_lookup(main, counted(len(main)) < num_found // main.block_size)
            self._note_shared(tracked, first, main)
            self._want(tracked, first + num_found)
        until_s = 0.0 if may_come and self._comes(needs, num_found) else self._clock() + _TOLD_AGAIN_S
        if not num_found:
            return Finding(of, 0, until_s)
        if (decided := tracked.is_worth) is None or decided[:2] != (first, num_found):
            needs = [self._naming.need(group, request, first, first + num_found) for group in wanted.groups]
            decided = first, num_found, self._paying.num_worth(needs, num_found)
        if decided[2] and (num_more := self._brings_too_much(tracked, first, decided[2])):
            tracked.is_worth = None  # by its turn the tier may have come to be slow, or to hang
            return Finding(of, None, self._clock() + _WAITS_AGAIN_S, num_more)
        if decided is not tracked.is_worth:
            tracked.is_worth = decided
            self._paying.declined(num_found - decided[2])
        return Finding(of, decided[2], until_s)

    def _note_shared(self, tracked: Tracked, first: int, main: BlockKeys) -> None:
        """Take note of how far a request is like others, where windows may lack what a prefix needs that ends there."""
        if self._configuration.has_ends:
            tracked.num_shared = first + num_hits(self._kv.membership(main).tobytes()) * main.block_size

    def _comes(self, needs: list[GroupNeed], num_found: int) -> bool:
        """Say whether more is on its way to memory: of a request that was preempted its blocks may just be stored."""
        keys, at = needs[self._configuration.main.number].keys, num_found // self._configuration.main.block_size
        behind = keys[at : at + 1]
        return len(behind) > 0 and any(
            self._kv.membership(behind, tier=tier)[0] == BlockState.PENDING for tier in self._memory
        )

    def _longest(self, needs: list[GroupNeed], *, asks: bool = True) -> tuple[int, bool, bool]:
        """Return for how many tokens every group has what it needs, and whether shared tiers may yet say of more.

        And whether what is behind may be on its way to memory, see `_comes`.
        """
        size = self._configuration.main.block_size
        if not asks:
            return self._kv.lookup_nowait(needs[0].keys).num_blocks * size, False, True
        if self._configuration.loads_parts:  # as most models: asked for each request, and again and again
            states = self._kv.membership(needs[0].keys, prefix_only=True).tobytes()
            num_blocks = num_hits(states)
            behind = states[num_blocks : num_blocks + 1]
            return num_blocks * size, behind == _ASKING, behind == _PENDING
        is_asking = False

        def has(need: GroupNeed, *, hopes: bool) -> NDArray[np.bool_]:
            nonlocal is_asking
            states = self._kv.membership(need.keys)
            asking = states == BlockState.ASKING
            is_asking = is_asking or bool(asking.any())
            there: NDArray[np.bool_] = (states == BlockState.HIT) | (asking & hopes)
            return there

        def longest(*, hopes: bool) -> int:
            search = find_longest(needs)
            try:
                asked = next(search)
                while True:
                    asked = search.send([has(need, hopes=hopes) for need in asked])
            except StopIteration as found:
                return int(found.value)

        num_found = longest(hopes=False)
        return num_found, is_asking and longest(hopes=True) > num_found, True

    def _tail(self, request: Any, num_whole: int) -> tuple[int, bool]:
        """Return how many tokens of the block behind so many every group has, and whether that may yet be more.

        States are asked for first: they are at few places, and the others are asked for these alone.
        """
        wanted, size, is_asking = self._configuration, self._configuration.tail_tokens, False
        most = min(request.num_tokens - 1, num_whole + wanted.step - 1, len(request.block_hashes) * size)
        ends: Sequence[int] = range(num_whole + size, most + 1, size)
        for group in sorted(wanted.groups, key=lambda group: group.is_whole):
            states = self._kv.membership(self._naming.tails(group, request, ends))
            is_asking = is_asking or bool((states == BlockState.ASKING).any())
            ends = [end for end, state in zip(ends, states, strict=True) if state == BlockState.HIT]
        return max(ends, default=num_whole) - num_whole, is_asking

    def _listen(self, needs: list[GroupNeed]) -> tuple[int, bool, bool]:
        """Look again, see `_longest`, until shared tiers have answered, for what is left of this step's patience.

        Most answers take less than a step, and who waits for the next one waits for all of it.
        """
        began_s, found = time.monotonic(), (0, True, True)
        while found[1] and (left_s := self._patience_s - (time.monotonic() - began_s)) > 0:
            time.sleep(min(left_s, _LOOK_AGAIN_S))
            found = self._longest(needs)
        self._patience_s -= time.monotonic() - began_s
        return found

    def _hears_soon(self, tracked: Tracked, needs: list[GroupNeed], num_found: int, num_more: int) -> bool:
        """Say whether a request waits in this step to hear of so many tokens more; that is decided once."""
        if tracked.patience_s is not None:
            return False
        # It may have been in the queue for long.
        tracked.patience_s, answer_s = self._paying.for_answers(needs, num_found, num_more)
        tracked.waits_since_s = time.monotonic()
        return tracked.patience_s > 0 and answer_s < self._patience_s

    def _waits(self, tracked: Tracked, needs: list[GroupNeed], num_found: int, num_more: int) -> bool:
        """Say whether a request goes on waiting for shared tiers, which may yet say that they have so many tokens."""
        if num_more:
            self._hears_soon(tracked, needs, num_found, num_more)
            if time.monotonic() - tracked.waits_since_s < (tracked.patience_s or 0.0):
                return True
        if tracked.patience_s is not None:
            tracked.patience_s = 0.0  # it waits once
        return False

    def _want(self, tracked: Tracked, num_known: int) -> None:
        if tracked.is_wanted is None:
            tracked.is_wanted = self._paying.wants(tracked.request, num_known, has_asked=tracked.asks)

    def _brings_too_much(self, tracked: Tracked, first: int, num_found: int) -> int:
        """Return how many blocks a request brings, if so much is in memory for loads that it would take others' room.

        What is in memory for it already takes none: it need not wait for what others are loading, which may hang. Nor
        does one that has waited for long wait for others that bring none: there may always be some.
        """
        num_held, groups, request = self.num_bringing, self._configuration.groups, tracked.request
        num_more = -(-num_found // self._configuration.main.block_size) * len(groups)
        if not num_held or (num_held + num_more <= self._most_bringing and not self._is_overdue):
            return 0
        needed = self._needed(request, first, num_found)
        num_more = sum(len(keys) - self._num_in_memory(keys) for _, keys in needed)
        if self._waits_for_long(tracked, num_more):
            return num_more if self._num_coming else 0
        return num_more if self._is_overdue or num_held + num_more > self._most_bringing else 0

    def _num_in_memory(self, keys: BlockKeys) -> int:
        by_tier = self._kv.lookup_nowait(keys).by_tier
        return sum(by_tier.get(tier, 0) for tier in self._memory)

    @property
    def num_bringing(self) -> int:
        """Blocks that memory holds, or is to hold, for requests that wait for them."""
        num_begun = sum(len(ids) for load in self._begun() for _, ids in load.parts)
        return num_begun + sum(each.num_blocks for each in self._bringing.values())

    @property
    def _num_coming(self) -> int:
        """Blocks that memory did not have and is to hold, for requests that wait for them."""
        return sum(load.num_more for load in self._begun()) + sum(each.num_more for each in self._bringing.values())

    def _begun(self) -> Collection[Load]:
        return {id(load): load for load in chain(self._loads.values(), self._moving.values())}.values()

    def _bring(self, tracked: Tracked, num_found: int) -> Bringing | None:
        """Begin to bring what was found to host memory; wait for that if it is likely to take a moment only."""
        request, first = tracked.request, tracked.num_stored
        if not (self._memory and tracked.may_hurry):
            return None
        needed = self._needed(request, first, num_found)
        load_s, num_blocks = self._note_tiers(tracked, needed, num_found), sum(len(keys) for _, keys in needed)
        bringing = self._bringing[request.request_id] = Bringing(
            tracked,
            {group.number: self._planner.plan_load(keys) for group, keys in needed},
            (first, request.num_tokens),
            num_found,
            num_blocks,
            0 if load_s == 0.0 else num_blocks,
            sum(len(keys) * group.page_bytes * len(group.layer_names) for group, keys in needed),
            self._clock(),
        )
        self._wait(Beginning(list(bringing.jobs.values()), load_s, num_found))
        return bringing

    def _brought(self, bringing: Bringing) -> tuple[int | None, bool]:
        """Say what host memory has for a request; see `find`. Let go if vLLM has no blocks for it in this step."""
        if not bringing.is_over:
            if not self._is_late(bringing):
                return None, False
            self._give_up(bringing)
            return 0, False
        loads_parts, num_blocks = self._configuration.loads_parts, bringing.num_held
        if not num_blocks or (num_blocks < bringing.num_blocks and not loads_parts):
            self._give_up(bringing)
            return 0, False
        bringing.comes_first = self._configuration.loads_first and bringing.num_bytes <= self._num_first_bytes
        if not (bringing.comes_first or self._room.has_for(bringing.tracked.request)):
            return None, False
        bringing.is_told = True
        if bringing.comes_first:
            self._num_first_bytes -= bringing.num_bytes
        size = self._configuration.main.block_size
        bringing.tracked.num_found = num_blocks * size if loads_parts else bringing.num_tokens
        return bringing.tracked.num_found, not bringing.comes_first

    def _is_late(self, bringing: Bringing) -> bool:
        return self._clock() - bringing.begun_s > self._paying.patience_s(bringing.num_tokens)

    def _give_up(self, bringing: Bringing) -> None:
        """Have a request compute what does not come."""
        bringing.tracked.may_load = False
        self._counts.load(bringing.num_blocks, 0, self._clock() - bringing.begun_s)
        self.let_go(bringing.tracked)

    def let_go(self, tracked: Tracked) -> None:
        """Bring no more to host memory for a request, and hold no more of it there, until it has blocks of vLLM's."""
        if (bringing := self._bringing.pop(tracked.request.request_id, None)) is not None:
            for job in bringing.jobs.values():
                job.cancel(undelivered=True)

    def forget(self) -> None:
        """Let go of what was computed by other weights."""
        for bringing in list(self._bringing.values()):
            self.let_go(bringing.tracked)

    def _needed(self, request: Any, first: int, num_tokens: int) -> list[tuple[EngineGroup, BlockKeys]]:
        """Return what is needed of each KV group for so many tokens behind the first ones."""
        stop, groups = first + num_tokens, self._configuration.groups
        needed = ((group, self._naming.needed(group, request, first, stop)) for group in groups)
        return [(group, keys) for group, keys in needed if len(keys)]

    def _note_tiers(
        self, tracked: Tracked, needed: list[tuple[EngineGroup, BlockKeys]], num_tokens: int
    ) -> float | None:
        """Take note of which tiers have so many tokens, by the main group; return how long loading is likely to take.

        From memory that is 0; None if it is not known.
        """
        size, load_s, is_known = self._configuration.main.block_size, 0.0, True
        for group, keys in needed:
            found = self._kv.lookup_nowait(keys)
            in_memory = sum(found.by_tier.get(tier, 0) for tier in self._memory)
            load_s += found.estimated_load_s
            is_measured = found.num_blocks == len(keys) and found.estimated_load_s > 0
            is_known = is_known and (in_memory == len(keys) or is_measured)
            if group is self._configuration.main:
                each = max(size, -(-num_tokens // len(keys)))  # few blocks of a window stand for all that comes before
                tracked.by_tier = {tier: num_blocks * each for tier, num_blocks in found.by_tier.items()}
        return load_s if is_known else None

    def _wait(self, *beginning: Beginning) -> None:
        """Wait for plans for what is left of this step's patience: what is late comes in the next one.

        For a read of storage only if it is likely to take less than half of what it would take to compute it: others
        would wait for that, and to be computed in a step to come would cost the request this one.
        """
        per_s = self._paying.tokens_per_s
        for each in beginning:
            began_s = time.monotonic()
            if each.load_s == 0.0:
                if self._patience_s > 0:
                    self._planner.wait_planned(each.jobs, self._patience_s)
                    self._patience_s -= time.monotonic() - began_s
                continue
            wait_s = min(self._read_patience_s, each.num_tokens / per_s / 2 if per_s else 0.0)
            if each.load_s is None or each.load_s > wait_s or self._may_hang:
                continue
            if not self._planner.wait_planned(each.jobs, wait_s):
                self._read_again_s, self._late = self._clock() + _READ_AGAIN_S, each.jobs
            self._read_patience_s -= time.monotonic() - began_s

    @property
    def _may_hang(self) -> bool:
        """Whether a step has waited for storage in vain just now, for what has not come yet."""
        have_come = (job.decided is not None and job.decided.num_blocks > 0 for job in self._late)
        return self._clock() < self._read_again_s and not all(have_come)

    def begin(self, tracked: Tracked, tables: Sequence[list[int]], num_external_tokens: int) -> None:
        """Have what was found copied, now that its request has its blocks; by block table, these."""
        request, size = tracked.request, self._configuration.main.block_size
        first, num_tokens = tracked.num_stored, min(tracked.num_found, num_external_tokens)
        needed, parts = self._needed(request, first, num_tokens), []
        if num_tokens < tracked.num_found and not self._configuration.loads_parts:
            self.let_go(tracked)  # other blocks of windows and states are needed
        brought = self._bringing.get(request.request_id)
        load_s = self._note_tiers(tracked, needed, num_tokens) if brought is None else None
        for group, keys in needed:
            ids = tuple(tables[group.table][keys.start : keys.start + len(keys)])
            self._describe(request, group, keys[: (first + num_tokens) // group.block_size - keys.start])
            blocks = GPULoadStoreSpec(ids, group.number)
            if brought is None:
                job = self._planner.plan_load(keys, blocks)
            else:
                job = brought.jobs[group.number]
                job.bind(blocks)
            parts.append((job, ids))
        jobs = [job for job, _ in parts]
        load = self._loads[request.request_id] = Load(
            tuple(parts), tracked, first, num_tokens, self._clock(), not_ended={job.number for job in jobs}
        )
        if brought is None:
            load.num_more = 0 if load_s == 0.0 else sum(len(keys) for _, keys in needed)
            self._beginning.append(Beginning(jobs, load_s, num_tokens))
        else:
            del self._bringing[request.request_id]
            load.begun_s, load.comes_first, load.num_more = brought.begun_s, brought.comes_first, brought.num_more
            if tracked.num_found < brought.num_tokens:
                load.num_lost = (brought.num_tokens - tracked.num_found) // size
                tracked.may_load = False
        if not load.comes_first:
            self._room.wait(request, tables)
        tracked.num_stored = first + num_tokens

    def wait_planned(self, *, is_idle: bool) -> None:
        """Wait a moment for the plans of loads that begin in this step: in the next they would be late.

        A step that computes nothing waits for what is brought, too: else vLLM does such steps one after the other, and
        leaves the interpreter to nobody.
        """
        self._wait(*self._beginning)
        if is_idle and self._bringing:
            jobs = [job for bringing in self._bringing.values() for job in bringing.jobs.values()]
            self._wait(Beginning(jobs, 0.0, 0))

    def begin_step(self) -> None:
        """Let go of what was to be loaded in this step and has no blocks of vLLM's, and forget what the step has taken.

        Where there are none vLLM asks again in the next step, and so on: then the request waits for its load as those
        do that bring much.
        """
        for bringing in list(self._bringing.values()):
            if bringing.is_told:
                bringing.tracked.may_hurry = False
                self.let_go(bringing.tracked)
            elif self._is_late(bringing) and bringing.is_over:  # vLLM does not ask for it, and may never again
                self.let_go(bringing.tracked)
            elif self._is_late(bringing):
                self._give_up(bringing)
        self._beginning = []
        self._room.begin_step()
        self._renew()

    def deliver(self, step: Step) -> None:
        """Have the workers do, in a step, what is planned."""
        now = self._clock()
        for name, load in list(self._loads.items()):
            jobs, waited_s = [job for job, _ in load.parts], now - load.begun_s
            is_late = waited_s > self._paying.patience_s(load.num_tokens)
            if is_late and not load.is_given_up and any(job.plan is None for job in jobs):
                load.is_given_up = True
                for job in jobs:
                    job.cancel(undelivered=True)
            if any(job.plan is None or (load.is_given_up and job.result is None) for job in jobs):
                continue  # what was given up comes back with nothing, soon; a plan that came before that is void
            del self._loads[name]
            held = [0 if job.result is not None or job.plan is None else job.plan.num_blocks for job in jobs]
            wanted = [len(ids) for _, ids in load.parts]
            if held != wanted and not self._configuration.loads_parts:
                held = [0 for _ in jobs]  # a window without its prefix is of no use, nor the other way round
            parts = []
            for (job, ids), num_blocks in zip(load.parts, held, strict=True):
                parts.append((ids, job.plan if num_blocks else None))
                if num_blocks:
                    self._moving[job.number] = load
                else:
                    job.cancel(undelivered=True)  # a server may hold slots for its plan yet
            step.loads.append(LoadOrder(name, tuple(parts), load.comes_first))
            if held != wanted:
                load.fall_short()
            self._counts.load(sum(wanted) + load.num_lost, sum(held), waited_s)

    def took(self, outcomes: Outcomes) -> None:
        """Take note of what a worker has moved, if it is of a load."""
        load = self._moving.get(outcomes.job)
        if load is not None and outcomes.num_moved < load.num_blocks_of(outcomes.job):
            load.fall_short()

    def ended(self, job: Job, result: JobResult) -> None:
        """Count a part of a load that has ended, if the job is one: tokens with the last, as they need all parts."""
        if (load := self._moving.pop(job.number, None)) is None:
            return
        load.not_ended.discard(job.number)
        if result.num_blocks < load.num_blocks_of(job.number) and not load.is_short:
            load.fall_short()  # it was lost with its server, say: its workers have yet to say whether they failed
        num_tokens = 0
        if self._configuration.loads_parts:
            num_tokens = result.num_blocks * self._configuration.main.block_size
        elif not load.not_ended and not load.is_short:
            num_tokens = load.num_tokens
        self._counts.load_ended(num_tokens, result.by_tier)


def num_hits(states: bytes) -> int:
    """Count the first of some blocks that can be loaded, by the states that `BlockCache.membership` says."""
    return len(states) - len(states.lstrip(_HIT))
