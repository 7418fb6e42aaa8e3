"""A real vLLM on a CPU, end to end: what it generates with us below it is what it generates alone."""

import contextlib
import json
import pathlib
import shutil
import signal
import subprocess
from typing import Any, Final

import pytest

from environments import Environment, answer_of
from folders import NVME, STALLING, flip_a_byte_in_each_record
from runs import PROMPTS, Answer, Runs, hits_of
from tests.support.serving import serving
from tiered_kv import CacheLimits, TieredKVServer

HITS: Final = 2 * 9 * 32
"""Tokens of both prompts that are full blocks: what can be found of them."""
SEVERAL: Final = {"tensor_parallel_size": 2}


@pytest.fixture(scope="session")
def alone(vllm: Environment, tiny_llama: pathlib.Path) -> list[list[int]]:
    """Return what the engine generates without us, per prompt."""
    wanted = {"model": str(tiny_llama), "prompts": list(range(8)), "rounds": 2}
    first, second = vllm.run("vllm_generate.py", json.dumps(wanted))["rounds"]
    assert first["tokens"] == second["tokens"], "what to compare with depends on chance"
    assert first["tokens"][0] != first["tokens"][1], "what is generated does not depend on the prompt"
    tokens: list[list[int]] = first["tokens"]
    return tokens


@pytest.fixture
def runs(vllm: Environment, tiny_llama: pathlib.Path, tmp_path: pathlib.Path) -> Runs:
    """Return runs over an empty folder."""
    return Runs(vllm, tiny_llama, tmp_path)


