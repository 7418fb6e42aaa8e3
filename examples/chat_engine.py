"""A small serving engine with a paged KV cache: what ``chat.py`` puts tiered_kv under.

It knows nothing of tiered_kv. Like any paged engine it keeps KV in one tensor of pages per layer, a request holds a
list of block ids, and a ``PrefixCache`` may fill a prompt's leading blocks before the engine computes the rest.

Reuse is exact here, bit for bit. A prompt is always computed in chunks of ``CHUNK`` tokens that start at multiples of
``CHUNK``, the last one padded, one sequence at a time: a chunk is the same work, in the same shapes, whether what comes
before it was computed or loaded. An engine that batches sequences gives this up for throughput.
"""

import asyncio
import hashlib
import math
import time
import timeit
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor
from transformers import Cache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import CacheLayerMixin

BLOCK_SIZE = 16
"""Tokens in a KV block."""

CHUNK = 128
"""Tokens in a step of prefill; a multiple of ``BLOCK_SIZE``."""

PAD = 0
"""Fills the last chunk of a prompt. Causal attention keeps real tokens from seeing it, so any token would do."""

LLAMA_100M = LlamaConfig(
    vocab_size=260,
    hidden_size=768,
    intermediate_size=3072,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=4096,
)
"""104M parameters, grouped-query attention, and a vocabulary of bytes and a few marks."""


def faster_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16, or float32 where that multiplies faster: on CPUs without instructions for bfloat16."""
    if device.type == "cuda":
        return torch.bfloat16
    dtypes = (torch.bfloat16, torch.float32)
    inputs = {dtype: (torch.ones(CHUNK, 768, dtype=dtype), torch.ones(768, 3072, dtype=dtype)) for dtype in dtypes}
    seconds = dict.fromkeys(dtypes, math.inf)
    for turn in range(50):  # by turns, and the best counts: whatever else the machine does, both get a quiet moment
        if turn > 2 and max(seconds.values()) > 4 * min(seconds.values()):
            break  # no doubt about it, and a multiplication without such instructions may take half a second
        for dtype, (chunk, weight) in inputs.items():
            seconds[dtype] = min(seconds[dtype], timeit.timeit(partial(torch.mm, chunk, weight), number=1))
    return min(dtypes, key=seconds.__getitem__)


def build_model(
    config: LlamaConfig, device: torch.device, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> LlamaForCausalLM:
    """Return a Llama whose random weights depend on ``config``, ``dtype`` and ``seed`` alone, not on the device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    torch.nn.Module.to(model, device=device, dtype=dtype).train(mode=False)
    return model


