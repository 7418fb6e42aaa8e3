"""transformers with states (linear attention, Mamba 2, convolutions): stored at ends of blocks, each in one block."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    GenerationConfig,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from tiered_kv import BlockKeys, ConfigurationError, hash_blocks
from tiered_kv.integrations.transformers import TieredModel, open_tiered
from tiered_kv.integrations.transformers.model_parts import StatePart

pytestmark = pytest.mark.slow

SIZE, LENGTH, FEW = 16, 50, 4
END = LENGTH // SIZE * SIZE
PROMPT = [3 + i * 7 % 250 for i in range(LENGTH)]
TURN = 66 - LENGTH
"""Tokens of an answer in which a block ends."""
Model = Any  # as in `test_transformers`
SMALL: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "max_position_embeddings": 1024, "initializer_range": 0.2,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16
}  # fmt: skip
GRANITE: dict[str, Any] = {
    "layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4, "num_local_experts": 0,
    "shared_intermediate_size": 32,
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "layer_types": ["mamba", "mlp", "attention"] * 2, "num_hidden_layers": 6, "mamba_num_heads": 4,
    "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16, "chunk_size": 16,
}  # fmt: skip
MODELS: dict[str, Callable[[], Model]] = {
    "qwen3_next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**SMALL, **DELTA, **EXPERTS)),
    "qwen3_5": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SMALL, **DELTA)),
    "falcon_h1": lambda: FalconH1ForCausalLM(FalconH1Config(**SMALL, **MAMBA, num_hidden_layers=2, mamba_d_ssm=64)),
    "granite": lambda: GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**SMALL, **GRANITE, **MAMBA)),
    "nemotron_h": lambda: NemotronHForCausalLM(NemotronHConfig(**SMALL, **NEMOTRON)),
    "lfm2": lambda: Lfm2ForCausalLM(
        Lfm2Config(**SMALL, num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2)
    ),
}
STATES = 1  # the group of the states, behind that of keys and values


def made(kind: str, seed: int = 0) -> Model:
    """Return a small model with random weights."""
    torch.manual_seed(seed)
    model = MODELS[kind]()
    model.train(mode=False)
    return model


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    """Return one of each family."""
    return made(request.param)


@pytest.fixture(scope="module")
def lfm2() -> Model:
    """Return the one that takes the least time."""
    return made("lfm2")


def greedy(num_tokens: int = FEW) -> GenerationConfig:
    """Return how to generate."""
    return GenerationConfig(  # type: ignore[no-untyped-call]  # transformers' is not
        max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )


def alone(model: Model, prompts: list[list[int]], num_tokens: int = FEW) -> list[list[int]]:
    """Return what the model says without us."""
    said: list[list[int]] = model.generate(torch.tensor(prompts), generation_config=greedy(num_tokens)).tolist()
    return [each[len(prompts[0]) :] for each in said]


def generate(
    model: Model, tiered: TieredModel, prompts: list[list[int]], num_tokens: int = FEW
) -> tuple[list[list[int]], list[int]]:
    """Generate with a cache, store it; return the tokens, and how many of each prompt were loaded."""
    ids = torch.tensor(prompts)
    past = tiered.past(ids)
    out = model.generate(ids, cache=past, generation_config=greedy(num_tokens))
    past.store(out)
    return out[:, ids.shape[1] :].tolist(), past.num_loaded_tokens


def opened(model: Model, folder: Path, weights: str = "w") -> Any:  # noqa: ANN401 - a context manager
    """Open a cache of CPU memory and a disk."""
    tiers = ["cpu://?capacity=4MiB", f"file://{folder}?capacity=32MiB"]
    return open_tiered(model, {"tiers": tiers}, weights=weights, block_size=SIZE)


def state_keys() -> BlockKeys:
    """Return the names of the states in the prompt."""
    return hash_blocks(PROMPT, block_size=SIZE, group=STATES)


def test_what_is_loaded_says_the_same(model: Model, tmp_path: Path) -> None:
    """A prompt again in another process, a turn that follows an answer, another prompt with a prefix of it."""
    first = alone(model, [PROMPT], TURN)
    following = [PROMPT + first[0] + [5, 6, 7]]
    shorter = [[*PROMPT[:40], 9, 9, 9]]
    with opened(model, tmp_path) as tiered:
        assert generate(model, tiered, [PROMPT], TURN) == (first, [0])
    with opened(model, tmp_path) as tiered:
        assert generate(model, tiered, [PROMPT]) == ([first[0][:FEW]], [END])
        num_blocks = {tier.tier: tier.hits for tier in tiered.kv.stats().tiers}
        assert num_blocks == {"cpu": 0, "nvme": END // SIZE + 1}  # one state alone, behind all keys and values
        assert generate(model, tiered, following) == (alone(model, following), [END + SIZE])
        assert generate(model, tiered, shorter) == (alone(model, shorter), [32])


def test_what_is_loaded_is_what_is_used(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: a state of one block before is loaded as any, and changes what is said."""
    read, before = StatePart.read, list[torch.Tensor]()

    def late(part: StatePart, layers: Any) -> torch.Tensor:  # noqa: ANN401 - of transformers
        before.append(read(part, layers))
        return before[max(0, len(before) - 2)]

    with opened(model, tmp_path) as tiered:
        with monkeypatch.context() as patched:
            patched.setattr(StatePart, "read", late)
            generate(model, tiered, [PROMPT])
        said, loaded = generate(model, tiered, [PROMPT])
    assert loaded == [END]
    assert said != alone(model, [PROMPT])


