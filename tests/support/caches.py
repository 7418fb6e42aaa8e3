"""Caches of the small engine: opening one, waiting for what happens in it, looking inside, and what none may leave."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, TypeVar

from anyio import fail_after, sleep
from anyio.lowlevel import checkpoint

from tests.support.engine import MODEL, SMALL_LIMITS, Engine, small_layout
from tests.support.watching import watched
from tiered_kv import Backend, BlockKeys, CacheLimits, SlotBackend, TieredKV, TierSettings
from tiered_kv.cache.seat import Seat
from tiered_kv.memory.device import Device
from tiered_kv.telemetry import Metrics, Page, TraceRecorder
from tiered_kv.testing import ScriptedDevice
from tiered_kv.values.events import Emit, Event

E = TypeVar("E", bound=Event)
_SOON_S = 0.2
"""For so long each turn is looked at: what lasts for one alone comes soon."""
AnyTier = TierSettings | Mapping[str, Any] | str | Backend | SlotBackend


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


@asynccontextmanager
async def open_cache(
    *tiers: AnyTier,
    engine: Engine | None = None,
    limits: CacheLimits = SMALL_LIMITS,
    device: Device | str = "cpu",
    emit: Emit | Sequence[Emit] | None = None,
    metrics: Metrics | None = None,
    page: Page | int | str = "",
    record_trace: TraceRecorder | str = "",
) -> AsyncIterator[TieredKV]:
    """Yield a cache of these tiers for `small_layout`, with the engine's tensors registered if there is one.

    On a scripted device, fail in the end if two accesses to memory conflicted and nothing ordered them.
    """
    cache = TieredKV(
        tiers,
        model=MODEL,
        layout=small_layout(),
        limits=limits,
        device=device,
        emit=emit or Recorder(),
        metrics=metrics or False,
        page=page,
        record_trace=record_trace,
    )
    async with AsyncExitStack() as stack:
        if isinstance(device, ScriptedDevice):
            stack.enter_context(watched(device))
        kv = await stack.enter_async_context(cache)
        if engine is not None:
            kv.register_kv_caches(engine.caches)
        yield kv
    if isinstance(device, ScriptedDevice):
        assert not device.races, "accesses that nothing orders"


def inside(kv: TieredKV) -> Seat:
    """Return what no public call tells: the books, the tasks and the queues of a cache that was opened."""
    seat = kv._seat  # noqa: SLF001 - the one place where tests look inside
    assert seat is not None
    return seat


async def a_while() -> None:
    """Wait for a moment before a further look at what takes time: other processes that test have the core meanwhile."""
    await sleep(0.002)


async def until(condition: Callable[[], bool], *, on_wait: Callable[[], object] | None = None) -> None:
    """Let everything else run until ``condition()``; give up, failing, after a minute.

    Args:
        condition: What to wait for.
        on_wait: Called before each further look, e.g. to step a scripted device.
    """
    now = asyncio.get_running_loop().time  # virtual time does not pass by looking, and need not pass
    soon = now() + _SOON_S
    with fail_after(60):
        while not condition():
            if on_wait is not None:
                on_wait()
            await (checkpoint() if on_wait is not None or now() < soon else a_while())


async def until_idle(kv: TieredKV, *, on_wait: Callable[[], object] | None = None) -> None:
    """Wait until no transfer is under way, then assert that none has left anything behind."""
    await until(lambda: kv.stats().transfers == 0, on_wait=on_wait)
    await checkpoint()  # callbacks of the last task
    assert_nothing_left(kv)


async def until_nothing_left(kv: TieredKV) -> None:
    """Wait for a moment when nothing is held, with a scrub that reads and leases beside; fail after a minute."""

    def is_held() -> bool:
        try:
            assert_nothing_left(kv)
        except AssertionError:
            return True
        return False

    with suppress(TimeoutError):  # what is held says more
        await until(lambda: not is_held())
    assert_nothing_left(kv)


def assert_nothing_left(kv: TieredKV) -> None:
    """Assert that a cache where nothing moves holds no lease, no pending slot, no bytes in flight and no waiter."""
    stats = kv.stats()
    held = {tier.tier: (tier.leased, tier.pending) for tier in stats.tiers if tier.leased or tier.pending}
    assert not held, f"(leased, pending): {held}"
    assert stats.bounce_free == stats.bounce_slots
    assert stats.store_queue_bytes == 0
    for tier in stats.tiers:
        assert not tier.num_slots or tier.free + tier.ready + tier.withheld == tier.num_slots, tier
    for chain in inside(kv).chains:  # no statistics count these: they are 0 or there is a leak
        assert not len(chain.fills)
        assert not len(chain.expected)
        assert not len(chain.sought)
        assert not chain.unwritten.is_under_way(chain.unwritten.now + 1)
        assert chain.room.num_waiting == 0
        assert chain.quotas.prefetches.in_flight == 0
        assert [tier.calls.budget.in_flight for tier in chain.storage] == [0] * len(chain.storage)
        assert [tier.calls.budget.room.num_waiting for tier in chain.storage] == [0] * len(chain.storage)


async def keep(kv: TieredKV, engine: Engine, keys: BlockKeys) -> None:
    """Store ``keys`` and wait until every tier has them."""
    result = await kv.store(keys, engine.compute(keys))
    await result.settled()
    await until(lambda: kv.stats().transfers == 0)
