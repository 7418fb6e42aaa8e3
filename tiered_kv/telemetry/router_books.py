"""What routers are to know: which described blocks can be read in which medium, and the events when that changes.

A change names blocks by 32 bytes; routers want hashes and token ids. So whoever names blocks describes them, before or
after they are stored; a block that nobody has described is told of once somebody has. Descriptions are kept of what is
in a tier, and of the newest blocks beside. For one thread; decides at once and never waits.

Events are in vLLM's wire format, of which vLLM's own decoder is the judge. A message is ``[topic, sequence number (8
bytes, big-endian), payload]``; the payload is MessagePack of ``[time, [event, ...], data_parallel_rank]``. An event is
a map with its ``type``, or in the older form a list that begins with it. A required field that is not known is nil; an
optional one is left out.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tiered_kv.telemetry.kv_event_values import Form
from tiered_kv.tiers.changes import Added, Cleared, Removed, Snapshot, TierChange
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.keys import Names, rows_of

Event = dict[str, Any]
"""Type and fields, in the order of the wire."""

END: Final = (-1).to_bytes(8, "big", signed=True)
"""In the place of a sequence number, with an empty payload: a replay has ended."""
CLEARED: Final[Event] = {"type": "AllBlocksCleared"}
_OPTIONAL: Final = {"group_idx", "extra_keys", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality"}
Batch = list[Event]
"""The events of one message."""
_BLOCKS_PER_BATCH: Final = 256
"""About 25 KB of 16 tokens a block: what a router decodes at once, and what is lost at once."""
_SORTED_AT_ONCE: Final = 1 << 14
_MOST_WAITING: Final = 1 << 16
_EPOCH_BYTES: Final = 8
_POSITION_BYTES: Final = 4


class EventMedium(NamedTuple):
    """Where blocks are, in the words of the format: ``GPU``, ``CPU`` or ``STORAGE``; ``locality`` of the last alone."""

    medium: str
    locality: str | None


class CacheSpec(NamedTuple):
    """What kind of attention a KV group has, in vLLM's words.

    Attributes:
        kind: ``"full_attention"``, ``"mla_attention"``, ``"sliding_window"``, ...
        sliding_window: Its window, in tokens.
    """

    kind: str
    sliding_window: int | None = None


class Described(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One block as routers know it. It is kept packed, behind its epoch and position: there may be a million.

    Attributes:
        hash: Its hash, u64.
        parent: The hash of the block before it; None for the first of a prompt.
        group: The KV group.
        tokens: Its token ids.
        names: Per rank; none for a block of one rank, which is found by the name it goes under.
        lora_id, lora_name: The LoRA that it was computed with.
        extra_keys: What else went into its hash.
    """

    hash: int
    parent: int | None
    group: int
    tokens: tuple[int, ...]
    names: tuple[bytes, ...] = ()
    lora_id: Any = None  # nobody has looked at these three: what was packed can be unpacked
    lora_name: Any = None
    extra_keys: Any = None

    def goes_on(self, before: "Described") -> bool:
        """Whether one event can tell of this block and the one before it."""
        return (
            self.parent == before.hash
            and (self.group, self.lora_id, self.lora_name) == (before.group, before.lora_id, before.lora_name)
            and len(self.tokens) == len(before.tokens)
        )


def stored(run: Sequence[Described], at: EventMedium, spec: CacheSpec | None) -> Event:
    """Return the event that neighbouring blocks of a prompt can be read from now on."""
    first = run[0]
    has_extra = any(block.extra_keys is not None for block in run)
    return {
        "type": "BlockStored",
        "block_hashes": [block.hash for block in run],
        "parent_block_hash": first.parent,
        "token_ids": [token for block in run for token in block.tokens],
        "block_size": len(first.tokens),
        "lora_id": first.lora_id,
        "medium": at.medium,
        "lora_name": first.lora_name,
        "extra_keys": [block.extra_keys for block in run] if has_extra else None,
        "group_idx": first.group,
        "kv_cache_spec_kind": spec.kind if spec else None,
        "kv_cache_spec_sliding_window": spec.sliding_window if spec else None,
        "locality": at.locality,
    }


def removed(hashes: Sequence[int], at: EventMedium, group: int) -> Event:
    """Return the event that blocks cannot be read there any more."""
    return {
        "type": "BlockRemoved",
        "block_hashes": list(hashes),
        "medium": at.medium,
        "group_idx": group,
        "locality": at.locality,
    }


def encode(time_s: float, events: Sequence[Event], data_parallel_rank: int | None, form: Form) -> bytes:
    """Return the payload of one message."""
    shape = _positional if form == "array" else _mapped
    batch = [time_s, [shape(event) for event in events], data_parallel_rank]
    return msgspec.msgpack.encode(batch if data_parallel_rank is not None else batch[:2])


def _mapped(event: Event) -> Event:
    return {name: value for name, value in event.items() if value is not None or name not in _OPTIONAL}


