"""What a medium gets of blocks: the names they have there, and their records, which threads make and verify.

Nothing but `Records` makes a medium's name of a block's: backends see no other.

`ExponentCodec` makes records of bf16 that hold every bit in three quarters of the bytes, in numpy, for threads. Values
that belong together are of similar size, so that a few of the 256 exponents are nearly all of them: in each chunk 15
neighbouring ones, and zero, get a code of 4 bits in place of 8, and the others are listed. A block with more of those
than the list holds is not encoded at all, whatever its bits are: nothing is ever rounded. Source of the idea: SplitZip
(arXiv 2605.01708), a fixed code for the commonest exponents and an escape list.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from tiered_kv.media.backend import Block, Outcome, RecordShape, Recovered
from tiered_kv.media.record import encode, examine, examine_any, key_in
from tiered_kv.settings.encryption import Encryption
from tiered_kv.tiers.tasks import Tasks, WorkerPool, in_a_thread, to_the_end
from tiered_kv.tiers.tier import Batch
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.keys import BlockKey, Names, Namespace
from tiered_kv.values.layout import PAGE_BYTES, KVGroup
from tiered_kv.values.loop_calls import LoopCalls

if TYPE_CHECKING:
    from tiered_kv.media.seal import NameCipher, Seal


CHUNK: Final = 2048
"""Values that share their 15 exponents: a few tokens of one plane and layer."""
_STEP: Final = 64 * CHUNK
"""Values at a time: what is made of them on the way stays in a processor's own cache."""
_MOST_BASE: Final = 255 - 15
_LISTED_IN_A_CHUNK: Final = 8
"""More than these, and other exponents than the largest may cover more of a chunk."""
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]


class _Scratch(threading.local):
    """A thread's working memory, which is kept: memory that is new to a process costs more than the work itself."""

    def __init__(self) -> None:
        self.turned = np.empty(_STEP, np.uint16)
        self.high = np.empty(_STEP, np.uint16)
        self.exponents = np.empty(_STEP, np.uint8)
        self.flags = np.empty(_STEP, np.bool_)
        self.stored = np.empty(0, np.uint8)

    def copy_of(self, stored: U8) -> U8:
        """Copy a record's payload."""
        if len(self.stored) < len(stored):
            self.stored = np.empty(len(stored), np.uint8)
        np.copyto(self.stored[: len(stored)], stored)
        return self.stored[: len(stored)]


_scratch = _Scratch()


