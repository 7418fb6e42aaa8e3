"""A secondary tier of vLLM's tiered offloading: our whole chain below vLLM's own CPU tier.

vLLM calls from its scheduler's thread, which all requests wait for: what it asks for is put into a queue there, and
done by the cache's event loop. Only `drain_jobs` and `shutdown` wait.
"""

import asyncio
import gc
import hashlib
import platform
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Final

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from tiered_kv.blocking import open_blocking
from tiered_kv.cache import TieredKV
from tiered_kv.errors import ClosedError, ConfigurationError, TieredKVError
from tiered_kv.integrations.vllm.compatibility import VERSION
from tiered_kv.integrations.vllm.configuration import with_rank
from tiered_kv.integrations.vllm.served_model import weights_of
from tiered_kv.keys import BlockKeys, ModelIdentity
from tiered_kv.layout import KVGroup, KVLayout
from tiered_kv.loop_calls import LoopCalls
from tiered_kv.results import BlockState, LoadResult
from tiered_kv.settings import TieredKVSettings
from tiered_kv.specs import CPULoadStoreSpec

_POOL: Final = "vllm"
_ANSWER_S: Final = 1.0
"""How long it counts what was said of a chunk."""
_FAILED_S: Final = 10.0
"""How long what could not be loaded counts as absent: vLLM would ask for it again at once, and again."""
_MOST_ANSWERS: Final = 1 << 17
_MOST_COUNTED: Final = 1 << 16
"""Requests of which it is known that they were counted; older ones have ended."""
_READ_AHEAD_BYTES = 64 << 20
"""Of loads at once: enough for storage, and few enough that the first ones read before the last ones are prepared."""
_SLOW_S: Final = 0.25
"""A load that takes longer holds up no other."""


