"""What the facade is tried with: an engine of known bytes, backends that do as they are told, events in a list.

Test modules import these by name: ``from tests.cache.conftest import open_cache``.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from anyio import fail_after
from anyio.lowlevel import checkpoint
from numpy.typing import NDArray

from tests.cache.watching import watched
from tiered_kv import (
    Backend,
    BackendContext,
    Block,
    BlockKey,
    BlockKeys,
    CacheLimits,
    GPULoadStoreSpec,
    KVLayout,
    ModelIdentity,
    Outcome,
    SlotBackend,
    TieredKV,
    TierSettings,
    hash_blocks,
)
from tiered_kv.backend import Recovered
from tiered_kv.events import Emit, Event
from tiered_kv.keys import Names
from tiered_kv.memory.device import Device
from tiered_kv.open_cache import OpenCache
from tiered_kv.testing import ScriptedDevice
from tiered_kv_backends.memory import MemoryBackend

T = TypeVar("T")
E = TypeVar("E", bound=Event)
AnyTier = TierSettings | Mapping[str, Any] | str | Backend | SlotBackend

BLOCK_SIZE = 16
PAYLOAD_BYTES = 4096
"""Of one block of `small_layout`: one page of memory, so that it is the stride of a slot as well."""
POISON = 0x5A
MODEL = ModelIdentity("a test's model", weights="w0")
SMALL_LIMITS = CacheLimits(window=4 * PAYLOAD_BYTES, bounce=16 * PAYLOAD_BYTES)
"""Windows of 4 blocks, so that a prompt is several of them."""


def small_layout() -> KVLayout:
    """Return a layout of two layers whose blocks are `PAYLOAD_BYTES` long."""
    return KVLayout.from_tensors(Engine(num_pages=1).caches, block_size=BLOCK_SIZE)


def prompt(num_blocks: int, *, seed: int = 0) -> BlockKeys:
    """Return the keys of a prompt; prompts of different seeds share no block."""
    return hash_blocks(np.arange(num_blocks * BLOCK_SIZE) + 1_000_000 * seed, block_size=BLOCK_SIZE)


def contents(keys: BlockKeys) -> list[bytes]:
    """Return what `Engine.compute` puts into each block: other bytes for every key."""
    return [hashlib.shake_128(key).digest(PAYLOAD_BYTES) for key in keys]


class Engine:
    """A serving engine's paged KV cache.

    Attributes:
        caches: What is registered, per layer ``(num_pages, 2, 16, 2, 16)`` int16-wide values.
    """

    def __init__(self, num_pages: int = 64) -> None:
        shape = (num_pages, 2, BLOCK_SIZE, 2, 16)
        self.caches = {f"layer{number}": torch.zeros(shape, dtype=torch.bfloat16) for number in range(2)}
        self._layers = [cache.view(torch.uint8).numpy().reshape(num_pages, -1) for cache in self.caches.values()]
        self.num_pages = num_pages

    def compute(self, keys: BlockKeys, pages: Sequence[int] | None = None) -> GPULoadStoreSpec:
        """Fill pages, the first ones if not said, with what the keys stand for; return where that is."""
        at = list(range(len(keys)) if pages is None else pages)
        for page, content in zip(at, contents(keys), strict=True):
            halves = np.split(np.frombuffer(content, np.uint8), len(self._layers))
            for layer, half in zip(self._layers, halves, strict=True):
                layer[page] = half
        return GPULoadStoreSpec(at)

    def poison(self) -> None:
        """Overwrite every page with a byte that no block consists of."""
        for layer in self._layers:
            layer.fill(POISON)

    def is_poisoned(self) -> bool:
        """Whether nobody has written since `poison`."""
        return all(bool((layer == POISON).all()) for layer in self._layers)

    def read(self, pages: Sequence[int] | NDArray[np.int64] | GPULoadStoreSpec) -> list[bytes]:
        """Return what is in the pages."""
        at = pages.ids if isinstance(pages, GPULoadStoreSpec) else pages
        return [b"".join(layer[int(page)].tobytes() for layer in self._layers) for page in at]


class Recorder:
    """An ``emit`` that keeps the events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        """Keep one."""
        self.events.append(event)

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of one class, oldest first."""
        return [event for event in self.events if isinstance(event, kind)]


class Act:
    """One method of a scripted backend: counts its calls, and can hold, fail or falsify them."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_blocks = 0
        self.num_held = 0
        self._gate = asyncio.Event()
        self._gate.set()
        self._errors: deque[BaseException] = deque()
        self._changes: deque[Callable[[Any], Any]] = deque()

    def hold(self) -> None:
        """Have calls wait, before they do anything, until `release`."""
        self._gate.clear()

    def release(self) -> None:
        """Let held calls, and those to come, go on."""
        self._gate.set()

    def calm(self) -> None:
        """Release, and let calls to come do as they should."""
        self._errors.clear()
        self._changes.clear()
        self.release()

    def fail_next(self, error: BaseException) -> None:
        """Have one more call raise, having done nothing."""
        self._errors.append(error)

    def change_next(self, change: Callable[[Any], Any]) -> None:
        """Have one more call answer something else than the truth."""
        self._changes.append(change)

    async def play(self, num_blocks: int, work: Callable[[], Awaitable[T]]) -> T:
        """Make one call."""
        self.num_calls += 1
        self.num_blocks += num_blocks
        error = self._errors.popleft() if self._errors else None
        change = self._changes.popleft() if self._changes else None
        self.num_held += 1
        try:
            await self._gate.wait()
        finally:
            self.num_held -= 1
        if error is not None:
            raise error
        answer = await work()
        return answer if change is None else change(answer)


