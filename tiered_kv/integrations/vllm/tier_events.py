"""KV events of the tiers below a vLLM, in vLLM's own stream: what its routers hear of its GPU they hear of them too.

vLLM takes them in its scheduler's thread, once a step. They are made in a thread of ours, from what changes in the
tiers that this cache owns (`TieredKV.events`) and from what is said of blocks; so a step only fetches them.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys

from tiered_kv.cache.block_cache import BlockCache
from tiered_kv.telemetry.kv_event_values import own_hashes
from tiered_kv.telemetry.router_books import CLEARED, Batch, Event, EventMedium, RouterBooks, removed
from tiered_kv.telemetry.router_feed import RouterFeed
from tiered_kv.telemetry.router_socket import Work
from tiered_kv.values.errors import ClosedError
from tiered_kv.values.keys import BlockKeys
from tiered_kv.values.log import Seldom

_TOLD_AGAIN_S: Final = 1.0
"""No more often is everything told anew after errors: there may be one in each piece of work."""
_MOST_WAITING: Final = 1 << 12
"""Events that vLLM has not taken, of 256 blocks at most: beyond them none is made until it has."""


class TierEvents:
    """What vLLM's ``take_events`` gives. The event loop makes it and calls `aclose`, the scheduler's thread the rest.

    It is what takes the place of a publisher's sockets: vLLM publishes, and keeps for replays, what is taken from here.
    In vLLM's stream ``AllBlocksCleared`` is said of its GPU as well; so it is never said here, but block by block.
    """

    def __init__(self, cache: BlockCache) -> None:
        """Begin with what is in the tiers now; of tiers that others use too nothing is told."""
        self._is_incomplete = False  # after an error, which may have cost some of it
        self._told_again_s = -math.inf
        self.num_batches = self.num_snapshots = 0
        self._work: deque[Work] = deque()
        self._events: deque[KVCacheEvent] = deque()
        self._told: dict[tuple[EventMedium, int], set[int]] = {}
        self._changed = threading.Condition()
        self._is_stopping = False
        self._seldom = Seldom()
        changes = cache.events()
        storage = EventMedium("STORAGE", "LOCAL")
        media = {tier: EventMedium("CPU", None) for tier, medium in cache.media.items() if medium == "cpu"}
        self._books = RouterBooks(changes.places, {tier: media.get(tier, storage) for tier, _, _ in changes.places}, {})
        self._feed = RouterFeed(cache, changes, self._books, self)

    def describe(self, request: Any, keys: BlockKeys, hashes: Sequence[bytes]) -> None:
        """Say what blocks of a request are: of others nothing is told.

        Args:
            request: vLLM's.
            keys: Neighbouring blocks of it.
            hashes: vLLM's, of all its blocks.
        """
        size, first, stop = keys.block_size, keys.start, keys.start + len(keys)
        lora = request.lora_request
        told = np.array([*map(_u64, hashes[first:stop])], np.uint64) if lora else own_hashes(keys)
        with suppress(ClosedError):
            self._feed.describe(
                keys,
                hashes=told,
                parent=_u64(hashes[first - 1]) if first else None,
                tokens=np.array(request.all_token_ids[first * size : stop * size], np.uint32).reshape(-1, size),
                lora_id=lora.adapter_id if lora else None,
                lora_name=lora.name if lora else None,
                extra_keys=_extra_keys(request, first, stop, size),
            )

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last time."""
        if not self._events:
            return []
        with self._changed:
            taken, self._events = self._events, deque()
            self._changed.notify_all()
        return list(taken)

    def tell_again(self) -> None:
        """Tell of everything anew, soon: to routers that have just heard that all blocks are cleared."""
        self.put(self._everything)

    async def aclose(self) -> None:
        """End the thread."""
        await self._feed.aclose()

    def start(self, on_end: Callable[[], None]) -> None:
        """Start the thread; it calls ``on_end`` when it has ended."""
        threading.Thread(target=self._run, args=(on_end,), name="tiered_kv-vllm-events", daemon=True).start()

    def put(self, work: Work) -> None:
        """Have ``work`` done next, after what was put before. Returns at once."""
        with self._changed:
            self._work.append(work)
            self._changed.notify_all()

    def stop(self) -> None:
        """End. What waits is not done any more."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    def _run(self, on_end: Callable[[], None]) -> None:
        try:
            while (work := self._next()) is not None:
                try:
                    for batch in work():
                        self._tell(batch)
                except Exception as error:  # noqa: BLE001 - a fault of ours must not end the stream
                    self._seldom.failed("KV events", error)
                    self._is_incomplete = True
        finally:
            on_end()

    def _everything(self) -> Iterable[Batch]:
        self._told.clear()
        return self._books.everything()

    def _next(self) -> Work | None:
        with self._changed:
            while not self._is_stopping:
                has_room, wait_s = len(self._events) <= _MOST_WAITING, None
                if has_room and self._is_incomplete:
                    wait_s = self._told_again_s + _TOLD_AGAIN_S - (now_s := time.monotonic())
                    if wait_s <= 0:
                        self._is_incomplete, self._told_again_s = False, now_s
                        self.num_snapshots += 1
                        return self._books.everything
                if has_room and self._work:
                    return self._work.popleft()
                self._changed.wait(wait_s)
            return None

    def _tell(self, batch: Batch) -> None:
        for event in self._without_clearing(batch):
            made = _of_vllm(event)
            with self._changed:
                self._events.append(made)
            self._remember(event)
        self.num_batches += 1

    def _without_clearing(self, batch: Batch) -> Iterator[Event]:
        for event in batch:
            if event is not CLEARED:
                yield event
                continue
            for (medium, group), hashes in list(self._told.items()):
                if hashes:
                    yield removed(sorted(hashes), medium, group)

    def _remember(self, event: Event) -> None:
        """Take note of what vLLM has been told: of nothing before it has, as what is lost is told anew by this."""
        told = self._told.setdefault((EventMedium(event["medium"], event["locality"]), event["group_idx"]), set())
        (told.update if event["type"] == "BlockStored" else told.difference_update)(event["block_hashes"])


def _u64(digest: bytes) -> int:
    """Return what routers call a block of this hash of vLLM's."""
    return int.from_bytes(digest[-8:], "big")


def _of_vllm(event: Mapping[str, Any]) -> KVCacheEvent:
    fields = {name: value for name, value in event.items() if name != "type"}
    return BlockStored(**fields) if event["type"] == "BlockStored" else BlockRemoved(**fields)


def _extra_keys(request: Any, first: int, stop: int, size: int) -> Any:
    """Return what else went into the hashes of blocks, as vLLM tells of it; None where that is nothing."""
    plain = request.lora_request is None and not request.mm_features and not request.cache_salt
    if plain and getattr(request, "prompt_embeds", None) is None:
        return None
    keys, at = [], 0
    for start in range(first * size, stop * size, size):
        key, at = generate_block_hash_extra_keys(request, start, start + size, at)
        keys.append(key)
    return [each and tuple(each) for each in to_event_extra_keys(keys) or ()]
