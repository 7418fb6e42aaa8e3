"""kill -9 of clients and of the server, at random moments under traffic; `make kills` does it 200 and 50 times.

Two clients store prompts and load them again, byte by byte, and say what is settled on the disk. After each death all
that is said has to be there, right. The first server outlives half of the clients, and the last one is there at the
end: each then holds nothing for anyone, whatever has died.
"""

import asyncio
import signal
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.host.processes import Started, prompt_of, server, started, storing_client
from tests.host.test_deaths import attached_at, facts, until_clean, until_found
from tests.support.any_layout import AnyEngine
from tests.support.caches import until

CLIENTS_A_SERVER = 2
"""Of the second half, that are killed before the server is."""
REMEMBERED = 32
"""Prompts that were settled last: the disk has room for many more."""


class Traffic:
    """A server and its clients, of which one after another is killed."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self.settled: deque[int] = deque(maxlen=REMEMBERED)
        self.num_settled = 0
        self._stack = stack
        self._num_started = 0
        self._num_descriptors = 0  # of a server that holds nothing for anyone

    async def serve(self) -> Started:
        """Start a server."""
        one = self._stack.enter_context(started(server, self.path))
        assert await asyncio.to_thread(one.hear) == "ready"
        return one

    async def attach(self) -> Started:
        """Start a client, and wait until it is at work."""
        self._num_started += 1
        one = self._stack.enter_context(started(storing_client, self.path / "kv.sock", self._num_started << 12))
        self.listen(one, await asyncio.to_thread(one.hear))
        return one

    def listen(self, one: Started, *said: int) -> None:
        """Take down what a client has said."""
        seeds = [*said, *one.heard()]
        self.settled.extend(seeds)
        self.num_settled += len(seeds)

    async def attach_anew(self, clients: Sequence[Started]) -> list[Started]:
        """Kill these, see that the server holds no more for them than after the first kill, and attach two."""
        for one in clients:
            one.kill()
            self.listen(one)
        if clients:
            await until_clean(self.path)
            self._num_descriptors = self._num_descriptors or facts(self.path)["num_descriptors"]
            await until(lambda: facts(self.path)["num_descriptors"] <= self._num_descriptors)
        return [await self.attach() for _ in range(2)]

    async def check(self) -> None:
        """Load all that was settled lately, byte by byte."""
        engine = AnyEngine()
        async with attached_at(self.path, engine, timeout_s=60.0) as kv:
            for seed in self.settled:
                keys = prompt_of(seed)
                await until_found(kv, keys)
                engine.wipe()
                loaded = await kv.load(keys, engine.spec(range(8)))
                assert loaded.num_blocks == engine.count_right(keys, range(8)) == 8, f"prompt {seed}"


@pytest.mark.slow
async def test_kills_at_random_moments(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Every byte that is served is right, what was settled is there, and no slot, lease or descriptor leaks."""
    num_kills = request.config.getoption("--kills")
    rng = np.random.default_rng(num_kills)
    with ExitStack() as stack:
        traffic = Traffic(tmp_path, stack)
        serving = await traffic.serve()
        clients = await traffic.attach_anew(await traffic.attach_anew([]))
        for number in range(1, num_kills + 1):
            at = int(rng.integers(2))
            traffic.listen(clients[at], await asyncio.to_thread(clients[at].hear))
            await asyncio.sleep(rng.uniform(0.0, 0.1))  # at any moment of what it does
            clients[at].kill()
            if number > num_kills // 2 and number % CLIENTS_A_SERVER == 0:
                serving.kill()
                serving = await traffic.serve()
            clients[1 - at].send(signal.SIGSTOP)  # else it would store until the disk evicts what is looked for
            for one in clients:
                traffic.listen(one)
            await traffic.check()
            clients[1 - at].send(signal.SIGCONT)
            clients[at] = await traffic.attach()
            if number == num_kills // 2:
                clients = await traffic.attach_anew(clients)
        await traffic.attach_anew(clients)
    num_servers = num_kills // 2 // CLIENTS_A_SERVER
    sys.stdout.write(f"{num_kills} clients and {num_servers} servers killed; {traffic.num_settled} prompts settled\n")
