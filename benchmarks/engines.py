"""Below a real vLLM: our secondary tier beside vLLM's own ``fs`` tier, and what a restart costs until the first token.

Both tiers lie below vLLM's own manager and CPU tier, have the same chunks and the same disk, and take turns; a ratio is
the median over rounds, since a disk drifts. The time until the first token is a real engine's on a CPU, whose model is
small: the prompt computed, and its blocks loaded from NVMe by a new process.

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
PROMPT_TOKENS = 960


def tiers(vllm: Environment, num_rounds: int) -> dict[str, dict[str, float]]:
    """Return the median figures per tier and size, and print them."""
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(num_rounds):
        with tempfile.TemporaryDirectory(dir=pathlib.Path.cwd()) as folder:
            rounds.append(vllm.run(str(HERE / "_engines_vllm.py"), folder))
    cells = {
        name: {what: statistics.median(each[name][what] for each in rounds) for what in rounds[0][name]}
        for name in rounds[0]
    }
    print(f"{'':26}{'store':>22}{'promote':>32}")
    print(f"{'':26}{'GB/s':>8}{'ms':>8}{'all ms':>8}{'GB/s':>14}{'ms':>8}{'all ms':>8}   per 1,000 chunks")
    for name, each in cells.items():
        down, up = (
            [each[f"{what}_{unit}"] for unit in ("gb_s", "tier_ms", "manager_ms")] for what in ("store", "promote")
        )
        print(f"{name:26}{down[0]:8.2f}{down[1]:8.1f}{down[2]:8.1f}{up[0]:14.2f}{up[1]:8.1f}{up[2]:8.1f}")
    return cells


def ratios(cells: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return ours over vLLM's, and print them with their bars."""
    found = {}
    for size in SIZES:
        theirs = cells[f"vllm fs {size}"]
        for ours in OURS:
            mine = cells[f"{ours} {size}"]
            for what in ("store", "promote"):
                name = f"{ours} {size} {what}"
                found[name] = mine[f"{what}_gb_s"] / theirs[f"{what}_gb_s"]
                found[f"{name} scheduler"] = mine[f"{what}_tier_ms"] / theirs[f"{what}_tier_ms"]
                times = found[f"{name} scheduler"]
                print(f"{name:34} {found[name]:5.2f} x (bar {BARS[size]})   scheduler's time {times:5.2f} x (bar 0.5)")
    return found


def first_token(vllm: Environment) -> dict[str, float]:
    """Return the seconds until the first token of a prompt, computed, and loaded by a new process."""
    with tempfile.TemporaryDirectory(dir=pathlib.Path.cwd()) as folder:
        vllm.run("make_llama.py", f"{folder}/model", 0, 8, 512)
        transfer = {
            "kv_connector": "TieredKVConnector",
            "kv_connector_module_path": "tiered_kv.integrations.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"tiers": ["cpu://?capacity=256MiB", f"file://{folder}/nvme?capacity=1GiB"]},
        }
        wanted = {"model": f"{folder}/model", "length": PROMPT_TOKENS, "transfer": transfer, "prompts": [0]}
        seconds = {}
        for name, num_tokens in (("cold", 1), ("stored meanwhile", 16), ("warm after a restart", 1)):
            asked = json.dumps({**wanted, "num_tokens": num_tokens, "warm_up": [num_tokens]})
            answer = vllm.run("vllm_generate.py", asked)["rounds"][0]
            if num_tokens > 1:  # blocks are stored in the steps after those that computed them
                continue
            seconds[name] = answer["seconds"]
            took_ms, num_cached = answer["seconds"] * 1e3, answer["cached"][0]
            print(f"first token of {PROMPT_TOKENS}, {name}: {took_ms:.0f} ms, {num_cached} tokens from storage")
    return seconds


def main() -> None:
    """Measure, print tables, and JSON last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    vllm = Environment.of("vllm")
    if not vllm.is_built:
        print("vLLM's environment is not built: make test-engines")
        return
    cells = tiers(vllm, arguments.rounds)
    print(json.dumps({"tiers": cells, "ratios": ratios(cells), "first_token_s": first_token(vllm)}))


if __name__ == "__main__":
    main()
