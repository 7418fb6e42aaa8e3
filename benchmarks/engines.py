"""Below a real vLLM: our tier beside vLLM's ``fs`` tier, the first token after a restart and apart, and decoding.

Both tiers lie below vLLM's own manager and CPU tier, have the same chunks and the same disk, and take turns; a ratio is
the median over rounds of the ratios in each, since a disk drifts. Neither flushes the disk and both pass by the page
cache; `_engines_vllm` says what else is alike, and what is not. In the same round stands what the disk gives to bare
reads and writes of as many bytes, since nobody can be faster than that. The time until the first token is a real
engine's on a CPU: the prompt computed in one thread, and its blocks loaded from NVMe by a new process. The model has
120 million random weights, so that computing takes seconds, as a large model's does on a GPU. What the connector costs
decoding is the time of 128 requests over that of an engine without one: `_engines_decode` says how.

Apart, one vLLM computes prompts and stores, and another beside it loads them over a shared directory. Hostile is what
the connector costs where it can help nobody: `_engines_hostile` has the settings. Again is what it gives where prompts
come again while others are computed, beside vLLM's own offloading: `_engines_again`.

vLLM is in an environment of its own, which `make test-engines` builds.
"""

import argparse
import contextlib
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "engines"))

from asked import Asked, asked  # noqa: E402 - where it lies is said above
from environments import Environment  # noqa: E402 - where it lies is said above

SIZES = ("1MiB", "128KiB")
OURS = ("tiered_kv", "tiered_kv direct")
BARS = {"1MiB": 1.3, "128KiB": 1.6}
"""GB/s over those of vLLM's tier; of its CPU no more, and of the scheduler's time at most half."""
UNITS = ("gb_s", "tier_ms", "manager_ms", "cpu_ms")
PROMPT_TOKENS = 1984
LAYERS, HIDDEN_SIZE = 12, 1024
"""Of the model for the first token: 48 KiB of KV a token."""


DECODED = {"": (2, 128), "_22ms": (6, 256)}
"""Layers and hidden size of the models that decode: a tiny one, and one of some 22 ms a step on two fast cores."""
DECODE_BARS = {
    "decode_cpu_over_none": 1.15, "decode_nvme_over_none": 1.2, "decode_cpu_over_none_22ms": 1.05,
    "decode_nvme_over_none_22ms": 1.05, "decode_host_over_none_22ms": 1.15, "longest_step_over_none": 1.3,
}  # fmt: skip
HURT = {"tiny": ("", (4, 256)), "22ms": ("_22ms", DECODED["_22ms"])}
"""Those of the models that hostile settings are for, behind what their figures' names end in."""
HURT_LONGER = (
    "nothing comes again, memory", "nothing comes again, NVMe", "prompts of one block", "all is in vLLM's own cache",
    "preemption", "every other request is given up", "a tiny CPU tier over NVMe", "a slow tier, nothing comes again",
    "look-ups hang", "writes hang",
)  # fmt: skip
"""The settings for the larger one: of each kind some, and none whose figure depends on hits."""
ROUNDS_LONGER = 3
HOSTILE_BARS = {"throughput": 0.97, "ttft_p99": 1.05}
"""Over an engine without a connector, in the worst of all settings."""

PARTS = ("tiers", "first-token", "again", "apart", "decode", "hostile")

Cells = dict[str, dict[str, float]]


def tiers(vllm: Environment, num_rounds: int, num_mib: int) -> list[Cells]:
    """Return the figures per tier and size of each round, and print their medians."""
    with tempfile.TemporaryDirectory(dir=pathlib.Path.cwd()) as folder:
        rounds: list[Cells] = vllm.run(str(HERE / "_engines_vllm.py"), folder, num_rounds, num_mib)
    print(f"{'':26}{'store':>30}{'promote':>40}")
    head = "".join(f"{unit:>8}" for unit in ("GB/s", "ms", "all ms", "CPU ms"))
    print(f"{'':26}{head}      {head}   per 1,000 chunks; CPU of the whole process")
    for name in rounds[0]:
        down, up = (
            [statistics.median(each[name][f"{what}_{unit}"] for each in rounds) for unit in UNITS]
            for what in ("store", "promote")
        )
        print(
            f"{name:26}"
            + "      ".join(f"{each[0]:8.2f}" + "".join(f"{ms:8.1f}" for ms in each[1:]) for each in (down, up))
        )
    return rounds


