"""What a `TieredCache` has computed, and of that alone: whatever interrupts it, and whatever it is given next."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tests.integrations.test_transformers import GREEDY, SIZE, Model, llama, opened
from tests.integrations.test_transformers_states import made
from tiered_kv import ConfigurationError
from tiered_kv.integrations.transformers import TieredModel

PROMPT = torch.tensor([[3 + (i * i * 7 + i) % 190 for i in range(100)]])
SAMPLED = {"do_sample": True, "max_new_tokens": 40, "eos_token_id": None, "pad_token_id": 0}


def gemma() -> Model:
    """Return a small model with windows of 24 tokens in two of three layers."""
    torch.manual_seed(1)
    config = Gemma3TextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, initializer_range=0.2, sliding_window=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    )  # fmt: skip
    model = Gemma3ForCausalLM(config)
    model.train(mode=False)
    return model


@pytest.fixture(scope="module")
def model() -> Model:
    """Return a model of full attention."""
    return llama()


def num_right(model: Model, tiered: TieredModel, ids: Tensor) -> int:
    """Return how many tokens are loaded for a prompt, all of whose KV is as it is when it is computed alone."""
    past, alone = tiered.past(ids), DynamicCache(config=model.config)
    for layer in alone.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.activate_past_recording()  # type: ignore[no-untyped-call]  # transformers' is not
    with torch.no_grad():
        model(ids, cache=alone)
    for layers in zip(past.layers, alone.layers, strict=True):
        if past.num_loaded_tokens[0] and isinstance(layers[0], DynamicLayer):
            loaded, computed = (cast("DynamicLayer", layer) for layer in layers)
            end = loaded.get_seq_length()
            for states, wanted in ((loaded.keys, computed.keys), (loaded.values, computed.values)):
                assert states is not None
                assert wanted is not None
                torch.testing.assert_close(states, wanted[:, :, end - states.shape[2] : end], atol=1e-3, rtol=1e-3)
    return past.num_loaded_tokens[0]


class Interrupted:
    """Has a layer of a model raise `KeyboardInterrupt` at a step, for a ``with`` block."""

    def __init__(self, layer: Module, step: int) -> None:
        """Count steps from 1."""
        self._left = step
        self._hook = layer.register_forward_pre_hook(self._count)

    def _count(self, _module: Module, _args: Any) -> None:  # noqa: ANN401 - any layer's
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        """Take the hook away."""
        self._hook.remove()


@pytest.mark.parametrize("made_model", [llama, gemma, partial(made, "qwen3_next")])
@pytest.mark.parametrize("step", [1, 3])
def test_of_a_step_that_was_interrupted_nothing_is_stored(
    made_model: Callable[[], Model], step: int, tmp_path: Path
) -> None:
    """Some layers have its tokens, others not: no step follows it, and what was computed before it is right."""
    model = made_model()
    with opened(model, tmp_path, "w") as tiered:
        past = tiered.past(PROMPT)
        with Interrupted(model.model.layers[1], step), pytest.raises(KeyboardInterrupt):
            model.generate(PROMPT, cache=past, generation_config=GREEDY, prefill_chunk_size=32)
        with pytest.raises(ConfigurationError, match="was interrupted"):
            model.generate(PROMPT, cache=past, generation_config=GREEDY)
        with pytest.raises(ConfigurationError, match="was interrupted"):
            past.crop(-1)
        past.store(PROMPT)
        assert num_right(model, tiered, PROMPT) == (step - 1) * 32
        past.reset()
        assert past.num_loaded_tokens == [0]
        answer = model.generate(PROMPT, cache=past, generation_config=GREEDY)
        assert torch.equal(answer, model.generate(PROMPT, generation_config=GREEDY))
        past.store(answer)
        assert num_right(model, tiered, PROMPT) == 96


def test_of_rows_that_begin_elsewhere_no_part_of_a_step_is_stored(model: Model, tmp_path: Path) -> None:
    """The one token that a layer has of it would fill a block, if it was repeated."""
    rows = [
        torch.tensor([[3 + (i * 7) % 250 for i in range(192)]]),
        torch.tensor([[5 + i * 11 % 250 for i in range(185)]]),
    ]
    ids = torch.cat([rows[0], torch.cat([torch.zeros(1, 7, dtype=torch.long), rows[1]], 1)])
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    with opened(model, tmp_path, "w") as tiered:
        for row, width in zip(rows, (97, 81), strict=True):
            past = tiered.past(row[:, :width])
            model(row[:, :width], cache=past)
            past.store(row[:, :width])
        past = tiered.past(ids, mask)
        assert past.num_loaded_tokens == [87, 80]
        with Interrupted(model.model.layers[1], 1), pytest.raises(KeyboardInterrupt):
            model.generate(ids, attention_mask=mask, cache=past, generation_config=GREEDY)
        assert past.store(ids) == 0
        assert num_right(model, tiered, rows[0]) == 96


def test_a_step_that_reached_no_layer_may_be_done_again(model: Model, tmp_path: Path) -> None:
    """What it was refused for, or interrupted by, has changed nothing."""
    alone = model.generate(PROMPT, generation_config=GREEDY)
    with opened(model, tmp_path, "w") as tiered:
        past = tiered.past(PROMPT)
        with pytest.raises(ConfigurationError, match="same attention_mask"):
            model(PROMPT, torch.zeros_like(PROMPT), cache=past)  # a mask by its position, too
        with Interrupted(model.model.embed_tokens, 1), pytest.raises(KeyboardInterrupt):
            model.generate(PROMPT, cache=past, generation_config=GREEDY)
        assert torch.equal(model.generate(PROMPT, cache=past, generation_config=GREEDY), alone)


def test_a_second_answer_behind_the_first_is_refused(model: Model, tmp_path: Path) -> None:
    """Its tokens would lie behind the first one's, and be computed from both."""
    with opened(model, tmp_path, "w") as tiered:
        past = tiered.past(PROMPT)
        out = model.generate(PROMPT, cache=past, **SAMPLED)
        with pytest.raises(ConfigurationError, match=r"Another answer .* begins from another past\(\)"):
            model.generate(PROMPT, cache=past, **SAMPLED)
        assert past.store(out) == out.shape[1] // SIZE
        assert num_right(model, tiered, out) == (out.shape[1] - 1) // SIZE * SIZE


