"""A small Llama over a paged KV cache, which computes many sequences in one step. It knows nothing of tiered_kv.

Like in any paged engine there is one tensor of pages per layer, and a sequence is a list of block ids.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import CacheLayerMixin

BLOCK_SIZE = 16
"""Tokens in a KV block."""

TINY = LlamaConfig(
    vocab_size=258,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=8192,
    initializer_range=0.2,  # wide, so that what is attended to decides what is said
)
"""Of bytes and two marks; its weights are random, so it talks nonsense, the same each time."""


@dataclass(frozen=True)
class Work:
    """What a step computes of one sequence: ``tokens``, which follow ``start`` others, with the KV of all in blocks."""

    tokens: Sequence[int]
    start: int
    block_ids: Sequence[int]


class PagedLlama:
    """A model and its pages. One thread computes.

    Attributes:
        kv_caches: Per layer ``(num_blocks, 2, BLOCK_SIZE, H, D)``, NHD: the keys and values of all sequences.
        weights: A digest of all weights: what KV made with them is filed under.
    """

    def __init__(self, num_blocks: int, config: LlamaConfig = TINY, *, seed: int = 0) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._model = LlamaForCausalLM(config).train(mode=False)
        num_kv_heads, head_dim = config.num_key_value_heads, config.head_dim
        assert num_kv_heads is not None and head_dim is not None  # noqa: S101, PT018 - transformers fills them in
        shape = (num_blocks, 2, BLOCK_SIZE, num_kv_heads, head_dim)
        self.kv_caches = [torch.zeros(shape) for _layer in range(config.num_hidden_layers)]
        digest = hashlib.sha256()
        for name, weight in sorted(self._model.state_dict().items()):
            digest.update(name.encode() + weight.contiguous().view(torch.uint8).numpy().tobytes())
        self.weights = f"sha256:{digest.hexdigest()}"

    def compute(self, works: Sequence[Work]) -> list[int]:
        """Compute the KV of all tokens, and return each sequence's next one, the likeliest.

        Sequences that go on by one token are computed together, prompts one by one: nothing is padded but contexts.
        """
        together = [work for work in works if len(work.tokens) == 1]
        steps = [[work] for work in works if len(work.tokens) > 1] + ([together] if together else [])
        said = {id(work): token for step in steps for work, token in zip(step, self._compute(step), strict=True)}
        return [said[id(work)] for work in works]

    @torch.inference_mode()
    def _compute(self, works: Sequence[Work]) -> list[int]:
        """Compute sequences of which equally many tokens are new."""
        num_new = len(works[0].tokens)
        positions = torch.tensor([[work.start] for work in works]) + torch.arange(num_new)
        num_blocks = blocks_for(max(work.start for work in works) + num_new)
        table = torch.tensor([[*work.block_ids, *[0] * num_blocks][:num_blocks] for work in works])
        unseen = torch.arange(num_blocks * BLOCK_SIZE) > positions[..., None]  # what comes later, and others' blocks
        mask = torch.zeros(unseen.shape).masked_fill(unseen, torch.finfo(torch.float32).min)
        hidden = self._model.model(
            input_ids=torch.tensor([list(work.tokens) for work in works]),
            position_ids=positions,
            attention_mask=mask[:, None],
            cache=Cache(layers=[_PagedLayer(pages, table, positions) for pages in self.kv_caches]),
        ).last_hidden_state
        likeliest: list[int] = self._model.lm_head(hidden[:, -1]).argmax(-1).tolist()
        return likeliest


class _PagedLayer(CacheLayerMixin):
    """One layer's pages, as one step of some sequences sees them."""

    def __init__(self, pages: Tensor, table: Tensor, positions: Tensor) -> None:
        """Take ``table``, ``(sequences, n)`` block ids, and ``positions``, ``(sequences, new tokens)``."""
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' is not
        self.is_initialized = True  # the pages are the engine's: nothing is allocated here
        self._pages, self._table, self._positions = pages, table, positions

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write the new tokens' KV, each ``(sequences, H, new, D)``; return that of the whole context."""
        blocks = self._table.gather(1, self._positions // BLOCK_SIZE)
        at = self._positions % BLOCK_SIZE
        self._pages[blocks, 0, at] = key_states.transpose(1, 2)
        self._pages[blocks, 1, at] = value_states.transpose(1, 2)
        keys, values = self._pages[self._table].unbind(2)  # (sequences, n, BLOCK_SIZE, H, D) each
        return keys.flatten(1, 2).transpose(1, 2), values.flatten(1, 2).transpose(1, 2)

    def get_seq_length(self) -> int:
        """Return how many tokens come before the new ones; the positions are given, so nobody needs it."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and the first position of the keys that attention will see."""
        return self._table.shape[1] * BLOCK_SIZE, 0

    def get_max_length(self) -> int:
        """Return -1: the length is bounded by the block ids, not by the layer."""
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the pages are there from the start."""


def blocks_for(num_tokens: int) -> int:
    """Return how many blocks ``num_tokens`` tokens take, the last one perhaps in part."""
    return -(-num_tokens // BLOCK_SIZE)
