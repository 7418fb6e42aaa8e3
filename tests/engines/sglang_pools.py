"""SGLang's host pools of every kind that is served: ``sglang_pools.py JSON`` stores pages of each and loads them.

Runs in SGLang's environment, and has its host pools, over small buffers in the place of a device's. What a page is, is
told by SGLang, as it tells its own storage backends. The JSON has ``layout`` and ``storage`` (the extra config). The
answer says of each pool how many of its pages are right after they were loaded into others, and whether all others are
as they were.
"""

import ctypes
import json
import random
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from sglang_controller import LAYERS, PAGE, pools

PAGES, MOVED = 24, 5


def uneven(layout: str, **_: Any) -> Any:
    """Return a pool whose values are shorter than its keys."""
    from sglang.srt.mem_cache import memory_pool as on_device  # noqa: PLC0415 - after the stub
    from sglang.srt.mem_cache.pool_host import mha  # noqa: PLC0415

    pool = on_device.MHATokenToKVPool(
        size=256, page_size=PAGE, dtype=torch.bfloat16, head_num=2, head_dim=32, v_head_dim=16, layer_num=LAYERS,
        device="cpu", enable_memory_saver=False, enable_alt_stream=False,
    )  # fmt: skip
    info = pool._mha_buffer_info()  # noqa: SLF001 - as its host pools take it
    sizes = {"host_to_device_ratio": 1.5, "host_size": 0, "page_size": PAGE, "layout": layout, "pin_memory": False}
    return mha.get_mha_host_pool_cls(info)(info, **sizes, device_capacity_tokens=256, start_layer=0, end_layer=LAYERS)


def keys_alone(layout: str, anchor: Any) -> Any:
    """Return a pool of keys without values."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost  # noqa: PLC0415 - after the stub

    buffers = [torch.zeros(256, 1, 32, dtype=torch.bfloat16) for _layer in range(LAYERS)]
    device = SimpleNamespace(
        store_dtype=torch.bfloat16, start_layer=0, end_layer=LAYERS, head_num=1, head_dim=32, layer_num=LAYERS,
        device="cpu", k_buffer=buffers,
    )  # fmt: skip
    return MHATokenToKOnlyPoolHost(device, anchor, layout, pin_memory=False)


def index(layout: str, anchor: Any) -> Any:
    """Return a pool of the index of sparse attention, of which one layer has none."""
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl  # noqa: PLC0415

    buffers = [torch.zeros(16, PAGE * 132, dtype=torch.uint8) for _layer in range(LAYERS + 1)]
    device = SimpleNamespace(
        index_page_size=PAGE, page_size=PAGE, index_head_dim=128, quant_block_size=128, store_dtype=torch.uint8,
        skip_topk_layers=[False] * LAYERS + [True], start_layer=0, end_layer=LAYERS + 1, layer_num=LAYERS + 1,
        device="cpu", index_k_with_scale_buffer=buffers, layer_shard_enabled=False,
    )  # fmt: skip
    return DSAIndexerPoolHost(make_dsa_indexer_pool_decl(device), anchor, pin_memory=False)


def states(layout: str, **_: Any) -> Any:
    """Return a pool of states, with rows beside them."""
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo  # noqa: PLC0415 - after the stub
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: PLC0415

    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, 16, 2, 4, 8),
        conv=[torch.zeros(LAYERS, 16, 3, 10, dtype=torch.bfloat16)],
        extra_checkpoint_buffers=[torch.zeros(16, 6)],
    )
    return MambaPoolHost(info, 1.5, 0, device_capacity=16, pin_memory=False, layout=layout)


def rows(layout: str, **_: Any) -> Any:
    """Return a pool of a row a page, as DeepSeek V4 has them."""
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool  # noqa: PLC0415 - after the stub

    buffers = [torch.zeros(16, 640, dtype=torch.uint8) for _layer in range(LAYERS)]
    return DeepSeekV4PagedHostPool("deepseek_v4_c4", buffers, 640, PAGES, PAGE, layout, pin_memory=False)


def rings(layout: str, **_: Any) -> Any:
    """Return a pool of DeepSeek V4's states of compression."""
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4StateHostPool  # noqa: PLC0415 - after the stub

    layers = [
        SimpleNamespace(ring_size=4, kv_score_buffer=SimpleNamespace(kv_score=torch.zeros(64, 12)))
        for _layer in range(LAYERS)
    ]
    return DeepSeekV4StateHostPool("deepseek_v4_c4_state", layers, PAGES, PAGE, layout, pin_memory=False)


