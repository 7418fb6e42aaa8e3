"""SGLang HiCache's ``file`` backend below SGLang's own controller and host pool.

It has no checksums to switch on. A prefetch is waited for as the policy ``timeout`` does, 5 s here; what was asked for
is then computed. Tenants are SGLang's: a request's ``cache_salt`` is part of its first page's hash. What names the
weights is the model's name alone. Its ``max_size`` is set.
"""

import sglang_stub  # noqa: F401 - what it does is done by importing it, before sglang is

# isort: split
import queue
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import ClassVar

import torch
from sglang.srt.managers.cache_controller import PrefetchOperation
from sglang.srt.mem_cache.pool_host import base as host_pools
from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed

from driver import Driver, Setting, content
from sglang_controller import PAGE, controller

TIMEOUT_S = 5.0
host_pools.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # else a machine that has less than 10 GB left runs none of it


class HiCacheFile(Driver):
    """SGLang's controller with files."""

    block_bytes = 16384
    _number: ClassVar[int] = 0

    def __init__(self, setting: Setting) -> None:
        """Open it."""
        extra = {"file_storage_path": str(setting.folder), "max_size": setting.room * self.block_bytes}
        group = setting.folder.with_name("group")
        group.mkdir(exist_ok=True)
        (group / "group").unlink(missing_ok=True)
        self._hicache, self._host = controller("layer_first", extra, str(group), is_mla=False, backend="file")

    def store(self, numbers: Sequence[int], tenant: str = "a") -> None:
        """By the controller's thread, page by page."""
        for number in numbers:
            at = self._host.alloc(PAGE)
            self._host.set_from_flat_data_page(int(at[0]), _page(number, self.block_bytes))
            self._hicache.write_storage(at, _tokens(number), _hashes(number, tenant))
            self._hicache.ack_backup_queue.get(timeout=30)
            self._host.free(at)

    def load(self, number: int, tenant: str = "a", between: Callable[[], object] | None = None) -> bytes | None:
        """Prefetch to the host pool."""
        operation = self._begun(number, tenant, between)
        if operation is None:
            return None
        if not self._is_over(operation, TIMEOUT_S):
            self._hicache.terminate_prefetch(operation)
            return None  # its pages stay its own until its last acknowledgement
        got = self._read(operation.host_indices) if operation.done_tokens else None
        self._host.free(operation.host_indices)
        return got

    def forget(self) -> None:
        """Nothing of it is kept in memory."""

    def cancelled(self, number: int, other: int, release: Callable[[], object]) -> bytes:
        """Terminate a prefetch that hangs, as an abort does, and fill all the pool that can be had with another."""
        operation = self._begun(number, "a", None)
        if operation is None:
            raise TimeoutError("nothing was found to be cancelled")
        self._hicache.terminate_prefetch(operation)
        pages = []
        while (at := self._host.alloc(PAGE)) is not None:
            self._host.set_from_flat_data_page(int(at[0]), _page(other, self.block_bytes))
            pages.append(at)
        release()
        self._is_over(operation, 30.0)
        held = [self._read(at) for at in pages]
        for at in [*pages, operation.host_indices]:
            self._host.free(at)
        return next((each for each in held if each != held[0]), held[0])

    def close(self) -> None:
        """Detach, as a server that stops does."""
        self._hicache.detach_storage_backend()

    def _begun(self, number: int, tenant: str, between: Callable[[], object] | None) -> PrefetchOperation | None:
        HiCacheFile._number += 1
        seed = _seed(tenant)
        self._hicache.prefetch(f"request {HiCacheFile._number}", _tokens(number), seed)
        try:
            operation = self._hicache.prefetch_hit_queue.get(timeout=TIMEOUT_S)
        except queue.Empty:
            return None
        if not operation.storage_hit_count:
            return None
        operation.host_indices, operation.done_tokens = self._host.alloc(PAGE), 0
        if between is not None:
            between()
        self._hicache.prefetch_buffer.put(operation)
        return operation

    def _is_over(self, operation: PrefetchOperation, timeout_s: float) -> bool:
        """Take acknowledgements until the last one of an operation has come."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                ack = self._hicache.ack_prefetch_queue.get(timeout=left_s)
            except queue.Empty:
                return False
            if ack.completed_tokens is not None:
                ack.operation.done_tokens = ack.completed_tokens
            if ack.completed_req and ack.operation is operation:
                return True
        return False

    def _read(self, at: torch.Tensor) -> bytes:
        return bytes(self._host.get_data_page(int(at[0]), flat=True).contiguous().flatten().numpy().tobytes())


def _page(number: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(content(number, num_bytes)), dtype=torch.float32)


def _tokens(number: int) -> list[int]:
    return [number] * PAGE


def _seed(tenant: str) -> object:
    return storage_namespace_seed(None, tenant)


def _hashes(number: int, tenant: str) -> object:
    return get_hash_str(_tokens(number), _seed(tenant), page_size=PAGE)


TIER = HiCacheFile
VERSIONS = f"sglang {version('sglang')}"
