"""Jobs and change streams of one client, in the server.

Jobs: the client's workers copy, and what is held for them is held here. The client has sent descriptors of the worker
processes, so the server watches them itself. What a job holds goes back when each worker has answered, by way of the
client, or has ended, whatever has become of the client.

Streams of changes tell of the ranks that the client stands for, no faster than it takes them.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np

from tiered_kv.cache.seat import Seat
from tiered_kv.host import wire
from tiered_kv.host.protocol import (
    AHEAD,
    MOST_BLOCKS,
    NAMES_A_MESSAGE,
    AboutJob,
    BindJob,
    Changed,
    JobEnded,
    JobMoved,
    JobMovedKeys,
    JobPlan,
    JobPlanned,
    Kind,
    Part,
    PlanJob,
)
from tiered_kv.host.session_transfers import Account, Send
from tiered_kv.system import files, system
from tiered_kv.tiers.changes import Added, Changes, Cleared, Removed, Snapshot, TierChange, places_in
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.transfers.jobs import Job, Jobs
from tiered_kv.transfers.transfer_requests import JobRequest
from tiered_kv.values.errors import CapacityError, ConfigurationError, Reason
from tiered_kv.values.keys import Names, StoredKeys, stored_keys
from tiered_kv.values.plan import Outcomes, Plan
from tiered_kv.values.specs import GPULoadStoreSpec

NO_NAMES: Final = np.zeros((0, 4), np.uint64)
_MOST_NAMES: Final = 1 << 16
"""How many names are queued for a slow client; if there are more, it gets snapshots anew."""
MOST_STREAMS: Final = 16
"""How many one client has: until its first snapshots are taken, each holds the names of all blocks."""
_MOST_PROMPTS: Final = 1 << 14
"""How many a job has: looking at them takes some 40 ms. A message has room for 400,000 without a key."""


class SessionJobs:
    """The planned jobs of one client. For the event loop's thread."""

    def __init__(self, jobs: Jobs, account: Account, tasks: Tasks, serves: Callable[[bytes], bool], send: Send) -> None:
        """Keep ``jobs``, which are this client's alone, and tell of them in ``tasks``.

        ``serves`` says of an epoch whether the client serves it; ``send`` sends to the client.
        """
        self._jobs = jobs
        self._account = account
        self._tasks = tasks
        self._serves = serves
        self._send = send
        self._by_id: dict[int, tuple[Job, StoredKeys]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, id_: int) -> bool:
        return id_ in self._by_id

    def watch(self, ranks: Sequence[tuple[int, int]], pidfds: Sequence[int]) -> None:
        """Count on processes for ranks; the descriptors are taken over.

        Raises:
            ConfigurationError: No such rank, it has a worker that is alive, or a descriptor is of no process; of those
                before it the end is watched.
        """
        left = list(pidfds)
        try:
            for rank, pid in ranks:
                if not system().is_of_a_process(left[0]):  # what else there is may never end, and with it no job
                    raise ConfigurationError("what came as a worker's process is none: a pidfd is wanted")
                self._jobs.workers.register(rank, pid, left[0])
                del left[0]
        finally:
            for each in left:
                files().close(each)

    def plan(self, request: PlanJob, seat: Seat) -> None:
        """Begin a job, and tell of its plan and its end.

        Raises:
            TieredKVError: It cannot be: `Jobs.begin` says why.
        """
        keys = _keys_of(request, self._num_movers(request, seat))
        parts = seat.batches(keys)
        num_bytes = len(keys) * sum(chain.stride_bytes for chain, _ in parts)
        if num_bytes > self._account.room_bytes:
            self.refuse(request, seat)
            raise CapacityError(
                f"{num_bytes} bytes to hold for a job, of {self._account.room_bytes} that may be held yet"
            )
        engine = _some_blocks(len(keys), keys.group) if request.is_bound else None
        seat.cache.note(request.direction, keys)
        job = self._jobs.begin(
            JobRequest(
                request.direction, keys, parts, engine, partial(self._serves, request.keys.epoch),
                seat.deadline(None), request.gaps, request.hint, is_far=True,
            )
        )  # fmt: skip
        self._by_id[request.id] = job, keys
        self._account.hold(num_bytes)
        self._tasks.spawn(self._tell(request.id, job, num_bytes), f"tell of a job to {request.direction}")

    def refuse(self, request: PlanJob, seat: Seat, why: Reason | None = None) -> None:
        """Count one that does not begin, for each rank; its client has too much under way, unless it is said why.

        Raises:
            TieredKVError: It could not be anyway, and counts for nothing.
        """
        why = why or (Reason.TOO_MANY_LOADS if request.direction == "load" else Reason.TOO_MANY_STORES)
        for chain, batch in seat.batches(_keys_of(request, self._num_movers(request, seat))):
            if request.direction == "load":
                chain.fates.count_load(batch, 0, why)
            else:
                chain.fates.count_store(len(batch), stored=0, present=0, dropped={why: len(batch)})

    def take(self, request: AboutJob) -> None:
        """Take what a client says of a job; of one that is over it is passed over.

        Raises:
            TieredKVError: It cannot be right.
        """
        if (found := self._by_id.get(request.id)) is None:
            return
        job, keys = found
        match request:
            case BindJob(start=start, num_blocks=num_blocks):
                if not 0 <= num_blocks <= len(keys):
                    raise ConfigurationError(f"{num_blocks} blocks for a job of {len(keys)} keys")
                job.bind(_some_blocks(num_blocks, keys.group), start=start)
            case JobMoved():
                self._jobs.complete(
                    Outcomes(job.number, request.rank, request.num_moved, request.error, request.seconds)
                )
            case JobMovedKeys():
                positions = wire.as_ids(request.positions)
                is_outside = len(positions) and not 0 <= positions.min() <= positions.max() < len(keys)
                if is_outside or len(positions) > len(keys):
                    raise ConfigurationError(f"{len(positions)} positions of a job of {len(keys)} keys")
                answered = np.zeros(len(keys), np.bool_)
                answered[positions] = True
                self._jobs.complete_some(job, answered, request.rank, moved=request.moved)

    def cancel(self, id_: int) -> None:
        """End a job whose plan no worker has, as only its client knows."""
        self._by_id[id_][0].cancel(undelivered=True)

    def leave(self) -> None:
        """The client, or its planner, is gone."""
        self._jobs.leave()

    def _num_movers(self, request: PlanJob, seat: Seat) -> int:
        """Return how many workers are to move a block: each that loads it; of those that would store the same one."""
        return len(seat.shards) if request.direction == "store" else self._jobs.num_ranks

    async def _tell(self, id_: int, job: Job, num_bytes: int) -> None:
        try:
            plan = await job.planned()
            is_told = job.result is None
            if is_told:
                self._send(JobPlanned(id_, _said(plan)))
            result = await job.ended()
            self._send(
                JobEnded(
                    id_, None if is_told else _said(plan), result.num_blocks, result.errors, result.num_bytes,
                    result.moved_s, dict(result.by_tier), result.mask.tobytes(), result.faults,
                )
            )  # fmt: skip
        finally:
            del self._by_id[id_]
            self._account.hold(-num_bytes)