def _positional(event: Event) -> list[Any]:
    fields = list(event.items())
    while fields[-1][1] is None and fields[-1][0] in _OPTIONAL:
        fields.pop()
    return [value for _, value in fields]


@dataclass(frozen=True, eq=False)
class Description:
    """Neighbouring blocks of one prompt, described.

    Attributes:
        epoch: Digest of the weights that computed them.
        names: Per rank, their names, ``(n, 4)``.
        hashes: ``(n,)`` uint64.
        parent: The hash of the block before the first; None where a prompt begins.
        start: Which block of the prompt the first is.
        group: The KV group.
        tokens: ``(n, block_size)`` uint32.
        lora_id, lora_name, extra_keys: As in `Described`; the last per block.
    """

    epoch: bytes
    names: Sequence[Names]
    hashes: NDArray[np.uint64]
    parent: int | None
    start: int
    group: int
    tokens: NDArray[np.uint32]
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: Sequence[tuple[Any, ...] | None] | None = None

    def records(self) -> Iterator[tuple[list[bytes], bytes]]:
        """Yield of each block its names and its record."""
        hashes, parent, pack = self.hashes.tolist(), self.parent, msgspec.msgpack.Encoder().encode
        for at, (own, *names) in enumerate(zip(hashes, *map(rows_of, self.names), strict=True)):
            each, extra = tuple(names) if len(names) > 1 else (), self.extra_keys[at] if self.extra_keys else None
            tokens = tuple(self.tokens[at].tolist())
            block = Described(own, parent, self.group, tokens, each, self.lora_id, self.lora_name, extra)
            head = self.epoch[:_EPOCH_BYTES] + (self.start + at).to_bytes(_POSITION_BYTES, "big")
            yield names, head + pack(block)
            parent = own


