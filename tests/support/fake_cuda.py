"""``torch.cuda``, and tensors on GPUs, over a `FakeDriver`: our code for GPUs runs on it line by line.

Tensors of a "GPU" are host memory that calls itself ``cuda:N``. Inside ``with torch.cuda.stream(...)`` every operation
on them is enqueued, whatever it is, and runs in its stream's turn: what is read too soon is the wrong bytes.

Where torch lies, so does this: ``is_pinned`` asks for the first byte of a storage, whatever part of it a tensor shows.
"""

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.fake_driver import CAPTURED_EVENT, ILLEGAL_ADDRESS, MISALIGNED, FakeDriver, Marker

POOL = 32
"""Streams of one device and priority."""
_real = {name: getattr(torch, name) for name in ("empty", "zeros", "randn", "arange")}
_real_equal = torch.equal
_real_device = torch._C.TensorBase.device  # noqa: SLF001 - torch offers no other


@contextmanager
def fake_cuda(num_devices: int = 4, seed: int = 0) -> Iterator[FakeDriver]:
    """Have torch see so many GPUs inside the ``with`` block."""
    from tiered_kv.memory import crossover, device_copies, driver, kernels  # noqa: PLC0415 - imports Triton

    fake = FakeDriver(num_devices, seed)
    what_asks = device_copies.kernels_for, crossover.kernel_way
    cached = *what_asks, crossover._device_name, kernels._bytes_over_bus  # noqa: SLF001 - what remembers the real GPU
    with pytest.MonkeyPatch.context() as patch:
        _patch_torch(patch, fake)
        patch.setattr(driver, "library", lambda: fake)
        patch.setattr(kernels, "INTERPRETED", False)
        patch.setattr(kernels, "_copy", _Kernel(fake))
        patch.setattr(crossover, "_measured", {})
        for each in cached:
            each.cache_clear()
        yield fake
    for each in cached:
        each.cache_clear()


def _patch_torch(patch: pytest.MonkeyPatch, fake: FakeDriver) -> None:
    streams = _streams_of(fake)
    for name, value in streams.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch, "Stream", streams["Stream"].__mro__[1])
    patch.setattr(torch, "Event", streams["Event"].__mro__[1])
    patch.setattr(torch.accelerator, "is_available", lambda: True)
    patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    patch.setattr(torch.accelerator, "device_count", lambda: fake.num_devices)
    for name, make in _real.items():
        patch.setattr(torch, name, functools.partial(_make, fake, make))
    patch.setattr(torch, "equal", functools.partial(_equal, fake))
    patch.setattr(torch, "Generator", _Generator)
    patch.setattr(torch.Tensor, "device", property(functools.partial(_device_of, fake)), raising=False)
    patch.setattr(torch.Tensor, "to", functools.partialmethod(_to, fake))
    patch.setattr(torch.Tensor, "pin_memory", functools.partialmethod(_pin_memory, fake))
    patch.setattr(torch.Tensor, "is_pinned", lambda self: fake.is_locked(self.untyped_storage().data_ptr()))


def _index_of(device: Any, fake: FakeDriver) -> int:  # noqa: ANN401 - whatever torch takes
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return fake.current_device() if index is None else index


