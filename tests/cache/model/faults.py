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

ACTS = st.integers(0, 9)
LIES: list[Callable[[list[Outcome]], Any]] = [
    only(0, Outcome.FAILED),
    only(0, Outcome.MISS),
    only(0, Outcome.CORRUPT),
    lambda outcomes: outcomes[:-1],
]


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
    @rule(which=ACTS, num_calls=st.integers(1, 4), is_known=st.booleans())
    def fail(self, which: int, num_calls: int, *, is_known: bool) -> None:
        """Have calls raise what they may raise, or what nobody expects."""
        for _ in range(num_calls):
            error = BackendUnavailableError("not now") if is_known else RuntimeError("a driver's own")
            self._act(which).fail_next(error)

    @precondition(lambda self: self.world.acts)
    @rule(which=ACTS)
    def hang(self, which: int) -> None:
        """Have calls hang until they are released, or the cache has gone on without them."""
        self._act(which).hold()

    @precondition(lambda self: self.world.acts)
    @rule(which=ACTS, lie=st.sampled_from(LIES))
    def lie(self, which: int, lie: Callable[[list[Outcome]], Any]) -> None:
        """Have a call answer that less went well, or for fewer blocks than it was asked."""
        name, _ = self._named(which)
        if name.endswith(("read", "write")):
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
