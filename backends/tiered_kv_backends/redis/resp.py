"""Block bodies over the Redis protocol (RESP2), between a socket and our buffers with no copy in between.

Only what blocks need: GET, SET and questions that a number answers, in pipelines. All else goes through redis-py,
beside it. Whatever a server sends, no more of it is kept than a block and a line; and the event loop gets its turn: a
call of a `Socket`, over TCP or TLS, is tried first, and waited for if it must be.

Connections to one server are logged in once, and kept by a `Pool` for the next call. One whose call did not end
(cancelled, late, lost), or that has said more than it was asked, is closed and never lent again: its next reply would
be another call's.
"""

import asyncio
import copy
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

from pydantic import SecretStr

from tiered_kv.media.backend import Block, Outcome
from tiered_kv_backends.connecting import Address, connected
from tiered_kv_backends.paths import scrubbed

T = TypeVar("T")


class Socket:
    """One connected socket, for one call at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None

    @classmethod
    async def connect(cls, address: Address, tls: ssl.SSLContext | None = None) -> Self:
        """Connect to the first address of the host that answers, and start TLS.

        Raises:
            OSError: Not reachable, or TLS failed (`ssl.SSLError`).
        """
        there = cls(await connected(address))
        if tls is not None:
            try:
                await there._start_tls(tls, address.host)
            except BaseException:  # cancelled, too: nobody else knows of the socket
                there.close()
                raise
        return there

    def is_silent(self) -> bool:
        """Say whether there is nothing to receive, and the server has not left."""
        try:
            self._socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """Drop the connection at once. Nothing is received into anyone's buffers from here on."""
        self._unwatch()
        self._socket.close()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(ConnectionAbortedError("closed meanwhile"))

    async def receive(self, into: memoryview) -> int:
        """Receive up to ``len(into)`` bytes, one at least; return how many.

        Raises:
            OSError: The connection is lost.
        """
        num_bytes = await self._when_ready(lambda: self._socket.recv_into(into), self._loop.add_reader)
        if not num_bytes:
            raise ConnectionResetError("the server closed the connection")
        return num_bytes

    async def send(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Send all of the pieces.

        Raises:
            OSError: The connection is lost.
        """
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                rest = rest[await self._when_ready(partial(self._socket.send, rest), self._loop.add_writer) :]

    async def _start_tls(self, context: ssl.SSLContext, host: str) -> None:
        wrapped = context.wrap_socket(self._socket, server_hostname=host, do_handshake_on_connect=False)
        self._socket = wrapped
        await self._when_ready(wrapped.do_handshake, self._loop.add_reader)

    async def _when_ready(self, call: Callable[[], T], watch: Callable[..., object]) -> T:
        """Make a call of the socket that does not block, again whenever the socket is ready for it."""
        while True:
            try:
                return call()
            except BlockingIOError:
                await self._ready(watch)
            except ssl.SSLWantReadError:
                await self._ready(self._loop.add_reader)
            except ssl.SSLWantWriteError:
                await self._ready(self._loop.add_writer)

    async def _ready(self, watch: Callable[..., object]) -> None:
        self._waiting = self._loop.create_future()
        watch(self._socket.fileno(), _settle, self._waiting)
        try:
            await self._waiting
        finally:
            self._unwatch()

    def _unwatch(self) -> None:
        if (fd := self._socket.fileno()) >= 0:  # closed: its number may be another socket's by now
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)


def _settle(waiting: "asyncio.Future[None]") -> None:
    if not waiting.done():
        waiting.set_result(None)


Answer = Outcome | str
"""What became of one block, or the server's error, e.g. ``"OOM command not allowed ..."``."""

_AHEAD_BYTES = 8192
"""Received together with a reply's line: the record's header fits in."""
_ASKED_BYTES = 1 << 20
"""Bodies asked for and not yet arrived, two at least: with more, a server copies replies aside that it cannot send."""
_LONGEST_LINE = 4096
_LONGEST_NUMBER = 20
"""With the byte before it: 64 bits."""
_ANSWERS_A_TURN = 128
"""So many short answers are taken before the event loop gets its turn."""
_SKIPPED_BYTES = 1 << 16
"""Likewise, of a body that nobody wants."""


class ProtocolError(ConnectionError):
    """What came back is not what was asked for: no server of this kind, or a fault of ours."""


def command(*words: bytes) -> bytes:
    """Encode a command whose words are short."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


_ASKING = command(b"ASKING")


class RESPConnection:
    """One authenticated socket for one call at a time. A call that does not end by itself leaves it to be closed.

    Attributes:
        is_asking: Whether each command is preceded by ASKING: the node is getting the slot, and has not got it whole.
    """

    def __init__(self, connected: Socket) -> None:
        self.is_asking = False
        self._socket = connected
        self._last_error = ""  # the server's, if that was the last line of this call
        self._ahead = bytearray(_AHEAD_BYTES)
        self._start = self._end = 0  # of what was read ahead and is not yet used

    def is_clean(self) -> bool:
        """Say whether the server has said nothing since the last call ended, and has not left."""
        return self._start == self._end and self._socket.is_silent()

    def close(self) -> None:
        """Drop the connection at once. Nothing is read into anyone's buffers from here on."""
        self._socket.close()

    async def say(self, what: bytes) -> str:
        """Send a command; return the line that it is answered by.

        Raises:
            OSError: The connection is lost.
        """
        await self._ask([what])
        return (await self._line()).decode(errors="replace")

    async def get(self, commands: Sequence[bytes], into: Sequence[Block]) -> list[Answer]:
        """Read one record per command straight into the blocks.

        Args:
            commands: Encoded GETs, or what else answers with one bulk string.
            into: As many blocks. Where the answer is not HIT, a block may hold anything.

        Raises:
            OSError: The connection is lost.
        """
        answers: list[Answer] = []
        self._last_error = ""
        asked, ahead = 0, max(2, _ASKED_BYTES // into[0].num_bytes)
        for block in into:
            if asked - len(answers) <= ahead // 2:
                more = commands[asked : len(answers) + ahead]
                await self._socket.send([b"".join(self._asked(more))])
                asked += len(more)
            answers.append(await self._body(block))
            if len(answers) < len(into):
                await asyncio.sleep(0)  # a fast server could else keep the event loop for the whole batch
        return answers

    async def set(self, names: Sequence[bytes], blocks: Sequence[Block], options: Sequence[bytes] = ()) -> list[Answer]:
        """Write one record per name, all under way before the first answer is read.

        Args:
            names: Keys.
            blocks: As many; read until this returns.
            options: Words after each value, e.g. ``(b"EX", b"60")``.

        Raises:
            OSError: The connection is lost.
        """
        await self._ask(_sets(names, blocks, options, _ASKING if self.is_asking else b""))
        answers: list[Answer] = []
        async for line in self._lines(len(names)):
            if line[:1] not in {b"+", b"-"}:
                raise ProtocolError(f"no simple string but {_shown(line)}")
            answers.append(Outcome.STORED if line[:1] == b"+" else _text(line))
        return answers

    async def count(self, commands: Sequence[bytes]) -> list[int | str]:
        """Ask what a number answers, all under way before the first answer is read: numbers, or the server's errors.

        Raises:
            OSError: The connection is lost.
        """
        await self._ask([b"".join(self._asked(commands))])
        answers: list[int | str] = []
        async for line in self._lines(len(commands)):
            if (number := _number(line, b":")) is not None:
                answers.append(number)
            elif line[:1] == b"-":
                answers.append(_text(line))
            else:
                raise ProtocolError(f"no number but {_shown(line)}")
        return answers

    async def _ask(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Send what lines alone answer. If the server has left, its last words say why, not the system's."""
        self._last_error = ""
        try:
            await self._socket.send(pieces)
        except OSError as error:
            said = ""
            with suppress(OSError):
                for _ in range(_ANSWERS_A_TURN):
                    if (line := await self._line())[:1] == b"-":
                        said = _text(line)
                        break
            if not said:
                raise
            raise ConnectionResetError(said) from error

    def _asked(self, commands: Sequence[bytes]) -> Sequence[bytes]:
        return [_ASKING + each for each in commands] if self.is_asking else commands

    async def _first_line(self) -> bytes:
        """Take the line with which an answer begins."""
        if self.is_asking and (line := await self._line())[:1] not in {b"+", b"-"}:
            raise ProtocolError(f"no simple string but {_shown(line)}")
        return await self._line()  # where ASKING is refused, this says that the keys are another node's

    async def _body(self, block: Block) -> Answer:
        line = await self._first_line()
        if line[:1] == b"-":
            return _text(line)
        if line == b"$-1":
            return Outcome.MISS
        if (num_bytes := _number(line, b"$")) is None:
            raise ProtocolError(f"no bulk string but {_shown(line)}")
        if num_bytes == block.num_bytes:
            for segment in block.segments:
                await self._fill(segment)
            answer = Outcome.HIT
        else:
            await self._skip(num_bytes)
            answer = Outcome.CORRUPT
        if await self._line():
            raise ProtocolError("a bulk string is longer than it says")
        return answer

    async def _lines(self, num_lines: int) -> AsyncIterator[bytes]:
        for n in range(1, num_lines + 1):
            yield await self._first_line()
            if not n % _ANSWERS_A_TURN:
                await asyncio.sleep(0)

    async def _line(self) -> bytes:
        """Take one line, without its end."""
        while (end := self._ahead.find(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start > _LONGEST_LINE:
                raise ProtocolError("this is no Redis protocol")
            await self._read_ahead()
        line = bytes(self._ahead[self._start : end])
        self._start = end + 2
        self._last_error = _text(line) if line[:1] == b"-" else ""
        return line

    async def _read_ahead(self) -> None:
        """Receive what comes next, after what is there already; as for `_ask`, last words say why there is no more."""
        rest = self._ahead[self._start : self._end]
        self._ahead[: len(rest)] = rest
        self._start, self._end = 0, len(rest)
        try:
            self._end += await self._socket.receive(memoryview(self._ahead)[self._end :])
        except OSError as error:
            if not self._last_error:
                raise
            raise ConnectionResetError(self._last_error) from error

    async def _fill(self, into: memoryview) -> None:
        """Take exactly ``len(into)`` bytes: what was read ahead, then the socket's, without a copy."""
        have = min(len(into), self._end - self._start)
        into[:have] = memoryview(self._ahead)[self._start : self._start + have]
        self._start += have
        while have < len(into):
            have += await self._socket.receive(into[have:])

    async def _skip(self, num_bytes: int) -> None:
        have = min(num_bytes, self._end - self._start)
        self._start += have
        nowhere = memoryview(bytearray(min(num_bytes - have, _SKIPPED_BYTES)))
        while have < num_bytes:
            have += await self._socket.receive(nowhere[: num_bytes - have])
            await asyncio.sleep(0)


def _sets(
    names: Sequence[bytes], blocks: Sequence[Block], options: Sequence[bytes], first: bytes
) -> Iterator[bytes | memoryview]:
    """Encode SETs, ``first`` before each, in few pieces: payloads as they are, and all between two of them joined."""
    behind = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in options)
    between = b""
    for name, block in zip(names, blocks, strict=True):
        start = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n"
        start %= 3 + len(options), len(name), name, block.num_bytes
        yield between + first + start + block.header
        yield block.payload
        between = behind
    yield between


def _number(line: bytes, kind: bytes) -> int | None:
    """Return the number that a line of this kind says; Python makes none of thousands of digits."""
    is_number = line[:1] == kind and line[1:].isdigit() and len(line) <= _LONGEST_NUMBER
    return int(line[1:]) if is_number else None


def _shown(line: bytes) -> str:
    return repr(line[:80].decode(errors="replace"))


def _text(line: bytes) -> str:
    return line[1:].decode(errors="replace")


@dataclass(frozen=True)
class Login:
    """What a new connection says first."""

    username: str | None = None
    password: SecretStr | None = None
    database: int = 0
    tls: ssl.SSLContext | None = None

    def commands(self) -> list[bytes]:
        """AUTH and SELECT, as far as they are needed."""
        commands = []
        if self.password is not None:
            user = [self.username.encode()] if self.username else []
            commands.append(command(b"AUTH", *user, self.password.get_secret_value().encode()))
        if self.database:
            commands.append(command(b"SELECT", b"%d" % self.database))
        return commands

    def secrets(self) -> list[str]:
        """What must not be repeated, whatever a server says."""
        return [self.password.get_secret_value()] if self.password is not None else []


class LoginError(ConnectionError):
    """The server did not accept a login; its own words are the message."""


async def log_in(address: Address, login: Login) -> RESPConnection:
    """Return a connection that is ready for blocks.

    Raises:
        OSError: Not reachable, or TLS failed (`ssl.SSLError`), or a `LoginError`.
    """
    connection = RESPConnection(await Socket.connect(address, login.tls))
    try:
        for each in login.commands():
            _check(await connection.say(each), login)
    except BaseException:  # cancelled, too: nobody else knows of the connection
        connection.close()
        raise
    return connection


def _check(said: str, login: Login) -> None:
    if not said.startswith("+"):
        said = scrubbed(said, login.secrets())
        raise LoginError(said[1:]) if said.startswith("-") else ProtocolError(f"it says {said[:80]!r}")


class Pool:
    """At most ``size`` connections to one server: lent one call each, kept while they are whole."""

    def __init__(self, address: Address, login: Login, size: int, connect_timeout_s: float) -> None:
        self.address = address
        self._is_asking = False
        self._login = login
        self._connect_timeout_s = connect_timeout_s
        self._room = asyncio.Semaphore(size)
        self._idle: list[RESPConnection] = []
        self._lent: set[RESPConnection] = set()
        self._connecting: set[asyncio.Timeout] = set()
        self._closed = asyncio.Event()  # which those `asking` share

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[RESPConnection]:
        """Lend a connection; whatever is raised inside, cancellation included, closes it.

        Raises:
            OSError: As `log_in`; also `TimeoutError`, or it is closed.
        """
        async with self._room:
            connection = self._take_idle() or await self._connect()
            connection.is_asking = self._is_asking
            self._lent.add(connection)
            try:
                yield connection
            except BaseException:  # cancelled, too: half of an answer may be left in it
                connection.close()
                raise
            finally:
                self._lent.discard(connection)
            self._idle.append(connection)

    def asking(self) -> "Pool":
        """Return the same connections, for keys of a slot that a node is just getting."""
        other = copy.copy(self)
        other._is_asking = True  # noqa: SLF001 - of the same class
        return other

    async def _connect(self) -> RESPConnection:
        try:
            self._check_open()
            async with asyncio.timeout(self._connect_timeout_s) as limit:
                self._connecting.add(limit)
                try:
                    return await log_in(self.address, self._login)
                finally:
                    self._connecting.discard(limit)
        except TimeoutError:
            self._check_open()
            raise

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise ConnectionAbortedError("closed meanwhile")

    def _take_idle(self) -> RESPConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_clean():
                return connection
            connection.close()
        return None

    def drop_idle(self) -> None:
        """Close those that nobody uses: the next call makes a new one."""
        while self._idle:
            self._idle.pop().close()

    def close(self) -> None:
        """Close all, those in use too: their calls end with an error, as do those that wait for one."""
        self._closed.set()
        self.drop_idle()
        for limit in self._connecting:
            if not limit.expired():
                limit.reschedule(0.0)
        for connection in self._lent:
            connection.close()