@pytest.mark.parametrize("made_model", [llama, gemma])
def test_an_answer_that_is_cropped_leaves_nothing_of_itself_in_the_next(
    made_model: Callable[[], Model], tmp_path: Path
) -> None:
    """Both are stored as what they are."""
    model = made_model()
    with opened(model, tmp_path, "w") as tiered:
        past = tiered.past(PROMPT)
        answers = []
        for _ in range(2):
            answers.append(model.generate(PROMPT, cache=past, **SAMPLED))
            past.store(answers[-1])
            past.crop(PROMPT.shape[1] - 1 - past.get_seq_length())
        assert not torch.equal(*answers)
        for answer in answers:
            assert num_right(model, tiered, answer) == (answer.shape[1] - 1) // SIZE * SIZE


@pytest.mark.parametrize("how", ["crop", "reset"])
def test_nothing_follows_what_was_half_taken_back(
    model: Model, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of different lengths would be stored as if they were of one."""
    with opened(model, tmp_path, "w") as tiered:
        past = tiered.past(PROMPT)
        answer = model.generate(PROMPT, cache=past, **SAMPLED)
        with pytest.raises(ConfigurationError, match="as a negative number; got 99"):
            past.crop(99)

        def interrupt(*_: int) -> None:
            raise KeyboardInterrupt

        take_back = partial(past.crop, -40) if how == "crop" else past.reset
        with monkeypatch.context() as patch:
            patch.setattr(past.layers[1], how, interrupt)
            with pytest.raises(KeyboardInterrupt):
                take_back()
        with pytest.raises(ConfigurationError, match="was interrupted"):
            model.generate(PROMPT, cache=past, **SAMPLED)
        assert past.store(answer) == 0
        past.reset()
        answer = model.generate(PROMPT, cache=past, **SAMPLED)
        past.store(answer)
        assert num_right(model, tiered, answer) == (answer.shape[1] - 1) // SIZE * SIZE


@pytest.mark.parametrize("made_model", [llama, gemma])
def test_a_copy_goes_its_own_way(made_model: Callable[[], Model], tmp_path: Path) -> None:
    """As that of another cache of transformers does: of one prompt many answers come, each stored as what it is."""
    model = made_model()
    with opened(model, tmp_path, "w") as tiered:
        begun = tiered.past(PROMPT)
        with torch.no_grad():  # torch copies no tensor that has a history
            model(PROMPT[:, :-1], cache=begun)
        for _ in range(2):
            past = copy.deepcopy(begun)
            answer = model.generate(PROMPT, cache=past, **SAMPLED)
            past.store(answer)
            assert num_right(model, tiered, answer) == (answer.shape[1] - 1) // SIZE * SIZE
        assert begun.get_seq_length() == PROMPT.shape[1] - 1


def test_tokens_hidden_behind_the_prompts_are_refused(model: Model, tmp_path: Path) -> None:
    """As those of the prompts are: a next turn's, where a row's answer before it was shorter."""
    ids = torch.cat([PROMPT, PROMPT.flip(1)])
    with opened(model, tmp_path, "w") as tiered:
        past = tiered.past(ids)
        turn = torch.cat([model.generate(ids, cache=past, generation_config=GREEDY), ids[:, :30]], 1)
        mask = torch.ones_like(turn)
        mask[1, 103:108] = 0
        with pytest.raises(ConfigurationError, match="same attention_mask"):
            model.generate(turn, attention_mask=mask, cache=past, generation_config=GREEDY)


def test_other_tokens_than_were_computed_are_not_stored(model: Model, tmp_path: Path) -> None:
    """Whatever `store` is given: blocks before the first of them are."""
    with opened(model, tmp_path, "w") as tiered:
        past = tiered.past(PROMPT)
        out = model.generate(PROMPT, cache=past, **SAMPLED)
        out[:, 119] = (out[:, 119] + 1) % 256
        assert past.store(out) == 119 // SIZE
        assert num_right(model, tiered, out) == 119 // SIZE * SIZE


def test_other_prompts_than_a_cache_was_made_for_are_refused(model: Model, tmp_path: Path) -> None:
    """They would go on from the KV of those."""
    other = PROMPT.clone()
    other[0, 50] += 1
    with opened(model, tmp_path, "w") as tiered:
        with pytest.raises(ConfigurationError, match="same input_ids"):
            model.generate(other, cache=tiered.past(PROMPT), generation_config=GREEDY)
        with pytest.raises(ConfigurationError, match="nothing is computed"):
            tiered.past(PROMPT).store(PROMPT)