def compressed(layout: str, anchor: Any) -> Any:
    """Return a pool of compressed keys of QSA's index."""
    from sglang.srt.mem_cache.pool_host.qsa import QSAIndexerPoolHost  # noqa: PLC0415 - after the stub

    buffers = [torch.zeros(64, 1, 32, dtype=torch.bfloat16) for _layer in range(LAYERS)]
    device = SimpleNamespace(qsa_compress_ratio=4, qsa_compressed_k_buffer_pool=buffers)
    return QSAIndexerPoolHost(device, anchor)


MAKERS: dict[str, Callable[..., Any]] = {
    "draft": uneven,
    "draft_indexer": keys_alone,
    "indexer": index,
    "mamba": states,
    "deepseek_v4_c4": rows,
    "deepseek_v4_c4_state": rings,
    "deepseek_v4_c4_indexer": compressed,
}
NOT_IN = {("draft", "layer_first"), ("mamba", "layer_first")}
"""SGLang has no such pools in that layout."""


def slots(pool: Any, numbers: range) -> torch.Tensor:
    """Return SGLang's slots of pages."""
    return torch.tensor([page * pool.page_size + slot for page in numbers for slot in range(pool.page_size)])


def pieces(pool: Any, number: int) -> list[tuple[int, int]] | None:
    """Return where SGLang says that a page is, as addresses and lengths, where it does."""
    try:
        addresses, lengths = pool.get_page_buffer_meta(slots(pool, range(number, number + 1)))
    except (NotImplementedError, ValueError):
        return None
    return list(zip(addresses, lengths, strict=True))


def read(pool: Any, number: int) -> bytes:
    """Return a page's bytes."""
    if (where := pieces(pool, number)) is not None:
        return b"".join(ctypes.string_at(address, length) for address, length in where)
    page: torch.Tensor = pool.get_data_page(number * pool.page_size, flat=True)
    return page.contiguous().view(torch.uint8).numpy().tobytes()


def write(pool: Any, number: int, chance: random.Random) -> None:
    """Fill a page with anything."""
    if (where := pieces(pool, number)) is not None:
        for address, length in where:
            ctypes.memmove(address, chance.randbytes(length), length)
    else:
        length = len(read(pool, number))
        page = torch.frombuffer(bytearray(chance.randbytes(length)), dtype=torch.uint8)
        pool.set_from_flat_data_page(number * pool.page_size, page.view(pool.get_dummy_flat_data_page().dtype))


def main(layout: str, storage: dict[str, Any]) -> None:
    """Store, load elsewhere, compare."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName, PoolTransfer  # noqa: PLC0415

    from tiered_kv.integrations.sglang import TieredKVStorage  # noqa: PLC0415

    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    facts = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": False}
    kept = TieredKVStorage(HiCacheStorageConfig(**ranks, **facts, model_name="tiny", extra_config=storage))
    _, anchor = pools(layout, is_mla=False)
    made = {
        PoolName(name): make(layout=layout, anchor=anchor)
        for name, make in MAKERS.items()
        if (name, layout) not in NOT_IN
    }
    kept.register_mem_pool_host(anchor)
    for name, pool in made.items():
        kept.register_mem_host_pool_v2(pool, name)
    kept.on_host_pools_registered()
    chance = random.Random(1)
    keys = [chance.randbytes(32).hex() for _page in range(MOVED)]
    answer = {}
    for name, pool in {PoolName.KV: anchor, **made}.items():
        for number in range(PAGES):
            write(pool, number, chance)
        before = [read(pool, number) for number in range(PAGES)]
        stored = kept.batch_set_v2([PoolTransfer(name, host_indices=slots(pool, range(MOVED)), keys=keys)])
        into = range(10, 10 + MOVED)
        loaded = kept.batch_get_v2([PoolTransfer(name, host_indices=slots(pool, into), keys=keys)])
        after = [read(pool, number) for number in range(PAGES)]
        answer[name.value] = {
            "stored": stored[name],
            "loaded": loaded[name],
            "right": sum(after[10 + number] == before[number] for number in range(MOVED)),
            "touched": sum(after[number] != before[number] for number in set(range(PAGES)) - set(into)),
            "bytes": len(before[0]),
        }
    kept.close()
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    import sglang_stub  # noqa: F401 - what it does is done by importing it

    main(**json.loads(sys.argv[1]))
