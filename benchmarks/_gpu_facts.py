"""What the machine of a GPU is, without which no figure means anything, and what its driver answers."""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import threading
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from _gpu_report import Run
from tiered_kv.memory import CUDADevice, driver

PACKAGES = ("torch", "triton", "numpy", "anyio", "pydantic", "structlog", "xxhash", "aiofiles", "pytest", "hypothesis")
SMI = (
    "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm,power.limit,ecc.mode.current"
)
ATTRIBUTES = {
    "host pointer is device pointer": 91,
    "pageable memory access": 88,
    "pageable access by host page tables": 100,
    "concurrent copy engines": 40,
}


def facts(run: Run) -> None:
    """Note them; each question by itself, since any may be refused."""
    note = run.report.note
    note("machine", "kernel", platform.release())
    note("machine", "cores", os.cpu_count())
    note("machine", "memory_gib", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    note("versions", "python", sys.version.split()[0])
    note("versions", "cuda", torch.version.cuda)
    for name in PACKAGES:
        try:
            note("versions", name, version(name))
        except PackageNotFoundError:
            note("versions", name, "missing")
    note("driver", "batches", driver.has_batches(run.device.torch_device.index or 0))
    if not run.has_gpu:
        return
    for about, ask in {"gpu": _gpu, "torch": _torch, "driver": _driver}.items():
        with run.report.catching(about):
            ask(run)


def _gpu(run: Run) -> None:
    name = torch.cuda.get_device_name(run.device.torch_device)
    run.report.note("gpu", "name", name)
    run.report.note("gpu", "numa_node", str(CUDADevice(run.device.torch_device)._numa_node()))  # noqa: SLF001 - whom to ask
    for tool in ("compute-sanitizer", "nvidia-smi"):
        run.report.note("gpu", tool, shutil.which(tool))
    command = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    for field, value in zip(SMI.split(","), (said.stdout or "").strip().split(", "), strict=False):
        run.report.note("gpu", field, value)


def _torch(run: Run) -> None:
    """Ask for what our code, or a fake of our tests, takes for granted of torch."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # of torch
    run.report.note("torch", "event_id_unrecorded", event.event_id)
    event.record()
    run.report.note("torch", "event_id_recorded", bool(event.event_id))
    memory = torch.zeros(4 << 20, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 4096 :]
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # of torch
    run.report.note("torch", "page_locking_1_mib_code", int(runtime.cudaHostRegister(memory.data_ptr(), 1 << 20, 0)))
    run.report.note("torch", "is_pinned_behind_it", memory[2 << 20 :].is_pinned())
    runtime.cudaHostUnregister(memory.data_ptr())


def _driver(run: Run) -> None:
    library, index = driver.library(), run.device.torch_device.index or 0
    for name, number in ATTRIBUTES.items():
        value = ctypes.c_int(-1)
        code = library.cuDeviceGetAttribute(ctypes.byref(value), number, index)
        run.report.note("driver", name, value.value if not code else f"error {code}")
    thread = threading.Thread(target=partial(_exchange, run, library))
    thread.start()
    thread.join()


def _exchange(run: Run, library: Any) -> None:  # noqa: ANN401 - whatever functions it has
    mode = ctypes.c_int(driver.CAPTURE_RELAXED)
    code = library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    run.report.note("driver", "exchange_capture_mode_without_context", f"code {code}, mode {mode.value}")
