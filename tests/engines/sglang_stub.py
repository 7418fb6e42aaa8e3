"""What SGLang 0.5.23 asks of CUDA, on a CPU: import it before sglang, in every process (`sglang_site` does).

Packages of kernels that it imports and a CPU never calls are stand-ins; copies between its pages and its host pool,
which are CUDA's, are done by torch. Its attention for CPUs writes windows to the slots of their own pool and reads them
at those of the main one: here it reads where it has written. Everything else is SGLang's own.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

import torch
from transformers.utils import import_utils

ABSENT = ("decord", "deep_gemm", "flashinfer", "sgl_kernel", "tilelang", "timm", "torchvision")
ATTENTION = "sglang.srt.layers.attention.torch_native_backend"
PAGE_LOCKING = "sglang.srt.mem_cache.pool_host.common"


class StandIn(types.ModuleType):
    """A module that has whatever is asked of it."""

    def __getattr__(self, name: str) -> MagicMock:
        """Return something that can be called, decorated with and inherited from."""
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for packages that are absent, and changes some modules of SGLang once they are imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find what this is about."""
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if name not in CHANGES and name != ATTENTION:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_change(module: types.ModuleType) -> None:
            load(module)
            if name == ATTENTION:
                read_windows_where_they_are(module.TorchNativeAttnBackend)
            else:
                vars(module).update(CHANGES[name])

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]  # of this one module
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Make a stand-in, for a package: it is asked for modules too."""
        module = StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: a stand-in has no code."""


Layers = Sequence[torch.Tensor]


def copy_tokens(
    src_layers: Layers, dst_layers: Layers, src_indices: torch.Tensor, dst_indices: torch.Tensor, page_size: int
) -> None:
    """Copy tokens between tensors whose first axis is tokens."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def copy_to_pages(
    src_ptrs: Layers, dst_ptrs: Layers, src_indices: torch.Tensor, dst_indices: torch.Tensor, page_size: int
) -> None:
    """Copy tokens of all layers, K's and then V's, to ``(pages, layers, tokens, ..)``."""
    num_layers = len(src_ptrs) // len(dst_ptrs)
    pages = dst_indices[::page_size] // page_size
    for number, source in enumerate(src_ptrs):
        plane, layer = divmod(number, num_layers)
        tokens = source[src_indices]
        dst_ptrs[plane][pages, layer] = tokens.view(len(pages), page_size, *tokens.shape[1:])


def copy_from_pages(
    src_ptrs: Layers,
    dst_ptrs: Layers,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy tokens of one layer back."""
    pages = src_indices[::page_size] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].flatten(0, 1)


def nothing(*_: object, **__: object) -> None:
    """Lock no pages."""


def read_windows_where_they_are(backend: Any) -> None:
    """Have layers with windows look their tokens up in the slots of their own pool."""

    def mended(forward: Any) -> Any:
        def run(self: Any, q: Any, k: Any, v: Any, layer: Any, *rest: Any, **more: Any) -> Any:
            pool, requests = self.token_to_kv_pool, self.req_to_token_pool
            if not (self.use_sliding_window_kv_pool and pool.layers_mapping[layer.layer_id][1]):
                return forward(self, q, k, v, layer, *rest, **more)
            slots = requests.req_to_token
            moved = pool.translate_loc_from_full_to_swa(slots.flatten().long()).view(slots.shape)
            self.req_to_token_pool = types.SimpleNamespace(req_to_token=moved)
            try:
                return forward(self, q, k, v, layer, *rest, **more)
            finally:
                self.req_to_token_pool = requests

        return run

    backend.forward_extend = mended(backend.forward_extend)
    backend.forward_decode = mended(backend.forward_decode)


COPYING: dict[str, Any] = {
    "transfer_kv_direct": copy_tokens,
    "transfer_kv_all_layer_direct_lf_pf": copy_to_pages,
    "transfer_kv_per_layer_direct_pf_lf": copy_from_pages,
}
CHANGES: dict[str, dict[str, Any]] = {
    PAGE_LOCKING: {"_cuda_host_register": nothing, "_cuda_host_unregister": nothing},
    **{f"sglang.srt.mem_cache.pool_host.{kind}": COPYING for kind in ("mha", "mla", "mamba", "dsa")},
}

# These ask what is installed, and remember it, before there are stand-ins.
import_utils.is_torchvision_available()
import_utils.is_timm_available()
for asking in ("modeling_auto", "processing_auto"):
    importlib.import_module(f"transformers.models.auto.{asking}")
for asking in ("tvm_ffi", "xgrammar"):
    importlib.import_module(asking)
sys.meta_path.insert(0, Importer())
torch.cpu.Stream.synchronize = nothing  # type: ignore[attr-defined]  # SGLang calls it, and torch has none on a CPU