def weights_digest(model: LlamaForCausalLM) -> str:
    """Return ``sha256:...`` over the names and bytes of all weights: what KV made with them is filed under."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.cpu().contiguous().view(torch.uint8).numpy())
    return f"sha256:{digest.hexdigest()}"


class PagedLayer(CacheLayerMixin):
    """One layer's pages as one forward pass of one sequence sees them: ``start`` tokens are there, more are coming.

    Args:
        pages: ``(num_blocks, 2, BLOCK_SIZE, H, D)``, NHD: the keys and the values of all sequences.
        block_ids: ``(n,)`` int64 on the device of ``pages``: the blocks of this sequence, in order.
        start: Tokens of the sequence whose KV is in place.
    """

    def __init__(self, pages: Tensor, block_ids: Tensor, start: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' is not
        self.is_initialized = True  # the pages are the engine's: nothing is allocated here
        self.pages, self.block_ids, self.start = pages, block_ids, start

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write the KV of new tokens, each ``(1, H, n, D)``, and return the sequence's, ``(1, H, start + n, D)``."""
        end = self.start + key_states.shape[2]
        positions = torch.arange(self.start, end, device=self.pages.device)
        blocks, offsets = self.block_ids[positions // BLOCK_SIZE], positions % BLOCK_SIZE
        self.pages[blocks, 0, offsets] = key_states[0].transpose(0, 1)
        self.pages[blocks, 1, offsets] = value_states[0].transpose(0, 1)
        context = self.pages.index_select(0, self.block_ids[: blocks_for(end)])
        keys, values = context.transpose(0, 1).flatten(1, 2)[:, None, :end].transpose(2, 3)
        return keys, values

    def get_seq_length(self) -> int:
        """Return how many tokens come before the new ones."""
        return self.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and the first position of the keys that attention will see."""
        return self.start + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the length is bounded by the block ids, not by the layer."""
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the pages are there from the start."""


def blocks_for(num_tokens: int) -> int:
    """Return how many blocks ``num_tokens`` tokens take, the last one perhaps in part."""
    return -(-num_tokens // BLOCK_SIZE)


class BlockAllocator:
    """Hands out the block ids of the paged cache, first come first served. For one event loop."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._line = asyncio.Lock()
        self._released = asyncio.Event()

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    async def allocate(self, num_blocks: int) -> list[int]:
        """Return ``num_blocks`` ids that are the caller's until released, waiting for others to release theirs.

        Raises:
            ValueError: More than there are.
        """
        if num_blocks > self.num_blocks:
            message = f"a request needs {num_blocks} blocks, the cache has {self.num_blocks}"
            raise ValueError(message)
        async with self._line:  # so that small requests cannot starve a large one
            while self.num_free < num_blocks:
                self._released.clear()
                await self._released.wait()
            return [self._free.pop() for _ in range(num_blocks)]

    def release(self, block_ids: Iterable[int]) -> None:
        """Give blocks back. What is in them means nothing from here on."""
        self._free.extend(block_ids)
        self._released.set()


class PrefixCache(Protocol):
    """What may keep the KV of prompts between requests. Only full blocks of a prompt pass through it."""

    async def load(self, tokens: Sequence[int], block_ids: Sequence[int]) -> int:
        """Fill leading blocks with the KV of ``tokens``; return how many are in place. The rest may hold anything."""

    async def store(self, tokens: Sequence[int], block_ids: Sequence[int]) -> None:
        """Keep the KV of ``tokens``. The blocks are the engine's again on return."""


class NoPrefixCache:
    """Keeps nothing: every token is computed."""

    async def load(self, tokens: Sequence[int], block_ids: Sequence[int]) -> int:
        """Return 0."""
        return 0

    async def store(self, tokens: Sequence[int], block_ids: Sequence[int]) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What one request got, and when."""

    prompt: list[int]
    num_reused_tokens: int
    """Leading prompt tokens whose KV was loaded and not computed."""
    tokens: list[int]
    """Generated greedily, always as many as asked for."""
    last_logits: Tensor
    """``(vocab_size,)`` float32 on the CPU: the ones that chose the last token."""
    ttft_s: float
    """From the request to its first token: waiting, loading and computing."""
    total_s: float
    """From the request to its last token."""


class Engine:
    """Serves many requests at once from one model, a step of one of them at a time.

    Steps run in a thread of the engine's own, which is also their queue: a request submits its next step when the one
    before is done, so requests take turns, and the event loop stays free to load and store. Use it from one event loop,
    by ``async with Engine.open(...) as engine``.
    """

    def __init__(self, model: LlamaForCausalLM, *, num_blocks: int) -> None:
        config = model.config
        shape = (num_blocks, 2, BLOCK_SIZE, config.num_key_value_heads, config.head_dim)
        self.model = model
        self.kv_caches = {
            f"layers.{i}": torch.zeros(shape, dtype=model.dtype, device=model.device)  # type: ignore[arg-type]
            for i in range(config.num_hidden_layers)
        }
        self.allocator = BlockAllocator(num_blocks)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    @classmethod
    @asynccontextmanager
    async def open(cls, model: LlamaForCausalLM, *, num_blocks: int) -> AsyncIterator["Engine"]:
        """Yield an engine with a cache of ``num_blocks`` blocks, and end its thread at the end."""
        engine = cls(model, num_blocks=num_blocks)
        try:
            yield engine
        finally:
            engine._thread.shutdown()

    async def generate(self, prompt: Sequence[int], *, max_new_tokens: int, prefix: PrefixCache) -> Completion:
        """Return ``max_new_tokens`` tokens that continue ``prompt``, computing only the KV that ``prefix`` has not.

        All blocks it can need are allocated at once, as there is no preemption; if too few are free, it waits for them.
        Cancellation gives them back behind the step that is running.

        Raises:
            ValueError: The prompt is empty, no token is asked for, or the cache is too small for the request.
        """
        if not prompt or max_new_tokens < 1:
            message = f"{len(prompt)} prompt tokens and {max_new_tokens} new ones: at least one of each is needed"
            raise ValueError(message)
        arrived = time.perf_counter()
        padded = -(-len(prompt) // CHUNK) * CHUNK
        block_ids = await self.allocator.allocate(blocks_for(max(padded, len(prompt) + max_new_tokens)))
        try:
            reused = await self._load_prefix(prompt, block_ids, prefix)
            table = torch.tensor(block_ids, device=self.model.device)
            for start in range(reused, len(prompt), CHUNK):
                chunk = list(prompt[start : start + CHUNK])
                padding = [PAD] * (CHUNK - len(chunk))
                logits = await self._step(chunk + padding, start, len(chunk) - 1, table)
            tokens = [int(logits.argmax())]
            first_token = time.perf_counter()
            while len(tokens) < max_new_tokens:
                logits = await self._step(tokens[-1:], len(prompt) + len(tokens) - 1, 0, table)
                tokens.append(int(logits.argmax()))
            done = time.perf_counter()
            # Of generated tokens nothing is kept: their KV was rounded in another shape than a prompt's would be.
            full = len(prompt) // BLOCK_SIZE
            await prefix.store(prompt[: full * BLOCK_SIZE], block_ids[:full])
        finally:
            self._release_behind_last_step(block_ids)
        return Completion(list(prompt), reused, tokens, logits, first_token - arrived, done - arrived)

    async def _load_prefix(self, prompt: Sequence[int], block_ids: Sequence[int], prefix: PrefixCache) -> int:
        """Return how many leading tokens are in place: whole chunks, and never the one of the last token."""
        wanted = (len(prompt) - 1) // CHUNK * CHUNK
        num_blocks = await prefix.load(prompt[:wanted], block_ids[: wanted // BLOCK_SIZE])
        return num_blocks * BLOCK_SIZE // CHUNK * CHUNK

    async def _step(self, tokens: list[int], start: int, last: int, block_ids: Tensor) -> Tensor:
        """Compute ``tokens``, which follow ``start`` others, in the engine's thread; return the logits at ``last``."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._forward, tokens, start, last, block_ids)

    @torch.inference_mode()
    def _forward(self, tokens: list[int], start: int, last: int, block_ids: Tensor) -> Tensor:
        device = self.model.device
        cache = Cache(layers=[PagedLayer(pages, block_ids, start) for pages in self.kv_caches.values()])
        output = self.model(
            input_ids=torch.tensor([tokens], device=device),
            cache=cache,
            logits_to_keep=torch.tensor([last], device=device),  # one row, so that its shape is the same in every chunk
        )
        return cast("Tensor", output.logits[0, 0].float().cpu())  # waits for the GPU: no kernel is left behind a step

    def _release_behind_last_step(self, block_ids: list[int]) -> None:
        """Release blocks once no step can write them: a cancelled request does not stop the step it waited for."""
        loop = asyncio.get_running_loop()
        self._thread.submit(loop.call_soon_threadsafe, self.allocator.release, block_ids)