def ratios(rounds: list[Cells]) -> dict[str, float]:
    """Return ours over vLLM's, the median over rounds, and print them with bars; of CPU and scheduler the worst."""

    def median(size: str, tier: str, figure: str) -> float:
        return statistics.median(each[f"{tier} {size}"][figure] / each[f"vllm fs {size}"][figure] for each in rounds)

    found: dict[str, float] = {}
    for ours in OURS:
        suffix = ours.removeprefix("tiered_kv").replace(" ", "_")
        worst = dict.fromkeys(("cpu", "scheduler"), 0.0)
        for size, what in ((size, what) for size in SIZES for what in ("store", "promote")):
            disk = median(size, "bare disk", f"{what}_gb_s")
            found[f"{what}_{size}_over_fs{suffix}"] = over = median(size, ours, f"{what}_gb_s")
            cpu, scheduler = median(size, ours, f"{what}_cpu_ms"), median(size, ours, f"{what}_tier_ms")
            worst = {"cpu": max(worst["cpu"], cpu), "scheduler": max(worst["scheduler"], scheduler)}
            print(
                f"{f'{ours} {size} {what}':34} {over:5.2f} x (bar {BARS[size]}, the disk {disk:5.2f} x)   "
                f"CPU {cpu:5.2f} x (bar 1.0)   scheduler's time {scheduler:5.2f} x (bar 0.5)"
            )
        found |= {f"{name}_over_fs{suffix}": ratio for name, ratio in worst.items()}
    return {name: round(ratio, 3) for name, ratio in found.items()}


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


def apart(vllm: Environment, num_prompts: int, length: int, layers: int, hidden_size: int) -> dict[str, float]:
    """Return the seconds until decode's first token, computed by itself, and of prompts that prefill has computed."""
    with tempfile.TemporaryDirectory(dir=pathlib.Path.cwd()) as folder, contextlib.ExitStack() as stack:
        vllm.run("make_llama.py", f"{folder}/model", 0, layers, hidden_size)
        shared = pathlib.Path(folder, "shared")

        def engine(role: str) -> Asked:
            transfer = {
                "kv_connector": "TieredKVConnector",
                "kv_connector_module_path": "tiered_kv.integrations.vllm",
                "kv_role": role,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "tiers": ["cpu://?capacity=256MiB", f"shared-fs://{shared}?capacity=2GiB"]
                },
            }
            sizes = {"max_model_len": 2048, "kv_cache_memory_bytes": 256 << 20}
            wanted = {"model": f"{folder}/model", "transfer": transfer, "engine": sizes, "length": length}
            return stack.enter_context(asked(vllm, wanted))

        prefill, decode = engine("kv_producer"), engine("kv_consumer")
        for each in (prefill, decode):
            each.ask(200, 1)  # what a first prompt costs beside
        seconds: dict[str, list[float]] = {"computed": [], "prefill": [], "handed over": [], "loaded": []}
        for number in range(num_prompts):
            seconds["computed"].append(decode.ask(100 + number, 1)["seconds"])
            num_stored = len(_records(shared)) + length // 32
            seconds["prefill"].append(prefill.ask(number, 1)["seconds"])
            began = time.perf_counter()
            while len(_records(shared)) < num_stored and prefill.process.poll() is None:
                time.sleep(0.002)
            seconds["handed over"].append(time.perf_counter() - began)
            answer = decode.ask(number, 1)
            if answer["cached"] < length // 32 * 32 - 32:
                sys.exit(f"decode found {answer['cached']} tokens only")
            seconds["loaded"].append(answer["seconds"])
    found = {f"apart_{name.replace(' ', '_')}_s": statistics.median(each) for name, each in seconds.items()}
    for name, median in found.items():
        print(f"{name:32} {median:7.3f}   median of {num_prompts} prompts of {length} tokens")
    return found


def _records(folder: pathlib.Path) -> list[pathlib.Path]:
    # None that is still being written: its name begins with a dot, and goes.
    return [path for path in folder.rglob("[!.]*") if path.is_file() and path.stat().st_size > 8192]


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
        for name in ("cpu", "nvme", "host", "fs"):
            found[f"decode_{name}_over_none{suffix}"] = median(name, "s") / median("none", "s")
        found[f"longest_step_over_none{suffix}"] = median("nvme", "longest_s") / median("none", "longest_s")
    for name, ratio in found.items():
        print(f"{name:32} {ratio:5.2f}" + (f"   (bar {DECODE_BARS[name]})" if name in DECODE_BARS else ""))
    return found


