import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from transformers import (
    CLIPVisionConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import compute_block_hash

from tests.support.serving import serving
from tests.support.shelf import Shelf
from tiered_kv import BlockKeys, ClosedError, ConfigurationError, FileLoadStoreSpec, LookupResult, hash_blocks
from tiered_kv.integrations.transformers import TieredModel, open_tiered
from tiered_kv.integrations.transformers.model import identity_of
from tiered_kv.integrations.transformers.model_parts import LayerPart
from tiered_kv.transfers.submissions import Ticket

SIZE = 16
LENGTHS = (200, 150, 90)
PROMPTS = [[3 + (i * 7 + j * 31) % 250 for i in range(length)] for j, length in enumerate(LENGTHS)]
GREEDY = GenerationConfig(  # type: ignore[no-untyped-call]  # transformers' is not
    max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
)
Model = Any  # what transformers says of its models' methods does not hold for its own models
FULL_BLOCKS = sum((length - 1) // SIZE for length in LENGTHS)


def llama(seed: int = 0) -> Model:
    """Return a small Llama whose tokens depend on the whole prompt."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    model.train(mode=False)
    return model


def llava() -> Model:
    """Return a small model of text and images."""
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2
    }  # fmt: skip
    text, vision = LlamaConfig(vocab_size=64, **sizes), CLIPVisionConfig(image_size=32, patch_size=16, **sizes)
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=63, vision_feature_layer=-1)
    return LlavaForConditionalGeneration(config)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small Llama."""
    folder = tmp_path_factory.mktemp("llama")
    llama().save_pretrained(folder)
    return folder


def load_model(checkpoint: Path) -> Model:
    """Load it as users do."""
    return LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Model:
    """Return the small Llama."""
    return load_model(checkpoint)


@contextmanager
def opened(model: Model, folder: Path, weights: str | None = None) -> Iterator[TieredModel]:
    """Open a cache of CPU memory and a disk."""
    tiers = ["cpu://?capacity=4MiB", f"file://{folder}?capacity=16MiB"]
    with open_tiered(model, {"tiers": tiers}, weights=weights, block_size=SIZE) as tiered:
        yield tiered


def batch(model: Model, *, num_blocks: int = 96, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """Generate by continuous batching."""
    config = ContinuousBatchingConfig(page_size=SIZE, num_blocks=num_blocks, max_batch_tokens=256)
    answers = model.generate_batch(prompts, generation_config=GREEDY, continuous_batching_config=config)
    assert [answer.error for answer in answers.values()] == [None] * len(prompts)
    return [answer.generated_tokens for answer in answers.values()]


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the prompts as one batch, and its mask."""
    pads = [max(LENGTHS) - length for length in LENGTHS]
    ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(pads, PROMPTS, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * length for pad, length in zip(pads, LENGTHS, strict=True)])
    return ids, mask


def generate(model: Model, tiered: TieredModel) -> tuple[list[list[int]], list[int]]:
    """Generate by `generate`, store it; return the tokens, and how many of each prompt were loaded."""
    ids, mask = padded()
    past = tiered.past(ids, mask)
    found = past.num_loaded_tokens
    out = model.generate(ids, attention_mask=mask, cache=past, generation_config=GREEDY)
    past.store(out)
    return out[:, ids.shape[1] :].tolist(), found


@pytest.fixture(scope="module")
def expected(model: Model) -> list[list[int]]:
    """Return what the model says without us."""
    ids, mask = padded()
    out = model.generate(ids, attention_mask=mask, generation_config=GREEDY)
    alone: list[list[int]] = out[:, ids.shape[1] :].tolist()
    assert batch(model) == alone
    assert len({tuple(answer) for answer in alone}) == len(alone)
    return alone


def hits(tiered: TieredModel) -> dict[str, int]:
    """Return the blocks that each tier served."""
    return {tier.tier: tier.hits for tier in tiered.kv.stats().tiers}


def test_a_new_process_generates_the_same_from_what_another_has_stored(
    checkpoint: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """Cold here, warm there: what continuous batching has stored serves both ways to generate."""
    with opened(load_model(checkpoint), tmp_path) as tiered:
        assert batch(load_model(checkpoint)) == expected  # another object: it has no tiers
        assert tiered.kv.stats().stored == 0
    with opened(model := load_model(checkpoint), tmp_path) as tiered:
        assert batch(model) == expected
        assert hits(tiered) == {"cpu": 0, "nvme": 0}
    command = [sys.executable, __file__, str(checkpoint), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == {
        "batch": expected,
        "hits": {"cpu": 0, "nvme": FULL_BLOCKS},
        "generate": expected,
        "loaded": [190, 140, 80],  # padded rows go on at one place, which is 110 + 80 for the third
    }


def test_models_share_prefixes_by_a_server(model: Model, expected: list[list[int]], tmp_path: Path) -> None:
    """By one setting: what one process has generated the next finds in the host's server."""
    with serving(tmp_path, {"medium": "cpu", "capacity": "4MiB"}) as server:
        connect = {"connect": f"unix://{server.path}"}
        for is_warm in (False, True):
            with open_tiered(model, connect, block_size=SIZE) as tiered:
                tokens, found = generate(model, tiered)
            assert tokens == expected
            assert [num_tokens > 0 for num_tokens in found] == [is_warm] * len(PROMPTS)


def test_one_prompt_is_loaded_up_to_its_last_whole_block(
    model: Model, expected: list[list[int]], tmp_path: Path
) -> None:
    """Without padding nothing is lost to other rows; what was generated is stored as well."""
    ids = torch.tensor(PROMPTS[:1])
    with opened(model, tmp_path) as tiered:
        found = []
        for _ in range(2):
            past = tiered.past(ids)
            found.append(past.get_seq_length())
            out = model.generate(ids, cache=past, generation_config=GREEDY)
            assert out[0, LENGTHS[0] :].tolist() == expected[0]
            past.store(out)
        assert found == [0, 192]
        assert tiered.past(out).num_loaded_tokens == [192]
        assert tiered.past(torch.cat([out, out], dim=1)).num_loaded_tokens == [192]  # 207 tokens have KV: 12 blocks


def test_long_prompts_pass_through_little_memory(
    model: Model, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where staging memory holds one block, a prompt arrives block by block."""
    monkeypatch.setattr("tiered_kv.integrations.transformers.model._STAGING_BYTES", 1)
    with opened(model, tmp_path) as tiered:
        assert [generate(model, tiered) for _ in range(2)] == [(expected, [0, 0, 0]), (expected, [190, 140, 80])]


def test_a_copy_that_fails_keeps_nobody_from_loading(model: Model, tmp_path: Path) -> None:
    """As where a device has no memory left: staging memory is free again, while its error is looked at too."""
    ids = torch.tensor(PROMPTS[:1])
    with opened(model, tmp_path) as tiered:
        generate(model, tiered)

        def fail(_part: object, _into: object, _row: int, _num_tokens: int, pieces: Iterator[torch.Tensor]) -> int:
            raise MemoryError(f"no memory for {len(next(pieces))} blocks")

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(LayerPart, "fill", fail)
            with pytest.raises(MemoryError, match="12 blocks") as raised:
                tiered.past(ids)
        assert tiered.past(ids).num_loaded_tokens == [192]
        assert raised.tb is not None  # which has the frames in which it failed


def test_loaded_pages_are_what_is_computed_with(model: Model, expected: list[list[int]], tmp_path: Path) -> None:
    """A control: KV of other weights under this model's name changes what it says, so the pages are not recomputed."""
    other = llama(seed=1)
    with opened(other, tmp_path, weights="a wrong name") as tiered:
        batch(other)
        assert tiered.kv.stats().stored > 0
    with opened(model, tmp_path, weights="a wrong name") as tiered:
        assert generate(model, tiered)[0] != expected
        assert batch(model) != expected
        assert hits(tiered)["nvme"] > 0
    with opened(model, tmp_path) as tiered:  # by its own name it is another model
        assert batch(model) == expected
        assert hits(tiered) == {"cpu": 0, "nvme": 0}


@pytest.mark.parametrize("way", ["batch", "generate"])
def test_a_flipped_byte_on_disk_is_computed_again(
    model: Model, expected: list[list[int]], tmp_path: Path, way: str
) -> None:
    """The prefix before it is served, and no wrong token is said."""
    keys = hash_blocks(PROMPTS[0], block_size=SIZE)
    with opened(model, tmp_path) as tiered:
        batch(model)
        tiered.kv.flush()
        tiered.kv.evict(keys, tier="cpu")
        (run,) = tiered.kv.lookup(keys[3:4], where=True).runs
    assert isinstance(run.spec, FileLoadStoreSpec)
    ((path, offset, length),) = run.spec.places()
    with Path(path).open("r+b") as file:
        file.seek(offset + length - SIZE)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with opened(model, tmp_path) as tiered:
        if way == "batch":
            assert batch(model, prompts=PROMPTS[:1]) == expected[:1]
        else:
            past = tiered.past(ids := torch.tensor(PROMPTS[:1]))
            assert past.num_loaded_tokens == [3 * SIZE]
            out = model.generate(ids, cache=past, generation_config=GREEDY)
            assert out[0, LENGTHS[0] :].tolist() == expected[0]
        assert hits(tiered)["nvme"] == 3
        assert tiered.kv.stats()["nvme"].corrupt == 1


def test_a_block_evicted_between_lookup_and_load_is_computed(
    model: Model, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefix before it is used; free pages go back, and nothing of the others is used."""
    with opened(model, tmp_path):
        batch(model)
    with opened(model, tmp_path) as tiered:
        lookup = tiered.kv.lookup

        def forgetful(keys: BlockKeys) -> LookupResult:
            found = lookup(keys)
            tiered.kv.evict(keys[2:3])
            return found

        monkeypatch.setattr(tiered.kv, "lookup", forgetful)
        assert batch(model) == expected
        assert hits(tiered)["nvme"] == 2 * len(PROMPTS)
        # The run before has stored the third block again. The first row has two blocks, so nobody goes on behind them.
        assert generate(model, tiered) == (expected, [32, 0, 0])


@pytest.mark.parametrize("way", ["batch", "generate"])
def test_storage_that_stalls_is_not_waited_for(model: Model, expected: list[list[int]], way: str) -> None:
    """What it has and does not give is computed, after as long as a load may take; then it is not asked any more."""
    Shelf.shelf.clear()
    shelf = {"medium": "tests.support.shelf:Shelf", "capacity": "4MiB"}
    limits = {"load_timeout_s": 0.3, "close_timeout_s": 0.3}
    settings = {"tiers": ["cpu://?capacity=4MiB", shelf], "limits": limits}
    with open_tiered(model, settings, block_size=SIZE) as tiered:
        batch(model)
        tiered.kv.flush()
    Shelf.stalled.update(key.hash[:8] for key in Shelf.shelf)
    try:
        with open_tiered(model, settings, block_size=SIZE) as tiered:
            assert tiered.kv.lookup(hash_blocks(PROMPTS[0], block_size=SIZE)).num_blocks > 0
            assert (batch(model) if way == "batch" else generate(model, tiered)[0]) == expected
            assert set(hits(tiered).values()) == {0}
    finally:
        Shelf.stalled.clear()
        Shelf.shelf.clear()


def test_what_its_own_pages_serve_is_not_forgotten_below(model: Model) -> None:
    """A prompt that is never loaded stays in a tier that is too small for all that comes beside it."""
    tier = {"medium": "cpu", "capacity": "160KiB", "policy": "lru"}  # 20 blocks
    config = ContinuousBatchingConfig(page_size=SIZE, num_blocks=192, max_batch_tokens=256)
    keys = hash_blocks(PROMPTS[2], block_size=SIZE)
    with open_tiered(model, {"tiers": [tier]}, block_size=SIZE) as tiered:
        for number in range(2):
            other = [3 + (i * 11 + number * 17) % 250 for i in range(180)]
            for prompt in (PROMPTS[2], other):
                model.generate_batch(
                    [prompt], generation_config=GREEDY, continuous_batching_config=config, persistent_manager=True
                )
        assert tiered.kv.lookup(keys).num_blocks == len(keys)
        assert hits(tiered) == {"cpu": 0}
    model.destroy_cached_continuous_batching_manager()


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_what_the_last_step_has_computed_is_stored(model: Model, tmp_path: Path, num_tokens: int) -> None:
    """A prompt that one step computes and answers, and a block that an answer's last step completes."""
    config = ContinuousBatchingConfig(page_size=SIZE, num_blocks=96, max_batch_tokens=1024)
    asked = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)  # type: ignore[no-untyped-call]  # transformers' is not
    with opened(model, tmp_path) as tiered:
        answers = model.generate_batch(PROMPTS, generation_config=asked, continuous_batching_config=config)
        for prompt, answer in zip(PROMPTS, answers.values(), strict=True):
            keys = hash_blocks((prompt + answer.generated_tokens)[:-1], block_size=SIZE)
            assert tiered.kv.lookup(keys).num_blocks == len(keys)


def test_memory_that_is_short_is_shared_with_stores(model: Model, expected: list[list[int]], tmp_path: Path) -> None:
    """With pages for little more than one request at a time, all are served, cold and warm."""
    with opened(model, tmp_path) as tiered:
        for _ in range(2):
            assert batch(model, num_blocks=16) == expected
        assert hits(tiered)["cpu"] > 0


def test_the_model_is_its_own_again_when_the_block_ends(
    model: Model, expected: list[list[int]], tmp_path: Path
) -> None:
    """Continuous batching that is kept for later has all its pages, and goes on without tiers."""
    config = ContinuousBatchingConfig(page_size=SIZE, num_blocks=96, max_batch_tokens=256)
    with opened(model, tmp_path):
        model.generate_batch(
            PROMPTS, generation_config=GREEDY, continuous_batching_config=config, persistent_manager=True
        )
    assert "init_continuous_batching" not in vars(model)
    cache = model._cached_continuous_batching_manager.batch_processor.cache  # noqa: SLF001
    assert not {"search_prefix_match", "mark_complete_blocks", "evict_cached_blocks"} & set(vars(cache))
    assert cache.evict_cached_blocks()
    cache.pool.try_to_free_sectors()
    assert cache.compute_free_capacity() == 1.0
    assert batch(model) == expected
    model.destroy_cached_continuous_batching_manager()


def test_a_batch_that_goes_on_without_tiers_has_all_its_pages(model: Model, expected: list[list[int]]) -> None:
    """Where the block ends between two of its steps: also those that a store was reading."""
    config = ContinuousBatchingConfig(page_size=SIZE, num_blocks=96, max_batch_tokens=256)
    asked = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0)  # type: ignore[no-untyped-call]  # transformers' is not
    with ExitStack() as opening:
        opening.enter_context(open_tiered(model, {"tiers": ["cpu://?capacity=4MiB"]}, block_size=SIZE))
        manager = model.init_continuous_batching(generation_config=asked, continuous_batching_config=config)
        manager.warmup()
        manager.start()

        def first_tokens() -> dict[str, int]:
            ids = manager.add_requests(PROMPTS)
            answers = [next(iter(manager)) for _ in ids]
            return {answer.request_id: answer.generated_tokens[0] for answer in answers}

        first_tokens()
        with manager.pause():
            opening.close()
    assert sorted(first_tokens().values()) == sorted(answer[0] for answer in expected)
    manager.stop(keep_for_next_session=True)
    cache = manager.batch_processor.cache
    assert not {"search_prefix_match", "mark_complete_blocks", "evict_cached_blocks"} & set(vars(cache))
    cache.evict_cached_blocks()
    cache.pool.try_to_free_sectors()
    assert cache.compute_free_capacity() == 1.0
    model.destroy_cached_continuous_batching_manager()


@pytest.mark.parametrize("call", ["lookup", "load", "submit_store"])
def test_a_fault_of_ours_ends_no_batch(
    call: str, model: Model, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is raised at the generation loop would end all of its requests: they go on without tiers."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    with opened(model, tmp_path) as tiered:
        assert batch(model) == expected
        with monkeypatch.context() as patched, capture_logs() as logs:
            patched.setattr(tiered.kv, call, fails)
            assert batch(model) == expected
        assert "continuous batching" in [each.get("task") for each in logs if each["event"] == "background.failed"]
        assert batch(model) == expected
        assert hits(tiered)["cpu"] > 0  # the next batch has the tiers again


def test_after_a_fault_of_ours_a_batch_that_is_kept_has_the_tiers_again(
    model: Model, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the next run of its generation loop, with the paged cache that it has: what that computes is stored."""
    config = ContinuousBatchingConfig(page_size=SIZE, num_blocks=96, max_batch_tokens=256)

    def kept(prompts: list[list[int]]) -> list[list[int]]:
        answers = model.generate_batch(
            prompts, generation_config=GREEDY, continuous_batching_config=config, persistent_manager=True
        )
        return [answer.generated_tokens for answer in answers.values()]

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    with opened(model, tmp_path) as tiered:
        with monkeypatch.context() as patched, capture_logs():
            patched.setattr(tiered.kv, "submit_store", fails)
            assert kept(PROMPTS[:1]) == expected[:1]
        assert tiered.kv.stats().stored == 0
        assert kept(PROMPTS[1:]) == expected[1:]
        tiered.kv.flush()
        found = [tiered.kv.lookup(hash_blocks(each, block_size=SIZE)).num_blocks for each in PROMPTS[1:]]
        assert found == [length // SIZE for length in LENGTHS[1:]]
    cache = model._cached_continuous_batching_manager.batch_processor.cache  # noqa: SLF001
    assert not {"search_prefix_match", "mark_complete_blocks", "evict_cached_blocks"} & set(vars(cache))
    assert all_are_free(model)


def all_are_free(model: Model) -> bool:
    """Say whether nothing is held of the pages of a batch that is kept, and give that up."""
    cache = model._cached_continuous_batching_manager.batch_processor.cache  # noqa: SLF001
    cache.evict_cached_blocks()
    cache.pool.try_to_free_sectors()
    model.destroy_cached_continuous_batching_manager()
    return bool(cache.compute_free_capacity() == 1.0)


def test_a_fault_as_blocks_are_named_loses_none_of_them(
    model: Model, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was taken for blocks from tiers is free again, or named."""
    config = ContinuousBatchingConfig(page_size=SIZE, num_blocks=96, max_batch_tokens=256)
    numbers = iter(range(1 << 30))

    def fails(parent: int | None, tokens: list[int]) -> int:
        if next(numbers) == 2:
            raise RuntimeError("planted")
        return int(compute_block_hash(parent, tokens))

    with opened(model, tmp_path):
        assert batch(model) == expected
        with monkeypatch.context() as patched, capture_logs() as logs:
            patched.setattr("tiered_kv.integrations.transformers.batching.compute_block_hash", fails)
            answers = model.generate_batch(
                PROMPTS, generation_config=GREEDY, continuous_batching_config=config, persistent_manager=True
            )
        assert [answer.generated_tokens for answer in answers.values()] == expected
        assert "continuous batching" in [each.get("task") for each in logs if each["event"] == "background.failed"]
    assert all_are_free(model)


def test_a_store_of_which_nobody_says_how_it_ends_keeps_no_pages(
    model: Model, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop may be gone before the cache is closed: the batch goes on, and its pages are free."""
    config = ContinuousBatchingConfig(page_size=SIZE, num_blocks=96, max_batch_tokens=256)

    def fails(*_: object) -> None:
        raise ClosedError("planted")

    with opened(model, tmp_path), monkeypatch.context() as patched:
        patched.setattr(Ticket, "wait", fails)
        answers = model.generate_batch(
            PROMPTS, generation_config=GREEDY, continuous_batching_config=config, persistent_manager=True
        )
    assert [answer.generated_tokens for answer in answers.values()] == expected
    assert all_are_free(model)


def test_a_batch_that_was_kept_idle_has_the_tiers_of_the_next_block(model: Model) -> None:
    """Whose methods are not taken for the cache's own, nor taken away by those of the block before."""
    config = ContinuousBatchingConfig(page_size=SIZE, num_blocks=96, max_batch_tokens=256)
    asked = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0)  # type: ignore[no-untyped-call]  # transformers' is not
    settings = {"tiers": ["cpu://?capacity=4MiB"]}
    others = [[5 + (i * 11 + j * 17) % 250 for i in range(4 * SIZE)] for j in range(3)]

    def answered(prompts: list[list[int]]) -> Any:  # noqa: ANN401 - transformers'
        manager = model.init_continuous_batching(generation_config=asked, continuous_batching_config=config)
        manager.start()
        for _ in manager.add_requests(prompts):
            next(iter(manager))
        return manager

    with open_tiered(model, settings, block_size=SIZE):
        manager = answered(PROMPTS)
    manager.stop(keep_for_next_session=True)
    with open_tiered(model, settings, block_size=SIZE) as tiered:
        manager = answered(others)
        manager.stop(keep_for_next_session=True)
        tiered.kv.flush()
        assert [tiered.kv.lookup(hash_blocks(each, block_size=SIZE)).num_blocks for each in others] == [4] * 3
    model.destroy_cached_continuous_batching_manager()


def test_pages_of_a_batch_that_is_over_are_free(model: Model, tmp_path: Path) -> None:
    """Whoever generates by many batches has the memory of one: the last one's pages go before others are made."""
    alive = weakref.WeakSet[torch.Tensor]()
    others = []
    make = PagedAttentionCache.__init__

    def count(cache: PagedAttentionCache, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - what it wraps
        others.append(len(alive))
        make(cache, *args, **kwargs)
        alive.add(cache.cache_tensor)

    with pytest.MonkeyPatch.context() as patched, opened(model, tmp_path):
        patched.setattr(PagedAttentionCache, "__init__", count)
        for _ in range(3):
            batch(model)
    assert others == [0, 0, 0]


def test_tiers_serve_one_batch_at_a_time(model: Model, expected: list[list[int]], tmp_path: Path) -> None:
    """One that begins beside it is refused: what one has computed would be stored from the other's pages."""
    config = ContinuousBatchingConfig(page_size=SIZE, num_blocks=96, max_batch_tokens=256)
    with opened(model, tmp_path) as tiered:
        with model.continuous_batching_context_manager(
            generation_config=GREEDY, continuous_batching_config=config
        ) as first:
            with pytest.raises(ConfigurationError, match="one at a time"):
                batch(model)
            first.add_requests(PROMPTS)
            for _ in PROMPTS:
                assert next(iter(first)).error is None
        assert generate(model, tiered) == (expected, [190, 140, 80])
        assert batch(model) == expected


def test_tenants_share_nothing(model: Model, tmp_path: Path) -> None:
    """A salt keeps equal prompts apart."""
    settings = {"tiers": ["cpu://?capacity=4MiB", f"file://{tmp_path}?capacity=16MiB"]}
    found = []
    for salt in ("a", "b", "a"):
        with open_tiered(model, settings, block_size=SIZE, salt=salt) as tiered:
            found.append(generate(model, tiered)[1][0])
    assert found == [0, 0, 190]


def test_a_model_has_one_cache_at_a_time(model: Model, expected: list[list[int]]) -> None:
    """Of two that are open, one tenant's prompts would be found in the other's: the second one is refused."""
    settings = {"tiers": ["cpu://?capacity=4MiB"]}
    with open_tiered(model, settings, block_size=SIZE, salt="a") as tiered:
        with (
            pytest.raises(ConfigurationError, match="has a cache open for this model"),
            open_tiered(model, settings, block_size=SIZE, salt="b"),
        ):
            pass
        assert batch(model) == expected
        assert tiered.kv.lookup(hash_blocks(PROMPTS[0], block_size=SIZE, salt="a")).num_blocks > 0
    with open_tiered(model, settings, block_size=SIZE, salt="b") as tiered:
        assert batch(model) == expected
        assert hits(tiered) == {"cpu": 0}


def test_what_cannot_be_right_is_refused(model: Model, tmp_path: Path) -> None:
    """Before anything is generated, with what to do."""
    ids, mask = padded()
    with pytest.raises(ConfigurationError, match="not str"), open_tiered("my-model"):  # type: ignore[arg-type]
        pass
    with pytest.raises(ConfigurationError, match="salt must be"), open_tiered(model, salt=5):  # type: ignore[arg-type]
        pass
    with opened(model, tmp_path) as tiered:
        for wrong in ({"input_ids": ids, "attention_mask": mask}, ids.tolist()):
            with pytest.raises(ConfigurationError, match="input_ids must be a tensor"):
                tiered.past(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="sequences must be a tensor"):
            tiered.past(ids, mask).store(ids.tolist())  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="left"):
            tiered.past(ids, mask.flip(1))
        with pytest.raises(ConfigurationError, match="must be equal"):
            tiered.past(ids, mask[:, 1:])
        with pytest.raises(ConfigurationError, match=r"pages of continuous batching have 256 tokens"):
            model.generate_batch(PROMPTS, generation_config=GREEDY)
        past = tiered.past(ids, mask)
        with pytest.raises(ConfigurationError, match="do not begin with the prompts"):
            past.store(ids.flip(0))
        with pytest.raises(ConfigurationError, match="without beams"):
            model.generate(
                ids, attention_mask=mask, cache=past, generation_config=GREEDY, num_return_sequences=2,
                do_sample=True,
            )  # fmt: skip


def test_other_versions_are_refused_where_they_differ(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one at once; in a newer one the pages of continuous batching, which only one version has so."""
    monkeypatch.setattr(f"{LayerPart.__module__}.transformers.__version__", "5.23.1")
    with (
        pytest.raises(ConfigurationError, match=r"needs transformers 5\.24 or newer, this is 5\.23\.1"),
        opened(model, tmp_path),
    ):
        pass
    monkeypatch.setattr(f"{LayerPart.__module__}.transformers.__version__", "5.25.0.dev0")
    with opened(model, tmp_path) as tiered:
        with pytest.raises(ConfigurationError, match=r"made for transformers 5\.24, this is 5\.25\.0\.dev0"):
            batch(model)
        ids = torch.tensor(PROMPTS[:1])
        past = tiered.past(ids)
        assert past.store(model.generate(ids, cache=past, generation_config=GREEDY)) == (LENGTHS[0] + 7) // SIZE


def test_what_generate_hides_by_itself_is_refused(model: Model, tmp_path: Path) -> None:
    """Without a mask it hides a token that is its padding: KV computed so is no other prompt's, and is not stored.

    With a mask of ones the token is one like any other, as it is where it ends answers, and in continuous batching.
    """
    prompt = [0 if 20 <= at < 40 else token for at, token in enumerate(PROMPTS[0])]
    ids = torch.tensor([prompt])
    ends = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=0, pad_token_id=0)  # type: ignore[no-untyped-call]  # transformers' is not
    (expected,) = batch(model, prompts=[prompt])
    with opened(model, tmp_path) as tiered:
        with pytest.raises(ConfigurationError, match="same attention_mask"):
            model.generate(ids, cache=tiered.past(ids), generation_config=GREEDY)
        rows, mask = padded()
        with pytest.raises(ConfigurationError, match="same attention_mask"):
            model.generate(rows, attention_mask=mask, cache=tiered.past(rows), generation_config=GREEDY)
        ones = torch.ones_like(ids)
        for asked, config, num_loaded in ((ones, GREEDY, 0), (None, ends, 192)):
            past = tiered.past(ids)
            assert past.num_loaded_tokens == [num_loaded]
            out = model.generate(ids, attention_mask=asked, cache=past, generation_config=config)
            assert out[0, len(prompt) :].tolist() == expected
            past.store(out)
        assert batch(model, prompts=[prompt]) == [expected]


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_a_cache_is_told_what_is_hidden_whatever_it_is_given_as(model: Model, tmp_path: Path) -> None:
    """The argument has had two names."""
    rows, _ = padded()
    with opened(model, tmp_path) as tiered:
        for name in ("cache", "past_key_values"):
            given = {name: tiered.past(rows)}
            with pytest.raises(ConfigurationError, match="same attention_mask"):
                model.generate(rows, generation_config=GREEDY, **given)
            with pytest.raises(ConfigurationError, match="same attention_mask"):
                model(rows, attention_mask=torch.zeros_like(rows), **given)


def test_what_is_computed_unseen_is_refused(model: Model, tmp_path: Path) -> None:
    """By a part of the model, by another, or when nobody looks any more: what is hidden there nobody can tell."""
    ids = torch.tensor(PROMPTS[:1])
    with opened(model, tmp_path) as tiered:
        past = tiered.past(ids)
        with pytest.raises(ConfigurationError, match="no step of the model"):
            model.model(ids, cache=past)
        with pytest.raises(ConfigurationError, match="no step of the model"):
            llama(1).generate(ids, cache=past, generation_config=GREEDY)
        assert past.get_seq_length() == 0
        model(ids, cache=past)
        assert past.store(ids) == LENGTHS[0] // SIZE
    with pytest.raises(ConfigurationError, match="no step of the model"):
        model.generate(ids, cache=past, generation_config=GREEDY)


def test_rows_of_a_cache_stay_those_of_its_prompts(model: Model, tmp_path: Path) -> None:
    """Taken, repeated or in another order they would be stored under the names of others."""
    ids, mask = padded()
    with opened(model, tmp_path) as tiered:
        past = tiered.past(ids, mask)
        out = model.generate(ids, attention_mask=mask, cache=past, generation_config=GREEDY)
        others = torch.tensor([1, 0, 2])
        with pytest.raises(ConfigurationError, match="one sequence a row"):
            past.batch_select_indices(others)
        with pytest.raises(ConfigurationError, match="one sequence a row"):
            past.batch_repeat_interleave(2)
        with pytest.raises(ConfigurationError, match="one sequence a row"):
            past.reorder_cache(others)
        assert past.store(out) == sum((length + 7) // SIZE for length in LENGTHS)
        again = model.generate(ids, attention_mask=mask, cache=tiered.past(ids, mask), generation_config=GREEDY)
        assert torch.equal(again, out)


def test_assisted_decoding_goes_on_from_what_was_loaded(
    model: Model, expected: list[list[int]], tmp_path: Path
) -> None:
    """Its first step is given the whole prompt, whatever its cache has: nothing is added, or stored, twice."""
    ids = torch.tensor(PROMPTS[:1])
    guessing = GenerationConfig(**(GREEDY.to_diff_dict() | {"prompt_lookup_num_tokens": 3}))  # type: ignore[no-untyped-call]  # transformers' is not
    with opened(model, tmp_path) as tiered:
        for config, num_loaded in ((GREEDY, 0), (guessing, 192), (GREEDY, 192)):
            past = tiered.past(ids)
            assert past.num_loaded_tokens == [num_loaded]
            out = model.generate(ids, cache=past, generation_config=config)
            assert out[0, LENGTHS[0] :].tolist() == expected[0]
            assert past.get_seq_length() < out.shape[1]
            past.store(out)


def test_what_tokens_do_not_tell_is_refused(model: Model, expected: list[list[int]], tmp_path: Path) -> None:
    """Places of one's own, and embeddings: KV computed so is no other prompt's. Places that are usual may be said."""
    ids, mask = padded()
    usual = (mask.cumsum(-1) - 1).clamp(min=0)
    with opened(model, tmp_path) as tiered:
        for given in (
            {"input_ids": ids, "position_ids": usual * 2},
            {"input_ids": ids, "position_ids": usual + 1},
            {"inputs_embeds": model.get_input_embeddings()(ids)},
        ):
            past = tiered.past(ids, mask)
            with pytest.raises(ConfigurationError, match="named by tokens"):
                model.generate(attention_mask=mask, cache=past, generation_config=GREEDY, **given)
        for num_loaded in (0, 80):
            past = tiered.past(ids, mask)
            assert past.num_loaded_tokens[-1] == num_loaded
            out = model.generate(ids, attention_mask=mask, position_ids=usual, cache=past, generation_config=GREEDY)
            assert out[:, ids.shape[1] :].tolist() == expected
            past.store(out)


def test_a_mask_of_which_token_sees_which_is_its_maker_s(model: Model, tmp_path: Path) -> None:
    """It is not looked at: nobody hides tokens by it without saying so."""
    ids = torch.tensor(PROMPTS[:1])
    seen = torch.ones(LENGTHS[0], LENGTHS[0], dtype=torch.bool).tril()[None, None]
    with opened(model, tmp_path) as tiered, torch.no_grad():
        logits = model(ids, attention_mask=seen, cache=tiered.past(ids)).logits
        assert torch.equal(logits.argmax(-1), model(ids).logits.argmax(-1))


def test_prompts_with_images_are_refused() -> None:
    """Their tokens are the same whatever an image shows; text for the same model is served."""
    with open_tiered(llava(), {"tiers": ["cpu://?capacity=4MiB"]}, weights="w", block_size=SIZE) as tiered:
        assert tiered.past(torch.tensor([[1, 2, 3]])).num_loaded_tokens == [0]
        with pytest.raises(ConfigurationError, match="has image tokens"):
            tiered.past(torch.tensor([[1, 63, 63, 63, 63, 2]]))


@pytest.mark.parametrize("rope", ["dynamic", "longrope", "of one type of layers"])
def test_keys_that_go_by_a_prompt_s_length_are_refused(rope: str) -> None:
    """What a short prompt has stored would be read by a longer one, whose own keys are rotated otherwise."""
    sizes: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    plain: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    dynamic = {**plain, "rope_type": "dynamic", "factor": 4.0}
    factors = {"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    model: Model
    if rope == "of one type of layers":
        types: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
        ropes = {"sliding_attention": plain, "full_attention": dynamic}
        model = Gemma3ForCausalLM(Gemma3TextConfig(rope_parameters=ropes, **types, **sizes))
    else:
        long = {**plain, "rope_type": "longrope", "original_max_position_embeddings": 128, **factors}
        model = LlamaForCausalLM(LlamaConfig(rope_parameters=dynamic if rope == "dynamic" else long, **sizes))
    with (
        pytest.raises(ConfigurationError, match="by how long that is"),
        open_tiered(model, {"tiers": ["cpu://?capacity=4MiB"]}, weights="w"),
    ):
        pass


def test_weights_are_told_from_the_checkpoint(checkpoint: Path, model: Model) -> None:
    """Loaded again they are the same; a model made in memory, or with an adapter, has to be named.

    Other positions, or weights that are quantized as they are loaded, are another model.
    """
    assert identity_of(load_model(checkpoint)) == identity_of(model)
    assert identity_of(model).weights.startswith("files:")
    with pytest.raises(ConfigurationError, match="pass weights="):
        identity_of(llama())
    scaled = load_model(checkpoint)
    scaled.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    assert identity_of(scaled) != identity_of(model)
    for make in (llama, llava):
        whole, quantized = make(), make()
        quantized.config.quantization_config = {"load_in_4bit": True, "quant_method": "bitsandbytes"}
        assert identity_of(whole, "w") == identity_of(make(), "w")
        assert identity_of(quantized, "w") != identity_of(whole, "w")
    adapted = load_model(checkpoint)
    adapted._hf_peft_config_loaded = True  # noqa: SLF001 - as loading an adapter does
    with pytest.raises(ConfigurationError, match="adapters"):
        identity_of(adapted)


def test_other_weights_of_one_checkpoint_are_another_model(tmp_path: Path) -> None:
    """A folder may have several: nothing but what was loaded tells which, nor what was changed since."""
    for seed, (folder, variant) in enumerate([(tmp_path, None), (tmp_path / "b", None), (tmp_path, "other")]):
        llama(seed).save_pretrained(folder, variant=variant)
    ways: list[dict[str, Any]] = [{}, {"subfolder": "b"}, {"variant": "other"}]
    models = [LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **way) for way in ways for _ in range(2)]
    named = [identity_of(model) for model in models]
    assert named[::2] == named[1::2]
    assert len({*named}) == len(ways)
    with torch.no_grad():
        models[0].model.layers[1].mlp.up_proj.weight.mul_(2)
    assert identity_of(models[0]) != named[0]


def test_code_of_a_checkpoint_that_was_changed_is_another_model(tmp_path: Path) -> None:
    """Where transformers runs it; of a class of its own it runs none, whatever lies in the folder."""
    llama().save_pretrained(tmp_path)

    class OfItsOwn(LlamaForCausalLM):  # type: ignore[no-untyped-call]  # transformers' hook
        __module__ = "transformers_modules.folder.modeling"

    models = [each.from_pretrained(tmp_path, dtype=torch.float32) for each in (OfItsOwn, LlamaForCausalLM)]
    before = [identity_of(model) for model in models]
    (tmp_path / "modeling.py").write_text("changed = True")
    assert [identity_of(model) == named for model, named in zip(models, before, strict=True)] == [False, True]
    assert [identity_of(model, "w") == identity_of(model, "w") for model in models] == [True, True]


def test_code_of_another_checkpoint_is_told_by_its_commit(tmp_path: Path) -> None:
    """Of the one whose classes the config of a fine-tune names: its newest was loaded, which no file here says."""
    llama().save_pretrained(tmp_path)
    named = []
    for commit in (40 * "a", 40 * "b"):

        class OfAnother(LlamaForCausalLM):  # type: ignore[no-untyped-call]  # transformers' hook
            __module__ = f"transformers_modules.some.code.{commit}.modeling"

        named.append(identity_of(OfAnother.from_pretrained(tmp_path, dtype=torch.float32)))
    assert named[0] != named[1]


def test_adapters_that_come_later_are_refused(model: Model, tmp_path: Path) -> None:
    """What they compute would have the names of what the model computes without them, by both ways to generate."""
    with opened(model, tmp_path) as tiered:
        ids = padded()[0]
        past = tiered.past(ids)
        model.peft_config = {"default": None}  # as PEFT does
        with pytest.raises(ConfigurationError, match="adapters since open_tiered"):
            model.generate(ids, attention_mask=torch.ones_like(ids), cache=past, max_new_tokens=2)
        with pytest.raises(ConfigurationError, match="adapters since open_tiered"):
            tiered.past(padded()[0])
        with pytest.raises(ConfigurationError, match="adapters since open_tiered"):
            batch(model)
        del model.peft_config
        assert batch(model)


def test_adapters_that_come_as_a_batch_runs_have_it_go_on_without_tiers(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that they compute is stored, nothing that was is loaded; its requests are answered all the same."""
    config = ContinuousBatchingConfig(page_size=SIZE, num_blocks=96, max_batch_tokens=256)
    with (
        opened(model, tmp_path) as tiered,
        model.continuous_batching_context_manager(
            generation_config=GREEDY, continuous_batching_config=config
        ) as running,
        capture_logs() as logs,
    ):
        monkeypatch.setattr(model, "peft_config", {"default": None}, raising=False)
        running.add_requests(PROMPTS)
        assert [next(iter(running)).error for _ in PROMPTS] == [None] * len(PROMPTS)
        monkeypatch.undo()
        assert tiered.kv.stats().stored == 0
    assert [each["event"] for each in logs].count("background.failed") == 1


class Adapted(torch.nn.Module):
    """A layer as PEFT puts it in the place of another."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.active, self.disable_adapters = ["a"], False
        self.merged_adapters: list[str] = []
        self.scaling = {"a": 0.01, "b": 0.01}
        self.biases = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(1)) for name in "ab"})
        self.layers = torch.nn.ModuleDict({name: torch.nn.Identity() for name in "ab"})

    @property
    def active_adapters(self) -> list[str]:
        """Those that are added to what the layer computes."""
        return self.active

    def forward(self, states: torch.Tensor) -> Any:  # noqa: ANN401 - the layer's
        """Compute what the layer does, and something of each adapter."""
        names = self.merged_adapters or self.active
        added = sum(self.scaling.get(name, 0.01) * sum(map(ord, name)) for name in names)
        return self.layer(states) + (0 if self.disable_adapters else added)


def put_in_place(attention: torch.nn.Module, layer: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have attention use another layer for its values, until the test has ended."""
    # pytest 9.2 would end an attribute by taking it away: it finds none that was there before, as modules are apart.
    monkeypatch.setitem(attention._modules, "v_proj", layer)  # noqa: SLF001 - torch has no other way


def with_adapters(model: Model, monkeypatch: pytest.MonkeyPatch) -> Adapted:
    """Give one layer of a model two adapters, as PEFT would, and return it."""
    attention = model.model.layers[0].self_attn
    adapted = Adapted(attention.v_proj)
    put_in_place(attention, adapted, monkeypatch)
    monkeypatch.setattr(model, "peft_config", {"a": None, "b": None}, raising=False)
    return adapted


@pytest.mark.parametrize(
    "change",
    [{"active": ["b"]}, {"disable_adapters": True}, {"merged_adapters": ["b"]}, {"scaling": {"a": 0.1}}],
    ids=["other", "none", "merged", "more"],
)
def test_other_adapters_than_the_cache_was_opened_with_are_refused(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """What they compute would have the names of what those have that were active."""
    adapted = with_adapters(model, monkeypatch)
    with opened(model, tmp_path, weights="tuned, adapter a") as tiered:
        alone, _ = generate(model, tiered)
        with monkeypatch.context() as changed:
            for name, value in change.items():
                changed.setattr(adapted, name, value)
            with pytest.raises(ConfigurationError, match="other adapters since open_tiered"):
                tiered.past(padded()[0])
            with pytest.raises(ConfigurationError, match="other adapters since open_tiered"):
                batch(model)
        adapted.merged_adapters, adapted.scaling["b"] = ["a"], 0.1  # which computes the same
        assert generate(model, tiered)[0] == alone


@pytest.mark.parametrize("kind", ["biases", "layers"])
def test_another_adapter_of_the_same_name_is_refused(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """One that was trained anew, say, is loaded once the first was deleted: what that has stored is not its."""
    adapted = with_adapters(model, monkeypatch)
    parts = getattr(adapted, kind)
    with opened(model, tmp_path, weights="tuned, adapter a") as tiered:
        del parts["b"]
        parts["b"] = torch.nn.Identity() if kind == "layers" else torch.nn.Parameter(torch.zeros(1))
        tiered.past(padded()[0])  # which is not of that one
        for _ in range(2):
            del parts["a"]
            parts["a"] = torch.nn.Identity() if kind == "layers" else torch.nn.Parameter(torch.zeros(1))
            with pytest.raises(ConfigurationError, match="other adapters since open_tiered"):
                tiered.past(padded()[0])
            with pytest.raises(ConfigurationError, match="other adapters since open_tiered"):
                batch(model)


def test_adapters_are_looked_at_once_a_step(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And as a request is searched for: large models have hundreds of layers to ask, and steps hundreds of requests."""
    asked = 0

    class Counting(Adapted):
        @property
        def active_adapters(self) -> list[str]:
            nonlocal asked
            asked += 1
            return super().active_adapters

    attention = model.model.layers[0].self_attn
    put_in_place(attention, Counting(attention.v_proj), monkeypatch)
    monkeypatch.setattr(model, "peft_config", {"a": None}, raising=False)
    config = ContinuousBatchingConfig(page_size=SIZE, num_blocks=96, max_batch_tokens=256)
    prompts = [[number, *PROMPTS[2][:20]] for number in range(10)]
    with (
        opened(model, tmp_path, weights="tuned, adapter a") as tiered,
        model.continuous_batching_context_manager(
            generation_config=GREEDY, continuous_batching_config=config
        ) as running,
    ):
        asked = 0
        running.add_requests(prompts)
        assert [next(iter(running)).error for _ in prompts] == [None] * len(prompts)
        assert asked <= running.current_batch + len(prompts)
        assert tiered.kv.stats().stored == len(prompts)


@pytest.mark.parametrize("given", [{"adapter_names": ["b"]}, {"alora_offsets": [3]}])
def test_adapters_that_rows_of_a_batch_have_are_refused(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    """PEFT's layers have hooks as long as a generate has such arguments, or for good where that fails."""
    adapted = with_adapters(model, monkeypatch)
    ids, mask = padded()

    def adds(_layer: torch.nn.Module, _args: object, **_given: object) -> None:
        """Be a hook of PEFT's."""

    adapted.register_forward_pre_hook(lambda *_: None)  # anybody's
    with opened(model, tmp_path, weights="tuned, adapter a") as tiered:
        past = tiered.past(ids, mask)
        with (
            adapted.register_forward_pre_hook(partial(adds, **given)),
            pytest.raises(ConfigurationError, match="generate without a TieredCache"),
        ):
            model.generate(ids, attention_mask=mask, cache=past, generation_config=GREEDY)
        assert [generate(model, tiered)[1] for _ in range(2)] == [[0, 0, 0], [190, 140, 80]]
    adapted.register_forward_pre_hook(partial(adds, **given))
    with pytest.raises(ConfigurationError, match="load the model anew"), opened(model, tmp_path, weights="tuned"):
        pass


@pytest.mark.parametrize("is_open", [False, True], ids=["before it opens", "as a batch runs"])
def test_pages_that_other_adapters_have_computed_are_not_stored(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_open: bool
) -> None:
    """A batching that is kept has them still when the cache's own adapters are back, and would serve them too."""
    config = ContinuousBatchingConfig(page_size=SIZE, num_blocks=96, max_batch_tokens=256)
    attention = model.model.layers[0].self_attn
    adapted = Adapted(attention.v_proj)
    put_in_place(attention, adapted, monkeypatch)
    monkeypatch.setattr(model, "peft_config", {"a": None, "another": None}, raising=False)
    alone = batch(model)
    with ExitStack() as opening, capture_logs():
        if is_open:
            opening.enter_context(opened(model, tmp_path, weights="tuned, adapter a"))
        with model.continuous_batching_context_manager(
            generation_config=GREEDY, continuous_batching_config=config, persistent_manager=True
        ) as running:
            adapted.active = ["another"]
            running.add_requests(PROMPTS)
            assert [next(iter(running)).error for _ in PROMPTS] == [None] * len(PROMPTS)
        adapted.active = ["a"]
        if not is_open:
            opening.enter_context(opened(model, tmp_path, weights="tuned, adapter a"))
        assert batch(model) == alone
    model.destroy_cached_continuous_batching_manager()
    with opened(model, tmp_path, weights="tuned, adapter a") as tiered:
        assert generate(model, tiered) == (alone, [190, 140, 80])


def main(checkpoint: str, folder: str) -> None:
    """Be a process that serves: by continuous batching, then by `generate`."""
    model = load_model(Path(checkpoint))
    with opened(model, Path(folder)) as tiered:
        from_batch = batch(model)
        of_batch = hits(tiered)
        from_generate, loaded = generate(model, tiered)
    answer = {"batch": from_batch, "hits": of_batch, "generate": from_generate, "loaded": loaded}
    print(json.dumps(answer))  # noqa: T201 - read by the test


if __name__ == "__main__":
    main(*sys.argv[1:])
