"""transformers' tensor parallelism: each rank stores and loads its heads, and all go on at one place."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from transformers import GenerationConfig, PreTrainedModel, Qwen3NextConfig, Qwen3NextForCausalLM

from tiered_kv import ClosedError, hash_blocks
from tiered_kv.integrations.transformers import open_tiered

pytestmark = pytest.mark.slow

SIZE, NEW = 16, 2
PROMPT = [3 + i * 7 % 250 for i in range(34)]
Model = Any  # as in `test_transformers`
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 1024, "initializer_range": 0.2, "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 2, "num_experts_per_tok": 1,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip


def made() -> Model:
    """Return a small model with attention and states, the same in each process."""
    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES))
    model.train(mode=False)
    return model


def generate(model: Model, past: Any = None) -> list[int]:  # noqa: ANN401 - a TieredCache
    """Return what it says, and store it."""
    greedy = GenerationConfig(  # type: ignore[no-untyped-call]  # transformers' is not
        max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    out = model.generate(torch.tensor([PROMPT]), cache=past, generation_config=greedy)
    if past is not None:
        past.store(out)
    said: list[int] = out[0, len(PROMPT) :].tolist()
    return said


@pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="gloo: a build of torch that has it"
)
def test_ranks_load_their_heads_as_far_as_all_have_them(tmp_path: Path) -> None:
    """The same tokens as in one process, cold and warm; what one rank lacks none loads; no rank has another's heads."""
    command = [sys.executable, __file__, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    expected = generate(made())
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        served = [[expected, 0], [expected, 32], [expected, 16], [expected, 0]]
        assert found == [*served, [[], [0, -1][rank]]], "and none waits for one that raises"


def serve(rank: int, folder: Path) -> list[tuple[list[int], int]]:
    """Generate in four caches after each other; return what was said each time, behind how many loaded tokens."""
    # As from_pretrained does with a distributed_config, which takes accelerate as well.
    from transformers.distributed.configuration_utils import DistributedConfig  # noqa: PLC0415 - slow to import, and of ranks alone

    config, _, mesh = PreTrainedModel.prepare_distribute_model(DistributedConfig(tp_size=2))
    model = PreTrainedModel.maybe_distribute_model(made(), config, mesh)
    found: list[tuple[list[int], int]] = []
    for turn, of_rank in enumerate([rank, rank, rank, 1 - rank]):
        storage = f"file://{folder}/{of_rank}?capacity=32MiB"
        with open_tiered(model, {"tiers": ["cpu://?capacity=4MiB", storage]}, weights="w", block_size=SIZE) as tiered:
            if (turn, rank) == (2, 1):
                tiered.kv.evict(hash_blocks(PROMPT, block_size=SIZE)[1:2])
            past = tiered.past(torch.tensor([PROMPT]))
            found.append((generate(model, past), past.num_loaded_tokens[0]))
        distributed.barrier()  # before another rank opens this folder
    storage = f"file://{folder}/{rank}?capacity=32MiB"
    with open_tiered(model, {"tiers": ["cpu://?capacity=4MiB", storage]}, weights="w", block_size=SIZE) as tiered:
        if rank == 1:
            tiered.kv.call(tiered.kv.cache.aclose)
        try:
            found.append(([], tiered.past(torch.tensor([PROMPT])).num_loaded_tokens[0]))
        except ClosedError:
            found.append(([], -1))
    return found


def main(folder: Path) -> None:
    """Be both ranks, each a process."""
    other = os.fork()  # both have imported all by now
    rank = 0 if other else 1
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/met", rank=rank, world_size=2, timeout=timedelta(minutes=2)
    )
    (folder / f"{rank}.json").write_text(json.dumps(serve(rank, folder)))
    distributed.destroy_process_group()
    if other:
        os.waitpid(other, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
