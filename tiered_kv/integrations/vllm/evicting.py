"""Stores of what vLLM's own cache is about to drop, where memory below is to have what vLLM has not.

What vLLM drops next lies at the head of its pool's free queue. Ahead of it, by more blocks than a step takes, those
that memory has not are copied out. They are held in the pool while they are copied, and are the first to go again then.

vLLM's pool says what a block holds by a hash, and not whose salt it was; so what requests fill is noted here.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from tiered_kv.cache.block_cache import BlockCache
from tiered_kv.catalog.copy_budget import CopyBudget
from tiered_kv.integrations.vllm.configuration import Configuration, EngineGroup
from tiered_kv.integrations.vllm.counts import Counts
from tiered_kv.integrations.vllm.storing import MOST_DUE, MOST_STEPS, PendingStores
from tiered_kv.values.keys import BlockKeys
from tiered_kv.values.results import BlockState

MOST_AHEAD: Final = 1024
"""Blocks of the free queue, at most, that are looked at in a step."""
_STEPS_AHEAD: Final = 4
"""So many steps' blocks: what is planned in one step is copied in the next, and vLLM's again in the one after it."""
_SHARE_TAKEN: Final = 1 / 4
"""Of the blocks that were looked at, to be taken before it is looked again: one step's, of those ahead."""
_GROUP_BYTES: Final = 4
"""Of what a pool calls a block by, behind the hash of its tokens."""


class _Held(NamedTuple):
    """What a block of vLLM's holds: a key of a run, and by which hash vLLM knows it, which is no adapter's key."""

    hash: bytes
    keys: BlockKeys
    at: int


