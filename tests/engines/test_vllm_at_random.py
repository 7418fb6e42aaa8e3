"""Whatever happens to a real vLLM, and in which order: it generates what it does alone, and nothing is held after."""

import json
import pathlib
from typing import Any, Final

import pytest

from environments import Environment
from folders import STALLING
from runs import Answer, Runs

SMALL: Final = ["cpu://?capacity=1MiB", "file://{folder}/nvme?capacity=16MiB"]
"""Memory has room for a few prompts only: most are loaded from NVMe."""
NGRAMS: Final = {
    "speculative_config": {
        "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1,
    },
}  # fmt: skip
SETTINGS: Final[dict[str, Answer]] = {
    "roomy": {},
    "few blocks": {"engine": {"num_gpu_blocks_override": 34, "max_model_len": 512}},
    "steps one after the other": {"engine": {"async_scheduling": False, "num_gpu_blocks_override": 60}},
    "odd chunks": {"engine": {"max_num_batched_tokens": 37, "max_model_len": 512, "num_gpu_blocks_override": 40}},
    "large blocks": {"engine": {"block_size": 128, "num_gpu_blocks_override": 12}},
    "priorities": {"engine": {"scheduling_policy": "priority", "num_gpu_blocks_override": 40}},
    "without a cache of its own": {"engine": {"enable_prefix_caching": False}},
    "drafts": {"engine": NGRAMS, "num_steps": 600},
    "stored when dropped": {"engine": {"num_gpu_blocks_override": 60}, "extra": {"store_when": "evicted"}},
    "stalls": {"tiers": STALLING, "stalling": "{folder}"},
}
"""What is another way each time for blocks to come and go."""


def at_random(
    vllm: Environment, model: pathlib.Path, folder: pathlib.Path, *, script: str = "vllm_at_random.py", **wanted: Any
) -> Answer:
    """Run it and return what came of it."""
    wanted = json.loads(json.dumps({"tiers": SMALL, **wanted}).replace("{folder}", str(folder)))
    answer: Answer = vllm.run(script, Runs(vllm, model, folder).arguments(**wanted), timeout_s=900)
    return answer


def assert_all_is_well(answer: Answer) -> None:
    """Assert that nothing was generated otherwise, or is held, and that blocks were loaded."""
    assert answer["wrong"] == []
    assert answer["left"] == {}
    assert answer["hits"] > 0
    assert answer["ended"] > 100


@pytest.fixture(scope="session")
def each_alone(vllm: Environment, tiny_llama: pathlib.Path) -> list[list[int]]:
    """Return what the engine generates without us, per kind of prompt."""
    tokens: list[list[int]] = vllm.run("vllm_at_random.py", json.dumps({"model": str(tiny_llama)}))
    return tokens


@pytest.mark.parametrize("setting", SETTINGS)
def test_whatever_happens_it_generates_the_same(
    vllm: Environment, tiny_llama: pathlib.Path, each_alone: list[list[int]], tmp_path: pathlib.Path, setting: str
) -> None:
    """Prompts that begin alike come, are ended and preempted, and both caches are emptied, in any order."""
    assert_all_is_well(at_random(vllm, tiny_llama, tmp_path, alone=each_alone, **SETTINGS[setting]))


def test_what_is_loaded_is_what_is_used(
    vllm: Environment, tiny_llama: pathlib.Path, each_alone: list[list[int]], tmp_path: pathlib.Path
) -> None:
    """Where the loaded blocks are wiped something else is generated soon: the tests here would see wrong bytes."""
    faulty = {"connector": "WipingConnector", "module": "vllm_faults"}
    assert at_random(vllm, tiny_llama, tmp_path, alone=each_alone, **faulty)["wrong"]


@pytest.mark.parametrize("store_when", ["computed", "evicted"])
def test_prompts_that_go_on(
    vllm: Environment, tiny_llama: pathlib.Path, tmp_path: pathlib.Path, store_when: str
) -> None:
    """Of each turn vLLM drops the last token, and names the blocks behind it anew."""
    script = "vllm_sessions.py"
    alone = vllm.run(script, json.dumps({"model": str(tiny_llama)}))
    engine = {"num_gpu_blocks_override": 40, "max_model_len": 512}
    wanted = {"engine": engine, "alone": alone, "extra": {"store_when": store_when}}
    assert_all_is_well(at_random(vllm, tiny_llama, tmp_path, script=script, **wanted))


@pytest.mark.parametrize("shape", ["olmo3", "gemma3", "gpt_oss"])
def test_whatever_happens_to_several_kv_groups(vllm: Environment, tmp_path: pathlib.Path, shape: str) -> None:
    """The same of models with windows."""
    model = tmp_path / "model"
    vllm.run("make_windows.py", model, shape)
    alone = vllm.run("vllm_at_random.py", json.dumps({"model": str(model)}))
    tiers = ["cpu://?capacity=4MiB", "file://{folder}/nvme?capacity=64MiB"]
    assert_all_is_well(at_random(vllm, model, tmp_path, alone=alone, tiers=tiers, num_steps=1000))
