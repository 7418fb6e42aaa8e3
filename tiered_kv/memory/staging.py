"""Copies in two steps through a ring of buffers: while pieces take the second step, the next ones take the first."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from tiered_kv.values.integers import Ids

Step = Callable[[slice, Tensor], None]
"""Enqueues, in the current stream, a piece's way into or out of a staging buffer."""

PIECE_BYTES = 8 << 20
"""Of a staging buffer: its DMA takes longer than Python needs to enqueue the next one, some 0.1 ms, and the first one
of a window starts soon."""
NUM_BUFFERS: Final = 4
"""A kernel of the engine's may hold up ours for longer than one DMA: the bus then has three more to go on with."""


class Staging:
    """The staging of one stream of copies: a second stream, and buffers that are kept from window to window.

    Second steps go onto the stream, first steps onto the one beside, so that a kernel and a DMA overlap, those of
    neighbouring windows too. A buffer is filled again only after the second step that emptied it. For one thread at a
    time, but for `reserve`.

    Attributes:
        stream: torch's stream of the copies.
        num_operations: Enqueued so far, about; whoever enqueues counts.
        buffer_bytes: Of each buffer, those that are not there yet included.
    """

    def __init__(
        self,
        stream: Any,  # noqa: ANN401 - torch.Stream, or a like
        new_stream: Callable[[], Any],
        on: Callable[[Any], AbstractContextManager[object]],
    ) -> None:
        """Take no memory yet.

        Args:
            stream: Of the copies.
            new_stream: Makes the one beside, when it is needed.
            on: Has what is enqueued inside the ``with`` block go to a stream.
        """
        self.stream = stream
        self.num_operations = 0
        self.buffer_bytes = PIECE_BYTES
        self._num_buffers = NUM_BUFFERS
        self._lock = threading.Lock()
        self._new_stream = new_stream
        self._on = on
        self._beside: Any = None
        self._buffers: list[Tensor] = []
        self._emptied: list[Any] = []
        self._next = 0
        self._last = ("", 0)
        self._ids: dict[int, tuple[Ids, Tensor]] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Be `current` inside the ``with`` block."""
        before = getattr(_here, "staging", None)
        _here.staging = self
        try:
            yield
        finally:
            _here.staging = before

    def wait(self, after: Any) -> None:  # noqa: ANN401 - torch.Event, or a like
        """Have both streams wait for an event."""
        after.wait(self.stream)
        if self._beside is not None:
            after.wait(self._beside)

    def ids(self, numbers: Ids, device: torch.device) -> Tensor:
        """Return numbers on the device, for the current stream: those of its last copy are there still.

        The layers of a transfer, one copy each, are of the same pages and slots.
        """
        stream = getattr(torch.get_device_module(device).current_stream(device), "stream_id", 0)
        known = self._ids.get(stream)
        if known is None or not np.array_equal(known[0], numbers):
            known = self._ids[stream] = numbers, upload(numbers, device)
            self.num_operations += 1
        return known[1]

    def reserve(self, num_buffers: int, buffer_bytes: int, device: torch.device) -> None:
        """Have so many buffers of so many bytes at least. The current stream is that of the copies; any thread."""
        with self._lock:
            if not self._buffers or num_buffers != self._num_buffers or buffer_bytes > self.buffer_bytes:
                self._allocate(num_buffers, buffer_bytes, device)

    def free(self) -> None:
        """Give the buffers back, once nothing uses them."""
        self._buffers.clear()
        self._ids.clear()
        self._last = "", 0

    def run(
        self, kind: str, pieces: Sequence[slice], row_words: int, device: torch.device, first: Step, second: Step
    ) -> None:
        """Enqueue both steps of every piece. The stream is past all of it when this returns, or raises.

        Args:
            kind: First steps of one kind depend on no second step of this kind: they need not wait for those before.
            pieces: Of the blocks' positions, one after another.
            row_words: Of a block in a buffer.
            device: Of the buffers.
            first: Fills a buffer: ``(n, row_words)`` int64 for a piece of ``n``.
            second: Empties it.
        """
        with self._lock:
            self._run(kind, pieces, row_words, device, first, second)

    def _run(
        self, kind: str, pieces: Sequence[slice], row_words: int, device: torch.device, first: Step, second: Step
    ) -> None:
        longest = 8 * row_words * max(piece.stop - piece.start for piece in pieces)
        if not self._buffers or longest > self.buffer_bytes:
            self._allocate(self._num_buffers, max(longest, self.buffer_bytes), device)
        if len(pieces) == 1 and self._beside is None:  # nothing to overlap yet
            buffer = self._buffer(0, pieces[0], row_words)
            first(pieces[0], buffer)
            second(pieces[0], buffer)
            return
        if self._beside is None:
            self._beside = self._new_stream()
        if self._last != (kind, self.num_operations):  # else nothing has been enqueued since the last run of this kind
            self._wait_beside()
        try:
            for piece in pieces:
                self._run_one(piece, row_words, first, second)
        except BaseException:
            self._last = "", 0
            self.stream.wait_stream(self._beside)  # of a first step that failed half-way, a part may still run
            raise
        self._last = kind, self.num_operations

    def _run_one(self, piece: slice, row_words: int, first: Step, second: Step) -> None:
        at = self._next
        self._next = (at + 1) % len(self._buffers)
        buffer = self._buffer(at, piece, row_words)
        with self._on(self._beside):
            if self._emptied[at] is not None:
                self._beside.wait_event(self._emptied[at])
            first(piece, buffer)
            filled = self._beside.record_event()
        self.stream.wait_event(filled)
        second(piece, buffer)
        self._emptied[at] = self.stream.record_event()
        self.num_operations += 4

    def _buffer(self, at: int, piece: slice, row_words: int) -> Tensor:
        return self._buffers[at][: (piece.stop - piece.start) * row_words].view(-1, row_words)

    def _allocate(self, num_buffers: int, buffer_bytes: int, device: torch.device) -> None:
        """Take the ring's memory, in the stream; what there was is given back first.

        What torch's allocator gives a stream was used in that stream before: nothing but the order of the stream says
        that it is free, hence the wait. And what is given back here goes to nobody but the stream's later work, which
        comes after both steps: no ``record_stream`` is needed.
        """
        self._buffers.clear()
        num_words = -(-buffer_bytes // 16) * 2  # of each buffer: all begin as aligned as the first
        with torch.inference_mode(mode=False):  # it may be used outside of that too
            ring = torch.empty(num_buffers, num_words, dtype=torch.int64, device=device)
        self._num_buffers, self.buffer_bytes = num_buffers, num_words * 8
        self._buffers, self._emptied, self._next = list(ring.unbind()), [None] * num_buffers, 0
        if self._beside is not None:
            self._wait_beside()

    def _wait_beside(self) -> None:
        self._beside.wait_stream(self.stream)


_here = threading.local()


def current(device: torch.device) -> Staging:
    """Return what copies in this thread go through: that of the stream whose turn it is, else one of torch's own."""
    staging: Staging | None = getattr(_here, "staging", None)
    if staging is None:
        torch_streams = torch.get_device_module(device)
        staging = Staging(torch_streams.current_stream(), torch_streams.Stream, torch_streams.stream)
    return staging


def upload(numbers: Ids, device: torch.device) -> Tensor:
    """Enqueue a copy of some numbers to a device, out of page-locked memory, which torch keeps until it was read.

    Out of pageable memory the driver would copy only once the stream gets there, and have the caller wait for that.
    """
    host = torch.tensor(numbers)  # a copy: those of a plan are read-only
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def pieces_of(num_blocks: int, block_bytes: int, buffer_bytes: int) -> list[slice]:
    """Cut positions into pieces that fit a staging buffer, as long as each other but for one block."""
    num_pieces = -(-num_blocks // max(1, buffer_bytes // block_bytes))
    return [slice(num_blocks * at // num_pieces, num_blocks * (at + 1) // num_pieces) for at in range(num_pieces)]
