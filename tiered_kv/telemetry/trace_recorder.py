"""Records which blocks a running cache is asked for, as a trace that ``tiered-kv replay`` reads.

Nothing of prompts is in it: block hashes are hashed again, keyed by a secret that is drawn for the recording and kept
nowhere, so that equal blocks of one recording are equal and nothing else can be told.

A call of the cache only appends to a queue; a thread of the recorder does the rest. What comes faster than it can be
written is left out and counted.
"""

import asyncio
import gzip
import hashlib
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Final, Literal

import numpy as np

from tiered_kv.traces import Request
from tiered_kv.values.errors import ConfigurationError, in_words
from tiered_kv.values.events import Emit, TraceEnded, TraceFailed
from tiered_kv.values.keys import BlockKeys

Call = Literal["lookup", "load", "store"]

_MOST_QUEUED: Final = 1 << 16
"""Blocks of calls that wait for the thread: 32 bytes each."""
_MOST_ASKED: Final = 1 << 16
"""Blocks of requests of which it is remembered that they were asked for."""
_SAME_LOOKUP_S: Final = 1.0
"""A lookup that is repeated within this time is the same request: a scheduler asks until there is room."""
_WRITE_EVERY_S: Final = 0.25
_FLUSH_EVERY_S: Final = 10.0
"""A process that is killed loses no more than this; gzip packs a little worse for it."""
_CLOSE_WITHIN_S: Final = 5.0
_DIGEST_BYTES: Final = 8


