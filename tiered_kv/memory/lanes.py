"""Streams of one direction, so that a transfer whose event comes late, or never, holds up no other.

What is promised is the order within one transfer. A stream that waits holds up all that is submitted after the wait.
So each transfer that waits for something gets a stream of its own, while there are enough; all others share the main
stream. `LateEvent` stands for the event of a copy that is not enqueued yet.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Final

import torch

from tiered_kv.memory import staging
from tiered_kv.memory.device import After, Copy, Device, Done, Stream, nothing
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.loop_calls import LoopCalls, carried

_NUM_SIDES: Final = 4
"""Streams of transfers that wait, per direction: each costs a thread, and on a GPU staging memory."""
SIDE_BUFFERS, SIDE_BYTES = 2, 4 << 20
"""Staging buffers of each side stream on a GPU: nobody else uses them while it waits, as copies are enqueued ahead."""


class Lanes:
    """The streams that copy in one direction. Any thread may call.

    Attributes:
        main: For what waits for no event.
    """

    def __init__(self, device: Device, name: str) -> None:
        self.device = device
        self.main = device.stream(name)
        self._name = name
        self._sides: list[_Side] = []
        self._lock = threading.Lock()

    def take(self, after: After | None = None) -> "Lane":
        """Return a lane whose copies run after ``after``, if there is one. The caller releases it then.

        While more transfers wait at once than there are streams, some share one: then a late event delays others too.

        Raises:
            ConfigurationError: ``after`` is nothing this device can wait for.
        """
        if after is None:
            return Lane(self.main, None)
        self.device.check(after)
        return Lane(self.main, None) if self.device.has_happened(after) else self.take_own(after)

    def take_own(self, after: After | None = None) -> "Lane":
        """Return a lane for a transfer with more events to come, by `Lane.wait`. The caller releases it."""
        if after is not None:
            self.device.check(after)
        with self._lock:  # whoever takes a side is the last to have waited in it until the next one takes it
            lane = self._side()
            if after is not None:
                lane.wait(after)
            else:
                lane.begin()
        return lane

    def reserve(self, num_bytes: int) -> None:
        """Have all streams, and the GPU's memory that blocks go through, so that nothing is allocated while serving.

        64 MiB, unless ``num_bytes``, which cannot be cut to go through, are more than 4 MiB. On a CPU there is none.

        Raises:
            ConfigurationError: The GPU does not have it.
        """
        if self.device.torch_device.type == "cpu":
            return
        with self._lock:
            while len(self._sides) < _NUM_SIDES:
                self._add_side()
        self.main.reserve(staging.NUM_BUFFERS, max(num_bytes, staging.PIECE_BYTES))
        for side in self._sides:
            side.stream.reserve(SIDE_BUFFERS, max(num_bytes, SIDE_BYTES))

    def close(self) -> None:
        """Take no more; what is queued is still done. Does not wait: `Device.close`."""
        for stream in (self.main, *(side.stream for side in self._sides)):
            stream.close()

    def _side(self) -> "Lane":
        # One that nobody uses may wait still: for the event of a transfer that had nothing to copy, or was given up.
        side = next((each for each in self._sides if not each.num_users and not self._is_held(each)), None)
        if side is None and len(self._sides) < _NUM_SIDES:
            side = self._add_side()
        # Else share one: of those whose event has come, the least used.
        side = side or min(self._sides, key=lambda each: (self._is_held(each), each.num_users))
        return Lane(side.stream, side)

    def _add_side(self) -> "_Side":
        self._sides.append(_Side(self.device.stream(f"{self._name}-{len(self._sides) + 1}")))
        return self._sides[-1]

    def _is_held(self, side: "_Side") -> bool:
        """Say whether it still waits."""
        return side.after is not None and not self.device.has_happened(side.after)


class _Side:
    """A stream beside the main one. Its users are lanes not yet released and copies not yet ended, late ones too."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.num_users = 0
        self.after: After = None
        self.error: BaseException | None = None
        """What an event of one of several users failed with; none of them may copy then."""
        self._lock = threading.Lock()  # copies end in some other thread

    def count(self, n: int) -> None:
        """Count users on, or off."""
        with self._lock:
            self.num_users += n
            if not self.num_users:
                self.error = None

    def passed(self, error: BaseException | None) -> None:
        """Note with what the stream has come past its waits so far; counts a user off."""
        self.error = self.error or error
        self.count(-1)


