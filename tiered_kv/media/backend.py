"""What a storage tier implements, and what it is given. Read ``tiered_kv_backends/memory.py`` for the shortest one.

Two kinds. A `Backend` takes keys and bytes and evicts for itself (an object store, a server, a shared filesystem). A
`SlotBackend` is a medium that the cache owns alone: numbered slots of one size, chosen by the cache's catalog.

Calls come in batches and answer one `Outcome` per block, in order, holes anywhere. A backend's call is never cancelled:
the cache bounds how long it *waits*, and keeps the buffers lent until the call returns. A call raises
`BackendUnavailableError` when the whole medium fails, and nothing else. Blocks arrive encoded and are verified after a
read; a backend neither makes nor checks headers.

Names on a medium are digests: paths have the beginnings of those of models, weights and tenants. A tier with keys hides
them from the backend too, see `seal.NameCipher`.
"""

import asyncio
import enum
import mmap
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from inspect import iscoroutinefunction, unwrap
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar, Final, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tiered_kv.media.inventory import Inventory
from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError, LayoutMismatchError
from tiered_kv.values.keys import BlockKey, Names, Shard, salt_digest
from tiered_kv.values.layout import PAGE_BYTES, slots_of
from tiered_kv.values.specs import LoadStoreSpec

T = TypeVar("T")


class Outcome(enum.Enum):
    """What became of one block in a call."""

    HIT = "hit"
    """Read whole into its buffers."""
    MISS = "miss"
    """Not there."""
    CORRUPT = "corrupt"
    """There, but of the wrong length, header or checksum: it will be written anew, or deleted."""
    STORED = "stored"
    """Written."""
    REFUSED = "refused"
    """Not written for want of room or by the medium's own choice; nothing is wrong."""
    FAILED = "failed"
    """The medium failed for this block; others of the batch may have gone well."""


class Block:
    """The buffers of one block record, an iovec: ``header`` (4 KiB), then ``payload``. Both are page-aligned.

    A backend fills these bytes in, or writes them out as they are: those of a write are read-only, since loads read
    the same memory meanwhile. They are lent for the length of the call. The object is no buffer itself:
    ``bytes(block)`` is a copy of the record, `segments` are its parts where they lie.

    Attributes:
        header: 4096 bytes.
        payload: The block's bytes, exactly.
        padded: ``payload`` and the rest of its last 4 KiB page, for direct I/O.
    """

    __slots__ = ("header", "padded", "payload")

    def __init__(self, header: memoryview, padded: memoryview, payload_bytes: int) -> None:
        self.header = header
        self.padded = padded
        self.payload = padded if payload_bytes == len(padded) else padded[:payload_bytes]

    @classmethod
    def empty(cls, payload_bytes: int) -> "Block":
        """Allocate one of its own, zeroed and page-aligned."""
        stride = -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES
        memory = memoryview(mmap.mmap(-1, PAGE_BYTES + stride))
        return cls(memory[:PAGE_BYTES], memory[PAGE_BYTES:], payload_bytes)

    def read_only(self) -> "Block":
        """Return the same memory, of which nothing can be changed by this block."""
        return Block(self.header.toreadonly(), self.padded.toreadonly(), len(self.payload))

    @property
    def segments(self) -> tuple[memoryview, memoryview]:
        """The record's bytes in order, without padding."""
        return self.header, self.payload

    @property
    def num_bytes(self) -> int:
        """Length of the record without padding."""
        return len(self.header) + len(self.payload)

    def fill(self, record: bytes | bytearray | memoryview) -> bool:
        """Copy a whole record in; False, and nothing copied, if its length is not this block's."""
        if len(record) != self.num_bytes:
            return False
        view, cut = np.frombuffer(record, np.uint8), len(self.header)
        np.copyto(np.frombuffer(self.header, np.uint8), view[:cut])
        np.copyto(np.frombuffer(self.payload, np.uint8), view[cut:])  # releases the GIL; a memoryview's slice holds it
        return True

    def __bytes__(self) -> bytes:
        return b"".join(self.segments)