class RouterBooks:
    """What routers were told, kept up to date by changes and descriptions; each call yields what to tell them now.

    A block is in a medium for them when every rank has it there. What is told of are blocks of the weights served now.
    """

    def __init__(
        self, places: Sequence[tuple[str, int, int]], media: Mapping[str, EventMedium], specs: Mapping[int, CacheSpec]
    ) -> None:
        """Begin without knowing anything.

        Args:
            places: Tier, group and rank of all changes to come.
            media: What routers call each tier.
            specs: What they are told of KV groups.
        """
        self._bits = {tier: 1 << n for n, tier in enumerate(dict.fromkeys(tier for tier, _, _ in places))}
        self._media = tuple(dict.fromkeys(media[tier] for tier in self._bits))
        self._masks = [sum(bit for tier, bit in self._bits.items() if media[tier] == each) for each in self._media]
        self._specs = specs
        self._held: dict[tuple[int, int], dict[bytes, int]] = {(group, rank): {} for _, group, rank in places}
        self._records: dict[bytes, bytes] = {}  # of what is held
        self._waiting: OrderedDict[bytes, bytes] = OrderedDict()  # of what is not: newest last
        self._epoch = b""

    @property
    def num_undescribed(self) -> int:
        """How many blocks are in some tier, of some rank, that routers cannot be told of. From any thread."""
        return sum(len(held) for held in self._held.values()) - len(self._records)

    def apply(self, change: TierChange, epoch: bytes) -> Iterator[Batch]:
        """Take a change into account; ``epoch`` is the digest of the weights served now."""
        held, bit = self._held[change.group, change.rank], self._bits[change.tier]
        moves: list[tuple[bytes, bool]]
        match change:
            case Snapshot(names=names):
                now = set(rows_of(names))
                moves = [(name, False) for name, tiers in held.items() if tiers & bit and name not in now]
                moves += [(name, True) for name in rows_of(names)]
            case Added(names=names):
                moves = [(name, True) for name in rows_of(names)]
            case Removed(names=names):
                moves = [(name, False) for name in rows_of(names)]
            case Cleared():
                moves = [(name, False) for name, tiers in held.items() if tiers & bit]
            case _:
                moves = []
        gained: list[list[bytes]] = [[] for _ in self._media]
        lost: list[list[int]] = [[] for _ in self._media]
        for name, is_there in moves:
            before = held.get(name, 0)
            after = before | bit if is_there else before & ~bit
            if before != after:
                self._move(name, change.group, change.rank, before, after, gained, lost)
        if epoch[:_EPOCH_BYTES] != self._epoch:
            self._epoch = epoch[:_EPOCH_BYTES]
            yield from self.everything()
        else:
            yield from _batches(self._removals(lost, change.group))
            yield from _batches(self._arrivals(gained))

    def describe(self, description: Description) -> Iterator[Batch]:
        """Take note of what blocks are; of what is described already while a tier has it, nothing changes."""
        gained: list[list[bytes]] = [[] for _ in self._media]
        for names, record in description.records():
            is_news = False
            for rank, name in enumerate(names):
                if name not in self._held[description.group, rank]:
                    self._keep_waiting(name, record)
                elif name not in self._records:
                    self._records[name] = record
                    is_news = True
            if is_news and record[:_EPOCH_BYTES] == self._epoch:
                for medium in self._media_of(names[0], description.group, record):
                    gained[medium].append(record)
        yield from _batches(self._arrivals(gained))

    def everything(self) -> Iterator[Batch]:
        """Yield all there is, to whoever knows nothing or has lost something: forget all, then what is where."""
        present: list[list[bytes]] = [[] for _ in self._media]
        for (group, rank), held in self._held.items():
            for name in held if rank == 0 else ():
                record = self._records.get(name)
                if record is not None and record[:_EPOCH_BYTES] == self._epoch:
                    for medium in self._media_of(name, group, record):
                        present[medium].append(record)
        yield from _batches(self._arrivals(present), CLEARED)

    def nothing(self) -> Iterator[Batch]:
        """Forget all, and say so: the cache has ended."""
        for held in self._held.values():
            held.clear()
        self._records.clear()
        self._waiting.clear()
        yield [CLEARED]

    def _move(
        self,
        name: bytes,
        group: int,
        rank: int,
        before: int,
        after: int,
        gained: list[list[bytes]],
        lost: list[list[int]],
    ) -> None:
        """Note in which tiers a rank has a block now, and in which media that makes it come or go."""
        held = self._held[group, rank]
        if not before and (record := self._waiting.pop(name, None)) is not None:
            self._records[name] = record
        record = self._records.get(name)
        is_told_of = record is not None and record[:_EPOCH_BYTES] == self._epoch
        had = self._media_of(name, group, record) if record is not None and is_told_of and before else []
        if after:
            held[name] = after
        else:
            del held[name]
        has = self._media_of(name, group, record) if record is not None and is_told_of and after else []
        if record is None:
            return
        for medium in has:
            if medium not in had:
                gained[medium].append(record)
        for medium in had:
            if medium not in has:
                lost[medium].append(_unpack(record).hash)
        if not after:
            self._keep_waiting(name, self._records.pop(name))

    def _media_of(self, name: bytes, group: int, record: bytes) -> list[int]:
        """Return the media, by number, in which every rank has a described block."""
        names = _unpack(record).names or (name,)
        tiers = [
            self._held[group, rank].get(each, 0) if each in self._records else 0 for rank, each in enumerate(names)
        ]
        return [number for number, mask in enumerate(self._masks) if all(each & mask for each in tiers)]

    def _keep_waiting(self, name: bytes, record: bytes) -> None:
        self._waiting[name] = record
        self._waiting.move_to_end(name)
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.popitem(last=False)

    def _removals(self, lost: list[list[int]], group: int) -> Iterator[Event]:
        for at, hashes in zip(self._media, lost, strict=True):
            for start in range(0, len(hashes), _BLOCKS_PER_BATCH):
                yield removed(hashes[start : start + _BLOCKS_PER_BATCH], at, group)

    def _arrivals(self, gained: list[list[bytes]]) -> Iterator[Event]:
        for at, records in zip(self._media, gained, strict=True):
            records.sort()  # by position: a router drops a block whose parent it has not heard of
            for start in range(0, len(records), _SORTED_AT_ONCE):
                for run in _runs([_unpack(record) for record in records[start : start + _SORTED_AT_ONCE]]):
                    yield stored(run, at, self._specs.get(run[0].group))


def _runs(blocks: Sequence[Described]) -> Iterator[list[Described]]:
    """Divide blocks, heads first, into neighbours of one prompt; parents still come before their children."""
    children: dict[tuple[int, int | None], list[Described]] = {}
    for block in blocks:
        children.setdefault((block.group, block.parent), []).append(block)
    seen: set[tuple[int, int]] = set()
    for first in blocks:
        run: list[Described] = []
        each: Described | None = first
        while each is not None and (each.group, each.hash) not in seen and len(run) < _BLOCKS_PER_BATCH:
            seen.add((each.group, each.hash))
            run.append(each)
            after = children.get((each.group, each.hash), ())
            each = next((child for child in after if child.goes_on(run[-1])), None)
        if run:
            yield run


def _batches(events: Iterable[Event], *first: Event) -> Iterator[Batch]:
    batch, weight = list(first), 0
    for event in events:
        batch.append(event)
        weight += len(event["block_hashes"])
        if weight >= _BLOCKS_PER_BATCH:
            yield batch
            batch, weight = [], 0
    if batch:
        yield batch


def check_said(*said: object) -> None:
    """Refuse what no event can hold.

    Raises:
        ConfigurationError: It is of a type that MessagePack lacks, or an int beyond 64 bits.
    """
    try:
        msgspec.msgpack.encode(said)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigurationError(f"parent, lora_id, lora_name or extra_keys: no event can hold it: {error}") from None


_unpacked: Final = msgspec.msgpack.Decoder(Described).decode


def _unpack(record: bytes) -> Described:
    return _unpacked(memoryview(record)[_EPOCH_BYTES + _POSITION_BYTES :])
