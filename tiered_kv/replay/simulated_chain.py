"""A chain of tiers without bytes: the catalog and policies that a cache ships, driven as loads and stores drive them.

What it leaves out: time that transfers take, requests that overlap, tiers that fail. Tiers with ``write="back"`` get
blocks at once. An engine may have a cache of its own above it, see `SimulatedEngine`.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog import Policy, TierIndex, locate
from tiered_kv.catalog.copy_budget import CopyBudget
from tiered_kv.catalog.uses import AdmissionFilter
from tiered_kv.media.backend import RecordShape
from tiered_kv.settings.chain_settings import tier_name
from tiered_kv.settings.registry import OWN_MEDIA, check_named, resolve_policy
from tiered_kv.settings.setting_errors import read_size
from tiered_kv.settings.settings import TieredKVSettings
from tiered_kv.settings.tier_settings import TierSettings
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.hints import StoreWhen, evicts
from tiered_kv.values.keys import Names
from tiered_kv.values.results import TierRun, num_found

_LEAST_USES, _MOST_USES = 1 << 12, 1 << 20
_EXPIRED_AT_ONCE: Final = 1 << 16
_NO_BOUND: Final = 1 << 62
NO_BLOCK: Final = "no request of the trace has a block: there is nothing to keep"


@dataclass(frozen=True, slots=True)
class TierPlan:
    """The plan of one simulated tier.

    Attributes:
        name: What results call it.
        capacity_bytes: How much it holds; None for a store without a bound.
        policy: By name or class, or the path of a class.
        is_memory: Whether blocks are kept there as they are, without a record's header, and loads leave copies.
        admit_after: See `StorageTierSettings.admit_after`.
        ttl_s: See `BookedTierSettings.ttl_s`.
    """

    name: str
    capacity_bytes: int | None
    policy: str | type[Policy] = "lru"
    is_memory: bool = False
    admit_after: int = 1
    ttl_s: float | None = None

    @property
    def policy_name(self) -> str:
        """What results call the policy."""
        return self.policy if isinstance(self.policy, str) else self.policy.__name__

    def block_bytes(self, payload_bytes: int) -> int:
        """Return what a block takes here."""
        shape = RecordShape(b"", payload_bytes)
        return shape.padded_bytes if self.is_memory else shape.stride_bytes

    def num_slots(self, payload_bytes: int, most: int) -> int:
        """Return how many blocks it holds, at most ``most``: more than there are makes no difference."""
        if self.capacity_bytes is None:
            return most
        return min(most, self.capacity_bytes // self.block_bytes(payload_bytes))


def plans_from(settings: TieredKVSettings) -> list[TierPlan]:
    """Return the tiers of settings. One without a capacity is imagined to hold everything."""
    return [_plan_of(tier) for tier in settings.tiers]


def tier_plans(texts: Sequence[str], policy: str) -> list[TierPlan]:
    """Read tiers from ``NAME=SIZE`` or ``NAME=SIZE:POLICY``, fastest first: ``cpu=16GiB``, ``s3`` without a bound.

    Raises:
        ConfigurationError: A name is no medium's, a size cannot be read, memory is given none or comes last, or two
            tiers have one name.
    """
    plans = []
    for text in texts:
        name, _, rest = text.partition("=")
        if not rest and name[:1].isdecimal():
            raise ConfigurationError(f"--tier {text}: no medium is called {name!r}: write NAME=SIZE, e.g. cpu={name}")
        check_named(name)
        size, _, own_policy = rest.partition(":")
        try:
            capacity = read_size(size) if size else None
        except ValueError:  # pydantic's are some
            raise ConfigurationError(
                f"--tier {text}: write NAME=SIZE, the size in bytes, e.g. cpu=16GiB or cpu=16GiB:lru"
            ) from None
        if capacity is None and name in OWN_MEDIA:
            raise ConfigurationError(f"--tier {text}: memory has an end, write how much there is, e.g. {name}=16GiB")
        plans.append(TierPlan(name, capacity, own_policy or policy, is_memory=name in OWN_MEDIA))
    check_order([plan.name for plan in plans])
    return plans


def check_order(names: Sequence[str]) -> None:
    """Raise `ConfigurationError` where tiers that are called by their media make no chain."""
    if len(set(names)) < len(names) or not all(names):
        raise ConfigurationError(f"tiers need names of their own, got {', '.join(map(repr, names))}")
    places = [{"gpu": 0, "cpu": 1}.get(name, 2) for name in names]
    if places != sorted(places):
        raise ConfigurationError(f"tiers go fastest first: gpu, cpu, then storage; got {', '.join(names)}")


class SimulatedTier:
    """One tier's books and what became of blocks there. Counts are of blocks."""

    def __init__(self, plan: TierPlan, index: TierIndex, most_blocks: int) -> None:
        """Begin with nothing in a tier that would hold ``most_blocks``, were there as many."""
        self.plan = plan
        self.index = index
        self.most_blocks = most_blocks
        self.hits = self.written = self.promoted = self.evicted = 0

    def add(self, names: Names) -> int:
        """Keep as many of these as there is room for, head first; return how many are new."""
        room = names[: self.index.num_slots]
        with self.index.reserve(room) as reservation:
            self.evicted += len(reservation.evicted)
            num_new = int(np.count_nonzero(reservation.slots >= 0))
            reservation.keep()
        return num_new