class Blocks(Sequence[Block]):
    """Blocks that are made when they are looked at, in any thread: the loop's has no time for each of many."""

    def __init__(self, num_blocks: int, make: Callable[[int], Block]) -> None:
        """Have so many, of which ``make`` makes the one at a position, at least once."""
        self._made: list[Block | None] = [None] * num_blocks
        self._make = make

    @classmethod
    def some(cls, blocks: Sequence[Block], at: Sequence[int]) -> Sequence[Block]:
        """Return those of ``blocks`` at ascending positions, each once."""
        return blocks if len(at) == len(blocks) else cls(len(at), lambda n: blocks[at[n]])

    @classmethod
    def lent(cls, blocks: Sequence[Block]) -> "Blocks":
        """Return the same memory by blocks of the borrower's own, whatever that makes of these objects."""
        return cls(len(blocks), lambda n: Block(blocks[n].header, blocks[n].padded, len(blocks[n].payload)))

    @classmethod
    def read_only(cls, blocks: Sequence[Block]) -> "Blocks":
        """Return the same memory as blocks through which nothing can be changed, see `Block.read_only`."""
        return cls(len(blocks), lambda n: blocks[n].read_only())

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, at: int) -> Block: ...

    @overload
    def __getitem__(self, at: slice) -> list[Block]: ...

    def __getitem__(self, at: int | slice) -> Block | list[Block]:
        if isinstance(at, slice):
            return [self[position] for position in range(*at.indices(len(self._made)))]
        if (block := self._made[at]) is None:
            block = self._made[at] = self._make(at)
        return block


class Workers(Protocol):
    """Daemon threads for blocking calls, made by the cache."""

    def run(self, function: Callable[..., T], *args: object) -> Awaitable[T]:
        """Run ``function(*args)`` in one of the threads. Cancelling the awaitable does not stop the call."""
        ...

    def begin_each(self, calls: Sequence[Callable[[], T]], then: Callable[[Callable[[], list[T]]], object]) -> None:
        """Make one call or more, each in any of the threads, and tell ``then`` once all of them have ended.

        ``then`` is called on the event loop, once, perhaps before this returns, with what returns the results, or
        raises what one of the calls raised.
        """
        ...