def only(position: int, outcome: Outcome) -> Callable[[list[Outcome]], list[Outcome]]:
    """Return a change of the outcome of one block, for `Act.change_next`."""
    return lambda outcomes: [*outcomes[:position], outcome, *outcomes[position + 1 :]]


class ScriptedBackend(MemoryBackend):
    """A keyed backend whose calls go through an `Act` each."""

    def __init__(self, *, name: str = "keyed", timeout_s: float = 10.0, capacity: int = 1 << 30) -> None:
        super().__init__(
            MemoryBackend.Settings.model_validate({"name": name, "timeout_s": timeout_s, "capacity": capacity})
        )
        self.on_lookup, self.on_read, self.on_write, self.on_delete, self.on_close = (Act() for _ in range(5))

    async def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Go through `on_lookup`."""
        return await self.on_lookup.play(len(keys), lambda: MemoryBackend.lookup(self, keys))

    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        """Go through `on_read`."""
        return await self.on_read.play(len(keys), lambda: MemoryBackend.read(self, keys, into))

    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        """Go through `on_write`."""
        return await self.on_write.play(len(keys), lambda: MemoryBackend.write(self, keys, blocks))

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Go through `on_delete`."""
        await self.on_delete.play(len(keys), lambda: MemoryBackend.delete(self, keys))

    async def aclose(self) -> None:
        """Go through `on_close`."""
        await self.on_close.play(0, lambda: MemoryBackend.aclose(self))

    @property
    def num_records(self) -> int:
        """How many blocks it holds."""
        return len(self._records)

    def keys(self) -> list[BlockKey]:
        """Return the keys of what it holds, in the order of writing."""
        return list(self._records)

    def flip_byte(self, position: int) -> None:
        """Break the ``position``-th record, in the order of writing."""
        key, record = list(self._records.items())[position]
        self._records[key] = _flipped(record)


class ScriptedSlotBackend(SlotBackend):
    """An owned medium in memory whose calls go through an `Act` each. Opened again, it finds what it held."""

    Settings = TierSettings

    def __init__(self, num_slots: int = 64, *, name: str = "slots", timeout_s: float = 10.0) -> None:
        self.settings = TierSettings(medium="slots", name=name, timeout_s=timeout_s)
        self.records: dict[int, tuple[bytes, bytes]] = {}
        """By slot: the block's name and its record."""
        self.num_slots = num_slots
        self.on_read, self.on_write, self.on_forget, self.on_checkpoint, self.on_close = (Act() for _ in range(5))

    async def open(self, context: BackendContext) -> list[Recovered]:
        """Find what is there, of one KV group."""
        names = np.frombuffer(b"".join(name for name, _ in self.records.values()), np.uint64).reshape(-1, 4)
        return [Recovered(self.num_slots, names, np.array(list(self.records), np.int64))]

    async def read(self, group: int, slots: NDArray[np.int64], into: Sequence[Block]) -> list[Outcome]:
        """Go through `on_read`."""
        return await self.on_read.play(len(slots), lambda: self._read(slots, into))

    async def write(self, group: int, slots: NDArray[np.int64], names: Names, blocks: Sequence[Block]) -> list[Outcome]:
        """Go through `on_write`."""
        return await self.on_write.play(len(slots), lambda: self._write(slots, names, blocks))

    async def forget(self, group: int, slots: NDArray[np.int64]) -> None:
        """Go through `on_forget`."""
        await self.on_forget.play(len(slots), lambda: self._forget(slots))

    async def checkpoint(self, group: int, names: Names, slots: NDArray[np.int64], *, sync: bool = False) -> None:
        """Go through `on_checkpoint`."""
        kept = {int(slot): self.records[int(slot)] for slot in slots if int(slot) in self.records}
        await self.on_checkpoint.play(len(slots), lambda: self._keep(kept))

    async def aclose(self) -> None:
        """Go through `on_close`."""
        await self.on_close.play(0, checkpoint)

    @property
    def num_records(self) -> int:
        """How many blocks it holds."""
        return len(self.records)

    def flip_byte(self, position: int) -> None:
        """Break the ``position``-th record, in the order of writing."""
        slot = list(self.records)[position]
        name, record = self.records[slot]
        self.records[slot] = name, _flipped(record)

    async def _read(self, slots: NDArray[np.int64], into: Sequence[Block]) -> list[Outcome]:
        outcomes = []
        for slot, block in zip(slots.tolist(), into, strict=True):
            _, record = self.records.get(slot, (b"", b""))
            outcomes.append(Outcome.HIT if block.fill(record) else Outcome.MISS)
        return outcomes

    async def _write(self, slots: NDArray[np.int64], names: Names, blocks: Sequence[Block]) -> list[Outcome]:
        for slot, name, block in zip(slots.tolist(), names, blocks, strict=True):
            self.records.pop(slot, None)
            self.records[slot] = name.tobytes(), bytes(block)
        return [Outcome.STORED] * len(blocks)

    async def _forget(self, slots: NDArray[np.int64]) -> None:
        for slot in slots.tolist():
            self.records.pop(slot, None)

    async def _keep(self, kept: dict[int, tuple[bytes, bytes]]) -> None:
        self.records = kept


