"""kill -9 of clients, workers and the server, which hangs at times, at random moments under traffic of several models.

Two clients at a time store prompts and load them again, byte by byte, and say what is settled on the disk; so does a
planner whose two workers are processes of their own. After each death all that is said has to be there, right. The
first server outlives half of the clients, and the last one is there at the end: each then holds nothing for anyone,
whatever has died. Models that come and go leave it as it was. `make kills` has 100 clients killed, 25 servers, 33
planners and 67 workers, 20 hangs, and 300 models.
"""

import asyncio
import signal
import sys
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.host.processes import (
    MOST_UNHEARD,
    RANKS,
    Said,
    Started,
    planning_client,
    prompt_of,
    rank_worker,
    server,
    started,
    storing_client,
)
from tests.host.test_deaths import attached_at, facts, until_clean, until_found
from tests.support.any_layout import AnyEngine, prompt
from tests.support.caches import until
from tests.support.serving import attached, models_in
from tiered_kv import ModelIdentity

CLIENTS_A_SERVER = 2
"""Of the second half, that are killed before the server is."""
A_HANG = 5
"""Kills of clients to a hang of the server."""
DISK = "64MiB"
"""No model fills its part of it with what nobody has heard of. Who does borrows more, and loses that again."""
MODELS = tuple(ModelIdentity(name, weights="w0") for name in ("one", "two", "three"))
"""Of one client after the other."""
SPLIT = ModelIdentity("split", weights="w0")
"""Of the planner, whose workers have a part of the heads each."""
REMEMBERED = 32
"""Prompts that were settled last, and stay."""
MOST_GROWTH_BYTES = 32 << 20
"""What memory may differ by that a process has: allocators keep some of what they were given back."""


class Traffic:
    """A server and its clients, of which one after another is killed."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self.settled: deque[tuple[ModelIdentity, int]] = deque()
        self._model_of: dict[int, ModelIdentity] = {}  # by number of the process
        self.num_settled = 0
        self._stack = stack
        self._num_started = 0
        self._num_descriptors = 0  # of a server that holds nothing for anyone

    async def serve(self) -> Started:
        """Start a server."""
        one = self._stack.enter_context(started(server, self.path, disk=DISK, num_blocks=256))
        assert await asyncio.to_thread(one.hear) == "ready"
        return one

    async def attach(self) -> Started:
        """Start a client, and wait until it is at work."""
        self._num_started += 1
        model = MODELS[self._num_started % len(MODELS)]
        work = self.path / "kv.sock", self._num_started << 12, model, MOST_UNHEARD
        one = self._stack.enter_context(started(storing_client, *work))
        self._model_of[one.pid] = model
        self.listen(one, await asyncio.to_thread(one.hear))
        return one

    def listen(self, one: Started, *said: int) -> None:
        """Take down what a client has said."""
        seeds = [*said, *one.heard()]
        self.settled.extend((self._model_of[one.pid], seed) for seed in seeds)
        self.num_settled += len(seeds)
        one.say(len(seeds))

    async def attach_anew(self, clients: Sequence[Started]) -> list[Started]:
        """Kill these, see that the server holds no more for them than after the first kill, and attach two."""
        for one in clients:
            one.kill()
            self.listen(one)
        if clients:
            for model in (*MODELS, SPLIT):  # each has its descriptors from its first client on
                shard = RANKS if model is SPLIT else None
                async with attached(self.path / "kv.sock", model=model, shard=shard, timeout_s=60.0) as kv:
                    await until(lambda: kv.stats()["cpu"].doomed == 0)
            await until_clean(self.path)
            self._num_descriptors = self._num_descriptors or facts(self.path)["num_descriptors"]
            await until(lambda: facts(self.path)["num_descriptors"] <= self._num_descriptors)
        return [await self.attach() for _ in range(2)]

    async def check(self) -> None:
        """Load all that is settled, byte by byte; evict all but the latest: no disk is ever full."""
        engine = AnyEngine()
        for model in {model: None for model, _ in self.settled}:
            async with attached_at(self.path, engine, model=model, timeout_s=60.0) as kv:
                for seed in [seed for each, seed in self.settled if each == model]:
                    keys = prompt_of(seed)
                    await until_found(kv, keys)
                    engine.wipe()
                    loaded = await kv.load(keys, engine.spec(range(8)))
                    assert loaded.num_blocks == engine.count_right(keys, range(8)) == 8, f"prompt {seed}: {loaded}"
                for each, seed in list(self.settled)[:-REMEMBERED]:
                    if each == model:
                        await kv.evict(prompt_of(seed))
        while len(self.settled) > REMEMBERED:
            self.settled.popleft()


class Crew:
    """A planner and its workers, of which one after another is killed; the others go on with who takes its place."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.num_killed = Counter[str]()
        self._path = path
        self._stack = stack
        self._num_started = 0
        self._workers: dict[int, tuple[Started, Said]] = {}
        self._planner: Started | None = None
        self._settled: deque[int] = deque(maxlen=8)

    async def begin(self) -> None:
        """Start all of them, or those that have ended, and wait until they are at work."""
        for rank in set(range(len(RANKS))) - set(self._workers):
            path = self._path / f"worker{self._count()}"
            one = self._stack.enter_context(started(rank_worker, path, rank))
            assert await asyncio.to_thread(one.hear) == "ready"
            self._workers[rank] = one, (rank, one.pid, path)
            if self._planner is not None:
                self._planner.say(self._workers[rank][1])
        if self._planner is None:
            crew = [said for _, said in self._workers.values()]
            work = self._path / "kv.sock", self._count() << 12, SPLIT, list(self._settled), crew
            self._planner = self._stack.enter_context(started(planning_client, *work))
            self._settled.clear()  # it loads these, and evicts all before it says the first of its own
        said = [await asyncio.to_thread(self._planner.hear), *self._planner.heard()]
        self._settled.extend(said)
        self._planner.say(len(said))

    def kill(self, rank: int) -> None:
        """Kill the worker of a rank; if there is no such rank, the planner."""
        if (worker := self._workers.pop(rank, None)) is not None:
            worker[0].kill()
        elif self._planner is not None:
            self._planner.kill()
            self._settled.extend(self._planner.heard())
            self._planner = None
        self.num_killed["planners" if worker is None else "workers"] += 1

    def end(self) -> None:
        """Kill all."""
        for which in (-1, *self._workers):
            self.kill(which)

    def _count(self) -> int:
        self._num_started += 1
        return self._num_started


