"""The connector that vLLM loads: its methods, each handed to the side that it is for."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tiered_kv.integrations.vllm.configuration import Configuration
from tiered_kv.integrations.vllm.counts import TieredKVPromMetrics, TieredKVStats
from tiered_kv.integrations.vllm.messages import Hello, Report, Step
from tiered_kv.integrations.vllm.moving import MovingSide
from tiered_kv.integrations.vllm.scheduling import SchedulingSide
from tiered_kv.values.errors import ConfigurationError


class TieredKVConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's blocks in tiers of CPU memory, NVMe and shared storage: loaded beside its steps, stored behind them.

    vLLM makes one in its scheduler and one in each worker. What it is asked for and when is said by
    ``KVConnectorBase_V1``; here is said only what is particular.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Made by vLLM.

        Raises:
            ConfigurationError: The configuration cannot work, or would give wrong answers.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        configuration = Configuration.of(vllm_config, kv_cache_config)
        is_scheduler = role is KVConnectorRole.SCHEDULER
        self._scheduling = SchedulingSide(configuration) if is_scheduler else None
        self._moving = MovingSide(vllm_config, configuration) if not is_scheduler else None

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that was dropped is computed again, no more."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        """Ask for a layer's part of a block in one piece."""
        return "LBHNC"

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Say yes: nothing is copied while vLLM sleeps, and its tensors are where they were when it wakes up."""
        return True

    def shutdown(self) -> None:
        """See the base class. Idempotent."""
        if self._scheduling is not None:
            self._scheduling.close()
        if self._moving is not None:
            self._moving.close()

    # In the workers.

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """See the base class."""
        self._in_worker().register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        """See the base class. Comes before vLLM sleeps."""
        self._in_worker().unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        """See the base class. Comes when it wakes up."""
        self._in_worker().restore_kv_caches()

    def get_handshake_metadata(self) -> Hello | None:
        """See the base class."""
        return self._in_worker().hello()

    def handle_preemptions(self, kv_connector_metadata: Step) -> None:
        """See the base class. Comes first in a step."""
        self._in_worker().before_computing(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See the base class. Comes before the step's computing where a load comes first, else behind it."""
        self._in_worker().load_first(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are over before their requests are computed."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Stores begin after all layers."""

    def wait_for_save(self) -> None:
        """Wait for nothing: vLLM keeps the blocks until a store has ended."""
        self._in_worker().start_stores(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See the base class. Of a model with several KV groups a load brings all, or has failed."""
        sent, loaded = self._in_worker().ended()
        failed = self._in_worker().take_failed()
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=loaded, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See the base class."""
        return self._in_worker().take_lost()

    def build_connector_worker_meta(self) -> Report | None:
        """See the base class."""
        return self._in_worker().report()

    # In the scheduler.

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Hello]) -> None:
        """Open the cache, the first time: by pipeline stage and tensor parallel rank, what each worker has."""
        self._in_scheduler().open(metadata.values())

    def on_new_request(self, request: Any) -> None:
        """See the base class. Hints are read here, long before a request has its turn."""
        self._in_scheduler().come(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See the base class."""
        return self._in_scheduler().find(request, num_computed_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """See the base class."""
        return self._in_scheduler().hit_sources(request, num_external_tokens) if num_external_tokens else {}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See the base class."""
        self._in_scheduler().begin(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        """See the base class."""
        return self._in_scheduler().next_step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """See the base class."""
        report = connector_output.kv_connector_worker_meta
        freed = connector_output.finished_sending or set()
        self._in_scheduler().take(report if isinstance(report, Report) else Report(), freed)

    def has_pending_block_frees(self) -> bool:
        """Have vLLM wait, and preempt nobody, while blocks of requests that have ended are copied."""
        return self._in_scheduler().frees_soon()

    def has_pending_push_work(self) -> bool:
        """Have vLLM do steps, though it has no requests, until blocks that are held here are its own again."""
        return self._in_scheduler().holds_blocks

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See the base class."""
        return self._in_scheduler().end(request, block_ids), None

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """See the base class."""
        self._in_scheduler().use_pool(gpu_block_pool)

    def reset_cache(self) -> bool:
        """Serve nothing of what is stored any more: vLLM asks for it when it has loaded other weights."""
        self._in_scheduler().forget()
        return True

    # What vLLM shows.

    def take_events(self) -> Iterable[KVCacheEvent]:
        """See the base class."""
        return self._in_scheduler().take_events()

    def get_kv_connector_stats(self) -> TieredKVStats | None:
        """See the base class."""
        return self._scheduling.counts.take() if self._scheduling is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TieredKVStats:
        """See the base class."""
        return TieredKVStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TieredKVPromMetrics:
        """See the base class."""
        return TieredKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _in_worker(self) -> MovingSide:
        if self._moving is None:
            raise ConfigurationError("vLLM calls this in its workers")
        return self._moving

    def _in_scheduler(self) -> SchedulingSide:
        if self._scheduling is None:
            raise ConfigurationError("vLLM calls this in its scheduler")
        return self._scheduling
