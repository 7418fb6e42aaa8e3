"""Puts a cache together: from settings and backends to chains, each closed again in reverse order. For `open_cache`."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from anyio import CancelScope

from tiered_kv.backend import (
    Backend,
    OwnedTierSettings,
    RecordShape,
    SlotBackend,
    TierSettings,
)
from tiered_kv.catalog.index import TierIndex
from tiered_kv.catalog.policies import Policy
from tiered_kv.errors import ConfigurationError
from tiered_kv.events import DeviceFailed, Emit, Event, PageLockingDoubted
from tiered_kv.keys import Shard
from tiered_kv.layout import PAGE_BYTES, KVGroup
from tiered_kv.loop_calls import LoopCalls
from tiered_kv.memory.codec import Codec
from tiered_kv.memory.device import Device
from tiered_kv.memory.host import HostSlab
from tiered_kv.memory.lanes import Lanes
from tiered_kv.memory.make import DeviceLike, make_device
from tiered_kv.preflight import check_host_memory, doubt_of_page_locking
from tiered_kv.registry import make_backend, resolve_policy
from tiered_kv.settings import CacheLimits, CPUTier, GPUTier, check_chain, check_policies, check_tiers, tier_name
from tiered_kv.tiers.batch import Naming
from tiered_kv.tiers.budget import Backlog, Bandwidth, Budget, Limits, Pace
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.exponent import ExponentCodec
from tiered_kv.tiers.ledger import Ledger, Place
from tiered_kv.tiers.memory import HostTier, MemoryTier
from tiered_kv.tiers.opening import Services, StorageMedium
from tiered_kv.tiers.owned import OwnedTier
from tiered_kv.tiers.shared import SharedTier
from tiered_kv.tiers.tasks import Tasks, WorkerPool, in_a_thread
from tiered_kv.transfers.writedown import write_admitted

_FIRST_RETRY_S, _LAST_RETRY_S = 0.5, 8.0
_RECORD_THREADS = 2
_RANK: Final = "{rank}"
"""Threads that hash and encrypt records: two keep up with a disk, and the loop and the copies need the other cores."""


@dataclass(frozen=True)
class StoragePart:
    """A backend and what the chain calls it."""

    name: str
    settings: TierSettings
    backend: Backend | SlotBackend


@dataclass(frozen=True)
class Parts:
    """A chain as it was asked for."""

    gpu: GPUTier | None
    cpu: CPUTier
    storage: tuple[StoragePart, ...]


@dataclass(frozen=True)
class Kind:
    """A kind of block: one KV group on one rank. There is a chain for each."""

    number: int
    group: KVGroup
    naming: Naming
    codec: Codec | None = None
    record_codec: ExponentCodec | None = None

    @property
    def name(self) -> str:
        """For its slab."""
        return f"group{self.number}-{self.naming.shard}"

    @property
    def shape(self) -> RecordShape:
        """Its records."""
        fingerprint, num_bytes, shard = self.naming.fingerprint, self.group.payload_bytes, self.naming.shard.part
        if (codec := self.codec or self.record_codec) is None:
            return RecordShape(fingerprint, num_bytes, shard)
        return RecordShape(fingerprint, codec.stored_bytes, shard, codec.name, num_bytes)

    @property
    def slot_bytes(self) -> int:
        """What of a slot in memory a block takes."""
        return self.codec.stored_bytes if self.codec else self.group.payload_bytes

    @property
    def slot_stride_bytes(self) -> int:
        """From one slot to the next: whole pages."""
        return -(-self.slot_bytes // PAGE_BYTES) * PAGE_BYTES


def parts_of(
    tiers: Sequence[TierSettings | Mapping[str, Any] | str | Backend | SlotBackend], shards: Sequence[Shard]
) -> Parts:
    """Sort tiers into parts, making the backends that settings describe. Opens nothing.

    Raises:
        ConfigurationError: No tiers, a wrong order, two of one name, what is no tier at all, or ``{rank}`` where a
            cache stands for all ranks.
    """
    settings = [_of_rank(each, shards) if isinstance(each, TierSettings) else each for each in check_tiers(tiers)]
    named = [
        (each.medium, tier_name(each)) if isinstance(each, TierSettings) else (type(each).__name__, _name_of(each))
        for each in settings
    ]
    names = [name for _, name in named]
    check_chain([medium for medium, _ in named], names)
    check_policies([each if isinstance(each, TierSettings) else _settings_of(each) for each in settings], names)
    gpu = next((each for each in settings if isinstance(each, GPUTier)), None)
    cpu = next((each for each in settings if isinstance(each, CPUTier)), CPUTier(capacity=0))
    storage = [
        StoragePart(name, each, make_backend(each))
        if isinstance(each, TierSettings)
        else StoragePart(name, _settings_of(each), each)
        for each, (_, name) in zip(settings, named, strict=True)
        if not isinstance(each, GPUTier | CPUTier)
    ]
    for part in storage:
        if getattr(part.settings, "exclusive", False) and not isinstance(part.backend, SlotBackend):
            raise ConfigurationError(f"tier {part.name!r} cannot be exclusive: this cache does not own its slots")
        if _scrub_rate(part.settings) and not _can_be_scrubbed(part.backend):
            raise ConfigurationError(f"tier {part.name!r} cannot be scrubbed: its backend has no peek()")
        if part.settings.read_only and isinstance(part.backend, SlotBackend):
            raise ConfigurationError(f"tier {part.name!r} cannot be read_only: nobody else writes to its slots")
    return Parts(gpu, cpu, tuple(storage))


def _of_rank(settings: TierSettings, shards: Sequence[Shard]) -> TierSettings:
    """Put the rank into the texts and paths that ask for it."""
    asking = {name: value for name, value in settings if isinstance(value, str | Path) and _RANK in str(value)}
    if asking and len(shards) > 1:
        raise ConfigurationError(
            f"{_RANK} in {' and '.join(asking)} of tier {tier_name(settings)!r}: this cache stands for "
            f"{len(shards)} ranks, whose blocks are kept apart in one place: leave it out"
        )
    texts = {name: type(value)(str(value).replace(_RANK, str(shards[0].rank))) for name, value in asking.items()}
    return settings.model_copy(update=texts) if texts else settings


@dataclass(frozen=True)
class OpenBackends:
    """The media of a cache, open or to be opened later, and what they share."""

    services: Services
    media: tuple[StorageMedium, ...]


async def open_backends(
    stack: AsyncExitStack, parts: Parts, kinds: Sequence[Kind], limits: CacheLimits, tasks: Tasks, emit: Emit
) -> OpenBackends:
    """Open every backend, in the order of the chain; ``stack`` closes them, those too that were not opened."""
    loop = asyncio.get_running_loop()
    CancelScope()  # AnyIO imports its asyncio half now, 40 ms, instead of in the first load
    np.unique(np.empty(0))  # and numpy its masked arrays, 7 ms
    loop_calls = LoopCalls(loop)
    records, calls = WorkerPool("records", _RECORD_THREADS, loop_calls), Tasks()
    stack.callback(records.close)
    shapes = tuple(kind.shape for kind in kinds)
    services = Services(shapes, loop_calls, records, tasks, calls, limits.open_timeout_s, limits.close_timeout_s, emit)
    stack.push_async_callback(calls.aclose, 0.0)
    media = []
    for part in parts.storage:
        medium = StorageMedium(part.name, part.settings, part.backend, services, _policy_of(part.settings))
        stack.push_async_callback(medium.aclose)
        await medium.open()
        media.append(medium)
    stack.push_async_callback(calls.aclose, 0.0)  # what transfers still wanted of them ends before they are closed
    return OpenBackends(services, tuple(media))


def build_chains(
    stack: AsyncExitStack,
    parts: Parts,
    backends: OpenBackends,
    kinds: Sequence[Kind],
    cache_limits: CacheLimits,
    device: DeviceLike | None,
    tasks: Tasks,
    emit: Emit,
    ledger: Ledger,
) -> tuple[list[Chain], Device]:
    """Allocate memory and make one chain per kind of block. Every tier has the same number of slots for each.

    Raises:
        ConfigurationError: A capacity below one block, or more memory than the machine will give.
    """
    clock = asyncio.get_running_loop().time
    if not isinstance(device, Device):
        device = make_device(device)
        stack.push_async_callback(in_a_thread, backends.services.loop_calls, device.close, 1.0)  # it joins threads
    stride = sum(kind.slot_stride_bytes for kind in kinds)
    host_slots = _num_slots("cpu", parts.cpu.capacity, stride) if parts.cpu.capacity else 0
    gpu_slots = _num_slots("gpu", parts.gpu.capacity, stride) if parts.gpu else 0
    bounce_slots = max(4, cache_limits.bounce // stride)
    most_host_slots = max(host_slots, (parts.cpu.max_capacity or 0) // stride)
    # On a machine with a GPU all of it is page-locked; else only what is used is taken from the system.
    host_bytes = ((most_host_slots if device.kind == "cuda" else host_slots) + bounce_slots) * stride
    check_host_memory(host_bytes)
    if device.kind == "cuda" and (doubt := doubt_of_page_locking(host_bytes)):
        emit(PageLockingDoubted(doubt))
    limits = Limits(
        window_bytes=cache_limits.window,
        reads_in_flight=cache_limits.reads_in_flight,
        promote=cache_limits.promote,
        store_timeout_s=cache_limits.store_timeout_s,
        store_queue=Backlog(cache_limits.store_queue),
        prefetches=Budget(cache_limits.prefetch_quota),
        low_water=cache_limits.low_water,
        clean_after_s=cache_limits.clean_after_s,
        clean_bandwidth=Bandwidth(cache_limits.clean_bandwidth, clock),
    )
    is_written_back = any(part.settings.write == "back" for part in parts.storage)
    services = backends.services
    tell = _listen(device, services.loop_calls, emit)
    h2d, d2h = Lanes(device, "h2d"), Lanes(device, "d2h")
    stack.callback(h2d.close)
    stack.callback(d2h.close)
    # Enough that every thread of a backend is busy while the next window waits, but a tier that hangs leaves half of
    # the bounce slots to the others: a window takes no more than a quarter of them.
    in_flight = min(4 * cache_limits.window, cache_limits.bounce // 2)
    budgets = [_budget(in_flight, part.settings, clock) for part in parts.storage]
    chains = []
    for number, kind in enumerate(kinds):
        group, stride_bytes = kind.group, kind.slot_stride_bytes
        slab = HostSlab(most_host_slots + bounce_slots, stride_bytes, kind.slot_bytes, name=kind.name)
        stack.callback(slab.close)
        if most_host_slots == host_slots or device.kind != "cpu":  # getting it ready would allocate it
            device.page_lock(slab, emit=tell)
        index = TierIndex(
            host_slots,
            max_slots=most_host_slots,
            num_transient=bounce_slots,
            policy=resolve_policy(parts.cpu.policy),
            ttl_s=parts.cpu.ttl_s,
            clock=clock,
            write_back=is_written_back,
        )
        host = HostTier(tier_name(parts.cpu), index, slab, write_back=parts.cpu.write == "back")
        waits_in_gpu = parts.cpu.write == "back" if most_host_slots else is_written_back
        gpu = _gpu_tier(parts.gpu, device, gpu_slots, stride_bytes, clock, write_back=waits_in_gpu)
        storage = [
            medium.tier(number, kind.shape, budget, kind.record_codec)
            for medium, budget in zip(backends.media, budgets, strict=True)
        ]
        chain = Chain(
            group=group,
            naming=kind.naming,
            gpu=gpu,
            host=host,
            owned=[tier for tier in storage if isinstance(tier, OwnedTier)],
            shared=[tier for tier in storage if isinstance(tier, SharedTier)],
            storage=storage,
            h2d=h2d,
            d2h=d2h,
            loop_calls=services.loop_calls,
            tasks=tasks,
            emit=emit,
            limits=limits,
            codec=kind.codec,
            ledger=ledger,
            on_admitted=write_admitted,
        )
        rank = sum(before.number == kind.number for before in kinds[:number])  # of those that the cache stands for
        for tier in chain.booked:
            ledger.watch(Place(tier.name, kind.number, rank), tier)
        chains.append(chain)
    for number, medium in enumerate(backends.media):
        medium.open_later([chain.storage[number] for chain in chains])
    return chains, device


def _budget(in_flight: int, settings: TierSettings, clock: Callable[[], float]) -> Budget:
    reads = Pace(settings.read_bandwidth, settings.reads_per_s, clock)
    writes = Pace(settings.write_bandwidth, settings.writes_per_s, clock)
    return Budget(in_flight, reads, writes, Bandwidth(_scrub_rate(settings), clock))


def _policy_of(settings: TierSettings) -> str | type[Policy]:
    return resolve_policy(settings.policy) if isinstance(settings, OwnedTierSettings) else "lru"


def _can_be_scrubbed(backend: Backend | SlotBackend) -> bool:
    return isinstance(backend, SlotBackend) and type(backend).peek is not SlotBackend.peek


def _scrub_rate(settings: TierSettings) -> float | None:
    return settings.scrub_bandwidth if isinstance(settings, OwnedTierSettings) else None


def _listen(device: Device, loop_calls: LoopCalls, emit: Emit) -> Emit:
    """Hear of the device's failure; return an ``emit`` for its threads, which passes events on to the loop."""

    def tell(event: Event) -> None:
        loop_calls.call(emit, event)

    device.on_failure = lambda error: tell(DeviceFailed(device.kind, f"{type(error).__name__}: {error}"))
    return tell


