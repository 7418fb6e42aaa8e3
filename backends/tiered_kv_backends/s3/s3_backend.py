"""Records as objects: ``<prefix>/<fingerprint>/<epoch>/<shard>/<salt>/<key>``, small ones in packs (``packing.py``)."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import obstore
from obstore import Bytes
from obstore.exceptions import AlreadyExistsError, BaseError

from tiered_kv.media.backend import Backend, BackendContext, Block, Outcome, check_lengths
from tiered_kv.media.inventory import Inventory
from tiered_kv.values.errors import BackendUnavailableError, BlockCorruptError
from tiered_kv.values.keys import BlockKey
from tiered_kv.values.specs import ObjectLoadStoreSpec
from tiered_kv_backends.s3.bucket_upkeep import open_inventory
from tiered_kv_backends.s3.doomed import MARKS, MOST_MARKS, Doomed, is_mark, mark_of
from tiered_kv_backends.s3.packing import Packing, Unit
from tiered_kv_backends.s3.presence import PresenceAnswers, all_of, count_blocks
from tiered_kv_backends.s3.s3_client import (
    BEGIN_WITHIN,
    REQUEST_WITHIN,
    S3Settings,
    is_refused_for_rate,
    make_store,
    pauses,
    translate,
    translate_opening,
)

if TYPE_CHECKING:  # it is in the client's type stubs alone
    from obstore import BytesStream

T = TypeVar("T")

_READ_MARKS_EVERY_S = 30.0
"""So long a block that another process has evicted from a pack that it could not name may be served here."""
_LISTED_AT_ONCE = 1000


class S3Backend(Backend):
    """An S3-compatible store, shared by any number of hosts; or another kind of store that obstore speaks.

    It evicts nothing: give the bucket a lifecycle rule. All state here is touched by the event loop only.
    """

    Settings = S3Settings

    @classmethod
    def inventory(cls, settings: S3Settings) -> AbstractAsyncContextManager[Inventory]:
        """List, read and delete what lies there, see `Backend.inventory`."""
        return open_inventory(settings)

    def __init__(self, settings: S3Settings | Mapping[str, Any] | str) -> None:
        self.settings = settings = self.Settings.of(settings)
        self._under_way: set[asyncio.Future[Any]] = set()

    async def open(self, context: BackendContext) -> None:
        """Make the client and ask for an object that is not there, so that what cannot work is said now.

        Where blocks lie in packs, read which were evicted from packs that nobody could name.

        Raises:
            ConfigurationError: No such bucket, refused credentials, a failed TLS handshake, an option that is not one.
            BackendUnavailableError: Nobody answers within ``connect_timeout_s``, or the evictions cannot be read.
        """
        probe = make_store(self.settings, is_probe=True)
        try:
            await obstore.get_async(probe, "is-anybody-there")
        except (BaseError, OSError, ValueError) as error:
            if (failure := translate_opening(error, self.settings)) is not None:
                raise failure from error
        self._store = make_store(self.settings)
        # The client repeats no PUT: the first may be carried out behind a deletion, and nobody would know of it.
        self._once = self._store if self.settings.is_private else make_store(self.settings, tries_once=True)
        self._context, self._clock = context, context.clock
        self._packing = Packing(context.groups, self.settings.pack_bytes)
        self._answers = PresenceAnswers(context.clock, self.settings.answer_ttl_s)
        self._reading = asyncio.Semaphore(self.settings.connections)
        self._writing = asyncio.Semaphore(self.settings.connections)
        self._doomed, self._read_marks_at = Doomed(), self._clock()
        self._dooming = asyncio.Lock()
        await self._read_marks(self._deadline())

    async def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Say HIT or MISS for each key by one or two questions each. Exact at that moment."""
        deadline = self._deadline()

        async def is_there(unit: Unit) -> list[Outcome]:
            if unit.pack is not None and await self._exists(unit.pack, deadline):
                return [Outcome.HIT] * (unit.stop - unit.start)
            each = await all_of(self._exists(key.path, deadline) for key in keys[unit.start : unit.stop])
            return [Outcome.HIT if found else Outcome.MISS for found in each]

        answers = await all_of(map(is_there, await self._units(keys, deadline)))
        return [outcome for each in answers for outcome in each]

    async def lookup_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Count the leading keys that are there, by about ``log2(n)`` round trips; an estimate.

        Raises:
            BackendUnavailableError: The store failed to answer.
        """
        num_known, limit = self._answers.bounds(keys)
        keys = keys[:limit]
        if num_known == limit:
            return limit
        deadline = self._deadline()
        with self._answers.asking() as question:
            units = await self._units(keys, deadline)
            n = await count_blocks(
                keys, units, num_known, lambda name: self._exists(name, deadline), self._packing.is_single
            )
        if n:
            self._answers.put(keys[n - 1], is_there=True, question=question)
        if n < len(keys):
            self._answers.put(keys[n], is_there=False, question=question)
        return n

    async def locate(self, keys: Sequence[BlockKey]) -> ObjectLoadStoreSpec | None:
        """Say which objects, or which parts of packs, the records are, by one question for each pack.

        As they are read: what was stored anew since its pack was is where it lies alone, if it still does.

        Raises:
            BackendUnavailableError: The store failed to answer.
        """
        if self.settings.is_private:
            return None
        deadline = self._deadline()
        units = await self._units(keys, deadline)

        async def lies_alone(key: BlockKey) -> bool:
            return self._packing.is_single([key]) and await self._exists(key.path, deadline)

        async def packed(unit: Unit) -> list[int]:
            if unit.pack is None or not await self._exists(unit.pack, deadline):
                return []
            alone = await all_of(map(lies_alone, keys[unit.start : unit.stop]))
            return [unit.start + n for n, is_so in enumerate(alone) if not is_so]

        names, offsets, lengths = [key.path for key in keys], [0] * len(keys), self._context.record_lengths(keys)
        for unit, places in zip(units, await all_of(map(packed, units)), strict=True):
            for at in places:
                names[at], offsets[at] = str(unit.pack), (unit.place + at - unit.start) * lengths[at]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        ids = [numbers[name] for name in names]
        return ObjectLoadStoreSpec(ids, [*numbers], offsets, lengths, self.settings.url, self.settings.address)

    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        """Fill the blocks: HIT, MISS, CORRUPT (another length) or FAILED each.

        Raises:
            BackendUnavailableError: Nothing could be read.
        """
        check_lengths(keys, into)
        deadline = self._deadline()
        with self._answers.asking() as question:
            units = await self._units(keys, deadline)
            reads = [self._read_unit(unit, keys, into, deadline) for unit in units]
            outcomes = await self._outcomes(units, reads)
        missing = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.MISS]
        if missing or Outcome.FAILED in outcomes or Outcome.CORRUPT in outcomes:
            self._answers.refute(keys, missing, question)
        return outcomes

    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        """Store the records, whole groups as packs: STORED or FAILED each.

        What fails is not sent again, unless it was refused for the rate of requests: the store may carry it out yet,
        behind a deletion, which what is STORED must not.

        Raises:
            BackendUnavailableError: Nothing could be stored.
        """
        check_lengths(keys, blocks)
        deadline = self._deadline()
        units = [part for unit in await self._units(keys, deadline) for part in _as_written(unit, blocks)]
        writes = [self._write_unit(unit, keys, blocks, deadline) for unit in units]
        try:
            return await self._outcomes(units, writes)
        finally:
            self._answers.drop(keys)

    async def delete(self, keys: Sequence[BlockKey]) -> bool:
        """Forget the keys, by requests of 1,000; with a key of a pack its neighbours in the pack.

        A block that may lie in a pack of which this process does not know the last key is found by nobody here, from
        now on, and is marked so on the store: nobody finds it who opens or reads the marks later. It is deleted with
        its pack by the first call that has that key.

        Returns:
            Whether there is no such block among them; with no keys, among all that were to be deleted.

        Raises:
            BackendUnavailableError: The store did not take it.
        """
        if not keys:
            return not self._doomed.may_be_served
        units, deadline = self._packing.units(keys), self._deadline()
        unnamed = [key for unit in units if unit.pack is None for key in keys[unit.start : unit.stop]]
        single, packed = self._packing.parted(unnamed)
        self._doomed.add(single, may_be_packed=False)
        self._doomed.add(packed, may_be_packed=True)
        names = dict.fromkeys(key.path for key in keys)
        names |= dict.fromkeys(unit.pack for unit in units if unit.pack)
        try:
            # All of it, whatever fails: a store that is full takes no mark, and room for it is what this may make.
            marking = (self._put(mark_of(key), b"", deadline) for key in packed)
            await _all_ended([self._delete_all([*names], deadline), *marking])
        finally:
            self._answers.refute(keys, keys)
        return not packed

    async def _units(self, keys: Sequence[BlockKey], deadline: float) -> list[Unit]:
        """Cut a batch that is asked for or written. Packs in it that have doomed blocks are deleted first.

        Raises:
            BackendUnavailableError: The store did not take that: nothing may be said of what these packs have.
        """
        units = self._packing.units(keys)
        await self._read_marks(deadline)
        if not (doomed := await self._doomed_packs(keys, units, deadline)):
            return units
        self._answers.refute(keys, ())
        if self.settings.read_only:  # others delete it
            return [part for unit in units for part in (unit.singles if unit.pack in doomed else [unit])]
        async with self._dooming:  # and look again: who had it before may have stored such a pack anew
            if doomed := await self._doomed_packs(keys, units, deadline):
                marks = [mark for each in doomed.values() for mark in each]
                await self._delete_all([*doomed], deadline)
                await self._delete_all(marks, deadline)  # after the packs: else these were served if it ended between
                self._doomed.spare(marks)
        return units

    async def _doomed_packs(
        self, keys: Sequence[BlockKey], units: Sequence[Unit], deadline: float
    ) -> dict[str, list[str]]:
        """Return the packs of a batch that have to go, and the marks of its blocks that say so."""
        doomed: dict[str, list[str]] = {}
        for pack, suspects in self._doomed.suspects(keys, units).items():
            each = await all_of(self._is_doomed(mark, deadline) for mark in suspects)
            if marks := [mark for mark, is_so in zip(suspects, each, strict=True) if is_so]:
                doomed[pack] = marks
        return doomed

    async def _is_doomed(self, mark: str, deadline: float) -> bool:
        """Ask for a mark that may be on the store: another process may have deleted it since, and stored a new pack."""
        return self._doomed.is_own(mark) or await self._exists(mark, deadline)

    async def _read_marks(self, deadline: float) -> None:
        """Read anew which blocks were evicted from packs that nobody could name, unless that was done lately.

        Raises:
            BackendUnavailableError: The store failed to answer.
        """
        now = self._clock()
        if not self._packing.is_on or now < self._read_marks_at:
            return
        self._read_marks_at = now + _READ_MARKS_EVERY_S
        try:
            marks, are_all = await self._request(self._reading, deadline, "list evicted blocks", self._list_marks)
        except BaseException:
            self._read_marks_at = now
            raise
        self._doomed.read(marks, are_all=are_all)

    async def _list_marks(self) -> tuple[frozenset[str], bool]:
        """List marks within the time of one request, and say whether these are all: a listing need have no end.

        Raises:
            TimeoutError: Not even a part of them came in that time.
        """
        marks, num_listed, limit_s = set[str](), 0, REQUEST_WITHIN * self.settings.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                for shape in self._context.groups:
                    async for some in obstore.list(
                        self._store, f"{MARKS}/{shape.fingerprint.hex()}", chunk_size=_LISTED_AT_ONCE
                    ):
                        marks.update(each["path"] for each in some if is_mark(each["path"]))
                        num_listed += len(some)
                        if num_listed >= MOST_MARKS:
                            return frozenset(marks), False
        except TimeoutError:
            if not num_listed:
                raise TimeoutError(f"nothing came within {limit_s:g} s") from None
            return frozenset(marks), False
        return frozenset(marks), True

    async def _delete_all(self, names: list[str], deadline: float) -> None:
        try:
            await self._request(self._writing, deadline, "delete", lambda: obstore.delete_async(self._store, names))
        except FileNotFoundError:  # a store without bulk deletion stops at the first that is absent
            await _all_ended(self._delete_one(name, deadline) for name in names)

    async def aclose(self) -> None:
        """Wait for requests under way: the client may hold a block's buffer until then."""
        if self._under_way:
            await asyncio.wait(self._under_way)

    async def _exists(self, name: str, deadline: float) -> bool:
        try:
            await self._request(self._reading, deadline, "ask", lambda: obstore.head_async(self._store, name))
        except FileNotFoundError:
            return False
        return True

    async def _read_unit(
        self, unit: Unit, keys: Sequence[BlockKey], into: Sequence[Block], deadline: float
    ) -> list[Outcome]:
        mine, blocks = keys[unit.start : unit.stop], into[unit.start : unit.stop]
        outcomes, everything = [Outcome.MISS] * len(blocks), list(range(len(blocks)))
        # What was stored anew since its pack was is right where it lies alone, and may be broken in the pack.
        alone = [n for n in everything if unit.pack is None or self._packing.is_single(mine[n : n + 1])]
        ways = [(self._read_singly, alone)]
        if unit.pack is not None:
            ways += [(self._read_packed, everything), (self._read_singly, [n for n in everything if n not in alone])]
        for way, at in ways:
            left = [n for n in at if outcomes[n] is Outcome.MISS]
            if left:
                for n, outcome in zip(left, await way(unit, mine, blocks, left, deadline), strict=True):
                    outcomes[n] = outcome
        return outcomes

    async def _read_packed(
        self, unit: Unit, keys: Sequence[BlockKey], blocks: Sequence[Block], at: Sequence[int], deadline: float
    ) -> list[Outcome]:
        """Fill the blocks at these positions from the unit's pack."""
        each = blocks[0].num_bytes
        record = await self._get(str(unit.pack), unit.place * each, len(blocks) * each, deadline)
        if isinstance(record, Outcome):
            return [record] * len(at)
        self._packing.saw([keys[n] for n in at], is_single=False)
        return [_fill(blocks[n], record[n * each : (n + 1) * each]) for n in at]

    async def _read_singly(
        self, unit: Unit, keys: Sequence[BlockKey], blocks: Sequence[Block], at: Sequence[int], deadline: float
    ) -> list[Outcome]:
        """Fill the blocks at these positions from objects of their own: nothing is filled any more when this ends."""
        reads = [self._read_single(keys[n].path, blocks[n], deadline) for n in at]
        outcomes = await self._outcomes([Unit(n, n + 1) for n in at], reads)
        found = [keys[n] for n, outcome in zip(at, outcomes, strict=True) if outcome is Outcome.HIT]
        if unit.pack is not None:
            self._packing.saw(found, is_single=True)
        return outcomes

    async def _read_single(self, name: str, block: Block, deadline: float) -> list[Outcome]:
        record = await self._get(name, 0, block.num_bytes + 1, deadline)  # one more: a longer object is not the record
        return [record if isinstance(record, Outcome) else _fill(block, record)]

    async def _get(self, name: str, start: int, length: int, deadline: float) -> memoryview | Outcome:
        """Read a range, in one request and one buffer of the client's own."""

        async def get() -> Bytes | bytes:  # obstore's get_range_async takes up to twice as long for the same request
            response = await obstore.get_async(self._store, name, options={"range": (start, start + length)})
            return await _body(response.stream(min_chunk_size=length), length)

        try:
            body = await self._request(self._reading, deadline, "read", get)
        except FileNotFoundError:
            return Outcome.MISS
        except BlockCorruptError:
            return Outcome.CORRUPT
        return memoryview(body)

    async def _write_unit(
        self, unit: Unit, keys: Sequence[BlockKey], blocks: Sequence[Block], deadline: float
    ) -> list[Outcome]:
        name = unit.pack or keys[unit.start].path
        body = [segment for block in blocks[unit.start : unit.stop] for segment in block.segments]
        await self._put(name, body, deadline)
        self._packing.saw(keys[unit.start : unit.stop], is_single=unit.pack is None)
        return [Outcome.STORED] * (unit.stop - unit.start)

    async def _put(self, name: str, body: Sequence[memoryview] | bytes, deadline: float) -> None:
        mode: Literal["create", "overwrite"] = "create" if self.settings.create_only else "overwrite"
        waits = pauses(self.settings.max_retries)

        async def put() -> None:
            while True:
                try:
                    await obstore.put_async(self._once, name, body, mode=mode, use_multipart=False)
                except BaseError as error:
                    pause_s = next(waits, None) if is_refused_for_rate(error) else None
                    if pause_s is None or self._clock() + pause_s >= deadline:
                        raise
                    await asyncio.sleep(pause_s)  # and has its connection: fewer requests are what the store asks for
                else:
                    return

        try:
            await self._request(self._writing, deadline, "store", put)
        except AlreadyExistsError:
            pass  # by this name it is the same block
        except FileNotFoundError as error:
            raise BackendUnavailableError(f"store: the bucket of {self.settings.place} is gone") from error

    async def _delete_one(self, name: str, deadline: float) -> None:
        with suppress(FileNotFoundError):
            await self._request(self._writing, deadline, "delete", lambda: obstore.delete_async(self._store, name))

    async def _outcomes(
        self, units: Sequence[Unit], calls: Sequence[Coroutine[Any, Any, list[Outcome]]]
    ) -> list[Outcome]:
        """Await one call per unit. What failed is FAILED, unless all did: then it is raised, with its reason."""
        results = await asyncio.gather(*calls, return_exceptions=True)
        outcomes: list[Outcome] = []
        failures = [result for result in results if isinstance(result, BaseException)]
        for unit, result in zip(units, results, strict=True):
            if isinstance(result, BaseException):
                if not isinstance(result, BackendUnavailableError) or len(failures) == len(results):
                    raise result
                self.last_error = str(result)
                outcomes += [Outcome.FAILED] * (unit.stop - unit.start)
            else:
                outcomes += result
        return outcomes

    def _deadline(self) -> float:
        """Return until when requests of a call that starts now are begun."""
        return self._clock() + BEGIN_WITHIN * self.settings.timeout_s

    async def _request(
        self, limit: asyncio.Semaphore, deadline: float, doing: str, begin: Callable[[], Awaitable[T]]
    ) -> T:
        """Make one request within the limit of connections.

        Raises:
            FileNotFoundError: There is no such object.
            AlreadyExistsError: There is one, and it was to be created.
            BlockCorruptError: It is too short for the range.
            BackendUnavailableError: Any other failure, or the deadline passed before its turn.
        """
        async with limit:
            if self._clock() >= deadline:
                raise BackendUnavailableError(f"{doing}: {self.settings.place} is too slow, not begun in time")
            try:
                request = asyncio.ensure_future(begin())
                self._under_way.add(request)
                request.add_done_callback(self._under_way.discard)
                return await request
            except (FileNotFoundError, AlreadyExistsError):
                raise
            except (BaseError, OSError, ValueError) as error:
                raise translate(error, doing, self.settings) from error


async def _body(stream: "BytesStream", length: int) -> Bytes | bytes:
    """Take a body of up to ``length`` bytes, which comes as one; what the client holds of a longer one is bounded."""
    parts, num_bytes = [], 0
    async for part in stream:
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > length:
            raise ValueError(f"the server sent more than the {length} bytes asked for")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _fill(block: Block, record: memoryview) -> Outcome:
    return Outcome.HIT if block.fill(record) else Outcome.CORRUPT


def _as_written(unit: Unit, blocks: Sequence[Block]) -> list[Unit]:
    """Keep whole packs of equal records; write all else block by block."""
    if unit.is_whole and len({block.num_bytes for block in blocks[unit.start : unit.stop]}) == 1:
        return [unit]
    return [Unit(n, n + 1) for n in range(unit.start, unit.stop)]


async def _all_ended(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Make all calls to their end; then raise what one of them raised."""
    for error in await asyncio.gather(*calls, return_exceptions=True):
        if error is not None:
            raise error
