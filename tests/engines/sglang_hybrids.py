"""SGLang's tree of a model with several kinds of layers, without the model: ``sglang_hybrids.py JSON``.

Runs in SGLang's environment, and has its radix tree with its components, its host pools, its controller and its storage
threads, put together by the kit of SGLang's own tests. In the model's place, what each layer has of each token is told
from the token's number, so that whatever is loaded can be told right from wrong.

The JSON has ``kind`` (``windows``, ``states`` or ``index``), ``storage`` (the extra config), ``layout``, ``memory``
(``cache``, or ``buffer_only``, where host memory is only passed through), and ``do``: ``store`` prompts of one
beginning, of so many ``pages`` each; or ``load`` what storage has of the longest, after it has evicted what ``evicted``
says, KV groups of ours and pages. The answer to ``load`` says how many tokens SGLang took from storage, how many of
each pool are right, and how many are wrong.
"""

import json
import sys
import types
import unittest
from array import array
from typing import Any
from unittest.mock import patch

import torch

from tiered_kv import BlockKeys

WINDOW = 40
FIRST = 3
"""Token ids begin here."""
OTHERS = {"windows": "swa", "states": "mamba", "index": "indexer"}
"""SGLang's name of the pool that such a model has beside its main one."""


def config(kind: str) -> Any:
    """Return a small model's sizes."""
    from sglang.srt.mem_cache.unified_cache.components.base import ComponentType  # noqa: PLC0415 - after the stub
    from sglang.test.kits.unified_radix_cache.config import CacheConfig  # noqa: PLC0415

    sizes: dict[str, Any] = {"page_size": 16, "num_layers": 6, "full_attention_layer_ids": (1, 3, 5), "kv_size": 1024}
    sizes |= {"max_context_len": 1024, "head_dim": 32}
    if kind == "index":
        return CacheConfig(components=(ComponentType.FULL,), **sizes | {"page_size": 64, "num_layers": 3})
    if kind == "windows":
        components = (ComponentType.FULL, ComponentType.SWA)
        return CacheConfig(components=components, sliding_window_size=WINDOW, **sizes)
    components = (ComponentType.FULL, ComponentType.MAMBA)
    return CacheConfig(components=components, enable_mamba_extra_buffer=True, mamba_cache_size=60, **sizes)


def steps(kind: str) -> Any:
    """Return SGLang's own test steps for such a model."""
    from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures  # noqa: PLC0415

    class Steps(UnifiedRadixCacheStorageFixtures, unittest.TestCase):  # type: ignore[misc]  # SGLang has no types
        cfg = config(kind)

    return Steps()


def open_tree(at: Any, storage: dict[str, Any], layout: str, memory: str) -> tuple[Any, Any, Any]:
    """Return a tree over storage, its allocator, and its requests' pool."""
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler  # noqa: PLC0415 - after the stub
    from sglang.test.kits.unified_radix_cache import fixtures  # noqa: PLC0415

    with patch.object(fixtures, "MHATokenToKVPool", latents_with_index):  # the kit has no such model
        tree, allocator, requests = fixtures.build_fixture(at.cfg)
    arguments = ServerArgs(
        model_path="dummy",
        page_size=at.cfg.page_size,
        hicache_io_backend="direct",
        hicache_mem_layout=layout,
        hicache_write_policy="write_through",
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=json.dumps(storage),
        hicache_storage_prefetch_policy="wait_complete",
        hicache_host_memory_mode=memory,
        context_length=at.cfg.max_context_len,
    )
    arguments._mamba_cache_chunk_size = 64  # noqa: SLF001 - as the kit sets it
    set_global_server_args_for_scheduler(arguments)
    tree.init_hicache(arguments, tree.cache_init_params)
    tree.write_through_threshold = 1 << 30
    tree.load_back_threshold = 0
    tree.cache_controller.prefetch_capacity_limit = tree.cache_controller.mem_pool_host.size
    return tree, allocator, requests


def latents_with_index(**sizes: Any) -> Any:
    """Return a device's pool of MLA's latents and an index of sparse attention."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool  # noqa: PLC0415 - after the stub

    same = {name: sizes[name] for name in ("size", "page_size", "dtype", "layer_num", "device", "enable_memory_saver")}
    return DSATokenToKVPool(kv_lora_rank=32, qk_rope_head_dim=16, kv_cache_dim=48, index_head_dim=128, **same)


def computed(shape: torch.Size, dtype: torch.dtype, token: int, what: int) -> torch.Tensor:
    """Return what a layer would have computed of a token."""
    generator = torch.Generator().manual_seed(1000 * what + token)
    return torch.randint(0, 255, shape, generator=generator).to(dtype)


def layers_of(tree: Any, requests: Any, pool: str) -> list[torch.Tensor]:
    """Return the device memory of a pool: a tensor a layer, K and V, or what a state has of each layer."""
    kv = tree.token_to_kv_pool_allocator.get_kvcache()
    if pool == "mamba":
        (states,) = requests.mamba_pool.get_device_pool_infos()
        buffers = (states.buffer_info.temporal, *states.buffer_info.conv)
        return [layer for buffer in buffers for layer in buffer.unbind(0)]
    if pool == "indexer":
        return list(kv.index_k_with_scale_buffer)
    kv = kv.swa_kv_pool if pool == "swa" else getattr(kv, "full_kv_pool", kv)
    return list(kv.kv_buffer) if hasattr(kv, "kv_lora_rank") else [*kv.k_buffer, *kv.v_buffer]


def beside(at: Any, tree: Any, allocator: Any, leaf: Any, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Return which slots of the other pool belong to a prompt, and of which token each is the last."""
    from sglang.test.kits.unified_radix_cache.fixtures import node_device_value  # noqa: PLC0415 - after the stub

    slots, page = tree.path_device_indices(leaf), at.cfg.page_size
    if at.cfg.has_mamba:
        return node_device_value(tree, leaf, at.cfg.components[1]), [tokens[len(slots) - 1]]
    if not at.cfg.has_swa:  # an index has a row a page
        return slots[::page] // page, tokens[page - 1 : len(slots) : page]
    of_window = allocator.full_to_swa_index_mapping[slots]
    kept = of_window > 0  # what has left the window may have none
    return of_window[kept], [token for token, is_kept in zip(tokens, kept.tolist(), strict=False) if is_kept]


