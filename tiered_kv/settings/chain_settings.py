"""What the tiers of a chain are made of: settings, dicts or URLs; those in memory; and what makes a chain of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, field_validator, model_validator

from tiered_kv.media.backend import Backend, SlotBackend
from tiered_kv.settings.registry import OWN_MEDIA, AnyBackend, medium_for_scheme, resolve, resolve_policy
from tiered_kv.settings.setting_errors import located, problems_of, size_in_words
from tiered_kv.settings.tier_settings import (
    BookedTierSettings,
    OwnedTierSettings,
    Size,
    SizeOrNone,
    TierSettings,
    default_size,
    paths_of,
    real_path,
    split_tier_url,
)
from tiered_kv.values.errors import ConfigurationError

_GIB = 1024**3

Bytes = Annotated[Size, Field(gt=0)]
"""A size of at least one byte: an int, or text such as ``"32GiB"`` or ``"1.5TB"``."""


class MemoryTierSettings(BookedTierSettings):
    """Base of the settings of a tier in memory: its policy is known when they are checked."""

    @field_validator("policy")
    @classmethod
    def _find_policy(cls, policy: str) -> str:
        resolve_policy(policy)
        return policy

    @model_validator(mode="before")
    @classmethod
    def _check_for_storage(cls, given: Any) -> Any:  # noqa: ANN401 - as pydantic has it
        others = OwnedTierSettings.model_fields.keys() - cls.model_fields.keys()
        if isinstance(given, Mapping) and (wrong := [name for name in given if name in others]):
            raise ValueError(f"{' and '.join(map(str, wrong))}: for storage tiers only")
        return given


class GPUTier(MemoryTierSettings):
    """Blocks kept in a pool of the GPU's memory, beside the engine's own KV cache.

    Where the engine's device is the CPU it is in host memory, which is of use to tests: `GPUPoolInHostMemory` says so.
    """

    medium: Literal["gpu"] = "gpu"
    capacity: Bytes = Field(examples=["2GiB"])
    """Bytes of GPU memory to take."""


class CPUTier(MemoryTierSettings):
    """Blocks kept in host memory, pinned where there is a GPU."""

    medium: Literal["cpu"] = "cpu"
    capacity: Size = default_size(_GIB)
    """Bytes of host memory to take. With 0 no block stays here: all pass through `CacheLimits.bounce`."""
    max_capacity: SizeOrNone = default_size(None)
    """The most that `TieredKV.resize` may make of it; the capacity if left out. It takes no memory, but on a machine
    with a GPU all of it is allocated and page-locked."""

    @model_validator(mode="after")
    def _check_max_capacity(self) -> Self:
        if self.max_capacity is not None and self.max_capacity < self.capacity:
            most, least = map(size_in_words, (self.max_capacity, self.capacity))
            raise ValueError(f"max_capacity ({most}) is below capacity ({least})")
        return self


def model_of(medium: str) -> type[TierSettings]:
    """Return the class of a medium's settings.

    Raises:
        ConfigurationError: As `resolve`.
    """
    if medium in OWN_MEDIA:
        return GPUTier if medium == "gpu" else CPUTier
    model: type[TierSettings] = resolve(medium).Settings
    return model


def tier_name(tier: TierSettings) -> str:
    """Return what results, logs and metrics call a tier: its ``name``, else its medium (of a path, the class)."""
    return tier.name or tier.medium.rpartition(":")[2]


def tier_from(value: object) -> TierSettings:
    """Validate one tier by its medium's own model.

    Args:
        value: A `TierSettings` of the medium's model, a mapping with ``"medium"``, or a URL: the scheme says the medium
            (``file`` is NVMe), the rest is the model's to read: `TierSettings.from_url`.

    Raises:
        ConfigurationError: It is none of these, or a field is unknown or wrong. No value that may be secret is shown.
    """
    if isinstance(value, str):
        name = medium_for_scheme(split_tier_url(value)[0].scheme)
        value = {"medium": name, **model_of(name).from_url(value)}
    if isinstance(value, TierSettings):
        model = model_of(value.medium)
        if not isinstance(value, model):
            package = model.__module__
            if package.startswith("tiered_kv."):
                package = "tiered_kv"  # which room of ours a model is in is nobody's concern
            wanted = f"{package}.{model.__qualname__}"
            raise ConfigurationError(f"medium {value.medium!r} takes {wanted}, not {type(value).__qualname__}")
        return value
    if not isinstance(value, Mapping):
        if isinstance(value, type):
            raise ConfigurationError(f"a tier is made: write {value.__name__}(...), not the class alone")
        raise ConfigurationError(f"a tier is a TierSettings, a dict with 'medium' or a URL, not {type(value).__name__}")
    medium = value.get("medium")
    if not isinstance(medium, str) or not medium:
        raise ConfigurationError("a tier needs its medium: write e.g. {'medium': 'cpu', 'capacity': '32GiB'}")
    model = model_of(medium)
    return model.model_validate(dict(value))


Tier = Annotated[SerializeAsAny[TierSettings], BeforeValidator(tier_from)]


def check_tiers(tiers: object) -> list[TierSettings | AnyBackend]:
    """Validate the tiers of a chain, all of them before complaining of any. Backends are taken as they are.

    Raises:
        ConfigurationError: They are no list, or some are no tiers; it says which.
    """
    if not isinstance(tiers, list | tuple):
        what = f"must be a list, e.g. ['cpu://?capacity=32GiB'], not {type(tiers).__name__}"
        raise located([(("tiers",), what)])
    found: list[TierSettings | AnyBackend] = []
    wrong = []
    for place, tier in enumerate(tiers):
        try:
            found.append(tier if isinstance(tier, Backend | SlotBackend) else tier_from(tier))
        except ConfigurationError as error:
            wrong += [(("tiers", place, *where), what) for where, what in problems_of(error)]
    if wrong:
        raise located(wrong)
    return found


def check_chain(media: Sequence[str], names: Sequence[str]) -> None:
    """Raise `ConfigurationError` unless tiers of these media and names, in this order, make a chain."""
    if not media:
        raise located([(("tiers",), "a cache needs at least one tier, e.g. 'cpu://?capacity=32GiB'")])
    own = [medium for medium in media if medium in OWN_MEDIA]
    if list(media[: len(own)]) != [medium for medium in OWN_MEDIA if medium in own]:
        order = "fastest first: at most one gpu, then at most one cpu, then storage"
        raise located([(("tiers",), f"{order}; got {', '.join(media)}")])
    taken = set(names)
    for place, name in enumerate(names):
        if (first := names.index(name)) != place:
            free = next(f"{name}-{n}" for n in range(2, len(names) + 2) if f"{name}-{n}" not in taken)
            clash = f"is called {name!r} like tiers[{first}]: give it a name of its own, e.g. name={free!r}"
            raise located([(("tiers", place), clash)])


def check_policies(tiers: Sequence[TierSettings], names: Sequence[str]) -> None:
    """Raise `ConfigurationError` where blocks would stay nowhere, or wait or move for a tier with nothing above it."""
    memory = [each for each in tiers if isinstance(each, GPUTier | CPUTier) and _can_keep(each)]
    if not memory and all(isinstance(each, CPUTier) for each in tiers):
        raise located([(("tiers",), "capacity=0 can keep nothing: give the cpu tier some, or add a storage tier")])
    if memory and memory[0].write == "back":
        place = tiers.index(memory[0])
        what = f"tier {names[place]!r} is the first: it gets blocks at once, not with write='back'"
        raise located([(("tiers", place), what)])
    taken: dict[Path, tuple[str, bool]] = {}
    for place, (tier, name) in enumerate(zip(tiers, names, strict=True)):
        what = ""
        if isinstance(tier, MemoryTierSettings):
            continue
        if tier.write == "back" and not memory:
            what = f"tier {name!r} has write='back', but there is no gpu or cpu tier to wait in"
        is_owned = isinstance(tier, OwnedTierSettings)
        for path in paths_of(tier):
            here = real_path(path)
            for there, (other, is_others_alone) in taken.items():
                are_apart = other == name or not (here.is_relative_to(there) or there.is_relative_to(here))
                if not are_apart and (is_owned or is_others_alone):
                    what = f"tier {name!r} has the directory of tier {other!r}, or one in it: each needs its own"
            taken.setdefault(here, (name, is_owned))
        what = what or _policy_problem(tier)
        if what:
            raise located([(("tiers", place), what)])


def _policy_problem(tier: TierSettings) -> str:
    try:
        if isinstance(tier, BookedTierSettings):
            resolve_policy(tier.policy)
    except ConfigurationError as error:
        return str(error)
    return ""


def _can_keep(tier: "GPUTier | CPUTier") -> bool:
    return isinstance(tier, GPUTier) or bool(tier.capacity or tier.max_capacity)
