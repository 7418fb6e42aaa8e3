"""SGLang's HiCache without the engine: ``sglang_controller.py JSON`` stores pages, or loads them and compares.

Runs in SGLang's environment, and has its controller, its host pool and its storage threads. The JSON has ``layout``,
``storage`` (the extra config), ``folder`` (for what torch.distributed wants), ``num_pages``, and ``is_mla`` for latents
in place of K and V. The answer says how many of the tokens storage had, and if their bytes are those that were stored.
"""

import json
import sys
import threading
import types
from pathlib import Path
from typing import Any

import torch

PAGE, LAYERS, HEADS, DIM, TOKENS = 16, 2, 2, 32, 1024


def pools(layout: str, *, is_mla: bool, dim: int = DIM, tokens: int = TOKENS) -> tuple[Any, Any]:
    """Return the pool of a device, and the host pool of twice as many tokens that goes with it."""
    from sglang.srt.mem_cache import memory_pool as on_device  # noqa: PLC0415 - after the stub
    from sglang.srt.mem_cache.pool_host import mha, mla  # noqa: PLC0415 - after the stub

    each: dict[str, Any] = {"size": tokens, "page_size": PAGE, "dtype": torch.float32, "layer_num": LAYERS}
    each |= {"device": "cpu", "enable_memory_saver": False}
    host: dict[str, Any] = {"host_to_device_ratio": 2.0, "host_size": 0, "page_size": PAGE, "layout": layout}
    host |= {"pin_memory": False, "device_capacity_tokens": tokens, "start_layer": 0, "end_layer": LAYERS}
    if is_mla:
        pool = on_device.MLATokenToKVPool(kv_lora_rank=dim - 8, qk_rope_head_dim=8, **each)
        info = pool._mla_buffer_info()  # noqa: SLF001 - as its host pools take it
        return pool, mla.MLATokenToKVPoolHost(info, target_layer_num=LAYERS, **host)
    pool = on_device.MHATokenToKVPool(head_num=HEADS, head_dim=dim, enable_alt_stream=False, **each)
    return pool, mha.MHATokenToKVPoolHost(pool._mha_buffer_info(), **host)  # noqa: SLF001 - the same


def controller(
    layout: str,
    storage: dict[str, Any],
    folder: str,
    *,
    is_mla: bool,
    backend: str = "dynamic",
    dim: int = DIM,
    tokens: int = TOKENS,
) -> tuple[Any, Any]:
    """Return SGLang's controller over a storage backend, and its host pool."""
    import sglang.srt.managers.cache_controller as module  # noqa: PLC0415 - after the stub
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: PLC0415 - after the stub

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    one = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_rank": 0, "attn_dcp_size": 1}
    module.get_parallel = lambda: types.SimpleNamespace(**one)  # what an engine would have set up
    module.is_dp_attention_enabled = lambda: False
    pool, host = pools(layout, is_mla=is_mla, dim=dim, tokens=tokens)
    allocator = PagedTokenToKVPoolAllocator(tokens, PAGE, torch.float32, "cpu", pool, need_sort=False)
    group, stop = torch.distributed.group.WORLD, threading.Event()
    options: dict[str, Any] = {"write_policy": "write_through", "io_backend": "direct", "prefetch_threshold": PAGE}
    options |= {"storage_backend": backend, "model_name": "tiny", "storage_backend_extra_config": storage}
    return module.HiCacheController(allocator, host, PAGE, group, stop, **options), host


def truth(layout: str, num_pages: int, *, is_mla: bool) -> torch.Tensor:
    """Return the pages, each as flat as SGLang gives one: K and V, layers, tokens, heads, dimensions in its order."""
    planes, heads = (1, 1) if is_mla else (2, HEADS)
    values = torch.randn(num_pages, planes, LAYERS, PAGE, heads, DIM, generator=torch.Generator().manual_seed(1))
    return (values.transpose(2, 3) if layout == "page_first" else values).flatten(1)


def main(layout: str, storage: dict[str, Any], folder: str, num_pages: int, *, is_mla: bool) -> None:
    """Look up; load and compare what is there, else store."""
    from sglang.srt.mem_cache.utils import get_hash_str  # noqa: PLC0415

    hicache, host = controller(layout, storage, folder, is_mla=is_mla)
    tokens, pages = list(range(3, 3 + num_pages * PAGE)), truth(layout, num_pages, is_mla=is_mla)
    hicache.prefetch("a request", tokens)
    found = hicache.prefetch_hit_queue.get(timeout=30)
    answer = {"found": found.storage_hit_count, "loaded": 0, "is_right": False, "stored": 0}
    if found.storage_hit_count:
        found.host_indices = host.alloc(found.storage_hit_count)
        hicache.prefetch_buffer.put(found)
        while not (done := hicache.ack_prefetch_queue.get(timeout=60)).completed_req:
            answer["loaded"] = done.completed_tokens
        slots = found.host_indices[: answer["loaded"] : PAGE].tolist()
        answer["is_right"] = all(
            torch.equal(host.get_data_page(slot, flat=True).flatten(), page)
            for slot, page in zip(slots, pages, strict=False)
        )
    else:
        slots = host.alloc(num_pages * PAGE)
        for slot, page in zip(slots[::PAGE].tolist(), pages, strict=True):
            host.set_from_flat_data_page(slot, page)
        hicache.write_storage(slots, tokens, get_hash_str(tokens, None, page_size=PAGE))
        answer["stored"] = hicache.ack_backup_queue.get(timeout=60).completed_tokens
    hicache.detach_storage_backend()
    Path(folder, "group").unlink(missing_ok=True)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    import sglang_stub  # noqa: F401 - what it does is done by importing it

    main(**json.loads(sys.argv[1]))
