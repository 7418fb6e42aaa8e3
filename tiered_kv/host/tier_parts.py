"""A server's tiers as its settings have them, and the part that one model's cache gets of each that is divided."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiered_kv.chain_settings import CPUTier, GPUTier, tier_name
from tiered_kv.errors import ConfigurationError
from tiered_kv.settings import TieredKVSettings
from tiered_kv.tier_settings import OwnedTierSettings, TierSettings


@dataclass(frozen=True)
class TierParts:
    """One tier, and how it is taken apart.

    Attributes:
        name: As everywhere.
        capacity: Of all parts together, in bytes; 0 of a tier that the server does not own, which all have whole.
        paths: Where each model has a directory of its own.
    """

    name: str
    capacity: int
    paths: tuple[Path, ...]
    _settings: TierSettings

    @classmethod
    def of(cls, settings: TierSettings) -> "TierParts":
        """Look at one tier."""
        if not isinstance(settings, OwnedTierSettings):
            return cls(tier_name(settings), 0, (), settings)
        facts: dict[str, Any] = dict(settings)  # every owned medium has a capacity; a disk, one directory or several
        path = facts.get("path", ())
        paths = path if isinstance(path, tuple) else (path,)
        return cls(tier_name(settings), facts["capacity"], tuple(map(Path, paths)), settings)

    def part(self, directory: str, capacity: int) -> TierSettings:
        """Return the settings of one model's part, which may become the whole."""
        if not self.capacity:
            return self._settings
        changed: dict[str, Any] = {"capacity": capacity, "max_capacity": self.capacity}
        if self.paths:
            changed["path"] = tuple(path / directory for path in self.paths)
        return type(self._settings).model_validate({**dict(self._settings), **changed})


def tiers_in(settings: TieredKVSettings) -> list[TierParts]:
    """Return a server's tiers.

    Raises:
        ConfigurationError: One cannot be a server's, or what is fixed for models is more than there is.
    """
    if any(isinstance(tier, GPUTier) for tier in settings.tiers):
        raise ConfigurationError("a server has no gpu tier: each engine's GPU is its own")
    if not any(isinstance(tier, CPUTier) and tier.capacity for tier in settings.tiers):
        raise ConfigurationError("a server needs a cpu tier: blocks pass to and from its clients through it")
    tiers = [TierParts.of(tier) for tier in settings.tiers]
    _check_fixed(settings.host.fixed, [tier for tier in tiers if tier.capacity])
    return tiers


def _check_fixed(fixed: Mapping[str, Mapping[str, int]], owned: Sequence[TierParts]) -> None:
    names = [tier.name for tier in owned]
    for model, parts in fixed.items():
        if unknown := [tier for tier in parts if tier not in names]:
            raise ConfigurationError(
                f"host.fixed of {model!r}: no tier {unknown[0]!r} of the server's own; there are {', '.join(names)}"
            )
    for tier in owned:
        if (total := sum(parts.get(tier.name, 0) for parts in fixed.values())) > tier.capacity:
            raise ConfigurationError(f"host.fixed: {total} bytes of tier {tier.name!r}, which has {tier.capacity}")