@pytest.fixture(scope="session")
def filled(
    vllm: Environment, tiny_llama: pathlib.Path, alone: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    """Return a folder in which a first process has stored the blocks of both prompts."""
    folder = tmp_path_factory.mktemp("filled")
    answer = Runs(vllm, tiny_llama, folder).run(rounds=2)
    cold, warm = answer["rounds"]
    assert answer["lookups"]["never stored"] == HITS // 32, "our metrics say what the first round missed, and why"
    assert cold["tokens"] == warm["tokens"] == alone[:2]
    assert sum(cold["cached"]) == 0
    assert sum(warm["cached"]) == HITS
    return folder


@pytest.fixture
def warm(filled: pathlib.Path, runs: Runs) -> Runs:
    """Return runs over a copy of what the first process has stored."""
    shutil.copytree(filled, runs.folder, dirs_exist_ok=True)
    return runs


def test_a_restarted_engine_generates_the_same_from_storage(warm: Runs, alone: list[list[int]]) -> None:
    """A new process finds all full blocks of the prompts, the engine counts them, and the tokens are the same."""
    answer = warm.run()
    assert answer["rounds"][0]["tokens"] == alone[:2]
    assert hits_of(answer) == sum(answer["rounds"][0]["cached"]) == HITS
    assert answer["counters"]["vllm:tiered_kv_load_blocks"] == HITS // 32
    assert answer["lookups"] == {"asked": HITS // 32}, "our metrics count each request once"
    by_source = {name: answer["labelled"][f"vllm:prompt_tokens_cached_by_source {name}"] for name in ("host", "disk")}
    assert by_source == {"host": 0, "disk": HITS}, "vLLM was told where they were"
    assert answer["labelled"]["vllm:tiered_kv_load_bytes nvme"] == HITS // 32 * 32 * 1024


def test_one_of_several_connectors(runs: Runs, alone: list[list[int]]) -> None:
    """VLLM's own holds ours and another one: what ours counts is found by the name of its class."""
    ours = json.loads(runs.arguments())["transfer"]
    others = {"shared_storage_path": str(runs.folder / "others")}
    another = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": others}
    several = {"connectors": [ours, another]}
    transfer = {**ours, "kv_connector": "MultiConnector", "kv_connector_extra_config": several}
    del transfer["kv_connector_module_path"]
    for hits in (0, HITS):
        answer = runs.run(transfer=transfer)
        assert answer["rounds"][0]["tokens"] == alone[:2]
        assert hits_of(answer) == hits


def test_hints_of_requests_are_heard(runs: Runs, alone: list[list[int]]) -> None:
    """By the parameters that vLLM's server takes: known actions are acted on, others counted."""
    kinds = "kv.pin", "kv.retain", "kv.unknown"
    actions = [{"action_id": kind, "action_type": kind, "action_version": "1.0", "payload": {}} for kind in kinds]
    params = {"kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": actions}}
    answer = runs.run(tiers=["cpu://?capacity=64MiB"], extra={"hint_share": 0.5}, params=params, rounds=2)
    assert [each["tokens"] for each in answer["rounds"]] == [alone[:2]] * 2
    counters = answer["counters"]
    assert (counters["vllm:tiered_kv_hints"], counters["vllm:tiered_kv_hints_ignored"]) == (4 * 2, 4)
    assert counters["vllm:tiered_kv_hint_blocks"] > 0


def test_what_is_loaded_is_what_is_used(warm: Runs, alone: list[list[int]]) -> None:
    """Where the loaded pages are wiped the tokens differ: the tests above would see wrong bytes."""
    answer = warm.run_faulty("WipingConnector")
    assert hits_of(answer) == HITS
    assert all(ours != right for ours, right in zip(answer["rounds"][0]["tokens"], alone, strict=False))


def test_a_block_that_is_evicted_before_its_load_is_computed(warm: Runs, alone: list[list[int]]) -> None:
    """What is gone between look-up and load is computed, what is left is loaded, and the tokens are right."""
    answer = warm.run_faulty("EvictingConnector")
    assert answer["rounds"][0]["tokens"] == alone[:2]
    assert answer["counters"]["vllm:tiered_kv_load_blocks"] == 2 * 4
    assert answer["counters"]["vllm:tiered_kv_load_blocks_lost"] == 2 * 5


def test_a_prefix_longer_than_the_cpu_tier(warm: Runs, alone: list[list[int]]) -> None:
    """As much of it is loaded as fits there, the rest is computed, and the tokens are right; and so again and again."""
    answer = warm.run(tiers=["cpu://?capacity=160KiB", NVME[1]], rounds=3)  # 5 blocks, and the prompts have 9 each
    assert [each["tokens"] for each in answer["rounds"]] == [alone[:2]] * 3
    assert answer["counters"]["vllm:tiered_kv_load_blocks"] > 0
    assert answer["counters"]["vllm:tiered_kv_load_blocks_lost"] > 0


def test_routers_hear_of_the_tiers_in_the_engines_own_events(runs: Runs, vllm: Environment) -> None:
    """By vLLM's publisher and decoder: which medium has what the GPU computed, and what a tier has evicted.

    Also where a router forgets all when vLLM resets its prefix cache: it is told everything again.
    """
    wanted: Answer = {"prompts": [0, 1, 2, 3], "tiers": ["cpu://?capacity=512KiB", NVME[1]], "rounds": 2}
    _check_events(vllm.run("vllm_events.py", runs.arguments(**wanted)))


def test_routers_hear_of_a_servers_tiers_too(runs: Runs, vllm: Environment) -> None:
    """The same of an engine whose blocks a host's server keeps."""
    tiers = (
        {"medium": "cpu", "capacity": "512KiB"},
        {"medium": "nvme", "path": runs.folder / "nvme", "capacity": "16MiB"},
    )
    with serving(runs.folder, *tiers, limits=CacheLimits()) as server:
        wanted: Answer = {"prompts": [0, 1, 2, 3], "tiers": None, "extra": {"connect": f"unix://{server.path}"}}
        _check_events(vllm.run("vllm_events.py", runs.arguments(**wanted, rounds=2)))


def _check_events(answer: Answer) -> None:
    """Check what a router knows in the end of four prompts, of which the CPU tier has room for less than two."""
    assert answer["is_told_right"]
    assert answer["known"]["STORAGE"] == 4 * 9
    assert 0 < answer["known"]["CPU"] <= 16
    assert answer["removed"]["CPU"] >= 4 * 9 - 16


def test_vllms_decoder_reads_what_our_own_publisher_sends(vllm: Environment, tmp_path: pathlib.Path) -> None:
    """Of any engine's blocks: what is in which tier, what was evicted, and each block's tokens and parent."""
    answer = vllm.run("vllm_decodes.py", tmp_path)
    assert answer["heard"] == [{"CPU": 4, "STORAGE": 4}, {"CPU": 2, "STORAGE": 2}]
    assert answer["is_told_right"]


def test_a_flipped_byte_on_disk_is_computed_again(warm: Runs, alone: list[list[int]]) -> None:
    """A block whose bytes have changed is never served: it, and what is behind it, is computed."""
    flip_a_byte_in_each_record(warm.folder, 32 * 1024)
    answer = warm.run()
    assert answer["rounds"][0]["tokens"] == alone[:2]
    assert answer["counters"]["vllm:tiered_kv_load_blocks_lost"] == HITS // 32


def test_stalled_storage_does_not_hold_up_the_engine(runs: Runs, alone: list[list[int]]) -> None:
    """Blocks that storage has, and gives after 30 s, are computed, after as long as the connector may wait: 5 s."""
    assert runs.run(tiers=STALLING)["rounds"][0]["tokens"] == alone[:2]
    found = runs.run(tiers=STALLING)
    assert hits_of(found) == HITS
    (runs.folder / "stall").write_text("30")
    answer = runs.run(tiers=STALLING)
    assert answer["rounds"][0]["tokens"] == alone[:2]
    assert answer["counters"]["vllm:tiered_kv_load_blocks_lost"] == HITS // 32
    assert answer["rounds"][0]["seconds"] < 30.0, "the engine has waited for storage"


def test_an_engine_that_is_killed_loses_nothing_settled(runs: Runs, vllm: Environment, alone: list[list[int]]) -> None:
    """What the tiers below had when the process was killed is found by the next one."""
    dying = vllm.start("vllm_generate.py", runs.arguments(connector="DyingConnector", module="vllm_faults", rounds=2))
    dying.communicate(timeout=300)
    assert dying.returncode == -signal.SIGKILL
    answer = runs.run()
    assert answer["rounds"][0]["tokens"] == alone[:2]
    assert hits_of(answer) == HITS


def test_two_ranks_store_and_load_their_parts(runs: Runs, alone: list[list[int]]) -> None:
    """With tensor parallelism each rank's part is stored, and found by two new processes."""
    cold = runs.run(engine=SEVERAL)
    assert cold["rounds"][0]["tokens"] == alone[:2]
    assert hits_of(cold) == 0
    warm = runs.run(engine=SEVERAL)
    assert warm["rounds"][0]["tokens"] == alone[:2]
    assert hits_of(warm) == HITS


@pytest.mark.parametrize("engine", [{}, SEVERAL], ids=["one rank", "two ranks"])
def test_engines_share_prefixes_by_a_server(engine: Answer, runs: Runs, alone: list[list[int]]) -> None:
    """By one setting: what an engine has computed another loads from the host's server, which outlives both."""
    tiers = {"medium": "cpu", "capacity": "4MiB"}, {"medium": "nvme", "path": runs.folder / "nvme", "capacity": "16MiB"}
    with serving(runs.folder, *tiers, limits=CacheLimits()) as server:
        wanted: Answer = {"engine": engine, "tiers": None, "extra": {"connect": f"unix://{server.path}"}}
        cold = runs.run(**wanted)
        warm = runs.run(**wanted)
    assert cold["rounds"][0]["tokens"] == warm["rounds"][0]["tokens"] == alone[:2]
    assert (hits_of(cold), hits_of(warm)) == (0, HITS)
    assert warm["labelled"]["vllm:prompt_tokens_cached_by_source host"] == HITS
    assert warm["counters"]["vllm:tiered_kv_load_blocks"] == HITS // 32


def test_an_engine_outlives_its_server(runs: Runs, vllm: Environment, alone: list[list[int]]) -> None:
    """A server that restarts under an engine costs it some blocks, and no answer; then it uses the next one."""
    tiers = {"medium": "cpu", "capacity": "4MiB"}, {"medium": "nvme", "path": runs.folder / "nvme", "capacity": "16MiB"}
    with serving(runs.folder, *tiers, limits=CacheLimits()) as first:
        arguments = runs.arguments(tiers=None, extra={"connect": f"unix://{first.path}"}, rounds=100)
        engine = vllm.start("vllm_generate.py", arguments)
        while engine.poll() is None and not _num_hits(first):
            with contextlib.suppress(subprocess.TimeoutExpired):
                engine.wait(0.1)
    with serving(runs.folder, *tiers, limits=CacheLimits()) as second:
        output, _ = engine.communicate(timeout=300)
        assert _num_hits(second) > 0
    answer = answer_of(output)
    assert [each["tokens"] for each in answer["rounds"]] == [alone[:2]] * 100
    assert sum(answer["rounds"][-1]["cached"]) == HITS


def _num_hits(server: TieredKVServer) -> int:
    shares = TieredKVServer.health_at(server.path)["shares"]
    return sum(tier["hits"] for share in shares for tier in share.get("tiers", ()))


LARGE: Final = {
    "dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32", "block_size": None, "max_model_len": 2048,
    "kv_cache_memory_bytes": 256 << 20,
}  # fmt: skip
"""What the kernels for recurrent layers ask of an engine on a CPU; vLLM then makes blocks of 1,152 tokens.

Left to itself it keeps states in either type, as the CPU has it, and makes other blocks.
"""
HYBRIDS: Final[dict[str, tuple[Answer, int, int]]] = {
    "olmo3": ({"length": 600}, 18 * 32, 18 + 2),
    "gemma3": ({"length": 600}, 18 * 32, 18 + 5 * 2),
    "gpt_oss": ({"length": 600}, 18 * 32, 18 + 2),
    "qwen3_next": ({"length": 1500, "engine": LARGE}, 1152, 1 + 3),
    "qwen3_next, inside of a block": ({"length": 1500, "engine": {**LARGE, "prefix_match_unit": 32}}, 1472, 2 + 3),
}
"""How each model is run, the tokens of a prompt that are found, and the blocks that are needed there.

Windows are of two blocks, in one KV group or five; of states there are three groups, and one block is needed of each.
"""


@pytest.mark.parametrize("shape", HYBRIDS)
def test_models_of_several_kv_groups(vllm: Environment, tmp_path: pathlib.Path, shape: str) -> None:
    """A model with windows or states is served after a restart too, with what it says alone, and loads what it needs.

    Wiped, what is loaded is missed: it is used.
    """
    model = tmp_path / "model"
    vllm.run("make_windows.py", model, shape.partition(",")[0])
    wanted, num_tokens, num_blocks = HYBRIDS[shape]
    alone = vllm.run("vllm_generate.py", json.dumps({"model": str(model), "prompts": PROMPTS, **wanted}))
    tokens = alone["rounds"][0]["tokens"]
    assert tokens[0] != tokens[1], "what is generated does not depend on the prompt"
    runs = Runs(vllm, model, tmp_path)
    tiers: list[Any] = ["cpu://?capacity=64MiB", "file://{folder}/nvme?capacity=128MiB"]
    cold, warm = runs.run(tiers=tiers, **wanted), runs.run(tiers=tiers, **wanted)
    assert cold["rounds"][0]["tokens"] == warm["rounds"][0]["tokens"] == tokens
    assert (hits_of(cold), hits_of(warm)) == (0, 2 * num_tokens)
    assert warm["counters"]["vllm:tiered_kv_load_blocks"] == 2 * num_blocks
    assert warm["counters"]["vllm:tiered_kv_loaded_tokens"] == 2 * num_tokens
    wiped = runs.run_faulty("WipingConnector", tiers=tiers, **wanted)
    assert wiped["rounds"][0]["tokens"] != tokens


def test_states_by_vllms_second_runner(vllm: Environment, tmp_path: pathlib.Path) -> None:
    """Two prompts, for which there are too few blocks, say what they say alone, and again by what was stored of them.

    It begins states in the blocks of the one that is preempted before we hear of that. That none of these is stored
    for another is seen by `test_no_step_reads_a_wrong_byte_of_the_second_runner`: so small a model forgets states soon.
    """
    model = tmp_path / "model"
    vllm.run("make_windows.py", model, "qwen3_next")
    wanted: Answer = {"length": 1500, "num_tokens": 4}
    roomy = json.dumps({"model": str(model), "prompts": PROMPTS, "engine": LARGE, **wanted})
    alone = vllm.run("vllm_interpreted.py", roomy, 2, timeout_s=600)["rounds"][0]["tokens"]
    engine = {**LARGE, "num_gpu_blocks_override": 12}
    runs = Runs(vllm, model, tmp_path)
    given = runs.arguments(tiers=["cpu://?capacity=256MiB"], extra=COMPUTED, rounds=2, engine=engine, **wanted)
    answer = vllm.run("vllm_interpreted.py", given, 2, timeout_s=600)
    assert [each["tokens"] for each in answer["rounds"]] == [alone, alone]
    assert hits_of(answer) == sum(answer["rounds"][1]["cached"]) > 0


def test_a_window_that_is_gone_before_its_load_is_computed(vllm: Environment, tmp_path: pathlib.Path) -> None:
    """VLLM cannot take a part of what several groups load: the whole prompt is computed, and right; and so again."""
    model = tmp_path / "model"
    vllm.run("make_windows.py", model, "gpt_oss")
    alone = vllm.run("vllm_generate.py", json.dumps({"model": str(model), "prompts": PROMPTS}))["rounds"][0]["tokens"]
    runs = Runs(vllm, model, tmp_path)
    runs.run()
    answer = runs.run_faulty("EvictingConnector", rounds=2)
    assert [each["tokens"] for each in answer["rounds"]] == [alone, alone]
    assert answer["counters"]["vllm:tiered_kv_load_blocks"] == 0
    assert answer["counters"]["vllm:tiered_kv_load_blocks_lost"] > 0


def test_requests_at_once_with_preemption(runs: Runs, vllm: Environment, tiny_llama: pathlib.Path) -> None:
    """Eight requests that outgrow the KV cache are preempted, come back from us, and are answered right."""
    wanted: Answer = {"prompts": list(range(8)), "length": 96, "num_tokens": 160}
    alone = vllm.run("vllm_generate.py", json.dumps({"model": str(tiny_llama), **wanted}))["rounds"][0]["tokens"]
    answer = vllm.run("vllm_async.py", runs.arguments(**wanted, rounds=2))
    assert [each["tokens"] for each in answer["rounds"]] == [alone, alone]
    assert answer["preemptions"] > 0
    assert hits_of(answer) == 8 * 2 * 32, "of the second round; vLLM counts requests that come back apart"
    assert answer["counters"]["vllm:tiered_kv_load_blocks"] > 8 * 2, "requests that were preempted came back from us"


ROOMY: Final = ["cpu://?capacity=16MiB"]
COMPUTED: Final = {"store_when": "computed"}
"""Over memory alone, of less than four times vLLM's blocks, blocks are else stored when vLLM is about to drop them."""


@pytest.mark.parametrize("store_when", ["computed", "evicted"])
def test_requests_that_end_at_any_step_leave_nothing_behind(
    runs: Runs, vllm: Environment, alone: list[list[int]], store_when: str
) -> None:
    """Before their look-up, while they load, compute and store: all blocks come back, and others are answered right."""
    wanted: Answer = {"way": "aborted", "tiers": ROOMY, "extra": {"store_when": store_when}, "rounds": 8}
    assert vllm.run("vllm_steps.py", runs.arguments(**wanted)) == {"tokens": alone[:2], "left": {}}


def test_a_preempted_request_is_stored_before_its_blocks_are_anothers(
    runs: Runs, vllm: Environment, alone: list[list[int]]
) -> None:
    """After each number of steps: what was computed is read first, and after the device has computed it."""
    answer = vllm.run("vllm_steps.py", runs.arguments(way="preempted", tiers=ROOMY, extra=COMPUTED, rounds=8))
    assert answer["tokens"] == [alone[:2]] * 16
    assert answer["flushed"] > 0
    assert answer["waited"], "a copy began without waiting for what the device was given before"
    assert answer["hits"] >= 8 * HITS // 32
    assert answer["left"] == {}


def test_nobody_is_preempted_for_blocks_that_are_free_soon(
    runs: Runs, vllm: Environment, alone: list[list[int]]
) -> None:
    """A request that has ended leaves them when they are copied; where vLLM isn't told of it, it preempts."""
    wanted: Answer = {"way": "kept", "tiers": ROOMY, "extra": COMPUTED, "num_tokens": 40}
    answer = vllm.run(
        "vllm_steps.py", runs.arguments(**wanted, engine={"num_gpu_blocks_override": 21, "max_model_len": 512})
    )
    assert answer["preemptions"] == [0, 1]
    assert answer["tokens"][0] == answer["tokens"][1]
    assert answer["tokens"][0][:16] == alone[1]
    assert answer["left"] == {}


@pytest.mark.parametrize("store_when", ["computed", "evicted"])
def test_a_reset_beneath_running_requests_never_fails(
    runs: Runs, vllm: Environment, alone: list[list[int]], store_when: str
) -> None:
    """Of an engine that only stores, after each number of steps: whatever is being copied."""
    wanted: Answer = {"way": "reset", "tiers": ROOMY, "extra": {"store_when": store_when}, "rounds": 14}
    given = json.loads(runs.arguments(**wanted))
    given["transfer"]["kv_role"] = "kv_producer"
    answer = vllm.run("vllm_steps.py", json.dumps(given))
    assert answer == {"tokens": [alone[:2]] * 14, "left": {}}


def test_what_vllms_own_cache_serves_is_not_forgotten_below(runs: Runs, vllm: Environment) -> None:
    """A prompt that vLLM never has to load stays in a tier that is too small for all that comes beside it.

    To say so waits for nothing: a step takes as long while the cache's event loop is busy.
    """
    wanted: Answer = {"way": "hot", "tiers": ["cpu://?capacity=1MiB"], "extra": COMPUTED, "rounds": 6}
    answer = vllm.run("vllm_steps.py", runs.arguments(**wanted))
    assert answer == {"has_waited": False, "is_there": True, "left": {}}


def test_what_cannot_work_is_refused_at_start(vllm: Environment, tiny_llama: pathlib.Path) -> None:
    """Who configures what would give wrong answers, or none, reads what to do about it before a request comes."""
    said = vllm.run("vllm_refusals.py", tiny_llama, variables={"HF_HUB_OFFLINE": "1"})
    right = "right", "latents", "in chunks", "groups", "window", "chunks", "hybrid", "sizes", "stages", "runner"
    for name in (*right, "latent window", "made anew", "images by hash", "no images"):
        assert said[name] == "nothing", name
    assert said["groups of ours"] == [
        [0, None, None, 16384, ["layer0"]],
        [1, 2, None, 16384, ["layer1"]],
        [2, None, None, 16384, ["layer0"]],
        [2, None, None, 32768, ["layer1"]],
        [3, 1, None, 128, ["layer3"]],
        [4, None, 64, 16384, ["layer4"]],
    ]
    assert said["path"] == "/kv/3", "each data parallel replica has a directory of its own"
    for name, words in {
        "policy": 'Set it to "recompute"',
        "no states": "mamba_cache_mode is 'none'",
        "states": "serve this model without this connector",
        "nothing kept": "no layer of this model keeps anything that a prefix needs",
        "subclass": "this model has RSWASpec",
        "one of them": "this model has RSWASpec",
        "an empty stage": "block table 0 has no layer in this pipeline stage",
        "pieces": "decode_context_parallel_size is 2",
        "sleep": "nothing" if vllm.recipe.python_of else "enable_sleep_mode: vLLM 0.32",  # 0.33 tells of it
        "hash": "PYTHONHASHSEED",
        "in one piece": "prefix caching and chunked prefill are both off",
        "images by number": "mm_processor_cache_gb is 0",
        "embeddings by number": "mm_processor_cache_gb is 0",
        "weights": '"weights"',
        "unknown": "load_timeout",
        "both": "leave out tiers",
        "version": "vLLM 0.32 and 0.33, and this is vLLM 0.40.1",
    }.items():
        assert words in said[name], name
