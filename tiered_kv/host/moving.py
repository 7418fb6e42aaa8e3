"""A client's loads and stores: the server says which slots, and this process copies, on its own device's streams.

The engine's memory is touched by copies of this process alone. So a transfer ends here, whatever the server does: what
has not begun is revoked, what has begun is waited for, and what the server asks for later is refused.
"""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tiered_kv.errors import TieredKVError
from tiered_kv.host import messages, questions, wire
from tiered_kv.host.attachment import Attachment
from tiered_kv.host.fields import Part
from tiered_kv.keys import BlockKeys
from tiered_kv.loop_calls import LoopCalls
from tiered_kv.memory.device import attempt
from tiered_kv.memory.lanes import Lane, LaneCopy, RevokedError, submit_copy
from tiered_kv.transfers.bindings import Binding
from tiered_kv.transfers.handles import LAST_COPIES_S

R = TypeVar("R")
Ids = NDArray[np.int64]
_GRACE_S: Final = 0.25
"""What a server may take to say how a transfer ended whose time is up."""
_COPIED_AT_ONCE_BYTES: Final = 256 << 10
"""Some 40 us of copying, which is what a thread needs to be woken and to wake the loop."""


class Moving(Generic[R]):
    """One transfer of this client. Its copies are asked for by the server."""

    def __init__(
        self, keys: BlockKeys, binding: Binding, pages: Ids, lane: Lane, deadline: float, loop_calls: LoopCalls
    ) -> None:
        """Prepare one, on the event loop.

        Args:
            keys: What to move.
            binding: The engine's memory.
            pages: ``(n, pages_per_block)`` page ids in it.
            lane: Behind the pages' last use, or their computation; released when the transfer has ended.
            deadline: On the loop's clock.
            loop_calls: Of the loop.
        """
        self.ended: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self.num_layers = binding.caches.group.num_layers
        self.thread = threading.get_ident()
        self._keys = keys
        self._binding = binding
        self._pages = pages
        self._lane = lane
        self._loop_calls = loop_calls
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._deadline = max(deadline, self._started + LAST_COPIES_S)
        self._copies: list[LaneCopy] = []
        self._copying: set[LaneCopy] = set()
        self._in_place = np.zeros(len(keys), np.bool_)
        self._why = ""  # it is over here, whatever the server says
        self._there: Attachment | None = None
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._error = ""

    def start(self, there: Attachment | None, ask: Callable[[int], wire.Message]) -> None:
        """Ask a server for it; if there is none, it ends."""
        if there is None or not there.is_open or there.is_silent:
            self._stop("server away")
            return
        self._there, self._number = there, there.number()
        there.transfers[self._number] = self
        self._timer = self._loop.call_at(self._deadline, self._time_is_up)
        try:
            there.send(ask(self._number))
        except TieredKVError:
            self._stop("too many keys")

    def refuse(self, why: str) -> None:
        """End it before it has begun."""
        self._stop(why)

    def revoke(self) -> None:
        """Stop as soon as possible; on the event loop."""
        if not self._why and not self.ended.done():
            if self._there is not None:
                self._there.send(messages.Cancel(self._number))
            self._stop("revoked")

    def lose(self) -> None:
        """See `Transferring.lose`: what is being copied still comes to its end."""
        self._stop("server away", revoke=False)

    def take(self, reply: messages.Reply) -> None:
        """See `Transferring.take`."""
        match reply:
            case messages.Copy():
                self._copy(reply)
            case questions.Failed(why=why):
                self._stop(why)
            case _:
                self._take_other(reply)

    # Copies.

    def _copy(self, asked: messages.Copy) -> None:
        there = self._there
        assert there is not None  # noqa: S101 - it was started
        if self._why:
            there.send(messages.Copied(asked.id, asked.number, "revoked"))
            return
        work = partial(self._move, there, asked.parts)
        num_bytes = sum(len(part.slots) for part in asked.parts) // 8 * self._binding.caches.payload_bytes
        if num_bytes <= _COPIED_AT_ONCE_BYTES and self._binding.caches.codec is None and self._lane.is_idle:
            self._say_copied(asked, attempt(work))
            return
        there.copy_begins()
        copy = submit_copy(self._lane, work, self._loop_calls)
        self._copies.append(copy)
        self._copying.add(copy)
        copy.ended.add_done_callback(lambda ended: self._copied(asked, copy, ended.exception()))

    def _move(self, there: Attachment, parts: tuple[Part, ...]) -> None:
        for part in parts:
            rows, slots, positions = there.slabs[part.pool].rows, wire.as_ids(part.slots), wire.as_ids(part.positions)
            layers = None if part.layers is None else slice(*part.layers)
            self._move_part(rows, slots, self._pages[positions].ravel(), layers)

    def _move_part(self, rows: Any, slots: Ids, pages: Ids, layers: slice | None) -> None:  # noqa: ANN401 - a Tensor
        raise NotImplementedError

    def _copied(self, asked: messages.Copy, copy: LaneCopy, error: BaseException | None) -> None:
        self._copying.discard(copy)
        self._say_copied(asked, error)
        if self._there is not None:
            self._there.copy_ended()
        if self._why:
            self._end_if_still()

    def _say_copied(self, asked: messages.Copy, error: BaseException | None) -> None:
        """Answer; on a GPU the copy has ended by now, not only been enqueued."""
        said = ""
        if error is None:
            for part in asked.parts:
                if part.layers is None:
                    self._in_place[wire.as_ids(part.positions)] = True
                else:
                    self._layer_copied(part.layers[0], wire.as_ids(part.positions))
        else:
            said = "revoked" if isinstance(error, RevokedError) else f"{type(error).__name__}: {error}"
            self._error = self._error or said
        if self._there is not None:
            self._there.send(messages.Copied(asked.id, asked.number, said))

    def _layer_copied(self, layer: int, positions: Ids) -> None:
        """Count one layer of blocks."""

    # Ends.

    def _time_is_up(self) -> None:
        self._revoke_copies()
        self._timer = self._loop.call_later(_GRACE_S, self._stop, "deadline")

    def _revoke_copies(self) -> None:
        for copy in list(self._copying):
            copy.revoke()

    def _stop(self, why: str, *, revoke: bool = True) -> None:
        """End without the server's word."""
        if self._why or self.ended.done():
            return
        self._why = why
        if why == "deadline" and self._there is not None:
            self._there.send(messages.Cancel(self._number))
        if revoke:
            self._revoke_copies()
        self._end_if_still()

    def _end_if_still(self) -> None:
        if not self._copying:
            self._finish(self._result_here())

    def _finish(self, result: R) -> None:
        if self.ended.done():
            return
        if self._timer is not None:
            self._timer.cancel()
        if self._there is not None:
            self._forget(self._there)
        self._lane.release()
        self.ended.set_result(result)

    def _forget(self, there: Attachment) -> None:
        there.transfers.pop(self._number, None)

    def _take_other(self, reply: messages.Reply) -> None:
        raise NotImplementedError

    def _result_here(self) -> R:
        """Say what came of it, as far as is known here."""
        raise NotImplementedError

    @property
    def _seconds(self) -> float:
        return self._loop.time() - self._started
