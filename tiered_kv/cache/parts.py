"""What a cache is made of, checked, and not open yet: tiers with their backends, and kinds of blocks."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tiered_kv.catalog.policies import Policy
from tiered_kv.media.backend import Backend, RecordShape, SlotBackend
from tiered_kv.memory.codec import Codec
from tiered_kv.memory.gpu import DeviceLike
from tiered_kv.settings.chain_settings import CPUTier, GPUTier, check_chain, check_policies, check_tiers, tier_name
from tiered_kv.settings.registry import make_backend, resolve_policy
from tiered_kv.settings.settings import CacheLimits
from tiered_kv.settings.tier_settings import OwnedTierSettings, StorageTierSettings, TierSettings
from tiered_kv.telemetry.trace_recorder import TraceRecorder
from tiered_kv.telemetry.watch import Watch
from tiered_kv.tiers.records import ExponentCodec
from tiered_kv.tiers.tier import Naming
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.events import Emit
from tiered_kv.values.keys import ModelIdentity, Shard
from tiered_kv.values.layout import PAGE_BYTES, KVGroup, KVLayout, fingerprint

_RANK: Final = "{rank}"
_FILLED_IN: Final = re.compile(r"\{\w*\}")


@dataclass(frozen=True)
class StoragePart:
    """A backend of a storage tier, and the name of that tier in the chain."""

    name: str
    settings: StorageTierSettings
    backend: Backend | SlotBackend

    @property
    def policy(self) -> str | type[Policy]:
        """Which blocks go first, where the cache gives and takes the slots."""
        return resolve_policy(self.settings.policy) if isinstance(self.settings, OwnedTierSettings) else "lru"

    @property
    def scrub_bandwidth(self) -> float | None:
        """Bytes a second to be verified in the background, if any."""
        return self.settings.scrub_bandwidth if isinstance(self.settings, OwnedTierSettings) else None


@dataclass(frozen=True)
class ChainParts:
    """The tiers of a chain as settings ask for them."""

    gpu: GPUTier | None
    cpu: CPUTier
    storage: tuple[StoragePart, ...]

    @property
    def media(self) -> dict[str, str]:
        """The medium of each tier that the cache will own, the fastest first."""
        memory = {tier_name(tier): tier.medium for tier in (self.gpu, self.cpu) if tier is not None and tier.capacity}
        owned = (part for part in self.storage if isinstance(part.settings, OwnedTierSettings))
        return memory | {part.name: part.settings.medium for part in owned}

    @property
    def is_written_back(self) -> bool:
        """Whether blocks wait above some storage tier until they are written there."""
        return any(part.settings.write == "back" for part in self.storage)


@dataclass(frozen=True)
class BlockKind:
    """A kind of block: one KV group on one rank. There is a chain for each."""

    number: int
    group: KVGroup
    naming: Naming
    codec: Codec | None = None
    record_codec: ExponentCodec | None = None

    @property
    def name(self) -> str:
        """The name of its slab."""
        return f"group{self.number}-{self.naming.shard}"

    @property
    def shape(self) -> RecordShape:
        """The shape of its records."""
        fingerprint, shard, num_bytes = self.naming.fingerprint, self.naming.shard.part, self.group.payload_bytes
        shape = RecordShape(fingerprint, num_bytes, shard, slots_per_block=self.group.slots_per_block)
        if (codec := self.codec or self.record_codec) is None:
            return shape
        return replace(shape, payload_bytes=codec.stored_bytes, codec=codec.name, decoded_bytes=num_bytes)

    @property
    def slot_bytes(self) -> int:
        """What of a slot in memory a block takes."""
        return self.codec.stored_bytes if self.codec else self.group.payload_bytes

    @property
    def slot_stride_bytes(self) -> int:
        """Bytes from one slot to the next: whole pages."""
        return -(-self.slot_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True)
class CacheParts:
    """What a cache is to be made of; all of it has been checked.

    Attributes:
        tiers: The chain as it was asked for.
        model: Whose blocks it keeps.
        layout: What they are made of.
        codecs: By KV group, how they are kept in slots.
        record_codecs: By KV group, how they are kept in records, if that is another way than in slots.
        shards: Whose parts of them: one rank's, or all.
        num_workers: That a planner has: one for each of these, or several, which hold the same.
        limits: Bounds.
        device: Where the engine's tensors are, if that was said.
        emit: Takes events.
        watch: Sees what it does, if somebody is to be shown.
        recorder: Writes down what is asked of it, if that is wanted.
    """

    tiers: ChainParts
    model: ModelIdentity
    layout: KVLayout
    codecs: tuple[Codec | None, ...]
    record_codecs: tuple[ExponentCodec | None, ...]
    shards: tuple[Shard, ...]
    num_workers: int
    limits: CacheLimits
    device: DeviceLike | None
    emit: Emit
    watch: Watch | None
    recorder: TraceRecorder | None = None

    def kinds(self) -> list[BlockKind]:
        """Return the kinds of blocks, by KV group, then by rank."""
        kinds = []
        for number, group in enumerate(self.layout.groups):
            codec, record_codec = self.codecs[number], self.record_codecs[number]
            kept = codec or record_codec
            name = fingerprint(self.model, self.layout, number, kept.name if kept else "none")
            kinds += [BlockKind(number, group, Naming(name, shard), codec, record_codec) for shard in self.shards]
        return kinds


def chain_parts(
    tiers: Sequence[TierSettings | Mapping[str, Any] | str | Backend | SlotBackend], shards: Sequence[Shard]
) -> ChainParts:
    """Sort tiers into parts, making the backends that settings describe. Opens nothing.

    Raises:
        ConfigurationError: No tiers, a wrong order, two of one name, what is no tier at all, a backend that does
            not keep its settings, or ``{rank}`` where a cache stands for all ranks.
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
        if isinstance(each, StorageTierSettings)
        else StoragePart(name, _settings_of(each), each)
        for each, (_, name) in zip(settings, named, strict=True)
        if isinstance(each, StorageTierSettings | Backend | SlotBackend)
    ]
    for part in storage:
        if part.scrub_bandwidth and not _can_be_scrubbed(part.backend):
            raise ConfigurationError(f"tier {part.name!r} cannot be scrubbed: its backend has no peek()")
        if part.settings.read_only and isinstance(part.backend, SlotBackend):
            raise ConfigurationError(f"tier {part.name!r} cannot be read_only: nobody else writes to its slots")
    return ChainParts(gpu, cpu, tuple(storage))


