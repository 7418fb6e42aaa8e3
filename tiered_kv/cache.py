"""TieredKV: the cache whose tiers are this process's own. How it is made, opened and closed.

What it answers while it is open is in `TierCalls`.
"""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, NoReturn, Self

from typing_extensions import override

from tiered_kv.assembly import open_cache
from tiered_kv.backend import Backend, SlotBackend
from tiered_kv.block_cache import BlockCache
from tiered_kv.closing import Draining, begin_to_close, draining_on
from tiered_kv.errors import ClosedError, ConfigurationError
from tiered_kv.events import Emit
from tiered_kv.explain import Explanation
from tiered_kv.keys import BlockKeys, ModelIdentity, Shard
from tiered_kv.layout import KVLayout
from tiered_kv.log import guarded, log_event
from tiered_kv.memory.codec import CodecName, make_codec
from tiered_kv.memory.make import DeviceLike, resolve
from tiered_kv.open_cache import OpenCache
from tiered_kv.parts import CacheParts, chain_parts
from tiered_kv.settings import CacheLimits, TieredKVSettings
from tiered_kv.telemetry.metrics import Metrics
from tiered_kv.telemetry.page import Page
from tiered_kv.telemetry.trace_recorder import TraceRecorder
from tiered_kv.telemetry.watch import Watch, Watcher
from tiered_kv.tier_calls import TierCalls
from tiered_kv.tier_settings import TierSettings
from tiered_kv.tiers.exponent import make_record_codec
from tiered_kv.tiers.pins import Pins
from tiered_kv.transfers.handles import Handle
from tiered_kv.validation import (
    check_asyncio,
    check_emit,
    check_identity,
    check_limits,
    check_metrics,
    check_page,
    check_recorder,
    check_seconds,
    check_shards,
    metrics_of,
)


