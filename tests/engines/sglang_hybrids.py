"""SGLang's tree of a model with several kinds of layers, without the model: ``sglang_hybrids.py JSON``.

Runs in SGLang's environment, and has its radix tree with its components, its host pools, its controller and its storage
threads, put together by the kit of SGLang's own tests. In the model's place, what each layer has of each token is told
from the token's number, so that whatever is loaded can be told right from wrong.

The JSON has ``kind`` (``windows`` or ``states``), ``storage`` (the extra config), ``num_pages``, ``layout``, and
``do``: ``store`` a prompt, or ``load`` what storage has of it. The answer to ``load`` says how many tokens the tree has
then, how many of each pool are right, and how many are wrong.
"""

import json
import sys
import types
import unittest
from array import array
from typing import Any

import torch

PAGE, WINDOW = 16, 40
FIRST = 3
"""Token ids begin here."""


def config(kind: str) -> Any:
    """Return a small model's sizes."""
    from sglang.srt.mem_cache.unified_cache.components.base import ComponentType  # noqa: PLC0415 - after the stub
    from sglang.test.kits.unified_radix_cache.config import CacheConfig  # noqa: PLC0415

    sizes: dict[str, Any] = {"page_size": PAGE, "num_layers": 6, "full_attention_layer_ids": (2, 5), "kv_size": 1024}
    sizes |= {"max_context_len": 1024, "head_dim": 32}
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


def open_tree(at: Any, storage: dict[str, Any], layout: str) -> tuple[Any, Any, Any]:
    """Return a tree over storage, its allocator, and its requests' pool."""
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler  # noqa: PLC0415 - after the stub
    from sglang.test.kits.unified_radix_cache.fixtures import build_fixture  # noqa: PLC0415

    tree, allocator, requests = build_fixture(at.cfg)
    arguments = ServerArgs(
        model_path="dummy",
        page_size=PAGE,
        hicache_io_backend="direct",
        hicache_mem_layout=layout,
        hicache_write_policy="write_through",
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=json.dumps(storage),
        hicache_storage_prefetch_policy="wait_complete",
    )
    arguments._mamba_cache_chunk_size = 64  # noqa: SLF001 - as the kit sets it
    set_global_server_args_for_scheduler(arguments)
    tree.init_hicache(arguments, tree.cache_init_params)
    tree.write_through_threshold = 1 << 30
    tree.load_back_threshold = 0
    tree.cache_controller.prefetch_capacity_limit = tree.cache_controller.mem_pool_host.size
    return tree, allocator, requests


def computed(shape: torch.Size, dtype: torch.dtype, token: int, what: int) -> torch.Tensor:
    """Return what a layer would have computed of a token."""
    generator = torch.Generator().manual_seed(1000 * what + token)
    return torch.randn(shape, generator=generator).to(dtype)


def layers_of(tree: Any, requests: Any, pool: str) -> list[torch.Tensor]:
    """Return the device memory of a pool: a tensor a layer, K and V, or what a state has of each layer."""
    kv = tree.token_to_kv_pool_allocator.get_kvcache()
    if pool == "mamba":
        (states,) = requests.mamba_pool.get_device_pool_infos()
        buffers = (states.buffer_info.temporal, *states.buffer_info.conv)
        return [layer for buffer in buffers for layer in buffer.unbind(0)]
    kv = kv.swa_kv_pool if pool == "swa" else kv.full_kv_pool
    return [*kv.k_buffer, *kv.v_buffer]


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


def main(kind: str, do: str, storage: dict[str, Any], num_pages: int, layout: str = "page_first_direct") -> None:
    """Store a prompt, or load it and compare."""
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: PLC0415 - after the stub
    from sglang.srt.mem_cache.unified_cache.components.base import ComponentType  # noqa: PLC0415
    from sglang.test.kits.unified_radix_cache.fixtures import match_prefix, node_device_value  # noqa: PLC0415

    at = steps(kind)
    tree, allocator, requests = open_tree(at, storage, layout)
    tokens = list(range(FIRST, FIRST + num_pages * PAGE))
    other = "swa" if kind == "windows" else "mamba"
    component = ComponentType.SWA if kind == "windows" else ComponentType.MAMBA
    if do == "store":
        at._insert(tree, allocator, requests, tokens)  # noqa: SLF001 - the kit's steps have such names
        leaf = match_prefix(tree, tokens).last_device_node
        slots = tree.path_device_indices(leaf)
        fill(layers_of(tree, requests, "kv"), slots, tokens, 0)
        if kind == "windows":
            fill(layers_of(tree, requests, other), allocator.full_to_swa_index_mapping[slots], tokens, 500)
        else:
            fill(layers_of(tree, requests, other), node_device_value(tree, leaf, component), tokens[-1:], 500)
        at._backup_node(tree, leaf)  # noqa: SLF001
        at._write_path_to_l3(tree, leaf)  # noqa: SLF001
        at._flush_l3_backups(tree)  # noqa: SLF001
        answer: dict[str, Any] = {"stored": len(slots)}
    else:
        handle = CacheRequestHandle("a request", 0)
        tree.prefetch_from_storage(handle, tree.root_node_handle(), array("q", tokens), None, None)
        at._run_prefetch_to_completion(tree, handle)  # noqa: SLF001
        found = match_prefix(tree, tokens)
        answer = {"on_host": found.host_hit_length, "right": {}, "wrong": {}}
        if found.host_hit_length:
            at._load_back_node(tree, found.best_match_node, req=at._make_req(requests))  # noqa: SLF001
            found = match_prefix(tree, tokens)
            leaf = found.last_device_node
            slots = tree.path_device_indices(leaf)
            seen = {"kv": compare(layers_of(tree, requests, "kv"), slots, tokens[: len(slots)], 0)}
            if kind == "windows":
                of_window = allocator.full_to_swa_index_mapping[slots]
                kept = of_window > 0
                named = [token for token, is_kept in zip(tokens, kept.tolist(), strict=False) if is_kept]
                seen[other] = compare(layers_of(tree, requests, other), of_window[kept], named, 500)
            else:
                state = node_device_value(tree, leaf, component)
                seen[other] = compare(layers_of(tree, requests, other), state, [tokens[len(slots) - 1]], 500)
            answer["right"] = {name: sum(each) for name, each in seen.items()}
            answer["wrong"] = {name: len(each) - sum(each) for name, each in seen.items()}
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
