"""The few calls of CUDA's driver that torch does not offer, by ``ctypes``; each is missing where the driver lacks it.

The driver's symbols keep their meaning from version to version, those of the runtime library do not: its
``cudaMemcpyBatchAsync`` lost an argument with CUDA 13. Source: ``cuda.h`` of CUDA 13.0.
"""

import ctypes
from contextlib import suppress
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

_CUDA: Final = ("libcuda.so.1",)
_ROCM: Final = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")
CAPTURE_RELAXED: Final = 2
"""This thread's calls disturb no capture of a CUDA graph, its own neither, and none forbids them."""
MOST_AT_ONCE: Final = 4096
"""Copies that one call to the driver is given: of 51,828 driver 580.159 has crashed, says vLLM's issue 49276."""
_CAPTURED_EVENT: Final = 907
_IN_STREAM_ORDER: Final = 1
_HOST_POINTER_IS_DEVICE_POINTER: Final = 91
_USES_THE_HOSTS_PAGE_TABLES: Final = 100

Numbers = NDArray[np.int64]


@cache
def library() -> Any:  # noqa: ANN401 - whatever functions it has
    """Return the driver, which torch has loaded; None where there is none.

    Only who develops with ROCm has its library by the name without a version.
    """
    for name in _ROCM if torch.version.hip else _CUDA:
        with suppress(OSError):
            return ctypes.CDLL(name)
    return None


def exchange_capture_mode(mode: int) -> int | None:
    """Set how this thread's calls go together with captures of CUDA graphs; return what was set.

    None is that nothing has changed: the driver has no such call, or refused, as in a thread without a context, or on a
    device that is lost. Some drivers make a context on the thread's current device: choose the device first.
    """
    exchange = _find("cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode")
    value = ctypes.c_int(mode)
    return None if exchange is None or exchange(ctypes.byref(value)) else value.value


def was_captured(event: int) -> bool:
    """Say whether an event, by its handle, was last recorded in the capture of a CUDA graph: it never happens."""
    query = _find("cuEventQuery", "hipEventQuery")
    return query is not None and query(ctypes.c_void_p(event)) == _CAPTURED_EVENT


def wait_for(event: int) -> int | None:
    """Block until an event, by its handle, has happened: the thread sleeps, if the event is one of those.

    Returns:
        What the driver answers, 0 if all went well; None where it has no such call.
    """
    wait = _find("cuEventSynchronize", "hipEventSynchronize")
    return None if wait is None else wait(ctypes.c_void_p(event))


def has_batches(index: int) -> bool:
    """Say whether `copy_batch` is there, from CUDA 12.8 of the driver on, and may be used with GPU ``index``.

    Under WSL, for one, memory that was registered has another address on the GPU. What is copied one by one is
    translated, what is in a batch is not: it would be an illegal address (700), and the end of the GPU.
    """
    return _find("cuMemcpyBatchAsync") is not None and can_reach_host_memory(index)


def copy_batch(targets: Numbers, sources: Numbers, sizes: Numbers, stream: int) -> None:
    """Enqueue copies, by addresses and bytes, as few operations. In which order they are made is not said.

    Args:
        targets: Addresses, on either side of the bus; host memory page-locked, and no copy across two pieces of it.
        sources: As many.
        sizes: As many.
        stream: Its handle; not the default stream's.
    """
    attributes = (ctypes.c_int * 6)(_IN_STREAM_ORDER)  # then two hints, of type and id, and flags: none
    first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
    for start in range(0, len(sizes), MOST_AT_ONCE):
        part = slice(start, start + MOST_AT_ONCE)
        arrays = [np.ascontiguousarray(each[part], dtype=np.int64) for each in (targets, sources, sizes)]
        count = len(arrays[0])
        code = _find("cuMemcpyBatchAsync")(
            *(ctypes.c_void_p(array.ctypes.data) for array in arrays),
            ctypes.c_size_t(count),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            ctypes.c_void_p(stream),
        )
        if code:
            raise RuntimeError(
                f"a batch of {count} copies could not be enqueued: CUDA error {code} at copy {failed.value}"
            )


def can_reach_host_memory(index: int) -> bool:
    """Say whether GPU ``index`` knows page-locked memory by the host's address: a kernel may use that, and a batch."""
    return _has(_HOST_POINTER_IS_DEVICE_POINTER, index)


def is_one_memory_with_the_host(index: int) -> bool:
    """Say whether GPU ``index`` and the processor share page tables: then NVLink-C2C joins them, no PCIe."""
    return _has(_USES_THE_HOSTS_PAGE_TABLES, index)


def _has(attribute: int, index: int) -> bool:
    ask, value = _find("cuDeviceGetAttribute"), ctypes.c_int(0)
    return ask is not None and not ask(ctypes.byref(value), attribute, index) and bool(value.value)


def _find(*names: str) -> Any:  # noqa: ANN401 - a function of C, or None
    return next((found for name in names if (found := getattr(library(), name, None)) is not None), None)
