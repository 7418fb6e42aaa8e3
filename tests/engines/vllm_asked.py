"""A real vLLM that answers one prompt after the other, until nobody asks any more: ``vllm_asked.py JSON``.

Runs in vLLM's environment, its engine core in a process of its own, as in ``vllm serve``. The JSON is that of
`vllm_generate`. Each line that it reads is ``[prompt, number of tokens]``; each answer is a line of JSON with the
tokens, how many of the prompt came from a cache, and the seconds. It says ``{}`` when it is ready.
"""

import json
import os
import sys
import time

from vllm_generate import QUIET, SEVERAL, Wanted, engine_arguments, prompt


def main(wanted: Wanted) -> None:
    """Answer."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - takes seconds, and the environment is set first

    llm = LLM(**engine_arguments(wanted))
    print("\n{}", flush=True)
    for line in sys.stdin:
        number, num_tokens = json.loads(line)
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        tokens = {"prompt_token_ids": prompt(number, wanted.length)}
        (answer,) = llm.generate([tokens], sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        said = {"tokens": list(answer.outputs[0].token_ids), "cached": answer.num_cached_tokens, "seconds": seconds}
        print(f"\n{json.dumps(said)}", flush=True)


if __name__ == "__main__":
    os.environ.update({**QUIET, **SEVERAL})
    main(Wanted(**json.loads(sys.argv[1])))
