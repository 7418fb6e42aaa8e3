"""Generate with Triton interpreted, as `vllm_generate`: ``vllm_interpreted.py JSON RUNNER``, which of vLLM's two.

vLLM's CPU build asks for a Triton that compiles for CPUs, which no package index has. What is interpreted does the
same, slowly. vLLM's second model runner needs it, and DeepSeek V4.
"""

import json
import os
import pathlib
import sys
from collections import defaultdict
from itertools import count
from types import SimpleNamespace

os.environ.update({"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": str(int(sys.argv[2]) - 1)})

import torch
from triton.backends import backends  # Triton asks for the first of these when it is imported

from vllm_generate import ONE_PROCESS, QUIET, Wanted, main


class Driver:
    """What Triton has for CPUs, as far as vLLM and an interpreter ask for it."""

    @staticmethod
    def is_active() -> bool:
        """Say that there are CPUs."""
        return True


def dummies_say_something() -> None:
    """Have random weights be so large that tokens depend on the whole prompt, and the same in each process."""
    from vllm.model_executor.model_loader import dummy_loader  # noqa: PLC0415 - once the environment is set

    seeds = count()

    def fill(weights: torch.Tensor, **_: object) -> None:
        if weights.is_floating_point():
            chance = torch.randn(weights.shape, generator=torch.Generator().manual_seed(next(seeds)))
            weights.data.copy_(torch.ones(weights.shape) if weights.ndim == 1 else 0.2 * chance)

    dummy_loader.initialize_single_dummy_weight = fill


def deepseek_v4_on_cpus() -> None:
    """Have plans for GPUs' kernels that vLLM's CPU kernels do without: it names fewer kinds of layers than it has."""
    from vllm.models.deepseek_v4.cpu.cpu_mla import (  # noqa: PLC0415 - as above
        DeepseekV4CPUSparseSWAMetadataBuilder as Builder,
    )

    planned = Builder.build_tile_scheduler
    Builder.build_tile_scheduler = lambda *of: defaultdict(lambda: None, planned(*of))


if __name__ == "__main__":
    os.environ.update({**QUIET, **ONE_PROCESS})
    backends["cpu"] = SimpleNamespace(driver=Driver, compiler=None)
    wanted = Wanted(**json.loads(sys.argv[1]))
    if "DeepseekV4" in (pathlib.Path(wanted.model) / "config.json").read_text():
        deepseek_v4_on_cpus()
        dummies_say_something()
    main(wanted)
