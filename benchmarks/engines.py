"""Below a real vLLM: our secondary tier beside vLLM's ``fs`` tier, the first token after a restart, and decoding.

Both tiers lie below vLLM's own manager and CPU tier, have the same chunks and the same disk, and take turns; a ratio is
the median over rounds of the ratios in each, since a disk drifts. Neither flushes the disk and both pass by the page
cache; `_engines_vllm` says what else is alike, and what is not. In the same round stands what the disk gives to bare
reads and writes of as many bytes, since nobody can be faster than that. The time until the first token is a real
engine's on a CPU: the prompt computed in one thread, and its blocks loaded from NVMe by a new process. The model has
120 million random weights, so that computing takes seconds, as a large model's does on a GPU. What the connector costs
decoding is the time of 128 requests over that of an engine without one: `_engines_decode` says how.

vLLM is in an environment of its own, which `make test-engines` builds.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "engines"))

from environments import Environment  # noqa: E402 - where it lies is said above

SIZES = ("1MiB", "128KiB")
OURS = ("tiered_kv", "tiered_kv direct")
BARS = {"1MiB": 1.0, "128KiB": 2.0}
"""GB/s over those of vLLM's tier; of the scheduler's time at most half."""
UNITS = ("gb_s", "tier_ms", "manager_ms")
PROMPT_TOKENS = 1984
LAYERS, HIDDEN_SIZE = 12, 1024
"""Of the model for the first token: 48 KiB of KV a token."""


DECODED = {"": (2, 128), "_22ms": (4, 256)}
"""Layers and hidden size of the models that decode: a tiny one, and one of some 22 ms a step on two cores."""
DECODE_BARS = {
    "decode_cpu_over_none": 1.15, "decode_nvme_over_none": 1.2, "decode_cpu_over_none_22ms": 1.05,
    "decode_nvme_over_none_22ms": 1.05, "longest_step_over_none": 1.3,
}  # fmt: skip

Cells = dict[str, dict[str, float]]


def tiers(vllm: Environment, num_rounds: int, num_mib: int) -> list[Cells]:
    """Return the figures per tier and size of each round, and print their medians."""
    with tempfile.TemporaryDirectory(dir=pathlib.Path.cwd()) as folder:
        rounds: list[Cells] = vllm.run(str(HERE / "_engines_vllm.py"), folder, num_rounds, num_mib)
    print(f"{'':26}{'store':>22}{'promote':>32}")
    print(f"{'':26}{'GB/s':>8}{'ms':>8}{'all ms':>8}{'GB/s':>14}{'ms':>8}{'all ms':>8}   per 1,000 chunks")
    for name in rounds[0]:
        down, up = (
            [statistics.median(each[name][f"{what}_{unit}"] for each in rounds) for unit in UNITS]
            for what in ("store", "promote")
        )
        print(f"{name:26}{down[0]:8.2f}{down[1]:8.1f}{down[2]:8.1f}{up[0]:14.2f}{up[1]:8.1f}{up[2]:8.1f}")
    return rounds


def ratios(rounds: list[Cells]) -> dict[str, float]:
    """Return ours over vLLM's, the median over rounds, and print them with their bars."""

    def median(size: str, tier: str, figure: str) -> float:
        return statistics.median(each[f"{tier} {size}"][figure] / each[f"vllm fs {size}"][figure] for each in rounds)

    found = {}
    for size in SIZES:
        for what in ("store", "promote"):
            disk = median(size, "bare disk", f"{what}_gb_s")
            for ours in OURS:
                name = f"{ours} {size} {what}"
                found[name] = median(size, ours, f"{what}_gb_s")
                found[f"{name} scheduler"] = median(size, ours, f"{what}_tier_ms")
                print(
                    f"{name:34} {found[name]:5.2f} x (bar {BARS[size]}, the disk {disk:5.2f} x)   "
                    f"scheduler's time {found[f'{name} scheduler']:5.2f} x (bar 0.5)"
                )
    return found


