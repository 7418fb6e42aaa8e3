"""vLLM's tiered offloading on a CPU: its own worker copies between a GPU and its host, and refuses anything else."""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyWorker(OffloadingWorker):
    """Copies pages between the engine's tensors and chunks in host memory, at once."""

    def __init__(self, kv_caches: Any, region: Any, blocks_per_chunk: int) -> None:
        self._region = region
        self._per = blocks_per_chunk
        self._groups = kv_caches.group_data_refs
        self._pages = [each.tensor for each in kv_caches.tensors]
        sizes = [each.page_size_bytes * blocks_per_chunk for each in kv_caches.tensors]
        self._chunks = [region.create_next_worker_view(size) for size in sizes]
        self._over: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy out."""
        for page, chunk in self._pairs(src_spec, dst_spec.chunk_ids):
            chunk.copy_(page)
        return self._ended(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:  # noqa: FBT001, FBT002 - vLLM's
        """Copy in."""
        for page, chunk in self._pairs(dst_spec, src_spec.chunk_ids):
            page.copy_(chunk)
        return self._ended(job_id)

    def get_finished(self) -> list[Any]:
        """Return what has ended: everything."""
        over, self._over = self._over, []
        return over

    def wait(self, job_ids: set[int]) -> None:
        """Wait for nothing."""

    def shutdown(self) -> None:
        """Let go of the memory."""
        self._chunks.clear()
        self._region.cleanup()

    def _ended(self, job_id: int) -> bool:
        self._over.append(TransferResult(job_id, success=True, transfer_size=0, transfer_time=0.0))
        return True

    def _pairs(self, blocks: Any, chunk_ids: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each page of the engine's, and its place in a chunk."""
        at = chunk_at = 0
        for refs, size, first in zip(self._groups, blocks.group_sizes, blocks.block_indices, strict=True):
            for number in range(size):
                block = int(blocks.block_ids[at + number])
                place = first % self._per + number
                chunk, part = int(chunk_ids[chunk_at + place // self._per]), place % self._per
                for ref in refs:
                    page = self._pages[ref.tensor_idx]
                    start, num_bytes = part * page.shape[1], ref.page_size_bytes
                    yield page[block, :num_bytes], self._chunks[ref.tensor_idx][chunk, start : start + num_bytes]
            at += size
            chunk_at += -(-(first % self._per + size) // self._per) if size else 0


class CPUTieringSpec(TieringOffloadingSpec):
    """vLLM's spec with that worker."""

    _worker: Any

    def get_worker(self, kv_caches: Any) -> Any:
        """Return the worker, made once."""
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker
