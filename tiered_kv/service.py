"""TieredKV: the facade, and the only place where tiers, memory and motion are put together.

How a cache opens and closes is here; its calls are in ``faces/``, by the occasion on which they are made. Each checks
its arguments first, before anything moves; then decides synchronously, in the catalog; then hands the moving to a
transfer that the cache owns.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from anyio import move_on_after

from tiered_kv.assembly import Kind, build_chains, open_backends, parts_of
from tiered_kv.backend import Backend, SlotBackend, TierSettings
from tiered_kv.core import Core
from tiered_kv.errors import ClosedError
from tiered_kv.events import CacheClosed, CacheOpened, Emit
from tiered_kv.faces.control import Control
from tiered_kv.faces.preemption import Preemption
from tiered_kv.faces.threads import FromThreads
from tiered_kv.faces.transfers import Transfers
from tiered_kv.keys import ModelIdentity, Shard
from tiered_kv.layout import KVLayout, fingerprint
from tiered_kv.memory.codec import CodecName, make_codec
from tiered_kv.memory.make import DeviceLike
from tiered_kv.planner import Planner
from tiered_kv.settings import CacheLimits, TieredKVSettings
from tiered_kv.telemetry.logs import guarded, log_event
from tiered_kv.tiers import upkeep
from tiered_kv.tiers.batch import Naming
from tiered_kv.transfers.handles import Handle
from tiered_kv.validation import check_emit, check_identity, check_limits, check_shards


class TieredKV(FromThreads, Preemption, Transfers, Control):
    """A KV cache over a chain of tiers, for one model on one event loop. Open it with ``async with``.

    All coroutines may be cancelled at any await: nothing is left behind, and once the cancellation is raised nobody
    writes to the caller's memory. A tier's fault raises nothing: it shortens a prefix, and is counted and logged.
    """

    def __init__(
        self,
        tiers: Sequence[TierSettings | Mapping[str, Any] | str | Backend | SlotBackend],
        *,
        model: ModelIdentity,
        layout: KVLayout,
        shard: Shard | tuple[Shard, ...] | None = None,
        limits: CacheLimits | Mapping[str, Any] | None = None,
        device: DeviceLike | None = None,
        codec: CodecName = "none",
        emit: Emit = log_event,
    ) -> None:
        """Check the parts; nothing is allocated before opening.

        Args:
            tiers: Fastest first: settings, what makes them (a dict or URL), or backends of one's own.
            model: Which weights computed the KV.
            layout: What a block is made of.
            shard: Which part of the heads this process holds; all of them by default. A scheduler gives
                ``Shard.every(size)``: then a block is there when every rank's part is, and only the ranks move bytes.
            limits: Bounds in time, memory and work: `CacheLimits`, or a dict of its fields.
            device: Where the engine's tensors live, e.g. ``"cuda:1"``, or a ``torch.device``; the GPU if torch has one,
                else the CPU.
            codec: How blocks are kept: see `TieredKVSettings`.
            emit: Receives every event; logs them by default.

        Raises:
            ConfigurationError: The tiers can not make a chain, the codec can not keep the layout's blocks, or an
                argument is no such thing.
        """
        check_identity(model, layout)
        self._parts = parts_of(tiers)
        self._given_device = device
        self._codecs = [make_codec(codec, group) for group in layout.groups]
        self._model = model
        self._planner: Planner | None = None
        self._core = Core(model, layout, check_shards(shard), check_limits(limits), guarded(check_emit(emit)))

    @classmethod
    def from_settings(
        cls,
        settings: TieredKVSettings | None = None,
        *,
        model: ModelIdentity,
        layout: KVLayout,
        shard: Shard | tuple[Shard, ...] | None = None,
        device: DeviceLike | None = None,
    ) -> Self:
        """Make a cache of `TieredKVSettings`: given, or read from the environment."""
        settings = settings or TieredKVSettings()
        limits, codec = settings.limits, settings.codec
        return cls(settings.tiers, model=model, layout=layout, shard=shard, limits=limits, device=device, codec=codec)

    async def __aenter__(self) -> Self:
        """Open all tiers.

        Raises:
            ConfigurationError: A tier can never work as it is set up, or the machine lacks the memory.
            BackendUnavailableError: A tier cannot be reached.
        """
        core = self._core
        if core.chains:
            raise ClosedError("a TieredKV is opened once; make another")
        loop = asyncio.get_running_loop()
        started = loop.time()
        kinds = [
            Kind(number, group, Naming(fingerprint(self._model, core.layout, number, name), shard), codec)
            for number, (group, codec) in enumerate(zip(core.layout.groups, self._codecs, strict=True))
            for name in [codec.name if codec else "none"]
            for shard in core.shards
        ]
        async with AsyncExitStack() as stack:
            backends = await open_backends(stack, self._parts, kinds, core.limits, core.tasks, core.emit)
            chains, core.device = build_chains(
                stack, self._parts, backends, kinds, core.limits, self._given_device, core.tasks, core.emit, core.ledger
            )
            self._core.lifetime = stack.pop_all()
        core.opened(chains, backends.services.loop_calls)
        recovered = {tier.name: tier.index.statistics().ready for chain in chains for tier in chain.owned}
        core.emit(CacheOpened(tuple(chains[0].names), recovered, (loop.time() - started) * 1e3))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End: what is being moved ends, or is given up after `CacheLimits.close_timeout_s`. Idempotent.

        A cancellation is raised when everything has ended.

        Raises:
            ConfigurationError: Called in another thread than the one that opened it. Nothing has ended.
        """
        self._core.check_thread()
        self._core.close()
        if self._core.lifetime is None:
            return
        lifetime, self._core.lifetime = self._core.lifetime, None
        # A task of its own, as a shield does not hold against task.cancel().
        await Handle(asyncio.create_task(self._end(lifetime), name="close"), lambda: None)

    async def _end(self, lifetime: AsyncExitStack) -> None:
        core, loop = self._core, asyncio.get_running_loop()
        started = loop.time()
        deadline = started + core.limits.close_timeout_s
        with move_on_after(core.limits.close_timeout_s):
            await core.settle()
        await core.background.aclose(0.0)
        abandoned = await core.tasks.aclose(max(0.0, deadline - loop.time()))
        unwritten = sum(cleaner.num_waiting for cleaner in core.cleaners)
        with move_on_after(core.limits.close_timeout_s):
            await upkeep.checkpoint(core.chains, sync=False)
        await lifetime.aclose()
        core.emit(CacheClosed(abandoned, (loop.time() - started) * 1e3, unwritten))

    def planner(self) -> Planner:
        """Return the face for an engine whose workers are other processes: plan, execute, complete. There is one."""
        self._core.check_open()
        if self._planner is None:
            self._planner = Planner(self._core)
        return self._planner
