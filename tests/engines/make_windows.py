"""Write a checkpoint of a small model with a sliding window in every other layer: ``make_windows.py FOLDER``.

Runs in vLLM's environment. Its weights are random.
"""

import json
import sys

import torch
from transformers import Olmo3Config, Olmo3ForCausalLM


def main(folder: str) -> None:
    """Make it; the windows are shorter than prompts."""
    torch.manual_seed(0)
    config = Olmo3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,  # large enough for tokens to depend on the whole prompt
        tie_word_embeddings=False,
    )
    Olmo3ForCausalLM(config).save_pretrained(folder)
    print(json.dumps({"folder": folder}))


if __name__ == "__main__":
    main(*sys.argv[1:])
