"""A replay of a trace on a real cache with real bytes: `replay` imagines the same.

Requests are served one after the other, in the trace's own time or faster. What is found of a prompt is loaded and
compared with what it has to be; the rest is "computed" and stored. No model is run.
"""

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from pydantic import ByteSize

from tiered_kv.cache.tiered_kv import TieredKV
from tiered_kv.memory.host import check_host_memory
from tiered_kv.replay.report import DAY_S, ReplayReport, TierReport
from tiered_kv.replay.simulated import BlockCost
from tiered_kv.replay.simulated_chain import NO_BLOCK, TierPlan
from tiered_kv.settings.chain_settings import tier_from, tier_name
from tiered_kv.settings.registry import OWN_MEDIA
from tiered_kv.settings.settings import CacheLimits
from tiered_kv.settings.tier_settings import BookedTierSettings, TierSettings, paths_of
from tiered_kv.traces import Trace
from tiered_kv.traces.requests import Ids
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.events import Event
from tiered_kv.values.keys import BlockKeys, ModelIdentity
from tiered_kv.values.layout import KVGroup, KVLayout
from tiered_kv.values.results import TierStatistics
from tiered_kv.values.specs import GPULoadStoreSpec

_ODD: Final = 0x1E3779B97F4A7C15
_OF_ANY: Final = frozenset({"lru", "lhd"})
"""Default policies: not passed to media that evict for themselves. Any other somebody asked for, and they refuse it."""


def media_of(plans: Sequence[TierPlan]) -> list[TierSettings]:
    """Return settings for tiers of ``--tier``: their names are media. `really` chooses the paths.

    Raises:
        ConfigurationError: A medium needs more than a capacity, a path and a policy: it is to be set, not given so.
    """
    tiers = []
    for plan in plans:
        fields: dict[str, Any] = {"medium": plan.name, "capacity": plan.capacity_bytes}
        if plan.is_memory or plan.name == "nvme" or plan.policy not in _OF_ANY:
            fields["policy"] = plan.policy
        if plan.name in {"nvme", "shared_fs"}:
            fields["path"] = Path(plan.name)
        tiers.append(tier_from({name: value for name, value in fields.items() if value is not None}))
    return tiers


async def really(
    trace: Trace,
    tiers: Sequence[TierSettings],
    plans: Sequence[TierPlan],
    cost: BlockCost,
    real_cost: BlockCost,
    limits: CacheLimits,
    speed: float = math.inf,
    *,
    on_request: Callable[[int], None] = lambda _: None,
) -> ReplayReport:
    """Serve the requests of a trace in order, and wait for each to be in every tier.

    Tiers with a path get one of their own, beside theirs, which is gone afterwards; others are used where they are,
    for a model of a name that nobody has, and what was stored is deleted.

    Args:
        trace: The requests.
        tiers: Of the cache, fastest first.
        plans: The same, as they are imagined.
        cost: Of a token, as it is imagined.
        real_cost: Of a real one. If it is smaller, tiers are, too, and hold about as many blocks.
        limits: Of the cache.
        speed: Seconds of the trace in a second. A request waits for the one before it, however late it is.
        on_request: Told how many requests were served.

    Raises:
        ConfigurationError: The tiers make no cache, or tokens of so many bytes no block, or more than memory has.
        BackendUnavailableError: A tier cannot be opened.
    """
    if real_cost.token_bytes % 8:
        raise ConfigurationError(f"tokens of a real replay take a multiple of 8 bytes, got {real_cost.token_bytes}")
    if not trace.num_blocks:
        raise ConfigurationError(NO_BLOCK)
    memory = [tier_name(tier) for tier in tiers if tier.medium in OWN_MEDIA]
    engine = _Engine(trace, real_cost, "cuda" if any(tier.medium == "gpu" for tier in tiers) else "cpu", memory)
    model = ModelIdentity(f"replay-{secrets.token_hex(8)}", weights="none")
    scales = _Scales(trace.block_size * cost.token_bytes, trace.block_size * real_cost.token_bytes, speed)
    with TemporaryDirectory(prefix=".tiered-kv-replay-", dir=_beside(tiers)) as folder:
        own = [scales.of(*pair, Path(folder) / str(n)) for n, pair in enumerate(zip(tiers, plans, strict=True))]
        cache = TieredKV(own, model=model, layout=engine.layout, limits=limits, device=engine.device, emit=_no_log)
        async with cache as kv:
            kv.register_kv_caches([engine.pool], axes="BPNHD")
            started = time.monotonic()
            try:
                for number, request in enumerate(trace.requests, start=1):
                    await asyncio.sleep(max(0.0, started + request.at_s / speed - time.monotonic()))
                    await engine.serve(kv, request.ids, request.input_tokens)
                    on_request(number)
                books = kv.stats()  # of which host memory is one, also where no tier keeps anything there
                return engine.report([books[plan.name] for plan in plans], plans)
            finally:
                if not all(isinstance(tier, BookedTierSettings) for tier in own):
                    for request in trace.requests:
                        await kv.evict(engine.keys(request.ids))


