"""A connector of vLLM's that does nothing: what it costs an engine to have one at all."""

# ruff: noqa: ANN401 - what vLLM gives has no types

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class Nothing(KVConnectorMetadata):  # type: ignore[misc]  # what vLLM gives is not typed
    """What it has to tell its workers."""


class IdleConnector(KVConnectorBase_V1):  # type: ignore[misc]  # likewise
    """Finds nothing, and stores nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """See the base class, here and below."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Do nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> Nothing:
        """Tell nothing."""
        return Nothing()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def wait_for_save(self) -> None:
        """Do nothing."""
