"""What our connector costs where it can't help: ``_engines_hostile.py MODEL ROUNDS SHARE [NAME ...]``.

Runs in vLLM's environment. For each of the settings below one engine has our connector and another has none, each in a
process of its own; both answer the same requests by turns, and the other rests. A request comes with each step. Where
prompts come again, vLLM's own prefix cache is emptied before, so that a tier is asked for them. What both answer must
be equal. SHARE of the requests are made, to see that it runs.

Where our tiers are memory and NVMe and nothing is to be gained of them, two more engines take their turns: one that has
vLLM's own offloading, to memory and its ``fs`` tier, and one whose connector does nothing. Of two engines that do the
same one may be slower by a twentieth for all of its life: so all of them are started several times.
"""

import hashlib
import json
import os
import pathlib
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from _engines_decode import BLOCK_SIZE, Engine
from _engines_decode import transfers as offered
from vllm_generate import ONE_PROCESS, QUIET, Wanted, engine_arguments, settle

MOST_STARTS = 3
MEMORY = "cpu://?capacity=64MiB"
TINY = "cpu://?capacity=1MiB"
NVME = "file://{folder}/nvme?capacity=512MiB"


def hostile(**more: object) -> dict[str, object]:
    """Return a tier that is as bad as its settings say."""
    return {"medium": "_hostile_medium:HostileBackend", "path": "{folder}/far", "capacity": "512MiB", **more}


@dataclass(frozen=True)
class Setting:
    """What is asked for, and of which tiers.

    Attributes:
        tiers: Of our connector.
        num_requests: In a round.
        length: Tokens of the shortest prompt; the others have up to a block more.
        num_tokens: To generate for each.
        comes_again: Whether each round asks for the same prompts.
        is_cached: Whether vLLM's own prefix cache keeps them.
        at_once: Requests that come with each step.
        num_aborted: Of how many requests one is given up after a few steps; 0: none.
        engine: More arguments of vLLM's.
        connector: More settings of our connector's.

    The engines with other connectors take part where the tiers are these and prompts do not come again.
    """

    tiers: tuple[object, ...] = (MEMORY, NVME)
    num_requests: int = 64
    length: int = 200
    num_tokens: int = 24
    comes_again: bool = False
    is_cached: bool = False
    at_once: int = 1
    num_aborted: int = 0
    engine: dict[str, object] = field(default_factory=dict)
    connector: dict[str, object] = field(default_factory=dict)

    @property
    def has_others(self) -> bool:
        """Whether other connectors answer, too."""
        return tuple(self.tiers) == (MEMORY, NVME) and not self.comes_again


SETTINGS = {
    "nothing comes again, memory": Setting((MEMORY,)),
    "nothing comes again, NVMe": Setting(),
    "long answers of 128 streams": Setting(length=40, num_tokens=100, num_requests=128),
    "128 streams at once": Setting(num_requests=128, at_once=128, length=100),
    "prompts of one block": Setting(length=33, num_tokens=8, num_requests=192),
    "prompts of less than a block": Setting(length=4, num_tokens=8, num_requests=192),
    "long prompts": Setting(length=700, num_tokens=8, num_requests=24),
    "all is in vLLM's own cache": Setting(comes_again=True, is_cached=True),
    "preemption": Setting(num_tokens=64, at_once=8, engine={"num_gpu_blocks_override": 75}),
    "every other request is given up": Setting(num_aborted=2),
    "a tiny CPU tier": Setting((TINY,)),
    "a tiny CPU tier over NVMe": Setting((TINY, NVME)),
    "write-back": Setting((MEMORY, NVME + "&write=back")),
    "written at the second use": Setting((MEMORY, NVME + "&admit_after=2"), comes_again=True),
    "a slow tier, nothing comes again": Setting((TINY, hostile(delay_s=0.05))),
    "a far tier, 200 ms, all comes again": Setting((TINY, hostile(delay_s=0.2)), comes_again=True),
    "look-ups hang": Setting((TINY, hostile(hangs="lookups")), comes_again=True),
    "reads hang": Setting((TINY, hostile(hangs="reads")), comes_again=True),
    "writes hang": Setting((TINY, hostile(hangs="writes"))),
    "the disk is full": Setting((TINY, hostile(fails="writes"))),
    "every call fails": Setting((TINY, hostile(fails="all"))),
}


def transfers(setting: Setting, folder: pathlib.Path) -> dict[str, Any]:
    """Return how each engine is connected, by name."""
    of_decode = offered(folder)
    tiers = json.loads(json.dumps(setting.tiers).replace("{folder}", str(folder)))
    ours = {**of_decode["cpu"], "kv_connector_extra_config": {"tiers": tiers, **setting.connector}}
    found = {"none": None, "ours": ours}
    if setting.has_others:
        idle = {"kv_connector": "IdleConnector", "kv_connector_module_path": "_idle_connector", "kv_role": "kv_both"}
        found |= {"fs": of_decode["fs"], "idle": idle}
    return found


