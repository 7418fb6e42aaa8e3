"""The stores of the scheduler's side: blocks gather, over requests and steps, and go to the workers by one job.

A job costs the event loop some turns whatever it holds, and each of them takes the interpreter from vLLM's own thread.
So what a few steps fill goes together. Until it is copied it is in vLLM's own blocks, which are kept for that: vLLM
keeps those of a request until the workers say that they are copied, and those that a request leaves behind on its way
(out of its window, an older state) are held here, by a reference of ours in vLLM's pool.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import chain, takewhile
from typing import Any, Final

from tiered_kv.cache.planner import Planner
from tiered_kv.integrations.vllm.configuration import Configuration, EngineGroup
from tiered_kv.integrations.vllm.counts import Counts
from tiered_kv.integrations.vllm.messages import Due, Step, Store, StoreOrder, Tracked
from tiered_kv.integrations.vllm.naming import RequestNaming
from tiered_kv.transfers.jobs import Job
from tiered_kv.values.keys import BlockKeys
from tiered_kv.values.plan import Outcomes
from tiered_kv.values.specs import GPULoadStoreSpec

MOST_DUE: Final = 32
"""Blocks that are due at once, and no more: they go with the next job."""
MOST_STEPS: Final = 32
"""From one job to the next: what a kill can lose, where less is due."""
PATIENCE: Final = 4
"""So many times more is due while a copy takes long, as those that are slow beside steps become fewer; and in so many
times fewer steps a job begins where vLLM has few free blocks or requests, or stores for others alone."""
_STEPS_OF_A_COPY: Final = 2
"""In so many it has ended, and the scheduler heard of it, unless it is slow."""
_ROOMY: Final = 1 / 4
"""Of vLLM's blocks; while more of them are free, what is due waits in those of requests that have ended, too."""
_MANY_REQUESTS: Final = 4
"""While a step has so many. Fewer may soon be none, and then no step may come for long: what is due would stay."""
MOST_HELD: Final = 1 / 4
"""Of vLLM's blocks, due or being copied; while they are more, and more than some steps fill, stores are passed over."""
_STEPS_HELD: Final = 4
_NULL_BLOCK: Final = 0
"""vLLM's, in the place of a block that a request does not have any more."""
_PLAN_TIMEOUT_S: Final = 0.1
"""How long a step that preempts waits for the plan of what is due: a turn or two of the event loop."""


