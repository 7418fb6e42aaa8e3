"""Whose KV a block of vLLM's is: what computes other bytes has another name, and what does not has the same."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.small_vllm import VLLM
from tiered_kv import ModelIdentity

PLAIN = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


def identity(config: dict[str, Any], *, max_model_len: int = 1024, tuned: bool | None = None) -> ModelIdentity:
    """Name a model that vLLM serves."""
    model = SimpleNamespace(
        hf_config=SimpleNamespace(to_dict=lambda: config, architectures=["Some"]),
        dtype="bfloat16",
        quantization=None,
        max_model_len=max_model_len,
        try_get_generation_config=lambda: {"temperature": 0.6},
        override_generation_config={} if tuned is None else {"attn_temperature_tuning": tuned},
    )
    load = SimpleNamespace(load_format="auto")
    cache = SimpleNamespace(cache_dtype="auto")
    wanted = SimpleNamespace(model_config=model, load_config=load, cache_config=cache)
    return VLLM.configuration.model_identity(wanted, "w")  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "phi3", "rope_parameters": {"rope_type": "longrope"}},
        {"model_type": "phi3", "rope_scaling": {"type": "su"}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "dynamic"},
                "sliding_attention": {"rope_type": "default"},
            }
        },
        {"model_type": "some_vl", "text_config": {"rope_parameters": {"rope_type": "longrope"}}},
        {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}},
    ],
)
def test_a_model_that_vllm_computes_by_the_longest_prompt_is_another_with_another_one(config: dict[str, Any]) -> None:
    """Its keys are rotated by other factors, or its attention is tuned, whatever the prompt's own length."""
    assert identity(config) == identity(config)
    assert identity(config, max_model_len=512) != identity(config)


def test_a_plain_model_finds_its_blocks_after_a_start_with_another_length() -> None:
    """Positions are rotated alike; a method of quantization that is called dynamic is no rope."""
    quantized = {**PLAIN, "quantization_config": {"activation_scheme": "dynamic", "quant_method": "fp8"}}
    for config in (PLAIN, quantized):
        assert identity(config, max_model_len=512) == identity(config)


def test_attention_that_is_tuned_by_hand_is_another_model() -> None:
    """Llama 4's, by its generation config; what that says of sampling is nothing of KV's."""
    config = {"model_type": "llama4_text"}
    assert len({identity(config, tuned=tuned) for tuned in (None, False, True)}) == 3