@pytest.mark.slow
async def test_kills_at_random_moments(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Every byte that is served is right, what was settled is there, and no slot, lease or descriptor leaks."""
    num_kills = request.config.getoption("--kills")
    rng = np.random.default_rng(num_kills)
    with ExitStack() as stack:
        traffic = Traffic(tmp_path, stack)
        serving = await traffic.serve()
        clients = await traffic.attach_anew(await traffic.attach_anew([]))
        crew = Crew(tmp_path, stack)
        await crew.begin()
        for number in range(1, num_kills + 1):
            at = int(rng.integers(2))
            traffic.listen(clients[at], await asyncio.to_thread(clients[at].hear))
            await asyncio.sleep(rng.uniform(0.0, 0.1))  # at any moment of what it does
            if number % A_HANG == 1:
                serving.send(signal.SIGSTOP)
                await asyncio.sleep(rng.uniform(0.0, 4.0))  # longer than a client's patience, or not
                serving.send(signal.SIGCONT)
            clients[at].kill()
            crew.kill(number % 3)  # of no rank: the planner
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
                crew.end()
                clients = await traffic.attach_anew(clients)
            await crew.begin()
        crew.end()
        await traffic.attach_anew(clients)
    num_servers, num_hangs = num_kills // 2 // CLIENTS_A_SERVER, -(-num_kills // A_HANG)
    sys.stdout.write(
        f"{num_kills} clients, {num_servers} servers, {crew.num_killed['planners']} planners and "
        f"{crew.num_killed['workers']} workers killed, {num_hangs} hangs; {traffic.num_settled} settled\n"
    )


def memory_of(pid: int) -> tuple[int, int, int]:
    """Say what a process has: bytes of its own, and of those it shares, and slabs."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    resident = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith("Rss")}
    num_slabs = Path(f"/proc/{pid}/maps").read_text().count("/memfd:tiered_kv-")
    return resident["RssAnon"], resident["RssShmem"], num_slabs


@pytest.mark.slow
async def test_a_server_is_as_it_was_when_models_have_come_and_gone(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """However many: its memory, what it shares of that, descriptors, and directories on its disk."""
    engine, keys, seen = AnyEngine(), prompt(16), list[tuple[int, int, int]]()
    num_models = 3 * request.config.getoption("--kills")
    with started(server, tmp_path, reclaim_after_s=0.05) as one:
        assert await asyncio.to_thread(one.hear) == "ready"
        for number in range(num_models):
            async with attached_at(
                tmp_path, engine, model=ModelIdentity(f"model {number}", weights="w0"), timeout_s=60.0
            ) as kv:
                await (await kv.store(keys, engine.fill(keys, range(16)))).settled()
                assert (await kv.load(keys, engine.spec(range(16, 32)))).num_blocks == 16
            await until(lambda: facts(tmp_path).get("shares") == [])
            seen.append(memory_of(one.pid))
        assert models_in(tmp_path / "disk") == []
    first, last = seen[len(seen) // 4], seen[-1]
    sys.stdout.write(f"{num_models} models have come and gone; anonymous, shared, slabs: from {first} to {last}\n")
    assert last[1:] == first[1:] == (0, 0)
    assert last[0] - first[0] < MOST_GROWTH_BYTES