def test_where_a_state_is_missing_the_one_before_it_serves(lfm2: Model, tmp_path: Path) -> None:
    """Keys and values alone are of no use, nor are states without those before them."""
    expected, keys = alone(lfm2, [PROMPT]), state_keys()
    with opened(lfm2, tmp_path) as tiered:
        generate(lfm2, tiered, [PROMPT])
        for num_blocks in (2, 0):
            tiered.kv.evict(keys[num_blocks:])
            past = tiered.past(torch.tensor([PROMPT]))
            assert past.num_loaded_tokens == [num_blocks * SIZE]
            out = lfm2.generate(torch.tensor([PROMPT]), cache=past, generation_config=greedy())
            assert out[:, LENGTH:].tolist() == expected
        generate(lfm2, tiered, [PROMPT])  # all are stored again
        tiered.kv.evict(hash_blocks(PROMPT, block_size=SIZE)[1:2])
        assert generate(lfm2, tiered, [PROMPT]) == (expected, [SIZE])


def test_of_an_answer_that_is_cut_what_is_left_is_stored(lfm2: Model, tmp_path: Path) -> None:
    """A state behind it is not, and not counted."""
    ids = torch.tensor([PROMPT])
    with opened(lfm2, tmp_path) as tiered:
        past = tiered.past(ids)
        out = lfm2.generate(ids, cache=past, generation_config=greedy(TURN))
        assert past.store(out[:, :LENGTH]) == tiered.kv.stats().stored == 2 * END // SIZE


def test_no_state_of_a_guess_is_stored(lfm2: Model, tmp_path: Path) -> None:
    """Assisted decoding computes tokens that it may take back; transformers does so where convolutions are all states.

    What it has computed of attention is stored, and who goes on behind it computes all, as a state is wanted too.
    """
    ids = torch.tensor([PROMPT])
    guessing = GenerationConfig(**(greedy(64).to_diff_dict() | {"prompt_lookup_num_tokens": 5}))  # type: ignore[no-untyped-call]  # transformers' is not
    with opened(lfm2, tmp_path) as tiered:
        past = tiered.past(ids)
        out = lfm2.generate(ids, cache=past, generation_config=guessing)
        assert out[0, LENGTH:].tolist() == alone(lfm2, [PROMPT], 64)[0]
        assert past.store(out) == past.get_seq_length() // SIZE
        following = [[*out[0].tolist(), 5, 6, 7]]
        assert generate(lfm2, tiered, following) == (alone(lfm2, following), [0])