@dataclass(frozen=True)
class RecordShape:
    """The records of one KV group; where a process stands for several ranks, of one group on one rank."""

    fingerprint: bytes
    payload_bytes: int
    shard: Shard = field(default_factory=Shard)
    codec: str = "none"
    decoded_bytes: int = 0
    """Of a payload that a codec has made smaller; 0 is for ``payload_bytes``."""
    slots_per_block: float = 1.0
    """See `KVGroup`."""

    def num_slots(self, num_blocks: int) -> int:
        """Return how many slots an owned medium has for these records that is to hold so many blocks of prompts."""
        return slots_of(num_blocks, self.slots_per_block)

    @property
    def folder(self) -> str:
        """A name for what an owned medium keeps of these records."""
        return self.fingerprint.hex() + (f"-{self.shard}" if self.shard.size > 1 else "")

    @cached_property
    def padded_bytes(self) -> int:
        """Payload rounded up to 4 KiB: what `Block.padded` holds."""
        return -(-self.payload_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def record_bytes(self) -> int:
        """Header and payload: what a record has without padding."""
        return PAGE_BYTES + self.payload_bytes

    @cached_property
    def stride_bytes(self) -> int:
        """Header and padded payload: one slot of a medium."""
        return PAGE_BYTES + self.padded_bytes


@dataclass(frozen=True)
class BackendContext:
    """What a backend gets when it is opened.

    Attributes:
        groups: The records it will see, one per KV group (and rank, where there are several).
        workers: Makes ``workers(num_threads)`` named after the tier; ended by the cache when the tier closes.
        clock: Seconds, monotonic.
    """

    groups: tuple[RecordShape, ...]
    workers: Callable[[int], Workers]
    clock: Callable[[], float]

    def record_lengths(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return how many bytes the record of each key has."""
        lengths = {shape.fingerprint: shape.record_bytes for shape in self.groups}
        return [lengths[key.namespace.fingerprint] for key in keys]


_CLOSERS: Final = ("close", "shutdown", "stop", "dispose", "disconnect")


def _is_plain(method: object) -> bool:
    """Say whether it is a function of plain ``def``, and none that hands on what another one returns."""
    return isinstance(method, FunctionType) and not iscoroutinefunction(unwrap(method, stop=iscoroutinefunction))


class _AnyBackend(ABC):
    Settings: ClassVar[type[Any]]
    """The model of its settings, a `StorageTierSettings`; ``Backend(settings)`` is how the registry makes one.

    A backend that has one keeps them as ``self.settings``: of one that is given as an object the cache reads there what
    it does itself, such as to encrypt, and refuses it if nothing is there.
    """
    last_error: str = ""
    """Why blocks failed last in a call of which others went well: a backend keeps it here, for `describe`."""

    def __init_subclass__(cls) -> None:
        """Refuse what looks like a method of the interface that is not overridden, or is one, and cannot be awaited."""
        super().__init_subclass__()
        interface = next((base for base in cls.__mro__[1:] if base.__module__ == __name__), cls)
        unused = [name for name in dir(interface) if name[0] != "_" and getattr(cls, name) == getattr(interface, name)]
        for name, value in vars(cls).items():
            if iscoroutinefunction(getattr(interface, name, None)) and _is_plain(value):
                raise ConfigurationError(f"{cls.__name__}.{name} must be async def: the cache awaits it")
            if name[0] == "_" or not callable(value) or hasattr(interface, name):
                continue
            alike = ["aclose"] if name in _CLOSERS else get_close_matches(name, unused, 1, 0.85)
            if alike and alike[0] in unused:  # else it stands beside what it helps
                raise ConfigurationError(
                    f"{cls.__name__} has {name}, which no cache calls: call it {alike[0]}, or _{name}"
                )

    def describe(self) -> dict[str, object]:
        """Facts for `stats()`, e.g. the I/O mode in use.

        ``last_error``: of what blocks failed last, for those who are told that some did. ``own_bytes_written``: what it
        wrote beside records, for `TierStatistics.write_amplification`.
        """
        return {"last_error": self.last_error} if self.last_error else {}

    @classmethod
    def inventory(cls, settings: Any) -> AbstractAsyncContextManager[Inventory]:  # noqa: ANN401 - of the medium's model
        """Open what lists, reads and deletes whatever lies in the medium, for operators; no cache is needed.

        Raises:
            ConfigurationError: The medium cannot list what it has.
            BackendUnavailableError: No tier has used it.
        """
        raise ConfigurationError(f"medium {settings.medium!r} cannot list what it has")

    @classmethod
    def has_used(cls, path: Path) -> bool:  # noqa: ARG003 - there is none
        """Say whether a tier of this medium has used a directory. A medium without directories says False.

        Raises:
            OSError: It cannot be looked at.
        """
        return False

    @classmethod  # noqa: B027 - a medium without directories refuses none
    def check_place(cls, path: Path) -> None:
        """Refuse a directory that opening would refuse for what lies in it or above it. Nothing is made or changed.

        Raises:
            ConfigurationError: Another tier's is there.
        """

    @classmethod
    async def delete_tenant(cls, settings: Any, salt: str | bytes) -> int:  # noqa: ANN401 - as above, a dict or a URL
        """Delete the blocks of one salt, of every model, epoch and shard: a job of its own, beside the caches.

        Of a medium that its cache owns alone, while none has it open. What is stored meanwhile may stay. Cancelled, it
        deletes what a thread has been given, and no more.

        Args:
            settings: As of the tier, its keys too if it has some.
            salt: The tenant's; "" is of blocks without one.

        Returns:
            How many blocks were deleted.

        Raises:
            ConfigurationError: No settings of this medium; it cannot be used so, or not as long as a cache has it open.
            BackendUnavailableError: The medium failed, or a part of it is away, with which blocks would come back. All
                that could be deleted is, for good, whatever else failed.
        """
        settings = cls.Settings.of(settings)
        digits = (await asyncio.to_thread(settings.on_medium, salt_digest(salt))).hex()
        try:
            async with cls.inventory(settings) as inventory:
                await inventory.hold()
                num_deleted = await inventory.delete_of(digits[:32])  # as many as `Namespace.path` has
        except BackendUnavailableError as error:
            raise BackendUnavailableError(f"could not delete a tenant: {error}") from error
        if inventory.missing:
            where = ", ".join(inventory.missing)
            raise BackendUnavailableError(f"could not delete a tenant: no tier has used {where}: is the disk mounted?")
        return num_deleted

    async def aclose(self) -> None:  # noqa: B027 -- a medium may have nothing to let go of
        """Let go of files, connections and threads. Called once, after the last call has returned or was given up.

        There is no ``close``, as what a backend lets go of may take a while; a class that has one instead is refused.
        """


class CutPrefix(int):
    """So many leading keys are there; whether the next one is, the medium could not tell."""


class Backend(_AnyBackend):
    """A medium that takes keys and bytes and evicts for itself. Shared media are of this kind.

    Attributes:
        keeps_memory: Whether it goes on using the memory of blocks behind a call, as RDMA does: then a cache gives none
            of its host memory back to the system.
    """

    keeps_memory: bool = False

    async def open(self, context: BackendContext) -> None:
        """Connect. `ConfigurationError` for what can never work, `BackendUnavailableError` for what may work later.

        A tier that is not `StorageTierSettings.required` is opened again after it has raised.
        """

    @abstractmethod
    async def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Say HIT or MISS for each key, or FAILED where the medium cannot tell. May be an estimate: a read decides."""

    async def lookup_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Count the leading keys that are there. Override it where asking costs: O(log n) questions will do."""
        outcomes = await self.lookup(keys)
        if outcomes is None or len(outcomes) != len(keys):  # others' code may have forgotten some, or to answer
            raise ValueError(f"lookup answered {len(outcomes or ())} outcomes for {len(keys)} keys")
        if odd := [each for each in outcomes if not isinstance(each, Outcome)]:
            raise TypeError(f"lookup answered {odd[0]!r:.80}, which is no Outcome")
        end = next((n for n, outcome in enumerate(outcomes) if outcome is not Outcome.HIT), len(outcomes))
        return CutPrefix(end) if Outcome.FAILED in outcomes[end : end + 1] else end

    async def locate(self, keys: Sequence[BlockKey]) -> LoadStoreSpec | None:
        """Say where the records of these keys are, in order; of one that is absent, where it would be looked for.

        None: it cannot tell. A medium whose records others can read by themselves overrides it.
        """
        return None

    @abstractmethod
    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        """Fill ``into[i]`` with the record of ``keys[i]``: HIT, MISS, CORRUPT (wrong length) or FAILED each."""

    @abstractmethod
    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        """Keep the records, replacing what is there: STORED, REFUSED or FAILED each. The buffers are read-only."""

    @abstractmethod
    async def delete(self, keys: Sequence[BlockKey]) -> bool | None:
        """Forget the keys, the others too if one cannot be; absent ones are no error.

        Returns:
            False where it is not known that they are gone: nobody finds them by this backend any more, but another
            process, or another start, may. Who evicts them is told. It is asked again with no keys: False as long as
            that is so of any. A medium that deletes by name returns nothing.
        """


@dataclass(frozen=True)
class Recovered:
    """What a `SlotBackend` found of one KV group when it opened: least recently used first.

    Attributes:
        num_slots: Slots it has for this group.
        names: ``(n, 4)`` uint64, the names of the blocks that are there.
        slots: ``(n,)`` int64, where.
        max_slots: The most that `SlotBackend.resize` may make of them; ``num_slots`` if left out.
    """

    num_slots: int
    names: Names
    slots: NDArray[np.int64]
    max_slots: int | None = None


@dataclass(frozen=True, eq=False)
class Missing:
    """The part of a `SlotBackend` that cannot be used for now, and has lost what blocks it had.

    Attributes:
        slots: ``(n,)``, of each slot whether it belongs to it; ``n`` is `Recovered.max_slots`.
        why: In words.
    """

    slots: NDArray[np.bool_]
    why: str


Ended = Callable[[], list[Outcome]]
"""Returns, or raises, what `RecordBackend.read` or `write` would; called once."""
Then = Callable[[Ended], object]
"""Told on the event loop, once, how a batch ended: no thread touches a buffer of it any more."""
Make = Callable[[Sequence[int]], object]
"""Makes the records of some positions of a batch, before they are written."""
Verify = Callable[[Sequence[int], list[Outcome]], list[Outcome]]
"""Says what has become of some positions of a batch that were read, given what the medium says of each."""


class SlotBackend(_AnyBackend):
    """An owned medium: numbered slots, which the cache's catalog gives and takes.

    While a slot is written it is in no other call. It may be read by several at once, and forgotten while it is read:
    those may get anything, which is verified.
    """

    @classmethod
    def has_left(cls, path: Path) -> bool:  # noqa: ARG003 - there is none
        """Say whether a tier of this medium has left a directory. A medium without directories says False.

        Raises:
            OSError: There is no descriptor left to look.
        """
        return False

    @classmethod
    def delete_left(cls, path: Path) -> bool:  # noqa: ARG003 - there is none
        """Delete a directory that a tier of this medium has left, and return whether it is gone.

        Nothing is deleted while a tier has it open, nor if anything lies in it that no tier has made. Blocks the thread
        for as long as its files take.

        Raises:
            OSError: It may go, and its disk does not let it: a part of it may be gone. Or there is no descriptor left
                to look.
        """
        return False

    @classmethod
    def cut_left(cls, path: Path, capacity_bytes: int) -> bool:  # noqa: ARG003 - there is none
        """Cut a directory that a tier of this medium has left to this capacity at most, and return whether that is so.

        What that costs are blocks of any age. Nothing is cut where `delete_left` would delete nothing.
        """
        return False

    @abstractmethod
    async def open(self, context: BackendContext) -> list[Recovered]:
        """Take the medium for this process alone, and return what is there, per KV group.

        If that cannot be used, `aclose` is called at once; a tier that is not required is then opened again.

        Raises:
            ConfigurationError: It can never work (too small, not writable, held by another process).
        """

    async def locate(self, group: int, slots: NDArray[np.int64]) -> LoadStoreSpec | None:
        """Say where the records in these slots are, in order. None: it cannot tell."""
        return None

    @abstractmethod
    async def read(self, group: int, slots: NDArray[np.int64], into: Sequence[Block]) -> list[Outcome]:
        """Fill ``into[i]`` from ``slots[i]``: HIT, MISS or FAILED each."""

    async def peek(self, group: int, slots: NDArray[np.int64], into: Sequence[Block]) -> list[Outcome]:
        """Read as `read` does, slots that may be written, forgotten or cut off meanwhile: their bytes may be anything.

        Only a medium that can be scrubbed has it.
        """
        raise NotImplementedError  # whoever takes `OwnedTierSettings.scrub_bandwidth` overrides it

    @abstractmethod
    async def write(self, group: int, slots: NDArray[np.int64], names: Names, blocks: Sequence[Block]) -> list[Outcome]:
        """Write ``blocks[i]`` to ``slots[i]`` and remember that it is ``names[i]``: STORED or FAILED each.

        The buffers are read-only.
        """

    @abstractmethod
    async def forget(self, group: int, slots: NDArray[np.int64]) -> None:
        """Make sure that what these slots hold is not found after a restart."""

    async def checkpoint(self, group: int, names: Names, slots: NDArray[np.int64], *, sync: bool = False) -> None:
        """Remember exactly these blocks, least recently used first; with ``sync``, survive a loss of power."""

    def fit(self, capacity_bytes: int) -> int:
        """Say how many blocks of prompts the medium would hold within a capacity. Only where it can be resized.

        Each kind of record would have `RecordShape.num_slots` of that.

        Raises:
            ConfigurationError: It cannot be, or not to that.
        """
        raise ConfigurationError(f"{type(self).__name__} cannot be resized: open it anew with another capacity")

    async def resize(self, num_blocks: int) -> None:
        """Have slots for so many blocks of prompts, see `fit`. Those given up hold nothing and are in no call.

        Raises:
            BackendUnavailableError: The medium did not do it.
        """
        raise NotImplementedError  # whoever overrides `fit` overrides this

    def missing(self, group: int) -> Missing | None:
        """Say which slots cannot be used for now; None: all can. The same object until that changes.

        Asked after calls, and once a second. No block is put there until they are not missing any more, and hold
        nothing. Only a medium of several parts has such, or one that may find no place for all of its slots.
        """
        return None

    def try_again(self) -> None:
        """Begin to bring back what is missing, if anything is and it is time to.

        Returns at once; called about once a second.
        """

    def find_hung(self) -> None:
        """Begin to find the part that a late call hangs on, if it is one, and let go of it: then it is `missing`.

        Returns at once; called once a second while a call is late. Until the call returns, its buffers stay lent, but
        other calls are made as soon as something is missing that was not. Only a medium of several parts has such.
        """


class RecordBackend(SlotBackend):
    """A `SlotBackend` whose threads make and verify the records that they move: a part of a batch is one call of one.

    ``verify`` and ``make`` are called there, once for each position.
    """

    @abstractmethod
    @override
    async def read(
        self, group: int, slots: NDArray[np.int64], into: Sequence[Block], verify: Verify | None = None
    ) -> list[Outcome]:
        """Return what ``verify`` says of each; without it as any `SlotBackend`."""

    @abstractmethod
    @override
    async def write(
        self,
        group: int,
        slots: NDArray[np.int64],
        names: Names,
        blocks: Sequence[Block],
        make: Make | None = None,
    ) -> list[Outcome]:
        """Write what ``make`` makes of the blocks; without it they are records, as for any `SlotBackend`."""

    @abstractmethod
    def begin_read(
        self, group: int, slots: NDArray[np.int64], into: Sequence[Block], verify: Verify, then: Then
    ) -> bool:
        """Have threads begin what `read` does before this returns; False, and nothing begun, if it has to wait first.

        ``then`` is told how it ended, perhaps before this returns.
        """

    @abstractmethod
    def begin_write(
        self,
        group: int,
        slots: NDArray[np.int64],
        names: Names,
        blocks: Sequence[Block],
        make: Make,
        then: Then,
    ) -> bool:
        """As `begin_read`, of what `write` does."""


def check_lengths(keys: Sequence[object] | Names | NDArray[np.int64], blocks: Sequence[Block]) -> None:
    """Raise `LayoutMismatchError` unless there is one block per key."""
    if len(keys) != len(blocks):
        raise LayoutMismatchError(f"{len(keys)} keys but {len(blocks)} blocks")