class ExponentCodec:
    """Encodes and decodes payloads of one length. Any thread may call; the GIL is released while it works.

    Attributes:
        stored_bytes: Of every encoded payload.
        most_listed: How many values' exponents may be listed: one in 256.
    """

    name = "exponent"

    def __init__(self, payload_bytes: int) -> None:
        """Prepare for payloads of so many bytes, each two of them a bf16."""
        n = payload_bytes // 2
        self.most_listed = max(16, n // 256)
        sizes = 4, 4 * self.most_listed, self.most_listed, -(-n // CHUNK), n, -(-n // 2)
        ends = np.cumsum(sizes).tolist()
        self._count, self._positions, self._listed, self._bases, self._rests, self._codes = (
            slice(end - size, end) for size, end in zip(sizes, ends, strict=True)
        )
        self.stored_bytes: int = ends[-1]

    def encode(self, payload: memoryview, into: memoryview) -> bool:
        """Encode a payload; False, and ``into`` is garbage, if it does not fit.

        Args:
            payload: Read only.
            into: ``stored_bytes`` long, and no part of ``payload``.
        """
        values, out = np.frombuffer(payload, np.uint16), np.frombuffer(into, np.uint8)
        bases, rests, codes = out[self._bases], out[self._rests], out[self._codes]
        positions = np.empty(0, np.int64)
        for at in range(0, len(values), _STEP):
            stop = min(at + _STEP, len(values))
            in_chunks = slice(at // CHUNK, -(-stop // CHUNK))
            listed = _encode(values[at:stop], rests[at:stop], codes[at // 2 : -(-stop // 2)], bases[in_chunks])
            positions = np.concatenate([positions, listed + at])
            if len(positions) > self.most_listed:
                return False
        out[: self._bases.start] = 0
        n = len(positions)
        out[self._count].view(np.uint32)[0] = n
        out[self._positions].view(np.uint32)[:n] = positions
        out[self._listed][:n] = _exponents(values[positions])
        return True

    def decode(self, stored: memoryview, into: memoryview) -> bool:
        """Undo `encode`; False, and ``into`` is garbage, if no payload is encoded so.

        Args:
            stored: ``stored_bytes`` long. It may be a part of ``into``: it is copied first.
            into: As long as a payload.
        """
        source, values = _scratch.copy_of(np.frombuffer(stored, np.uint8)), np.frombuffer(into, np.uint16)
        bases, rests, codes = source[self._bases], source[self._rests], source[self._codes]
        n = int(source[self._count].view(np.uint32)[0])
        positions, listed = source[self._positions].view(np.uint32), source[self._listed]
        if n > self.most_listed or positions[n:].any() or listed[n:].any() or (bases > _MOST_BASE).any():
            return False
        positions, listed = positions[:n].astype(np.int64), listed[:n]
        if n and (positions[-1] >= len(values) or (np.diff(positions) <= 0).any() or not listed.all()):
            return False
        for at in range(0, len(values), _STEP):
            stop = min(at + _STEP, len(values))
            in_chunks = slice(at // CHUNK, -(-stop // CHUNK))
            _decode(rests[at:stop], codes[at // 2 : -(-stop // 2)], bases[in_chunks], values[at:stop])
        if _exponents(values[positions]).any():
            return False
        values[positions] |= listed.astype(np.uint16) << 7
        return True

    def record_in(self, block: Block) -> Block:
        """Return the beginning of a block as a record's buffers: what is read there is decoded in place."""
        padded_bytes = -(-self.stored_bytes // PAGE_BYTES) * PAGE_BYTES
        return Block(block.header, block.padded[:padded_bytes], self.stored_bytes)


def make_record_codec(name: str, group: KVGroup) -> ExponentCodec | None:
    """Return what encodes the records of a group under the codec of this name, if it is one of records.

    Raises:
        ConfigurationError: It cannot keep such blocks.
    """
    if name != ExponentCodec.name:
        return None
    if group.dtype != "bfloat16" or group.order == "opaque":
        what = "an opaque KV group" if group.order == "opaque" else group.dtype
        raise ConfigurationError(
            f"the codec exponent keeps KV of bfloat16, not of {what}: of float16 it would save a sixteenth; "
            "codec='none' keeps it as it is"
        )
    return ExponentCodec(group.payload_bytes)


def _exponents(values: U16) -> U8:
    return (values >> 7).astype(np.uint8)


def _encode(values: U16, rests: U8, codes: U8, bases: U8) -> NDArray[np.int64]:
    """Encode some chunks, of which the last may be shorter; return where exponents are that have no code."""
    n = len(values)
    num_values = len(bases) * CHUNK
    turned, high = _scratch.turned[:num_values], _scratch.high[:num_values]
    exponents = _scratch.exponents[:num_values]
    turned[:n] = values
    turned[n:] = 0
    # Turned by one bit, a value is its exponent in one byte, and in the other its mantissa and its sign.
    np.right_shift(turned, 15, out=high)
    np.left_shift(turned, 1, out=turned)
    np.bitwise_or(turned, high, out=turned)
    np.copyto(rests, turned[:n], casting="unsafe")  # the lower byte
    np.right_shift(turned, 8, out=turned)
    np.copyto(exponents, turned, casting="unsafe")
    chunks = exponents.reshape(-1, CHUNK)
    largest = chunks.max(axis=1)
    np.subtract(np.maximum(largest, 15), 15, out=bases)
    np.maximum(chunks, bases[:, None], out=chunks)
    np.subtract(chunks, bases[:, None], out=chunks)  # 0: zero, or listed
    no_code = _without_code(exponents, values)
    if len(no_code) > _LISTED_IN_A_CHUNK:
        crowded = (np.bincount(no_code // CHUNK, minlength=len(bases)) > _LISTED_IN_A_CHUNK).nonzero()[0]
        if len(crowded):
            bases[crowded], chunks[crowded] = _best(_chunks_of(values, crowded))
            no_code = _without_code(exponents, values)
    pairs = exponents.view(np.uint16)
    np.right_shift(pairs, 4, out=high[: len(pairs)])
    np.bitwise_or(pairs, high[: len(pairs)], out=pairs)
    np.copyto(codes, pairs[: len(codes)], casting="unsafe")  # the lower byte: the first of two in its lower half
    return no_code


def _without_code(codes: U8, values: U16) -> NDArray[np.int64]:
    """Return where the code is 0, but not the exponent."""
    n = len(values)
    zero = np.equal(codes[:n], 0, out=_scratch.flags[:n]).nonzero()[0]
    listed: NDArray[np.int64] = zero[_exponents(values[zero]) != 0]
    return listed


def _chunks_of(values: U16, chunks: NDArray[np.int64]) -> U8:
    """Return the exponents of some chunks, of which the last may be filled up with zeros."""
    padded = np.zeros(-(-len(values) // CHUNK) * CHUNK, np.uint8)
    padded[: len(values)] = _exponents(values)
    picked: U8 = padded.reshape(-1, CHUNK)[chunks]
    return picked


def _best(exponents: U8) -> tuple[U8, U8]:
    """Return, for each chunk, after which exponent those 15 begin that are most of it, and its codes then."""
    n = len(exponents)
    counts = np.bincount((exponents + 256 * np.arange(n)[:, None]).ravel(), minlength=256 * n).reshape(n, 256)
    below = np.zeros((n, 257), np.int64)
    np.cumsum(counts, axis=1, out=below[:, 1:])
    bases = np.argmax(below[:, 16:] - below[:, 1:-15], axis=1).astype(np.uint8)  # base + 1 to base + 15: never 0
    above = exponents - bases[:, None]
    return bases, np.where((exponents > bases[:, None]) & (above <= 15), above, 0)


def _decode(rests: U8, codes: U8, bases: U8, values: U16) -> None:
    """Undo `_encode`; the exponents without code come back as 0."""
    n = len(values)
    num_values = len(bases) * CHUNK
    exponents = _scratch.exponents[:num_values]
    pairs, high = exponents.view(np.uint16)[: len(codes)], _scratch.high[: len(codes)]
    np.copyto(pairs, codes)
    np.left_shift(pairs, 4, out=high)
    np.bitwise_or(pairs, high, out=pairs)
    np.bitwise_and(pairs, 0x0F0F, out=pairs)
    has_code = np.not_equal(exponents, 0, out=_scratch.flags[:num_values])
    chunks = exponents.reshape(-1, CHUNK)
    np.add(chunks, bases[:, None], out=chunks)
    np.multiply(exponents, has_code.view(np.uint8), out=exponents)
    turned = _scratch.turned[:n]
    np.copyto(turned, exponents[:n])
    np.left_shift(turned, 8, out=turned)
    np.bitwise_or(turned, rests, out=turned)
    np.left_shift(turned, 15, out=values)
    np.right_shift(turned, 1, out=turned)
    np.bitwise_or(values, turned, out=values)


T = TypeVar("T")
Refusals = Mapping[int, str]


class Records:
    """Names blocks as one backend has them, and makes and verifies their records there.

    Attributes:
        threads: Where records are made; the cache's.
        encrypts: Whether what is written needs memory of its own.
    """

    def __init__(self, threads: WorkerPool, encryption: Encryption | None) -> None:
        self.threads = threads
        self._encryption = encryption
        self.encrypts = False
        self._seal: Seal | None = None
        self._names: NameCipher | None = None

    async def open(self, loop_calls: LoopCalls) -> None:
        """Get the keys, if there are any.

        Raises:
            ConfigurationError, BackendUnavailableError: See `Encryption.make_seal`.
        """
        if self._encryption is not None:
            seal = await in_a_thread(loop_calls, self._encryption.make_seal)  # it may take long
            self._seal, self._names = seal if seal.seals else None, seal.names
            self.encrypts = seal.seals and seal.encrypts

    def keys(self, batch: Batch) -> list[BlockKey]:
        """Return the keys of blocks as the medium has them, in order."""
        names, positions = self.names(batch.names), batch.positions
        if batch.spaces is None:
            return self._space(batch.namespace).keys_of(names, positions)
        return [
            self._space(space).keys_of(names[at : at + 1], positions[at : at + 1])[0]
            for at, space in enumerate(batch.spaces)
        ]

    def _space(self, space: Namespace) -> Namespace:
        return space if self._names is None else self._names.hide_space(space)

    def names(self, names: Names) -> Names:
        """Return the names of blocks as the medium has them."""
        return names if self._names is None else self._names.hide(names)

    def recovered(self, found: Recovered) -> Recovered:
        """Return what a medium has found, by the names that the cache has."""
        return found if self._names is None else replace(found, names=self._names.show(found.names))

    def shapes(self, shapes: Sequence[RecordShape]) -> tuple[RecordShape, ...]:
        """Return what kinds of records there are, as the medium knows them."""
        names = self._names
        if names is None:
            return tuple(shapes)
        return tuple(replace(shape, fingerprint=names.hide_digest(shape.fingerprint)) for shape in shapes)

    def key_in(self, header: memoryview) -> BlockKey | None:
        """Return the key, as the cache has it, of the block that a header of the medium names; see `record.key_in`."""
        key = key_in(header)
        return key if key is None or self._names is None else self._names.show_key(key)

    @property
    def hides(self) -> bool:
        """Whether names on the medium are hidden, as they are wherever records are sealed."""
        return self._names is not None

    def making(
        self,
        batch: Batch,
        blocks: Sequence[Block],
        into: Sequence[Block],
        shape: RecordShape,
        codec: ExponentCodec | None = None,
    ) -> Callable[[Sequence[int]], list[Block | None]]:
        """Return what makes records of some of the blocks, in any thread: None of what the codec does not keep.

        Args:
            batch: Which blocks: their keys are made where their records are.
            blocks: Their payloads, which stay as they are.
            into: Gets the records: other memory if this encrypts or there is a codec, else ``blocks``.
            shape: What they are.
            codec: What makes payloads of what is in ``blocks``, if these differ.
        """

        def make(at: Sequence[int]) -> list[Block | None]:
            made: list[Block | None] = []
            for n, key in zip(at, self.keys(batch[np.array(at, np.int64)]), strict=True):
                payload, record = blocks[n].payload, into[n]
                if codec is not None:
                    if not codec.encode(payload, record.payload):
                        made.append(None)
                        continue
                    payload = record.payload
                encode(
                    key, record, codec=shape.codec, decoded_bytes=shape.decoded_bytes, seal=self._seal, payload=payload
                )
                made.append(record.read_only())  # the payload may be the CPU tier's own
            return made

        return make

    def verification(
        self,
        batch: Batch,
        records: Sequence[Block],
        shape: RecordShape,
        codec: ExponentCodec | None = None,
        into: Sequence[Block] = (),
    ) -> "Verification":
        """Return what verifies records, decrypting them in place, and decodes what is right.

        Args:
            batch: Which blocks they should be of: their keys are made where they are verified.
            records: What will have been read.
            shape: What the records are.
            codec: What their payloads are decoded by, if at all.
            into: Get what they hold then; a record may be the beginning of its block.
        """

        def verdicts(at: Sequence[int]) -> list[tuple[Outcome, str]]:
            keys = self.keys(batch[np.array(at, np.int64)])
            found = [
                examine(key, records[n], codec=shape.codec, seal=self._seal) for n, key in zip(at, keys, strict=True)
            ]
            return found if codec is None else [decoded(n, *each) for n, each in zip(at, found, strict=True)]

        def decoded(n: int, outcome: Outcome, reason: str) -> tuple[Outcome, str]:
            if outcome is Outcome.HIT and codec and not codec.decode(records[n].payload, into[n].payload):
                outcome = Outcome.CORRUPT  # whole, and made by something else
            return outcome, reason

        return Verification(self.threads, verdicts)

    def verification_by_name(self, names: Names, blocks: Sequence[Block], shape: RecordShape) -> "Verification":
        """Do as `verification` does, where only the names of the blocks are known, as the cache has them."""
        hidden = self.names(names)

        def verdict(n: int) -> tuple[Outcome, str]:
            return examine_any(hidden[n].tobytes(), blocks[n], codec=shape.codec, seal=self._seal)

        return Verification(self.threads, lambda at: map(verdict, at))


class Verification:
    """What blocks that are read are found to be: each HIT of a medium is replaced by what the record itself says.

    Attributes:
        refused: Which whole records were refused for their seal: the reason by position.
        filled: How many records the medium had of each part that was verified, whatever they are.
    """

    def __init__(self, threads: WorkerPool, verdicts: Callable[[Sequence[int]], Iterable[tuple[Outcome, str]]]) -> None:
        self.refused: dict[int, str] = {}
        self._threads = threads
        self._verdicts = verdicts
        self.filled: list[int] = []

    def verify(self, at: Sequence[int], outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Verify some positions, in any thread: of each the medium has said what it found."""
        verdicts, hits = list(outcomes), [place for place, each in enumerate(outcomes) if each is Outcome.HIT]
        if hits:
            found = self._verdicts([at[place] for place in hits])
            for place, (verdicts[place], reason) in zip(hits, found, strict=True):
                if reason:
                    self.refused[at[place]] = reason
        self.filled.append(len(hits))
        return verdicts

    async def verify_all(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Verify all of them in a thread, of which a medium has said what it found."""
        verifying = self._threads.run(self.verify, range(len(outcomes)), outcomes)
        if await to_the_end([verifying]):  # it writes to blocks, which are somebody's again after this
            raise asyncio.CancelledError
        return verifying.result()


class SpareBlocks:
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

    def give(self, blocks: Sequence[Block]) -> None:
        """Take lent blocks back."""
        self._free += blocks


def do_soon(threads: WorkerPool, work: Callable[[], T], tasks: Tasks, then: Callable[[T | None], None]) -> None:
    """Have ``work``, which touches memory that is lent, done in a thread; tell ``then`` of it.

    None, if it failed, or was done when the cache had ended: then nobody is to go on with what came of it.
    """
    has_ended = False

    def end() -> None:
        nonlocal has_ended
        has_ended = True

    def ended(results: Callable[[], list[T]]) -> None:
        over()
        made = None
        try:
            made = None if has_ended else results()[0]
        finally:
            then(made)

    if threads.is_closed:
        then(None)
        return
    over = tasks.hold(end)  # the thread cannot be stopped
    threads.begin_each([work], ended)
