"""transformers with windows in some layers or all, and with latents: each kind of layer is a KV group of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from tiered_kv import BlockKeys, ConfigurationError, hash_blocks
from tiered_kv.integrations.transformers import TieredModel, open_tiered

pytestmark = pytest.mark.slow

SIZE, WINDOW = 16, 40
LENGTHS = (200, 150, 90)
PROMPTS = [[3 + (i * 7 + j * 31) % 250 for i in range(length)] for j, length in enumerate(LENGTHS)]
GREEDY = GenerationConfig(  # type: ignore[no-untyped-call]  # transformers' is not
    max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0
)
Model = Any  # as in `test_transformers`
SMALL: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 1024, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 4}
LATENTS: dict[str, Any] = {
    "num_hidden_layers": 2, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "first_k_dense_replace": 2, "num_key_value_heads": 4,
}  # fmt: skip
MODELS: dict[str, Callable[[], Model]] = {
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, num_hidden_layers=6, sliding_window=WINDOW)),
    "gpt_oss": lambda: GptOssForCausalLM(GptOssConfig(**SMALL, **EXPERTS, sliding_window=WINDOW)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, num_hidden_layers=2, sliding_window=WINDOW)),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**{**SMALL, **LATENTS})),
}
NUM_GROUPS = {"gemma3": 2, "gpt_oss": 2, "mistral": 1, "deepseek_v3": 2}
WINDOWED = ("gemma3", "gpt_oss", "mistral")


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    """Return a small model with random weights."""
    torch.manual_seed(0)
    made = MODELS[request.param]()
    made.train(mode=False)
    made.kind = request.param
    return made


def padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts as one batch, and its mask."""
    pads = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
    ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * len(prompt) for pad, prompt in zip(pads, prompts, strict=True)])
    return ids, mask


def alone(model: Model, prompts: list[list[int]]) -> list[list[int]]:
    """Return what the model says without us."""
    ids, mask = padded(prompts)
    out = model.generate(ids, attention_mask=mask, generation_config=GREEDY)
    said: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return said


def generate(model: Model, tiered: TieredModel, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Generate with a cache, store it; return the tokens, and how many of each prompt were loaded."""
    ids, mask = padded(prompts)
    past = tiered.past(ids, mask)
    out = model.generate(ids, attention_mask=mask, cache=past, generation_config=GREEDY)
    past.store(out)
    return out[:, ids.shape[1] :].tolist(), past.num_loaded_tokens


def opened(model: Model, folder: Path, weights: str = "w") -> Any:  # noqa: ANN401 - a context manager
    """Open a cache of CPU memory and a disk."""
    tiers = ["cpu://?capacity=4MiB", f"file://{folder}?capacity=32MiB"]
    return open_tiered(model, {"tiers": tiers}, weights=weights, block_size=SIZE)


def test_what_is_loaded_says_the_same(model: Model, tmp_path: Path) -> None:
    """One prompt, a batch that is padded, a turn that follows, a prefix of what was asked: as without a cache."""
    first = alone(model, PROMPTS[:1])
    with opened(model, tmp_path) as tiered:
        assert generate(model, tiered, PROMPTS[:1]) == (first, [0])
    with opened(model, tmp_path) as tiered:  # the tiers of another process
        assert generate(model, tiered, PROMPTS[:1]) == (first, [192])
        assert generate(model, tiered, PROMPTS) == (
            alone(model, PROMPTS),
            [50, 0, 0],
        )  # the others are new, and begin there
        assert generate(model, tiered, PROMPTS) == (alone(model, PROMPTS), [190, 140, 80])
        following = [PROMPTS[0] + first[0] + [5, 6, 7]]
        assert generate(model, tiered, following) == (alone(model, following), [256])
        shorter = [[*PROMPTS[0][:100], 9, 9, 9]]
        assert generate(model, tiered, shorter) == (alone(model, shorter), [96])


def test_each_kind_of_layer_is_a_group(model: Model, tmp_path: Path) -> None:
    """Full attention, windows, latents and what lies beside them: each is stored by itself."""
    with opened(model, tmp_path) as tiered:
        generate(model, tiered, PROMPTS[:1])
        num_blocks = (LENGTHS[0] + 59) // SIZE
        assert tiered.kv.stats().stored == NUM_GROUPS[model.kind] * num_blocks


def test_of_a_window_only_what_it_sees_is_loaded(model: Model, tmp_path: Path) -> None:
    """Where what it has left behind is gone, that costs nothing; where what it sees is, the prompt is computed."""
    if model.kind not in WINDOWED:
        pytest.skip("all layers see all tokens")
    keys = hash_blocks(PROMPTS[0], block_size=SIZE, group=0)  # the first layer has one in each of these models
    seen = (192 - WINDOW + 1) // SIZE
    with opened(model, tmp_path) as tiered:
        generate(model, tiered, PROMPTS[:1])
        tiered.kv.evict(keys[:seen])
        assert generate(model, tiered, PROMPTS[:1]) == (alone(model, PROMPTS[:1]), [192])
        tiered.kv.evict(keys[seen : seen + 1])
        said, loaded = generate(model, tiered, PROMPTS[:1])
        assert (said, loaded[0] < 192) == (alone(model, PROMPTS[:1]), True)


def test_a_window_that_goes_between_lookup_and_load_is_computed(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is loaded then ends sooner, at a place for which all is there, and nothing wrong is said."""
    expected = alone(model, PROMPTS)
    with opened(model, tmp_path) as tiered:
        generate(model, tiered, PROMPTS)
        load, gone = tiered.kv.load, list[BlockKeys]()

        def forgetful(keys: BlockKeys, *rest: Any, **more: Any) -> Any:  # noqa: ANN401 - what it wraps
            if not gone:
                gone.append(keys[-1:])
                tiered.kv.evict(keys[-1:])
            return load(keys, *rest, **more)

        monkeypatch.setattr(tiered.kv, "load", forgetful)
        said, loaded = generate(model, tiered, PROMPTS)
        assert said == expected
        assert 0 < loaded[0] < 190
        assert generate(model, tiered, PROMPTS) == (expected, [190, 140, 80])  # it was stored again


def test_what_is_loaded_is_what_is_used(model: Model, tmp_path: Path) -> None:
    """A control: what other weights have computed changes what is said."""
    torch.manual_seed(1)
    other = MODELS[model.kind]()
    with opened(other, tmp_path, "a wrong name") as tiered:
        generate(other, tiered, PROMPTS[:1])
    with opened(model, tmp_path, "a wrong name") as tiered:
        said, loaded = generate(model, tiered, PROMPTS[:1])
        assert loaded == [192]
        assert said != alone(model, PROMPTS[:1])


def test_continuous_batching_of_these_is_refused(model: Model, tmp_path: Path) -> None:
    """It shares no prefixes of windows and has no latents: inside the block it says so, outside it is as it was."""
    config = ContinuousBatchingConfig(page_size=SIZE, num_blocks=96, max_batch_tokens=256)
    with opened(model, tmp_path), pytest.raises(ConfigurationError, match=r"use generate with TieredModel.past\(\)"):
        model.generate_batch(PROMPTS, generation_config=GREEDY, continuous_batching_config=config)
