"""The sockets that routers listen to, and the one thread that owns them and the books.

Work is handed to the thread as functions that yield batches. It sends each batch once to all, keeps the newest for
those that lost one, and tells everything anew, on the socket that all hear, when a router joins or asks for what is
not kept any more. No send waits for a router: what one does not read in time is lost to it, and it sees the gap.
"""

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

import zmq

from tiered_kv.telemetry.kv_event_values import SocketSettings
from tiered_kv.telemetry.router_books import END, Batch, RouterBooks, encode
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.log import Seldom

Work = Callable[[], Iterable[Batch]]

_LINGER_MS: Final = 500
_AT_ONCE: Final = 64
"""Pieces of work, and requests, between two looks at the sockets."""
_SEQUENCE_BYTES: Final = 8
_MOST_PORT: Final = 65_535


class RouterSocket:
    """Sends batches to routers from a daemon thread. `put` and `stop` may be called from any thread.

    Attributes:
        endpoint, replay_endpoint: Where it is, with the port that a ``*`` became.
        num_batches: Batches sent, which is the next sequence number.
        num_snapshots: How often all was told anew.
    """

    def __init__(self, books: RouterBooks, settings: SocketSettings) -> None:
        """Open the sockets.

        Raises:
            ConfigurationError: An endpoint is none, or is taken.
        """
        self.num_batches = self.num_snapshots = 0
        self._books, self._settings = books, settings
        self._topic = settings.topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._work: deque[Work] = deque()
        self._is_stopping = self._is_snapshot_wanted = False
        self._next_snapshot = 0.0
        self._seldom = Seldom()
        self._context = zmq.Context()
        try:
            self._pub = self._context.socket(zmq.XPUB)  # to a subscriber a PUB, which is told when one joins
            self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)  # of each, not of the first alone
            self._pub.setsockopt(zmq.SNDHWM, settings.high_water_mark)
            self.endpoint = _attach(self._pub, settings.endpoint)
            self._replay = self._context.socket(zmq.ROUTER)
            self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # says when a message would be dropped
            # A whole answer, behind one that was read: of half of the mark ZMQ does not say so at once.
            self._replay.setsockopt(zmq.SNDHWM, 2 * settings.buffer_steps + 16)
            self.replay_endpoint = settings.replay_endpoint and _attach(self._replay, settings.replay_endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()  # nobody writes to a number that is another file's by now
        self._is_awake = True
        self._thread = threading.Thread(target=self._run, name="tiered-kv-events", daemon=True)
        self._on_end: Callable[[], None] = lambda: None

    def start(self, on_end: Callable[[], None]) -> None:
        """Start the thread; it calls ``on_end`` when it has closed the sockets."""
        self._on_end = on_end
        try:
            self._thread.start()
        except BaseException:  # the system gives none: what would close all this is the thread
            self._close(linger_ms=0)
            raise

    def put(self, work: Work) -> None:
        """Have this done next, after what was put before. Returns at once; how much waits is the caller's to bound."""
        self._work.append(work)
        self._rouse()

    def stop(self) -> None:
        """Tell routers that all is gone, and close. What waits is not done any more."""
        self._is_stopping = True
        self._rouse()

    def _rouse(self) -> None:
        with self._wake_lock:
            if self._is_awake:
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._wake, zmq.POLLIN)
            poller.register(self._pub, zmq.POLLIN)
            poller.register(self._replay, zmq.POLLIN)
            while not self._is_stopping:
                ready = dict(poller.poll(self._wait_ms()))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                self._guarded(self._turn)
            self._guarded(lambda: self._send(self._books.nothing()))
        finally:
            self._close(linger_ms=_LINGER_MS)
            self._on_end()

    def _close(self, *, linger_ms: int) -> None:
        with self._wake_lock:
            self._is_awake = False
            os.close(self._wake)
        self._context.destroy(linger=linger_ms)

    def _wait_ms(self) -> int | None:
        if self._work:
            return 0
        return 1 + int(1000 * max(0.0, self._next_snapshot - time.monotonic())) if self._is_snapshot_wanted else None

    def _turn(self) -> None:
        self._welcome()
        self._answer()
        for _ in range(min(_AT_ONCE, len(self._work))):
            self._send(self._work.popleft()())
        if self._is_snapshot_wanted and time.monotonic() >= self._next_snapshot:
            self._is_snapshot_wanted = False
            try:
                self._send(self._books.everything())
                self.num_snapshots += 1
            finally:  # one that fails is wanted again, as late as any other
                self._next_snapshot = time.monotonic() + self._settings.snapshot_every_s

    def _guarded(self, act: Callable[[], None]) -> None:
        """Go on whatever happens: after an error routers are told everything anew."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - a fault of ours must not end the stream
            self._seldom.failed("KV events", error)
            self._is_snapshot_wanted = True

    def _send(self, batches: Iterable[Batch]) -> None:
        settings = self._settings
        for batch in batches:
            sequence, self.num_batches = self.num_batches, self.num_batches + 1
            payload = encode(time.time(), batch, settings.data_parallel_rank, settings.form)
            self._keep(sequence, payload)
            with suppress(zmq.Again):  # a full queue: the router will see the gap
                message = (self._topic, sequence.to_bytes(_SEQUENCE_BYTES, "big"), payload)
                self._pub.send_multipart(message, zmq.NOBLOCK)

    def _keep(self, sequence: int, payload: bytes) -> None:
        self._kept.append((sequence, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._settings.buffer_steps or self._kept_bytes > self._settings.buffer_bytes:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _welcome(self) -> None:
        """Tell everything to a router that has just joined, which all others hear too."""
        for _ in range(_AT_ONCE):
            try:
                said = self._pub.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if said[:1] == b"\1" and self._topic.startswith(said[1:]):
                self._is_snapshot_wanted = True

    def _answer(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                frames = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 3 and len(frames[2]) == _SEQUENCE_BYTES:
                self._replay_from(int.from_bytes(frames[2], "big"), frames[:2])

    def _replay_from(self, start: int, address: Sequence[bytes]) -> None:
        """Send what is kept from a sequence number on, then the mark of the end."""
        oldest = self._kept[0][0] if self._kept else self.num_batches
        if start < oldest:
            self._is_snapshot_wanted = True  # what was asked for is gone
        with suppress(zmq.ZMQError):  # it does not read, or is gone: without the mark it will ask again
            for sequence, payload in self._kept:
                if sequence >= start:
                    message = (*address, sequence.to_bytes(_SEQUENCE_BYTES, "big"), payload)
                    self._replay.send_multipart(message, zmq.NOBLOCK)
            self._replay.send_multipart((*address, END, b""), zmq.NOBLOCK)


def _attach(socket: "zmq.Socket[bytes]", endpoint: str) -> str:
    """Bind or connect, as vLLM decides it: ``*``, ``::``, ``ipc://`` and ``inproc://`` are bound."""
    port = endpoint.rpartition(":")[2]  # ZMQ takes another one for a port that there is not
    if endpoint.startswith("tcp://") and re.fullmatch(r"-?\d+", port) and not 0 <= int(port) <= _MOST_PORT:
        raise ConfigurationError(f"KV events cannot use {endpoint!r}: a port is at most {_MOST_PORT}")
    is_bound = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
    try:
        (socket.bind if is_bound else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        what = "listen on" if is_bound else "connect to"
        raise ConfigurationError(f"KV events cannot {what} {endpoint!r}: {error}") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
