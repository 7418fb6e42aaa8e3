"""Block bodies over the Redis protocol (RESP2), between a socket and our buffers with no copy in between.

Only what blocks need: GET, SET and questions that a number answers, in pipelines. All else goes through redis-py,
beside it. Whatever a server sends, no more of it is kept than a block and a line; and the event loop gets its turn.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

from tiered_kv.backend import Block, Outcome
from tiered_kv_backends.resp_socket import Socket

Answer = Outcome | str
"""What became of one block, or the server's error, e.g. ``"OOM command not allowed ..."``."""

_AHEAD_BYTES = 8192
"""Received together with a reply's line: the record's header fits in."""
_ASKED_BYTES = 1 << 20
"""Bodies asked for and not yet arrived, two at least: with more, a server copies replies aside that it cannot send."""
_LONGEST_LINE = 4096
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


class Connection:
    """One authenticated socket for one call at a time. A call that does not end by itself leaves it to be closed.

    Attributes:
        is_asking: Whether each command is preceded by ASKING: the node is getting the slot, and has not got it whole.
    """

    def __init__(self, connected: Socket) -> None:
        self.is_asking = False
        self._socket = connected
        self._ahead = bytearray(_AHEAD_BYTES)
        self._start = self._end = 0  # of what was read ahead and is not yet used

    def is_clean(self) -> bool:
        """Say whether the server has said nothing since the last call ended, and has not left."""
        return self._start == self._end and self._socket.is_silent()

    def close(self) -> None:
        """Drop it at once. Nothing is read into anyone's buffers from here on."""
        self._socket.close()

    async def say(self, what: bytes) -> str:
        """Send a command; return the line that it is answered by.

        Raises:
            OSError: The connection is lost.
        """
        await self._socket.send([what])
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
        await self._socket.send(_sets(names, blocks, options, _ASKING if self.is_asking else b""))
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
        await self._socket.send([b"".join(self._asked(commands))])
        answers: list[int | str] = []
        async for line in self._lines(len(commands)):
            if line[:1] == b":" and line[1:].isdigit():
                answers.append(int(line[1:]))
            elif line[:1] == b"-":
                answers.append(_text(line))
            else:
                raise ProtocolError(f"no number but {_shown(line)}")
        return answers

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
        if line[:1] != b"$" or not line[1:].isdigit():
            raise ProtocolError(f"no bulk string but {_shown(line)}")
        num_bytes = int(line[1:])
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
        return line

    async def _read_ahead(self) -> None:
        """Receive what comes next, after what is there already."""
        rest = self._ahead[self._start : self._end]
        self._ahead[: len(rest)] = rest
        self._start, self._end = 0, len(rest)
        self._end += await self._socket.receive(memoryview(self._ahead)[self._end :])

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


def _shown(line: bytes) -> str:
    return repr(line[:80].decode(errors="replace"))


def _text(line: bytes) -> str:
    return line[1:].decode(errors="replace")
