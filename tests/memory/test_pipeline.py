"""Two steps a piece on two streams: no step begins before what it needs is done, however the streams are scheduled."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from tiered_kv.memory import pipeline

CPU = torch.device("cpu")


class Streams:
    """Streams that do nothing until `run`, and then in any order that the waits allow.

    Stands in for ``torch.cuda``: work that torch would enqueue, the tests hand to `enqueue`.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.streams: list[Queue] = []
        self.current = self.Stream(CPU)

    def Stream(self, device: torch.device) -> "Queue":  # noqa: N802 - torch's name
        """Make a stream."""
        self.streams.append(Queue())
        return self.streams[-1]

    def current_stream(self, device: torch.device) -> "Queue":
        """Return the stream that work goes to now."""
        return self.current

    @contextmanager
    def stream(self, stream: "Queue") -> Iterator[None]:
        """Send work to ``stream`` inside the ``with`` block."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def enqueue(self, work: Callable[[], object]) -> None:
        """Have the current stream do ``work``."""
        self.current.queue.append((None, work))

    def run(self) -> None:
        """Do all that was enqueued."""
        while waiting := [stream for stream in self.streams if stream.queue]:
            ready = [stream for stream in waiting if stream.queue[0][0] is None or stream.queue[0][0].fired]
            assert ready, "streams that wait for each other"
            _, work = self.chance.choice(ready).queue.popleft()
            work()


class Event:
    """Fires when its stream gets there."""

    fired = False

    def fire(self) -> None:
        """Note that the stream got there."""
        self.fired = True


class Queue:
    """A queue of work, each with an event to wait for, or None."""

    def __init__(self) -> None:
        self.queue: deque[tuple[Event | None, Callable[[], object]]] = deque()

    def wait_event(self, event: Event) -> None:
        """Let what follows wait."""
        self.queue.append((event, lambda: None))

    def wait_stream(self, stream: "Queue") -> None:
        """Let what follows wait for all that ``stream`` has now."""
        self.wait_event(stream.record_event())

    def record_event(self) -> Event:
        """Mark this place in the queue."""
        event = Event()
        self.queue.append((None, event.fire))
        return event


@pytest.mark.parametrize("num_pieces", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(20))
def test_every_piece_comes_through_in_any_schedule(seed: int, num_pieces: int) -> None:
    """A buffer is emptied only when filled and filled only when empty; and all is over for whoever waits behind it."""
    streams = Streams(seed)
    source, target = list(range(10, 10 + num_pieces)), [0] * num_pieces
    buffers = [torch.zeros(1, dtype=torch.int64) for _ in range(min(num_pieces, 2))]
    state = {"ready": False}
    seen: list[list[int]] = []

    def first(piece: slice, buffer: torch.Tensor) -> None:
        streams.enqueue(lambda: buffer.fill_(source[piece.start] if state["ready"] else -1))

    def second(piece: slice, buffer: torch.Tensor) -> None:
        streams.enqueue(lambda: target.__setitem__(piece.start, int(buffer)))

    streams.enqueue(lambda: state.update(ready=True))  # what the caller had the stream wait for
    pipeline.run([slice(i, i + 1) for i in range(num_pieces)], buffers, first, second, streams=streams)
    streams.enqueue(lambda: seen.append(list(target)))
    for buffer in buffers:
        streams.enqueue(partial(buffer.fill_, -2))  # torch gives the memory to somebody else
    streams.run()
    assert seen == [source]


@pytest.mark.parametrize("seed", range(20))
def test_a_step_that_fails_leaves_nothing_running_behind_the_stream(seed: int) -> None:
    """The error goes to the caller, and the current stream still waits for what the other one was given."""
    streams = Streams(seed)
    done: list[int] = []

    def first(piece: slice, buffer: torch.Tensor) -> None:
        streams.enqueue(lambda: done.append(piece.start))
        if piece.start == 2:
            raise RuntimeError("the device is lost")

    steps = [slice(i, i + 1) for i in range(3)]
    with pytest.raises(RuntimeError, match="the device is lost"):
        pipeline.run(steps, [torch.zeros(1)] * 2, first, lambda *_: None, streams=streams)
    seen: list[list[int]] = []
    streams.current_stream(CPU).queue.append((None, lambda: seen.append(list(done))))
    streams.run()
    assert seen == [[0, 1, 2]]
