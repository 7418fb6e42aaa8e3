"""What changes in a server's tiers, for a subscriber in a client: a stream that begins again with each server.

While no server is there nothing is in its tiers, which a subscriber is told. What it has not taken is bounded: a server
sends as much as there is room for, and queues; where that is too much it begins again with snapshots.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final
from weakref import WeakSet, finalize, ref

import numpy as np
from typing_extensions import override

from tiered_kv.host.attachment import Attachment
from tiered_kv.host.connection import Connection
from tiered_kv.host.protocol import AHEAD, Cancel, Changed, Failed, Follow, Reply, Taken
from tiered_kv.tiers.changes import Added, Changes, Cleared, Removed, Snapshot, TierChange
from tiered_kv.values.keys import Names
from tiered_kv.values.log import log

_TAKEN_TOGETHER: Final = AHEAD // 4
"""Messages that the server is told of at once."""

Place = tuple[str, int, int]


class FarChanges(Changes):
    """The changes in a server's tiers, for one subscriber in a client."""

    def __init__(self, places: tuple[Place, ...]) -> None:
        """Made by `FarSubscribers` only."""
        self.num_overflows = 0
        self._places = places
        self._queue: deque[Changed | Place] = deque()  # a place: nothing is there any more
        self._begun: list[bytes] = []  # of a change that has come in part
        self._sequence = 0
        self._num_taken = 0
        self._has_ended = False
        self._woken = asyncio.Event()
        self._overflows_before = 0
        self.stream = _Stream(self)

    @property
    @override
    def places(self) -> tuple[Place, ...]:
        return self._places

    @override
    async def __anext__(self) -> TierChange:
        while not self._has_ended:
            while self._queue and not self._has_ended:
                if (change := self._take(self._queue.popleft())) is not None:
                    self._sequence += 1
                    return change
            self._woken.clear()
            await self._woken.wait()
        raise StopAsyncIteration

    # For `FarSubscribers`.

    def put(self, message: Changed) -> None:
        """Queue what the server says."""
        self._queue.append(message)
        self._woken.set()

    def start_over(self, places: Sequence[Place]) -> None:
        """Another stream begins, with snapshots of these places; in others nothing is any more."""
        self._queue.clear()
        self._queue.extend(place for place in self._places if place not in places)
        self._begun.clear()
        self._num_taken = 0
        self._overflows_before = self.num_overflows
        self._woken.set()

    def end(self) -> None:
        """Give nothing more."""
        self._has_ended = True
        self._woken.set()

    def _take(self, said: Changed | Place) -> TierChange | None:
        """Make a change of what was said; None of a part, or of a tier that came with another server."""
        if not isinstance(said, Changed):
            return Cleared(self._sequence, *said)
        self._num_taken += 1
        if self._num_taken >= _TAKEN_TOGETHER:
            self.stream.say_taken(self._num_taken)
            self._num_taken = 0
        self._begun.append(said.names)
        if not said.is_last:
            return None
        names = np.frombuffer(b"".join(self._begun), np.uint64).reshape(-1, 4)
        self._begun.clear()
        self.num_overflows = self._overflows_before + said.num_overflows
        place = said.tier, said.group, said.rank
        return _change(self._sequence, place, said, names) if place in self._places else None


def _change(sequence: int, place: Place, said: Changed, names: Names) -> TierChange:
    match said.kind:
        case "snapshot":
            return Snapshot(sequence, *place, names)
        case "added":
            return Added(sequence, *place, names)
        case "removed":
            return Removed(sequence, *place, names, said.why)
        case "cleared":
            return Cleared(sequence, *place)


class _Stream:
    """What a server sends to a subscriber, and then the next server. It ends once nobody refers to the subscriber."""

    def __init__(self, changes: FarChanges) -> None:
        self._changes = ref(changes)
        self._there: Attachment | None = None
        self._number = 0

    def begin(self, there: Attachment) -> None:
        """Have a server send from now on; another stream ends."""
        self.end()
        self._there, self._number = there, there.number()
        there.transfers[self._number] = self
        there.send(Follow(self._number))

    def say_taken(self, num_messages: int) -> None:
        """Tell the server that so many of its messages were taken: it may send as many more."""
        if self._there is not None:
            self._there.send(Taken(self._number, num_messages))

    def take(self, reply: Reply) -> None:
        """See `Transferring.take`."""
        changes = self._changes()
        if changes is not None and isinstance(reply, Changed):
            changes.put(reply)
            return
        self.end()
        if changes is not None and isinstance(reply, Failed):  # there are too many
            log("warning", "host.changes_refused", why=reply.why)
            changes.end()

    def miss(self) -> None:
        """See `Transferring.miss`: what it has is as good as it was."""

    def lose(self) -> None:
        """See `Transferring.lose`."""
        self._there = None
        if (changes := self._changes()) is not None:
            changes.start_over(())  # nothing is there

    def end(self) -> None:
        """Have the server say no more."""
        there, self._there = self._there, None
        if there is not None and there.transfers.pop(self._number, None) is not None:
            there.send(Cancel(self._number))


class FarSubscribers:
    """The subscribers of one client. For the event loop's thread."""

    def __init__(self, connection: Connection) -> None:
        """Follow each server from now on."""
        self._connection = connection
        self._places: tuple[Place, ...] = ()
        self._subscribers: WeakSet[FarChanges] = WeakSet()
        if connection.there is not None:
            self.attached(connection.there)
        connection.follow(self)

    def subscribe(self) -> FarChanges:
        """Return the changes from now on."""
        changes = FarChanges(self._places)
        finalize(changes, self._connection.here().loop_calls.call, changes.stream.end).atexit = False
        self._subscribers.add(changes)
        if self._connection.there is not None:
            changes.stream.begin(self._connection.there)
        return changes

    def start_over(self) -> None:
        """Begin again with snapshots: the names that routers look for are others now."""
        if (there := self._connection.there) is not None:
            self.attached(there)

    def attached(self, there: Attachment) -> None:
        """See `Follower.attached`."""
        self._places = there.attached.places
        for changes in list(self._subscribers):
            changes.start_over(self._places)
            changes.stream.begin(there)

    def close(self) -> None:
        """See `Follower.close`."""
        for changes in list(self._subscribers):
            changes.end()
