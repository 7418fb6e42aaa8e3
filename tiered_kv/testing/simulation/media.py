"""A store that several processes share, as a `Backend` sees one: slow, full, hanging, failing, lying."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import ByteSize, Field
from typing_extensions import override

from tiered_kv.media.backend import Backend, BackendContext, Block, Outcome, check_lengths
from tiered_kv.settings.tier_settings import StorageTierSettings
from tiered_kv.testing.simulation.known import check_lent
from tiered_kv.testing.simulation.tape import Tape
from tiered_kv.testing.simulation.threads import SimulatedProcess, Turns
from tiered_kv.values.errors import BackendUnavailableError
from tiered_kv.values.keys import BlockKey
from tiered_kv.values.specs import LoadStoreSpec


@dataclass
class StoreFaults:
    """How often something goes wrong, for each call; and how slow the store is.

    Attributes:
        error: The call raises: an error of ours, or whatever a client library may raise.
        false: It answers something else than the truth.
        stall: It takes seconds.
        hang: It does not end before something else is wrong with the store, or nothing.
        broken_methods: Methods that always raise.
        lookup_s: What a question takes.
        latency_s: What every other call takes.
        extra_s: What calls of one kind take besides, by their name.
        most_calls: How many are served at once; others wait.
    """

    error: float = 0.0
    false: float = 0.0
    stall: float = 0.0
    hang: float = 0.0
    broken_methods: tuple[str, ...] = ()
    lookup_s: float = 1e-3
    latency_s: float = 2e-3
    extra_s: Mapping[str, float] = field(default_factory=dict)
    most_calls: int = 64


class SharedStore:
    """What outlives the processes that use it.

    Attributes:
        records: By path, the least recently used first.
        num_bytes: Of all of them.
        bytes_written: Ever.
        raised: How often its clients raised what, by its name; but where they were opened, which no event tells.
    """

    def __init__(self, capacity_bytes: int, tape: Tape, turns: Turns) -> None:
        self.capacity_bytes = capacity_bytes
        self.faults = StoreFaults()
        self.records: OrderedDict[str, bytes] = OrderedDict()
        self.num_bytes = 0
        self.bytes_written = 0
        self.tape = tape
        self.turns = turns
        self._calls_of = Counter[SimulatedProcess]()
        self.raised = Counter[str]()

    @property
    def num_calls(self) -> int:
        """How many calls are under way; a server hears when a process ends whose calls it was at."""
        return sum(n for process, n in self._calls_of.items() if not process.is_dead)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call of the process that makes it."""
        process = self.turns.current.process
        self._calls_of[process] += 1
        try:
            yield
        finally:
            self._calls_of[process] -= 1

    def put(self, path: str, record: bytes) -> None:
        """Keep one; those used least go where there is no room."""
        self.bytes_written += len(record)
        self.num_bytes += len(record) - len(self.records.pop(path, b""))
        self.records[path] = record
        while self.num_bytes > self.capacity_bytes:
            self.num_bytes -= len(self.records.popitem(last=False)[1])

    def drop(self, path: str) -> None:
        """Forget one."""
        self.num_bytes -= len(self.records.pop(path, b""))

    def rot(self) -> None:
        """Change one bit somewhere."""
        if self.records:
            path = self.tape.pick("faults", list(self.records))
            record = bytearray(self.records[path])
            record[self.tape.draw("faults", len(record))] ^= 1 << self.tape.draw("faults", 8)
            self.records[path] = bytes(record)


class _Strange(BaseException):
    """What a client library may raise that is no Exception."""


