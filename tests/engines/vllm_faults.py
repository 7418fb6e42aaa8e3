"""Connectors that do what must not go unseen: without them what the tests of vLLM see would be no proof."""

import os
import signal
from collections.abc import Mapping
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from tiered_kv.integrations.vllm import TieredKVConnector
from tiered_kv.values.keys import BlockKeys


class WipingConnector(TieredKVConnector):
    """Fills with zeros what it has loaded: whoever still answers the same has not used it."""

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Keep the tensors."""
        self._tensors = kv_caches
        self._loading: dict[str, list[int]] = {}
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Keep what is loaded where, and wipe what is computed with at once."""
        super().start_load_kv(forward_context, **kwargs)
        for order in self._get_connector_metadata().loads:
            self._loading[order.request_id] = [block for blocks, _ in order.parts for block in blocks]
            if order.comes_first:
                self._wipe(order.request_id)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Wipe what has come."""
        results = super().get_transfer_results(finished_req_ids)
        for name in results.finished_recving:
            self._wipe(name)
        return results

    def _wipe(self, name: str) -> None:
        for tensor in self._tensors.values():
            tensor[self._loading[name]] = 0


class EvictingConnector(TieredKVConnector):
    """Evicts the fifth block of what was found, and those behind it, before it is planned to be loaded."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Open the cache, and have it evict before it plans."""
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        side = self._in_scheduler()
        planner: Any = side._planner  # noqa: SLF001 - ours
        plan_load = planner.plan_load

        def evict_and_plan(keys: BlockKeys, *blocks: object) -> object:
            side.kv.evict(keys[max(0, 4 - keys.start) :])
            return plan_load(keys, *blocks)

        planner.plan_load = evict_and_plan


class DyingConnector(TieredKVConnector):
    """Ends its process, as by `kill -9`, at the third request: when what the first ones stored is settled."""

    _seen: set[str]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Answer two requests."""
        self._seen = {*getattr(self, "_seen", ()), request.request_id}
        if len(self._seen) > 2:
            self._in_scheduler().kv.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)