def with_room_as(report: ReplayReport, plans: Sequence[TierPlan], payload_bytes: int) -> list[TierPlan]:
    """Return tiers to imagine that hold as many blocks of so many bytes as the real ones did."""
    return [
        replace(plan, capacity_bytes=tier.capacity_blocks * plan.block_bytes(payload_bytes) or plan.capacity_bytes)
        for plan, tier in zip(plans, report.tiers, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Scales:
    """How real tiers differ from those that are set."""

    payload_bytes: int
    real_bytes: int
    speed: float

    def of(self, tier: TierSettings, plan: TierPlan, path: Path) -> TierSettings:
        """Return a tier at this path, smaller as blocks are; what is said of seconds and days is of the trace's."""
        change: dict[str, Any] = {"path": path, "max_capacity": None}
        speed = self.speed if math.isfinite(self.speed) else 1.0
        if self.real_bytes != self.payload_bytes and plan.capacity_bytes is not None:
            num_blocks = plan.capacity_bytes // plan.block_bytes(self.payload_bytes)
            change["capacity"] = ByteSize(num_blocks * plan.block_bytes(self.real_bytes))
        if plan.ttl_s is not None:
            change["ttl_s"] = plan.ttl_s / speed
        if (a_day := getattr(tier, "max_write_bytes_per_day", None)) is not None:
            change["max_write_bytes_per_day"] = ByteSize(1 + int(a_day * speed * self.real_bytes / self.payload_bytes))
        known = type(tier).model_fields
        return tier.model_copy(update={name: value for name, value in change.items() if name in known})


class _Engine:
    """An engine without a model, in whose blocks each byte follows from the block's id. Counts what became of requests.

    Attributes:
        layout: Of its blocks.
        device: Where they are.
        pool: Of the longest prompt, ``(num_blocks, 2, N, 1, D)``.
    """

    def __init__(self, trace: Trace, cost: BlockCost, device: str, memory: Sequence[str]) -> None:
        longest = max((len(each.ids) for each in trace.requests), default=1)
        head_dim = cost.token_bytes // 4
        group = KVGroup(1, 1, head_dim, "bfloat16", trace.block_size)
        self.layout, self.device = KVLayout((group,)), device
        if device == "cpu":  # as much again for what it is compared with
            check_host_memory(2 * longest * group.payload_bytes, less="give fewer bytes a token")
        self.pool = torch.zeros(longest, 2, trace.block_size, 1, head_dim, dtype=torch.bfloat16, device=device)
        self._words = self.pool.view(longest, -1).view(torch.int64)
        self._column = torch.arange(self._words.shape[1], device=device)
        self._trace, self._cost, self._payload_bytes = trace, cost, group.payload_bytes
        self._memory = memory
        self._by_tier: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._load_s = 0.0

    def keys(self, ids: Ids) -> BlockKeys:
        """Return the blocks' names."""
        digests = np.zeros((len(ids), 4), np.int64)
        digests[:, 0] = ids
        return BlockKeys(digests.tobytes(), block_size=self._trace.block_size)

    async def serve(self, kv: TieredKV, ids: Ids, input_tokens: int) -> None:
        """Load what there is of a prompt, compare it, and compute and store the rest."""
        keys = self.keys(ids)
        self._words.zero_()
        found = (await kv.lookup(keys)).num_blocks
        loaded = await kv.load(keys[:found], GPULoadStoreSpec(range(found)))
        start = loaded.num_blocks
        self._by_tier.update(loaded.by_tier)
        self._load_s += loaded.seconds
        if start:
            self._counts["loads"] += 1
            self._counts["in memory"] += start == sum(loaded.by_tier.get(tier, 0) for tier in self._memory)
        self._counts["saved tokens"] += min(start * self._trace.block_size, input_tokens)
        expected = torch.from_numpy(ids).to(self.pool.device)[:, None] * _ODD + self._column
        is_right = (self._words[:start] == expected[:start]).all(dim=1)
        self._counts["wrong"] += start - int(is_right.sum())
        self._words[start : len(ids)] = expected[start:]
        if start < len(ids):
            stored = await kv.store(keys[start:], GPULoadStoreSpec(range(start, len(ids))))
            await stored.settled()

    def report(self, books: Sequence[TierStatistics], plans: Sequence[TierPlan]) -> ReplayReport:
        """Say what became of all requests."""
        trace, num_blocks = self._trace, self._trace.num_references
        saved_tokens = self._counts["saved tokens"]
        return ReplayReport(
            trace=trace.name,
            num_requests=len(trace.requests),
            num_blocks=num_blocks,
            block_bytes=self._payload_bytes,
            hit_rate=sum(self._by_tier.values()) / max(1, num_blocks),
            input_tokens=trace.input_tokens,
            saved_tokens=saved_tokens,
            saved_s=saved_tokens / self._cost.prefill_tokens_a_s,
            trace_s=trace.seconds,
            loads=self._counts["loads"],
            loads_in_memory=self._counts["in memory"],
            tiers=tuple(self._report_of(tier, plan) for tier, plan in zip(books, plans, strict=True)),
            is_real=True,
            wrong_blocks=self._counts["wrong"],
            load_s=self._load_s,
        )

    def _report_of(self, tier: TierStatistics, plan: TierPlan) -> TierReport:
        hits, seconds = self._by_tier[tier.tier], self._trace.seconds
        payload_bytes = (tier.written + tier.promoted) * self._payload_bytes
        written_bytes = tier.bytes_written or (tier.written + tier.promoted) * plan.block_bytes(self._payload_bytes)
        return TierReport(
            name=tier.tier,
            policy=plan.policy_name,
            capacity_blocks=tier.num_slots,
            hits=hits,
            hit_rate=hits / max(1, self._trace.num_references),
            read_bytes=hits * self._payload_bytes,
            written_blocks=tier.written,
            promoted_blocks=tier.promoted,
            written_bytes=written_bytes,
            write_amplification=tier.write_amplification or written_bytes / max(1, payload_bytes),
            written_bytes_a_day=written_bytes * DAY_S / seconds if seconds else 0.0,
            evicted_blocks=tier.evicted,
        )


def _beside(tiers: Sequence[TierSettings]) -> Path:
    """Return a folder on the disk of the first tier that has one."""
    path = next((path for tier in tiers for path in paths_of(tier)), Path()).absolute()
    return next(each for each in path.parents if each.exists())


def _no_log(_: Event) -> None:
    """Say nothing: what becomes of blocks is in the report."""
