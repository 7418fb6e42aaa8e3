"""Generate with vLLM's asyncio front end, all requests at once, where the KV cache is too small for them.

``vllm_async.py JSON``. Its engine core and worker are in another process. The JSON is that of `vllm_generate`.
"""

import asyncio
import json
import os
import sys
from typing import Any

from vllm_generate import QUIET, SEVERAL, Wanted, engine_arguments, prompt


async def main(wanted: Wanted) -> None:
    """Run all rounds and print the answer."""
    from vllm import SamplingParams  # noqa: PLC0415 - takes seconds, and the environment is set first
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415
    from vllm.v1.metrics.reader import get_metrics_snapshot  # noqa: PLC0415

    small = {"kv_cache_memory_bytes": 3 << 19, "max_model_len": 512}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**{**engine_arguments(wanted), **small}))
    sampling = SamplingParams(temperature=0.0, max_tokens=wanted.num_tokens, ignore_eos=True, detokenize=False)

    async def generate(number: int, name: str) -> Any:
        tokens = {"prompt_token_ids": prompt(number, wanted.length)}
        return [each async for each in engine.generate(tokens, sampling, request_id=name)][-1]

    rounds = []
    for turn in range(wanted.rounds):
        answers = await asyncio.gather(*(generate(number, f"{turn}-{number}") for number in wanted.prompts))
        rounds.append({
            "tokens": [list(each.outputs[0].token_ids) for each in answers],
            "cached": [each.num_cached_tokens for each in answers],
        })  # fmt: skip
        await engine.reset_prefix_cache()
    values = {metric.name: getattr(metric, "value", None) for metric in get_metrics_snapshot()}
    engine.shutdown()
    print(json.dumps({"rounds": rounds, "preemptions": values["vllm:num_preemptions"], "counters": {
        name: value for name, value in values.items() if "prefix_cache" in name or "tiered_kv" in name
    }}))  # fmt: skip


if __name__ == "__main__":
    os.environ.update({**QUIET, **SEVERAL})
    asyncio.run(main(Wanted(**json.loads(sys.argv[1]))))
