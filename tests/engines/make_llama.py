"""Write a checkpoint of a small Llama with random weights: ``make_llama.py FOLDER [SEED [LAYERS [HIDDEN_SIZE]]]``.

Runs in an engine's environment.
"""

import json
import sys
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def main(folder: str, seed: str = "0", layers: str = "2", hidden_size: str = "128") -> None:
    """Make it; the same seed makes the same weights."""
    size = int(hidden_size)
    torch.manual_seed(int(seed))
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=size,
        intermediate_size=2 * size,
        num_hidden_layers=int(layers),
        num_attention_heads=size // 32,
        num_key_value_heads=size // 64,
        head_dim=32,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,  # large enough for tokens to depend on the whole prompt
        tie_word_embeddings=False,
    )
    alphabet = {byte: number + 3 for number, byte in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE({"<unk>": 0, "<s>": 1, "</s>": 2, **alphabet}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    fast: Any = PreTrainedTokenizerFast  # has no types
    fast(tokenizer_object=tokenizer, **special).save_pretrained(folder)  # a token a byte
    LlamaForCausalLM(config).save_pretrained(folder)  # float32, as torch makes it
    print(json.dumps({"folder": folder}))


if __name__ == "__main__":
    main(*sys.argv[1:])
