"""Two steps a piece on two streams: no step begins before what it needs is done, however the streams are scheduled."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.fake_cuda import fake_cuda
from tests.support.fake_driver import FakeDriver, Marker
from tiered_kv.memory import staging as module
from tiered_kv.memory.staging import Staging, pieces_of

pytest.importorskip("triton", reason="Triton: pip install 'tiered-kv[cuda]'")
GPU = torch.device("cuda", 0)


class Machine:
    """A GPU whose streams do nothing until `run`, and then in any order that the waits allow."""

    def __init__(self, fake: FakeDriver) -> None:
        self.fake = fake
        fake.held = True
        self.stream: Any = torch.cuda.Stream(GPU)  # type: ignore[no-untyped-call]  # of torch
        self.staging = Staging(self.stream, partial(torch.cuda.Stream, GPU), torch.cuda.stream)

    def warm_up(self) -> None:
        """Have all buffers: allocating one, the second stream waits for the first, which hides what is left out."""
        for _ in range(2):
            self.copy([0] * 4, [0] * 4, {"now": True})
        self.fake.run()

    def enqueue(self, work: Callable[[], object]) -> None:
        """Have the current stream do ``work``."""
        self.fake.enqueue(torch.cuda.current_stream(GPU).queue, work)  # type: ignore[attr-defined]  # the fake's

    def copy(self, source: list[int], target: list[int], ready: dict[str, bool], kind: str = "gather") -> None:
        """Copy a list through the ring, a number a piece."""

        def first(piece: slice, buffer: Tensor) -> None:
            self.enqueue(lambda: buffer.fill_(source[piece.start] if ready["now"] else -1))

        def second(piece: slice, buffer: Tensor) -> None:
            self.enqueue(lambda: target.__setitem__(piece.start, int(buffer)))

        pieces = [slice(at, at + 1) for at in range(len(source))]
        with torch.cuda.stream(self.stream):
            self.staging.run(kind, pieces, 1, GPU, first, second)


@pytest.fixture(params=range(10))
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Ten schedules."""
    monkeypatch.setattr(module, "PIECE_BYTES", 8)
    with fake_cuda(seed=request.param) as fake:
        machine = Machine(fake)
        machine.warm_up()
        yield machine


@pytest.mark.parametrize("num_pieces", [1, 2, 3, 4, 5, 11])
def test_every_piece_comes_through_in_any_schedule(machine: Machine, num_pieces: int) -> None:
    """A buffer is emptied only when filled and filled only when empty; whoever comes behind finds all of it done."""
    seen, ready = list[list[int]](), {"now": False}
    with torch.cuda.stream(machine.stream):
        machine.enqueue(lambda: ready.update(now=True))  # what the first window depends on
    machine.staging.num_operations += 1
    sources = [list(range(at, at + num_pieces)) for at in (10, 40, 70)]
    for source in sources:
        target = [0] * num_pieces
        machine.copy(source, target, ready)
        with torch.cuda.stream(machine.stream):
            machine.enqueue(lambda target=target: seen.append(list(target)))  # type: ignore[misc]  # mypy knows no default of a lambda
    machine.fake.run()
    assert seen == sources


def test_an_event_is_waited_for_by_first_steps_too(machine: Machine) -> None:
    """Those of a window that comes after the wait, though they need not wait for the window before."""
    ready, target = {"now": True}, [0, 0, 0]
    machine.copy([1, 2, 3], [0, 0, 0], ready)
    ready["now"] = False
    engine: Any = torch.cuda.Stream(GPU)  # type: ignore[no-untyped-call]  # of torch
    machine.fake.run()
    machine.fake.enqueue(engine.queue, lambda: ready.update(now=True))
    machine.staging.wait(engine.record_event())
    machine.copy([4, 5, 6], target, ready)
    machine.fake.run()
    assert target == [4, 5, 6]


@pytest.mark.parametrize(("kind", "num_between"), [("scatter", 0), ("gather", 1)])
def test_what_may_depend_on_other_work_waits_for_it(machine: Machine, kind: str, num_between: int) -> None:
    """A run in the other direction, or after other work of the stream: what is read first may be what that writes."""
    ready, target = {"now": True}, [0, 0]
    first = [0, 0]
    machine.copy([1, 2], first, ready)
    if num_between:
        with torch.cuda.stream(machine.stream):
            machine.enqueue(lambda: first.__setitem__(slice(2), [7, 8]))
        machine.staging.num_operations += num_between
    machine.copy(first, target, ready, kind)
    machine.fake.run()
    assert target == ([7, 8] if num_between else [1, 2])


