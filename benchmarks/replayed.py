"""Hits of vLLM's scheduler, pool and prefix cache with our connector, beside what a replay foretells of the same trace.

vLLM has a small cache over a small CPU tier, one request at a time and several, and stores as ``store_when`` says. Most
settings are without a model, which changes no hit; a few are of a real vLLM with a tiny one, whose tokens are compared
with those of an engine without a connector. A replay is told how far ahead the connector copies what vLLM will drop.

vLLM is in an environment of its own, which `make test-engines` builds.
"""

import argparse
import json
import pathlib
import sys
import tempfile
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "engines"))

from environments import Environment  # noqa: E402 - where it lies is said above
from tiered_kv.replay import BlockCost, TierPlan, replay  # noqa: E402 - behind the others
from tiered_kv.traces import open_trace  # noqa: E402 - as above
from tiered_kv.values.hints import StoreWhen  # noqa: E402 - as above

BAR = 0.02
AHEAD = 32
"""Blocks: of four steps of eight."""
SLOT_BYTES = {False: 4096, True: 32768}
"""Of a block of the trace, without a model and with the tiny one."""
WHEN: tuple[StoreWhen, ...] = ("computed", "evicted", "auto")

Setting = tuple[str, int, int, StoreWhen, int, bool]
"""The trace, blocks of vLLM's cache and of the tier, when it stores, requests at a time, whether there is a model."""


def settings(*, is_smoke: bool) -> list[Setting]:
    """Return what is compared."""
    if is_smoke:
        return [("synthetic:agents?num_requests=200", 250, 250, when, 1, False) for when in WHEN]
    without: list[Setting] = [
        (f"synthetic:{name}?num_requests=200", 250, 250, when, at_once, False)
        for name in ("agents", "zipf", "twice")
        for when in WHEN
        for at_once in (1, 4)
    ]
    real: list[Setting] = [
        ("synthetic:agents?num_requests=200", 250, 250, when, at_once, True) for when in WHEN for at_once in (1, 4)
    ]
    return without + real


def asked(model: str, setting: Setting) -> dict[str, Any]:
    """Return what `vllm_replayed` is to run."""
    trace, engine_blocks, num_below, when, at_once, is_real = setting
    extra = {"tiers": [f"cpu://?capacity={num_below * SLOT_BYTES[is_real]}"], "load_when": "always", "weights": "any"}
    transfer = {
        "kv_connector": "TieredKVConnector",
        "kv_connector_module_path": "tiered_kv.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra | {"store_when": when},
    }
    sizes = {"model": model, "trace": trace, "engine_blocks": engine_blocks, "at_once": at_once, "is_real": is_real}
    return sizes | {"transfer": transfer, "num_tokens": 4 if is_real else 1}


def compare(setting: Setting, said: dict[str, Any]) -> float:
    """Print a line; return how far the hits are from those of a replay."""
    where, engine_blocks, num_below, when, at_once, is_real = setting
    trace = open_trace(where)
    plan, cost = TierPlan("cpu", num_below * 4096, "lhd", is_memory=True), BlockCost(4096 // trace.block_size, 1.0)
    report = replay(trace, [plan], cost, engine_blocks=engine_blocks, engine_ahead=AHEAD, store_when=when)
    here, loaded = (said[name] / trace.num_references for name in ("here", "loaded"))
    off: float = here + loaded - report.hit_rate
    print(
        f"{where:36} {engine_blocks:4}/{num_below:4} {when:9} {at_once} at a time {'model' if is_real else '':6}"
        f"{here:.3f} + {loaded:.3f} = {here + loaded:.3f}   replayed {report.hit_rate - report.tiers_hit_rate:.3f} + "
        f"{report.tiers_hit_rate:.3f} = {report.hit_rate:.3f}   off {off:+.3f}",
        flush=True,
    )
    return off


def runs(wanted: list[Setting]) -> list[list[Setting]]:
    """Put together what one process serves: of a trace all without a model; with one each by itself."""
    found: dict[object, list[Setting]] = {}
    for setting in wanted:
        found.setdefault(setting if setting[-1] else setting[0], []).append(setting)
    return list(found.values())


def main() -> None:
    """Compare, and print JSON last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a little of it, to see that it runs")
    parser.add_argument("--only", choices=("model", "no-model"), help="a part of it")
    arguments = parser.parse_args()
    vllm = Environment.of("vllm")
    if not vllm.is_built:
        print("vLLM's environment is not built: make test-engines")
        print("{}")
        return
    wanted = [
        each for each in settings(is_smoke=arguments.smoke)
        if arguments.only is None or each[-1] == (arguments.only == "model")
    ]  # fmt: skip
    offs, digests, is_right = list[float](), dict[int, set[str]](), True
    with tempfile.TemporaryDirectory() as folder:
        vllm.run("make_llama.py", folder)
        for some in runs(wanted):
            answers = vllm.run("vllm_replayed.py", *(json.dumps(asked(folder, each)) for each in some), timeout_s=3600)
            for setting, said in zip(some, answers, strict=True):
                offs.append(abs(compare(setting, said)))
                is_right = is_right and not said["wrong"]
                if setting[-1]:
                    digests.setdefault(setting[-2], set()).add(said["tokens"])
        for at_once, digest in digests.items():
            alone = asked(folder, next(each for each in wanted if each[-2:] == (at_once, True))) | {"transfer": None}
            (bare,) = vllm.run("vllm_replayed.py", json.dumps(alone), timeout_s=3600)
            digest.add(bare["tokens"])
    found: dict[str, object] = {"hits_off_worst": round(max(offs), 3), "bytes_right": is_right}
    if digests:
        found["tokens_equal"] = all(len(each) == 1 for each in digests.values())
    print(f"bar of the worst: {BAR}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