def first_token(vllm: Environment) -> dict[str, float]:
    """Return the seconds until the first token of a prompt, computed, and loaded by a new process."""
    with tempfile.TemporaryDirectory(dir=pathlib.Path.cwd()) as folder:
        vllm.run("make_llama.py", f"{folder}/model", 0, LAYERS, HIDDEN_SIZE)
        transfer = {
            "kv_connector": "TieredKVConnector",
            "kv_connector_module_path": "tiered_kv.integrations.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"tiers": ["cpu://?capacity=256MiB", f"file://{folder}/nvme?capacity=1GiB"]},
        }
        engine = {"max_model_len": 2048, "kv_cache_memory_bytes": 256 << 20}
        prompt = {"length": PROMPT_TOKENS, "prompts": [0]}
        wanted = {"model": f"{folder}/model", "transfer": transfer, "engine": engine, **prompt}
        seconds = {}
        for name, num_tokens in (("cold", 1), ("stored meanwhile", 16), ("warm after a restart", 1)):
            asked = json.dumps({**wanted, "num_tokens": num_tokens, "warm_up": [num_tokens]})
            answer = vllm.run("vllm_generate.py", asked, timeout_s=900)["rounds"][0]
            if num_tokens > 1:  # blocks are stored in the steps after those that computed them
                continue
            seconds[name] = answer["seconds"]
            took_ms, num_cached = answer["seconds"] * 1e3, answer["cached"][0]
            print(f"first token of {PROMPT_TOKENS}, {name}: {took_ms:.0f} ms, {num_cached} tokens from storage")
    return seconds


def decode(vllm: Environment, num_rounds: int, num_requests: int, num_tokens: int) -> dict[str, float]:
    """Return what connectors cost decoding, as ratios to none: of all time, and of the longest step with NVMe."""
    found: dict[str, float] = {}
    for suffix, (layers, hidden_size) in DECODED.items():
        with tempfile.TemporaryDirectory(dir=pathlib.Path.cwd()) as folder:
            vllm.run("make_llama.py", f"{folder}/model", 0, layers, hidden_size)
            asked = folder, f"{folder}/model", num_rounds, num_requests, num_tokens
            rounds = vllm.run(str(HERE / "_engines_decode.py"), *asked, timeout_s=3000)

        def median(name: str, what: str, rounds: list[Cells] = rounds) -> float:
            return statistics.median(each[name][what] for each in rounds)

        steps = median("none", "num_steps")
        print(
            f"{layers} layers of {hidden_size}: {median('none', 's') / steps * 1e3:.1f} ms a step without a connector"
        )
        for name in ("cpu", "nvme", "fs"):
            found[f"decode_{name}_over_none{suffix}"] = median(name, "s") / median("none", "s")
        found[f"longest_step_over_none{suffix}"] = median("nvme", "longest_s") / median("none", "longest_s")
    for name, ratio in found.items():
        print(f"{name:32} {ratio:5.2f}" + (f"   (bar {DECODE_BARS[name]})" if name in DECODE_BARS else ""))
    return found


def main() -> None:
    """Measure, print tables, and JSON last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="a little of it, to see that it runs")
    parser.add_argument("--only", choices=("tiers", "first-token", "decode"), help="a part of it")
    arguments = parser.parse_args()
    vllm = Environment.of("vllm")
    if not vllm.is_built:
        print("vLLM's environment is not built: make test-engines")
        print("{}")
        return
    if arguments.only == "decode":
        size = (1, 8, 40) if arguments.smoke else (4, 128, 200)
        print(json.dumps(decode(vllm, *size)))
        return
    rounds, seconds = [], {}
    if arguments.only != "first-token":
        rounds = tiers(vllm, *((1, 16) if arguments.smoke else (arguments.rounds, 256)))
    decoded = {}
    if arguments.only is None and not arguments.smoke:
        decoded = decode(vllm, 4, 128, 200)
    if arguments.only != "tiers" and not arguments.smoke:
        seconds = first_token(vllm)
    said = {"rounds": rounds, "ratios": ratios(rounds) if rounds else {}, "first_token_s": seconds, **decoded}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
