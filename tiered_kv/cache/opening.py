"""Opens a cache: from what it is made of to backends and chains, each of which is closed again in reverse order."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
from anyio import CancelScope

from tiered_kv.cache.closing import begin_to_close
from tiered_kv.cache.open_cache import OpenCache
from tiered_kv.cache.parts import BlockKind, CacheParts, ChainParts, StoragePart
from tiered_kv.cache.seat import Seat
from tiered_kv.catalog.index import TierIndex
from tiered_kv.media.backend import Backend
from tiered_kv.memory.device import Device
from tiered_kv.memory.gpu import make_device
from tiered_kv.memory.host import HostSlab, check_host_memory, doubt_of_page_locking
from tiered_kv.memory.lanes import Lanes
from tiered_kv.settings.chain_settings import tier_name
from tiered_kv.settings.registry import resolve_policy
from tiered_kv.settings.settings import CacheLimits
from tiered_kv.tiers.chain import Chain, Quotas
from tiered_kv.tiers.fates import Fates, IndexPlace
from tiered_kv.tiers.gate import Bandwidth, Budget, Pace
from tiered_kv.tiers.pins import Pins
from tiered_kv.tiers.storage_medium import Services, StorageMedium
from tiered_kv.tiers.tasks import Tasks, WorkerPool, in_a_thread
from tiered_kv.tiers.tier import HostTier, MemoryTier
from tiered_kv.transfers.handles import Handle
from tiered_kv.transfers.writedown import write_admitted
from tiered_kv.values.errors import ConfigurationError, in_words
from tiered_kv.values.events import CacheOpened, DeviceFailed, Emit, Event, GPUPoolInHostMemory, PageLockingDoubted
from tiered_kv.values.keys import epoch_digest
from tiered_kv.values.layout import PAGE_BYTES, blocks_within
from tiered_kv.values.loop_calls import LoopCalls

_RECORD_THREADS: Final = 2
"""Threads that hash and encrypt records: two keep up with a disk, and the loop and the copies need the other cores."""
_LEAST_BOUNCE: Final = 4
"""Bounce slots of each kind of block, whatever they take: a window has a quarter of them."""


async def open_cache(parts: CacheParts) -> Seat:
    """Open every tier, in the order of the chain, and return the seat of the program that does it.

    What was opened is closed again if one of them fails.

    Raises:
        ConfigurationError: A tier can never work as it is set up, or the machine lacks the memory.
        BackendUnavailableError: A tier cannot be reached.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    kinds, tasks, fates = parts.kinds(), Tasks(), Fates()
    async with AsyncExitStack() as stack:
        services, media = await _open_backends(stack, parts, kinds, tasks)
        chains, device = await _build_chains(stack, parts, services, media, kinds, fates)
        cache = OpenCache(parts, chains, device, tasks, fates, services.loop_calls, stack.pop_all())
    seat = Seat(cache, parts.shards, epoch_digest(parts.model.weights), Pins(parts.limits.pin_quota))
    if any(isinstance(part.backend, Backend) and part.backend.keeps_memory for part in parts.tiers.storage):
        cache.keep_memory()
    has_opened = False
    try:
        cache.lifetime.callback(seat.bindings.forget)
        if parts.watch is not None:
            cache.lifetime.push_async_callback(parts.watch.end)
            parts.watch.begin(seat)
        if parts.recorder is not None:
            cache.lifetime.push_async_callback(parts.recorder.end)
            parts.recorder.begin(parts.emit)
        recovered = {tier.name: tier.index.statistics().ready for chain in chains for tier in chain.owned}
        has_opened = True  # whatever an emit of the program's own raises, some may have heard of it
        parts.emit(CacheOpened(tuple(chains[0].names), recovered, (loop.time() - started) * 1e3))
    except BaseException:  # nobody else has the cache: it would stay open, with its tasks, until the process ends
        with suppress(Exception):  # what kept it from opening is raised
            await Handle(begin_to_close(seat, has_opened=has_opened), lambda: None)
        raise
    return seat


async def _open_backends(
    stack: AsyncExitStack, parts: CacheParts, kinds: Sequence[BlockKind], tasks: Tasks
) -> tuple[Services, list[StorageMedium]]:
    """Open every backend, in the order of the chain; ``stack`` closes them, those too that were not opened.

    Returns:
        What they share, and the media, open or to be opened later.
    """
    loop = asyncio.get_running_loop()
    CancelScope()  # AnyIO imports its asyncio half now, 40 ms, instead of in the first load
    np.unique(np.empty(0))  # and numpy its masked arrays, 7 ms
    loop_calls = LoopCalls(loop)
    records, calls = WorkerPool("records", _RECORD_THREADS, loop_calls), Tasks()
    stack.callback(records.close)
    shapes = tuple(kind.shape for kind in kinds)
    limits = parts.limits
    services = Services(
        shapes, loop_calls, records, tasks, calls, limits.open_timeout_s, limits.close_timeout_s, parts.emit
    )
    stack.push_async_callback(calls.aclose, 0.0)
    media = []
    for part in parts.tiers.storage:
        medium = StorageMedium(
            part.name, part.settings, part.backend, services, part.policy, _budget(limits, kinds, part, loop.time)
        )
        stack.push_async_callback(medium.aclose)
        await medium.open()
        media.append(medium)
    stack.push_async_callback(calls.aclose, 0.0)  # what transfers still wanted of them ends before they are closed
    return services, media


