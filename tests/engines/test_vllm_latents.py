"""DeepSeek's models under a real vLLM, which runs them on CPUs that have AMX."""

import json
import pathlib
from typing import Any, Final

import pytest

from environments import Environment
from runs import Answer, Runs, hits_of

pytestmark = pytest.mark.skipif(
    "amx_tile" not in pathlib.Path("/proc/cpuinfo").read_text(),
    reason="vLLM computes DeepSeek's models in pieces only on CPUs with AMX",
)

TIERS: Final[list[Any]] = ["cpu://?capacity=64MiB", "file://{folder}/nvme?capacity=256MiB"]
ENGINE: Final = {"dtype": "bfloat16", "block_size": None, "kv_cache_memory_bytes": 256 << 20}
V3: Final[Answer] = {"length": 600, "prompts": [0], "engine": ENGINE}
V4: Final[Answer] = {**V3, "num_tokens": 8, "engine": {**ENGINE, "load_format": "dummy"}}
"""One prompt: in bfloat16 a token depends on what else its step computes."""
DEEPSEEK_V4: Final = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "torch_dtype": "bfloat16",
    "vocab_size": 512, "hidden_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 512,
    "num_attention_heads": 8, "num_key_value_heads": 1, "qk_rope_head_dim": 64, "q_lora_rank": 128,
    "o_lora_rank": 128, "o_groups": 2, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6,
    "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4], "num_hash_layers": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048, "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 4, "original_max_position_embeddings": 512, "beta_fast": 32, "beta_slow": 1,
    },
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "num_nextn_predict_layers": 0,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
"""The sizes that vLLM's kernels for CPUs have, in few layers: one of a window alone, and of each compression."""
V4_BLOCKS: Final = 3 * 2 + 2 * 2 + 2 * 2 + 16
"""For 512 tokens: of three sizes of page each block of 256 tokens, two of 64 of each of two tables of windows, and the
states of compression: two blocks of 4 tokens, of two sizes of page, and 16 of 8."""


def test_deepseek_v3(vllm: Environment, tmp_path: pathlib.Path) -> None:
    """Latents that another process has stored say what vLLM's own cache would: computed in one piece they may differ.

    Wiped, what is loaded is missed: it is used.
    """
    model = tmp_path / "model"
    vllm.run("make_windows.py", model, "deepseek_v3")
    runs = Runs(vllm, model, tmp_path)
    tokens = runs.run(transfer=None, warm_up=[0], **V3)["rounds"][0]["tokens"]
    cold, warm = runs.run(tiers=TIERS, **V3), runs.run(tiers=TIERS, **V3)
    assert warm["rounds"][0]["tokens"] == tokens
    assert (hits_of(cold), hits_of(warm)) == (0, 512)
    wiped = runs.run_faulty("WipingConnector", tiers=TIERS, **V3)
    assert wiped["rounds"][0]["tokens"] != tokens


def test_ranks_that_hold_the_same_keep_it_once(vllm: Environment, tmp_path: pathlib.Path) -> None:
    """What one process has stored two tensor parallel ranks load, each all of it, and the other way round."""
    model = tmp_path / "model"
    vllm.run("make_windows.py", model, "deepseek_v3")
    two: Answer = {**V3, "engine": {**ENGINE, "tensor_parallel_size": 2}}
    runs = Runs(vllm, model, tmp_path)
    tokens = runs.run(transfer=None, warm_up=[0], **two)["rounds"][0]["tokens"]
    stored = runs.run(tiers=TIERS, **two)
    warm, by_one = runs.run(tiers=TIERS, **two), runs.run(tiers=TIERS, **V3)
    assert [hits_of(each) for each in (stored, warm, by_one)] == [0, 512, 512]
    assert warm["rounds"][0]["tokens"] == tokens
    assert warm["counters"]["vllm:tiered_kv_load_bytes"] == by_one["counters"]["vllm:tiered_kv_load_bytes"]


@pytest.mark.parametrize("runner", [1, 2])
def test_deepseek_v4(vllm: Environment, tmp_path: pathlib.Path, runner: int) -> None:
    """So do latents, indexes and windows, and states of compression, each in blocks of another number of tokens."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(DEEPSEEK_V4))
    runs = Runs(vllm, model, tmp_path)

    def run(**wanted: Any) -> Answer:
        given = runs.arguments(tiers=TIERS, extra={"weights": "dummy"}, **V4, **wanted)
        answer: Answer = vllm.run("vllm_interpreted.py", given, runner, timeout_s=900)
        return answer

    tokens = run(transfer=None, warm_up=[0])["rounds"][0]["tokens"]
    cold, warm = run(), run()
    assert warm["rounds"][0]["tokens"] == tokens
    assert (hits_of(cold), hits_of(warm)) == (0, 512)
    assert warm["counters"]["vllm:tiered_kv_load_blocks"] == V4_BLOCKS
    assert cold["counters"]["vllm:tiered_kv_store_blocks"] == V4_BLOCKS, "of windows, what a prompt's end needs"
    wiped = run(connector="WipingConnector", module="vllm_faults")
    assert wiped["rounds"][0]["tokens"] != tokens
