"""What only CUDA has (and ROCm, which torch calls CUDA): blocking events, and page-locking memory that exists already.

Through torch alone an event's ``synchronize`` spins on a core, and a slab in a memfd cannot be page-locked.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch

from tiered_kv.errors import ConfigurationError
from tiered_kv.events import Emit
from tiered_kv.memory import driver
from tiered_kv.memory.accelerator import AcceleratorDevice
from tiered_kv.memory.host import HostSlab
from tiered_kv.memory.numa import node_of_gpu
from tiered_kv.memory.page_locking import PageLocking, TryAgainError

_SUCCESS: Final = 0
_FORBIDDEN_BY_A_CAPTURE: Final = 900


class CUDADevice(AcceleratorDevice):
    """One GPU of NVIDIA's, or of AMD's under ROCm."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        """Use ``device``, the current one if it has no index.

        Raises:
            ConfigurationError: This torch sees no such GPU.
        """
        if torch.device(device).type != "cuda":
            raise ConfigurationError(f"{device} is no CUDA device")
        super().__init__(device)
        self._bound = threading.local()

    @contextmanager
    def here(self) -> Iterator[None]:
        """Choose this GPU, and set the thread apart from all captures of CUDA graphs; then set both back.

        While a thread captures in the default mode, an event query or a registration of memory by any other thread is
        refused (900), and spoils the capture. The GPU comes first: the second call makes a context on the current one.
        """
        with torch.cuda.device(self.torch_device):
            mode = driver.exchange_capture_mode(driver.CAPTURE_RELAXED)
            try:
                if not hasattr(self._bound, "to_context"):
                    # Choosing the GPU that is chosen does nothing, and the driver's own calls need a context.
                    self._bound.to_context = torch.cuda.mem_get_info(self.torch_device)
                yield
            finally:
                driver.exchange_capture_mode(mode)

    def new_stream(self) -> torch.Stream:
        """Make a CUDA stream of high priority: a copy is awaited, and its kernels are short."""
        return torch.cuda.Stream(self.torch_device, priority=-1)  # type: ignore[no-untyped-call]  # of torch

    def new_event(self) -> torch.Event:
        """Make an event whose ``synchronize`` sleeps in the driver."""
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # of torch

    def on(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """Have what is enqueued inside the ``with`` block go to ``stream``."""
        return torch.cuda.stream(stream)  # type: ignore[arg-type]  # made by new_stream

    def _new_page_locking(self, slab: HostSlab, emit: Emit) -> PageLocking:
        lock, unlock = self._cuda_host_register, self._cuda_host_unregister
        return PageLocking(slab, lock=lock, unlock=unlock, node=self._numa_node(), emit=emit)

    def _numa_node(self) -> int | None:
        facts = torch.cuda.get_device_properties(self.torch_device)
        numbers = [getattr(facts, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
        domain, bus, slot = numbers
        if domain is None or bus is None or slot is None:
            return None  # torch before 2.7 does not tell
        return node_of_gpu(f"{domain:04x}:{bus:02x}:{slot:02x}.0")

    def _cuda_host_register(self, address: int, num_bytes: int) -> None:
        with self.here():
            _check(_runtime().cudaHostRegister(address, num_bytes, 0), f"page-lock {num_bytes} bytes")

    def _cuda_host_unregister(self, address: int) -> None:
        with self.here():
            _check(_runtime().cudaHostUnregister(address), "unlock host memory")


def _runtime() -> Any:  # noqa: ANN401 - a module without stubs
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # of torch


def _check(code: Any, doing: str) -> None:  # noqa: ANN401 - torch's cudaError, an enum without stubs
    if int(code) == _FORBIDDEN_BY_A_CAPTURE:
        raise TryAgainError(f"could not {doing} while a CUDA graph is captured")
    if int(code) != _SUCCESS:
        raise RuntimeError(f"could not {doing}: CUDA error {code}")