@dataclass(frozen=True)
class _Sizes:
    """How much the tiers in memory hold.

    Attributes:
        host_blocks: Blocks of prompts in the CPU tier.
        most_host_blocks: The most that it may be resized to.
        gpu_blocks: Blocks of prompts in the GPU pool.
        num_bounce: Bounce slots, of each kind of block.
    """

    host_blocks: int
    most_host_blocks: int
    gpu_blocks: int
    num_bounce: Sequence[int]


async def _build_chains(
    stack: AsyncExitStack,
    parts: CacheParts,
    services: Services,
    media: Sequence[StorageMedium],
    kinds: Sequence[BlockKind],
    fates: Fates,
) -> tuple[list[Chain], Device]:
    """Allocate memory and make one chain per kind of block, each with its share of every tier's slots.

    Raises:
        ConfigurationError: A capacity or limit below one block, or more memory than the machine will give.
    """
    clock, emit, limits = asyncio.get_running_loop().time, parts.emit, parts.limits
    quotas, device = Quotas(limits, clock), _device(stack, parts, services.loop_calls)
    sizes = _sizes(parts, kinds, device)
    tell = _listen(device, services.loop_calls, emit)
    h2d, d2h = Lanes(device, "h2d"), Lanes(device, "d2h")
    stack.callback(h2d.close)
    stack.callback(d2h.close)
    chains: list[Chain] = []
    for number, kind in enumerate(kinds):
        host = _host_tier(parts.tiers, kind, sizes, sizes.num_bounce[number], clock)
        stack.callback(host.close)
        if host.index.num_slots == host.index.max_slots or device.kind != "cpu":  # getting it ready would allocate it
            device.page_lock(host.slab, emit=tell)
        chain = Chain(
            group=kind.group,
            naming=kind.naming,
            gpu=_gpu_tier(parts.tiers, device, kind, sizes, clock),
            host=host,
            storage=[medium.tier(number, kind.shape, kind.record_codec) for medium in media],
            h2d=h2d,
            d2h=d2h,
            loop_calls=services.loop_calls,
            tasks=services.tasks,
            emit=emit,
            limits=limits,
            quotas=quotas,
            codec=kind.codec,
            fates=fates,
            on_admitted=write_admitted,
        )
        rank = sum(before.number == kind.number for before in kinds[:number])  # of those that the cache stands for
        for tier in chain.booked:
            fates.watch(IndexPlace(tier.name, kind.number, rank), tier)
        chains.append(chain)
        await asyncio.sleep(0)  # each takes milliseconds: of many ranks others would wait for all
    for number, medium in enumerate(media):
        medium.open_later([chain.storage[number] for chain in chains])
    return chains, device


def _device(stack: AsyncExitStack, parts: CacheParts, loop_calls: LoopCalls) -> Device:
    """Return the device that was given, or make the one that was named, which ``stack`` closes."""
    if isinstance(parts.device, Device):
        return parts.device
    device = make_device(parts.device)
    stack.push_async_callback(in_a_thread, loop_calls, device.close, 1.0)  # it joins threads
    if (gpu := parts.tiers.gpu) is not None and device.kind == "cpu":
        parts.emit(GPUPoolInHostMemory(tier_name(gpu), gpu.capacity))
    return device


def _sizes(parts: CacheParts, kinds: Sequence[BlockKind], device: Device) -> _Sizes:
    """Say how much the tiers in memory hold, once it is known that the machine gives it."""
    tiers, limits = parts.tiers, parts.limits

    def needed(num_blocks: int) -> int:
        return sum(kind.group.num_slots(num_blocks) * kind.slot_stride_bytes for kind in kinds)

    host_blocks = _num_blocks("cpu", tiers.cpu.capacity, needed) if tiers.cpu.capacity else 0
    gpu_blocks = _num_blocks("gpu", tiers.gpu.capacity, needed) if tiers.gpu else 0
    _check_one_fits(limits, max(kind.slot_stride_bytes for kind in kinds))
    num_bounce = _bounce_slots(limits.bounce, kinds)
    most_host_blocks = max(host_blocks, blocks_within(tiers.cpu.max_capacity or 0, needed))
    # On a machine with a GPU all of it is page-locked; else only what is used is taken from the system.
    host_bytes = needed(most_host_blocks if device.kind == "cuda" else host_blocks)
    host_bytes += sum(n * kind.slot_stride_bytes for n, kind in zip(num_bounce, kinds, strict=True))
    others_bytes = needed(gpu_blocks) if device.kind == "cpu" else 0  # there the pool is host memory
    if len(parts.shards) == 1:  # else nothing can be swapped
        others_bytes += limits.swap_space * len(parts.layout.groups)
    check_host_memory(host_bytes + others_bytes)
    if device.kind == "cuda" and (doubt := doubt_of_page_locking(host_bytes)):
        parts.emit(PageLockingDoubted(doubt))
    return _Sizes(host_blocks, most_host_blocks, gpu_blocks, num_bounce)


