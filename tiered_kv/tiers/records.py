"""Making and verifying records, in threads: their headers, their checksums, and their seals where there are keys."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from tiered_kv.backend import Block, Outcome, RecordShape
from tiered_kv.encryption import Encryption
from tiered_kv.keys import BlockKey, Names
from tiered_kv.loop_calls import LoopCalls
from tiered_kv.record import encode, examine, examine_any
from tiered_kv.tiers.exponent import ExponentCodec
from tiered_kv.tiers.tasks import WorkerPool, in_a_thread

if TYPE_CHECKING:  # importing it takes an extra
    from tiered_kv.seal import Seal

T = TypeVar("T")
Refusals = Mapping[int, str]


@dataclass(frozen=True)
class Encoded:
    """Records of some blocks, as a backend may see them.

    Attributes:
        num_blocks: How many blocks there were.
        at: Those whose codec keeps them, by position.
        keys: Theirs.
        records: Theirs.
    """

    num_blocks: int
    at: NDArray[np.int64]
    keys: list[BlockKey]
    records: list[Block]

    def outcomes(self, written: Sequence[Outcome]) -> list[Outcome]:
        """Return the outcomes of all blocks; what was not encoded is refused."""
        outcomes = [Outcome.REFUSED] * self.num_blocks
        for at, outcome in zip(self.at.tolist(), written, strict=True):
            outcomes[at] = outcome
        return outcomes


class Records:
    """Makes and verifies the records of one backend.

    Attributes:
        threads: Where; the cache's.
    """

    def __init__(self, threads: WorkerPool, encryption: Encryption | None) -> None:
        self.threads = threads
        self._encryption = encryption
        self._seal: Seal | None = None

    async def open(self, loop_calls: LoopCalls) -> None:
        """Get the keys, if there are any.

        Raises:
            ConfigurationError, BackendUnavailableError: See `Encryption.make_seal`.
        """
        if self._encryption is not None:
            self._seal = await in_a_thread(loop_calls, self._encryption.make_seal)  # it may take long

    @property
    def encrypts(self) -> bool:
        """Whether what is written needs memory of its own."""
        return self._seal is not None and self._seal.encrypts

    async def encode(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[Block],
        into: Sequence[Block],
        shape: RecordShape,
        codec: ExponentCodec | None = None,
    ) -> Encoded:
        """Make records of what is in ``blocks``.

        Args:
            keys: Names the blocks.
            blocks: Their payloads, which stay as they are.
            into: Gets the records: other memory if this encrypts or there is a codec, else ``blocks``.
            shape: What they are.
            codec: What makes payloads of what is in ``blocks``, if these differ.
        """
        made = await self.threads.run(_encode_all, keys, blocks, into, shape, codec, self._seal)
        at = [number for number, record in enumerate(made) if record is not None]
        records = [record for record in made if record is not None]
        return Encoded(len(keys), np.array(at, np.int64), [keys[number] for number in at], records)

    async def verify(
        self,
        keys: Sequence[BlockKey],
        records: Sequence[Block],
        outcomes: Sequence[Outcome],
        shape: RecordShape,
        codec: ExponentCodec | None = None,
        into: Sequence[Block] = (),
    ) -> tuple[list[Outcome], Refusals]:
        """Replace each HIT by what the record itself says, decrypting it in place, and decode what is right.

        Args:
            keys: Name the blocks.
            records: What was read.
            outcomes: Of the read.
            shape: What the records are.
            codec: What their payloads are decoded by, if at all.
            into: Get what they hold then; a record may be the beginning of its block.

        Returns:
            The outcomes, and which whole records were refused for their seal: the reason by position.
        """
        verifying = self.threads.run(_verify_hits, keys, records, outcomes, shape, codec, into, self._seal)
        return await _to_the_end(verifying)  # it writes to the blocks

    async def verify_named(
        self, names: Names, blocks: Sequence[Block], outcomes: Sequence[Outcome], shape: RecordShape
    ) -> tuple[list[Outcome], Refusals]:
        """Do as `verify` does, where only the names of the blocks are known."""
        verifying = self.threads.run(_verify_named, names, blocks, outcomes, shape, self._seal)
        return await _to_the_end(verifying)


class Staging:
    """Blocks for what is encrypted on its way to a medium: made when needed, and kept for the next call.

    There are as many as were ever lent at once, which the tier's bytes in flight bound.
    """

    def __init__(self, shape: RecordShape) -> None:
        self._shape = shape
        self._free: list[Block] = []

    def take(self, n: int) -> list[Block]:
        """Lend ``n`` blocks, whatever is in them."""
        taken, self._free = self._free[:n], self._free[n:]
        return taken + [Block.empty(self._shape.payload_bytes) for _ in range(n - len(taken))]

    def give(self, blocks: list[Block]) -> None:
        """Take them back."""
        self._free += blocks


async def _to_the_end(future: "asyncio.Future[T]") -> T:
    """Wait for a call that touches memory which is somebody's again after this; a cancellation waits too."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return future.result()


def _encode_all(
    keys: Sequence[BlockKey],
    blocks: Sequence[Block],
    into: Sequence[Block],
    shape: RecordShape,
    codec: ExponentCodec | None,
    seal: "Seal | None",
) -> list[Block | None]:
    made: list[Block | None] = []
    for key, block, record in zip(keys, blocks, into, strict=True):
        payload = block.payload
        if codec is not None:
            if not codec.encode(payload, record.payload):
                made.append(None)
                continue
            payload = record.payload
        encode(key, record, codec=shape.codec, decoded_bytes=shape.decoded_bytes, seal=seal, payload=payload)
        made.append(record.read_only())  # the payload may be the CPU tier's own
    return made


def _verify_hits(
    keys: Sequence[BlockKey],
    records: Sequence[Block],
    outcomes: Sequence[Outcome],
    shape: RecordShape,
    codec: ExponentCodec | None,
    into: Sequence[Block],
    seal: "Seal | None",
) -> tuple[list[Outcome], Refusals]:
    def verdict(n: int) -> tuple[Outcome, str]:
        outcome, reason = examine(keys[n], records[n], codec=shape.codec, seal=seal)
        if outcome is Outcome.HIT and codec is not None and not codec.decode(records[n].payload, into[n].payload):
            outcome = Outcome.CORRUPT  # whole, and made by something else
        return outcome, reason

    return _verdicts(outcomes, verdict)


def _verify_named(
    names: Names, blocks: Sequence[Block], outcomes: Sequence[Outcome], shape: RecordShape, seal: "Seal | None"
) -> tuple[list[Outcome], Refusals]:
    return _verdicts(outcomes, lambda n: examine_any(names[n].tobytes(), blocks[n], codec=shape.codec, seal=seal))


def _verdicts(
    outcomes: Sequence[Outcome], verdict: Callable[[int], tuple[Outcome, str]]
) -> tuple[list[Outcome], Refusals]:
    verdicts, refused = list(outcomes), dict[int, str]()
    for place, outcome in enumerate(outcomes):
        if outcome is Outcome.HIT:
            verdicts[place], reason = verdict(place)
            if reason:
                refused[place] = reason
    return verdicts, refused
