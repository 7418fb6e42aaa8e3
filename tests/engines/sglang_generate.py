"""Generate with a real SGLang from a checkpoint and print what came: ``sglang_generate.py JSON``.

Runs in SGLang's environment. The JSON is an object of `Wanted`'s fields; the answer has, of each round, the tokens of
each request and how many of its prompt's came from storage, by the engine's own count.
"""

import json
import os
import pathlib
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from vllm_generate import prompt  # no vLLM is in it


@dataclass
class Wanted:
    """What to run.

    Attributes:
        model: The checkpoint's folder.
        storage: The extra config of HiCache's dynamic storage; none for an engine without it.
        layout: Of its host pool.
        prompts: Which of the prompts, by number.
        length: Tokens of each.
        num_tokens: To generate for each.
        num_stored: Pages to wait for before the engine is ended: `sglang_faults.ReportingStorage` reports them.
        engine: More arguments of ``Engine``.
    """

    model: str
    storage: dict[str, Any] | None = None
    layout: str = "layer_first"
    prompts: list[int] = field(default_factory=lambda: [0, 1])
    length: int = 300
    num_tokens: int = 16
    num_stored: int = 0
    engine: dict[str, Any] = field(default_factory=dict)


def engine_arguments(wanted: Wanted) -> dict[str, Any]:
    """Return the arguments of a small engine on a CPU."""
    arguments: dict[str, Any] = {
        "model_path": wanted.model,
        "device": "cpu",
        "dtype": "float32",
        "page_size": 16,
        "max_total_tokens": 4096,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "disable_custom_all_reduce": True,
        "log_level": "warning",
    }
    if wanted.storage:
        arguments |= {
            "enable_hierarchical_cache": True,
            "hicache_ratio": 2,
            "hicache_io_backend": "direct",
            "hicache_mem_layout": wanted.layout,
            "hicache_write_policy": "write_through",
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config": json.dumps(wanted.storage),
        }
    return {**arguments, **wanted.engine}


def main(wanted: Wanted) -> None:
    """Run all in engine processes of this one's and print the answer."""
    import sglang  # noqa: PLC0415 - takes seconds

    engine = sglang.Engine(**engine_arguments(wanted))
    sampling = {"temperature": 0, "max_new_tokens": wanted.num_tokens, "ignore_eos": True}
    prompts = [prompt(number, wanted.length) for number in wanted.prompts]
    answers = engine.generate(input_ids=prompts, sampling_params=sampling)
    details = [each["meta_info"].get("cached_tokens_details") or {} for each in answers]
    answer = {
        "tokens": [each["output_ids"] for each in answers],
        "from_storage": [each.get("storage", 0) for each in details],
    }
    if wanted.storage and wanted.num_stored:  # the engine stores after it has answered, and does not say when
        report = pathlib.Path(wanted.storage["report"])
        while not report.exists() or len(set(report.read_text().split())) < wanted.num_stored:
            time.sleep(0.1)
    print(json.dumps(answer), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    os.environ.update({"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    main(Wanted(**json.loads(sys.argv[1])))
