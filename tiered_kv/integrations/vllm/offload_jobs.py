"""What vLLM's secondary tier is asked for, done by the cache's event loop, where nobody waits for it.

Jobs that wait are done together: each transfer costs the interpreter as much, however long it is, and vLLM's scheduler
needs the interpreter too.
"""

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, pairwise
from operator import not_
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import LookupResult, get_offload_block_hash, get_offload_group_idx
from vllm.v1.kv_offload.tiering.base import JobResult

from tiered_kv.cache.tiered_kv import TieredKV
from tiered_kv.values.keys import BlockKeys
from tiered_kv.values.layout import KVGroup
from tiered_kv.values.loop_calls import LoopCalls
from tiered_kv.values.results import BlockState, LoadResult, StoreResult
from tiered_kv.values.specs import CPULoadStoreSpec

T = TypeVar("T")
_ANSWER_S: Final = 1.0
"""How long it counts what was said of a chunk."""
_FAILED_S: Final = 10.0
"""How long what could not be loaded counts as absent: vLLM would ask for it again at once, and again."""
_MOST_ANSWERS: Final = 1 << 17
_MOST_COUNTED: Final = 1 << 16
"""Requests of which it is known that they were counted; older ones have ended."""
_LOAD_BYTES: Final = 16 << 20
"""Of jobs that one load is made of, if they are waiting anyway: a window, which is begun without a task."""
_DIRECT_LOAD_BYTES: Final = 24 << 20
"""Likewise, one that is read in place: two of them are in flight in a tier, and a part of a third."""
_STORE_BYTES = 32 << 20
"""Likewise, one store."""
_STORES_AT_ONCE: Final = 2
"""They keep a disk busy: what comes beside them waits for one to end, or until it is as much as one store takes."""
_READ_AHEAD_BYTES = 64 << 20
"""Of loads at once: enough for storage, and few enough that the first ones read before the last ones are prepared."""
_SLOW_S = 0.25
"""A transfer that takes longer holds up no other."""


@dataclass(frozen=True)
class _Asked:
    """A job of vLLM's.

    Attributes:
        job: It.
        keys: Its chunks.
        begun_s: When vLLM gave it.
    """

    job: Any
    keys: list[bytes]
    begun_s: float


