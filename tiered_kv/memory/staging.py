"""Copies in two steps through a ring of buffers: while pieces take the second step, the next ones take the first."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch
from torch import Tensor

Step = Callable[[slice, Tensor], None]
"""Enqueues, in the current stream, a piece's way into or out of a staging buffer."""

PIECE_BYTES = 8 << 20
"""Of a staging buffer: its DMA takes longer than Python needs to enqueue the next one, some 0.1 ms, and the first one
of a window starts soon."""
_NUM_BUFFERS: Final = 4
"""A kernel of the engine's may hold up ours for longer than one DMA: the bus then has three more to go on with."""


class Staging:
    """What a stream of copies has beside itself: a second stream, and buffers that are kept from window to window.

    Second steps go onto the stream, first steps onto the one beside, so that a kernel and a DMA overlap, those of
    neighbouring windows too. A buffer is filled again only after the second step that emptied it. For one thread at a
    time.

    Attributes:
        stream: torch's stream of the copies.
        num_operations: Enqueued so far, about; whoever enqueues counts.
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
        self._new_stream = new_stream
        self._on = on
        self._beside: Any = None
        self._buffers: list[Tensor] = []
        self._emptied: list[Any] = []
        self._next = 0
        self._last = ("", 0)

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

    def free(self) -> None:
        """Give the buffers back, once nothing uses them."""
        self._buffers.clear()
        self._emptied.clear()
        self._next = 0
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
        if len(pieces) == 1 and self._beside is None:  # nothing to overlap yet
            buffer = self._buffer(0, pieces[0], row_words, device)
            first(pieces[0], buffer)
            second(pieces[0], buffer)
            return
        if self._beside is None:
            self._beside = self._new_stream()
        if self._last != (kind, self.num_operations):  # else nothing has been enqueued since the last run of this kind
            self._wait_beside()
        try:
            for piece in pieces:
                self._run_one(piece, row_words, device, first, second)
        except BaseException:
            self._last = "", 0
            self.stream.wait_stream(self._beside)  # of a first step that failed half-way, a part may still run
            raise
        self._last = kind, self.num_operations

    def _run_one(self, piece: slice, row_words: int, device: torch.device, first: Step, second: Step) -> None:
        at = self._next
        self._next = (at + 1) % _NUM_BUFFERS
        buffer = self._buffer(at, piece, row_words, device)
        with self._on(self._beside):
            if self._emptied[at] is not None:
                self._beside.wait_event(self._emptied[at])
            first(piece, buffer)
            filled = self._beside.record_event()
        self.stream.wait_event(filled)
        second(piece, buffer)
        self._emptied[at] = self.stream.record_event()
        self.num_operations += 4

    def _buffer(self, at: int, piece: slice, row_words: int, device: torch.device) -> Tensor:
        """Return a buffer of the ring, allocated in the stream, and again where one block is larger than it.

        What torch's allocator gives a stream was used in that stream before: nothing but the order of the stream says
        that it is free, hence the wait. And what is given back here goes to nobody but the stream's later work, which
        comes after both steps: no ``record_stream`` is needed.
        """
        num_words = (piece.stop - piece.start) * row_words
        while len(self._buffers) <= at:
            self._buffers.append(torch.empty(0, dtype=torch.int64, device=device))
            self._emptied.append(None)
        if self._buffers[at].numel() < num_words:
            with torch.inference_mode(mode=False):  # it may be used outside of that too
                self._buffers[at] = torch.empty(max(num_words, PIECE_BYTES // 8), dtype=torch.int64, device=device)
            if self._beside is not None:
                self._wait_beside()
        return self._buffers[at][:num_words].view(-1, row_words)

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


def pieces_of(num_blocks: int, block_bytes: int) -> list[slice]:
    """Cut positions into pieces that fit a staging buffer, as long as each other but for one block."""
    num_pieces = -(-num_blocks // max(1, PIECE_BYTES // block_bytes))
    return [slice(num_blocks * at // num_pieces, num_blocks * (at + 1) // num_pieces) for at in range(num_pieces)]
