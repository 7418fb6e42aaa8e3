"""A client's way to whatever server listens on a socket: it attaches, asks, and attaches again when one is gone.

While no server is there, or it does not answer in time, questions have no answer; nothing raises for that.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from tiered_kv.errors import BackendUnavailableError, ClosedError, ConfigurationError
from tiered_kv.host import handshake, wire
from tiered_kv.host.attachment import Attachment
from tiered_kv.host.attempts import FIRST_PAUSE_S, LONGEST_PAUSE_S, Attempts, Begun
from tiered_kv.host.far_side import FarSide
from tiered_kv.host.opening import Attach, Attached
from tiered_kv.host.questions import Answer, Failed, Stats
from tiered_kv.log import log
from tiered_kv.loop_calls import LoopCalls
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.transfers.handles import Handle
from tiered_kv.transfers.submissions import Ticket
from tiered_kv.validation import check_asyncio

_PROBE_S: Final = 0.5
"""How often a server that did not answer in time is asked whether it is there again."""
_NOW_S: Final = 1.0
"""What a call that blocks its thread may take at most."""


class Follower(Protocol):
    """What has to do something whenever a server is there anew."""

    def attached(self, there: Attachment) -> None:
        """A server is there."""

    def close(self) -> None:
        """The client closes: what waits for a server waits no more."""


class Connection:
    """One client's. For the event loop's thread, but for what says otherwise.

    Attributes:
        path: Of the server's socket.
        timeout_s: What a question without a time of its own may take.
        there: The attachment to the server that is there, if one is. Any thread may look.
    """

    def __init__(
        self,
        path: str,
        opening: Attach,
        make_side: Callable[[Attached, LoopCalls], FarSide],
        timeout_s: float,
    ) -> None:
        """Prepare it; `open` comes next.

        Args:
            path: See the attribute.
            opening: Who attaches.
            make_side: Makes what the client has in this process, when the first server says how it keeps blocks.
            timeout_s: See the attribute.
        """
        self.path = path
        self.timeout_s = timeout_s
        self.there: Attachment | None = None
        self._opening = opening
        self._make_side = make_side
        self._here: FarSide | None = None
        self._is_opening = False
        self._closing: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._tasks = Tasks()
        self._followers: list[Follower] = []

    def follow(self, follower: Follower) -> None:
        """Have it told of each server from now on; on the event loop."""
        self._followers.append(follower)

    @property
    def load_timeout_s(self) -> float:
        """What a load may take that has no time of its own, as the server says; nothing while none is there.

        Any thread may ask.
        """
        there = self.there  # which the event loop may change meanwhile
        return there.attached.load_timeout_s if there is not None else 0.0

    # Questions.

    def here(self, *, anywhere: bool = False) -> FarSide:
        """Return this process's side, to a call on its event loop, or from ``anywhere``.

        Raises:
            ClosedError: It is not open yet, or not any more.
            ConfigurationError: This is another thread or event loop.
        """
        if self._here is None or (self._is_opening and self.there is None):
            raise ClosedError("this TieredKV is not open yet: use it with 'async with'")
        if self._closing is not None:
            raise ClosedError("this TieredKV is closed")
        self._here.check_loop(anywhere=anywhere)
        return self._here

    def send(self, message: wire.Message) -> None:
        """Say what has no answer."""
        if self.there is not None:
            self.there.send(message)

    async def ask(self, make: Callable[[int], wire.Message], timeout_s: float | None = None) -> Answer | None:
        """Ask the server; None if it is away. What is wrong with the call raises."""
        self.here()
        if self.there is None:
            return None
        return _raised(await self.there.ask(make, self.timeout_s if timeout_s is None else timeout_s))

    def ask_now(self, make: Callable[[int], wire.Message], *, anywhere: bool = False) -> Answer | None:
        """`ask` that blocks its thread, a second at most; any thread may call it from ``anywhere``."""
        self.here(anywhere=anywhere)
        there = self.there
        if there is None:
            return None
        answer = there.ask_now(make, min(self.timeout_s, _NOW_S))
        if answer is None:
            there.is_silent = True
        return _raised(answer)

    def poll(self, timeout_s: float) -> list[tuple[Ticket[Any], Any]]:
        """Return the results of submissions that have ended, in any thread, after the end too."""
        return self._here.submissions.poll(timeout_s) if self._here else []

    # Opening and closing.

    async def open(self) -> None:
        """Attach.

        Raises:
            ConfigurationError: The server refuses this client, or is of another version.
            BackendUnavailableError: There is none, within the time of a call.
        """
        if self._here is not None or self._is_opening:
            raise ClosedError("a TieredKV is opened once; make another")
        check_asyncio()
        self._is_opening = True
        loop_calls = LoopCalls(asyncio.get_running_loop())
        self._attempts = Attempts(self.path, self._opening, self.timeout_s, loop_calls)
        try:
            begun = await self._attempts.begin_in_time()
            try:
                self._here = self._make_side(begun[1], loop_calls)
            except BaseException:
                handshake.give_back(begun[0], begun[2])
                raise
            await self._attach(self._here, begun)
        except BaseException:
            try:
                await self._end()
            finally:
                self._here = self._closing = None  # it may be opened again
            raise
        finally:
            self._is_opening = False
        self._tasks.keep_running(partial(self._stay_attached, self._here), "stay attached")

    async def aclose(self) -> None:
        """Say goodbye, once no copy is under way."""
        here = self._here
        if here is None or (self._closing is not None and self._closing.done()):
            return
        here.check_loop()
        await self._end()

    async def _end(self) -> None:
        """End all that there is, in a task of its own: a cancellation is raised when that is done."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(), name="close")
        await Handle(self._closing, lambda: None)

    async def _close(self) -> None:
        here = self._here
        if here is not None:
            here.submissions.close()
        for follower in self._followers:
            follower.close()
        await self._tasks.aclose(0.0)
        self._attempts.close()
        if self.there is not None:
            for transfer in list(self.there.transfers.values()):
                transfer.lose()  # what is being copied is waited for with the device
            self.there.end()
        if here is not None:
            await here.tasks.aclose(1.0)
            await here.lifetime.aclose()

    # Attaching.

    async def _attach(self, here: FarSide, begun: Begun) -> None:
        connection, attached, descriptors = begun
        try:
            here.check_server(attached)
        except ConfigurationError:
            handshake.give_back(connection, descriptors)
            raise
        connection.settimeout(0.0)
        there = Attachment(self.path, connection, attached, descriptors, here.device, self._lost, self.timeout_s)
        await there.start()
        self.there = there
        for follower in self._followers:
            follower.attached(there)

    async def _stay_attached(self, here: FarSide) -> None:
        """Attach again whenever the server is gone, and ask one that is silent whether it is there."""
        pause_s = FIRST_PAUSE_S
        while True:
            if self.there is None:
                try:
                    await self._attach(here, await self._attempts.begin())
                    pause_s = FIRST_PAUSE_S
                    log("info", "host.attached_again", path=self.path)
                except (BackendUnavailableError, ConfigurationError) as error:
                    if isinstance(error, ConfigurationError):
                        log("error", "host.not_attached", path=self.path, error=str(error))
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            if self.there.is_silent:
                self.there.send(Stats(self.there.number()))  # whatever comes ends the silence
            self._changed.clear()
            try:
                async with asyncio.timeout(_PROBE_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _lost(self, there: Attachment) -> None:
        if self.there is there:
            self.there = None
            self._changed.set()
            if self._closing is None:
                log("warning", "host.server_lost", path=self.path)


def _raised(answer: Answer | None) -> Answer | None:
    """Raise what the caller has done wrong; a server that cannot answer is one that is away."""
    if isinstance(answer, Failed):
        error = wire.error_of(answer.kind, answer.why)
        if isinstance(error, ConfigurationError):
            raise error
        return None
    return answer