class OffloadJobs:
    """The chunks of vLLM's offloading, and what moves them. Any thread may read its attributes and call."""

    def __init__(self, cache: TieredKV, chunk: KVGroup, pool: str, load_timeout_s: float, *, direct: bool) -> None:
        """Begin, on the event loop.

        Args:
            cache: Open.
            chunk: What is stored.
            pool: vLLM's CPU tier, as it was registered.
            load_timeout_s: How long a load may take.
            direct: Whether the pool was registered so.

        Attributes:
            calls: From the scheduler's thread to here.
            over: Jobs that have ended, for the scheduler's thread.
            answers: What is known of chunks, and until when that counts.
        """
        self.calls = LoopCalls(asyncio.get_running_loop())
        self.over: deque[Any] = deque()
        self.answers: dict[bytes, tuple[Any, float]] = {}
        self._cache = cache
        self._chunk = chunk
        self._pool = pool
        self._load_timeout_s = load_timeout_s
        self._load_bytes = _DIRECT_LOAD_BYTES if direct else _LOAD_BYTES
        self._loads: deque[_Asked] = deque()  # that wait
        self._stores: deque[_Asked] = deque()
        self._is_gathering = False
        self._reading: dict[object, int] = {}  # bytes, by load
        self._writing: set[object] = set()  # stores
        self._counted: dict[str, None] = {}
        self._num_submitted = 0
        self._num_ended = 0
        self._ended = asyncio.Event()

    def submit(self, job: Any) -> None:
        """Take a job, from the scheduler's thread."""
        self._num_submitted += 1
        self.calls.call(self._gather, _Asked(job, list(job.keys), time.monotonic()))

    def ask(self, asked: Mapping[str, Sequence[bytes]]) -> None:
        """Find out which chunks are there, for requests: all of them at once."""
        now = time.monotonic()
        if len(self.answers) > _MOST_ANSWERS:
            self.answers = {key: answer for key, answer in self.answers.items() if answer[1] > now}
        chunks = [key for each in asked.values() for key in each]
        keys = self._keys(chunks)
        states = self._cache.membership(keys)
        until, said = now + _ANSWER_S, {BlockState.HIT: LookupResult.HIT, BlockState.ASKING: None}
        for key, state in zip(chunks, states.tolist(), strict=True):
            if (answer := said.get(state, LookupResult.MISS)) is not None:  # of what is left vLLM asks again
                self.answers[key] = answer, until
        for (request, each), part in zip(asked.items(), _parts(asked.values()), strict=True):
            self._count(request, keys[part], each, states[part])

    def _count(self, request: str, keys: BlockKeys, chunks: Sequence[bytes], states: NDArray[np.int8]) -> None:
        """Count a request in the metrics, once: a request that has to wait is asked for again and again."""
        if request in self._counted:
            return
        if (is_asking := states == BlockState.ASKING).any():  # what is known is not asked for again, and counts now
            known = np.flatnonzero(~is_asking)
            keys, states = self._keys([chunks[at] for at in known.tolist()]), states[known]
        else:
            self._counted[request] = None
            if len(self._counted) > _MOST_COUNTED:
                del self._counted[next(iter(self._counted))]
        self._cache.count_lookup(keys, states == BlockState.HIT)

    def _gather(self, asked: _Asked) -> None:
        """Let a job wait for those that are given at the same time."""
        (self._loads if asked.job.is_promotion else self._stores).append(asked)
        if not self._is_gathering:
            self._is_gathering = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """Begin what waits, each transfer in a call of the loop's own: one that cannot be keeps no other from it."""
        self._is_gathering = False
        self._load_more()
        self._store_more()

    def _load_more(self, ended: object = None) -> None:
        """Begin a load, if more may be read at once, now that one has ended, or takes too long to wait for."""
        self._reading.pop(ended, None)
        most_bytes = min(_READ_AHEAD_BYTES - sum(self._reading.values()), self._load_bytes)
        together = _take(self._loads, most_bytes // self._chunk.payload_bytes, is_any=not self._reading)
        if together:
            loop, load = asyncio.get_running_loop(), object()
            self._reading[load] = sum(len(asked.keys) for asked in together) * self._chunk.payload_bytes
            loop.call_later(_SLOW_S, self._load_more, load)
            loop.call_soon(self._load, load, together)
            loop.call_soon(self._load_more)  # in the next turn: of one turn the cache begins few at once

    def _store_more(self, ended: object = None) -> None:
        """Begin a store, now that one has ended, or takes too long to wait for: beside others only a large one."""
        self._writing.discard(ended)
        most_chunks = _STORE_BYTES // self._chunk.payload_bytes
        is_next = len(self._writing) < _STORES_AT_ONCE or sum(len(each.keys) for each in self._stores) >= most_chunks
        if is_next and (together := _take(self._stores, most_chunks, is_any=True)):
            loop, store = asyncio.get_running_loop(), object()
            self._writing.add(store)
            loop.call_later(_SLOW_S, self._store_more, store)
            loop.call_soon(self._store, store, together)
            loop.call_soon(self._store_more)

    def _load(self, load: object, together: list[_Asked]) -> None:
        """Load the chunks of several jobs as if they were one, with gaps: what one of them lacks keeps no other."""
        left_s = max(0.0, together[0].begun_s + self._load_timeout_s - time.monotonic())
        try:
            keys, into = self._all_of(together)
            handle = self._cache.start_load(keys, into, deadline_s=left_s, gaps=len(together) > 1)
        except BaseException:  # whatever it is, vLLM waits for each job
            self._end_load(load, together, None)
            raise  # for the log
        handle.when_done(lambda ended: self._end_load(load, together, _result_of(ended)))

    def _end_load(self, load: object, together: list[_Asked], result: LoadResult | None) -> None:
        asyncio.get_running_loop().call_soon(self._load_more, load)
        until = time.monotonic() + _FAILED_S
        for asked, part in zip(together, _parts([asked.keys for asked in together]), strict=True):
            if result is None:
                arrived, lost = [], asked.keys
            elif result.mask[part].all():
                arrived, lost = asked.keys, []
            else:
                mask = result.mask[part].tolist()
                arrived, lost = list(compress(asked.keys, mask)), list(compress(asked.keys, map(not_, mask)))
            self.answers.update(dict.fromkeys(lost, (LookupResult.MISS, until)))
            self._end(asked, arrived)

    def _store(self, store: object, together: list[_Asked]) -> None:
        try:
            handle = self._cache.start_store(*self._all_of(together))
        except BaseException:
            self._end_store(store, together, None)
            raise  # for the log
        handle.when_done(lambda ended: self._end_store(store, together, _result_of(ended)))

    def _end_store(self, store: object, together: list[_Asked], result: StoreResult | None) -> None:
        asyncio.get_running_loop().call_soon(self._store_more, store)
        is_whole = result is not None and not result.num_dropped
        for asked in together:  # where some of it was dropped, a lookup finds the rest
            self._end(asked, asked.keys if is_whole else [])

    def _end(self, asked: _Asked, arrived: list[bytes]) -> None:
        """Tell vLLM. Of a job that came short it is told which chunks are in place."""
        is_whole = len(arrived) == len(asked.keys)
        self.over.append(
            JobResult(
                job_id=asked.job.job_id,
                success=is_whole,
                successful_keys=None if is_whole or not arrived else tuple(arrived),
                transfer_time=time.monotonic() - asked.begun_s,
                transfer_bytes=len(arrived) * self._chunk.payload_bytes,
            )
        )
        self._num_ended += 1
        self._ended.set()

    def _all_of(self, together: Sequence[_Asked]) -> tuple[BlockKeys, CPULoadStoreSpec]:
        keys = self._keys([key for asked in together for key in asked.keys])
        return keys, CPULoadStoreSpec(np.concatenate([asked.job.chunk_ids for asked in together]), pool=self._pool)

    def _keys(self, chunks: Sequence[bytes]) -> BlockKeys:
        return BlockKeys.from_hashes([_name(key) for key in chunks], block_size=self._chunk.block_size)

    async def drain(self) -> None:
        """Wait until all that was submitted has ended."""
        while self._num_ended < self._num_submitted:
            self._ended.clear()
            await self._ended.wait()


def _take(waiting: deque[_Asked], most_chunks: int, *, is_any: bool) -> list[_Asked]:
    """Take the jobs that have waited longest, up to so many chunks; the first however long it is, if ``is_any``."""
    taken: list[_Asked] = []
    while waiting:
        most_chunks -= len(waiting[0].keys)
        if most_chunks < 0 and (taken or not is_any):
            break
        taken.append(waiting.popleft())
    return taken


def _result_of(ended: "asyncio.Future[T]") -> T | None:
    return None if ended.cancelled() or ended.exception() else ended.result()


def _parts(lengths_of: Iterable[Sequence[object]]) -> list[slice]:
    """Say where each of some sequences lies in all of them, one behind the other."""
    ends = accumulate(map(len, lengths_of), initial=0)
    return [slice(start, stop) for start, stop in pairwise(ends)]


def _name(key: Any) -> bytes:
    """Name a chunk: vLLM's hash, and the KV group where it is not the first."""
    digest: bytes = get_offload_block_hash(key)
    return digest if not get_offload_group_idx(key) else hashlib.sha256(key).digest()
