"""Redis and Valkey: one server, a master that Sentinel names, or a cluster. One string per block record.

Blocks travel over ``redis/resp.py``, which receives them straight into the cache's slots: redis-py's ``get`` copies
each, reaches a third to two thirds of that speed, and keeps whatever is sent. Who holds which keys is redis-py's to
find out.
"""

import asyncio
import re
import ssl
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    RedisClusterException,
    RedisError,
    ResponseError,
)

from tiered_kv.media.backend import Backend, BackendContext, Block, Outcome, check_lengths
from tiered_kv.media.inventory import Inventory
from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError, TieredKVError
from tiered_kv.values.keys import BlockKey
from tiered_kv.values.specs import RemoteLoadStoreSpec
from tiered_kv_backends.paths import all_causes
from tiered_kv_backends.redis.resp import Answer, LoginError, ProtocolError, command
from tiered_kv_backends.redis.servers import RedisSettings, Server, Servers
from tiered_kv_backends.redis.tenants import open_inventory

Ask = Callable[[Server, list[int]], Awaitable[list[Answer]]]
"""Asks one server about the keys at these positions."""

_LOST, _AWAY, _CUT = "LOST", "AWAY", "CUT"
_ELSEWHERE = frozenset({_LOST, "MOVED", "ASK", "TRYAGAIN", "READONLY"})
"""Begin answers after which it is worth finding out anew who holds the keys, and asking again."""
_NOT_WRITABLE = frozenset({"READONLY", "NOREPLICAS", "MISCONF"})
"""Begin answers of a server that serves reads, and no GETEX: a replica, one without replicas, one that cannot save."""
_NODE_SHARE = 0.5
"""Of the time of a call, how long one node of a cluster may take: the blocks of the others are served all the same."""
_KEYS_TRIED = 64
"""When a cluster is opened, so that they are several nodes': some may be away, or giving up slots."""
_OUTCOMES = {"OOM": Outcome.REFUSED, "WRONGTYPE": Outcome.CORRUPT}
"""What other errors mean, by how they begin; all others are FAILED."""
_OTHER_PROTOCOL, _NO_TLS = "Protocol error, got", "WRONG_VERSION_NUMBER"
"""How redis-py and OpenSSL say it."""
_CROWDED = re.compile(r"max number of clients (\+ cluster connections )?reached")
"""How a server says that it has as many connections as it takes, and how a node of a cluster does."""
_ENDS = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""How TLS ends with a server that leaves: nothing is behind the proxy, it takes no more clients, which it says without
TLS alone, or it wants a certificate of ours."""
_WAITS = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
_NEVER_WORKS = (LoginError, ProtocolError, AuthenticationError, AuthorizationError, ResponseError, ssl.SSLError)
"""What a server says when it is opened and will go on saying."""


class RedisBackend(Backend):
    """Records as strings in Redis 6.2 and newer, or Valkey. The server evicts; what it has evicted is a miss.

    Presence of any number of keys is one pipelined round trip per server. A call that does not end by itself
    (cancelled, late, lost) closes its connection, and no longer touches the caller's blocks.
    """

    Settings = RedisSettings

    @classmethod
    def inventory(cls, settings: RedisSettings) -> AbstractAsyncContextManager[Inventory]:
        """List, read and delete what lies there, see `Backend.inventory`."""
        return open_inventory(settings)

    def __init__(self, settings: RedisSettings | Mapping[str, Any] | str) -> None:
        self.settings = settings = self.Settings.of(settings)
        self._prefix = settings.prefix.encode()
        self._expiry = () if settings.ttl_s is None else (b"EX", b"%d" % settings.ttl_s)
        renews = self._expiry and not settings.read_only  # which takes the right to write
        self._get = (b"GETEX", self._expiry) if renews else (b"GET", ())
        self._servers: Servers

    async def open(self, context: BackendContext) -> None:
        """Connect, and write, find, read and delete a key that is no block's; if nothing is to be written, only look.

        Raises:
            ConfigurationError: Wrong credentials or certificates, missing permissions, or another kind of server.
            BackendUnavailableError: Not reachable within ``connect_timeout_s``.
        """
        self._servers, self._clock = Servers(self.settings), context.clock
        try:
            async with self._bounded("connect", self.settings.connect_timeout_s):
                await self._try_out()
        except BackendUnavailableError as error:
            await self.aclose()
            raise self._advised(error) from error.__cause__
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Close every connection; calls still under way end with `BackendUnavailableError`."""
        if hasattr(self, "_servers"):  # not where it was never opened
            await self._servers.aclose()

    async def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Ask for all keys in one pipelined round trip per server: HIT or MISS, or FAILED where one is away."""
        names = self._names(keys)

        async def exist(server: Server, which: list[int]) -> list[Answer]:
            found = await server.count([command(b"EXISTS", names[i]) for i in which])
            return [each if isinstance(each, str) else Outcome.HIT if each else Outcome.MISS for each in found]

        return await self._ask_all("look up", names, exist)

    async def locate(self, keys: Sequence[BlockKey]) -> RemoteLoadStoreSpec:
        """Say which keys of the servers the records are. Asks nobody."""
        names = [self.settings.prefix + key.path for key in keys]
        return RemoteLoadStoreSpec(range(len(keys)), names, self._servers.url)

    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        """Fill the blocks, and let what is read live for another ``ttl_s``, unless it is only read: HIT or what not.

        Where the server takes no writes now they are read all the same, and live no longer for it.
        """
        check_lengths(keys, into)
        names = self._names(keys)
        verb, options = self._get

        async def get(server: Server, which: list[int]) -> list[Answer]:
            commands = [command(verb, names[i], *options) for i in which]
            async with server.bodies.connection() as connection:
                answers = await connection.get(commands, [into[i] for i in which])
                if again := [n for n, answer in enumerate(answers) if _first_word(answer) in _NOT_WRITABLE]:
                    self._servers.doubt()  # the next call may find one that renews them
                    left = [which[n] for n in again]
                    plain = await connection.get([command(b"GET", names[i]) for i in left], [into[i] for i in left])
                    for n, answer in zip(again, plain, strict=True):
                        answers[n] = answer
            return answers

        return await self._ask_all("read", names, get)

    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        """Set the records: STORED, REFUSED where ``maxmemory`` is reached and nothing may go, or FAILED.

        What was sent on a connection that is lost then has FAILED, and is not sent again: it may be on its way to the
        server still, and come there behind a deletion, which one that was STORED must not.
        """
        check_lengths(keys, blocks)
        names = self._names(keys)

        async def put(server: Server, which: list[int]) -> list[Answer]:
            is_sent = False
            try:
                async with server.bodies.connection() as connection:
                    is_sent = True
                    return await connection.set([names[i] for i in which], [blocks[i] for i in which], self._expiry)
            except OSError as error:
                if not is_sent:
                    raise
                server.drop_idle()
                self._servers.doubt()
                return [f"{_CUT} {server.address}: {_said(error)}"] * len(which)

        return await self._ask_all("write", names, put)

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Unlink the keys, in one pipelined round trip per server."""
        names = self._names(keys)

        async def unlink(server: Server, which: list[int]) -> list[Answer]:
            gone = await server.count([command(b"UNLINK", names[i]) for i in which])
            return [each if isinstance(each, str) else Outcome.MISS for each in gone]

        num_failed = len(keys) - (await self._ask_all("delete", names, unlink)).count(Outcome.MISS)
        if num_failed:
            raise BackendUnavailableError(f"{self._servers}: {num_failed} of {len(keys)} blocks could not be deleted")

    def _names(self, keys: Sequence[BlockKey]) -> list[bytes]:
        return [self._prefix + key.path.encode() for key in keys]

    async def _ask_all(self, doing: str, names: Sequence[bytes], ask: Ask) -> list[Outcome]:
        """Ask every server about its keys at once, and again where who holds them has changed.

        A node of a cluster that does not answer costs its own keys, which are FAILED.

        Raises:
            BackendUnavailableError: It took longer than ``timeout_s``, or no key got an answer.
        """
        if not names:
            return []
        answers: list[Answer] = [_LOST] * len(names)
        async with self._bounded(f"{doing} {len(names)} blocks", self.settings.timeout_s):
            await self._ask_twice(names, ask, answers)
            outcomes = [_outcome(answer) for answer in answers]
            if failed := [answers[i] for i, outcome in enumerate(outcomes) if outcome is Outcome.FAILED]:
                error = BackendUnavailableError(f"{self._servers}: could not {doing} {len(failed)} blocks: {failed[0]}")
                if len(failed) == len(names):
                    raise error
                self._servers.scrub(error)
                self.last_error = str(error)
        return outcomes

    async def _ask_twice(self, names: Sequence[bytes], ask: Ask, answers: list[Answer]) -> None:
        todo = list(range(len(names)))
        for _ in range(2):
            holding = await self._servers.holding(names, todo)
            await self._ask_each(holding, ask, answers)
            if moving := self._moving(holding, answers):
                await self._ask_each(moving, ask, answers)
            todo = [i for i in todo if _first_word(answers[i]) in _ELSEWHERE]
            if not todo:
                return
            self._servers.doubt()

    async def _ask_each(self, holding: Sequence[tuple[Server, list[int]]], ask: Ask, answers: list[Answer]) -> None:
        """Ask several servers at once."""
        if len(holding) == 1:
            await self._ask_one(*holding[0], ask, answers)
            return
        async with asyncio.TaskGroup() as tasks:  # no task outlives a cancelled call: they hold its blocks
            for server, which in holding:
                tasks.create_task(self._ask_one(server, which, ask, answers))

    async def _ask_one(self, server: Server, which: list[int], ask: Ask, answers: list[Answer]) -> None:
        limit_s = _NODE_SHARE * self.settings.timeout_s if self.settings.cluster else None
        if not server.may_be_asked(self._clock()):
            for i in which:
                answers[i] = f"{_AWAY} {server.address} a moment ago"
            return
        try:
            async with asyncio.timeout(limit_s):
                found = await ask(server, which)
            server.answered()
        except TimeoutError:
            if self.settings.cluster:  # when to ask a single server again is for its tier to decide
                server.was_away(self._clock())
            self._servers.doubt()  # its keys may be another node's by now; the next call will see
            found = [f"{_AWAY} {server.address}: no answer in time"] * len(which)
        except (OSError, RedisError) as error:
            server.drop_idle()  # a server that went away has closed them all
            if self.settings.cluster and isinstance(error, ConnectionRefusedError):
                server.was_away(self._clock())  # else every call has the others say anew who holds which keys
            found = [f"{_LOST} {server.address}: {_said(error)}"] * len(which)
        finally:
            server.ended(self._clock())
        for i, answer in zip(which, found, strict=True):
            answers[i] = answer

    def _moving(
        self, asked: Sequence[tuple[Server, list[int]]], answers: Sequence[Answer]
    ) -> list[tuple[Server, list[int]]]:
        """Group the keys that are in a slot on its way to another node, and not where it was, by that node."""
        found: dict[str, tuple[Server, list[int]]] = {}
        for source, which in asked:
            for i in which:
                answer = answers[i]
                if isinstance(answer, Outcome) or _first_word(answer) != "ASK":
                    continue
                if answer in found:
                    found[answer][1].append(i)
                elif (server := self._servers.getting(answer, source)) is not None:
                    found[answer] = server, [i]
        return list(found.values())

    async def _try_out(self) -> None:
        """Do once, with a key that is no block's, all that blocks need; in a cluster, on the first node that serves."""
        num_keys = _KEYS_TRIED if self.settings.cluster else 1
        names = [self._prefix + b"open/" + uuid.uuid4().hex.encode() for _ in range(num_keys)]
        holding = await self._servers.holding(names, range(len(names)))
        if not holding:
            raise BackendUnavailableError(f"{self._servers} has slots that no node holds")
        answers: list[Answer] = []
        for num_left, (server, (at, *_)) in zip(reversed(range(len(holding))), holding, strict=True):
            try:
                async with asyncio.timeout(_NODE_SHARE * self.settings.connect_timeout_s if num_left else None):
                    answers = await self._try_out_on(server, names[at])
                if not any(_first_word(answer) in _ELSEWHERE for answer in answers):
                    break
            except _NEVER_WORKS:
                raise
            except (OSError, RedisError):
                if not num_left:
                    raise
        for answer in answers:
            self._check_served(answer)

    def _check_served(self, answer: Answer) -> None:
        match _first_word(answer):
            case "NOAUTH" | "NOPERM":
                raise ConfigurationError(f"{self._servers} does not allow it: {answer}")
            case "MOVED" if not self.settings.cluster:
                raise ConfigurationError(f"{self._servers} is one node of a cluster: set cluster = true")
            case "ERR" if not _CROWDED.search(str(answer)):
                raise ConfigurationError(f"{self._servers} is too old or too different: {answer}")
            case _ if _outcome(answer) is Outcome.FAILED:
                raise BackendUnavailableError(f"{self._servers} does not serve now: {answer}")

    async def _try_out_on(self, server: Server, name: bytes) -> list[Answer]:
        """Write, read and delete a key; return the answers that say how that went."""
        verb, options = self._get
        async with server.bodies.connection() as connection:
            block = Block.empty(1)
            answers = [] if self.settings.read_only else await connection.set([name], [block], (b"EX", b"60"))
            if any(_outcome(answer) is Outcome.FAILED for answer in answers):
                return answers  # who says that may leave: what is asked next would be lost, and what was said with it
            answers += await connection.get([command(verb, name, *options)], [block])
        questions = [command(b"EXISTS", name)]
        if not self.settings.read_only:
            questions.insert(0, command(b"UNLINK", name))
        if not self.settings.cluster:  # a node of a cluster holds few of so many keys
            questions += [command(b"EXISTS", b"%b%d" % (name, n)) for n in range(32)]
        return answers + [each for each in await server.count(questions) if isinstance(each, str)]

    def _advised(self, error: BackendUnavailableError) -> TieredKVError:
        """Tell what can never work from what may, and say what may be meant."""
        if crowded := next(filter(None, map(_CROWDED.search, map(str, all_causes(error)))), None):
            return BackendUnavailableError(f"{self._servers} has all the connections that it takes: {crowded[0]}")
        if any(isinstance(cause, _ENDS) for cause in all_causes(error)):
            why = "is it away, has it all the clients that it takes, or does it want a cert_file?"
            return BackendUnavailableError(f"{error} (the server ends TLS: {why})")
        causes = [cause for cause in all_causes(error) if not isinstance(cause, _WAITS)]
        if any(isinstance(cause, _NEVER_WORKS) for cause in causes) or _OTHER_PROTOCOL in str(error):
            return ConfigurationError(self._why_never(error, causes))
        if any(isinstance(cause, MasterNotFoundError) for cause in causes):  # whose text has each client's repr
            master = self.settings.sentinel_master
            return BackendUnavailableError(f"{self._servers}: nobody there names a master called {master!r}")
        if any(isinstance(cause, ConnectionResetError | TimeoutError) for cause in causes):
            return BackendUnavailableError(f"{error} (TLS is rediss://, none is redis://: is it the other one?)")
        return error

    def _why_never(self, error: BackendUnavailableError, causes: Sequence[BaseException]) -> str:
        if any(isinstance(cause, ProtocolError) for cause in causes) or _OTHER_PROTOCOL in str(error):
            return f"{self._servers} speaks another protocol: is it Redis? ({causes[-1]})"
        if _NO_TLS in str(error):
            return f"{self._servers} speaks no TLS there: write redis://, or the port that does"
        if any(isinstance(cause, LoginError) for cause in causes):
            return f"{self._servers}: the login was refused: {causes[-1]}"
        return str(error)

    @asynccontextmanager
    async def _bounded(self, doing: str, limit_s: float) -> AsyncIterator[None]:
        """Bound what is done, and turn what clients raise into errors of ours, without our secrets."""
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError as error:
            raise BackendUnavailableError(f"{self._servers}: could not {doing} within {limit_s:g} s") from error
        except (OSError, RedisError, RedisClusterException) as error:
            self._servers.scrub(error)
            raise BackendUnavailableError(f"{self._servers}: could not {doing}: {_said(error)}") from error
        except TieredKVError as error:
            self._servers.scrub(error)
            raise


def _outcome(answer: Answer) -> Outcome:
    return answer if isinstance(answer, Outcome) else _OUTCOMES.get(_first_word(answer), Outcome.FAILED)


def _first_word(answer: Answer) -> str:
    return "" if isinstance(answer, Outcome) else answer.partition(" ")[0]


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
