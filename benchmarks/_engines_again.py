"""Prompts that come again, more than vLLM's own cache holds: ``_engines_again.py MODEL ROUNDS SHARE``.

Runs in vLLM's environment. Three engines, each in a process of its own: without a connector, with ours over CPU memory
and NVMe, and with vLLM's own offloading to as much CPU memory and its ``fs`` tier. By turns they answer the same
requests, one of which comes with each step; each round asks for the same prompts in the same order, and vLLM's cache
holds some three quarters of their tokens, CPU memory as many. What they answer must be equal. SHARE of the requests are
made, to see that it runs.
"""

import json
import os
import pathlib
import sys
import tempfile
from dataclasses import asdict
from typing import Any

import _engines_hostile
from _engines_decode import Engine, transfers
from vllm_generate import ONE_PROCESS, QUIET

SETTING = _engines_hostile.Setting(comes_again=True, is_cached=True)
NAMES = {"none": "none", "nvme": "ours", "fs": "fs"}


def main(model: str, num_rounds: str, share: str) -> None:
    """Print what each engine says of each round; the first two, which fill tiers and warm up, do not count."""
    setting = {**asdict(SETTING), "num_requests": max(2, int(SETTING.num_requests * float(share)))}
    rounds: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(dir=pathlib.Path.cwd()) as folder:
        connected = transfers(pathlib.Path(folder))
        engines = {}
        for name, as_what in NAMES.items():
            wanted = json.dumps({"model": model, "transfer": connected[name]})
            engines[as_what] = Engine(_engines_hostile.__file__, wanted, json.dumps(setting))
        for number in range(int(num_rounds) + 2):
            in_turn = sorted(engines, reverse=bool(number % 2))
            rounds.append({name: engines[name].ask(number) for name in in_turn})
        for engine in engines.values():
            engine.end()
    if any(len({each["digest"] for each in of_round.values()}) > 1 for of_round in rounds):
        sys.exit("engines answer differently")
    print(json.dumps(rounds[2:]))


if __name__ == "__main__":
    os.environ.update({**QUIET, **ONE_PROCESS})
    main(*sys.argv[1:])
