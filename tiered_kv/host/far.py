"""The memory of an engine in another process, as the transfers of this one see it: copies are asked for, not made.

A transfer runs here as any other: it finds blocks, leases or reserves slots, and submits copies to a stream. This
stream sends each as a message and holds its end back until the client has answered, or is gone. So whatever a client
does, a slot that it may be reading or writing is nobody else's.
"""

from collections.abc import Callable
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tiered_kv.errors import ConfigurationError
from tiered_kv.host import messages, wire
from tiered_kv.host.fields import Part
from tiered_kv.memory.device import After, Copy, Done, Stream
from tiered_kv.memory.lanes import RevokedError
from tiered_kv.tiers.chain import Chain
from tiered_kv.transfers.bindings import EngineMemory

Ids = NDArray[np.int64]
REVOKED = "revoked"
"""What a client answers that has not begun a copy."""


class ClientGoneError(Exception):
    """What a copy reports whose client has ended: nothing of it can be trusted."""


class FarCopyError(Exception):
    """What a copy reports that went wrong in the client."""


class FarMemory(EngineMemory, Stream):
    """The engine's side of one transfer. Its pages are positions: the client knows which block is for which key."""

    gpu = None
    direct = None
    is_on_loop = True

    def __init__(self, number: int, num_blocks: int, chain: Chain, send: Callable[[wire.Message], None]) -> None:
        """Ask with ``send`` for the copies of one transfer of so many blocks, to and from host slots of ``chain``."""
        self.name = f"client-{number}"
        self.num_bytes = num_blocks * chain.group.payload_bytes
        self._id = number
        self._pool = chain.host.slab.name
        self._send = send
        self._loop_calls = chain.loop_calls
        self._parts: list[Part] = []
        self._dones: dict[int, Done] = {}
        self._num_asked = 0
        self._unsaid: list[messages.Copy] | None = []  # until `begin`
        self._is_lost = False

    # For transfers.

    @property
    def error(self) -> None:
        """What befalls the client's device, the client says copy by copy."""

    def check(self, after: After) -> NoReturn:
        """Events are the client's, and waited for there."""
        raise ConfigurationError(f"{after!r:.80} is of another process")

    def wait(self, after: After) -> NoReturn:
        """Events are the client's, and waited for there."""
        self.check(after)

    def gather(self, pages: Ids, rows: Tensor, slots: Ids, *, layers: slice | None = None) -> None:
        """Have the client copy blocks out of its pages."""
        self._ask(slots, pages, layers)

    def scatter(self, rows: Tensor, slots: Ids, pages: Ids, *, layers: slice | None = None) -> None:
        """Have the client copy blocks into its pages."""
        self._ask(slots, pages, layers)

    def submit(self, copy: Copy, done: Done) -> After:
        """Send what ``copy`` asks for; ``done`` comes with the client's answer, or its end."""
        self._parts = []
        copy()
        if self._is_lost:
            self._loop_calls.call(done, ClientGoneError())
        elif not self._parts:
            self._loop_calls.call(done, None)
        else:
            number, self._num_asked = self._num_asked, self._num_asked + 1
            self._dones[number] = done
            self._say(messages.Copy(self._id, number, tuple(self._parts), {}))
        return None

    def close(self) -> None:
        """Nothing serves it here."""

    def join(self, timeout_s: float | None = None) -> bool:
        """Nothing serves it here."""
        return True

    # For the session.

    def begin(self, by_tier: dict[str, int]) -> None:
        """Send what was asked for when the transfer began, with how it ends if that is known already."""
        unsaid, self._unsaid = self._unsaid or [], None
        for each in unsaid:
            self._send(messages.Copy(each.id, each.number, each.parts, by_tier))

    @property
    def num_copying(self) -> int:
        """Copies that the client has not answered."""
        return len(self._dones)

    def answered(self, number: int, error: str) -> None:
        """Take the client's answer; one that nobody waits for is passed over."""
        if (done := self._dones.pop(number, None)) is not None:
            done(None if not error else RevokedError() if error == REVOKED else FarCopyError(error))

    def lose(self) -> None:
        """The client is gone, and touches no memory any more."""
        self._is_lost = True
        while self._dones:
            _, done = self._dones.popitem()
            done(ClientGoneError())

    def _say(self, copy: messages.Copy) -> None:
        if self._unsaid is None:
            self._send(copy)
        else:
            self._unsaid.append(copy)

    def _ask(self, slots: Ids, positions: Ids, layers: slice | None) -> None:
        part = None if layers is None else (layers.start, layers.stop)
        self._parts.append(Part(self._pool, wire.as_bytes(slots), wire.as_bytes(positions), part))
