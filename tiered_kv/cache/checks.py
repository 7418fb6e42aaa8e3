"""The checks of `TieredKV`'s arguments: each says what was wrong, with numbers, before anything moves."""

import asyncio
import inspect
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import ByteSize, TypeAdapter, ValidationError

from tiered_kv.settings.page_address import page_address
from tiered_kv.settings.setting_errors import check_size, located, problems_of
from tiered_kv.settings.settings import CacheLimits, TieredKVSettings
from tiered_kv.telemetry.metrics import Metrics
from tiered_kv.telemetry.page import Page
from tiered_kv.telemetry.trace_recorder import TraceRecorder
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.gate import Priority
from tiered_kv.transfers.engine_memory import Binding, Bindings
from tiered_kv.transfers.job_state import check_apart
from tiered_kv.transfers.transfer_requests import Order
from tiered_kv.values.errors import ConfigurationError, LayoutMismatchError
from tiered_kv.values.events import Emit
from tiered_kv.values.hints import ReuseHint, check_hint
from tiered_kv.values.integers import is_number
from tiered_kv.values.keys import BlockKeys, ModelIdentity, Shard, StoredKeys
from tiered_kv.values.layout import KVGroup, KVLayout
from tiered_kv.values.specs import EngineBlocks, GPULoadStoreSpec

_SIZE = TypeAdapter(ByteSize)
_ORDERS: Final = get_args(Order)


def check_identity(tiers: object, model: object, layout: object) -> None:
    """Raise `ConfigurationError` unless they are what a cache is made of and for."""
    if isinstance(tiers, TieredKVSettings):
        raise ConfigurationError("TieredKV takes tiers; write TieredKV.from_settings(settings, model=..., layout=...)")
    if not isinstance(tiers, Sequence) or isinstance(tiers, str | bytes):
        raise ConfigurationError(f"TieredKV takes a list of tiers, fastest first, got {type(tiers).__name__}")
    if not isinstance(model, ModelIdentity) or not isinstance(layout, KVLayout):
        raise ConfigurationError(
            f"TieredKV needs model=ModelIdentity(...) and layout=KVLayout(...), got {type(model).__name__} "
            f"and {type(layout).__name__}"
        )


