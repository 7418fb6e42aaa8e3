"""What a lookup answers: runs of tiers, made one over ranks, with what loading them would take."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.books import SlotState
from tiered_kv.catalog.locate import locate_from_any_thread, states_from_any_thread
from tiered_kv.load_costs import LoadCost
from tiered_kv.results import BlockState, LookupResult, TierRun
from tiered_kv.specs import LoadStoreSpec
from tiered_kv.tiers.base import prefix_of
from tiered_kv.tiers.batch import Batch
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.storage import StorageTier


def lookup_result(chains: Sequence[Chain], found: Sequence[list[TierRun]]) -> LookupResult:
    """Say what is there of one prefix, for every rank.

    Args:
        chains: One per rank, of one KV group.
        found: What each has, from the first block on.
    """
    runs = found[0] if len(found) == 1 else _weakest(chains[0].names, found)
    num_blocks = runs[-1].stop if runs else 0
    payload_bytes = sum(chain.group.payload_bytes for chain in chains)
    costs = {tier.name: _cost(tier, len(chains)) for tier in chains[0].storage}
    return LookupResult(num_blocks, tuple(runs), num_blocks * payload_bytes, chains[0].group.block_size, costs)


def _cost(tier: StorageTier, num_ranks: int) -> LoadCost:
    """Say what blocks cost that are read from a tier now, all ranks' parts of them; nothing where none was read yet."""
    if (now := tier.speed.estimate()) is None:
        return LoadCost(0.0, 0.0)
    stride = tier.shape.stride_bytes
    return LoadCost(now.first_s, num_ranks * stride * now.byte_s, now.num_others, now.others_bytes // stride)


def with_pending(parts: Sequence[tuple[Chain, Batch]], found: LookupResult) -> LookupResult:
    """Say how many blocks behind a prefix are on their way to host memory, or there, on every rank."""
    start, num_pending = found.num_blocks, 0
    if start == len(parts[0][1]):
        return found
    for chain, batch in parts:
        host = chain.host.index
        first = host.find(batch.names[start : start + 1])[1]
        if len(parts) == 1 and not (len(first) and first[0] == SlotState.PENDING):
            return found  # as nearly always: that should cost nothing
        names = batch.names[start:]
        coming = host.find(names)[1] == int(SlotState.PENDING)
        n = prefix_of(np.logical_or.reduce([coming, *(index.ready(names) for index in chain.indexes())]))
        num_pending = n if chain is parts[0][0] else min(num_pending, n)
    return replace(found, num_pending=num_pending) if num_pending else found


def why_not_more(parts: Sequence[tuple[Chain, Batch]], found: Sequence[list[TierRun]], num_blocks: int) -> str:
    """Say why the prefix ends where it does: what befell the first block behind it, on the rank that lacks it."""
    for (chain, batch), runs in zip(parts, found, strict=True):
        if num_blocks < len(batch) and (runs[-1].stop if runs else 0) == num_blocks:
            return chain.why_missing(batch[num_blocks : num_blocks + 1])
    return ""


def why_not_found(parts: Sequence[tuple[Chain, Batch]], num_found: int, first: int) -> str:
    """Say what befell the block ``first``, on the rank that lacks it; nothing if all blocks were found."""
    if num_found == len(parts[0][1]):
        return ""
    blocks = [(chain, batch[first : first + 1]) for chain, batch in parts]
    chain, block = next((each for each in blocks if not each[0].locate(each[1])), blocks[0])
    return chain.why_missing(block)


_MISS = int(BlockState.MISS)
_STATES = np.full(len(SlotState), _MISS, np.int8)
_STATES[SlotState.PENDING], _STATES[SlotState.READY] = BlockState.PENDING, BlockState.HIT


async def with_specs(chain: Chain, batch: Batch, found: LookupResult) -> LookupResult:
    """Say of each run where its blocks are, as far as its tier can tell. Each tier is asked once."""
    tiers = {tier.name: tier for tier in chain.tiers}
    runs_of: dict[str, list[TierRun]] = {}
    for run in found.runs:
        runs_of.setdefault(run.tier, []).append(run)

    async def locate(name: str) -> dict[TierRun, LoadStoreSpec]:
        runs = runs_of[name]
        spec = await tiers[name].locate(batch[np.concatenate([np.arange(run.start, run.stop) for run in runs])])
        if spec is None:
            return {}
        ends = accumulate(run.stop - run.start for run in runs)
        return {run: spec[end - (run.stop - run.start) : end] for run, end in zip(runs, ends, strict=True)}

    specs: dict[TierRun, LoadStoreSpec] = {}
    for each in await asyncio.gather(*map(locate, runs_of)):
        specs |= each
    return replace(found, runs=tuple(replace(run, spec=specs.get(run)) for run in found.runs))


def owned_runs(chain: Chain, batch: Batch) -> list[TierRun]:
    """Find the longest prefix that the owned tiers can read, from any thread."""
    tiers = chain.in_use()
    located = locate_from_any_thread([tier.index for tier in tiers], batch.names)
    return [TierRun(tiers[run.tier].name, run.start, run.stop) for run in located.runs]


def states_of(parts: Sequence[tuple[Chain, Batch]]) -> NDArray[np.int8]:
    """Say of each block what is known of it, from any thread; of several ranks, what the one says that has least."""
    states: NDArray[np.int8] = np.minimum.reduce([_states_of_rank(chain, batch) for chain, batch in parts])
    return states


def _states_of_rank(chain: Chain, batch: Batch) -> NDArray[np.int8]:
    """Ask shared tiers, one after another, for what is nowhere above them; their answers come later."""
    states = _STATES[states_from_any_thread(chain.indexes(), batch.names)]
    for tier in chain.shared:
        left = np.flatnonzero(states == _MISS)
        if not len(left):
            break
        if tier.health.is_bypassed:
            continue
        states[left], to_ask = tier.answers.look(batch.names[left])
        if to_ask.any():
            chain.loop_calls.call(tier.ask_later, batch[left[to_ask]])
    return states


def _weakest(names: Sequence[str], found: Sequence[list[TierRun]]) -> list[TierRun]:
    """Cut to the prefix that all have; of each block, the slowest tier that some rank has to read it from."""
    num_blocks = min(runs[-1].stop if runs else 0 for runs in found)
    slowest = np.zeros(num_blocks, np.int64)
    for runs in found:
        for run in runs:
            part = slowest[run.start : run.stop]
            np.maximum(part, names.index(run.tier), out=part)
    cuts = [0, *(np.flatnonzero(np.diff(slowest)) + 1).tolist(), num_blocks] if num_blocks else []
    return [TierRun(names[int(slowest[start])], start, stop) for start, stop in pairwise(cuts)]