class SimulatedChain:
    """Serves requests, one after the other.

    Attributes:
        tiers: Fastest first; those that hold no block are left out.
        now_s: The time of the latest request.
    """

    def __init__(self, plans: Sequence[TierPlan], *, payload_bytes: int, num_blocks: int, promote: bool = True) -> None:
        """Make empty ones.

        Args:
            plans: The tiers.
            payload_bytes: Of a block.
            num_blocks: How many different blocks there will be.
            promote: See `CacheLimits.promote`.

        Raises:
            ConfigurationError: There is no such policy, or no tier that holds a block.
        """
        self.now_s = 0.0
        self.most_blocks = num_blocks
        self.tiers = [
            SimulatedTier(
                plan,
                TierIndex(slots, policy=resolve_policy(plan.policy), ttl_s=plan.ttl_s, clock=lambda: self.now_s),
                plan.num_slots(payload_bytes, _NO_BOUND),
            )
            for plan in plans
            if (slots := plan.num_slots(payload_bytes, num_blocks))
        ]
        if not num_blocks:
            raise ConfigurationError(NO_BLOCK)
        if not self.tiers:
            raise ConfigurationError(f"no tier holds a block of {payload_bytes:,} bytes")
        self.memory = [tier for tier in self.tiers if tier.plan.is_memory]
        self._promote = promote
        first = self.memory[0].index.num_slots if self.memory else 0
        window = min(max(_LEAST_USES, 4 * first), _MOST_USES)
        self._admission = AdmissionFilter([tier.plan.admit_after for tier in self.tiers], window)

    def go_on(self, at_s: float) -> None:
        """Set the clock, and drop the blocks that have expired by then."""
        self.now_s = at_s
        for tier in self.tiers:
            tier.index.expire(limit=_EXPIRED_AT_ONCE)

    def located(self, names: Names) -> list[TierRun]:
        """Return where the prefix is that can be loaded."""
        return locate({tier.plan.name: tier.index for tier in self.tiers}, names)

    def load(self, names: Names) -> NDArray[np.int64]:
        """Load the prefix that is there; return the blocks that came from each tier."""
        runs = self.located(names)
        by_tier = Counter[str]()
        for run in runs:
            by_tier[run.tier] += run.stop - run.start
        hits = np.array([by_tier[tier.plan.name] for tier in self.tiers], np.int64)
        for tier, count in zip(self.tiers, hits.tolist(), strict=True):
            tier.hits += count
        found = names[: num_found(runs)]
        if self._promote and len(found):
            for tier in self.memory:
                tier.promoted += tier.add(found)
        self.touch(found)
        return hits

    def touch(self, names: Names) -> None:
        """Count a use of what is there."""
        for tier in self.tiers:
            tier.index.touch(names)

    def use(self, names: Names) -> None:
        """Count a use by a prompt for tiers that want some, and bring to them what has had enough and is there."""
        for number, mask in self._admission.use(names):
            found = names[mask][self._is_there(names[mask])]
            tier = self.tiers[number]
            tier.written += tier.add(found)

    def store(self, names: Names, *, is_use: bool = True) -> int:
        """As a store does: blocks that the first memory tier has go no further. Return how many are copied."""
        if is_use:
            self.touch(names)  # what is there behind a hole
        if self.memory:
            names = names[~self.memory[0].index.ready(names)]
        for number, tier in enumerate(self.tiers):
            wanted = names if tier.plan.admit_after == 1 else names[self._admission.admits(number, names)]
            if len(wanted):
                tier.written += tier.add(wanted)
        return len(names)

    def _is_there(self, names: Names) -> NDArray[np.bool_]:
        is_there: NDArray[np.bool_] = np.logical_or.reduce([tier.index.ready(names) for tier in self.tiers])
        return is_there


