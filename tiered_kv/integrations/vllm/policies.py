"""Our eviction policies in vLLM's own CPU tier, by its ``eviction_policy`` and ``cache_policy_module_path``."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, order_request_keys

from tiered_kv.catalog.policies import ARCPolicy, LRUPolicy, MQPolicy, Policy
from tiered_kv.catalog.table import Slots

_NAME_WORDS = 4


class _Bridge(CachePolicy):
    """One of ours, whose slots are vLLM's chunk numbers. For the scheduler's thread.

    vLLM pins and unpins chunk by chunk, ours take batches: what was pinned and unpinned is kept until somebody asks.
    A chunk's place changes when a request that used it has ended, as vLLM says it, and not when its copy has.
    """

    policy: ClassVar[type[Policy]]

    def __init__(self, cache_capacity: int) -> None:
        """Made by vLLM."""
        super().__init__(cache_capacity)
        self._order = self.policy(cache_capacity)
        self._chunks: dict[Any, Any] = {}
        self._keys: dict[int, Any] = {}  # by slot
        self._names = np.zeros((cache_capacity, _NAME_WORDS), np.uint64)
        self._is_evictable = np.zeros(cache_capacity, np.bool_)  # to our policy
        self._marks: dict[int, bool] = {}  # whether a slot is evictable now, where that is news to our policy

    def get(self, key: Any) -> Any:
        """See the base class."""
        return self._chunks.get(key)

    def insert(self, key: Any, chunk: Any, req_context: Any = None) -> None:
        """See the base class; ``req_context`` came with 0.33."""
        slot = int(chunk.chunk_id)
        self._chunks[key], self._keys[slot] = chunk, key
        self._names[slot] = np.frombuffer(hashlib.sha256(key).digest(), np.uint64)
        self._marks.pop(slot, None)
        self._order.add(_slots([slot]), self._names[slot : slot + 1])
        if chunk.ref_cnt == 0:
            self._marks[slot] = True

    def remove(self, key: Any) -> None:
        """See the base class."""
        slot = int(self._chunks.pop(key).chunk_id)
        del self._keys[slot]
        self._marks.pop(slot, None)
        if self._is_evictable[slot]:
            self._park(_slots([slot]))

    def touch(self, keys: Iterable[Any], req_context: Any) -> None:
        """See the base class."""
        self._use(self._slots_of(keys), are_hits=True)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[Any]],
        insertion_only_keys: set[Any],
        reused_keys: set[Any],
        req_context: Any,
    ) -> None:
        """See the base class. Tails go before heads: what is behind a hole is of no use."""
        keys = order_request_keys(key_groups, req_context)
        self._use(self._slots_of(key for key in keys if key not in reused_keys), are_hits=False)
        self._use(self._slots_of(key for key in keys if key in reused_keys), are_hits=True)

    def evict(self, n: int, protected: set[Any]) -> list[tuple[Any, Any]] | None:
        """See the base class."""
        self._settle()
        keep = self._slots_of(key for key in protected if key in self._chunks)
        keep = keep[self._is_evictable[keep]]
        if n > len(self._order) - len(keep):
            return None
        victims = self._order.victims(n, keep) if n else _slots([])
        self._order.evict(victims, self._names[victims])
        self._is_evictable[victims] = False
        keys = [self._keys.pop(slot) for slot in victims.tolist()]
        return [(key, self._chunks.pop(key)) for key in keys]

    def clear(self) -> None:
        """See the base class."""
        self._order.clear()
        self._chunks.clear()
        self._keys.clear()
        self._marks.clear()
        self._is_evictable[:] = False

    def mark_evictable(self, key: Any) -> None:
        """See the base class."""
        self._mark(key, is_evictable=True)

    def mark_non_evictable(self, key: Any) -> None:
        """See the base class."""
        self._mark(key, is_evictable=False)

    def _mark(self, key: Any, *, is_evictable: bool) -> None:
        slot = int(self._chunks[key].chunk_id)
        self._marks.pop(slot, None)  # to the end
        if self._is_evictable[slot] != is_evictable:
            self._marks[slot] = is_evictable

    def _settle(self) -> None:
        if self._marks:
            marks, self._marks = self._marks, {}
            self._park(_slots([slot for slot, is_evictable in marks.items() if not is_evictable]))
            self._unpark(_slots([slot for slot, is_evictable in marks.items() if is_evictable]))

    def _use(self, slots: Slots, *, are_hits: bool) -> None:
        """Give slots new places, the last one the best; those that are pinned get theirs when they are not any more."""
        self._settle()
        if not len(slots):
            return
        evictable = slots[self._is_evictable[slots]]
        self._park(evictable)
        if are_hits:
            self._order.use(slots)
        self._unpark(evictable)

    def _park(self, slots: Slots) -> None:
        if len(slots):
            self._order.park(slots)
            self._is_evictable[slots] = False

    def _unpark(self, slots: Slots) -> None:
        if len(slots):
            self._order.unpark(slots)
            self._is_evictable[slots] = True

    def _slots_of(self, keys: Iterable[Any]) -> Slots:
        """Return the slots of those that are here, each once, the last one first."""
        slots = [int(chunk.chunk_id) for key in keys if (chunk := self._chunks.get(key)) is not None]
        return _slots(list(dict.fromkeys(reversed(slots))))


def _slots(slots: Sequence[int]) -> Slots:
    return np.array(slots, np.int64)


class TieredKVLRU(_Bridge):
    """The least recently used goes first."""

    policy = LRUPolicy


class TieredKVARC(_Bridge):
    """Adaptive: what was used once gives way to what is used again, as much as that pays."""

    policy = ARCPolicy


class TieredKVMQ(_Bridge):
    """What is used often outlives the others: made for a cache below another one."""

    policy = MQPolicy