class TieredKVTier(SecondaryTierManager):
    """``{"type": "TieredKVTier", "module_path": "tiered_kv.integrations.vllm.offload_tier", "tiers": [...]}``.

    Attributes:
        kv: The cache, as threads use it.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        tiers: Sequence[Mapping[str, Any] | str],
        weights: str | None = None,
        limits: Mapping[str, Any] | None = None,
        backpressure_detector: Any = None,
        *,
        load_timeout_s: float = 5.0,
        direct: bool = False,
    ) -> None:
        """Made by vLLM.

        Args:
            offloading_spec: vLLM's.
            primary_kv_view: vLLM's CPU tier, ``(num_chunks, bytes a chunk)``. Lent until `shutdown`.
            tier_type: vLLM's name of this tier.
            tiers: Of `TieredKVSettings`. Without ``cpu`` no memory is taken beside `CacheLimits.bounce`.
            weights: Names the weights; read off the checkpoint's files if left out.
            limits: Of `TieredKVSettings`.
            backpressure_detector: vLLM's.
            load_timeout_s: How long a load may take; what has not come then is computed.
            direct: Let storage read straight into vLLM's CPU tier: a copy less, and then a load takes as long as
                storage does, whatever ``load_timeout_s`` says.

        Raises:
            ConfigurationError: The tiers cannot work, or nothing tells the weights.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config = offloading_spec.config
        rank = config.parallel.data_parallel_index
        settings = TieredKVSettings(tiers=with_rank(tiers, rank), limits=with_rank(dict(limits or {}), rank))
        model = ModelIdentity(config.model.name.rpartition("/")[2], weights or weights_of(config.model.name))
        chunk = KVGroup.opaque(
            self.block_size_bytes, tag=_tag(config), block_size=config.groups[0].tokens_per_block * _blocks(config)
        )
        cache = TieredKV.from_settings(settings, model=model, layout=KVLayout((chunk,)), device="cpu")
        self._stack = ExitStack()
        self.kv = self._stack.enter_context(open_blocking(cache))
        self.kv.register_host_pool(_POOL, primary_kv_view, direct=direct)
        self._behind = self.kv.call(_Behind, cache, chunk, load_timeout_s)
        self._asked: dict[str, list[bytes]] = {}  # by request
        self._is_open = True

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Say whether a chunk is there; ``RETRY`` until it is known. What is being stored is not there."""
        answer = self._behind.answers.get(key)
        if answer is None or answer[1] < time.monotonic():
            self._asked.setdefault(req_context.req_id, []).append(key)
            return LookupResult.RETRY
        return answer[0]

    def on_schedule_end(self, context: Any) -> None:
        """Ask for all that was looked up in this step, at once."""
        if self._asked:
            asked, self._asked = self._asked, {}
            self._behind.calls.call(self._behind.ask, asked)

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to store chunks; what is there already is passed over."""
        self._behind.submit(job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to load chunks into vLLM's CPU tier."""
        self._behind.submit(job_metadata)

    def get_finished_jobs(self) -> Iterable[Any]:
        """Return what has ended. Of a load that came short it names the chunks that are in place."""
        over = self._behind.over
        return [over.popleft() for _ in range(len(over))]

    def on_new_request(self, req_context: Any) -> Any:
        """Want nothing particular."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait until nothing touches vLLM's memory; what ended is for `get_finished_jobs` to say."""
        if self._is_open:
            self.kv.call(self._behind.drain)

    def shutdown(self) -> None:
        """Write what has been stored, within a time, and end. Idempotent."""
        if self._is_open:
            with suppress(ClosedError):  # the program has ended, and the cache with it
                self.drain_jobs()
                self.kv.drain()
            self._is_open = False
            self._stack.close()
            gc.collect()  # tasks that have ended refer to vLLM's memory in cycles, and it is about to be unmapped


class _Behind:
    """What the tier does on the cache's event loop, where nobody waits for it."""

    def __init__(self, cache: TieredKV, chunk: KVGroup, load_timeout_s: float) -> None:
        """Begin, on the event loop.

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
        self._load_timeout_s = load_timeout_s
        self._waiting: deque[tuple[Any, float]] = deque()  # loads, and when they were submitted
        self._reading: dict[int, int] = {}  # bytes, by job
        self._counted: dict[str, None] = {}
        self._num_submitted = 0
        self._num_ended = 0
        self._ended = asyncio.Event()

    def submit(self, job: Any) -> None:
        """Take a job, from the scheduler's thread."""
        self._num_submitted += 1
        self.calls.call(self._queue if job.is_promotion else self._begin, job, time.monotonic())

    def ask(self, asked: Mapping[str, Sequence[bytes]]) -> None:
        """Find out which chunks are there, for requests."""
        now = time.monotonic()
        if len(self.answers) > _MOST_ANSWERS:
            self.answers = {key: answer for key, answer in self.answers.items() if answer[1] > now}
        for request, chunks in asked.items():
            states = self._cache.membership(self._keys(chunks)).tolist()
            said = [(key, state == BlockState.HIT) for key, state in zip(chunks, states, strict=True)
                    if state != BlockState.ASKING]  # fmt: skip  # of what is left vLLM asks again
            for key, is_hit in said:
                self.answers[key] = LookupResult.HIT if is_hit else LookupResult.MISS, now + _ANSWER_S
            self._count(request, said, is_final=len(said) == len(chunks))

    def _count(self, request: str, said: Sequence[tuple[bytes, bool]], *, is_final: bool) -> None:
        """Count a request in the metrics, once: a request that has to wait is asked for again and again."""
        if request in self._counted:
            return
        keys, found = self._keys([key for key, _ in said]), np.array([is_hit for _, is_hit in said], np.bool_)
        self._cache.count_lookup(keys, found)
        if is_final:
            self._counted[request] = None
            if len(self._counted) > _MOST_COUNTED:
                del self._counted[next(iter(self._counted))]

    def _queue(self, job: Any, begun_s: float) -> None:
        self._waiting.append((job, begun_s))
        self._load_more()

    def _load_more(self, ended: int | None = None) -> None:
        """Begin loads as far as they may be read at once, now that one has ended, or takes too long to wait for."""
        if ended is not None:
            self._reading.pop(ended, None)
        while self._waiting:
            num_bytes = len(self._waiting[0][0].keys) * self._chunk.payload_bytes
            if self._reading and sum(self._reading.values()) + num_bytes > _READ_AHEAD_BYTES:
                return
            job, begun_s = self._waiting.popleft()
            self._reading[job.job_id] = num_bytes
            asyncio.get_running_loop().call_later(_SLOW_S, self._load_more, job.job_id)
            self._begin(job, begun_s)

    def _begin(self, job: Any, begun_s: float) -> None:
        keys = list(job.keys)
        try:
            spec = CPULoadStoreSpec(job.chunk_ids, pool=_POOL)
            if job.is_promotion:
                left_s = max(0.0, begun_s + self._load_timeout_s - time.monotonic())
                handle: Any = self._cache.start_load(self._keys(keys), spec, deadline_s=left_s)
            else:
                handle = self._cache.start_store(self._keys(keys), spec)
        except TieredKVError:
            self._end(job, keys, begun_s, [])
            raise  # for the log
        handle.when_done(partial(self._take, job, keys, begun_s))

    def _take(self, job: Any, keys: list[bytes], begun_s: float, ended: "asyncio.Future[Any]") -> None:
        result = None if ended.cancelled() or ended.exception() else ended.result()
        if isinstance(result, LoadResult):
            self._end(job, keys, begun_s, keys[: result.num_blocks])
        else:
            self._end(job, keys, begun_s, keys if result is not None and not result.num_dropped else [])

    def _end(self, job: Any, keys: list[bytes], begun_s: float, arrived: list[bytes]) -> None:
        now, is_whole = time.monotonic(), len(arrived) == len(keys)
        if job.is_promotion:
            asyncio.get_running_loop().call_soon(self._load_more, job.job_id)
            self.answers.update(dict.fromkeys(keys[len(arrived) :], (LookupResult.MISS, now + _FAILED_S)))
        self.over.append(
            JobResult(
                job_id=job.job_id,
                success=is_whole,
                successful_keys=None if is_whole or not arrived else tuple(arrived),
                transfer_time=now - begun_s,
                transfer_bytes=len(arrived) * self._chunk.payload_bytes,
            )
        )
        self._num_ended += 1
        self._ended.set()

    def _keys(self, keys: Sequence[bytes]) -> BlockKeys:
        return BlockKeys.from_hashes([_name(key) for key in keys], block_size=self._chunk.block_size)

    async def drain(self) -> None:
        """Wait until all that was submitted has ended."""
        while self._num_ended < self._num_submitted:
            self._ended.clear()
            await self._ended.wait()


def _name(key: Any) -> bytes:
    """Name a chunk: vLLM's hash, and the KV group where it is not the first."""
    digest: bytes = get_offload_block_hash(key)
    return digest if not get_offload_group_idx(key) else hashlib.sha256(key).digest()


def _blocks(config: Any) -> int:
    return int(config.cache.blocks_per_chunk)


def _tag(config: Any) -> str:
    """Say what a chunk's bytes are: whoever says the same can read them."""
    if not config.groups:
        raise ConfigurationError("vLLM offloads no KV group of this model")
    parallel = config.parallel
    sizes = [getattr(parallel, f"{kind}_size") for kind in ("tp", "pp", "pcp", "dcp")]
    if parallel.is_parallelism_agnostic or config.replicated_layout:
        sizes = [1]
    groups = [(group.tokens_per_block, group.layer_names) for group in config.groups]
    facts = (config.model.dtype, groups, config.cache, sizes, config.kv_cache_layout, config.canonical_layout)
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    return f"vllm {VERSION} offloaded chunk on {platform.machine()}, {digest}"