class PendingStores:
    """What is to be stored, what is being stored, and whose blocks vLLM has to keep for that."""

    def __init__(
        self,
        planner: Planner,
        configuration: Configuration,
        counts: Counts,
        naming: RequestNaming,
        *,
        hear: Callable[[float], bool],
        describe: Callable[[Any, EngineGroup, BlockKeys], None],
    ) -> None:
        """Plan by ``planner``.

        Args:
            planner: Of the cache.
            configuration: What is wanted.
            counts: What is counted.
            naming: Names blocks.
            hear: Takes the news of jobs, waits for the first so long, and says whether there was any.
            describe: Says what blocks are, to routers.
        """
        self._planner = planner
        self._configuration = configuration
        self._counts = counts
        self._naming = naming
        self._hear = hear
        self._describe = describe
        self._due: list[Due] = []
        self._num_due = 0
        self._num_steps = MOST_STEPS
        self._is_urgent = False
        self._is_short = False
        self._stores: dict[int, Store] = {}
        self._num_copying = 0  # blocks of jobs, as of the last step
        num_step_blocks = configuration.num_step_blocks * len(configuration.groups)
        most_held = int(MOST_HELD * configuration.num_engine_blocks)
        self._most_held = max(2 * MOST_DUE, _STEPS_HELD * num_step_blocks, most_held)
        self._leaving: dict[str, Tracked] = {}
        self._kept: set[str] = set()
        self._pool: Any = None

    @property
    def num_held(self) -> int:
        """What is due or being stored, and requests that have ended whose blocks vLLM keeps."""
        return len(self._due) + len(self._stores) + len(self._kept)

    def jobs_of(self, tracked: Tracked) -> list[Job]:
        """Return the jobs that hold blocks of a request and have not ended, as far as is known."""
        return [store.job for store in self._stores.values() if tracked in store.tracked]

    @property
    def frees_soon(self) -> bool:
        """Whether blocks that no running request has any more will be free as soon as they are copied."""
        return bool(self._kept) or any(self._pool.blocks[block].ref_cnt == 1 for block in self._held())

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks are held here, by a reference of ours, that are to be given back in a step to come."""
        return next(self._held(), None) is not None

    def use_pool(self, pool: Any) -> None:
        """Hold blocks in vLLM's pool."""
        self._pool = pool

    def gather(
        self, tracked: Tracked, group: EngineGroup, first: int, block_ids: list[int], *, end: int | None = None
    ) -> None:
        """Have a request's blocks stored, from number ``first`` on: full at the latest after the step that is next.

        Args:
            tracked: The request.
            group: Of the blocks.
            first: The number of the first of them.
            block_ids: vLLM's. What the request has left behind is its empty block, and is left out.
            end: Tokens of a prefix that ends inside of the one block that is given, and which that is stored for.
        """
        runs: list[Due] = []
        for at, block in enumerate(block_ids, start=first):
            if block == _NULL_BLOCK:
                continue
            if not runs or runs[-1].stop != at:
                runs.append(Due(tracked, group, at, [], end=end))
            runs[-1].block_ids.append(block)
        if self._num_due + self._num_copying > self._most_held:
            self._counts.store(sum(len(due.block_ids) for due in runs), 0)  # vLLM's requests need its blocks more
            return
        for due in runs:
            if not group.is_whole:
                tracked.leaving.append(due)
            self._due.append(due)
            self._num_due += len(due.block_ids)
            tracked.num_due += len(due.block_ids)

    def copy_out(
        self, group: EngineGroup, runs: list[BlockKeys], block_ids: list[int], turns: Mapping[int, int]
    ) -> None:
        """Begin a job for blocks that no request has: held until they are copied, and then where they were in line.

        Args:
            group: Of the blocks.
            runs: Their keys.
            block_ids: vLLM's.
            turns: Of blocks near the head of vLLM's queue, in which order they came there; as it is by then. A block
                that has none by then was used meanwhile.
        """
        self._pool.touch([self._pool.blocks[block] for block in block_ids])
        job = self._planner.plan_store(runs, GPULoadStoreSpec(block_ids, group.number))
        num_ranks = self._configuration.num_ranks
        self._stores[job.number] = Store(job, frozenset(), len(block_ids), num_ranks, nobodys=block_ids, turns=turns)

    def hold(self, tracked: Tracked, num_computed: int) -> None:
        """Hold blocks that a request has no use for behind so many tokens: it gives them back in its next step."""
        for due in list(tracked.leaving):
            is_in_table = due.end is None  # the state of a prompt's end is not: vLLM has copied it
            num_left = due.group.num_left(num_computed) - due.first if is_in_table else 1
            held = due.block_ids[due.num_held : max(0, num_left)]
            if held:
                self._pool.touch([self._pool.blocks[block] for block in held])
                due.num_held += len(held)
            if due.num_held == len(due.block_ids):
                tracked.leaving.remove(due)

    def hurry(self) -> None:
        """Have blocks of requests that have ended wait no longer in this step: vLLM wants some that it has not."""
        self._is_short = True

    def is_due(self, num_requests: int) -> bool:
        """Whether enough is due, or for long enough, for a job to begin. Called once a step.

        Args:
            num_requests: That the step computes. If it computes none there is nothing to spare.
        """
        self._num_steps += 1
        is_short, self._is_short = self._is_short, False
        self._num_copying, is_slow = 0, False
        for store in self._stores.values():
            if store.num_unanswered and (store.is_told or store.job.result is None):
                self._num_copying += store.num_blocks
                store.num_steps += store.is_told
                is_slow = is_slow or store.num_steps > _STEPS_OF_A_COPY
        if not self._num_due:
            return False
        is_slow = is_slow and not self.frees_soon
        may_wait = num_requests >= _MANY_REQUESTS and self._has_room and not is_short
        is_enough = self._num_due >= (PATIENCE if is_slow else 1) * MOST_DUE
        is_time = self._num_steps >= (MOST_STEPS if may_wait or is_slow else MOST_STEPS // PATIENCE)
        return is_enough or is_time or not num_requests or (self._is_urgent and not may_wait)

    @property
    def _has_room(self) -> bool:
        """Whether what is due may stay in vLLM's blocks for some more steps, though requests have ended that had it."""
        num_free: int = self._pool.get_num_free_blocks() if self._pool is not None else 0
        return self._configuration.loads and num_free > _ROOMY * self._configuration.num_engine_blocks

    def plan(self) -> None:
        """Begin jobs for all that is due: few, and none of much, as it finds room for all that it holds or for none."""
        due, self._due, self._num_due = self._due, [], 0
        self._num_steps, self._is_urgent = 0, False
        for group in self._configuration.groups:
            for together in _jobs([each for each in due if each.group is group]):
                self._begin(group, together)

    def deliver(self, step: Step, scheduled: Any) -> None:
        """Tell the workers of what is planned, and of whose blocks are to be given up.

        Of requests that were preempted their blocks are others' from now on: what is due of them is copied before that,
        if vLLM's runner lets us.

        Args:
            step: For the workers.
            scheduled: What vLLM has scheduled for it.
        """
        preempted = step.preempted = set(scheduled.preempted_req_ids or ())
        if preempted and self._configuration.writes_first:
            self._drop(preempted, self._written_first(scheduled))
        if preempted:
            self.hurry()  # a reset of vLLM's cache may have found blocks of requests that have ended
            self._hurry(preempted)
        for store in list(self._stores.values()):
            if store.is_told:
                continue
            is_urgent = not preempted.isdisjoint(store.names)
            if store.job.result is not None:
                self._let_go(store)  # all is there already: nobody has to be told, and vLLM need not keep the blocks
            elif (plan := store.job.plan) is not None:
                (step.flushes if is_urgent else step.stores).append(StoreOrder(store.names, plan))
                store.is_told = True
            elif is_urgent:
                store.job.cancel()
                self._let_go(store)
                del self._stores[store.job.number]  # its plan has no moves from now on, and its end may come late
                self._counts.store(store.num_blocks, 0)
        for name, tracked in list(self._leaving.items()):
            if not tracked.num_due and all(store.is_told for store in tracked.stores):
                del self._leaving[name]
                step.leaving.add(name)  # the workers know by now what to wait for

    def give_up(self, tracked: Tracked) -> None:
        """Take note that a preempted request has no blocks any more: the workers wait for copies of them themselves."""
        tracked.stores.clear()
        tracked.leaving.clear()

    def end(self, tracked: Tracked) -> bool:
        """Take note that a request has ended; return whether vLLM has to keep its blocks until the workers say so."""
        if not (tracked.num_due or tracked.stores):
            return False
        name = tracked.request.request_id
        self._leaving[name] = tracked
        self._kept.add(name)
        self._is_urgent = self._is_urgent or bool(tracked.num_due)
        return True

    def freed(self, names: AbstractSet[str]) -> None:
        """Take note that vLLM has these requests' blocks back."""
        self._kept -= names

    def take(self, outcomes: Outcomes) -> Outcomes:
        """Take note that a rank has copied its part of a job, as far as it could; return how much of that is of use."""
        if (store := self._stores.get(outcomes.job)) is None:
            return outcomes
        store.num_unanswered -= 1
        if not store.num_unanswered:
            if store.num_whole < store.num_blocks:
                _have_again(store.held_behind(store.num_whole))
            self._let_go(store)
            if store.is_counted:
                del self._stores[outcomes.job]
        if store.num_whole == store.num_blocks:
            return outcomes
        plan = store.job.plan
        # Of a job that has ended nobody knows which blocks are whole; a server that was silent may yet keep them.
        positions = plan.move_of(outcomes.rank).positions if plan is not None and plan.moves else ()
        num_whole = sum(1 for _ in takewhile(lambda at: at < store.num_whole, positions))
        return replace(outcomes, num_moved=min(outcomes.num_moved, num_whole))

    def ended(self, job: Job) -> None:
        """Count a job that has ended, and let go of its blocks, unless a worker may be copying them yet."""
        if job.result is None or (store := self._stores.get(job.number)) is None:
            return
        store.is_counted = True
        self._counts.store(store.num_blocks, job.result.num_blocks)
        if not (store.is_told and store.num_unanswered):  # else its server was silent, and may speak again
            self._let_go(store)
            del self._stores[job.number]

    def forget(self) -> None:
        """Drop what no worker has been told of: other weights have computed it than those that are named from now on.

        Nor would its bytes be there: vLLM forgets all before it sleeps, and its memory has nothing in it after that.
        """
        self._leave_out(self._due)
        self._due, self._num_due = [], 0
        for number, store in list(self._stores.items()):
            if not store.is_told:
                store.job.cancel(undelivered=True)
                self._let_go(store)
                del self._stores[number]  # nobody hears of its end
                self._counts.store(store.num_blocks, 0)

    def pass_over(self) -> None:
        """Drop what is due, and what workers are copying: it may not be what it is named by.

        What a request has of it after its next step is; so that is due again then. Of what is being copied once that
        has ended: a plan made before leaves out what a copy is bringing.
        """
        _have_again(self._due)
        for store in self._stores.values():
            if store.is_told:
                store.num_whole = 0
            else:
                _have_again(store.held_behind(0))
        self.forget()

    def _begin(self, group: EngineGroup, gathered: list[Due]) -> None:
        gathered = self._known(gathered)
        if not gathered:
            return
        runs = [
            self._naming.keys(group, each.tracked.request, each.first, each.stop, end=each.end) for each in gathered
        ]
        ids = tuple(block for each in gathered for block in each.block_ids)
        job = self._planner.plan_store(runs, GPULoadStoreSpec(ids, group.number))
        tracked = frozenset(each.tracked for each in gathered)
        store = Store(job, tracked, len(ids), self._configuration.num_ranks, gathered)
        self._stores[job.number] = store
        for due, keys in zip(gathered, runs, strict=True):
            if due.end is None:  # routers know whole blocks
                self._describe(due.tracked.request, group, keys)
            due.tracked.num_due = 0
            due.tracked.stores.add(store)

    def _known(self, gathered: list[Due]) -> list[Due]:
        """Return those of which it is still known what has computed them; leave out the others."""
        unknown = [each for each in gathered if not self._naming.can_name(each.tracked.request)]
        self._leave_out(unknown)
        return [each for each in gathered if each not in unknown]

    def _leave_out(self, dues: list[Due]) -> None:
        """Store nothing of what is due, and count it."""
        for due in dues:
            due.tracked.num_due = 0
        self._let_go_of(dues)
        if num_blocks := sum(len(due.block_ids) for due in dues):
            self._counts.store(num_blocks, 0)

    def _written_first(self, scheduled: Any) -> AbstractSet[int]:
        """Return the blocks that hold something else by the time the workers hear who was preempted.

        New blocks are emptied where a model needs that, copies are made of blocks of which a prompt has a part, and
        states move on to new blocks, which nobody empties.
        """
        written = set(scheduled.new_block_ids_to_zero or ())
        written.update(copy.dst_block_id for copy in scheduled.kv_cache_block_copies or ())
        for group in self._configuration.groups:
            if group.is_handed_over:
                for new in scheduled.scheduled_new_reqs:
                    written.update(new.block_ids[group.table][new.num_computed_tokens // group.block_size :])
                for tables in scheduled.scheduled_cached_reqs.new_block_ids:
                    written.update(tables[group.table] if tables else ())
        return written

    def _drop(self, preempted: AbstractSet[str], written: AbstractSet[int]) -> None:
        """Keep nothing of what others have written to where preempted requests had it, due or being copied."""
        for due in self._due:
            if due.tracked.request.request_id in preempted:
                num_whole = _num_first(due.block_ids, written)
                num_lost = len(due.block_ids) - num_whole
                del due.block_ids[num_whole:]
                due.tracked.num_due -= num_lost
                self._num_due -= num_lost
                self._counts.store(num_lost, 0)
        self._due = [due for due in self._due if due.block_ids]
        for store in self._stores.values():
            at = 0
            for due in store.dues:
                num_whole = _num_first(due.block_ids, written)
                if num_whole < len(due.block_ids) and due.tracked.request.request_id in preempted:
                    store.num_whole = min(at + num_whole, store.num_whole)
                    break
                at += len(due.block_ids)

    def _hurry(self, preempted: AbstractSet[str]) -> None:
        """Have a plan of all that is due of requests that were preempted, unless the event loop takes too long."""
        if any(due.tracked.request.request_id in preempted for due in self._due):
            self.plan()
        waiting = [each for each in self._stores.values() if not each.is_told and not preempted.isdisjoint(each.names)]
        deadline = time.monotonic() + _PLAN_TIMEOUT_S
        while any(each.job.plan is None and each.job.result is None for each in waiting):
            if not self._hear(max(0.0, deadline - time.monotonic())):
                return

    def _let_go(self, store: Store) -> None:
        for tracked in store.tracked:
            tracked.stores.discard(store)
        self._let_go_of(store.dues)
        blocks, store.nobodys = [self._pool.blocks[block] for block in store.nobodys], []
        self._pool.free_blocks(blocks)
        turns = store.turns
        self._put_back([block for block in blocks if not block.ref_cnt and block.block_id in turns], turns)

    def _put_back(self, blocks: list[Any], turns: Mapping[int, int]) -> None:
        """Have vLLM take free blocks when it would have, had they not been held: as they came near its queue's head.

        Were they the next, what came there before them would stay for good, and vLLM's cache have less of use.
        """
        queue, last = self._pool.free_block_queue, max((turns[block.block_id] for block in blocks), default=0)
        for block in blocks:
            queue.remove(block)
        block, before = queue.fake_free_list_head.next_free_block, []
        while block is not None and turns.get(block.block_id, last) < last:
            before.append(block)
            block = block.next_free_block
        for block in before:
            queue.remove(block)
        queue.prepend_n(sorted([*before, *blocks], key=lambda block: turns[block.block_id]))

    def _let_go_of(self, dues: list[Due]) -> None:
        for due in dues:
            if due in due.tracked.leaving:
                due.tracked.leaving.remove(due)
            if due.num_held:
                self._pool.free_blocks([self._pool.blocks[block] for block in reversed(due.block_ids[: due.num_held])])
                due.num_held = 0

    def _held(self) -> Iterator[int]:
        for due in chain(self._due, *(store.dues for store in self._stores.values())):
            yield from due.block_ids[: due.num_held]
        for store in self._stores.values():
            yield from store.nobodys


def _have_again(dues: Iterable[Due]) -> None:
    """Have what running requests have of it stored by a step to come."""
    for due in dues:
        due.tracked.num_stored = min(due.tracked.num_stored, due.first * due.group.block_size)


def _num_first(block_ids: list[int], written: AbstractSet[int]) -> int:
    """Count the first blocks that nobody has written to."""
    return next((at for at, block in enumerate(block_ids) if block in written), len(block_ids))


def _jobs(dues: list[Due]) -> Iterator[list[Due]]:
    """Share out what is due of one group, in its order; what does not fit, or would be there by two names, begins anew.

    A block of which a prefix ends inside may be full by now: it is stored for both.
    """
    together: list[Due] = []
    num_blocks, named = 0, dict[int, tuple[int, int | None]]()
    for due in dues:
        names = {block: (at, due.end) for at, block in enumerate(due.block_ids, start=due.first)}
        is_full = num_blocks + len(names) > 2 * MOST_DUE
        if together and (is_full or any(named.get(block, name) != name for block, name in names.items())):
            yield together
            together, num_blocks, named = [], 0, {}
        together.append(due)
        num_blocks += len(names)
        named |= names
    if together:
        yield together