class Lane:
    """The order of one transfer's copies: each runs after every event that was waited for here before it."""

    def __init__(self, stream: Stream, side: _Side | None) -> None:
        """Made by `Lanes` only."""
        self.stream = stream
        self._side = side
        self._has_waited = False  # since its last copy
        self._is_released = False
        self._count(1)

    def begin(self) -> None:
        """Have what is submitted later be none the worse for an event of a transfer before it that has failed."""
        if self._side is None or self._side.num_users == 1:  # else that one goes on
            self.stream.forgive()

    def wait(self, after: After) -> None:
        """Have everything submitted later wait for ``after``; on a lane of `take` or `take_own` that is a side one."""
        side = self._side
        if side is not None and (side.num_users > 1 or self._has_waited):
            # Another's event may have failed, or the last one of this lane, and this wait would make the stream forget
            # it before their copies.
            side.count(1)
            self.stream.submit(nothing, side.passed)
        self.stream.wait(after)
        self._has_waited = True
        if side is not None:
            side.after = after

    def submit(self, copy: Copy, done: Done) -> After:
        """Have the stream copy after what was submitted before, and call ``done``, unless an event has failed."""

        def ended(error: BaseException | None) -> None:
            self._count(-1)
            done(error)

        def checked() -> None:
            if self._side is not None and self._side.error is not None:
                raise self._side.error
            copy()

        self._count(1)
        self._has_waited = False
        try:
            return self.stream.submit(checked, ended)
        except BaseException:
            self._count(-1)
            raise

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way; a lane with events of its own is not idle."""
        return self._side is None and self.stream.is_idle

    @property
    def has_events(self) -> bool:
        """Whether the lane has events of its own to wait for, which may have come by now."""
        return self._side is not None

    def part(self) -> "Lane":
        """Return a lane of the same order for a part of the transfer, to be released by itself."""
        return Lane(self.stream, self._side)

    def release(self) -> None:
        """Submit nothing more; what has been submitted goes on. Again does nothing."""
        if not self._is_released:
            self._is_released = True
            self._count(-1)

    def _count(self, n: int) -> None:
        if self._side is not None:
            self._side.count(n)


class RevokedError(Exception):
    """What a copy that came too late reports: it has touched nothing."""


class LaneCopy:
    """One copy in a stream's queue. Until it begins it can be revoked, and then never touches memory.

    Attributes:
        ended: Resolves once the copy touches no memory any more, with what it raised. Never cancel it.
        event: For streams that are to wait for the copy, from its submission on; None on a device that has failed.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.event: After = None
        self._work: Callable[[], None] | None = work
        self._lock = threading.Lock()

    def __call__(self) -> None:
        """Make the copy; called by the stream, in any thread."""
        with self._lock:  # from here on a revocation is too late
            work, self._work = self._work, None
        if work is None:
            raise RevokedError
        work()

    @property
    def is_late(self) -> bool:
        """Whether another stream that is to wait for it would block: until it is enqueued."""
        return isinstance(self.event, LateEvent) and not self.event.is_recorded

    @property
    def has_begun(self) -> bool:
        """Whether a revocation would be too late, or was not."""
        return self._work is None

    def revoke(self) -> None:
        """Keep the copy from beginning, if it has not begun; called on the loop."""
        with self._lock:
            revoked, self._work = self._work is not None, None
        if revoked:
            self.resolve(RevokedError())

    def resolve(self, error: BaseException | None) -> None:
        """Say how it ended; what a revoked copy says when its turn comes is passed over."""
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(carried(error, "a copy"))


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


def submit_copy(lane: Lane, work: Callable[[], None], loop_calls: LoopCalls) -> LaneCopy:
    """Submit a copy, after what was submitted to the lane before. On the event loop."""
    copy = LaneCopy(work)
    done = copy.resolve if lane.stream.is_on_loop else lambda error: loop_calls.call(copy.resolve, error)
    try:
        copy.event = lane.submit(copy, done)
    except Exception as error:  # noqa: BLE001 - one that cannot be submitted has failed as any other that fails
        copy.resolve(error)
    return copy


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