def check_shards(shard: Shard | tuple[Shard, ...] | None) -> tuple[Shard, ...]:
    """Return the shards a process stands for: one, or those of all workers in order.

    Raises:
        ConfigurationError: Neither a `Shard` nor what `Shard.every` returns.
    """
    if shard is None or isinstance(shard, Shard):
        return (shard or Shard(),)
    are_shards = isinstance(shard, tuple) and all(isinstance(each, Shard) for each in shard)
    size = len(set(shard)) if are_shards else 0
    if not size or shard != Shard.every(size, copies=len(shard) // size):
        raise ConfigurationError(
            f"shard must be a Shard, or Shard.every(size) for all ranks at once, got {shard!r:.200}"
        )
    return shard


def parts_of(shards: Sequence[Shard]) -> tuple[Shard, ...]:
    """Return the parts of blocks that workers hold: each once, whoever else holds it."""
    return tuple(dict.fromkeys(shards))


def check_one_rank(of_ranks: Sequence[object]) -> None:
    """Raise `ConfigurationError` if there is something for more than one rank."""
    if len(of_ranks) > 1:
        raise ConfigurationError(
            f"this cache stands for {len(of_ranks)} ranks: only each rank's own knows and moves its bytes"
        )


def check_group(group: int, num_groups: int) -> None:
    """Raise `ConfigurationError` if a layout of so many KV groups has none of this number."""
    if group >= num_groups:
        raise ConfigurationError(f"KV group {group} of {num_groups}: the layout has no such group")


def check_are_keys(keys: object, *, of_one_prompt: bool = False) -> None:
    """Raise `ConfigurationError` unless they are keys of blocks, of several prompts at most where those will do."""
    if not isinstance(keys, BlockKeys if of_one_prompt else StoredKeys):
        raise ConfigurationError(
            f"keys must be BlockKeys, from hash_blocks() or BlockKeys.from_hashes(), got {type(keys).__name__}"
        )


def check_keys(keys: StoredKeys, group: KVGroup) -> None:
    """Raise `LayoutMismatchError` if the keys name blocks of another size than the group's."""
    if keys.block_size != group.block_size:
        raise LayoutMismatchError(
            f"keys name blocks of {keys.block_size} tokens, the layout has blocks of {group.block_size}"
        )


def check_found(keys: BlockKeys, found: NDArray[np.bool_]) -> None:
    """Raise `ConfigurationError` unless they are keys, and it is said of each whether it was found."""
    check_are_keys(keys)
    if np.shape(found) != (len(keys),):
        raise ConfigurationError(f"{len(keys)} keys were asked for, and found has the shape {np.shape(found)}")
    if len(keys) and (kind := np.asarray(found).dtype) != np.bool_:
        raise ConfigurationError(f"found says True or False of each key, got {kind}: write states == BlockState.HIT")


@dataclass(kw_only=True)
class LoadCall:
    """The arguments of a load, checked as far as that needs no cache; see `BlockCache.start_load`.

    Attributes:
        whose: By which whoever submits it can have it ended, see `Submissions.end_of`.

    Raises:
        ConfigurationError: It is not.
    """

    keys: BlockKeys
    into: EngineBlocks
    after: object
    deadline_s: float | None
    priority: Priority
    layerwise: bool = False
    gaps: bool = False
    order: Order = "front"
    whose: object = None

    def __post_init__(self) -> None:
        if not isinstance(self.priority, Priority):
            raise ConfigurationError(f"priority must be a Priority, got {self.priority!r:.80}")
        check_seconds("deadline_s", self.deadline_s)
        check_kind(self.order, layerwise=self.layerwise, gaps=self.gaps)


def check_kind(order: Order, *, layerwise: bool, gaps: bool) -> None:
    """Raise unless a load can be of these kinds at once."""
    if layerwise and gaps:
        raise ConfigurationError("layers of a load with gaps cannot be waited for: it is either layerwise or has gaps")
    if order not in _ORDERS:
        raise ConfigurationError(f"order must be 'front' or 'back', got {order!r:.80}")
    if order == "back" and (layerwise or gaps):
        raise ConfigurationError("a load from the back has neither layers to wait for nor gaps")


@dataclass(kw_only=True)
class StoreCall:
    """The arguments of a store, checked as far as that needs no cache; see `BlockCache.start_store`.

    Attributes:
        whose: As for a `LoadCall`.

    Raises:
        ConfigurationError: A hint that is none.
    """

    keys: BlockKeys
    source: EngineBlocks
    after: object
    epoch: str | None
    layerwise: bool = False
    hint: ReuseHint | None = None
    whose: object = None

    def __post_init__(self) -> None:
        check_hint(self.hint)


def check_pages(binding: Binding, keys: BlockKeys, spec: EngineBlocks) -> NDArray[np.int64]:
    """Return the engine's block ids as ``(len(keys), pages_per_block)``.

    Raises:
        ConfigurationError: An id that is no block of the engine's memory, or comes twice.
        LayoutMismatchError: Another number of ids than the keys need.
    """
    caches, ids = binding.caches, spec.ids
    if len(ids) != len(keys) * caches.pages_per_block:
        check_count(caches.group, keys, spec)
    caches.check_ids(ids)
    return ids.reshape(-1, caches.pages_per_block)


def check_specs(bindings: Bindings, wanted: Sequence[BlockKeys], into: Sequence[EngineBlocks]) -> None:
    """Raise unless there is a spec for the keys of each KV group; the error names the group."""
    if not isinstance(into, list | tuple) or len(into) != len(wanted):
        given = f"{len(into)} of them" if isinstance(into, list | tuple) else f"a {type(into).__name__}"
        raise ConfigurationError(f"{len(wanted)} KV groups need a list of as many specs, got {given}")
    for keys, spec in zip(wanted, into, strict=True):
        try:
            check_pages(bindings.find(spec, keys.group), keys, spec)
        except LayoutMismatchError as error:
            raise LayoutMismatchError(
                f"KV group {keys.group}: {error}. Where less was found than asked for, cut what is needed first: "
                "needs = [need.until(found.num_tokens) for need in needs]"
            ) from None
        except ConfigurationError as error:
            raise ConfigurationError(f"KV group {keys.group}: {error}") from None


def check_planned(
    direction: Literal["load", "store"], chain: Chain, keys: StoredKeys, spec: GPULoadStoreSpec | None
) -> None:
    """Raise unless blocks can be planned: with host memory to hold them, and ids for each key if they are given."""
    if not chain.host.index.num_slots:
        raise ConfigurationError("plans hold blocks in the CPU tier, and this cache has none")
    check_engine_blocks(direction, chain.group, keys, spec)


def check_engine_blocks(
    direction: Literal["load", "store"], group: KVGroup, keys: StoredKeys, spec: GPULoadStoreSpec | None
) -> None:
    """Raise unless a spec, if there is one, is of the engine's own blocks, as many as the keys need, each once.

    Of a store a block may be there again for the same key.
    """
    if spec is None:
        return
    if not isinstance(spec, GPULoadStoreSpec):
        raise ConfigurationError(f"blocks of the engine are given as GPULoadStoreSpec, got {type(spec).__name__}")
    if spec.group != keys.group:
        raise LayoutMismatchError(f"keys of KV group {keys.group}, but block ids of {spec.group}")
    check_count(group, keys, spec)
    check_apart(direction, keys, spec, group.pages_per_block)


def check_count(group: KVGroup, keys: StoredKeys, spec: EngineBlocks) -> None:
    """Raise `LayoutMismatchError` unless there are as many block ids as the keys need."""
    per_block = group.pages_per_block
    if len(spec) != len(keys) * per_block:
        of = f" of {_count(per_block, 'engine block')}{' each' * (len(keys) != 1)}" if per_block > 1 else ""
        needed = f"need{'s' * (len(keys) == 1)} {_count(len(keys) * per_block, 'block id')}"
        raise LayoutMismatchError(f"{_count(len(keys), 'key')}{of} {needed}, got {len(spec)}")


def check_ttl(ttl_s: float) -> float:
    """Return ``ttl_s``; raise `ConfigurationError` unless it is a positive number of seconds."""
    if not (isinstance(ttl_s, int | float) and is_number(ttl_s) and 0 < ttl_s < math.inf):
        raise ConfigurationError(f"ttl_s must be a positive number of seconds, got {ttl_s!r:.80}")
    return ttl_s


def check_capacity(capacity: object) -> int:
    """Return a size in bytes, given as such or as text."""
    try:
        check_size(capacity)
        return _SIZE.validate_python(capacity)
    except ValueError as error:  # pydantic's are some
        why = f"{capacity!r:.80} is no size: write bytes as an int, or e.g. '32GiB'"
        raise ConfigurationError(why if isinstance(error, ValidationError) else str(error)) from error


def check_seconds(name: str, seconds: float | None, *, may_be_none: bool = True) -> None:
    """Raise `ConfigurationError` unless an argument of this name is a number of seconds from now, or None if it may."""
    if seconds is None and may_be_none:
        return
    if not (isinstance(seconds, int | float) and is_number(seconds) and seconds >= 0):
        raise ConfigurationError(f"{name} must be a number of seconds, 0 or more, got {seconds!r:.80}")


def check_limits(limits: CacheLimits | Mapping[str, Any] | None) -> CacheLimits:
    """Return the limits, of a mapping or by default; raise `ConfigurationError` of anything else."""
    if isinstance(limits, CacheLimits):
        return limits
    if not (limits is None or isinstance(limits, Mapping)):
        raise ConfigurationError(f"limits must be CacheLimits or a dict of its fields, got {type(limits).__name__}")
    try:
        return CacheLimits.model_validate(dict(limits or {}))
    except ConfigurationError as error:
        found = problems_of(error)
    raise located([(("limits", *where), what) for where, what in found])


def check_emit(emit: Emit | Sequence[Emit]) -> tuple[Emit, ...]:
    """Return all receivers of events; raise `ConfigurationError` unless each can be called at once."""
    receivers = tuple(emit) if isinstance(emit, Sequence) else (emit,)
    for each in receivers:
        if not callable(each) or inspect.isclass(each):  # a class would be made anew of each event
            raise ConfigurationError(f"emit must be a function that takes an event, or several, got {each!r:.80}")
        if inspect.iscoroutinefunction(each) or inspect.iscoroutinefunction(getattr(each, "__call__", None)):  # noqa: B004 - an object's
            raise ConfigurationError(
                f"emit must be a plain function, called at once: {each!r:.80} is a coroutine function, whose events "
                "nobody would await. Have it put them into an asyncio.Queue"
            )
    return receivers


def check_metrics(metrics: bool | Metrics) -> list[Metrics]:  # noqa: FBT001 - as `TieredKV` has it
    """Return what tells Prometheus, if that is wanted."""
    if isinstance(metrics, Metrics):
        return [metrics]
    if not isinstance(metrics, bool):
        raise ConfigurationError(f"metrics must be True, False or Metrics(...), got {metrics!r:.80}")
    return [Metrics()] if metrics else []


def metrics_of(settings: TieredKVSettings, *, given: bool | Metrics | None) -> bool | Metrics:
    """Return what a cache of these settings is given as ``metrics``; ``given`` goes before the setting of this name."""
    wanted = settings.metrics if given is None else given
    if wanted is not True:
        return wanted
    return Metrics(salts=settings.metrics_salts, prefill_tokens_per_s=settings.prefill_tokens_per_s)


def check_page(page: bool | int | str | Page) -> list[Page]:  # noqa: FBT001 - likewise
    """Return the page that shows what happens, if one is wanted."""
    if isinstance(page, Page):
        return [page]
    return [Page(address)] if (address := page_address(page)) else []


def page_of(settings: TieredKVSettings, *, given: bool | int | str | Page | None) -> bool | int | str | Page:
    """Return what a cache of these settings is given as ``page``; ``given`` goes before the setting of this name."""
    wanted = settings.page if given is None else given
    token = settings.page_hints_token.get_secret_value()
    if isinstance(wanted, Page) or not token or not (address := page_address(wanted)):
        return wanted
    return Page(address, hints_token=token)


def check_recorder(given: str | os.PathLike[str] | TraceRecorder) -> TraceRecorder | None:
    """Return what records requests, if that is wanted."""
    if isinstance(given, TraceRecorder):
        return given
    if not isinstance(given, str | os.PathLike):
        raise ConfigurationError(f"record_trace must be a path or a TraceRecorder, got {type(given).__name__}")
    return TraceRecorder(given) if os.fspath(given) else None


def check_asyncio() -> None:
    """Raise `ConfigurationError` unless an event loop of asyncio runs here."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError(
            "a TieredKV needs an event loop of asyncio (or uvloop); from trio or without a loop use open_blocking"
        ) from None


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"
