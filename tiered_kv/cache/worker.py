"""A worker's side of plans: it moves bytes between its engine's tensors and the planner's host memory, and no more.

It decides nothing, opens no tier and needs no event loop: a plan says which blocks go where, and the planner holds the
slots until the worker has answered or has ended.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, Self

import torch
from torch import Tensor

from tiered_kv.memory.caches import PagedCaches
from tiered_kv.memory.codec import Codec, make_codec
from tiered_kv.memory.copies import gather_blocks, scatter_blocks
from tiered_kv.memory.crossover import prepare
from tiered_kv.memory.device import Device, Stream
from tiered_kv.memory.gpu import DeviceLike, make_device
from tiered_kv.memory.host import HostSlab
from tiered_kv.memory.lanes import Lanes, wait_in
from tiered_kv.system import system
from tiered_kv.values.errors import ClosedError, ConfigurationError, LayoutMismatchError, in_words
from tiered_kv.values.integers import Ids, as_int
from tiered_kv.values.layout import KVCaches, KVLayout
from tiered_kv.values.plan import Move, Outcomes, Plan, SlabHandle

_WINDOW_BYTES: Final = 16 << 20
"""Submitted as one copy, as the cache itself moves it."""
_REMEMBERED: Final = 4096
"""Jobs of which a second delivery is noticed."""


class Worker:
    """One rank of an engine whose scheduler plans in another process. Any thread may call; ``with`` closes it."""

    def __init__(
        self,
        slabs: Sequence[SlabHandle],
        *,
        layout: KVLayout,
        rank: int = 0,
        device: DeviceLike | None = None,
    ) -> None:
        """Attach the planner's host memory.

        Args:
            slabs: What `Planner.slabs` returns there. Those of other ranks are passed over.
            layout: As the planner has it.
            rank: Of this worker.
            device: Where the engine's tensors are; the GPU if torch has one, else the CPU. A `Device` stays the
                caller's, who closes it before this.

        Raises:
            ConfigurationError: The planner is gone, has closed its cache, or is another user's; or an argument is no
                such thing.
            LayoutMismatchError: It has slabs of another layout.
            BackendUnavailableError: The server whose slabs they are is gone.
        """
        if not isinstance(layout, KVLayout):
            raise ConfigurationError(f"a worker needs the planner's layout, a KVLayout, got {type(layout).__name__}")
        self.rank = as_int("rank", rank)
        self._layout = layout
        self._caches: dict[int, PagedCaches] = {}
        self._slabs: dict[str, _Slab] = {}
        self._lock = system().lock()  # lanes are for one thread at a time
        self._executed: dict[int, None] = {}  # the latest jobs
        self._is_closed = False
        self._device = device if isinstance(device, Device) else make_device(device)
        self._owns_device = self._device is not device
        self._lanes = {"load": Lanes(self._device, "h2d"), "store": Lanes(self._device, "d2h")}
        self._codecs: dict[int, Codec | None] = {}
        try:
            handles = self._ours(slabs)
            self._codecs = {each.group: make_codec(each.codec, layout.groups[each.group]) for each in handles}
            self._slabs = self._attached(handles)
        except BaseException:
            self.close()
            raise

    def attach(self, slabs: Sequence[SlabHandle]) -> None:
        """Take other host memory in the place of what was attached, as `Planner.slabs` says: a server has restarted.

        None of it, ``()``, lets go of what there is. Either way copies under way go on to their ends. Tensors stay.

        Raises:
            ConfigurationError, LayoutMismatchError, BackendUnavailableError: As when a worker is made. What was
                attached is not any more.
            ClosedError: The worker is closed.
        """
        self._check_open()
        self._let_go()
        if slabs or not isinstance(slabs, Sequence):
            self._slabs = self._attached(self._ours(slabs))

    def _ours(self, slabs: Sequence[SlabHandle]) -> list[SlabHandle]:
        if not isinstance(slabs, Sequence) or not all(isinstance(handle, SlabHandle) for handle in slabs):
            raise ConfigurationError(f"a worker attaches what planner.slabs() returns, got {slabs!r:.80}")
        ours = [handle for handle in slabs if handle.rank == self.rank]
        if len(ours) != len(self._layout.groups):
            ranks = sorted({handle.rank for handle in slabs})
            raise ConfigurationError(
                f"rank {self.rank} needs host memory for {len(self._layout.groups)} KV groups, the planner has "
                f"{len(ours)} slabs for it, and ranks {ranks}"
            )
        return ours

    def _attached(self, handles: Sequence[SlabHandle]) -> "dict[str, _Slab]":
        attached: dict[str, _Slab] = {}
        try:
            for handle in handles:
                self._check_layout(handle)
                attached[handle.pool] = _Slab(handle, self._device)
        except BaseException:
            for slab in attached.values():
                slab.leave()
            raise
        return attached

    def _let_go(self) -> None:
        slabs, self._slabs = self._slabs, {}
        for slab in slabs.values():
            slab.leave()

    def register_kv_caches(self, kv_caches: KVCaches, *, group: int = 0, axes: str | None = None) -> None:
        """Bind this rank's paged tensors of one KV group, as for `TieredKV.register_kv_caches`.

        Raises:
            LayoutMismatchError: They are not what the layout says.
            ConfigurationError: There is no such group, or the GPU has not 128 MiB left for copies.
            ClosedError: The worker is closed.
        """
        self._check_open()
        group = self._group(group)
        caches = PagedCaches.bind(
            kv_caches, self._layout.groups[group], axes=axes, device=self._device, codec=self._codecs[group]
        )
        for lanes in self._lanes.values():
            lanes.reserve(caches.staged_bytes)
        prepare(caches, self._device)
        self._caches[group] = caches

    def unregister_kv_caches(self, *, group: int = 0) -> None:
        """Let go of the tensors of one KV group, as `TieredKV.unregister_kv_caches` does. Idempotent.

        Raises:
            ConfigurationError: There is no such group.
        """
        self._caches.pop(self._group(group), None)

    def execute(self, plan: Plan, *, after: object = None) -> Outcomes:
        """Move this rank's part of a plan, and wait until nothing touches the engine's blocks any more."""
        return self.start(plan, after=after).result()

    def start(self, plan: Plan, *, after: object = None, ahead_of: object = None) -> "Future[Outcomes]":
        """Start to move this rank's part of a plan; the future never raises for the copy.

        Args:
            plan: Of the planner whose slabs these are. Until the future is done its blocks belong to the transfer; it
                cannot be cancelled.
            after: An event after the blocks' last use, or their computation; the wait is enqueued before this returns.
                None on a GPU is all that the calling thread's current stream was given by now.
            ahead_of: A stream of the engine's that waits for the copies from now on, as what it is given next needs the
                blocks. None on a CPU, which has none: wait for the future.

        Raises:
            ConfigurationError: No plan, blocks or slots that this rank does not have, no tensors, a plan that was
                executed before, or one for another process, in whose place this was started; or ``ahead_of`` is no
                stream that can wait for this device. Nothing has moved.
            ClosedError: The worker is closed. Likewise.
        """
        if not isinstance(plan, Plan):
            raise ConfigurationError(f"a worker executes a Plan, as job.plan is once it is decided, got {plan!r:.80}")
        self._check_open()
        ended: Future[Outcomes] = Future()
        self._check_stream(ahead_of)
        ended.set_running_or_notify_cancel()  # from here on it cannot be cancelled: a copy goes on, whoever waits
        move = next((move for move in plan.moves if move.rank == self.rank), None)
        if move is None or not len(move.host):
            ended.set_result(Outcomes(plan.job, self.rank, 0))
            return ended
        if move.pid != (pid := system().getpid()):
            raise ConfigurationError(
                f"job {plan.job} is for process {move.pid}, this is {pid}: its slots may be another's by now"
            )
        engine = move.engine
        if engine is None:
            raise ConfigurationError(f"job {plan.job} has no blocks of the engine yet: job.bind() says which")
        caches, slab = self._caches.get(engine.group), self._slabs.get(move.host.pool)
        if caches is None:
            raise ConfigurationError("register_kv_caches() comes before a plan is executed: there are no tensors yet")
        caches.check_ids(engine.ids)
        self._check_new(plan.job)
        if slab is None or not slab.copy_begins():  # another thread may have let go of it just now
            self._executed.pop(plan.job, None)
            raise ConfigurationError(f"{move.host.pool!r} is none of the slabs attached: {', '.join(self._slabs)}")

        try:
            copied = self._move(plan, move, engine.ids, caches, slab, after, ended)
        except Exception:
            slab.copy_ended()
            self._executed.pop(plan.job, None)  # nothing moves: it may be started again
            raise
        if ahead_of is not None and copied is not None:  # else the device has failed, and the future will say so
            wait_in(ahead_of, copied)
        return ended

    def _move(
        self,
        plan: Plan,
        move: Move,
        page_ids: Ids,
        caches: PagedCaches,
        slab: "_Slab",
        after: object,
        ended: "Future[Outcomes]",
    ) -> object:
        """Submit the copies, a window each: as one they could be more than a stream's queue holds.

        Returns the event of the last one.
        """
        rows, slots, pages = slab.rows, move.host.ids, caches.pages_per_block
        each = max(1, _WINDOW_BYTES // (rows.shape[1] * 8))
        starts = range(0, len(slots), each)

        def copy(start: int) -> None:
            part, their_pages = slots[start : start + each], page_ids[start * pages : (start + each) * pages]
            if plan.direction == "load":
                scatter_blocks(rows, part, caches, their_pages)
            else:
                gather_blocks(caches, their_pages, rows, part)

        started = system().monotonic()

        def done(num_moved: int, error: BaseException | None) -> None:
            slab.copy_ended()
            said = in_words(error) if error else ""
            ended.set_result(Outcomes(plan.job, self.rank, num_moved, said, system().monotonic() - started))

        windows, num_submitted = _Windows(len(starts), done), 0
        copied: object = None
        try:
            with self._lock:
                lane = self._lanes[plan.direction].take(self._device.to_wait_for(after))
                try:
                    for start in starts:
                        copied = lane.submit(
                            partial(copy, start), partial(windows.ended, len(slots[start : start + each]))
                        )
                        num_submitted += 1
                finally:
                    lane.release()
        except Exception as error:
            if not num_submitted:
                raise
            windows.left_out(len(starts) - num_submitted, error)
        return copied

    def _check_stream(self, stream: object) -> None:
        kinds = (Stream,) if self._device.torch_device.type == "cpu" else (Stream, torch.Stream, torch.cuda.Stream)
        if stream is not None and not isinstance(stream, kinds):
            raise ConfigurationError(
                f"ahead_of={stream!r:.100} is no stream that can wait for a copy on {self._device.torch_device}"
            )

    def _check_new(self, job: int) -> None:
        with self._lock:
            if job in self._executed:
                raise ConfigurationError(f"job {job} has been executed: its slots may be another's by now")
            self._executed[job] = None
            while len(self._executed) > _REMEMBERED:
                self._executed.pop(next(iter(self._executed)))

    def close(self) -> None:
        """End: what has been started ends first. Idempotent."""
        self._is_closed = True
        if self._owns_device:
            self._device.close()
        else:
            for lanes in self._lanes.values():
                lanes.close()
        self._let_go()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this Worker is closed")

    def _group(self, group: int) -> int:
        if (number := as_int("a KV group's number", group)) >= len(self._layout.groups):
            raise ConfigurationError(f"KV group {number} of {len(self._layout.groups)}: the layout has no such group")
        return number

    def _check_layout(self, handle: SlabHandle) -> None:
        codec = self._codecs[handle.group]
        stored_bytes = codec.stored_bytes if codec else self._layout.groups[handle.group].payload_bytes
        if stored_bytes != handle.payload_bytes:
            raise LayoutMismatchError(
                f"a block of KV group {handle.group} has {stored_bytes} bytes here, {handle.payload_bytes} where the "
                "plans are made"
            )
        if (ours := self._layout.groups[handle.group]) != handle.layout:  # of as many bytes, in another order
            raise LayoutMismatchError(
                f"a block of KV group {handle.group} is {ours} here, {handle.layout} where the plans are made"
            )

    def __repr__(self) -> str:
        return (
            f"Worker(rank {self.rank} on {self._device.torch_device}, {', '.join(self._slabs) or 'nothing attached'})"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Windows:
    """The copies of one plan, which end in their order; the last one to end tells how far all have come."""

    def __init__(self, num_windows: int, done: Callable[[int, BaseException | None], None]) -> None:
        self._num_left = num_windows
        self._num_moved = 0
        self._error: BaseException | None = None
        self._reason: BaseException | None = None
        self._done = done
        self._lock = system().lock()

    def ended(self, num_blocks: int, error: BaseException | None) -> None:
        """Take note that the next window has ended."""
        with self._lock:
            self._error = self._error or error
            self._num_moved += 0 if self._error else num_blocks
        self._count(1)

    def left_out(self, num_windows: int, error: BaseException) -> None:
        """Take note of the last windows, which could not be submitted; those before them go on."""
        self._reason = error
        self._count(num_windows)

    def _count(self, num_windows: int) -> None:
        with self._lock:
            self._num_left -= num_windows
            is_last = not self._num_left
        if is_last:
            self._done(self._num_moved, self._error or self._reason)


class _Slab:
    """A planner's slab, kept while it is attached or a copy of ours touches it. Any thread may call."""

    def __init__(self, handle: SlabHandle, device: Device) -> None:
        fd, is_read_only = handle.descriptor(page_locks=device.kind != "cpu")
        try:
            sizes = handle.num_slots, handle.stride_bytes, handle.payload_bytes
            self._slab = HostSlab(*sizes, name=handle.pool, fd=fd, is_read_only=is_read_only)
        finally:
            os.close(fd)
        self._device = device
        self._locking = device.page_lock(self._slab)
        self._lock = system().lock()
        self._num_users = 1

    @property
    def rows(self) -> Tensor:
        """The slab's memory, ``(num_slots, stride_bytes // 8)`` int64; valid while a copy keeps it."""
        return self._slab.rows

    def copy_begins(self) -> bool:
        """Keep the slab until `copy_ended`; say whether it was still there to be kept."""
        with self._lock:
            self._num_users += bool(self._num_users)
            return bool(self._num_users)

    def copy_ended(self) -> None:
        """Let go of the slab once nobody uses it."""
        with self._lock:
            self._num_users -= 1
            is_left = not self._num_users
        if not is_left:
            return
        self._slab.close()
        if self._device.kind == "cpu":
            self._device.page_unlock(self._locking)
        else:  # it waits for the piece that is being page-locked, and whoever ends a copy must not
            threading.Thread(target=self._device.page_unlock, args=(self._locking,), daemon=True).start()

    leave = copy_ended
    """It is attached no more."""
