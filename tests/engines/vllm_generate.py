"""Generate with a real vLLM from a checkpoint and print what came: ``vllm_generate.py JSON``.

Runs in vLLM's environment. The JSON is an object of `Wanted`'s fields; the answer has the tokens of each request of
each round, how many prompt tokens came from a cache, and the engine's own counters.
"""

import json
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from own_metrics import own_lookups

ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
SEVERAL = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1"}


@dataclass
class Wanted:
    """What to run.

    Attributes:
        model: The checkpoint's folder.
        transfer: ``KVTransferConfig``'s arguments; none for an engine alone.
        prompts: Which of the prompts, by number; equal numbers are equal prompts.
        length: Tokens of each.
        num_tokens: To generate for each.
        warm_up: Prompts that are answered first, and do not count.
        rounds: How often all of them are asked for, one round after the other; the engine's own prefix cache is
            emptied in between.
        engine: More arguments of ``LLM``.
        params: ``kv_transfer_params`` of each request.
        adapters: The folder of each prompt's LoRA adapter, or none.
    """

    model: str
    transfer: dict[str, Any] | None = None
    prompts: list[int] = field(default_factory=lambda: [0, 1])
    length: int = 300
    num_tokens: int = 16
    warm_up: list[int] = field(default_factory=list)
    rounds: int = 1
    engine: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] | None = None
    adapters: list[str | None] | None = None


def prompt(number: int, length: int) -> list[int]:
    """Return the token ids of a prompt that shares no block with those of other numbers."""
    return [3 + (i * 7 + number * 31) % 500 for i in range(length)]


def engine_arguments(wanted: Wanted) -> dict[str, Any]:
    """Return the arguments of a small engine on a CPU."""
    from vllm.config import KVTransferConfig  # noqa: PLC0415 - takes seconds, and the environment is set first

    return {
        "model": wanted.model,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 1024,
        "block_size": 32,
        "kv_cache_memory_bytes": 64 << 20,
        "enable_prefix_caching": True,
        "kv_transfer_config": KVTransferConfig(**wanted.transfer) if wanted.transfer else None,
        "disable_log_stats": False,
        "max_num_seqs": 8,
        "seed": 0,
        **wanted.engine,
    }


def settle(llm: Any) -> None:
    """Do steps until requests that have ended hold no blocks any more, as a server does by itself."""
    if (core := getattr(llm.llm_engine.engine_core, "engine_core", None)) is not None:  # else it has its own process
        while core.scheduler.has_requests():
            llm.llm_engine.step()


def main(wanted: Wanted) -> None:
    """Run all rounds in this process and print the answer."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - as above
    from vllm.lora.request import LoRARequest  # noqa: PLC0415 - as above

    llm = LLM(**engine_arguments(wanted))
    more = {"kv_transfer_params": wanted.params} if wanted.params else None
    sampling = SamplingParams(
        temperature=0.0, max_tokens=wanted.num_tokens, ignore_eos=True, detokenize=False, extra_args=more
    )
    prompts, others = (
        [{"prompt_token_ids": prompt(number, wanted.length)} for number in numbers]
        for numbers in (wanted.prompts, wanted.warm_up)
    )
    if others:
        llm.generate(others, sampling, use_tqdm=False)
    by_folder = {folder: number for number, folder in enumerate(sorted({*(wanted.adapters or ())} - {None}), start=1)}
    adapters = [
        None if folder is None else LoRARequest(f"adapter {by_folder[folder]}", by_folder[folder], folder)
        for folder in wanted.adapters or [None] * len(prompts)
    ]
    rounds = []
    for _ in range(wanted.rounds):
        started = time.perf_counter()
        answers = llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapters)
        rounds.append({
            "seconds": time.perf_counter() - started,
            "tokens": [list(each.outputs[0].token_ids) for each in answers],
            "cached": [each.num_cached_tokens for each in answers],
        })  # fmt: skip
        settle(llm)
        llm.reset_prefix_cache()
    counters = {
        metric.name: getattr(metric, "value", None)
        for metric in llm.get_metrics()
        if "prefix_cache" in metric.name or "tiered_kv" in metric.name
    }
    labelled = {
        f"{metric.name} {metric.labels.get('tier') or metric.labels.get('source')}": getattr(metric, "value", None)
        for metric in llm.get_metrics()
        if "tier" in metric.labels or "source" in metric.labels
    }
    said = {"rounds": rounds, "counters": counters, "labelled": labelled, "lookups": own_lookups()}
    print(json.dumps(said))  # and no shutdown: nothing may depend on one


if __name__ == "__main__":
    os.environ.update({**QUIET, **(ONE_PROCESS if "parallel_size" not in sys.argv[1] else SEVERAL)})
    main(Wanted(**json.loads(sys.argv[1])))
