"""vLLM's scheduler, pool and prefix cache over our connector, and a model that is a digest: no wrong byte is read."""

import json
import pathlib
from typing import Any, Final

import pytest

from environments import Environment

SHAPES: Final = (
    "full", "windows", "gemma", "one window", "two windows", "small blocks", "chunks", "states", "parts of states",
    "pages", "latents", "short windows", "compressed", "replayed", "draft",
)  # fmt: skip
FAULTS: Final = {
    "one window block short": "windows",
    "full attention as a window": "windows",
    "half a chunk": "chunks",
    "one end too far": "windows",
    "the block before": "full",
    "the block behind": "windows",
    "nothing held": "windows",
    "failures untold": "two windows",
    "groups swapped": "windows",
    "keys shifted": "windows",
    "tables swapped": "windows",
    "the state before": "states",
    "the end before": "parts of states",
    "a group forgotten": "two windows",
    "another's blocks": "full",
    "nothing kept": "full",
    "flushed too late": "full",
    "a draft forgotten": "draft",
    "an indexer forgotten": "latents",
    "loads claimed": "windows",
    "the overwritten kept": "states",
}
"""What is wrong with the connector, and a model that shows it."""
STORED: Final = {
    "keys shifted": "compressed",
    "groups swapped": "windows",
    "the state before": "states",
    "the end before": "parts of states",
}
"""Of these, what is stored by a wrong name, and a model that shows it though nothing is loaded."""
CROWDED: Final = {"nothing kept", "flushed too late", "the overwritten kept"}
"""Of these, what shows only where blocks are another's at once."""
SECOND: Final = {"the overwritten kept"}
"""Of these, what shows only under vLLM's second model runner."""