def _of_rank(settings: TierSettings, shards: Sequence[Shard]) -> TierSettings:
    """Put the rank into the texts and paths that ask for it; a path that asks for anything else is refused."""
    for name, value in settings:
        if isinstance(value, Path) and (odd := set(_FILLED_IN.findall(str(value))) - {_RANK}):
            raise ConfigurationError(
                f"{name} of tier {tier_name(settings)!r} has {min(odd)}: only {_RANK} is filled in"
            )
    asking = {name: value for name, value in settings if isinstance(value, str | Path) and _RANK in str(value)}
    if asking and len(shards) > 1:
        raise ConfigurationError(
            f"{_RANK} in {' and '.join(asking)} of tier {tier_name(settings)!r}: this cache stands for "
            f"{len(shards)} ranks, whose blocks are kept apart in one place: leave it out"
        )
    texts = {name: type(value)(str(value).replace(_RANK, str(shards[0].rank))) for name, value in asking.items()}
    return settings.model_copy(update=texts) if texts else settings


def _can_be_scrubbed(backend: Backend | SlotBackend) -> bool:
    return isinstance(backend, SlotBackend) and type(backend).peek is not SlotBackend.peek


def _name_of(backend: Backend | SlotBackend) -> str:
    if (settings := _kept_by(backend)) is not None:
        return tier_name(settings)
    return type(backend).__name__.removesuffix("Backend").lower() or "storage"


def _settings_of(backend: Backend | SlotBackend) -> StorageTierSettings:
    return _kept_by(backend) or StorageTierSettings(medium=type(backend).__name__)


def _kept_by(backend: Backend | SlotBackend) -> StorageTierSettings | None:
    """Return the settings that a backend was made with; None of one whose class takes none.

    Raises:
        ConfigurationError: Its class has a model of them, and it does not keep them where they are looked for: what
            they ask of the cache, as to encrypt, would not be done.
    """
    settings = getattr(backend, "settings", None)
    if isinstance(settings, StorageTierSettings):
        return settings
    model = getattr(backend, "Settings", None)
    if isinstance(model, type) and issubclass(model, StorageTierSettings):
        raise ConfigurationError(
            f"{type(backend).__name__} has a model of settings and does not keep them: write self.settings = settings "
            "in its __init__"
        )
    return None