def _budget(limits: CacheLimits, kinds: Sequence[BlockKind], part: StoragePart, clock: Callable[[], float]) -> Budget:
    """Return how many bytes a storage tier may move at once, and how fast.

    Enough that every thread of a backend is busy while the next window waits, but a tier that hangs leaves half of the
    bounce slots to other loads, and a window beside these to stores: a window takes no more than a quarter.
    """
    window = min(limits.window, limits.bounce // 4)
    in_flight = min(4 * window, limits.bounce // 2 - window)
    # A record has a header besides, which takes no host memory.
    in_flight += in_flight // min(kind.slot_stride_bytes for kind in kinds) * PAGE_BYTES
    reads, writes = Pace(part.settings.read_bandwidth, clock), Pace(part.settings.write_bandwidth, clock)
    return Budget(in_flight, reads, writes, Bandwidth(part.scrub_bandwidth, clock))


def _listen(device: Device, loop_calls: LoopCalls, emit: Emit) -> Emit:
    """Hear of the device's failure; return an ``emit`` for its threads, which passes events on to the loop."""

    def tell(event: Event) -> None:
        loop_calls.call(emit, event)

    device.on_failure = lambda error: tell(DeviceFailed(device.kind, in_words(error)))
    return tell


def _host_tier(
    tiers: ChainParts, kind: BlockKind, sizes: _Sizes, num_bounce: int, clock: Callable[[], float]
) -> HostTier:
    settings, most_slots = tiers.cpu, kind.group.num_slots(sizes.most_host_blocks)
    index = TierIndex(
        kind.group.num_slots(sizes.host_blocks),
        max_slots=most_slots,
        num_bounce=num_bounce,
        policy=resolve_policy(settings.policy),
        ttl_s=settings.ttl_s,
        clock=clock,
        write_back=tiers.is_written_back,
    )
    slab = HostSlab(most_slots + num_bounce, kind.slot_stride_bytes, kind.slot_bytes, name=kind.name)
    return HostTier(tier_name(settings), index, slab, write_back=settings.write == "back")


def _gpu_tier(
    tiers: ChainParts, device: Device, kind: BlockKind, sizes: _Sizes, clock: Callable[[], float]
) -> MemoryTier | None:
    if (settings := tiers.gpu) is None:
        return None
    has_host = kind.group.num_slots(sizes.most_host_blocks) > 0
    write_back = tiers.cpu.write == "back" if has_host else tiers.is_written_back
    num_slots, policy = kind.group.num_slots(sizes.gpu_blocks), resolve_policy(settings.policy)
    index = TierIndex(num_slots, policy=policy, ttl_s=settings.ttl_s, clock=clock, write_back=write_back)
    return MemoryTier(tier_name(settings), index, device.empty_pool(num_slots, kind.slot_stride_bytes))


def _num_blocks(tier: str, capacity: int, needed: Callable[[int], int]) -> int:
    if not (num_blocks := blocks_within(capacity, needed)):
        raise ConfigurationError(
            f"the {tier} tier's capacity of {capacity} bytes is below one block of {needed(1)} bytes: "
            "give it more, or leave it out"
        )
    return num_blocks


def _bounce_slots(num_bytes: int, kinds: Sequence[BlockKind]) -> list[int]:
    """Return how many bounce slots each kind of block has of so many bytes: by its share of a tier's slots."""
    each_block = sum(kind.group.slots_per_block * kind.slot_stride_bytes for kind in kinds)
    return [max(_LEAST_BOUNCE, int(num_bytes / each_block * kind.group.slots_per_block)) for kind in kinds]


def _check_one_fits(limits: CacheLimits, stride: int) -> None:
    """Refuse what somebody has set to less than a block; a default that is less moves one at a time."""
    for name in ("window", "store_queue"):
        if name in limits.model_fields_set and (size := getattr(limits, name)) < stride:
            raise ConfigurationError(
                f"limits.{name} of {size} bytes is below one block of {stride} bytes: give it more, or leave it out"
            )