def test_a_state_that_goes_between_lookup_and_load_is_computed(
    lfm2: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is loaded then ends at the state before it."""
    expected = alone(lfm2, [PROMPT])
    with opened(lfm2, tmp_path) as tiered:
        generate(lfm2, tiered, [PROMPT])
        load, last = tiered.kv.load, state_keys()[2:3]

        def forgetful(keys: BlockKeys, *rest: Any, **more: Any) -> Any:  # noqa: ANN401 - what it wraps
            tiered.kv.evict(last)
            return load(keys, *rest, **more)

        with monkeypatch.context() as patched:
            patched.setattr(tiered.kv, "load", forgetful)
            assert generate(lfm2, tiered, [PROMPT]) == (expected, [2 * SIZE])
        assert generate(lfm2, tiered, [PROMPT]) == (expected, [END])  # it was stored again


def test_prompts_of_one_length_are_served_together(lfm2: Model, tmp_path: Path) -> None:
    """They go on where all have a state; padded ones, and several answers to one, are refused."""
    prompts = [PROMPT, [*PROMPT[:32], *PROMPT[: LENGTH - 32]]]
    expected = alone(lfm2, prompts)
    with opened(lfm2, tmp_path) as tiered:
        assert generate(lfm2, tiered, prompts[1:])[0] == expected[1:]
        assert generate(lfm2, tiered, prompts) == (expected, [32, 32])
        assert generate(lfm2, tiered, prompts) == (expected, [END, END])
        ids = torch.tensor([PROMPT, PROMPT])
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        with pytest.raises(ConfigurationError, match="must be of one length"):
            tiered.past(ids, mask)
        with pytest.raises(ConfigurationError, match="without beams"):
            lfm2.generate(
                ids,
                cache=tiered.past(ids),
                generation_config=greedy(),
                num_return_sequences=2,
                do_sample=True,
            )


def test_a_model_is_its_own_again(lfm2: Model, tmp_path: Path) -> None:
    """Inside, what has other caches or none is as ever; continuous batching is refused there, with what to do."""
    ids = torch.tensor([PROMPT[:5]])
    config = ContinuousBatchingConfig(page_size=SIZE, num_blocks=96, max_batch_tokens=256)
    with opened(lfm2, tmp_path):
        lfm2.generate(ids, generation_config=greedy(), use_cache=False)
        with pytest.raises(ConfigurationError, match=r"use generate with TieredModel.past\(\)"):
            lfm2.generate_batch([PROMPT], generation_config=greedy(), continuous_batching_config=config)
    assert lfm2.generation_config.prefill_chunk_size is None
    assert "generate" not in vars(lfm2)
    assert not lfm2._forward_hooks  # noqa: SLF001 - there is no other way to see them


def refused(model: Model, match: str) -> None:
    """See that a model is refused when it is opened."""
    with (
        pytest.raises(ConfigurationError, match=match),
        open_tiered(model, {"tiers": ["cpu://?capacity=4MiB"]}, weights="w"),
    ):
        pass


def test_what_transformers_does_not_go_on_from_is_refused() -> None:
    """States that several tokens at once would not begin with, and models whose generate never looks at the cache."""
    experts: dict[str, Any] = {"num_experts": 2, "num_experts_per_tok": 1}
    period: dict[str, Any] = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 2}
    refused(JambaForCausalLM(JambaConfig(**SMALL, **experts, **period)), "forgets its states")
    sizes: dict[str, Any] = {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 16}
    mamba2 = Mamba2Config(vocab_size=256, hidden_size=32, num_hidden_layers=2, **sizes)
    refused(Mamba2ForCausalLM(mamba2), "has states alone")
