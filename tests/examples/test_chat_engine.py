import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from chat_engine import (
    BLOCK_SIZE,
    CHUNK,
    BlockAllocator,
    Completion,
    Engine,
    NoPrefixCache,
    build_model,
    weights_digest,
)

SMALL = LlamaConfig(
    vocab_size=260,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
    initializer_range=0.2,  # wide, so that what is attended to decides what is said
)
PROMPT = [(7 * i + i // 5) % 256 for i in range(3 * CHUNK + 21)]
NOTHING = NoPrefixCache()


class CopiedPrefix:
    """Keeps copies of whole blocks by their position; ``limit`` shortens what it gives back, ``spoil`` alters it."""

    def __init__(self, engine: Engine, *, limit: int | None = None, spoil: bool = False) -> None:
        self.pages = list(engine.kv_caches.values())
        self.limit, self.spoil = limit, spoil
        self.blocks: list[list[Tensor]] = [[] for _ in self.pages]
        self.stored_tokens: list[int] = []

    async def load(self, tokens: Sequence[int], block_ids: Sequence[int]) -> int:
        """Fill leading blocks, and the rest with what would be seen if it were read."""
        num_blocks = min(len(self.blocks[0]), len(block_ids))
        if self.limit is not None:
            num_blocks = min(num_blocks, self.limit)
        for pages, blocks in zip(self.pages, self.blocks, strict=True):
            pages[list(block_ids)] = float("nan")
            for block_id, block in zip(block_ids[:num_blocks], blocks[:num_blocks], strict=True):
                pages[block_id] = -block if self.spoil else block
        return num_blocks

    async def store(self, tokens: Sequence[int], block_ids: Sequence[int]) -> None:
        """Keep copies, in place of those kept before."""
        assert len(tokens) == len(block_ids) * BLOCK_SIZE
        self.stored_tokens = list(tokens)
        self.blocks = [[pages[block_id].clone() for block_id in block_ids] for pages in self.pages]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A model that is quick to run and has every part of the large one."""
    return build_model(SMALL, torch.device("cpu"))


@pytest.fixture
async def engine(model: LlamaForCausalLM) -> AsyncIterator[Engine]:
    """An engine that nobody has used, with room for 1,024 tokens."""
    async with Engine.open(model, num_blocks=64) as engine:
        yield engine


async def all_released(engine: Engine) -> None:
    """Return when nobody holds a block: they come back after the engine's last step."""
    engine.allocator.release(await engine.allocator.allocate(engine.allocator.num_blocks))


def assert_same_bits(one: Completion, other: Completion) -> None:
    """The same tokens, chosen by the same logits."""
    assert one.tokens == other.tokens
    assert torch.equal(one.last_logits, other.last_logits)


async def test_pages_give_what_an_unpaged_cache_gives(engine: Engine, model: LlamaForCausalLM) -> None:
    """Scattered pages, padding and chunks change the logits of the model's own cache by rounding only."""
    paged = await engine.generate(PROMPT, max_new_tokens=8, prefix=NOTHING)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([PROMPT]), cache=cache).logits[0, -1]
        for token in paged.tokens[:-1]:
            logits = model(input_ids=torch.tensor([[token]]), cache=cache).logits[0, -1]
    torch.testing.assert_close(paged.last_logits, logits.float(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("num_loaded", "num_reused"),
    [(0, 0), (CHUNK // BLOCK_SIZE - 1, 0), (CHUNK // BLOCK_SIZE + 3, CHUNK), (10**6, 3 * CHUNK)],
)
async def test_reuse_changes_no_bit(engine: Engine, num_loaded: int, num_reused: int) -> None:
    """Whatever prefix was loaded, tokens and last logits are those of a full computation, to the bit."""
    prefix = CopiedPrefix(engine)
    cold = await engine.generate(PROMPT, max_new_tokens=8, prefix=prefix)
    prefix.limit = num_loaded
    warm = await engine.generate(PROMPT, max_new_tokens=8, prefix=prefix)
    assert (cold.num_reused_tokens, warm.num_reused_tokens) == (0, num_reused)
    assert_same_bits(cold, warm)


async def test_a_longer_prompt_reuses_a_shorter_one_exactly(engine: Engine) -> None:
    """The second turn of a conversation may stand on blocks of the first, its last, padded chunk included."""
    first = PROMPT[: 2 * CHUNK - 5]
    prefix = CopiedPrefix(engine)
    await engine.generate(first, max_new_tokens=8, prefix=prefix)
    assert prefix.stored_tokens == first[: len(first) // BLOCK_SIZE * BLOCK_SIZE]
    warm = await engine.generate(PROMPT, max_new_tokens=8, prefix=prefix)
    assert warm.num_reused_tokens == CHUNK
    assert_same_bits(await engine.generate(PROMPT, max_new_tokens=8, prefix=NOTHING), warm)


async def test_every_stored_block_is_the_one_a_longer_prompt_would_compute(engine: Engine) -> None:
    """Blocks of the last, padded chunk too: a block's bits depend on the tokens up to it and on nothing else."""
    short, long = CopiedPrefix(engine), CopiedPrefix(engine)
    await engine.generate(PROMPT[: 2 * CHUNK - 5], max_new_tokens=8, prefix=short)
    await engine.generate(PROMPT, max_new_tokens=1, prefix=long)
    for of_short, of_long in zip(short.blocks, long.blocks, strict=True):
        assert len(of_short) == (2 * CHUNK - 5) // BLOCK_SIZE
        assert all(torch.equal(one, other) for one, other in zip(of_short, of_long, strict=False))


async def test_wrong_kv_is_seen(engine: Engine) -> None:
    """Comparing last logits is a check worth its name: KV that was altered on its way changes them."""
    prefix = CopiedPrefix(engine)
    cold = await engine.generate(PROMPT, max_new_tokens=2, prefix=prefix)
    prefix.spoil = True
    spoiled = await engine.generate(PROMPT, max_new_tokens=2, prefix=prefix)
    assert not torch.equal(cold.last_logits, spoiled.last_logits)


async def test_requests_at_once_get_what_they_get_alone(engine: Engine) -> None:
    """More requests than the cache holds wait for blocks, and company changes no bit."""
    prompts = [PROMPT[start : start + 200] for start in range(0, 120, 20)]
    alone = [await engine.generate(prompt, max_new_tokens=4, prefix=NOTHING) for prompt in prompts]
    together = await asyncio.gather(*(engine.generate(p, max_new_tokens=4, prefix=NOTHING) for p in prompts))
    for one, other in zip(alone, together, strict=True):
        assert_same_bits(one, other)


async def test_a_cancelled_request_gives_its_blocks_back(engine: Engine) -> None:
    """Cancelled before any step, or between two, a request leaves no block behind."""
    for checkpoints in range(6):
        request = asyncio.create_task(engine.generate(PROMPT, max_new_tokens=4, prefix=NOTHING))
        for _ in range(checkpoints):
            await asyncio.sleep(0)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    await all_released(engine)


@pytest.mark.parametrize(("num_tokens", "max_new_tokens"), [(0, 1), (1, 0), (64 * BLOCK_SIZE, 1)])
async def test_an_impossible_request_is_refused(engine: Engine, num_tokens: int, max_new_tokens: int) -> None:
    """No prompt, nothing asked for, or more than the cache: an error at once, and no block held."""
    with pytest.raises(ValueError, match=r"\d"):
        await engine.generate([1] * num_tokens, max_new_tokens=max_new_tokens, prefix=NOTHING)
    assert engine.allocator.num_free == engine.allocator.num_blocks


async def test_blocks_go_to_who_came_first() -> None:
    """A large request waits for all it needs, and a small one behind it does not overtake it."""
    allocator = BlockAllocator(4)
    held = await allocator.allocate(3)
    large, small = (asyncio.create_task(allocator.allocate(n)) for n in (4, 1))
    await asyncio.sleep(0)
    assert not large.done()
    assert not small.done()
    allocator.release(held)
    assert sorted(await large) == [0, 1, 2, 3]
    assert not small.done()
    allocator.release([2])
    assert await small == [2]


def test_weights_name_the_model(model: LlamaForCausalLM) -> None:
    """The digest of the weights is the same for the same seed and another for another one."""
    device = torch.device("cpu")
    assert weights_digest(model) == weights_digest(build_model(SMALL, device))
    assert weights_digest(model) != weights_digest(build_model(SMALL, device, seed=1))
