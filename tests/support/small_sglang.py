"""As much of SGLang as its storage backend sees: modules, what it is told, and host pools with memory."""

import hashlib
import importlib
import sys
from abc import ABC
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.support.shelf import Shelf

LAYERS, HEADS, DIM, SIZE, NUM_PAGES = 3, 2, 8, 16, 24
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
SHELF = {"medium": "tests.support.shelf:Shelf", "capacity": "4MiB"}
OVERRIDES: list[tuple[str, dict[str, object]]] = []
"""What SGLang notes of its configuration that changes while it runs."""
KEYS = [hashlib.sha256(bytes([number])).hexdigest() for number in range(10)]


@dataclass
class PoolTransferResult:
    """What a look-up of several pools answers."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass
class PoolTransfer:
    """What is wanted of a pool."""

    name: str
    keys: list[str] | None = None
    host_indices: Tensor | None = None
    hit_policy: str = "all_pages"


def pretend(version: str = "0.5.23") -> dict[str, ModuleType]:
    """Return the modules of SGLang that the adapter imports, as far as it uses them."""

    class HiCacheStorage(ABC):  # noqa: B024 - as it is there
        def register_mem_pool_host(self, mem_pool_host: object) -> None:
            self.mem_pool_host = mem_pool_host

        def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
            self.registered_pools = {host_pool_name: host_pool}

    def get_nothing() -> None:
        raise RuntimeError("no engine here")

    contents: dict[str, dict[str, object]] = {
        "sglang": {},
        "sglang.version": {"__version__": version},
        "sglang.srt": {},
        "sglang.srt.runtime_context": {
            "get_server_args": get_nothing,
            "get_lora": get_nothing,
            "get_context": lambda: SimpleNamespace(_overrides_log=OVERRIDES),
            "get_parallel": lambda: SimpleNamespace(dp_rank=None),
        },
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.hicache_storage": {
            "HiCacheStorage": HiCacheStorage,
            "PoolTransferResult": PoolTransferResult,
        },
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, module in modules.items():
        vars(module).update(contents[name])
    return modules


def adapter(version: str = "0.5.23") -> Any:  # noqa: ANN401 - a class that only exists beside SGLang
    """Import the adapter beside a pretended SGLang; take both out of ``sys.modules`` afterwards."""
    ours = [f"tiered_kv.integrations.sglang{module}" for module in ("", ".hicache_storage", ".pools", ".served_model")]
    sys.modules.update(pretended := pretend(version))
    try:
        return importlib.import_module(ours[0]).TieredKVStorage
    finally:
        for name in (*pretended, *ours):
            if name != "sglang.srt.runtime_context":  # imported again when an engine has begun
                sys.modules.pop(name, None)


@dataclass
class Config:
    """What SGLang tells a storage backend."""

    extra_config: dict[str, Any]
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    dp_rank: int = 0
    dcp_size: int = 1
    is_mla_model: bool = False
    model_name: str | None = "a-model"

    @property
    def is_storage_writer(self) -> bool:
        """Say which ranks of SGLang write."""
        return not self.is_mla_model or self.tp_rank == 0


@dataclass
class MHATokenToKVPoolHost:
    """A host pool of K and V: its attributes, and its memory."""

    layout: str
    is_mla: bool = False
    layer_num: int = LAYERS
    head_num: int = HEADS
    head_dim: int = DIM
    v_head_dim: int = DIM
    kv_cache_dim: int = DIM
    page_size: int = SIZE
    page_num: int = NUM_PAGES
    dtype: torch.dtype = torch.float32
    storage_format_tag: str | None = None
    kv_buffer: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        tokens, row = self.page_num * self.page_size, (1, self.kv_cache_dim) if self.is_mla else (HEADS, DIM)
        shape = {
            "layer_first": (self.layer_num, tokens, *row),
            "page_first": (tokens, self.layer_num, *row),
            "page_first_direct": (self.page_num, self.layer_num, self.page_size, *row),
        }.get(self.layout, (1,))
        self.kv_buffer = torch.full(shape if self.is_mla else (2, *shape), -1.0, dtype=self.dtype)

    def page(self, number: int) -> Tensor:
        """Return a view of one page, ``([2,] L, N, H, D)``."""
        assert self.kv_buffer is not None
        tokens = slice(number * self.page_size, (number + 1) * self.page_size)
        planes = self.kv_buffer[None] if self.is_mla else self.kv_buffer
        if self.layout == "layer_first":
            return planes[:, :, tokens]
        return planes[:, tokens].transpose(1, 2) if self.layout == "page_first" else planes[:, number]


class MLATokenToKVPoolHost(MHATokenToKVPoolHost):
    """One of MLA's latents."""


class MambaPoolHost:
    """One of states: a recurrent one and a convolution's of all layers, and a row beside them, in each slot."""

    layout = "page_first_direct"
    page_size = 1

    def __init__(self, num_slots: int = NUM_PAGES) -> None:
        self.temporal_buffer = torch.zeros(num_slots, LAYERS, 1, 4, 6)
        self.conv_buffer = [torch.zeros(num_slots, LAYERS, 1, 5, dtype=torch.bfloat16)]
        self.slot_state_buffers = [torch.zeros(num_slots, 3)]

    def page(self, number: int) -> Tensor:
        """Return a copy of one state's numbers."""
        buffers = (self.temporal_buffer, *self.conv_buffer, *self.slot_state_buffers)
        return torch.cat([buffer[number].flatten().float() for buffer in buffers])

    def fill(self, numbers: range, seed: int = 0) -> list[Tensor]:
        """Fill slots; return copies."""
        generator = torch.Generator().manual_seed(seed)
        for number in numbers:
            for buffer in (self.temporal_buffer, *self.conv_buffer, *self.slot_state_buffers):
                buffer[number] = torch.randn(buffer[number].shape, generator=generator)
        return [self.page(number) for number in numbers]