def test_a_window_begins_while_the_one_before_it_crosses() -> None:
    """Of one direction: its first pieces are gathered into buffers that are free, and the bus never runs dry."""
    with fake_cuda() as fake, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_BYTES", 8)
        machine, order = Machine(fake), list[str]()

        def step(name: str, piece: slice, buffer: Tensor) -> None:
            machine.enqueue(lambda: order.append(f"{name}{piece.start}"))

        machine.warm_up()
        bus_is_free = Marker()
        fake.enqueue(machine.stream.queue, after=bus_is_free)
        with torch.cuda.stream(machine.stream):
            for start in (0, 2):
                pieces = [slice(at, at + 1) for at in (start, start + 1)]
                machine.staging.run("gather", pieces, 1, GPU, partial(step, "in"), partial(step, "out"))
        fake.run()
        assert order == ["in0", "in1", "in2", "in3"]
        bus_is_free.fired = True
        fake.run()
        assert order[4:] == ["out0", "out1", "out2", "out3"]


@pytest.mark.parametrize("seed", range(10))
def test_a_step_that_fails_leaves_nothing_running_behind_the_stream(seed: int) -> None:
    """The error goes to the caller, and the stream still waits for what the other one was given."""
    with fake_cuda(seed=seed) as fake, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_BYTES", 8)
        machine, done, seen = Machine(fake), list[int](), list[list[int]]()

        def first(piece: slice, buffer: Tensor) -> None:
            machine.enqueue(lambda: done.append(piece.start))
            if piece.start == 2:
                raise RuntimeError("the device is lost")

        pieces = [slice(at, at + 1) for at in range(3)]
        with torch.cuda.stream(machine.stream):
            with pytest.raises(RuntimeError, match="the device is lost"):
                machine.staging.run("gather", pieces, 1, GPU, first, lambda *_: None)
            machine.enqueue(lambda: seen.append(list(done)))
        fake.run()
        assert seen == [[0, 1, 2]]


def test_buffers_are_kept_and_grow_for_a_larger_block(machine: Machine) -> None:
    """No window allocates what the ones before it had; one block larger than a buffer gets a larger one."""
    made = list[int]()

    def first(piece: slice, buffer: Tensor) -> None:
        made.append(buffer.data_ptr())

    with torch.cuda.stream(machine.stream):
        for row_words in (1, 1, 5):
            pieces = [slice(at, at + 1) for at in range(4)]
            machine.staging.run("gather", pieces, row_words, GPU, first, lambda *_: None)
    machine.fake.run()
    assert made[:4] == made[4:8]
    assert not set(made[8:]) & set(made[:8])


def test_buffers_serve_outside_of_inference_mode_too(machine: Machine) -> None:
    """Whichever side came first."""
    made = list[Tensor]()
    with torch.inference_mode(), torch.cuda.stream(machine.stream):
        machine.staging.run("gather", [slice(0, 1)], 9, GPU, lambda _, buffer: made.append(buffer), lambda *_: None)
    assert not made[0].is_inference()


def test_pieces_are_bounded_and_leave_nothing_out() -> None:
    """Each fits a staging buffer, unless one block does not; together they are all positions in order."""
    for num_blocks, block_bytes in product((0, 1, 2, 7), (1, 4096, 8192, 100_000)):
        pieces = pieces_of(num_blocks, block_bytes, 8192)
        assert [i for piece in pieces for i in range(piece.start, piece.stop)] == list(range(num_blocks))
        assert all(
            piece.stop - piece.start == 1 or (piece.stop - piece.start) * block_bytes <= 8192 for piece in pieces
        )


def test_no_piece_is_a_remainder() -> None:
    """A window of 25 blocks of 640 KiB, 12 of which fit a buffer, is no 12, 12 and 1: each is worth its DMA."""
    assert [piece.stop - piece.start for piece in pieces_of(25, 640 << 10, 8 << 20)] == [8, 8, 9]


def test_a_buffer_is_given_back() -> None:
    """When nothing is on its way any more: the engine may want the memory. The next copy takes one anew."""
    staging, kept = Staging(None, lambda: None, nullcontext), list[weakref.ref[Any]]()

    def note(_piece: slice, buffer: Tensor) -> None:
        kept.append(weakref.ref(buffer._base))  # noqa: SLF001 - torch's name for what a view is of

    for _ in range(2):
        staging.run("gather", [slice(0, 1)], 1, torch.device("cpu"), note, note)
        assert kept[-1]() is kept[-2]()
        staging.free()
        gc.collect()
        assert not any(buffer() is not None for buffer in kept)