class SessionChanges:
    """The streams of changes to which one client has subscribed. For the event loop's thread."""

    def __init__(self, tasks: Tasks, send: Send) -> None:
        self._tasks = tasks
        self._send = send
        self._streams: dict[int, tuple[asyncio.Task[None], asyncio.BoundedSemaphore]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, id_: int) -> bool:
        return id_ in self._streams

    def follow(self, id_: int, seat: Seat) -> None:
        """Begin a stream."""
        room = asyncio.BoundedSemaphore(AHEAD)
        changes = seat.cache.subscribers.subscribe(_MOST_NAMES)
        task = self._tasks.spawn(_tell(id_, changes, _ranks(seat), room, self._send), "tell of changes")
        self._streams[id_] = task, room
        task.add_done_callback(partial(self._forget, id_))

    def taken(self, id_: int, num_messages: int) -> None:
        """The client has room for so many messages more; of a stream that has ended it is passed over.

        Raises:
            ValueError: It has taken more than were sent: what it does not read would pile up here.
        """
        if id_ in self._streams:
            for _ in range(min(num_messages, AHEAD)):
                self._streams[id_][1].release()

    def end(self, id_: int) -> None:
        """End a stream; it counts no longer."""
        self._streams.pop(id_)[0].cancel()

    def end_all(self) -> None:
        """The client is gone."""
        for task, _ in list(self._streams.values()):
            task.cancel()

    def _forget(self, id_: int, ended: "asyncio.Task[None]") -> None:
        if id_ in self._streams and self._streams[id_][0] is ended:  # another may have its number by now
            del self._streams[id_]


def places_of(seat: Seat) -> tuple[tuple[str, int, int], ...]:
    """Return what a client is told of: tier, KV group and rank of each place, the fastest tier first."""
    ranks = _ranks(seat)
    return tuple((each.tier, each.group, ranks[each.rank]) for each in places_in(seat.fates) if each.rank in ranks)


def _keys_of(request: PlanJob, num_ranks: int) -> StoredKeys:
    """Return what a job is about, each block of which so many ranks' workers are to move.

    Raises:
        ConfigurationError: More than it may be, or of prompts that go into no job together.
    """
    if len(request.more) >= _MOST_PROMPTS:
        raise ConfigurationError(f"a job of {len(request.more) + 1} prompts, {_MOST_PROMPTS} at most")
    if request.more and (request.direction == "load" or {each.epoch for each in request.more} != {request.keys.epoch}):
        raise ConfigurationError("keys of several prompts, or of several weights, for one load or store")
    said = request.keys, *request.more
    if (num_keys := sum(map(len, said))) * num_ranks > MOST_BLOCKS:
        raise ConfigurationError(
            f"a plan of {num_keys} keys for {num_ranks} ranks, {MOST_BLOCKS} blocks at most: give fewer keys to it"
        )
    return stored_keys([each.block_keys() for each in said])


def _some_blocks(num_keys: int, group: int) -> GPULoadStoreSpec:
    """Stand in for blocks of the engine: which they are the client knows; that there are some is what counts here."""
    return GPULoadStoreSpec(np.arange(num_keys), group)


def _said(plan: Plan) -> JobPlan:
    parts = (
        Part(move.host.pool, wire.as_bytes(move.host.ids), wire.as_bytes(np.array(move.positions, np.int64)))
        for move in plan.moves
    )
    return JobPlan(plan.num_blocks, tuple(move.pid for move in plan.moves), tuple(parts))


def _ranks(seat: Seat) -> dict[int, int]:
    """Number the ranks that a client stands for, by their numbers in the cache."""
    return {shard.rank: number for number, shard in enumerate(seat.shards)}


async def _tell(id_: int, changes: Changes, ranks: dict[int, int], room: asyncio.BoundedSemaphore, send: Send) -> None:
    async for change in changes:
        if change.rank not in ranks:
            continue
        kind, names, why = _said_of_change(change)
        parts = list(_parts(names))
        for number, part in enumerate(parts, start=1):
            await room.acquire()
            where = change.tier, change.group, ranks[change.rank]
            send(Changed(id_, kind, *where, part, why, number == len(parts), changes.num_overflows))


def _said_of_change(change: TierChange) -> tuple[Kind, Names, str]:
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
