"""Copies in two steps through staging buffers: while one piece takes its second step, the next one takes its first."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

Step = Callable[[slice, Tensor], None]
"""Enqueues, in the current stream, a piece's way into or out of a staging buffer."""


def run(pieces: Sequence[slice], buffers: Sequence[Tensor], first: Step, second: Step, *, streams: Any = None) -> None:  # noqa: ANN401 - see below
    """Enqueue both steps of every piece. The current stream is past all of it when this returns, or raises.

    Second steps go onto the current stream, first steps onto one beside it, so that a kernel and a DMA overlap. A
    buffer is filled again only after the second step that emptied it.

    The buffers may be freed by torch at once and without ``record_stream``: they were allocated in the current stream,
    nothing else is given their memory but by that stream's own later work, and that comes after both steps. So two of
    them cost no account of our own, and no ``cudaMalloc`` after the first call.

    Args:
        pieces: Of the blocks' positions, one after another.
        buffers: Allocated in the current stream. One is enough for one piece.
        first: Fills a buffer.
        second: Empties it.
        streams: torch's module for the device, ``torch.cuda`` or a like; by default that of the buffers.
    """
    if not pieces:
        return
    if len(pieces) == 1:  # nothing to overlap
        first(pieces[0], buffers[0])
        second(pieces[0], buffers[0])
        return
    device = buffers[0].device
    streams = streams or torch.get_device_module(device)
    current = streams.current_stream(device)
    beside = _stream_beside(streams, current, device)
    beside.wait_stream(current)  # for what the caller waits for, and for whoever had the buffers before
    emptied: list[Any] = [None] * len(buffers)
    try:
        for number, piece in enumerate(pieces):
            at = number % len(buffers)
            with streams.stream(beside):
                if emptied[at] is not None:
                    beside.wait_event(emptied[at])
                first(piece, buffers[at])
                filled = beside.record_event()
            current.wait_event(filled)
            second(piece, buffers[at])
            emptied[at] = current.record_event()
    finally:
        current.wait_stream(beside)  # of a first step that failed half-way, a part may still run


@cache
def _stream_beside(streams: Any, current: Any, device: torch.device) -> Any:  # noqa: ANN401, ARG001 - any module's
    """Return the one stream kept for ``current``. A stream is equal to another handle of it, and there are few."""
    return streams.Stream(device)
