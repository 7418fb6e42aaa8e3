"""Our chain as a secondary tier below vLLM's own CPU tier, by vLLM's own manager."""

import json
import pathlib
from typing import Any

import pytest

from environments import Environment

Answer = dict[str, Any]


@pytest.fixture(scope="session")
def scenarios(vllm: Environment, tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """Return what came of each of `vllm_scenarios`."""
    answers: Answer = vllm.run("vllm_scenarios.py", tmp_path_factory.mktemp("scenarios"))
    return answers


def test_chunks_go_down_and_come_up_again(scenarios: Answer) -> None:
    """What was stored is found after a restart, byte for byte; another KV group's chunks of the same hash are not."""
    assert scenarios["promoted"] == {"found": [8, 0], "values": [1, 2, 3, 4, 5, 6, 7, 8]}


def test_what_is_in_flight_is_never_a_hit(scenarios: Answer) -> None:
    """A chunk is found when vLLM's memory was read, not before; while storage stalls it is right, or not there."""
    assert scenarios["in_flight"] == {"at_once": False, "right": True}


def test_a_second_store_takes_no_place(scenarios: Answer) -> None:
    """Chunks that are there already are passed over."""
    assert scenarios["stored_twice"] == {"written": 0, "ready": 0}


def test_a_store_that_fails_keeps_what_was_there(scenarios: Answer) -> None:
    """Storage that is full loses nothing that it had."""
    assert scenarios["store_fails"] == {"found": 8, "values": [1, 2, 3, 4, 5, 6, 7, 8]}


def test_a_partial_promotion_keeps_exactly_what_succeeded(scenarios: Answer) -> None:
    """A flipped bit on disk ends the prefix; what came before it stays, and nobody is given wrong bytes."""
    assert scenarios["flipped"] == {"found": 5, "values": [1, 2, 3, 4, 5]}


def test_jobs_that_are_loaded_together_come_short_alone(scenarios: Answer) -> None:
    """Loads that wait are made as one; a flipped bit in one job costs that chunk, and vLLM keeps all the others."""
    assert scenarios["together"] == {"whole": [0, 2], "kept": [3, 4, 6], "values": [1, 2, 3, 4, 5, 7, 8]}


def test_a_job_that_cannot_be_done_ends_and_holds_up_no_other(scenarios: Answer) -> None:
    """What vLLM gave together with it fails with it, as it is one load; stores are made all the same."""
    assert scenarios["one_is_wrong"] == [[0, False], [1, False], [2, True]]


def test_a_prefix_longer_than_vllms_cpu_tier_leaves_nothing_behind(scenarios: Answer) -> None:
    """VLLM's manager evicts its head for its tail. What it is given is right, and the next prompt is served."""
    assert scenarios["longer_than_vllms"] == {"is_right": True, "then": 3}


def test_duplicate_keys_in_a_batch_are_harmless(scenarios: Answer) -> None:
    """Each place is filled."""
    assert scenarios["duplicates"] == {"success": True, "values": [1, 2, 2, 3]}


def test_stalled_storage_is_a_miss(scenarios: Answer) -> None:
    """A request does not wait for storage that does not answer, and the next one does not try it again."""
    assert scenarios["stalled"]["found"] == [0, 0]


def test_a_load_that_stalls_holds_up_no_other(scenarios: Answer) -> None:
    """Loads take turns, so that the first ones read early; one that takes long loses its turn, and goes on."""
    assert scenarios["one_stalls"] == [1, 2, 3, 4, 5, 6, 7]


def test_beside_two_stores_others_wait_and_go_together(scenarios: Answer) -> None:
    """They begin once one of the two has ended, or once they are as much as one store takes; all of them end."""
    answer = scenarios["stores_wait"]
    assert answer["given"] == [[1], [1, 1], [1, 1], [1, 1], [1, 1, 3], [1, 1, 3]]
    assert answer["last"] == [1, 1, 3, 1]
    assert answer["ended"] == [[number, True] for number in range(6)]


def test_a_job_that_cannot_begin_ends(scenarios: Answer) -> None:
    """Whatever keeps it from that, a lack of memory too: vLLM waits for each."""
    assert scenarios["cannot_begin"] == [[0, False], [1, False]]


def test_a_request_is_counted_once_in_our_metrics(scenarios: Answer) -> None:
    """What it looked up, and why chunks were not found, also where vLLM asks again and again."""
    one = {"asked": 8.0, "never stored": 4.0}
    another = {"asked": 12.0, "never stored": 8.0}  # vLLM's own CPU tier has the others by now
    assert scenarios["counted"] == [one, one, another]


def test_the_disk_holds_no_more_than_it_may(scenarios: Answer) -> None:
    """The limit of space holds, and what is found of what was stored is right."""
    assert scenarios["quota"]["wrong"] == 0
    assert scenarios["quota"]["found"] > 0
    assert scenarios["quota"]["used"] <= 2 << 20


def test_a_second_shutdown_does_nothing(scenarios: Answer) -> None:
    """In the middle of work too; what was under way has ended, vLLM can be told, and it can unmap its memory."""
    assert scenarios["shut_down_twice"] == {"reported": 1, "is_unmapped": True}


def test_an_engine_restarts_from_our_tier(vllm: Environment, tiny_llama: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """VLLM's offloading connector with our tier below finds in a new process what the first one stored."""
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CPUTieringSpec",
            "spec_module_path": "vllm_cpu_offload",  # vLLM's own copies between a GPU and its host, not on a CPU
            "cpu_bytes_to_use": 16 << 20,
            "secondary_tiers": [
                {
                    "type": "TieredKVTier",
                    "module_path": "tiered_kv.integrations.vllm.offload_tier",
                    "tiers": [f"file://{tmp_path}/nvme?capacity=16MiB"],
                }
            ],
        },
    }
    wanted = json.dumps({"model": str(tiny_llama), "transfer": transfer, "rounds": 2})
    first, second = (vllm.run("vllm_generate.py", wanted) for _ in range(2))
    cold, *others = [each for answer in (first, second) for each in answer["rounds"]]
    assert all(each["tokens"] == cold["tokens"] for each in others)
    assert sum(cold["cached"]) == 0
    assert sum(second["rounds"][0]["cached"]) == 2 * 9 * 32