class StoreClient(Backend):
    """One process's client of a `SharedStore`."""

    class Settings(StorageTierSettings):
        """Nothing but what every medium has."""

        medium: str = "simulated"
        capacity: ByteSize = Field(default=ByteSize(1 << 30), gt=0)

    def __init__(self, store: SharedStore, **fields: Any) -> None:  # noqa: ANN401 - of the settings
        self.settings = self.Settings.model_validate(fields)
        self._store = store

    async def open(self, context: BackendContext) -> None:
        """Connect."""
        await self._reach("open", 1e-3)

    @override
    async def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        is_first, before = self._store.tape.chance("faults", 0.5), self._outcomes(keys)
        await self._reach("lookup", self._store.faults.lookup_s)  # what is said may be old when it has come
        return self._said(before if is_first else self._outcomes(keys))

    @override
    async def locate(self, keys: Sequence[BlockKey]) -> LoadStoreSpec | None:
        await self._reach("locate", self._store.faults.lookup_s)
        return None

    @override
    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        check_lengths(keys, into)
        lent = [bytes(block) for block in into]
        await self._reach("read", self._store.faults.latency_s)
        check_lent(lent, [bytes(block) for block in into], "read", self._store.turns.found)
        outcomes = []
        for key, block in zip(keys, into, strict=True):
            record = self._store.records.get(key.path)
            if record is None:
                outcomes.append(Outcome.MISS)
                continue
            self._store.records.move_to_end(key.path)
            if self._store.tape.fault(self._store.faults.false):  # half of it came
                block.payload[: len(block.payload) // 2] = record[-len(block.payload) :][: len(block.payload) // 2]
                outcomes.append(Outcome.HIT)
                continue
            outcomes.append(Outcome.HIT if block.fill(record) else Outcome.CORRUPT)
            await asyncio.sleep(0)  # others go on, and the blocks are still lent
        return self._said(outcomes)

    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        """See `Backend.write`. Who fails half-way has written half."""
        check_lengths(keys, blocks)
        is_first = self._store.tape.chance("faults", 0.5)  # answers are lost on their way, too
        for key, block in zip(keys, blocks, strict=True) if is_first else ():
            self._store.put(key.path, bytes(block))
        lent = [bytes(block) for block in blocks]
        await self._reach("write", self._store.faults.latency_s)
        check_lent(lent, [bytes(block) for block in blocks], "write", self._store.turns.found)
        for key, block in zip(keys, blocks, strict=True) if not is_first else ():
            self._store.put(key.path, bytes(block))
        return self._said([Outcome.STORED] * len(blocks))

    @override
    async def delete(self, keys: Sequence[BlockKey]) -> None:
        await self._reach("delete", self._store.faults.latency_s)
        for key in keys:
            self._store.drop(key.path)

    def describe(self) -> dict[str, object]:
        """See `SlotBackend.describe`."""
        if "describe" in self._store.faults.broken_methods:
            raise KeyError("describe")
        return {}

    def _outcomes(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return [Outcome.HIT if key.path in self._store.records else Outcome.MISS for key in keys]

    async def _reach(self, doing: str, seconds: float) -> None:
        store, faults, tape = self._store, self._store.faults, self._store.tape
        if doing in faults.broken_methods:
            store.tape.num_faults += 1
            raise KeyError(doing)
        while store.num_calls >= faults.most_calls:  # noqa: ASYNC110 - a server tells nobody that it is free
            await asyncio.sleep(0.01)
        with store.call():
            seconds += faults.extra_s.get(doing, 0.0)
            if tape.fault(faults.stall):
                seconds += tape.pick("faults", (0.4, 1.5, 6.0, 30.0))
                store.turns.tell(f"the store stalls {doing} for {seconds:.1f} s")
            if tape.fault(faults.hang):
                store.turns.tell(f"the store hangs in {doing}")
                while store.faults is faults:  # noqa: ASYNC110 - a server tells nobody that it goes on
                    await asyncio.sleep(0.5)
            await asyncio.sleep(seconds)
        if tape.fault(faults.error):
            store.turns.tell(f"the store fails {doing}")
            error = tape.pick(
                "faults",
                (BackendUnavailableError("down"), KeyError("a bug"), _Strange("a panic"), asyncio.CancelledError()),
            )
            if doing != "open":  # whoever opens it is told by what that raises
                store.raised[type(error).__name__] += 1
            raise error

    def _said(self, outcomes: list[Outcome]) -> list[Outcome]:
        tape = self._store.tape
        if outcomes and tape.fault(self._store.faults.false):
            return tape.pick("faults", ([], outcomes[:-1], [Outcome.FAILED] * len(outcomes), [*outcomes, Outcome.HIT]))
        return outcomes