def asked(
    model: pathlib.Path,
    *,
    store_when: str = "auto",
    load_when: str = "auto",
    capacity: str = "1MiB",
    role: str = "kv_both",
    **wanted: Any,
) -> str:
    """Return the JSON of a run of prompts of one shape."""
    extra: dict[str, Any] = {"store_when": store_when, "load_when": load_when}
    extra |= {"tiers": [f"cpu://?capacity={capacity}"], "weights": "digests"}
    transfer = {
        "kv_connector": "TieredKVConnector",
        "kv_connector_module_path": "tiered_kv.integrations.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return json.dumps({"model": str(model), "transfer": transfer, **wanted})


def run(vllm: Environment, model: pathlib.Path, **wanted: Any) -> Any:
    """Run prompts of one shape."""
    (answer,) = vllm.run("vllm_without_model.py", asked(model, **wanted), timeout_s=1200)
    return answer


@pytest.fixture(scope="session")
def seen(vllm: Environment, tiny_llama: pathlib.Path) -> dict[str, Any]:
    """Return what came of each wrong connector, by what is wrong: in one process, as most of a run is its start."""
    wanted: dict[str, dict[str, Any]] = {
        fault: {"shape": shape, "fault": fault, "prompts": 1000} for fault, shape in FAULTS.items()
    }
    for fault in CROWDED:
        wanted[fault] |= {"num_blocks": 40}
    for fault in SECOND:
        wanted[fault] |= {"num_blocks": 30, "runner": 2, "late": True, "prompts": 5000}
    runs = [asked(tiny_llama, **each) for each in wanted.values()]  # they end with the first wrong byte
    return dict(zip(wanted, vllm.run("vllm_without_model.py", *runs, timeout_s=1200), strict=True))


@pytest.mark.parametrize(("shape", "store_when"), [*((shape, "computed") for shape in SHAPES), ("full", "evicted")])
def test_no_step_reads_a_wrong_byte(vllm: Environment, tiny_llama: pathlib.Path, shape: str, store_when: str) -> None:
    """Prompts come, end, are preempted and aborted, and bring hints; caches are reset and small; nothing is left."""
    answer = run(vllm, tiny_llama, shape=shape, prompts=400, store_when=store_when)
    assert (answer["wrong"], answer["held"]) == ([], 0)
    assert answer["loaded"] > 4_000
    assert answer["hints"] > 100


@pytest.mark.parametrize("shape", ["full", "states", "parts of states"])
def test_no_step_reads_a_wrong_byte_of_the_second_runner(
    vllm: Environment, tiny_llama: pathlib.Path, shape: str
) -> None:
    """The same where vLLM writes to new blocks before it says whose they were, few of them, and copies are late."""
    answer = run(vllm, tiny_llama, shape=shape, prompts=300, store_when="computed", num_blocks=50, runner=2, late=True)
    assert (answer["wrong"], answer["held"]) == ([], 0)
    assert answer["loaded"] > 1_000


def test_who_waits_for_room_is_looked_up_now_and_then(vllm: Environment, tiny_llama: pathlib.Path) -> None:
    """Where many wait and are preempted vLLM asks for one of them in each step; what is gone by its turn is no harm."""
    crowded: dict[str, Any] = {"shape": "full", "prompts": 200, "store_when": "computed", "num_blocks": 40}
    runs = [asked(tiny_llama, clock=clock, **crowded) for clock in ("hours", "still")]
    each_step, rarely = vllm.run("vllm_without_model.py", *runs, timeout_s=1200)
    assert [(each["wrong"], each["held"]) for each in (each_step, rarely)] == [([], 0)] * 2
    assert rarely["looked"] < each_step["looked"] / 2


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_connector_is_seen(seen: dict[str, Any], fault: str) -> None:
    """The test above would find it: within hundreds of prompts, or thousands, bytes differ, or vLLM itself objects."""
    assert seen[fault]["wrong"] or seen[fault]["raised"]


def test_what_is_stored_is_what_it_is_named_by(vllm: Environment, tiny_llama: pathlib.Path) -> None:
    """Each block of each group, whoever asks for it later; and it is seen where one is not, before anybody does."""
    wanted = [{"shape": shape} for shape in dict.fromkeys([*STORED.values(), "draft", "replayed"])]
    wanted += [{"shape": shape, "fault": fault} for fault, shape in STORED.items()]
    runs = [asked(tiny_llama, store_when="computed", role="kv_producer", prompts=30, **each) for each in wanted]
    answers = vllm.run("vllm_without_model.py", *runs, timeout_s=1200)
    right, wrong = answers[: -len(STORED)], answers[-len(STORED) :]
    assert [(each["wrong"], each["held"], each["loaded"]) for each in right] == [([], 0, 0)] * len(right)
    assert all(each["stored"] > 50 for each in right)
    assert all(each["wrong"] and not each["raised"] for each in wrong)


def test_a_model_with_windows_loads_half_of_the_bytes(vllm: Environment, tiny_llama: pathlib.Path) -> None:
    """Of gpt-oss's geometry, a window of 128 tokens in each second layer, at most .56 of what all layers have."""
    # Of so many blocks a prompt's are few enough to be held for copies that are slow, and none is passed over.
    wanted = {"shape": "gpt-oss", "prompts": [1200, 1600, 2000], "num_blocks": 1200, "engine": {"max_model_len": 2048}}
    answer = run(vllm, tiny_llama, store_when="computed", load_when="always", capacity="16MiB", **wanted)
    assert (answer["wrong"], answer["held"]) == ([], 0)
    assert answer["loaded"] == (1200 - 16) + (1600 - 16) + (2000 - 16)
    assert answer["loaded_bytes"] / (answer["loaded"] * answer["token_bytes"]) <= 0.56


def test_a_prefix_ends_inside_of_a_block(vllm: Environment, tiny_llama: pathlib.Path) -> None:
    """Of blocks of 64 tokens, in each of which vLLM matches prefixes by 16, a prompt is loaded up to its last 16."""
    prompts = [50, 100, 250, 333]
    runs = [
        asked(tiny_llama, store_when="computed", load_when="always", capacity="16MiB", shape=shape, prompts=prompts)
        for shape in ("states", "parts of states")
    ]
    whole, parts = vllm.run("vllm_without_model.py", *runs, timeout_s=1200)
    assert [(each["wrong"], each["held"]) for each in (whole, parts)] == [([], 0), ([], 0)]
    assert whole["tokens"] == 2 * sum(prompts) - (0 + 64 + 192 + 320)
    assert parts["tokens"] == 2 * sum(prompts) - (48 + 96 + 240 + 320)


def test_of_short_windows_is_stored_what_a_prompts_end_needs(vllm: Environment, tiny_llama: pathlib.Path) -> None:
    """And what is needed where another began alike, from the second on; or at each step, if vLLM is told to keep it."""
    wanted: dict[str, Any] = {"store_when": "computed", "load_when": "always", "capacity": "16MiB"}
    wanted |= {"shape": "compressed", "prompts": [300, 300, 320], "shared": 200, "num_blocks": 400}
    kept = "prefix_cache_retention_interval"
    runs = [asked(tiny_llama, **wanted, engine=engine) for engine in ({}, {kept: None}, {kept: 128})]
    ends, dense, sparse = vllm.run("vllm_without_model.py", *runs, timeout_s=1200)
    assert [(each["wrong"], each["held"]) for each in (ends, dense, sparse)] == [([], 0)] * 3
    computed_again = (300 - 256) + (300 - 256) + (320 - 256)
    assert ends["tokens"] == 300 + 300 + (320 - 192) + computed_again
    assert dense["tokens"] == 300 + (300 - 192) + (320 - 192) + computed_again
    assert sparse["tokens"] == 300 + (300 - 128) + (320 - 192) + computed_again


@pytest.mark.parametrize(
    ("shape", "num_blocks", "prompts", "at_once"),
    [("compressed", 80, [378] * 3, 128), ("windows", 57, [440] * 2, 320)],
)
def test_nobody_waits_for_blocks_of_those_that_wait(
    vllm: Environment, tiny_llama: pathlib.Path, shape: str, num_blocks: int, prompts: list[int], at_once: int
) -> None:
    """With windows vLLM lets several have blocks for loads, and none is left for what each is to compute.

    Control: it does, and is stuck for good, where the connector has room for all.
    """
    wanted: dict[str, Any] = {"shape": shape, "num_blocks": num_blocks, "prompts": prompts, "at_once": at_once}
    runs = [
        asked(tiny_llama, store_when="computed", load_when="always", capacity="16MiB", fault=fault, **wanted)
        for fault in ("", "room for all")
    ]
    ours, stuck = vllm.run("vllm_without_model.py", *runs, timeout_s=1200)
    assert [(each["wrong"], each["held"]) for each in (ours, stuck)] == [([], 0)] * 2
    assert (ours["raised"], ours["loaded"]) == ("", len(prompts) * at_once)
    assert "wait for each other's blocks" in stuck["raised"]


def test_a_state_that_only_the_tiers_have_is_found(vllm: Environment, tiny_llama: pathlib.Path) -> None:
    """Where vLLM's own cache has all of attention and no state, as states are what it drops first.

    Control: why the connector does not claim ``supports_divergent_local_hybrid_hits``. vLLM would then ask for what is
    behind its attention alone, and compute the prompt as nothing is.
    """
    wanted: dict[str, Any] = {"shape": "states", "prompts": [200, 333], "forgets": "states"}
    runs = [
        asked(tiny_llama, store_when="computed", load_when="always", capacity="16MiB", fault=fault, **wanted)
        for fault in ("", "hits completed")
    ]
    ours, claimed = vllm.run("vllm_without_model.py", *runs, timeout_s=1200)
    assert [(each["wrong"], each["raised"], each["held"]) for each in (ours, claimed)] == [([], "", 0)] * 2
    assert ours["tokens"] == 2 * (200 + 333) - (192 + 320)
    assert claimed["tokens"] == 2 * (200 + 333)