class SimulatedEngine:
    """An engine's own cache above a chain: blocks used last, the tail of a prompt gone before its head, as vLLM's is.

    One request comes after another; the prompt of each is there when the next one comes, as far as it fits.

    Attributes:
        num_blocks: How many it holds.
        evicts: Whether blocks are stored when they are about to leave it, and not when they are computed.
        hits: Blocks of leading prefixes that it had.
        copied: Blocks that were copied out of it.
    """

    def __init__(self, chain: SimulatedChain, num_blocks: int, store_when: StoreWhen, ahead: int = 0) -> None:
        """Put an empty one above a chain; with 0 blocks it has nothing, and what is computed is stored.

        Args:
            chain: Of tiers.
            num_blocks: How many it holds.
            store_when: When it stores them.
            ahead: How many blocks before they leave it they are copied out, at most a quarter of all. With 0 copies and
                loads take no time; else what is loaded for a prompt keeps its room while what leaves for it is copied.
        """
        self.num_blocks = num_blocks
        memory_blocks = sum(tier.most_blocks for tier in chain.memory)
        self.evicts = num_blocks > 0 and evicts(store_when, engine_blocks=num_blocks, memory_blocks=memory_blocks)
        self.hits = self.copied = 0
        self._chain = chain
        room = min(num_blocks, 2 * chain.most_blocks)  # of more nothing leaves either, and books would take memory
        self._index = TierIndex(room)
        self._ahead = min(ahead, room // 4)
        self._used_last = TierIndex(room - self._ahead)
        self._budget = CopyBudget(engine_blocks=room, memory_blocks=min(memory_blocks, chain.most_blocks))

    def serve(self, at_s: float, names: Names) -> NDArray[np.int64]:
        """Serve a prompt from here and from the chain; return the blocks that came from each tier there."""
        chain = self._chain
        chain.go_on(at_s)
        num_here = self._index.ready_prefix(names)
        self.hits += num_here
        self._budget.ask(names)
        hits = chain.load(names[num_here:])
        chain.use(names)
        evicted = self._keep(names)
        if self.evicts:
            chain.touch(names[:num_here])
            loaded = names[num_here : num_here + int(hits.sum())]
            with ExitStack() as loading:
                for tier in chain.memory:
                    if self._ahead and len(loaded) + len(evicted) <= tier.index.num_slots:
                        loading.enter_context(tier.index.lease(loaded))
                    tier.index.resident(names[: self.num_blocks])
                    tier.index.leaving(evicted)
                self.copied += chain.store(self._worth(evicted), is_use=False)
        else:
            num_kept = num_found(chain.located(names[:num_here]))
            chain.touch(names[:num_kept])
            self.copied += chain.store(names[num_kept:num_here])  # what tiers have lost of it
            self.copied += chain.store(names[num_here + int(hits.sum()) :])
        return hits

    def _worth(self, evicted: Names) -> Names:
        """Return what is to be copied of what is dropped."""
        missing = evicted
        if self._chain.memory:
            missing = evicted[~self._chain.memory[0].index.ready(evicted)]
        return missing[self._budget.drop(missing)]

    def _keep(self, names: Names) -> Names:
        """Have a prompt's blocks; return what is soon dropped for them, in the order of their prompts."""
        for index in (self._index, self._used_last):  # by LRU the one has the last used of what the other has
            kept = names[: index.num_slots]
            with index.lease(kept), index.reserve(kept) as reservation:
                reservation.keep()
        return np.ascontiguousarray(reservation.evicted[::-1])  # the tail of a prompt was dropped first


def _plan_of(tier: TierSettings) -> TierPlan:
    capacity, policy = getattr(tier, "capacity", None), getattr(tier, "policy", "lru")
    return TierPlan(
        tier_name(tier),
        None if capacity is None else int(capacity),
        policy,
        is_memory=tier.medium in OWN_MEDIA,
        admit_after=getattr(tier, "admit_after", 1),
        ttl_s=getattr(tier, "ttl_s", None),
    )