def hostile(vllm: Environment, num_rounds: int, share: float, names: Sequence[str], model: str) -> dict[str, float]:
    """Return the throughput and the 99th of 100 first tokens with our connector over those without, by setting.

    And where they take part those of vLLM's offloading, and of a connector that does nothing. Of the model whose steps
    take longer by other names, and unless some are named of `HURT_LONGER` alone.
    """
    suffix, sizes = HURT[model]
    if suffix:
        num_rounds, names = min(num_rounds, ROUNDS_LONGER), names or HURT_LONGER
    with tempfile.TemporaryDirectory(dir=pathlib.Path.cwd()) as folder:
        vllm.run("make_llama.py", f"{folder}/model", 0, *sizes)
        asked = f"{folder}/model", num_rounds, share, *names
        rounds = vllm.run(str(HERE / "_engines_hostile.py"), *asked, timeout_s=7200)
    found: dict[str, float] = {}
    print(f"{f'{sizes[0]} layers of {sizes[1]}':40}{'throughput':>12}{'TTFT p99':>12}{'TTFT median':>14}", end="")
    print(f"{'without, s':>12}{'step, ms':>10}{'p99, ms':>10}")
    for name, of_setting in rounds.items():

        def over(what: str, whose: str = "ours", of_setting: list[Cells] = of_setting) -> float:
            return statistics.median(each[whose][what] / each["none"][what] for each in of_setting)

        throughput, first = 1 / over("s"), over("ttft_p99_s")
        found |= {f"{name} throughput{suffix}": throughput, f"{name} ttft_p99{suffix}": first}
        others = [whose for whose in of_setting[0] if whose not in {"none", "ours"}]
        for whose in others:
            found |= {
                f"{name} throughput_{whose}{suffix}": 1 / over("s", whose),
                f"{name} ttft_p99_{whose}{suffix}": over("ttft_p99_s", whose),
            }
        bare_s, bare_p99_s, num_steps = (
            statistics.median(each["none"][what] for each in of_setting) for what in ("s", "ttft_p99_s", "num_steps")
        )
        print(
            f"{name:40}{throughput:12.3f}{first:12.3f}{over('ttft_median_s'):14.3f}"
            f"{bare_s:12.2f}{bare_s / num_steps * 1e3:10.1f}{bare_p99_s * 1e3:10.1f}"
        )
        for whose in others:
            line = "".join(f"{each:12.3f}" for each in (1 / over("s", whose), over("ttft_p99_s", whose)))
            print(f"{f'  {whose}':40}{line}{over('ttft_median_s', whose):14.3f}")
    worst = {
        f"hostile_throughput_worst{suffix}": min(found[f"{name} throughput{suffix}"] for name in rounds),
        f"hostile_ttft_p99_worst{suffix}": max(found[f"{name} ttft_p99{suffix}"] for name in rounds),
    }
    print(f"bars of the worst: {HOSTILE_BARS}")
    return {name: round(ratio, 3) for name, ratio in (found | worst).items()}


def again(vllm: Environment, num_rounds: int, share: float) -> dict[str, float]:
    """Return first tokens and throughput of prompts that come again, ours over those without and over vLLM's `fs`."""
    suffix, sizes = HURT["22ms"]
    with tempfile.TemporaryDirectory(dir=pathlib.Path.cwd()) as folder:
        vllm.run("make_llama.py", f"{folder}/model", 0, *sizes)
        rounds = vllm.run(str(HERE / "_engines_again.py"), f"{folder}/model", num_rounds, share, timeout_s=3000)
    names = {"ttft_median": "ttft_median_s", "ttft_p99": "ttft_p99_s", "time": "s"}
    print(f"{'of 64 prompts':20}{'first token, median':>22}{'p99':>10}{'all, s':>10}")
    for engine in ("none", "ours", "fs"):
        median, p99, took_s = (statistics.median(each[engine][name] for each in rounds) for name in names.values())
        print(f"{engine:20}{median * 1e3:19.1f} ms{p99 * 1e3:7.1f} ms{took_s:10.2f}")
    return {
        f"again_{what}_over_{other}{suffix}": round(
            statistics.median(each["ours"][name] / each[other][name] for each in rounds), 3
        )
        for what, name in names.items()
        for other in ("none", "fs")
    }


def main() -> None:
    """Measure, print tables, and JSON last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="a little of it, to see that it runs")
    parser.add_argument("--only", choices=PARTS, help="a part of it")
    parser.add_argument("--settings", nargs="+", default=[], help="of hostile: these only")
    parser.add_argument(
        "--models", nargs="+", choices=HURT, default=["tiny"],
        help=f"of hostile: steps of 3 to 12 ms, or longer ones, as of the larger model that decodes ({ROUNDS_LONGER} "
        f"rounds at most, of {len(HURT_LONGER)} settings); the tiny one takes half an hour",
    )  # fmt: skip
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
    if arguments.only == "apart":
        layers, hidden_size = DECODED[""] if arguments.smoke else (LAYERS, HIDDEN_SIZE)
        num_prompts, length = (1, 300) if arguments.smoke else (5, PROMPT_TOKENS)
        print(json.dumps(apart(vllm, num_prompts, length, layers, hidden_size)))
        return
    if arguments.only == "again":
        print(json.dumps(again(vllm, *((1, 0.1) if arguments.smoke else (arguments.rounds, 1.0)))))
        return
    if arguments.only == "hostile":
        num_rounds, share = (1, 0.1) if arguments.smoke else (min(arguments.rounds, 5), 1.0)
        figures: dict[str, float] = {}
        for model in arguments.models:
            figures |= hostile(vllm, num_rounds, share, arguments.settings, model)
        print(json.dumps(figures))
        return
    said: dict[str, float] = {}
    if arguments.only != "first-token":
        said |= ratios(tiers(vllm, *((1, 16) if arguments.smoke else (arguments.rounds, 256))))
    if arguments.only is None and not arguments.smoke:
        said |= decode(vllm, 4, 128, 200)
    if arguments.only != "tiers" and not arguments.smoke:
        said |= {f"first_token_{name.replace(' ', '_')}_s": each for name, each in first_token(vllm).items()}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
