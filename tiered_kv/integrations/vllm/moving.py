"""The workers' side of the connector: it moves a rank's bytes between vLLM's tensors and the scheduler's host memory.

It decides nothing. All methods are called by the model runner's thread; the copies run beside it.
"""

import os
from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Any, Final

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import group_kernel_blocks

from tiered_kv.cache.worker import Worker
from tiered_kv.integrations.vllm.compatibility import VERSION, device_kind
from tiered_kv.integrations.vllm.configuration import Configuration
from tiered_kv.integrations.vllm.messages import Hello, Report, Step, StoreOrder
from tiered_kv.values.errors import LayoutMismatchError, TieredKVError, in_words
from tiered_kv.values.layout import KVGroup, KVLayout
from tiered_kv.values.log import log
from tiered_kv.values.plan import Outcomes, Plan, SlabHandle

_MOST_PASSED: Final = 256
"""Steps at most between two tries to attach host memory: a try may cost a step as long as it takes to compute it."""


class MovingSide:
    """The connector's worker side: it moves the blocks of one rank."""

    def __init__(self, vllm_config: Any, configuration: Configuration) -> None:
        self._vllm_config = vllm_config
        self._configuration = configuration
        self._rank = get_tensor_model_parallel_rank()
        if configuration.num_stages > 1:
            self._rank += get_pp_group().rank_in_group * (configuration.num_ranks // configuration.num_stages)
        self._pages: list[list[torch.Tensor]] = []
        self._layout: KVLayout | None = None
        self._worker: Worker | None = None
        self._slabs: tuple[SlabHandle, ...] | None = None  # to be attached
        self._why_not = ""  # why that failed
        self._num_failed = self._num_passed = 0  # tries of that, and steps since the last one
        self._loads: dict[str, list[tuple[tuple[int, ...], Plan | None, Future[Outcomes]]]] = {}
        self._first: list[tuple[str, tuple[int, ...], Plan | None, Future[Outcomes]]] = []
        self._stores: dict[Future[Outcomes], frozenset[str]] = {}  # whose blocks each reads
        self._leaving: set[str] = set()
        self._lost: set[int] = set()
        self._failed: set[str] = set()
        self._outcomes: list[Outcomes] = []
        self._is_wrong = False

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take vLLM's tensors.

        Raises:
            LayoutMismatchError: A block of a layer is not in one piece.
        """
        wanted = self._configuration
        self._pages = [
            [_pages(kv_caches[name], wanted.num_engine_blocks, group.page_bytes) for name in group.layer_names]
            for group in wanted.groups
        ]
        self._layout = KVLayout(
            tuple(
                KVGroup.opaque(
                    group.page_bytes,
                    tag=self._tag(kv_caches[group.layer_names[0]], group.layer_names),
                    block_size=group.block_size,
                    num_layers=len(group.layer_names),
                    slots_per_block=wanted.slots_per_block(group),
                )
                for group in wanted.groups
            )
        )

    def unregister_kv_caches(self) -> None:
        """Let go of vLLM's tensors, once nothing reads or writes them any more. Idempotent."""
        loads = [future for parts in self._loads.values() for _, _, future in parts]
        wait([*self._stores, *loads, *(future for _, _, _, future in self._first)])
        if self._worker is not None:
            for number in range(len(self._pages)):
                self._worker.unregister_kv_caches(group=number)

    def restore_kv_caches(self) -> None:
        """Bind the engine's tensors again, where they were. Idempotent."""
        if self._worker is not None:
            self._bind(self._worker)

    def _bind(self, worker: Worker) -> None:
        for number, pages in enumerate(self._pages):
            worker.register_kv_caches(pages, group=number)

    def hello(self) -> Hello | None:
        """Return what the scheduler opens its cache by."""
        groups = self._configuration.groups
        return Hello(self._rank, os.getpid(), self._layout, groups) if self._layout is not None else None

    def before_computing(self, step: Step) -> None:
        """Wait until nothing reads the blocks of requests that were preempted, then start loads.

        Those blocks are others' from now on. The loads go on beside what the step computes: vLLM itself would have them
        begin behind it, and their requests wait for a step more.
        """
        self._attach(step.slabs)
        loads = [order for order in step.loads if not order.comes_first]
        # A device may be computing the step before yet: what that reads or writes is waited for.
        after = self._event() if step.flushes or loads else None
        if step.preempted:
            for flush in step.flushes:
                self._store(flush, after)
            ending = [future for future, names in self._stores.items() if not names.isdisjoint(step.preempted)]
            wait(ending)
            self._take(ending)
        for load in loads:
            self._loads[load.request_id] = [(ids, plan, self._start(plan, after)) for ids, plan in load.parts]

    def load_first(self, step: Step) -> None:
        """Load what this step computes with: a device's stream waits for it, else this does.

        By now vLLM has emptied new blocks, where a model needs that.
        """
        orders = [order for order in step.loads if order.comes_first]
        if not orders:
            return
        after, is_on_cpu = self._event(), self._device.type == "cpu"
        stream = None if is_on_cpu else torch.accelerator.current_stream(self._device)
        begun = [
            (order.request_id, ids, plan, self._start(plan, after, stream))
            for order in orders
            for ids, plan in order.parts
        ]
        if is_on_cpu:
            wait([future for _, _, _, future in begun])
        self._first += begun

    def start_stores(self, step: Step) -> None:
        """Start this step's stores: what computes their blocks is under way, or over."""
        after = self._event() if step.stores else None
        for order in step.stores:
            self._store(order, after)
        self._leaving |= step.leaving

    def ended(self) -> tuple[set[str], set[str]]:
        """Return the requests whose blocks vLLM may take back, and those whose loads have ended."""
        if not (self._stores or self._leaving or self._loads or self._first):
            return set(), set()
        self._take([future for future in self._stores if future.done()])
        left = self._leaving.difference(*self._stores.values()) if self._leaving else set()
        self._leaving -= left
        loaded = {name for name, parts in self._loads.items() if all(future.done() for _, _, future in parts)}
        for name in loaded:
            for ids, plan, future in self._loads.pop(name):
                self._take_load(name, ids, plan, future.result())
        begun, self._first = self._first, []
        for name, ids, plan, future in begun:  # waited for: what is lost counts with the step that has computed with it
            self._is_wrong |= self._take_load(name, ids, plan, future.result())
        return left, loaded

    def _take_load(self, name: str, ids: tuple[int, ...], plan: Plan | None, outcomes: Outcomes) -> bool:
        """Take how a load has ended; return whether any of its blocks did not come."""
        lost = ids[max(0, outcomes.num_moved) :]
        self._lose(name, lost)
        if plan is not None:
            self._outcomes.append(outcomes)
        return bool(lost)

    def take_lost(self) -> set[int]:
        """Return the blocks that were to be loaded and were not, where the others are of use, since the last time."""
        lost, self._lost = self._lost, set()
        return lost

    def take_failed(self) -> set[str]:
        """Return the requests whose load brought less than all, where that is of no use, since the last time."""
        failed, self._failed = self._failed, set()
        return failed

    def _lose(self, name: str, block_ids: tuple[int, ...]) -> None:
        if block_ids and self._configuration.loads_parts:
            self._lost.update(block_ids)
        elif block_ids:
            self._failed.add(name)

    def report(self) -> Report | None:
        """Return what ended since the last time."""
        outcomes, self._outcomes = self._outcomes, []
        is_wrong, self._is_wrong = self._is_wrong, False
        return Report(outcomes, is_wrong) if outcomes or is_wrong else None

    def close(self) -> None:
        """End: what has been started ends first."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _attach(self, slabs: tuple[SlabHandle, ...] | None) -> None:
        """Attach other host memory, or none; if that fails, in a later step: the engine computes what it needs.

        It may be for want of a descriptor, or of memory, that others give back soon, or never: it is tried in the next
        steps, and then ever more rarely.
        """
        if slabs is not None:
            self._slabs, self._num_failed = slabs, 0
        if self._slabs is None or self._layout is None:
            return
        self._num_passed += 1
        if self._num_passed <= min(self._num_failed**2 // 8, _MOST_PASSED):
            return
        self._num_passed = 0
        try:
            if self._worker is not None:
                self._worker.attach(self._slabs)
            elif self._slabs:
                self._worker = self._bound(
                    Worker(self._slabs, layout=self._layout, rank=self._rank, device=self._device)
                )
            self._slabs, self._why_not, self._num_failed = None, "", 0
        except Exception as error:  # noqa: BLE001 - a step is under way, and the engine can go on without
            self._num_failed += 1
            if (why := in_words(error)) != self._why_not:  # it is tried again
                self._why_not = why
                log("warning", "vllm.no_host_memory", error=why)

    def _bound(self, worker: Worker) -> Worker:
        try:
            self._bind(worker)
        except BaseException:
            worker.close()
            raise
        return worker

    def _store(self, order: StoreOrder, after: object) -> None:
        self._stores[self._start(order.plan, after)] = order.request_ids

    def _take(self, stores: list["Future[Outcomes]"]) -> None:
        """Take the outcomes of stores that have ended."""
        for future in stores:
            del self._stores[future]
            self._outcomes.append(future.result())

    def _start(self, plan: Plan | None, after: object, ahead_of: object = None) -> "Future[Outcomes]":
        if plan is not None and self._worker is not None:
            try:
                return self._worker.start(plan, after=after, ahead_of=ahead_of)
            except TieredKVError as error:  # the engine goes on, and computes what was to be loaded
                return _ended(Outcomes(plan.job, self._rank, 0, str(error)))
        return _ended(Outcomes(plan.job if plan else 0, self._rank, 0, "" if plan is None else "no host memory"))

    def _event(self) -> object:
        """Return an event after all that the engine has given its device to do; None on a CPU, which has done it."""
        if (device := self._device).type == "cpu":
            return None
        event = torch.Event(device)
        event.record()
        return event

    @property
    def _device(self) -> torch.device:
        return self._pages[0][0].device

    def _tag(self, tensor: torch.Tensor, layer_names: tuple[str, ...]) -> str:
        """Say what a page's bytes are: whoever says the same can read them."""
        layers = get_layers_from_vllm_config(self._vllm_config, AttentionLayerBase, list(layer_names))
        # On a CPU a layer says for which instructions its kernels pack keys.
        packed = {f"{layer.get_attn_backend().get_name()} {getattr(layer, 'isa', '')}" for layer in layers.values()}
        device = device_kind()
        if tensor.device.type == "cpu":
            device += f" {torch.backends.cpu.get_cpu_capability()}"
        page = group_kernel_blocks(tensor, self._configuration.num_engine_blocks)[0]
        form = f"{tensor.dtype} {tuple(page.shape)} in order {_axes_in_memory(page)}"
        tag = f"vllm {VERSION}, {'+'.join(sorted(packed))} on {device}, {form}"
        stages = self._configuration.num_stages
        return f"{tag}, a stage of {stages}" if stages > 1 else tag  # which one is in the rank


def _axes_in_memory(page: torch.Tensor) -> list[int]:
    """Return a page's axes, the outermost first; of one that has one place the stride may be of all blocks."""
    strides = page.stride()
    return sorted((axis for axis, size in enumerate(page.shape) if size > 1), key=lambda axis: -strides[axis])


def _ended(outcomes: Outcomes) -> "Future[Outcomes]":
    future: Future[Outcomes] = Future()
    future.set_result(outcomes)
    return future


def _pages(tensor: torch.Tensor, num_blocks: int, page_bytes: int) -> torch.Tensor:
    """View a layer's tensor as bytes, ``(num_blocks, page_bytes)``.

    Raises:
        LayoutMismatchError: A block of it is not in one piece.
    """
    blocks = group_kernel_blocks(tensor, num_blocks)
    item, inner = tensor.element_size(), blocks[0]
    span = 1 + sum((size - 1) * stride for size, stride in zip(inner.shape, inner.stride(), strict=True))
    if span != inner.numel() or span * item > page_bytes:
        raise LayoutMismatchError(
            f"a block of a layer lies in pieces: shape {tuple(tensor.shape)}, strides {tensor.stride()}, and "
            f"{page_bytes} bytes a page"
        )
    strides = blocks.stride(0) * item, 1
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), tensor.storage_offset() * item, (num_blocks, page_bytes), strides)
