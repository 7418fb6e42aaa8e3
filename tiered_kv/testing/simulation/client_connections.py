"""A simulated client's end of its connections to a server, and what its planner asks of them, in memory."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tiered_kv.testing.scripted import ScriptedDevice
from tiered_kv.testing.simulation.world import World
from tiered_kv.values.plan import SlabHandle

if TYPE_CHECKING:
    from tiered_kv.testing.simulation.clients import ServerStream

PATIENCE_S: Final = 1.0
"""How long a server may say nothing."""


class ClientSocket:
    """A client's end of a stream: what the server sends comes in pieces, as long as it is not held up.

    Attributes:
        stream: The server's end.
        is_held: Whether what was sent does not come yet.
        is_mute: Whether what is sent from here does not come there yet.
        is_closed: Whether the client has closed it.
    """

    stream: "ServerStream"

    def __init__(self, world: World) -> None:
        self.is_held = self.is_mute = self.is_closed = False
        self._world = world
        self._came, self._unsent = bytearray(), bytearray()
        self._has_ended = False

    # What comes from the server's end, in its process.

    def put(self, data: bytes | None) -> None:
        """Take what was sent; None: nothing more comes."""
        if data is None:
            self._has_ended = True
        else:
            self._came += data
        self._world.turns.pause()

    def get(self) -> bytes | None:
        """Nobody waits here."""
        raise NotImplementedError

    # As a socket that does not block.

    @property
    def is_readable(self) -> bool:
        """Whether something has come, or the end."""
        return not self.is_held and (bool(self._came) or self._has_ended)

    def settimeout(self, seconds: float) -> None:
        """It never blocks."""

    def fileno(self) -> int:
        """Return a number that no descriptor has."""
        return -1

    def recv(self, size: int) -> bytes:
        """Take some of what has come."""
        if not self.is_readable:
            raise BlockingIOError
        most = min(size, len(self._came))
        part = bytes(self._came[: most - self._world.tape.draw("turns", most, 0.3)] if most else b"")
        del self._came[: len(part)]
        return part

    def send(self, data: bytearray) -> int:
        """Send all of it."""
        self._unsent += data
        if not self.is_mute:
            unsent, self._unsent = bytes(self._unsent), bytearray()
            self.stream.deliver(unsent)
        return len(data)

    def close(self) -> None:
        """End both ways."""
        self.is_closed = True
        if not self.is_mute:
            self.stream.cut()

    # What befalls it.

    def hold(self, *, is_mute: bool) -> None:
        """Have nothing come from the server for now; nor go there, if it hangs."""
        self.is_held, self.is_mute = True, is_mute

    def let_go(self) -> None:
        """Have all of it come, and go."""
        self.is_held, self.is_mute = False, False
        self.send(bytearray())
        if self.is_closed:
            self.stream.cut()


@dataclass(frozen=True)
class GivenSlab(SlabHandle):
    """A slab of the server's, as a worker gets it from the socket."""

    fd: int

    def descriptor(self, *, page_locks: bool = True) -> tuple[int, bool]:
        """See `SlabHandle.descriptor`."""
        return os.dup(self.fd), False


class NoGPU(ScriptedDevice):
    """The client's process copies nothing itself."""

    kind = "cpu"