def answer(llm: Any, setting: Setting, number: int) -> dict[str, Any]:  # noqa: ANN401 - vLLM's
    """Answer the requests of a round; return how long that and its first tokens took, its steps, and a digest."""
    from vllm import SamplingParams  # noqa: PLC0415 - takes seconds, and the environment is set first

    engine, seed = llm.llm_engine, 0 if setting.comes_again else number
    sampling = SamplingParams(temperature=0.0, max_tokens=setting.num_tokens, ignore_eos=True, detokenize=False)
    settle(llm)
    if not setting.is_cached:
        llm.reset_prefix_cache()
    waiting = [
        [3 + (at * 7 + each * 31 + seed * 101 + at * seed) % 500 for at in range(setting.length + each % BLOCK_SIZE)]
        for each in range(setting.num_requests)
    ]
    names = [f"{number}-{each}" for each in range(setting.num_requests)]
    given_up = set(names[:: setting.num_aborted]) if setting.num_aborted else set()
    came: dict[str, float] = {}
    first: dict[str, float] = {}
    tokens: dict[str, list[int]] = {}
    num_steps = 0
    began = time.perf_counter()
    while len(came) < len(names) or engine.has_unfinished_requests():
        for at in range(len(came), min(len(came) + setting.at_once, len(names))):
            came[names[at]] = time.perf_counter()
            engine.add_request(names[at], {"prompt_token_ids": waiting[at]}, sampling)
        num_steps += 1
        for said in engine.step():
            name, generated = said.request_id, list(said.outputs[0].token_ids)
            if generated:
                first.setdefault(name, time.perf_counter() - came[name])
            if said.finished and name not in given_up:
                tokens[name] = generated
            elif name in given_up and len(generated) == 3:
                engine.abort_request([name])
    seconds = time.perf_counter() - began
    in_order = sorted(first.values())
    return {
        "s": seconds,
        "num_steps": num_steps,
        "ttft_p99_s": in_order[min(len(in_order) - 1, len(in_order) * 99 // 100)],
        "ttft_median_s": in_order[len(in_order) // 2],
        "digest": hashlib.sha256(repr(sorted(tokens.items())).encode()).hexdigest(),
    }


def serve(wanted: dict[str, Any], setting: Setting) -> None:
    """Answer a round for each number that is asked for."""
    from vllm import LLM  # noqa: PLC0415 - as above

    arguments = engine_arguments(Wanted(**wanted))
    llm: Any = LLM(**{**arguments, "max_num_seqs": 128, "async_scheduling": False, **setting.engine})
    print(json.dumps({"is_ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(llm, setting, int(line))), flush=True)


def compare(model: str, setting: Setting, num_rounds: int) -> list[dict[str, Any]]:
    """Return what the engines say of each round, of some starts."""
    num_starts = min(MOST_STARTS, num_rounds)
    each = -(-num_rounds // num_starts)
    rounds = [of_round for _ in range(num_starts) for of_round in started(model, setting, each)]
    if any(len({each["digest"] for each in of_round.values()}) > 1 for of_round in rounds):
        sys.exit(f"the engines answer differently: {setting}")
    return rounds


def started(model: str, setting: Setting, num_rounds: int) -> list[dict[str, Any]]:
    """Return what the engines say of each round of one start; the two before them, which fill tiers, do not count."""
    with tempfile.TemporaryDirectory(dir=pathlib.Path.cwd()) as folder:
        said = transfers(setting, pathlib.Path(folder))
        engines = {
            name: Engine(__file__, json.dumps({"model": model, "transfer": each}), json.dumps(asdict(setting)))
            for name, each in said.items()
        }
        rounds = []
        for number in range(num_rounds + 2):
            in_turn = [*engines][number % len(engines) :] + [*engines][: number % len(engines)]
            rounds.append({name: engines[name].ask(number) for name in in_turn})
        for engine in engines.values():
            engine.end()
    return rounds[2:]


def main(model: str, num_rounds: str, share: str, *names: str) -> None:
    """Print what the engines say, by setting."""
    found = {}
    for name in names or SETTINGS:
        setting = SETTINGS[name]
        few = max(2, int(setting.num_requests * float(share)))
        found[name] = compare(model, Setting(**{**asdict(setting), "num_requests": few}), int(num_rounds))
        print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    os.environ.update({**QUIET, **ONE_PROCESS})
    if sys.argv[1] == "serve":
        serve(json.loads(sys.argv[2]), Setting(**json.loads(sys.argv[3])))
    else:
        main(*sys.argv[1:])
