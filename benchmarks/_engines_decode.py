"""What the connector costs decoding: ``_engines_decode.py FOLDER MODEL ROUNDS REQUESTS TOKENS``, in vLLM's environment.

Engines of one model, each in a process of its own: without a connector, with ours over CPU memory, over CPU memory and
NVMe, and by a host's server that has both, and with vLLM's own offloading to CPU memory and its ``fs`` tier. They take
turns, and the others rest: in each round all answer the same requests, which are new to them. Their prompts differ in
length, so that some blocks are full after each step, and not all of them after the same. What they answer must be
equal.
"""

import asyncio
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from vllm_generate import ONE_PROCESS, QUIET, Wanted, engine_arguments

BLOCK_SIZE = 32
SHORTEST = 40
"""Tokens of the shortest prompt; from it on they go through all lengths until one more block is full."""


def transfers(folder: pathlib.Path) -> dict[str, Any]:
    """Return how each engine is connected, by name."""
    both = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    ours = {**both, "kv_connector": "TieredKVConnector", "kv_connector_module_path": "tiered_kv.integrations.vllm"}
    memory = "cpu://?capacity=64MiB"
    offloading = {
        "spec_name": "CPUTieringSpec",
        "spec_module_path": "vllm_cpu_offload",  # vLLM's own copies between a GPU and its host, and not on a CPU
        "cpu_bytes_to_use": 64 << 20,
        "secondary_tiers": [{"type": "fs", "root_dir": str(folder / "fs")}],
    }
    return {
        "none": None,
        "cpu": {**ours, "kv_connector_extra_config": {"tiers": [memory]}},
        "nvme": {**ours, "kv_connector_extra_config": {"tiers": [memory, f"file://{folder}/nvme?capacity=512MiB"]}},
        "host": {**ours, "kv_connector_extra_config": {"connect": f"unix://{folder}/kv.sock"}},
        "fs": {**both, "kv_connector": "OffloadingConnector", "kv_connector_extra_config": offloading},
    }


def answer(engine: Any, seed: int, num_requests: int, num_tokens: int) -> dict[str, Any]:  # noqa: ANN401 - vLLM's
    """Answer requests; return how long that and its longest step took, and a digest of the tokens."""
    from vllm import SamplingParams  # noqa: PLC0415 - takes seconds, and the environment is set first

    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    for number in range(num_requests):
        length = SHORTEST + number % BLOCK_SIZE
        prompt = [3 + (at * 7 + number * 31 + seed * 101 + at * seed) % 500 for at in range(length)]
        engine.add_request(f"{seed}-{number}", {"prompt_token_ids": prompt}, sampling)
    tokens, steps = {}, []
    began = time.perf_counter()
    while engine.has_unfinished_requests():
        started = time.perf_counter()
        for each in engine.step():
            if each.finished:
                tokens[each.request_id] = list(each.outputs[0].token_ids)
        steps.append(time.perf_counter() - started)
    seconds = time.perf_counter() - began
    digest = hashlib.sha256(repr(sorted(tokens.items())).encode()).hexdigest()
    return {"s": seconds, "longest_s": max(steps[2:]), "num_steps": len(steps), "digest": digest}


def serve(wanted: dict[str, Any], num_requests: int, num_tokens: int) -> None:
    """Answer for each seed that is asked for."""
    from vllm import LLM  # noqa: PLC0415 - takes seconds, and the environment is set first

    said = Wanted(**wanted)
    engine: Any = LLM(**{**engine_arguments(said), "max_num_seqs": num_requests}).llm_engine
    print(json.dumps({"is_ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(engine, int(line), num_requests, num_tokens)), flush=True)


async def keep(folder: str) -> None:
    """Serve a cache for the engines of this host, until this process is killed."""
    from tiered_kv import TieredKVServer, TieredKVSettings  # noqa: PLC0415 - no engine needs it

    tiers = ["cpu://?capacity=64MiB", f"file://{folder}/host?capacity=512MiB"]
    async with TieredKVServer(TieredKVSettings(tiers=tiers, host={"socket": f"{folder}/kv.sock"})):
        print(json.dumps({"is_ready": True}), flush=True)
        await asyncio.Event().wait()


class Engine:
    """One that runs in a process of its own: a script that says when it is ready, and answers lines with lines."""

    def __init__(self, script: str, *arguments: object, doing: str = "serve") -> None:
        command = [sys.executable, script, doing, *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._take()

    def ask(self, said: object) -> dict[str, Any]:
        """Have it answer, and wait for that."""
        stdin: Any = self._process.stdin
        stdin.write(f"{json.dumps(said)}\n")
        stdin.flush()
        return self._take()

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _take(self) -> dict[str, Any]:
        stdout: Any = self._process.stdout
        for line in stdout:
            if line.startswith('{"'):
                said: dict[str, Any] = json.loads(line)
                return said
        sys.exit("an engine has ended")


def main(folder: str, model: str, num_rounds: str, num_requests: str, num_tokens: str) -> None:
    """Print what each engine says of each round."""
    more = {"model": model, "engine": {"kv_cache_memory_bytes": 1 << 30, "async_scheduling": False}}
    host = Engine(__file__, folder, doing="keep")
    engines = {
        name: Engine(__file__, json.dumps({**more, "transfer": transfer}), num_requests, num_tokens)
        for name, transfer in transfers(pathlib.Path(folder)).items()
    }
    for engine in engines.values():  # what is done for the first time takes longer
        engine.ask(0)
    rounds = [{name: engine.ask(number + 1) for name, engine in engines.items()} for number in range(int(num_rounds))]
    for engine in (*engines.values(), host):
        engine.end()
    if any(len({each["digest"] for each in of_round.values()}) > 1 for of_round in rounds):
        sys.exit("engines answer differently")
    print(json.dumps(rounds))


if __name__ == "__main__":
    os.environ.update({**QUIET, **ONE_PROCESS})
    if sys.argv[1] == "serve":
        serve(json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1] == "keep":
        asyncio.run(keep(sys.argv[2]))
    else:
        main(*sys.argv[1:])
