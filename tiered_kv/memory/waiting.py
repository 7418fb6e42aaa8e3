"""What streams wait for, where that is not simply a recorded event of torch's."""

import threading

import torch

from tiered_kv.errors import ConfigurationError
from tiered_kv.memory.device import After, Stream


class LateEvent:
    """Stands for the event of a copy that is not enqueued yet; `settle` says which event that has become."""

    def __init__(self) -> None:
        self._is_known = threading.Event()
        self._event: After = None

    def settle(self, event: After) -> None:
        """Name the event, recorded after the copy; None if there is no need to wait for it."""
        self._event = event
        self._is_known.set()

    @property
    def is_recorded(self) -> bool:
        """Whether a stream can wait for it without blocking its caller."""
        return self._is_known.is_set()

    def query(self) -> bool:
        """Say whether the copy has ended."""
        return self.is_recorded and (self._event is None or self._event.query() is True)

    def wait(self, stream: object) -> None:
        """Have a stream wait for the copy; blocks until that is enqueued."""
        self._is_known.wait()
        if self._event is not None:
            self._event.wait(stream)

    def synchronize(self) -> None:
        """Block until the copy has ended."""
        self._is_known.wait()
        if self._event is not None:
            self._event.synchronize()


def wait_in(stream: object, event: After) -> None:
    """Have a stream of the caller's, one of torch's or of ours, wait for an event that `Stream.submit` returned.

    Raises:
        ConfigurationError: It is no stream, or one that cannot wait for this device's events.
    """
    if isinstance(stream, Stream):
        stream.wait(event)
    elif isinstance(event, torch.Event | torch.cuda.Event | LateEvent) and isinstance(
        stream, torch.Stream | torch.cuda.Stream
    ):
        event.wait(_as_cuda(stream))
    else:
        raise ConfigurationError(f"{type(stream).__name__} is no stream that can wait for a copy on this device")


def _as_cuda(stream: torch.Stream) -> torch.Stream:
    """Return a generic stream of a GPU as CUDA's own, which its events take any stream for, whatever lies there."""
    if stream.device.type != "cuda" or isinstance(stream, torch.cuda.Stream):
        return stream
    numbers = {"stream_id": stream.stream_id, "device_index": stream.device_index, "device_type": stream.device_type}
    return torch.cuda.Stream(**numbers)  # type: ignore[no-untyped-call]  # of torch
