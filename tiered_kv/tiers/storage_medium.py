"""A backend from opening to closing: in calls of its own with time limits, and later if it is not there yet."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tiered_kv.catalog.index import TierIndex
from tiered_kv.catalog.policies import Policy
from tiered_kv.catalog.table import first_occurrences
from tiered_kv.media.backend import Backend, BackendContext, Block, RecordShape, Recovered, SlotBackend
from tiered_kv.settings.tier_settings import OwnedTierSettings
from tiered_kv.settings.tier_settings import StorageTierSettings as Settings
from tiered_kv.system import system
from tiered_kv.tiers.calls import Answer, Calls
from tiered_kv.tiers.gate import Budget, Wear
from tiered_kv.tiers.health import StorageHealth
from tiered_kv.tiers.owned import OwnedTier
from tiered_kv.tiers.records import ExponentCodec, Records
from tiered_kv.tiers.shared import SharedTier
from tiered_kv.tiers.storage import StorageTier, TierParts
from tiered_kv.tiers.tasks import Tasks, WorkerPool
from tiered_kv.values.errors import BackendError, BackendUnavailableError, ConfigurationError, in_words
from tiered_kv.values.events import Emit, TierFailed, TierResumed
from tiered_kv.values.loop_calls import LoopCalls

_FIRST_RETRY_S, _LAST_RETRY_S = 0.5, 8.0
_LAST_RETRY_AS_SET_UP_S: Final = 60.0
"""Where it cannot work as it is set up: somebody may mend that, or another process end that has its directory."""
_LOOKED_AT: Final = 16
"""Records of each kind, when a tier with keys opens."""
_NOTHING: Final = Recovered(0, np.empty((0, 4), np.uint64), np.empty(0, np.int64))


@dataclass(frozen=True)
class Services:
    """What a cache gives all its backends to share.

    Attributes:
        shapes: The records, one per kind of block.
        loop_calls: How threads reach the event loop.
        records: Threads that hash, encrypt and verify records.
        tasks: Transfers, and what they have left to do.
        calls: Calls of backends: ended after the transfers.
        open_timeout_s: How long opening one may take.
        close_timeout_s: How long closing one may take.
        emit: Takes events.
    """

    shapes: tuple[RecordShape, ...]
    loop_calls: LoopCalls
    records: WorkerPool
    tasks: Tasks
    calls: Tasks
    open_timeout_s: float
    close_timeout_s: float
    emit: Emit


class StorageMedium:
    """A backend at its place in the chain, whatever kinds of blocks are kept in it."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        backend: Backend | SlotBackend,
        services: Services,
        policy: str | type[Policy],
        budget: Budget,
    ) -> None:
        """Take a backend that is not open yet.

        Args:
            name: The tier's.
            settings: The tier's.
            backend: Called here alone, and by its tiers.
            services: What the backends of the cache share.
            policy: Says what goes first from an owned one.
            budget: What its reads and writes may move at once, and how fast.
        """
        clock = asyncio.get_running_loop().time
        self.health = StorageHealth(
            name,
            settings.timeout_s,
            services.emit,
            clock=clock,
            rng=system().random(),
            shed_stores_after_s=settings.shed_stores_after_s,
        )
        self._settings = settings
        self._backend = backend
        self._services = services
        self._policy = policy
        self._calls = Calls(self.health, services.calls, budget)
        self._wear = Wear(settings.max_write_bytes_per_day, clock)
        self._pools: list[WorkerPool] = []
        self._records = Records(services.records, settings.encryption)
        self._books: list[TierIndex] = []
        self._opening: asyncio.Task[Answer[list[TierIndex]]] | None = None
        self._raised: Exception | None = None  # by the last call that has ended, whoever waited for it
        self._retrying: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Open the backend; if it is not required, this may succeed later, see `open_later`.

        Raises:
            ConfigurationError, BackendError: A required one cannot be opened, or not in time.
        """
        limit_s = self._services.open_timeout_s
        error = await self._open(limit_s if self._settings.required else min(limit_s, self._settings.timeout_s))
        if error is None:
            return
        self._books = [self._index(_NOTHING) for _ in self._services.shapes]
        if self._settings.required:
            if isinstance(error, BackendUnavailableError):
                name = self.health.name
                named = BackendUnavailableError(f"tier {name!r}: {error}")
                named.add_note(f"With required=false the cache opens without the tier {name!r}, and tries it again.")
                raise named from error.__cause__ or error
            raise error
        self._has_failed(error)

    async def _open(self, timeout_s: float | None) -> Exception | None:
        """Try to open it; return why it cannot be. A call that is late goes on, and is waited for by the next try."""

        async def call() -> list[TierIndex]:
            self._raised = None
            try:
                await self._records.open(self._services.loop_calls)
                groups = self._records.shapes(self._services.shapes)
                context = BackendContext(groups, self._new_workers, self.health.clock)
                found = await self._backend.open(context)
                return await self._look_at(found or ())
            except (BackendError, ConfigurationError) as error:
                self._raised = error
                raise

        if self._opening is None:
            limit_s = self._services.open_timeout_s
            making = self._calls.make("open", call, timeout_s=limit_s, is_raised=True)
            self._opening = self._services.calls.spawn(making, f"opening of {self.health.name}")
        opening = self._opening
        await asyncio.wait({opening}, timeout=timeout_s)
        if not opening.done():
            return BackendUnavailableError(f"not opened within {timeout_s:g} s")
        self._opening = None
        answer = opening.result()
        if answer.is_well:
            self._books = answer.value or []
            return None
        self._end_pools()  # the threads of an attempt end with it
        return self._raised or BackendUnavailableError(f"cannot be opened: {answer.error}")

    def tier(self, group: int, shape: RecordShape, codec: ExponentCodec | None) -> OwnedTier | SharedTier:
        """Make the tier of one kind of block."""
        services = self._services
        parts = TierParts(
            self.health, self._calls, self._records, services.tasks, self._settings, group, shape, self._wear, codec,
        )  # fmt: skip
        if isinstance(self._backend, Backend):
            return SharedTier(parts, self._backend)
        return OwnedTier(parts, self._backend, self._books[group])

    def open_later(self, tiers: Sequence[StorageTier]) -> None:
        """If it is not open yet, go on to try; use ``tiers``, which were made of it, from then on."""
        if not self.health.is_open:
            self._retrying = self._services.calls.spawn(self._open_later(tiers), f"open {self.health.name} later")

    async def _open_later(self, tiers: Sequence[StorageTier]) -> None:
        clock, pause_s = self.health.clock, _FIRST_RETRY_S
        started = clock()
        await asyncio.sleep(pause_s)
        while (error := await self._open(None)) is not None:
            self._has_failed(error)
            last_s = _LAST_RETRY_AS_SET_UP_S if isinstance(error, ConfigurationError) else _LAST_RETRY_S
            pause_s = min(2 * pause_s, last_s)
            await asyncio.sleep(pause_s)  # nobody waits for this task
        for tier in tiers:  # all at once: what is evicted from now on is evicted from these books
            tier.opened(self._books)
        self.health.why_not_open = ""
        self.health.emit(TierResumed(self.health.name, clock() - started))

    def _has_failed(self, error: Exception) -> None:
        """Take note of why it is not open; tell it once, however often that is tried."""
        words = in_words(error)
        if words != self.health.why_not_open:
            self.health.why_not_open = words
            self.health.emit(TierFailed(self.health.name, "open", words, 0))

    async def aclose(self) -> None:
        """Close the backend, within the time for that. Never raises."""
        if self._retrying is not None:
            self._retrying.cancel()
        if self._opening is not None:  # never open and close a medium at the same time
            await self._services.calls.aclose(0.0)
        self._calls.is_over = True  # a hung call may hold engine memory beyond this: no other call is made
        limit_s = self._services.close_timeout_s
        await self._calls.make("close", self._backend.aclose, timeout_s=limit_s, until_late=True)
        self._end_pools()

    async def _look_at(self, found: Sequence[Recovered]) -> list[TierIndex]:
        """Return the books of a backend that has just opened; if it cannot be used, close it again, and raise why.

        Else the next attempt would meet what this one holds, such as the lock of a directory, and say that instead.
        """
        if isinstance(self._backend, Backend):
            return []
        try:
            books = self._books_of(found)
            await self._check_keys(self._backend, books)
        except BaseException:  # of any kind: a call that is cancelled closes it as well
            try:
                await self._backend.aclose()
            except KeyboardInterrupt:
                raise  # the program's own, which happened to come while a backend ran
            except BaseException as error:  # noqa: BLE001 - the error raised below says more
                self.health.emit(TierFailed(self.health.name, "close", in_words(error), 0))
            raise
        return books

    def _books_of(self, found: Sequence[Recovered]) -> list[TierIndex]:
        """Make the books of what was found, by kind of block.

        Raises:
            BackendError, ConfigurationError: It cannot be what this medium has.
        """
        if len(found) != len(self._services.shapes):
            num_kinds = len(self._services.shapes)
            raise BackendUnavailableError(f"cannot be opened: {len(found)} answers for {num_kinds} kinds of blocks")
        return [self._index(self._records.recovered(each)) for each in found]

    async def _check_keys(self, backend: SlotBackend, books: Sequence[TierIndex]) -> None:
        """Look at a few records: if the keys open none of them, the right one is lacking, and would be missed too late.

        Raises:
            ConfigurationError: So it is.
        """
        refused, num_seen = dict[str, None](), 0
        for group, (index, shape) in enumerate(zip(books, self._services.shapes, strict=True)):
            names, slots = index.names_in_order() if self._records.hides else (_NOTHING.names, _NOTHING.slots)
            some = np.unique(np.linspace(0, len(slots) - 1, _LOOKED_AT).astype(np.int64)) if len(slots) else slots
            blocks = [Block.empty(shape.payload_bytes) for _ in some]
            if blocks:
                verification = self._records.verification_by_name(names[some], blocks, shape)
                await verification.verify_all(await backend.read(group, slots[some], blocks))
                refused |= dict.fromkeys(verification.refused.values())
                num_seen += sum(verification.filled) - len(verification.refused)
        if refused and not num_seen:
            raise ConfigurationError(
                f"{self.health.name} holds blocks that its keys do not open: of those looked at, each is "
                f"{' or '.join(refused)}. Give the key that wrote them too, or empty the medium"
            )

    def _index(self, found: Recovered) -> TierIndex:
        settings = self._settings
        ttl_s = settings.ttl_s if isinstance(settings, OwnedTierSettings) else None
        index = TierIndex(
            found.num_slots, max_slots=found.max_slots, policy=self._policy, ttl_s=ttl_s, clock=self.health.clock
        )
        # A write that was given up may arrive after the write that replaced it: then the medium has a block twice.
        last = np.sort(len(found.names) - 1 - first_occurrences(found.names[::-1]))
        index.restore(found.names[last], found.slots[last])
        return index

    def _new_workers(self, num_threads: int) -> WorkerPool:
        self._pools.append(WorkerPool(self.health.name, num_threads, self._services.loop_calls))
        return self._pools[-1]

    def _end_pools(self) -> None:
        while self._pools:
            self._pools.pop().close()