class TieredKV(TierCalls):
    """A KV cache over a chain of tiers, for one model on one event loop. Open it with ``async with``.

    Its calls are those of `BlockCache`, and what only the owner of tiers can do.
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
        emit: Emit | Sequence[Emit] = log_event,
        metrics: bool | Metrics = False,
        page: bool | int | str | Page = False,
        record_trace: str | os.PathLike[str] | TraceRecorder = "",
    ) -> None:
        """Check the parts; nothing is allocated before opening.

        Args:
            tiers: Fastest first: settings, what makes them (a dict or URL), or backends of one's own. ``{rank}`` in
                their texts and paths is the rank of ``shard``: ranks of one host need directories of their own.
            model: Which weights computed the KV.
            layout: What a block is made of.
            shard: Which part of the heads this process holds; all of them by default. A scheduler gives
                ``Shard.every(size)``: then a block is there when every rank's part is, and only the ranks move bytes.
            limits: Bounds in time, memory and work: `CacheLimits`, or a dict of its fields.
            device: Where the engine's tensors live, e.g. ``"cuda:1"``, or a ``torch.device``; the GPU if torch has one,
                else the CPU. Without an index it is the current GPU of the thread that calls this.
            codec: How blocks are kept: see `TieredKVSettings`.
            emit: Takes every event, at once, on the event loop; one function or several. Logs them by default.
            metrics: Whether to tell Prometheus what happens: True, or where, `tiered_kv.telemetry.Metrics`.
            page: Whether to show it on a page: an address to serve it at, as in `TieredKVSettings`, or a
                `tiered_kv.telemetry.Page` that the program serves itself.
            record_trace: A file to record requests to, as in `TieredKVSettings`, or a
                `tiered_kv.telemetry.TraceRecorder`.

        Raises:
            ConfigurationError: The tiers cannot make a chain, the codec cannot keep the layout's blocks, or an
                argument is no such thing.
        """
        check_identity(tiers, model, layout)
        watchers: list[Watcher] = [*check_metrics(metrics), *check_page(page)]
        watch = Watch(watchers, self._explain) if watchers else None
        self._parts = CacheParts(
            tiers=chain_parts(tiers, check_shards(shard)),
            model=model,
            layout=layout,
            codecs=tuple(make_codec(codec, group) for group in layout.groups),
            record_codecs=tuple(make_record_codec(codec, group) for group in layout.groups),
            shards=check_shards(shard),
            limits=check_limits(limits),
            device=resolve(device),
            emit=guarded([*check_emit(emit), *([watch] if watch else [])]),
            watch=watch,
            recorder=check_recorder(record_trace),
        )
        if watch is not None:
            watch.claim()
        super().__init__(self._parts.tiers.media)
        self._is_opening = False

    @classmethod
    def from_settings(
        cls,
        settings: TieredKVSettings | Mapping[str, Any] | None = None,
        *,
        model: ModelIdentity,
        layout: KVLayout,
        shard: Shard | tuple[Shard, ...] | None = None,
        device: DeviceLike | None = None,
        emit: Emit | Sequence[Emit] = log_event,
        metrics: bool | Metrics | None = None,
        page: bool | int | str | Page | None = None,
        record_trace: str | os.PathLike[str] | TraceRecorder | None = None,
    ) -> Self:
        """Make a cache of `TieredKVSettings`: given, as a dict too, or read from the environment.

        ``metrics``, ``page`` and ``record_trace`` go before the settings of these names.
        """
        settings = TieredKVSettings.of(settings)
        limits, codec = settings.limits, settings.codec
        return cls(
            settings.tiers,
            model=model,
            layout=layout,
            shard=shard,
            limits=limits,
            device=device,
            codec=codec,
            emit=emit,
            metrics=metrics_of(settings, given=metrics),
            page=settings.page if page is None else page,
            record_trace=settings.record_trace if record_trace is None else record_trace,
        )

    @staticmethod
    def connect(
        url: str,
        *,
        model: ModelIdentity,
        layout: KVLayout,
        shard: Shard | tuple[Shard, ...] | None = None,
        device: DeviceLike | None = None,
        emit: Emit | Sequence[Emit] = log_event,
        name: str = "",
        read_only: bool = False,
        timeout_s: float = 5.0,
    ) -> BlockCache:
        """Attach to the cache that a server of this host keeps: ``async with TieredKV.connect("unix:///...") as kv``.

        The same calls, and the same promises. The server, ``tiered-kv serve``, decides and has the storage; copies run
        in this process. While it is away nothing raises where an engine serves: lookups miss, loads bring 0 blocks,
        and stores are dropped and counted. It is attached again by itself.

        Args:
            url: ``"unix://"`` and the path of the server's socket.
            model: As for a cache of one's own. Equal models and layouts share blocks.
            layout: The same.
            shard: The same; replicas share one copy.
            device: The same.
            emit: Takes what becomes of this process's transfers; all other events are the server's.
            name: For people, in what the server logs and says of itself.
            read_only: Load, and change nothing.
            timeout_s: What a call without a deadline of its own waits for an answer; and entering for a server.

        Raises:
            ConfigurationError: An argument that cannot be right.
        """
        # Above this module in the house, and in need of msgspec.
        connected: Callable[..., BlockCache] = import_module("tiered_kv.host.client").ConnectedKV
        return connected(
            url, model=model, layout=layout, shard=shard, device=device, emit=emit,
            name=name, read_only=read_only, timeout_s=timeout_s,
        )  # fmt: skip

    # Opening and closing.

    async def __aenter__(self) -> Self:
        """Open all tiers.

        Raises:
            ConfigurationError: A tier can never work as it is set up, or the machine lacks the memory.
            BackendUnavailableError: A tier cannot be reached.
        """
        if self._cache is not None or self._is_opening:
            raise ClosedError("a TieredKV is opened once; make another")
        check_asyncio()
        self._is_opening = True
        try:
            self._cache = await open_cache(self._parts)
        finally:
            self._is_opening = False
        return self

    def __enter__(self) -> NoReturn:
        raise ConfigurationError(
            "a TieredKV is opened with 'async with'; without an event loop: with open_blocking(cache) as kv"
        )

    def __exit__(self, *_: object) -> None:
        """Is here for ``with`` to get as far as `__enter__`."""

    async def aclose(self) -> None:
        """End: what is being moved ends, or is given up after `CacheLimits.close_timeout_s`. Idempotent.

        A cancellation is raised when everything has ended.

        Raises:
            ConfigurationError: Called elsewhere than on the event loop that opened it. Nothing has ended.
        """
        cache = self._cache
        if cache is not None and not (cache.closing and cache.closing.done()):
            cache.check_loop()
            # A task of its own, as a shield does not hold against task.cancel().
            await Handle(begin_to_close(cache), lambda: None)

    def drain_on(self, *signals: signal.Signals, timeout_s: float | None = None) -> AbstractContextManager[Draining]:
        """Drain when a signal comes: ``with kv.drain_on(signal.SIGTERM) as draining: await draining.wait()``.

        A second signal does what it does by default: it ends the process. For an event loop in the main thread. While
        the block lasts, handlers set before are not called; leaving it puts them back.
        """
        cache = self._open()
        check_seconds("timeout_s", timeout_s)
        return draining_on(cache, signals, timeout_s)

    async def _explain(self, keys: BlockKeys) -> list[Explanation]:
        return await self.explain(keys, ask=True)


class _Seat(TierCalls):
    """An open cache as one engine of several sees it. It is never closed: what it moves ends with the cache."""

    @override
    async def __aenter__(self) -> Self:
        return self

    @override
    async def aclose(self) -> None:
        pass


def seat_at(
    cache: TierCalls, shards: Sequence[Shard], epoch: bytes, past_epochs: Sequence[bytes], pins: Pins
) -> tuple[TierCalls, OpenCache]:
    """Return an open cache as one of several engines that share it sees it; see `OpenCache.seat`.

    Returns:
        Its calls, and what its transfers are made with. ``pins`` are for whoever made them to end.
    """
    seat = cache._open().seat(shards, epoch, past_epochs, pins)  # noqa: SLF001 - its own module's
    return _Seat(cache.media, seat), seat
