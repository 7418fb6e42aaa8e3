"""Generate by vLLM's second model runner, with Triton interpreted: ``vllm_second_runner.py JSON``, as `vllm_generate`.

vLLM's CPU build asks for a Triton that compiles for CPUs, which no package index has. What is interpreted does the
same, slowly.
"""

import json
import os
import sys
from types import SimpleNamespace

os.environ.update({"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"})

from triton.backends import backends  # Triton asks for the first of these when it is imported

from vllm_generate import ONE_PROCESS, QUIET, Wanted, main


class Driver:
    """What Triton has for CPUs, as far as vLLM and an interpreter ask for it."""

    @staticmethod
    def is_active() -> bool:
        """Say that there are CPUs."""
        return True


if __name__ == "__main__":
    os.environ.update({**QUIET, **ONE_PROCESS})
    backends["cpu"] = SimpleNamespace(driver=Driver, compiler=None)
    main(Wanted(**json.loads(sys.argv[1])))
