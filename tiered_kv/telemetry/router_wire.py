"""KV events as routers read them off the wire: vLLM's format, of which vLLM's own decoder is the judge.

A message is ``[topic, sequence number (8 bytes, big-endian), payload]``; the payload is MessagePack of
``[time, [event, ...], data_parallel_rank]``. An event is a map with its ``type``, or in the older form a list that
begins with it. What a required field does not know is nil; an optional one is then left out.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

Form = Literal["map", "array"]
Event = dict[str, Any]
"""Type and fields, in the order of the wire."""

END: Final = (-1).to_bytes(8, "big", signed=True)
"""In the place of a sequence number, with an empty payload: a replay has ended."""
CLEARED: Final[Event] = {"type": "AllBlocksCleared"}
_OPTIONAL: Final = {"group_idx", "extra_keys", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality"}


class Medium(NamedTuple):
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


class Described(NamedTuple):
    """One block as routers know it.

    Attributes:
        hash: Its hash, u64.
        parent: The hash of the block before it; None for the first of a prompt.
        position: Which block of its prompt it is.
        group: The KV group.
        tokens: Its token ids.
        lora_id, lora_name: The LoRA that it was computed with.
        extra_keys: What else went into its hash.
    """

    hash: int
    parent: int | None
    position: int
    group: int
    tokens: tuple[int, ...]
    lora_id: int | None
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None

    def goes_on(self, before: "Described") -> bool:
        """Whether one event can tell of both."""
        return (
            self.parent == before.hash
            and (self.group, self.lora_id, self.lora_name) == (before.group, before.lora_id, before.lora_name)
            and len(self.tokens) == len(before.tokens)
        )


def stored(run: Sequence[Described], at: Medium, spec: CacheSpec | None) -> Event:
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


def removed(hashes: Sequence[int], at: Medium, group: int) -> Event:
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