def _streams_of(fake: FakeDriver) -> dict[str, Any]:  # noqa: C901 - many names, each of them short
    """Return what replaces the names of ``torch.cuda``."""
    here, counts = fake.here, dict[tuple[int, int], int]()

    class AnyStream:
        def __init__(  # noqa: ANN401, RUF100 - as torch takes it
            self,
            device: Any = None,  # noqa: ANN401 - as torch takes it
            priority: int = 0,
            *,
            stream_id: int = -1,
            device_index: int = -1,
            device_type: int = 1,
        ) -> None:
            self.device_index = device_index if device_index >= 0 else _index_of(device, fake)
            self.device, self.device_type = torch.device("cuda", self.device_index), device_type
            if stream_id < 0:
                key = self.device_index, priority
                counts[key] = counts.get(key, 0) + 1
                stream_id = 1 + counts[key] % POOL + (32 if priority else 0)
            self.stream_id, self.priority = stream_id, priority
            self.queue = fake.queue(self.device_index, stream_id)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, AnyStream) and self.queue is other.queue

        def __hash__(self) -> int:
            return hash((self.device_index, self.stream_id))

    class Stream(AnyStream):
        @property
        def cuda_stream(self) -> int:
            return self.device_index << 16 | self.stream_id

        def wait_event(self, event: Any) -> None:  # noqa: ANN401 - whatever it is
            event.wait(self)

        def record_event(self) -> "Event":
            event = Event()
            event.record(self)
            return event

        def wait_stream(self, stream: "Stream") -> None:
            self.wait_event(stream.record_event())

        def synchronize(self) -> None:
            if code := fake.unsafe():
                fake.fail(code)
            fake.wait_for(fake.mark(self.queue))

    class AnyEvent:
        def __init__(self, device: Any = None, **_: bool) -> None:  # noqa: ANN401 - as torch takes it
            self.marker: Marker | None = None

        @property
        def event_id(self) -> int:
            return 0 if self.marker is None else id(self.marker)

        def record(self, stream: Any = None) -> None:  # noqa: ANN401 - whatever it is
            stream = current_stream() if stream is None else stream
            fake.check()
            fake.contexts.add(stream.device_index)
            self.marker = fake.mark(stream.queue)

        def wait(self, stream: Any = None) -> None:  # noqa: ANN401 - whatever it is
            fake.check()
            if self.marker is not None and self.marker.is_captured:
                fake.spoilt = True  # the stream would be a part of the graph, and never come back from it
                fake.fail(CAPTURED_EVENT)
            if self.marker is not None:
                fake.enqueue((stream or current_stream()).queue, after=self.marker)

        def query(self) -> bool:
            self._ask()
            return self.marker is None or self.marker.fired

        def elapsed_time(self, end: "AnyEvent") -> float:
            assert self.query()
            assert end.query()
            return 1.0

        def synchronize(self) -> None:
            assert not threading.current_thread().daemon, "the program may end meanwhile: torch would abort it"
            self._ask()
            if self.marker is not None:
                fake.wait_for(self.marker)

        def _ask(self) -> None:
            fake.check()
            if code := fake.unsafe():
                fake.fail(code)
            if self.marker is not None and self.marker.is_captured:
                fake.fail(CAPTURED_EVENT)

    class Event(AnyEvent):
        event_id = 0  # as in torch 2.6 and 2.7

        @property
        def cuda_event(self) -> int:
            return 0 if self.marker is None else id(self.marker)

        def record(self, stream: Any = None) -> None:  # noqa: ANN401 - whatever it is
            assert stream is None or isinstance(stream, Stream), "what lies there is taken for a stream"
            super().record(stream)

        def wait(self, stream: Any = None) -> None:  # noqa: ANN401 - whatever it is
            assert stream is None or isinstance(stream, Stream), "what lies there is taken for a stream"
            super().wait(stream)

    @contextmanager
    def device(wanted: Any) -> Iterator[None]:  # noqa: ANN401 - whatever torch takes
        before = fake.current_device()
        fake.set_device(_index_of(wanted, fake))
        try:
            yield
        finally:
            if before in fake.contexts:
                fake.set_device(before)
            else:
                here.saved_device = before

    def current_stream(device: Any = None) -> Stream:  # noqa: ANN401 - whatever torch takes
        index = _index_of(device, fake)
        number: int = getattr(here, f"stream{index}", 0)
        return Stream(stream_id=number, device_index=index)

    def set_stream(stream: Stream) -> None:
        if stream.device_index != fake.current_device():
            fake.set_device(stream.device_index)
        setattr(here, f"stream{stream.device_index}", stream.stream_id)

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, there = current_stream(), current_stream(stream.device)
        set_stream(stream)
        try:
            with _Enqueueing(fake, current_stream):
                yield
        finally:
            if before.device_index != stream.device_index:
                set_stream(there)
            set_stream(before)

    def synchronize(device: Any = None) -> None:  # noqa: ANN401 - whatever torch takes
        if code := fake.unsafe():
            fake.fail(code)
        for marker in [fake.mark(queue) for queue in fake.queues_of(_index_of(device, fake))]:
            fake.wait_for(marker)

    def mem_get_info(wanted: Any = None) -> tuple[int, int]:  # noqa: ANN401 - whatever torch takes
        with device(wanted):
            fake.check()
            fake.use_context()
        return fake.room, 1 << 35

    return {
        "Stream": Stream,
        "Event": Event,
        "device": device,
        "stream": on,
        "current_stream": current_stream,
        "is_current_stream_capturing": lambda: fake.is_captured(current_stream().queue),
        "synchronize": synchronize,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: fake.num_devices,
        "current_device": fake.current_device,
        "set_device": lambda wanted: fake.set_device(_index_of(wanted, fake)),
        "get_device_name": lambda _=None: "Fake GPU",
        "get_device_properties": lambda _: SimpleNamespace(),
        "mem_get_info": mem_get_info,
        "cudart": lambda: fake,
    }


