"""What can be set of the NVMe tier."""

from itertools import permutations
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator, model_validator

from tiered_kv.settings.setting_errors import size_in_words
from tiered_kv.settings.tier_settings import OwnedTierSettings, Size, SizeOrNone, default_size, real_path

_MOST_DIRECTORIES = 64


class NVMeSettings(OwnedTierSettings):
    """``{"medium": "nvme", "path": "/mnt/kv", "capacity": "1TiB"}``, or ``"path": ["/mnt/a", "/mnt/b"]``."""

    medium: str = "nvme"
    path: Path | tuple[Path, ...] = Field(examples=["/mnt/kv"])
    """A directory of this process alone, made if need be; or one on each of several disks, over which blocks are
    spread. One that fails, or is not there, takes only its blocks."""
    capacity: Size = Field(gt=0, examples=["1TiB"])
    """Limit over everything in each directory, blocks of other models included."""
    max_capacity: SizeOrNone = default_size(None)
    """The most that `TieredKV.resize` may make of it, for each directory; the capacity if left out. Costs 100 bytes of
    host memory a block, and no place on the disk."""
    erase: bool | Literal["punch"] = False
    """Whether the bytes of a block that is evicted by name, or expires, are overwritten with zeros; or with ``"punch"``
    given back to the filesystem, which tells the disk that it may forget them. Without it only its header goes."""
    num_threads: int = Field(default=8, ge=1, le=256)
    """Calls under way at once, in each direction and directory: reads never queue behind writes."""
    direct: Literal["auto", "always", "never"] = "auto"
    """Whether to pass by the page cache (O_DIRECT). ``auto``: where the filesystem can."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The directories."""
        return self.path if isinstance(self.path, tuple) else (self.path,)

    @field_validator("erase", mode="wrap")
    @classmethod
    def _check_erase(cls, given: object, validate: ValidatorFunctionWrapHandler) -> object:
        try:
            return validate(given)
        except ValidationError:
            raise ValueError(f"must be true, false or 'punch', got {given!r:.80}") from None

    @model_validator(mode="after")
    def _check_max_capacity(self) -> Self:
        if self.max_capacity is not None and self.max_capacity < self.capacity:
            most, least = map(size_in_words, (self.max_capacity, self.capacity))
            raise ValueError(f"max_capacity ({most}) is below capacity ({least})")
        return self

    @model_validator(mode="after")
    def _check_paths(self) -> Self:
        if not 1 <= len(self.paths) <= _MOST_DIRECTORIES:
            raise ValueError(f"path names 1 to {_MOST_DIRECTORIES} directories, got {len(self.paths)}")
        places = [real_path(path) for path in self.paths]
        if any(place.is_relative_to(other) for place, other in permutations(places, 2)):
            raise ValueError("path names a directory twice, or one in another: each needs its own")
        return self
