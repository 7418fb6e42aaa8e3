"""Streams of changes for a client, in the server: of the ranks that it stands for, no faster than it takes them."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from tiered_kv.changes import Added, Changes, Cleared, Removed, Snapshot, TierChange
from tiered_kv.host import wire
from tiered_kv.host.change_messages import AHEAD, NAMES_A_MESSAGE, Changed, Kind
from tiered_kv.keys import Names
from tiered_kv.open_cache import OpenCache
from tiered_kv.tiers.tasks import Tasks

Send = Callable[[wire.Message], None]
NO_NAMES: Final = np.zeros((0, 4), np.uint64)
_MOST_NAMES: Final = 1 << 16
"""That are queued for a client that is slow; of more it gets snapshots anew."""


class SessionChanges:
    """Those of one client. For the event loop's thread."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._streams: dict[int, tuple[asyncio.Task[None], asyncio.BoundedSemaphore]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, id_: int) -> bool:
        return id_ in self._streams

    def follow(self, id_: int, seat: OpenCache, send: Send) -> None:
        """Begin a stream."""
        room = asyncio.BoundedSemaphore(AHEAD)
        changes = seat.subscribers.subscribe(_MOST_NAMES)
        task = self._tasks.spawn(_tell(id_, changes, _ranks(seat), room, send), "tell of changes")
        self._streams[id_] = task, room
        task.add_done_callback(lambda _: self._streams.pop(id_, None))

    def taken(self, id_: int, num_messages: int) -> None:
        """The client has room for so many messages more; of a stream that has ended it is passed over.

        Raises:
            ValueError: It has taken more than were sent: what it does not read would pile up here.
        """
        if id_ in self._streams:
            for _ in range(min(num_messages, AHEAD)):
                self._streams[id_][1].release()

    def end(self, id_: int) -> None:
        """End a stream."""
        self._streams[id_][0].cancel()

    def end_all(self) -> None:
        """The client is gone."""
        for task, _ in list(self._streams.values()):
            task.cancel()


def places_of(seat: OpenCache) -> tuple[tuple[str, int, int], ...]:
    """Return what a client is told of: tier, KV group and rank of each place, the fastest tier first."""
    ranks, tiers = _ranks(seat), seat.ledger.tiers.items()
    places = [place for place, tier in tiers if tier.index.max_slots and place.rank in ranks]
    return tuple((place.tier, place.group, ranks[place.rank]) for place in places)


def _ranks(seat: OpenCache) -> dict[int, int]:
    """Number the ranks that a client stands for, by their numbers in the cache."""
    return {shard.rank: number for number, shard in enumerate(seat.shards)}


async def _tell(id_: int, changes: Changes, ranks: dict[int, int], room: asyncio.BoundedSemaphore, send: Send) -> None:
    async for change in changes:
        if change.rank not in ranks:
            continue
        kind, names, why = _said(change)
        parts = list(_parts(names))
        for number, part in enumerate(parts, start=1):
            await room.acquire()
            where = change.tier, change.group, ranks[change.rank]
            send(Changed(id_, kind, *where, part, why, number == len(parts), changes.num_overflows))


def _said(change: TierChange) -> tuple[Kind, Names, str]:
    match change:
        case Snapshot(names=names):
            return "snapshot", names, ""
        case Added(names=names):
            return "added", names, ""
        case Removed(names=names, why=why):
            return "removed", names, why
        case Cleared():
            return "cleared", NO_NAMES, ""
    raise TypeError(f"{type(change).__name__} is no change that is known")


def _parts(names: Names) -> Iterator[bytes]:
    """Yield names as messages have them, some at a time; of none, once nothing."""
    yield names[:NAMES_A_MESSAGE].tobytes()
    for start in range(NAMES_A_MESSAGE, len(names), NAMES_A_MESSAGE):
        yield names[start : start + NAMES_A_MESSAGE].tobytes()