class _Generator(torch.Generator):
    """Of random numbers, on a GPU too."""

    def __new__(cls, _: object = None) -> Self:
        return super().__new__(cls)


class _Enqueueing(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's has no types
    """Puts every operation on a GPU's tensors into the current stream."""

    def __init__(self, fake: FakeDriver, current_stream: Any) -> None:  # noqa: ANN401 - torch's function
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self._fake = fake
        self._current_stream = current_stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - any operation
        kwargs, fake = kwargs or {}, self._fake
        tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
        aliases = [each.alias_info for each in func._schema.arguments if each.alias_info is not None]  # noqa: SLF001 - the only place that says so
        is_view = any(not each.is_write for each in aliases)
        if fake.here.is_gpu or is_view or not any(fake.device_of(each.data_ptr()) is not None for each in tensors):
            return func(*args, **kwargs)
        if any(each.is_write for each in aliases) and args[0].is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError("Inplace update to inference tensor outside InferenceMode is not allowed.")
        fake.check()
        queue = self._current_stream().queue
        if func is torch.ops.aten.copy_.default:
            return _copy(fake, queue, args[0], args[1])
        if func is torch.ops.aten.div.Tensor and not isinstance(args[1], torch.Tensor):  # as torch's kernel divides
            func, args = torch.ops.aten.mul.Tensor, (args[0], 1 / torch.tensor(args[1], dtype=args[0].dtype).item())
        if aliases:
            fake.enqueue(queue, functools.partial(func, *args, **kwargs))
            return args[0]
        kwargs.pop("device", None)
        shape_of = func(*tree_map(_without_bytes, args), **kwargs)
        assert isinstance(shape_of, torch.Tensor), f"{func} gives no tensor: it would wait for the GPU"
        out = _real["empty"](shape_of.shape, dtype=shape_of.dtype)
        fake.keep(out.data_ptr(), out.nbytes, fake.current_device(), out)
        fake.enqueue(queue, lambda: out.copy_(func(*args, **kwargs)))
        return out


def _without_bytes(value: Any) -> Any:  # noqa: ANN401 - any argument
    return (
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if (isinstance(value, torch.Tensor))
        else value
    )


def _copy(fake: FakeDriver, queue: Any, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - a fake's
    """Enqueue a copy as CUDA does: between a GPU and pageable memory the caller waits for it."""
    kinds = {
        fake.kind_of(each.data_ptr(), each.nbytes) for each in (target, source) if each.is_contiguous() and each.nbytes
    }
    fake.enqueue(queue, functools.partial(target.copy_, source))
    crosses = (fake.device_of(target.data_ptr()) is None) != (fake.device_of(source.data_ptr()) is None)
    if crosses and ("pageable" in kinds or not (target.is_contiguous() and source.is_contiguous())):
        fake.block("a copy to or from pageable memory")
        fake.wait_for(fake.mark(queue))
    return target


def _equal(fake: FakeDriver, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare. For the answer torch takes page-locked memory, and asks for the events of what it had given before."""
    if fake.device_of(one.data_ptr()) is not None and (code := fake.unsafe()):
        fake.fail(code)
    return _real_equal(one, other)


def _device_of(fake: FakeDriver, tensor: torch.Tensor) -> torch.device:
    real: torch.device = _real_device.__get__(tensor)
    if real.type != "cpu" or fake.here.is_gpu:
        return real
    index = fake.device_of(tensor.untyped_storage().data_ptr())
    return real if index is None else torch.device("cuda", index)


def _make(fake: FakeDriver, make: Any, *size: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401 - torch.empty or its like
    """Allocate memory: a GPU's, the host's, or page-locked."""
    device = torch.device(kwargs.pop("device", None) or "cpu")
    pinned = kwargs.pop("pin_memory", False)
    if device.type != "cuda":
        made: torch.Tensor = make(*size, device=device, **kwargs)
        if pinned and (code := fake.unsafe()):
            fake.fail(code)
        return _locked(fake, made) if pinned else made
    if make is _real["randn"] and kwargs.get("generator") is None and fake.is_capturing():
        raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")  # of the GPU's own
    made = make(*size, **kwargs)
    if made.nbytes and (code := fake.unsafe()):
        fake.fail(code)  # torch asks the driver for memory, unless it has some left over
    if made.nbytes > fake.room:
        raise torch.OutOfMemoryError("CUDA out of memory")
    index = _index_of(device, fake)
    fake.contexts.add(index)
    fake.keep(made.untyped_storage().data_ptr(), made.untyped_storage().nbytes(), index, made)
    if make is _real["zeros"]:  # the zeros come in the current stream's turn
        bytes_of = made.untyped_storage()
        ctypes.memset(bytes_of.data_ptr(), 0xEE, bytes_of.nbytes())
        stream = torch.cuda.current_stream(index)
        fake.enqueue(stream.queue, functools.partial(ctypes.memset, bytes_of.data_ptr(), 0, bytes_of.nbytes()))  # type: ignore[attr-defined]  # the fake's
    return made


def _locked(fake: FakeDriver, tensor: torch.Tensor) -> torch.Tensor:
    fake.lock(tensor.data_ptr(), tensor.nbytes, tensor)
    return tensor


def _pin_memory(tensor: torch.Tensor, fake: FakeDriver) -> torch.Tensor:
    fake.check()
    if code := fake.unsafe():
        fake.fail(code)
    return _locked(fake, tensor.clone())


def _to(tensor: torch.Tensor, fake: FakeDriver, device: Any, *, non_blocking: bool = False) -> torch.Tensor:  # noqa: ANN401 - as torch takes it
    target = torch.device(device) if not isinstance(device, torch.dtype) else None
    if target is None or target.type != "cuda":
        made: torch.Tensor = torch._C.TensorBase.to(tensor, device)  # noqa: SLF001 - torch offers no other
        return made
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device=target)
    _copy(fake, torch.cuda.current_stream(target).queue, out, tensor)  # type: ignore[attr-defined]  # the fake's
    return out


class _Kernel:
    """Stands in for the compiled `kernels._copy`: believes what it is told of alignment, and is told off for a lie."""

    def __init__(self, fake: FakeDriver) -> None:
        self._fake = fake
        self.compiled: set[tuple[object, ...]] = set()
        """What Triton would have compiled: one binary for each."""
        self.num_launched = 0
        self.num_programs = 0

    def __getitem__(self, grid: tuple[int]) -> Any:  # noqa: ANN401 - Triton's
        return functools.partial(self._launch, grid)

    def _launch(
        self,
        grid: tuple[int],
        table: torch.Tensor,
        pages: torch.Tensor,
        slots: torch.Tensor,
        num_units: int,
        num_fragments: int,
        pieces: int,
        pages_per_block: int,
        rows: int,
        row_stride: int,
        **constants: Any,  # noqa: ANN401 - Triton's
    ) -> None:
        self._fake.check()
        self.compiled.add(tuple(sorted(constants.items())))
        self.num_launched += 1
        self.num_programs = grid[0]
        queue = torch.cuda.current_stream(table.device).queue  # type: ignore[attr-defined]  # the fake's
        num_blocks = num_units // pieces // num_fragments // pages_per_block if num_units else 0

        def run() -> None:
            facts = table[: 4 * num_fragments].view(-1, 4).tolist()
            page_ids = pages[: num_blocks * pages_per_block].view(-1, pages_per_block).tolist()
            for slot, ids in zip(slots[:num_blocks].tolist(), page_ids, strict=True):
                for (address, stride, num_bytes, offset), (number, page) in product(facts, enumerate(ids)):
                    in_row = rows + slot * row_stride + offset + number * num_bytes
                    self._move(address + page * stride, in_row, num_bytes, constants)

        self._fake.enqueue(queue, run)

    def _move(self, in_engine: int, in_row: int, num_bytes: int, constants: dict[str, Any]) -> None:
        fake = self._fake
        if (in_engine | in_row | num_bytes) % constants["ALIGNMENT"]:
            fake.failure = fake.failure or MISALIGNED
        elif fake.is_elsewhere(in_row) or "pageable" in {fake.kind_of(each, num_bytes) for each in (in_engine, in_row)}:
            fake.failure = fake.failure or ILLEGAL_ADDRESS
        else:
            ctypes.memmove(*((in_row, in_engine) if constants["TO_ROWS"] else (in_engine, in_row)), num_bytes)