class Evicting:
    """What vLLM's cache holds, as far as its connector has seen it, and what it is about to drop."""

    def __init__(
        self,
        storing: PendingStores,
        configuration: Configuration,
        counts: Counts,
        kv: BlockCache,
        call: Callable[..., object],
        memory: str,
        budget: CopyBudget,
    ) -> None:
        """Watch a vLLM with one KV group of blocks that are all needed.

        Args:
            storing: Copies blocks out.
            configuration: What is wanted.
            counts: What is counted.
            kv: The cache.
            call: Has the cache's event loop call something, without waiting.
            memory: The name of the memory tier that is to have what vLLM has not.
            budget: Says what is worth a copy.
        """
        self._storing = storing
        self._group: EngineGroup = configuration.main
        wanted = max(MOST_DUE, _STEPS_AHEAD * configuration.num_step_blocks)
        self._num_ahead = min(MOST_AHEAD, wanted, configuration.num_engine_blocks // 4)
        self._counts = counts
        self._kv = kv
        self._call = call
        self._memory = memory
        self._budget = budget
        self._held: dict[int, _Held] = {}  # by number of vLLM's block
        self._safe: set[int] = set()  # those of them that memory had, or was about to have, as they came near the head
        self._resident: list[BlockKeys] = []  # to be told
        self._num_resident = 0
        self._num_steps = 0
        self._turns: dict[int, int] = {}  # of blocks that came near the head and were not used since, by a count
        self._num_turns = 0
        self._num_seen = self._num_taken = 0  # blocks near the head, the last time, and since then

    def note(self, keys: BlockKeys, block_ids: list[int], hashes: Sequence[bytes]) -> None:
        """Take note of blocks that a request has in vLLM's cache, by its hashes: full after the step that is next."""
        num_late = 0
        for at, (block, block_hash) in enumerate(zip(block_ids, hashes, strict=True)):
            before = self._held.get(block)
            num_late += before is not None and before.hash != block_hash and block not in self._safe
            self._held[block] = _Held(block_hash, keys, at)
            self._safe.discard(block)
            self._turns.pop(block, None)
        if num_late:
            self._counts.add(store_blocks_late=num_late)
        if block_ids:
            self._resident.append(keys)
            self._num_resident += len(keys)

    def step(self, pool: Any, num_taken: int, copy_cost: float = 0.0) -> None:
        """Tell what vLLM has by now, and begin to copy out what it is about to drop. Called once a step.

        Args:
            pool: vLLM's.
            num_taken: Blocks that requests have been given for the step.
            copy_cost: See `CopyBudget.cost`.
        """
        self._num_steps += 1
        self._num_taken += num_taken
        leaving = self._leaving(pool) if self._num_taken >= self._num_seen * _SHARE_TAKEN else []
        if leaving or self._num_resident >= MOST_DUE or self._num_steps >= MOST_STEPS:
            self._budget.cost = copy_cost
            self._ask()
            runs = [keys[start:stop] for keys, start, stop, _ in leaving]
            if self._resident or runs:
                self._call(_tell, self._kv, self._resident, runs)
            self._resident, self._num_resident, self._num_steps = [], 0, 0
            self._copy_out(runs, [ids for _, _, _, ids in leaving])

    def forget(self) -> None:
        """Other weights are served: what vLLM has now is nobody's."""
        self._held.clear()
        self._safe.clear()
        self._turns.clear()
        self._resident, self._num_resident = [], 0

    def _ask(self) -> None:
        """Tell the budget what requests have asked for: all at once, unless two of them have asked for the same."""
        runs = [keys.words for keys in self._resident]
        digests = [digest for keys in self._resident for digest in keys]
        if len(runs) > 1 and len({*digests}) == len(digests):
            runs = [np.concatenate(runs)]
        for names in runs:
            self._budget.ask(names)

    def _leaving(self, pool: Any) -> list[tuple[BlockKeys, int, int, list[int]]]:
        """Return runs of neighbouring blocks near the head of the free queue that were not there before."""
        self._num_taken = self._num_seen = 0
        by_run: dict[int, list[tuple[int, int]]] = {}
        runs: dict[int, BlockKeys] = {}
        queue = pool.free_block_queue
        ahead = queue.fake_free_list_head.next_free_block
        while self._num_seen < self._num_ahead and ahead is not None and ahead is not queue.fake_free_list_tail:
            block, ahead = ahead, ahead.next_free_block
            self._num_seen += 1
            number = block.block_id
            if number not in self._turns:
                self._num_turns += 1
                self._turns[number] = self._num_turns
            held = self._held.get(number)
            if held is None or number in self._safe:
                continue
            if block.block_hash is None or block.block_hash[:-_GROUP_BYTES] != held.hash:
                continue  # vLLM has forgotten it, or has put something else there
            self._safe.add(number)
            runs[id(held.keys)] = held.keys
            by_run.setdefault(id(held.keys), []).append((held.at, number))
        found = []
        for run, blocks in by_run.items():
            blocks.sort()
            for start, stop in _neighbours([at for at, _ in blocks]):
                first, last = blocks[start][0], blocks[stop - 1][0]
                found.append((runs[run], first, last + 1, [number for _, number in blocks[start:stop]]))
        return found

    def _copy_out(self, runs: list[BlockKeys], ids: list[list[int]]) -> None:
        """Begin to copy those that memory has not and that are worth it, in few jobs, and none of much."""
        together: list[BlockKeys] = []
        numbers: list[int] = []
        for keys, blocks in zip(runs, ids, strict=True):
            states = self._kv.membership(keys, tier=self._memory)
            missing = (states != BlockState.HIT).nonzero()[0]
            if not len(missing):
                continue
            wanted = missing[self._budget.drop(keys.words[missing])].tolist()
            self._counts.store(len(missing) - len(wanted), 0)
            for start, stop in _neighbours(wanted):
                part = wanted[start:stop]
                if numbers and len(numbers) + len(part) > 2 * MOST_DUE:
                    self._begin(together, numbers)
                    together, numbers = [], []
                together.append(keys[part[0] : part[-1] + 1])
                numbers += [blocks[each] for each in part]
        if numbers:
            self._begin(together, numbers)

    def _begin(self, runs: list[BlockKeys], block_ids: list[int]) -> None:
        self._storing.copy_out(self._group, runs, block_ids, self._turns)


def _tell(kv: BlockCache, resident: list[BlockKeys], leaving: list[BlockKeys]) -> None:
    for keys in _by_salt(resident):
        kv.resident(keys)
    for keys in _by_salt(leaving):
        kv.leaving(keys)


def _by_salt(runs: list[BlockKeys]) -> Iterator[BlockKeys]:
    """Put the keys of each salt together, where it does not matter of which prompt they are."""
    salts: dict[bytes, list[BlockKeys]] = {}
    for keys in runs:
        salts.setdefault(keys.salt_id, []).append(keys)
    for salt, each in salts.items():
        digests = b"".join([keys.digests for keys in each])
        yield BlockKeys(digests, block_size=each[0].block_size, group=each[0].group, salt_id=salt)


def _neighbours(numbers: list[int]) -> list[tuple[int, int]]:
    """Return from where to where ascending numbers follow one another."""
    breaks = [at for at in range(1, len(numbers)) if numbers[at] != numbers[at - 1] + 1]
    return list(pairwise([0, *breaks, len(numbers)])) if numbers else []