@asynccontextmanager
async def open_cache(
    *tiers: AnyTier,
    engine: Engine | None = None,
    limits: CacheLimits = SMALL_LIMITS,
    device: Device | str = "cpu",
    emit: Emit | None = None,
) -> AsyncIterator[TieredKV]:
    """Yield a cache of these tiers for `small_layout`, with the engine's tensors registered if there is one.

    On a scripted device, fail in the end if two accesses to memory conflicted and nothing ordered them.
    """
    cache = TieredKV(tiers, model=MODEL, layout=small_layout(), limits=limits, device=device, emit=emit or Recorder())
    async with AsyncExitStack() as stack:
        if isinstance(device, ScriptedDevice):
            stack.enter_context(watched(device))
        kv = await stack.enter_async_context(cache)
        if engine is not None:
            kv.register_kv_caches(engine.caches)
        yield kv
    if isinstance(device, ScriptedDevice):
        assert not device.races, "accesses that nothing orders"


def inside(kv: TieredKV) -> OpenCache:
    """Return what no public call tells: the books, the tasks and the queues of a cache that was opened."""
    cache = kv._cache  # noqa: SLF001 - the one place where tests look inside
    assert cache is not None
    return cache


async def until(condition: Callable[[], bool], *, on_wait: Callable[[], object] | None = None) -> None:
    """Let everything else run until ``condition()``; give up, failing, after 10 s.

    Args:
        condition: What to wait for.
        on_wait: Called before each further look, e.g. to step a scripted device.
    """
    with fail_after(10):
        while not condition():
            if on_wait is not None:
                on_wait()
            await checkpoint()


async def until_idle(kv: TieredKV, *, on_wait: Callable[[], object] | None = None) -> None:
    """Wait until no transfer is under way, then assert that none has left anything behind."""
    await until(lambda: kv.stats().transfers == 0, on_wait=on_wait)
    await checkpoint()  # callbacks of the last task
    assert_nothing_left(kv)


def assert_nothing_left(kv: TieredKV) -> None:
    """Assert that a cache where nothing moves holds no lease, no pending slot, no bytes in flight and no waiter."""
    stats = kv.stats()
    held = {tier.tier: (tier.leased, tier.pending) for tier in stats.tiers if tier.leased or tier.pending}
    assert not held, f"(leased, pending): {held}"
    assert stats.bounce_free == stats.bounce_slots
    assert stats.store_queue_bytes == 0
    for tier in stats.tiers:
        assert not tier.num_slots or tier.free + tier.ready == tier.num_slots, tier
    for chain in inside(kv).chains:  # no statistics count these: they are 0 or there is a leak
        assert not chain.pending
        assert not chain.settling
        assert chain.room.num_waiting == 0
        assert chain.limits.prefetches.in_flight == 0
        assert [tier.budget.in_flight for tier in chain.storage] == [0] * len(chain.storage)
        assert [tier.budget.room.num_waiting for tier in chain.storage] == [0] * len(chain.storage)


async def keep(kv: TieredKV, engine: Engine, keys: BlockKeys) -> None:
    """Store ``keys`` and wait until every tier has them."""
    result = await kv.store(keys, engine.compute(keys))
    await result.settled()
    await until(lambda: kv.stats().transfers == 0)


def _flipped(record: bytes) -> bytes:
    return record[:-1] + bytes([record[-1] ^ 1])
