"""Clients and servers that are cancelled midway: nothing of them stays, in their process or in the server."""

import asyncio
import os
import socket
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.support.any_layout import LIMITS, MODEL, SMALL, AnyEngine, cpu, prompt
from tests.support.caches import Recorder, until
from tests.support.serving import attached, serving
from tiered_kv import ClosedError, Shard, TieredKV, TieredKVServer, TieredKVSettings
from tiered_kv.host import handshake, protocol, wire
from tiered_kv.host.protocol import Attach, Attached, Slab

KEYS = prompt(4)


class CancelledAt:
    """Awaits what another waits for, and has it cancelled as it begins to wait for the ``step``-th time."""

    def __init__(self, work: Any, step: int) -> None:  # noqa: ANN401 - any coroutine
        self._work = work
        self._step = step

    def __await__(self) -> Generator[Any, Any, None]:
        work, error = self._work.__await__(), None
        for number in count(1):
            try:
                waits_for = work.send(None) if error is None else work.throw(error)
            except StopIteration:
                return
            if number == self._step and (task := asyncio.current_task()) is not None:
                task.cancel()
            error = None
            try:
                yield waits_for
            except BaseException as caught:  # noqa: BLE001 - passed on, whatever it is
                error = caught


async def as_task(work: CancelledAt) -> None:
    """Be a task of its own."""
    await work


def held() -> tuple[int, int, int]:
    """Count what this process has: descriptors, slabs that are mapped, and threads of a client's."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:tiered_kv" in line]
    threads = [each for each in threading.enumerate() if each.name.startswith("tiered_kv-")]
    return sum(1 for _ in Path("/proc/self/fd").iterdir()), len(maps), len(threads)


async def until_gone(before: tuple[int, int, int]) -> None:
    """Wait until nothing more is held than before."""
    await until(lambda: is_no_more_than(before))


def is_no_more_than(before: tuple[int, int, int]) -> bool:
    """Say whether no more is held; less may be, where something earlier was about to end."""
    return all(now <= was for now, was in zip(held(), before, strict=True))


async def attach_and_store(path: Path) -> None:
    """Attach, store, and end."""
    engine = AnyEngine()
    async with attached(path, engine) as kv:
        await kv.store(KEYS, engine.fill(KEYS, range(4)))


@pytest.mark.both_loops
async def test_a_client_cancelled_wherever_it_waits(tmp_path: Path) -> None:
    """As it opens, as it works, and as it closes: descriptors, memory and threads go, and the server forgets it."""
    with serving(tmp_path, cpu(16)) as server:
        await attach_and_store(server.path)
        await until(lambda: server.health()["clients"] == [])
        before = held()
        for step in count(1):
            task = asyncio.ensure_future(as_task(CancelledAt(attach_and_store(server.path), step)))
            with suppress(asyncio.CancelledError):
                await task
            await until(lambda: server.health()["clients"] == [])
            await until_gone(before)
            if not task.cancelled():
                break
        assert step == 4  # to attach, for the store, and for the end


@contextmanager
def answering_late(path: Path, may_answer: threading.Event) -> Iterator[threading.Event]:
    """Have a server that lets a client attach when it may; yield what tells that it was asked."""
    asked = threading.Event()
    slab = Slab("slab", 1, 4096, 4096, 0, 0)
    answer = wire.frame(Attached(b"", (slab,), "none", (), (), 1.0, 1.0, 0, 4096, is_read_only=False))

    def answer_late() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(wire.greeting())
            connection.recv(wire.GREETING_BYTES)
            connection.recv(4096)
            asked.set()
            may_answer.wait()
            with suppress(OSError):
                socket.send_fds(connection, [answer], [listener.fileno()])

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        thread = threading.Thread(target=answer_late)
        thread.start()
        try:
            yield asked
        finally:
            may_answer.set()
            thread.join()


def test_an_answer_that_comes_after_the_end_of_the_loop(tmp_path: Path) -> None:
    """Nobody waits for it: the descriptors that come with it are closed all the same."""
    may_answer, before = threading.Event(), held()

    async def open_and_give_up(asked: threading.Event) -> None:
        client = TieredKV.connect(f"unix://{tmp_path}/kv.sock", model=MODEL, layout=SMALL, timeout_s=60.0)
        opening = asyncio.ensure_future(client.__aenter__())
        await asyncio.to_thread(asked.wait)
        opening.cancel()
        with suppress(asyncio.CancelledError):
            await opening
        with pytest.raises(ClosedError, match="not open yet"):
            client.stats()

    with answering_late(tmp_path / "kv.sock", may_answer) as asked:
        asyncio.run(open_and_give_up(asked))
    for thread in threading.enumerate():
        if thread.name.startswith("tiered_kv-attach"):
            thread.join()
    assert is_no_more_than(before)


@pytest.mark.both_loops
async def test_a_server_in_a_scope_that_is_cancelled_ends_as_any_other(tmp_path: Path) -> None:
    """Also while a client is attached: nothing of it stays, and the next one may listen at once."""
    settings = TieredKVSettings(tiers=[cpu(16)], limits=LIMITS, host={"socket": tmp_path / "kv.sock"})
    opening = Attach.of("client", MODEL, SMALL, (Shard(),), is_read_only=False)
    tasks = asyncio.all_tasks()
    for number in range(3):
        with anyio.CancelScope() as scope:
            async with TieredKVServer(settings, emit=Recorder()) as server:
                path = os.fspath(server.path)
                connection, _, descriptors = await asyncio.to_thread(handshake.begin, path, opening, 60.0)
                scope.cancel()
                await asyncio.sleep(0)
        handshake.give_back(connection, descriptors)
        assert asyncio.all_tasks() == tasks
        if not number:  # what the first one has imported, and begun, stays
            before = held()
    await until_gone(before)


async def test_who_could_not_attach_may_try_again(tmp_path: Path) -> None:
    """An opening that was cancelled has left nothing that would be in the way of another."""
    with serving(tmp_path, cpu(16)) as server:
        client = TieredKV.connect(f"unix://{server.path}", model=MODEL, layout=SMALL, device="cpu")
        for _ in range(2):
            with pytest.raises(asyncio.CancelledError):
                await asyncio.ensure_future(as_task(CancelledAt(client.__aenter__(), 1)))
        async with client:
            assert (await client.lookup(KEYS)).num_blocks == 0


async def test_who_is_cancelled_as_the_answer_comes_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that is granted to nobody any more ends at once, not with the client."""
    engine, asking = AnyEngine(), list[asyncio.Task[Any]]()
    decode = protocol.reply_from

    def cancelling(body: bytes | memoryview) -> Any:  # noqa: ANN401 - any reply
        reply = decode(body)
        if isinstance(reply, protocol.Leased):
            asking[0].get_loop().call_soon(asking[0].cancel)  # before it is woken
        return reply

    monkeypatch.setattr(protocol, "reply_from", cancelling)
    with serving(tmp_path, cpu(16)) as server:
        async with attached(server, engine) as kv:
            await kv.store(KEYS, engine.fill(KEYS, range(4)))
            asking.append(asyncio.ensure_future(kv.lease(KEYS).__aenter__()))
            with pytest.raises(asyncio.CancelledError):
                await asking[0]
            await until(lambda: server.health()["clients"][0]["leases"] == 0)
            assert kv.stats()["cpu"].leased == 0