def _gpu_tier(
    settings: GPUTier | None,
    device: Device,
    num_slots: int,
    stride_bytes: int,
    clock: Callable[[], float],
    *,
    write_back: bool,
) -> MemoryTier | None:
    if settings is None:
        return None
    policy = resolve_policy(settings.policy)
    index = TierIndex(num_slots, policy=policy, ttl_s=settings.ttl_s, clock=clock, write_back=write_back)
    return MemoryTier(tier_name(settings), index, device.empty_pool(num_slots, stride_bytes))


def _num_slots(tier: str, capacity: int, stride: int) -> int:
    if capacity < stride:
        raise ConfigurationError(
            f"the {tier} tier's capacity of {capacity} bytes is below one block of {stride} bytes: "
            "give it more, or leave it out"
        )
    return int(capacity // stride)


def _name_of(backend: Backend | SlotBackend) -> str:
    settings = getattr(backend, "settings", None)
    if isinstance(settings, TierSettings):
        return tier_name(settings)
    return type(backend).__name__.removesuffix("Backend").lower() or "storage"


def _settings_of(backend: Backend | SlotBackend) -> TierSettings:
    settings = getattr(backend, "settings", None)
    return settings if isinstance(settings, TierSettings) else TierSettings(medium=type(backend).__name__)
