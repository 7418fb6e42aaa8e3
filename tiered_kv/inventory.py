"""What lies in a medium, record by record, whoever stored it: for operators, who inspect, verify and delete.

Names on a medium are digests: of models, weights and tenants the beginnings of those, as paths have them.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Self

from tiered_kv.keys import NO_SALT, BlockKey


@dataclass(frozen=True, order=True)
class Place:
    """Whose blocks: of one model in one layout, of some weights, of some ranks' heads, of one tenant.

    Attributes:
        fingerprint: Of model and layout, hexadecimal, as are the next.
        epoch: How the digest of the weights begins.
        shard: Whose part of the heads.
        salt: How the digest of the tenant's salt begins.
    """

    fingerprint: str
    epoch: str
    shard: str
    salt: str

    @classmethod
    def of(cls, path: str) -> Self:
        """Return that of a path of ours: ``fingerprint/epoch/shard/salt/...``."""
        return cls(*path.split("/")[:4])

    @property
    def is_unsalted(self) -> bool:
        """Whether there is no tenant."""
        return NO_SALT.hex().startswith(self.salt)

    def is_of(self, *, model: str = "", epoch: str = "", tenant: str = "") -> bool:
        """Say whether digests begin with these, as far as both are known; an empty one is any."""
        pairs = ((model, self.fingerprint), (epoch, self.epoch), (tenant, self.salt))
        return all(wanted.startswith(has) or has.startswith(wanted) for wanted, has in pairs)


@dataclass(frozen=True)
class Found:
    """One thing that a medium keeps: a record, or several in one object.

    Attributes:
        where: It is, in the medium's own words.
        place: Whose it is, as far as its name tells.
        num_bytes: Its length.
        num_blocks: How many records.
        written_at: When, in seconds since 1970, if the medium tells.
    """

    where: str
    place: Place
    num_bytes: int
    num_blocks: int = 1
    written_at: float | None = None

    def is_named_by(self, key: BlockKey) -> bool:
        """Say whether a record of this key belongs there."""
        return key.path in self.where if self.num_blocks == 1 else key.namespace.path in self.where


class Inventory(ABC):
    """Lists, reads and deletes what lies in one medium. Other things there are left alone.

    All raise `BackendUnavailableError` where the medium fails.
    """

    @abstractmethod
    def found(self) -> AsyncIterator[list[Found]]:
        """Yield what is there, some at a time."""

    @abstractmethod
    async def read(self, found: Found) -> bytes | None:
        """Return its bytes; None if it is gone meanwhile."""

    @abstractmethod
    async def delete(self, found: Sequence[Found]) -> None:
        """Delete it; what is gone is no error."""