class TraceRecorder:
    """Writes the requests of one cache to a file, in the format of Mooncake's traces; gzip if it ends in ``.gz``.

    A request is a lookup; or a load or store of blocks that no lookup or load has just asked for. A file that is there
    is overwritten.
    """

    def __init__(self, path: str | os.PathLike[str], *, most_bytes: int = 1 << 30) -> None:
        """Make a recorder; nothing is opened yet.

        Args:
            path: The file.
            most_bytes: Of lines, before they are packed. With more the recording ends.

        Raises:
            ConfigurationError: ``most_bytes`` is not positive.
        """
        if most_bytes < 1:
            raise ConfigurationError(f"most_bytes must be positive, got {most_bytes}")
        self.path = Path(path)
        self._most_bytes = most_bytes
        self._calls: deque[tuple[Call, float, BlockKeys]] = deque()
        self._num_queued = 0
        self._num_dropped = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_claimed = self._is_ending = self._is_over = False
        self._began = 0.0
        self._tell: Callable[[TraceEnded | TraceFailed], None] = lambda _: None
        self._ended: asyncio.Event | None = None

    def note(self, call: Call, keys: BlockKeys) -> None:
        """Take note of a call, from any thread; of a model with several KV groups only group 0 is recorded."""
        if self._is_over or keys.group or not len(keys):
            return
        with self._lock:  # held for a few additions, by every thread
            if self._num_queued + len(keys) > _MOST_QUEUED:
                self._num_dropped += 1
                return
            self._num_queued += len(keys)
            self._calls.append((call, time.monotonic(), keys))

    def claim(self) -> None:
        """Become the recorder of one cache; called by it before it opens.

        Raises:
            ConfigurationError: It is another cache's.
        """
        if self._is_claimed:
            raise ConfigurationError("this TraceRecorder is another cache's: make one for each")
        self._is_claimed = True

    def begin(self, emit: Emit) -> None:
        """Record from now on; called by the cache that has opened, on its event loop."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        self._ended = ended

        def tell(event: TraceEnded | TraceFailed) -> None:
            for call in (partial(emit, event), ended.set):
                try:
                    loop.call_soon_threadsafe(call)
                except RuntimeError:
                    return  # the loop is closed: nobody listens

        self._tell, self._began = tell, time.monotonic()
        try:
            threading.Thread(target=self._run, name="tiered_kv-trace", daemon=True).start()
        except RuntimeError as error:  # the system gives no more: the cache works without its recording
            self._end(TraceFailed(str(self.path), 0, str(error)))

    async def end(self) -> None:
        """Write what is queued, and close the file; not waited for longer than five seconds."""
        self._is_ending = True
        self._wake.set()
        if self._ended is not None:
            try:
                async with asyncio.timeout(_CLOSE_WITHIN_S):
                    await self._ended.wait()
            except TimeoutError:
                return  # a file system that hangs: the thread is a daemon

    # In the recorder's own thread.

    def _run(self) -> None:
        num_requests = 0
        try:
            with _opened(self.path) as file:
                for line in self._lines(file.flush):
                    file.write(line)
                    num_requests += 1
        except OSError as error:
            self._end(TraceFailed(str(self.path), num_requests, error.strerror or str(error)))
        except BaseException as error:  # noqa: BLE001 - a recorder that fails must not leave a queue that grows
            self._end(TraceFailed(str(self.path), num_requests, in_words(error)))
        else:
            self._end(TraceEnded(str(self.path), num_requests, self._num_dropped))

    def _end(self, event: TraceEnded | TraceFailed) -> None:
        self._is_over = True
        self._calls.clear()
        self._tell(event)

    def _lines(self, flush: Callable[[], object]) -> Iterator[bytes]:
        requests, num_bytes = _Requests(), 0
        flushed_bytes, flushed_at = 0, time.monotonic()
        while True:
            is_last = self._is_ending
            for _ in range(len(self._calls)):
                with self._lock:
                    call, at, keys = self._calls.popleft()
                    self._num_queued -= len(keys)
                if (ids := requests.take(call, at, keys)) is None:
                    continue
                at_s, num_tokens = max(0.0, at - self._began), len(ids) * keys.block_size
                line = Request(at_s, np.array(ids, np.int64), num_tokens).line(keys.block_size)
                num_bytes += len(line)
                if num_bytes > self._most_bytes:
                    return
                yield line
            if is_last:
                return
            if num_bytes > flushed_bytes and time.monotonic() - flushed_at >= _FLUSH_EVERY_S:
                flush()
                flushed_bytes, flushed_at = num_bytes, time.monotonic()
            self._wake.wait(_WRITE_EVERY_S)


class _Requests:
    """Tells calls that begin a request from calls that go on with one."""

    def __init__(self) -> None:
        self._secret = os.urandom(32)
        self._asked: OrderedDict[int, int] = OrderedDict()  # block to how many lookups may still be followed by a load
        self._lookups: OrderedDict[int, float] = OrderedDict()  # last block, which names the whole, to when

    def take(self, call: Call, at: float, keys: BlockKeys) -> list[int] | None:
        """Return the blocks of a request, as numbers, or None if the call belongs to an earlier one."""
        ids = [self._number(keys[position]) for position in range(len(keys))]
        if call == "lookup":
            last, self._lookups[ids[-1]] = self._lookups.get(ids[-1]), at
            self._lookups.move_to_end(ids[-1])
            _cut(self._lookups)
            if last is not None and at - last < _SAME_LOOKUP_S:
                return None
            self._ask(ids, 1)
            return ids
        self._lookups.pop(ids[-1], None)  # the request that was looked up is being served
        if call == "load":
            if self._asked.get(ids[-1], 0):
                self._ask(ids, -1)
                return None
        elif ids[0] in self._asked or keys.start:
            return None  # computed for a request, or what was generated after it
        self._ask(ids, 0)
        return ids

    def _ask(self, ids: list[int], credit: int) -> None:
        for each in ids:
            self._asked[each] = max(0, self._asked.get(each, 0) + credit)
            self._asked.move_to_end(each)
        _cut(self._asked)

    def _number(self, block: bytes) -> int:
        digest = hashlib.blake2b(block, digest_size=_DIGEST_BYTES, key=self._secret).digest()
        return int.from_bytes(digest, "little") >> 1  # as a trace's ids are: below 2**63


def _cut(remembered: "OrderedDict[int, int] | OrderedDict[int, float]") -> None:
    while len(remembered) > _MOST_ASKED:
        remembered.popitem(last=False)


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for nobody else to read, gzip by its name."""
    raw = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")
    with raw:
        if path.suffix != ".gz":
            yield raw
            return
        with gzip.GzipFile(fileobj=raw, mode="wb", filename="") as packed:
            yield packed  # type: ignore[misc] # it writes bytes, which is all that is asked
