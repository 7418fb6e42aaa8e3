"""Rules of what goes wrong outside of the cache: calls that fail, hang or lie, copies that fail, bytes that change."""

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.cache.model.machine import Machine
from tests.cache.model.world import VirtualWorld
from tests.support.backends import Act, only
from tiered_kv import BackendUnavailableError, Outcome

ACTS = st.integers(0, 12)


class PanicError(BaseException):
    """What a client library in another language may raise: no `Exception`."""


ERRORS: list[Callable[[], BaseException]] = [
    lambda: BackendUnavailableError("not now"),
    lambda: BackendUnavailableError("not now"),
    lambda: RuntimeError("a driver's own"),
    asyncio.CancelledError,
    PanicError,
    StopAsyncIteration,
    SystemExit,
]
LIES: list[Callable[[Any], Any]] = [
    only(0, Outcome.FAILED),
    only(0, Outcome.MISS),
    only(0, Outcome.CORRUPT),
    only(0, Outcome.REFUSED),
    lambda outcomes: outcomes[:-1],
    lambda outcomes: [*outcomes, Outcome.MISS],
    lambda outcomes: ["hit" for _ in outcomes],
    lambda _: None,
    lambda _: 7,
]
"""That less went well, for another number of blocks, or nothing that could be an answer."""


class Corruption(Machine):
    """What can happen to any medium."""

    @rule(place=st.integers(0, 100))
    def corrupt(self, place: int) -> None:
        """Change bytes of what is stored."""
        self.world.was_faulty = True
        self.world.corrupt(place)


class Faults(Corruption):
    """What can happen to media that do as they are told."""

    @precondition(lambda self: self.world.acts)
    @rule(which=ACTS, num_calls=st.integers(1, 4), error=st.sampled_from(ERRORS))
    def fail(self, which: int, num_calls: int, error: Callable[[], BaseException]) -> None:
        """Have calls raise what they may raise, or what nobody expects."""
        for _ in range(num_calls):
            self._act(which).fail_next(error())

    @precondition(lambda self: self.world.acts)
    @rule(which=ACTS)
    def hang(self, which: int) -> None:
        """Have calls hang until they are released, or the cache has gone on without them."""
        self._act(which).hold()

    @precondition(lambda self: self.world.acts)
    @rule(which=ACTS, lie=st.sampled_from(LIES))
    def lie(self, which: int, lie: Callable[[Any], Any]) -> None:
        """Have a call answer what is not so."""
        name, _ = self._named(which)
        if name.endswith(("lookup", "read", "write")):
            self._act(which).change_next(lie)

    @rule()
    def fail_copy(self) -> None:
        """Have a copy fail."""
        assert isinstance(self.world, VirtualWorld)
        self.world.was_faulty = True
        self.world.device.fail_next(RuntimeError("of the device"))

    @rule(seconds=st.sampled_from([0.3, 2.0, 30.0, 200.0]), releases=st.booleans())
    def pass_time(self, seconds: float, *, releases: bool) -> None:
        """Let time pass; perhaps what hangs goes on, and nothing more goes wrong."""
        if releases:
            self.world.release()
        self.run(asyncio.sleep(seconds), seconds)

    def _named(self, which: int) -> tuple[str, Act]:
        acts = list(self.world.acts.items())
        return acts[which % len(acts)]

    def _act(self, which: int) -> Act:
        self.world.was_faulty = True
        return self._named(which)[1]
