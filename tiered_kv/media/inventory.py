"""What lies in a medium, record by record, whoever stored it: for operators, who inspect, verify and delete.

`Backend.inventory` opens one. Its names are digests, as the medium has them.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from tiered_kv.values.errors import BackendUnavailableError
from tiered_kv.values.keys import BlockKey

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Place:
    """Where blocks belong: to a model in one layout, to its weights, to some ranks' heads, and to a tenant.

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

    def is_of(self, *, model: str = "", epoch: str = "", tenant: str = "") -> bool:
        """Say whether digests begin with these, as far as both are known; an empty one is any."""
        pairs = ((model, self.fingerprint), (epoch, self.epoch), (tenant, self.salt))
        return all(wanted.startswith(has) or has.startswith(wanted) for wanted, has in pairs)


MOST_FOUND_BYTES: Final = 256 << 20
"""No record or pack is longer: of what is, an inventory reads nothing."""


@dataclass(frozen=True)
class Found:
    """One thing that a medium keeps: a record, or several in one object.

    Attributes:
        where: It is, in the medium's own words.
        place: Whose it is, as far as its name tells.
        num_bytes: Its length.
        num_blocks: How many records. 0 is of what is no block, and goes with those of its place: one that was not
            written to its end, the mark of an eviction, a header that no open would look at.
        written_at: When, in seconds since 1970, if the medium tells.
    """

    where: str
    place: Place
    num_bytes: int
    num_blocks: int = 1
    written_at: float | None = None

    @property
    def is_too_long(self) -> bool:
        """Whether it is longer than what is kept can be: others may write there, too."""
        return self.num_bytes > MOST_FOUND_BYTES

    def is_named_by(self, key: BlockKey) -> bool:
        """Say whether a record of this key belongs there."""
        is_pack = self.num_blocks > 1  # whose name has one key of several
        return key.namespace.path in self.where and (is_pack or self.where.endswith(f"/{key.hash.hex()}"))


class Inventory(ABC):
    """Lists, reads and deletes what lies in one medium. Other things there are left alone.

    All raise `BackendUnavailableError` where the medium fails.

    Attributes:
        missing: Parts of the medium that are not there: what they have is neither listed nor deleted.
    """

    missing: Sequence[str] = ()

    @abstractmethod
    def found(self, salt: str = "") -> AsyncIterator[list[Found]]:
        """Yield what is there, some at a time; all that is of a salt, if one is given, others' too or not.

        Args:
            salt: As `Place` has it; "" is any.
        """

    @abstractmethod
    async def read(self, found: Found) -> bytes | bytearray | None:
        """Return its bytes, not more than were found, and none of what is too long; None if it is gone meanwhile.

        Raises:
            BlockCorruptError: This place cannot be read; others may.
        """

    @abstractmethod
    async def delete(self, found: Sequence[Found]) -> None:
        """Delete what was found, the rest too if one cannot be deleted; what is gone is no error."""

    async def hold(self) -> None:  # noqa: B027 - most media need nothing
        """Keep caches, until this is closed, from putting other blocks where some were found: for who will delete.

        Raises:
            ConfigurationError: One has the medium open that nobody else may change meanwhile.
        """

    async def still_there(self, found: Sequence[Found]) -> list[bool]:
        """Say which are what they were when they were found, as far as a cache may have put others in their place."""
        return [True] * len(found)

    async def delete_of(self, salt: str) -> int:
        """Delete all that is of one salt, and what nobody can say of whether it is; return how many blocks were found.

        It is deleted as it is found. What fails keeps nothing else from going, and is raised at the end.
        """
        num_deleted, failed = 0, None
        try:
            async for some in self.found(salt):
                theirs = [each for each in some if each.place.is_of(tenant=salt)]
                try:
                    await self.delete(theirs)
                except BackendUnavailableError as error:
                    failed = error
                else:
                    num_deleted += sum(each.num_blocks for each in theirs if each.place.salt)
        except BackendUnavailableError as error:
            failed = error
        if failed is not None:
            raise failed
        return num_deleted


async def in_thread(parts: Iterator[T]) -> AsyncIterator[T]:
    """Yield what an iterator has that blocks, one after another, each made in a thread."""
    end: Any = object()
    while (part := await asyncio.to_thread(next, parts, end)) is not end:
        yield part
