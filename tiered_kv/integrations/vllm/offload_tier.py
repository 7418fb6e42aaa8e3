"""A secondary tier of vLLM's tiered offloading: our whole chain below vLLM's own CPU tier.

vLLM calls from its scheduler's thread, which all requests wait for: what it asks for is put into a queue there, and
done by the cache's event loop. Only `drain_jobs` and `shutdown` wait.
"""

import gc
import hashlib
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final

from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from tiered_kv.cache.blocking import open_blocking
from tiered_kv.cache.tiered_kv import TieredKV
from tiered_kv.integrations.identity import in_all_texts
from tiered_kv.integrations.vllm.compatibility import VERSION, device_kind
from tiered_kv.integrations.vllm.configuration import RANK
from tiered_kv.integrations.vllm.model_identity import weights_of
from tiered_kv.integrations.vllm.offload_jobs import OffloadJobs
from tiered_kv.settings.settings import TieredKVSettings
from tiered_kv.values.errors import ClosedError, ConfigurationError
from tiered_kv.values.keys import ModelIdentity
from tiered_kv.values.layout import KVGroup, KVLayout

_POOL: Final = "vllm"


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
            weights: Names the weights, and what of vLLM's settings changes their KV: a tier is told of none. If left
                out, the checkpoint's files tell, of a model that is a folder.
            limits: Of `TieredKVSettings`.
            backpressure_detector: vLLM's.
            load_timeout_s: How long a load may take; what has not come then is computed.
            direct: Let storage read straight into vLLM's CPU tier, and, if it is one tier of this process's own without
                ``cpu``, write straight out of it: a copy less, and then a job takes as long as storage does, whatever
                ``load_timeout_s`` says.

        Raises:
            ConfigurationError: The tiers cannot work, or nothing tells the weights.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config = offloading_spec.config
        given = {"tiers": tiers, "limits": dict(limits or {})}
        settings = TieredKVSettings(**in_all_texts(given, RANK, str(config.parallel.data_parallel_index)))
        name = config.model.name
        if not weights and not os.path.isdir(name):  # noqa: PTH112 - the name of a model is no path
            raise ConfigurationError(
                f"vLLM tells a tier the name of a model, {name!r}, and not which revision of it is served: say that by "
                '"weights" beside "tiers", a name that changes when they do'
            )
        model = ModelIdentity(name.rpartition("/")[2], weights or weights_of(name))
        chunk = KVGroup.opaque(
            self.block_size_bytes, tag=_tag(config), block_size=config.groups[0].tokens_per_block * _blocks(config)
        )
        cache = TieredKV.from_settings(settings, model=model, layout=KVLayout((chunk,)), device="cpu")
        self._stack = ExitStack()
        self.kv = self._stack.enter_context(open_blocking(cache))
        self.kv.register_host_pool(_POOL, primary_kv_view, direct=direct)
        self._jobs = self.kv.call(OffloadJobs, cache, chunk, _POOL, load_timeout_s, direct=direct)
        self._asked: dict[str, list[bytes]] = {}  # by request
        self._is_open = True

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Say whether a chunk is there; ``RETRY`` until it is known. What is being stored is not there."""
        answer = self._jobs.answers.get(key)
        if answer is None or answer[1] < time.monotonic():
            self._asked.setdefault(req_context.req_id, []).append(key)
            return LookupResult.RETRY
        return answer[0]

    def on_schedule_end(self, context: Any) -> None:
        """Ask for all that was looked up in this step, at once."""
        if self._asked:
            asked, self._asked = self._asked, {}
            self._jobs.calls.call(self._jobs.ask, asked)

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to store chunks; what is there already is passed over."""
        self._jobs.submit(job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to load chunks into vLLM's CPU tier."""
        self._jobs.submit(job_metadata)

    def get_finished_jobs(self) -> Iterable[Any]:
        """Return what has ended. Of a load that came short it names the chunks that are in place."""
        over = self._jobs.over
        return [over.popleft() for _ in range(len(over))]

    def on_new_request(self, req_context: Any) -> Any:
        """Want nothing particular."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait until nothing touches vLLM's memory; what ended is for `get_finished_jobs` to say."""
        if self._is_open:
            self.kv.call(self._jobs.drain)

    def shutdown(self) -> None:
        """Write what has been stored, within a time, and end. Idempotent."""
        if self._is_open:
            self._is_open = False
            # ClosedError if the program has ended, and the cache with it. Whatever is raised here, nothing stays open.
            with suppress(ClosedError), self._stack:
                self.kv.call(self._jobs.drain)
                self.kv.drain()
            gc.collect()  # tasks that have ended refer to vLLM's memory in cycles, and it is about to be unmapped


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
    return f"vllm {VERSION} offloaded chunk on {device_kind()} of {platform.machine()}, {digest}"
