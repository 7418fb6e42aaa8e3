"""Write a LoRA adapter of the small Llama with random weights: ``make_adapter.py FOLDER SEED``.

Runs in an engine's environment.
"""

import json
import pathlib
import sys
from typing import Final

import torch
from safetensors.torch import save_file

RANK: Final = 8
HIDDEN: Final = 128
WIDTHS: Final = {"q_proj": 128, "k_proj": 64, "v_proj": 64, "o_proj": 128}
"""What each projection of a layer of `make_llama` gives."""


def main(folder: str, seed: str) -> None:
    """Make it; the same seed makes the same weights."""
    torch.manual_seed(int(seed))
    weights = {}
    for layer in range(2):
        for name, width in WIDTHS.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = torch.randn(RANK, HIDDEN) / 8
            weights[f"{module}.lora_B.weight"] = torch.randn(width, RANK) / 8
    configuration = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(WIDTHS)}
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(configuration))
    print(json.dumps({"folder": folder}))


if __name__ == "__main__":
    main(*sys.argv[1:])
