"""What a caller holds of a transfer, and how a copy is kept from beginning."""

import asyncio
import threading

import pytest
from anyio.lowlevel import checkpoint

from tests.support.caches import open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, prompt
from tiered_kv import GPULoadStoreSpec
from tiered_kv.memory.lanes import LaneCopy, RevokedError
from tiered_kv.testing import ScriptedDevice, ScriptedEvent
from tiered_kv.transfers.handles import Handle, Revocable, each_of


async def test_a_revoked_copy_never_begins() -> None:
    """Its turn in the stream passes without its work, and it has ended for who waits as soon as it is revoked."""
    ran: list[int] = []
    copy = LaneCopy(lambda: ran.append(1))
    copy.revoke()
    with pytest.raises(RevokedError):
        await copy.ended
    with pytest.raises(RevokedError):
        copy()
    copy.resolve(None)  # what the stream says of it later changes nothing
    assert ran == []


async def test_of_several_transfers_the_last_is_waited_for_though_the_first_raised() -> None:
    """Until then memory may be in use: the error comes when all have ended."""
    loop = asyncio.get_running_loop()
    ended: list[asyncio.Future[int]] = [loop.create_future() for _ in range(2)]
    waiting = asyncio.ensure_future(each_of([Handle(each, lambda: None) for each in ended]))
    await checkpoint()
    ended[0].set_exception(RuntimeError("planted"))
    for _ in range(5):
        await checkpoint()
    assert not waiting.done()
    ended[1].set_result(7)
    with pytest.raises(RuntimeError, match="planted"):
        await waiting


async def test_a_copy_that_has_begun_cannot_be_revoked() -> None:
    """It has not ended before its work has, whoever revokes it meanwhile."""
    begun, gate = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        gate.wait()

    copy = LaneCopy(work)
    thread = threading.Thread(target=copy)
    thread.start()
    begun.wait()
    copy.revoke()
    assert not copy.ended.done()
    gate.set()
    thread.join()
    copy.resolve(None)
    await copy.ended


async def test_a_cancelled_wait_ends_with_the_transfer_and_not_before() -> None:
    """Who is cancelled, even twice, gets the cancellation once the task has ended, and its result is not lost."""
    gate, revoked = asyncio.Event(), list[int]()
    handle = Handle(asyncio.create_task(gate.wait()), lambda: revoked.append(1))

    async def wait() -> bool:
        return await handle

    waiter = asyncio.create_task(wait())
    for _ in range(2):
        await checkpoint()
        waiter.cancel()
    await checkpoint()
    assert (waiter.done(), handle.done, len(revoked)) == (False, False, 2)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert handle.done
    assert await handle  # its result is still there


class _Transfer(Revocable):
    """Puts copies under way, and ends when they have."""

    def __init__(self, copies: list[LaneCopy], deadline: float | None = None) -> None:
        super().__init__()
        self.errors: list[BaseException | None] = []
        self._given = copies
        self._deadline = deadline

    async def run(self) -> bool:
        for copy in self._given:
            self.watch(copy, self.errors.append)
        try:
            await asyncio.Event().wait() if self._deadline is None else await checkpoint()
        except asyncio.CancelledError:
            self.revoked = True
        return await (self.drain_copies() if self._deadline is None else self.drain_copies(self._deadline))


async def test_a_revoked_transfer_waits_for_copies_that_have_begun() -> None:
    """The one that has begun is waited for, the one that has not never begins, and each is reported once."""
    begun, other = LaneCopy(lambda: None), LaneCopy(lambda: None)
    begun()
    transfer = _Transfer([begun, other])
    handle = transfer.start(asyncio.create_task(transfer.run()))
    await checkpoint()
    handle.cancel()
    handle.cancel()
    for _ in range(5):
        await checkpoint()
    assert not handle.done
    begun.resolve(None)
    await handle
    assert [type(error) for error in transfer.errors] == [RevokedError, type(None)]


async def test_a_transfer_cancelled_before_its_first_step_runs() -> None:
    """It is told at its first wait, so that it can settle what it began with."""
    transfer = _Transfer([])
    handle = transfer.start(asyncio.create_task(transfer.run()))
    handle.cancel()
    assert await handle
    assert transfer.revoked


async def test_a_transfer_that_the_cache_ends_lets_no_copy_begin() -> None:
    """It is cancelled as a task then, and waits for none that may wait for an event for ever."""
    copy = LaneCopy(lambda: None)
    transfer = _Transfer([copy])
    task = asyncio.create_task(transfer.run())
    await checkpoint()
    task.cancel()
    await until(task.done)
    assert [type(error) for error in transfer.errors] == [RevokedError]


async def test_a_drain_ends_at_its_deadline() -> None:
    """Copies that have not begun by then are revoked, and it says that it was late."""
    copy = LaneCopy(lambda: None)
    transfer = _Transfer([copy], deadline=0.0)
    assert not await transfer.run()
    assert [type(error) for error in transfer.errors] == [RevokedError]


async def test_a_transfer_that_has_ended_leaves_its_stream_to_the_next() -> None:
    """Loads and stores with events of their own, one after another, all use the same one beside the main one."""
    engine, device, keys = Engine(), ScriptedDevice(), prompt(4)
    async with open_cache({"medium": "cpu", "capacity": 8 * PAYLOAD_BYTES}, engine=engine, device=device) as kv:
        for _ in range(3):
            for start in (kv.start_store, kv.start_load):
                after = ScriptedEvent()
                handle = start(keys, GPULoadStoreSpec(range(4)), after=after)
                after.fire()
                await until_idle(kv, on_wait=device.run_all)
                assert handle.done
    assert len({stream for stream, what in device.log if what == "wait"}) == 2  # one in each direction