class DSAIndexerPoolHost:
    """One of an index: a row of bytes for each page and layer."""

    page_size = SIZE

    def __init__(self, layout: str, row_bytes: int = 40) -> None:
        self.layout = layout
        shape = (LAYERS, NUM_PAGES) if layout == "layer_first" else (NUM_PAGES, LAYERS, 1)
        self.index_k_with_scale_buffer = torch.zeros(*shape, row_bytes, dtype=torch.uint8)

    def page(self, number: int) -> Tensor:
        """Return a view of one page, ``(L, bytes)``."""
        rows = self.index_k_with_scale_buffer
        return rows[:, number] if self.layout == "layer_first" else rows[number, :, 0]


class DeepSeekV4PagedHostPool:
    """One of a row for each page and layer: in a tensor for each layer, or in one for all."""

    page_size = SIZE

    def __init__(self, layout: str, pool_name: str) -> None:
        self.layout, self.pool_name = layout, pool_name
        self.kv_buffer: Any = torch.zeros(NUM_PAGES, LAYERS, 48, dtype=torch.uint8)
        if layout == "layer_first":
            self.kv_buffer = [torch.zeros(NUM_PAGES, 48, dtype=torch.uint8) for _layer in range(LAYERS)]

    def page(self, number: int) -> Tensor:
        """Return one page, ``(L, bytes)``."""
        if self.layout == "layer_first":
            return torch.stack([layer[number] for layer in self.kv_buffer])
        rows: Tensor = self.kv_buffer[number]
        return rows

    def fill(self, number: int, values: Tensor) -> None:
        """Fill one page."""
        for layer, row in enumerate(values):
            (self.kv_buffer[layer][number] if self.layout == "layer_first" else self.kv_buffer[number, layer])[:] = row


class LogicalHostPool:
    """One that only numbers pages."""

    page_size = SIZE
    kv_buffer = None
    storage_format_tag = None

    def __init__(self, layout: str) -> None:
        self.layout = layout


def host_pool(layout: str, is_mla: bool = False, layer_num: int = LAYERS) -> Any:  # noqa: ANN401, FBT001, FBT002 - either
    """Return a host pool of latents, or of K and V."""
    return (MLATokenToKVPoolHost if is_mla else MHATokenToKVPoolHost)(layout, is_mla, layer_num)


def at(*pages: int) -> Tensor:
    """Return the token slots of pages, as SGLang gives them."""
    return torch.cat([torch.arange(page * SIZE, (page + 1) * SIZE) for page in pages])


def filled(pool: Any, pages: range, seed: int = 0) -> list[Tensor]:  # noqa: ANN401 - a host pool
    """Fill pages with KV and return copies of it."""
    torch.manual_seed(seed)
    for page in pages:
        pool.page(page).copy_(torch.randn(pool.page(page).shape))
    return [pool.page(page).clone() for page in pages]


@contextmanager
def storages() -> Iterator[Any]:
    """Return what opens a storage backend as SGLang does; close all of them."""
    Shelf.shelf.clear()
    Shelf.stalled.clear()
    OVERRIDES.clear()
    opened = []

    def open_storage(
        pool: Any,  # noqa: ANN401 - a host pool
        *tiers: object,
        weights: str = "w",
        limits: object = None,
        connect: str = "",
        prefill_tokens_per_s: float = 0.0,
        tokens_per_state: int = 2048,
        beside: dict[str, Any] | None = None,
        arguments: dict[str, Any] | None = None,
        lora: dict[str, Any] | None = None,
        **config: Any,  # noqa: ANN401 - fields of Config
    ) -> Any:  # noqa: ANN401 - as `adapter` has it
        settings = {"tiers": tiers or ("cpu://?capacity=1MiB", SHELF), "limits": limits or {}}
        settings["prefill_tokens_per_s"] = prefill_tokens_per_s
        settings = {"connect": connect} if connect else settings
        ours = {"weights": weights, "tokens_per_state": tokens_per_state, **settings}
        extra = {"interface_v1": 1, "tiered_kv": ours}
        config.setdefault("is_mla_model", isinstance(pool, MLATokenToKVPoolHost))
        storage = adapter()(Config(extra, **config), {})
        if arguments is not None:  # of an engine, which a storage is otherwise without
            resolved = SimpleNamespace(**{"enable_lora": None, "lora_paths": None, **(lora or {})})
            engine = {"get_server_args": lambda: SimpleNamespace(**arguments), "get_lora": lambda: resolved}
            vars(sys.modules["sglang.srt.runtime_context"]).update(engine)
        opened.append(storage)
        storage.register_mem_pool_host(pool)
        for name, other in (beside or {}).items():
            storage.register_mem_host_pool_v2(other, name)
        storage.on_host_pools_registered()
        return storage

    yield open_storage
    for storage in opened:
        storage.close()
