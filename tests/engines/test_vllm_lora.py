"""LoRA on a real vLLM: each adapter's blocks are its own, and outlive the engine while its files are the same."""

import json
import pathlib
from collections.abc import Callable
from typing import Any, Final

import pytest

from environments import Environment
from runs import Runs, hits_of

PROMPTS: Final = [0, 0, 0]
"""One prompt: without an adapter, and with either."""
HITS: Final = 9 * 32
"""Tokens of it that are full blocks."""
LORA: Final = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_num_seqs": 1}
"""One request at a time: with two adapters in a batch vLLM 0.32 on a CPU gives a request without any one of them."""


@pytest.fixture
def adapters(vllm: Environment, tmp_path_factory: pytest.TempPathFactory) -> list[str | None]:
    """Return the folders of two adapters, and none before them."""
    folders = [tmp_path_factory.mktemp("adapter") for _ in range(2)]
    for seed, folder in enumerate(folders):
        vllm.run("make_adapter.py", folder, seed)
    return [None, *map(str, folders)]


@pytest.fixture
def alone(vllm: Environment, tiny_llama: pathlib.Path) -> Callable[[list[str | None]], list[list[int]]]:
    """Return what the engine generates without us."""

    def tokens(adapters: list[str | None]) -> list[list[int]]:
        wanted = {"model": str(tiny_llama), "prompts": PROMPTS, "engine": LORA, "adapters": adapters}
        generated: list[list[int]] = vllm.run("vllm_generate.py", json.dumps(wanted))["rounds"][0]["tokens"]
        return generated

    return tokens


def test_adapters_keep_apart_and_outlive_the_engine(
    vllm: Environment,
    tiny_llama: pathlib.Path,
    tmp_path: pathlib.Path,
    adapters: list[str | None],
    alone: Callable[[list[str | None]], list[list[int]]],
) -> None:
    """The same prompt with three models is found by each as its own; an adapter that was trained on is another one."""
    runs, expected = Runs(vllm, tiny_llama, tmp_path), alone(adapters)
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS), "the adapters do not change what is generated"
    more: dict[str, Any] = {"prompts": PROMPTS, "engine": LORA, "adapters": adapters}
    cold = runs.run(**more)
    assert (cold["rounds"][0]["tokens"], hits_of(cold)) == (expected, 0)
    warm = runs.run(**more)
    assert warm["rounds"][0]["tokens"] == expected
    assert warm["rounds"][0]["cached"] == [HITS] * len(PROMPTS)
    vllm.run("make_adapter.py", adapters[2], 7)
    expected_now = alone(adapters)
    assert expected_now[2] != expected[2], "the new weights do not change what is generated"
    changed = runs.run(**more)
    assert changed["rounds"][0]["tokens"] == expected_now
    assert changed["rounds"][0]["cached"] == [HITS, HITS, 0]