def fill(layers: list[torch.Tensor], slots: torch.Tensor, tokens: list[int], salt: int) -> None:
    """Write what would have been computed."""
    for what, layer in enumerate(layers):
        for slot, token in zip(slots.tolist(), tokens, strict=True):
            layer[slot] = computed(layer[slot].shape, layer.dtype, token, salt + what)


def compare(layers: list[torch.Tensor], slots: torch.Tensor, tokens: list[int], salt: int) -> list[bool]:
    """Say of each token if all layers have what would have been computed."""
    return [
        all(
            torch.equal(layer[slot], computed(layer[slot].shape, layer.dtype, token, salt + what))
            for what, layer in enumerate(layers)
        )
        for slot, token in zip(slots.tolist(), tokens, strict=True)
    ]


def store(at: Any, tree: Any, allocator: Any, requests: Any, tokens: list[int], other: str) -> None:
    """Have a prompt in the tree, as if it had been computed, and write it to storage."""
    from sglang.test.kits.unified_radix_cache.fixtures import match_prefix  # noqa: PLC0415 - after the stub

    at._insert(tree, allocator, requests, tokens)  # noqa: SLF001 - the kit's steps have such names
    leaf = match_prefix(tree, tokens).last_device_node
    fill(layers_of(tree, requests, "kv"), tree.path_device_indices(leaf), tokens, 0)
    fill(layers_of(tree, requests, other), *beside(at, tree, allocator, leaf, tokens), 500)
    if tree.buffer_pipeline is not None:
        at._buffer_backup_and_wait(tree, leaf)  # noqa: SLF001
        return
    at._backup_node(tree, leaf)  # noqa: SLF001
    at._write_path_to_l3(tree, leaf)  # noqa: SLF001
    at._flush_l3_backups(tree)  # noqa: SLF001


def load(at: Any, tree: Any, allocator: Any, requests: Any, tokens: list[int], other: str) -> dict[str, Any]:
    """Have SGLang take a prompt from storage to the device, and compare."""
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: PLC0415 - after the stub
    from sglang.test.kits.unified_radix_cache.fixtures import match_prefix  # noqa: PLC0415

    handle = CacheRequestHandle("a request", 0)
    tree.prefetch_from_storage(handle, tree.root_node_handle(), array("q", tokens), None, None)
    at._run_prefetch_to_completion(tree, handle)  # noqa: SLF001
    found = match_prefix(tree, tokens)
    if found.host_hit_length:
        at._load_back_node(tree, found.best_match_node, req=at._make_req(requests))  # noqa: SLF001
    found = match_prefix(tree, tokens)
    answer = {"loaded": found.device_prefix_len, "right": {}, "wrong": {}}
    if found.device_prefix_len:
        leaf = found.last_device_node
        slots = tree.path_device_indices(leaf)
        seen = {
            "kv": compare(layers_of(tree, requests, "kv"), slots, tokens[: len(slots)], 0),
            other: compare(layers_of(tree, requests, other), *beside(at, tree, allocator, leaf, tokens), 500),
        }
        answer["right"] = {name: sum(each) for name, each in seen.items()}
        answer["wrong"] = {name: len(each) - sum(each) for name, each in seen.items()}
    return answer


def evict(storage: Any, tokens: list[int], page_size: int, pages: list[list[int]]) -> None:
    """Have storage forget pages of KV groups."""
    from sglang.srt.mem_cache.utils import get_hash_str  # noqa: PLC0415 - after the stub

    hashes = [bytes.fromhex(each) for each in get_hash_str(tokens, None, page_size=page_size)]
    for group, page in pages:
        storage.kv.evict(BlockKeys.from_hashes([hashes[page]], block_size=page_size, group=group))


def main(
    kind: str,
    do: str,
    storage: dict[str, Any],
    pages: list[int],
    evicted: list[list[int]] | None = None,
    layout: str = "page_first_direct",
    memory: str = "cache",
) -> None:
    """Store prompts, or load the longest and compare."""
    at = steps(kind)
    tree, allocator, requests = open_tree(at, storage, layout, memory)
    page = at.cfg.page_size
    tokens = list(range(FIRST, FIRST + max(pages) * page))
    answer: dict[str, Any] = {"stored": pages}
    if do == "store":
        for number in pages:
            store(at, tree, allocator, requests, tokens[: number * page], OTHERS[kind])
        tree.cache_controller.storage_backend.kv.flush()
    else:
        evict(tree.cache_controller.storage_backend, tokens, page, evicted or [])
        answer = load(at, tree, allocator, requests, tokens, OTHERS[kind])
    tree.cache_controller.detach_storage_backend()
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    import sglang_stub  # noqa: F401 - what it does is done by importing it

    # The kit wants one class of this module, which imports SGLang's benchmarks and all that they need.
    sys.modules["sglang.test.test_utils"] = utils = types.ModuleType("sglang.test.test_utils")
    utils.CustomTestCase = unittest.TestCase  # type: ignore[attr-defined]  # of a module made here
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1):
        main(**json.loads(sys.argv[1]))
