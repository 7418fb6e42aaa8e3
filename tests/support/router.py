"""A router as there are some: it decodes vLLM's KV events, keeps an index of them, and asks for what it lost.

The decoder is of msgspec structs with the fields, tags and shapes of vLLM's own (``vllm/distributed/kv_events.py``,
version 0.26 and later, and in the older, positional form before that), which is what judges the format here.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import zmq

from tiered_kv.telemetry.kv_event_values import Form
from tiered_kv.telemetry.router_books import END

Place = tuple[str | None, str | None, int | None]
"""Medium, locality and KV group."""

_Hashes = list[int | bytes]
_STORED: list[Any] = [
    ("block_hashes", _Hashes),
    ("parent_block_hash", int | bytes | None),
    ("token_ids", list[int]),
    ("block_size", int),
    ("lora_id", int | None),
    ("medium", str | None),
    ("lora_name", str | None),
    ("extra_keys", list[tuple[Any, ...] | None] | None, None),
    ("group_idx", int | None, None),
    ("kv_cache_spec_kind", str | None, None),
    ("kv_cache_spec_sliding_window", int | None, None),
    ("locality", str | None, None),
]
_REMOVED: list[Any] = [
    ("block_hashes", _Hashes),
    ("medium", str | None),
    ("group_idx", int | None, None),
    ("locality", str | None, None),
]


@cache
def decoder(form: Form) -> Callable[[bytes], Any]:
    """Return what decodes the payload of one message into ``ts``, ``events`` and ``data_parallel_rank``."""
    kinds: dict[str, list[Any]] = {"BlockStored": _STORED, "BlockRemoved": _REMOVED, "AllBlocksCleared": []}
    shape: dict[str, Any] = {"tag": True, "omit_defaults": True, "array_like": form == "array"}
    stored, removed, cleared = (msgspec.defstruct(name, fields, **shape) for name, fields in kinds.items())
    events: Any = list[stored | removed | cleared]  # type: ignore[valid-type]  # types made at run time
    batch: list[Any] = [("ts", float), ("events", events), ("data_parallel_rank", int | None, None)]
    decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder(msgspec.defstruct("Batch", batch, array_like=True)).decode
    return decode


class Index:
    """What a router knows: per place, the tokens of each block, and its parent.

    Attributes:
        blocks: Per place, hash to parent and tokens.
        orphans: Place and hash of blocks that came before their parents, which a router with a tree of prefixes drops.
        num_cleared: How often all was cleared.
        events: All events, oldest first.
    """

    def __init__(self) -> None:
        self.blocks: dict[Place, dict[int, tuple[int | None, tuple[int, ...]]]] = {}
        self.orphans: list[tuple[Place, int]] = []
        self.num_cleared = 0
        self.events: list[Any] = []

    def apply(self, event: Any) -> None:  # noqa: ANN401 - a struct made at run time
        """Take one decoded event into account; a block comes once and goes once, or this fails."""
        self.events.append(event)
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            self.blocks.clear()
            self.num_cleared += 1
            return
        place = event.medium, event.locality, event.group_idx
        held = self.blocks.setdefault(place, {})
        if kind == "BlockRemoved":
            for each in event.block_hashes:
                del held[each]
            return
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes)
        for at, each in enumerate(event.block_hashes):
            assert each not in held, "a block was told of twice"
            if parent is not None and parent not in held:
                self.orphans.append((place, each))
            held[each] = parent, tuple(event.token_ids[at * size : (at + 1) * size])
            parent = each

    def hashes(self) -> dict[Place, set[int]]:
        """Return the hashes in each place that has some."""
        return {place: set(held) for place, held in self.blocks.items() if held}


class Router:
    """A subscriber of one publisher. Never blocks: `listen` takes what there is.

    Attributes:
        index: What it knows.
        last: The last sequence number that it applied.
        num_replayed: Batches that came by replay.
        ranks: The data-parallel ranks of all batches.
        is_asking: Whether a replay has not ended yet.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        form: Form = "map",
        topic: str = "",
        loses: Callable[[int], bool] = lambda _: False,
        receive: int = 1000,
    ) -> None:
        self.index = Index()
        self.last = -1
        self.num_replayed = 0
        self.ranks: set[int | None] = set()
        self._decode, self._loses = decoder(form), loses
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, receive)
        self._sub.connect(endpoint)
        self._sub.subscribe(topic)
        self._replay = self._context.socket(zmq.DEALER)
        if replay_endpoint:
            self._replay.connect(replay_endpoint)
        self.is_asking = False

    def close(self) -> None:
        """Leave."""
        self._context.destroy(linger=0)

    def listen(self) -> Index:
        """Take what there is, and ask for what is missing; return what is known now."""
        while self._replay.poll(0):
            _, sequence, payload = self._replay.recv_multipart()
            if sequence == END and not payload:
                self.is_asking = False
            else:
                self.num_replayed += 1
                self._take(int.from_bytes(sequence, "big"), payload, by_replay=True)
        while not self.is_asking and self._sub.poll(0):
            _, sequence, payload = self._sub.recv_multipart()
            number = int.from_bytes(sequence, "big")
            if not self._loses(number):
                self._take(number, payload)
        return self.index

    def ask(self, start: int) -> None:
        """Ask for what was sent from a sequence number on."""
        self.is_asking = True
        self._replay.send_multipart((b"", start.to_bytes(8, "big")))

    def _take(self, number: int, payload: bytes, *, by_replay: bool = False) -> None:
        if number <= self.last:
            return
        batch = self._decode(payload)
        begins_anew = type(batch.events[0]).__name__ == "AllBlocksCleared"
        if number > self.last + 1 and not by_replay and not begins_anew:
            self.ask(self.last + 1)  # which brings this one too
            return
        if number > self.last + 1 and not begins_anew:
            return  # the replay begins too late: all will be told anew
        self.last = number
        self.ranks.add(batch.data_parallel_rank)
        for event in batch.events:
            self.index.apply(event)
