"""What `Room` and `Budget` promise to those who wait in line."""

import asyncio
from collections.abc import Callable

import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.tiers.budget import Budget, Priority, Room, Ticket

Give = Callable[[], None]
SHARES = {Priority.LOAD: 100, Priority.PREFETCH: 75, Priority.STORE: 50, Priority.DEMOTE: 25}


def _take(budget: Budget, num_bytes: int, priority: Priority) -> "asyncio.Task[Give]":
    return asyncio.create_task(budget.take(num_bytes, Ticket(priority)))


async def test_loads_go_before_whoever_waited_longer() -> None:
    """When bytes are given back, the line of the highest priority is served first, each line in its order."""
    budget, order = Budget(100), list[str]()
    holder = await budget.take(100, Ticket(Priority.LOAD))
    others = [await budget.take(1, Ticket(each)) for each in (Priority.PREFETCH, Priority.STORE)]  # each its one piece

    async def wait(name: str, priority: Priority) -> None:
        give = await budget.take(50, Ticket(priority))
        order.append(name)
        await checkpoint()
        give()

    arrivals = [("store", Priority.STORE), ("prefetch", Priority.PREFETCH), ("a", Priority.LOAD), ("b", Priority.LOAD)]
    waiting = [asyncio.create_task(wait(name, priority)) for name, priority in arrivals]
    for _ in range(5):
        await checkpoint()
    assert (order, budget.room.num_waiting) == ([], 4)
    for give in (*others, holder):
        give()
    await asyncio.gather(*waiting)
    assert order.index("a") < order.index("b")
    assert budget.in_flight == 0


@pytest.mark.parametrize(("priority", "share"), SHARES.items())
async def test_lower_classes_fill_a_part_only(priority: Priority, share: int) -> None:
    """A class gets its share of the bytes and no more, so that loads always find some."""
    budget = Budget(100)
    taken = [_take(budget, 5, priority) for _ in range(30)]
    for _ in range(5):
        await checkpoint()
    assert budget.in_flight == share
    for each in taken:
        (await each)()
    assert (budget.in_flight, budget.room.num_waiting) == (0, 0)


@pytest.mark.parametrize("priority", Priority)
async def test_each_class_may_have_one_piece(priority: Priority) -> None:
    """A piece larger than the whole budget goes through, one at a time, however full the others have made it."""
    budget = Budget(100)
    full = [_take(budget, 100, each) for each in Priority if each is not priority]
    first, second = _take(budget, 1000, priority), _take(budget, 1000, priority)
    for _ in range(5):
        await checkpoint()
    assert (first.done(), second.done()) == (True, False)
    first.result()()
    (await second)()
    for each in full:
        (await each)()
    assert budget.in_flight == 0


async def test_a_cancelled_waiter_gives_back_what_it_was_just_given() -> None:
    """Cancelled before its turn or in the very turn it was served, it keeps nothing, and the next one is served."""
    budget = Budget(10)
    holder = await budget.take(10, Ticket(Priority.LOAD))
    early, late, last = (_take(budget, 10, Priority.LOAD) for _ in range(3))
    for _ in range(3):
        await checkpoint()
    early.cancel()
    await checkpoint()
    holder()  # serves `late`, which has not run yet
    late.cancel()
    (await last)()
    assert (early.cancelled(), late.cancelled()) == (True, True)
    assert (budget.in_flight, budget.room.num_waiting) == (0, 0)


async def test_hurry_moves_a_waiter_to_a_faster_line() -> None:
    """A ticket only ever gets faster; what it waits for is then counted in its new class."""
    budget = Budget(100)
    stores = await budget.take(50, Ticket(Priority.STORE))
    ticket = Ticket(Priority.STORE)
    waiting = asyncio.create_task(budget.take(40, ticket))
    for _ in range(3):
        await checkpoint()
    assert not waiting.done()
    budget.room.hurry(ticket, Priority.DEMOTE)
    assert ticket.priority is Priority.STORE
    budget.room.hurry(ticket, Priority.LOAD)
    give = await waiting
    assert (ticket.priority, budget.in_flight) == (Priority.LOAD, 90)
    give()
    stores()
    assert budget.in_flight == 0


async def test_hurry_reaches_the_room_a_ticket_waits_in() -> None:
    """A fill waits for one tier only, and whoever joins it hurries it in all of them: the order does not matter."""
    elsewhere, budget, ticket = Budget(100), Budget(100), Ticket(Priority.PREFETCH)
    gives = [await budget.take(75, Ticket(Priority.PREFETCH))]
    ahead, hurried = _take(budget, 90, Priority.PREFETCH), asyncio.create_task(budget.take(25, ticket))
    for _ in range(3):
        await checkpoint()
    for each in (elsewhere, budget):
        each.room.hurry(ticket, Priority.LOAD)
    for _ in range(3):
        await checkpoint()
    assert hurried.done()
    assert not ahead.done()
    gives.pop()()
    (await ahead)()
    (await hurried)()


async def test_what_is_off_keeps_nobody_waiting() -> None:
    """Once ``is_off()``, whoever waits or comes is let through and takes nothing."""
    budget, off = Budget(10), asyncio.Event()
    holder = await budget.take(10, Ticket(Priority.LOAD))
    waiting = asyncio.create_task(budget.take(10, Ticket(Priority.LOAD), off.is_set))
    for _ in range(3):
        await checkpoint()
    assert not waiting.done()
    off.set()
    budget.room.changed()
    (await waiting)()
    (await budget.take(10, Ticket(Priority.LOAD), off.is_set))()
    assert budget.in_flight == 10
    holder()


async def test_a_failing_attempt_reaches_its_own_caller() -> None:
    """An attempt that raises raises in whoever made it, and nobody is left in line."""
    room = Room()

    def attempt() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await room.acquire(attempt, Ticket(Priority.LOAD), lambda _: None)
    assert room.num_waiting == 0


steps = st.lists(
    st.tuples(st.sampled_from(["take", "give", "cancel", "turn"]), st.sampled_from(Priority), st.integers(1, 150)),
    max_size=60,
)


@given(steps)
def test_bytes_are_conserved_and_nobody_is_forgotten(script: list[tuple[str, Priority, int]]) -> None:
    """Whatever is taken, given back and cancelled: bounds hold at each step, and at the end all is free and served."""
    asyncio.run(_play(script))


async def _play(script: list[tuple[str, Priority, int]]) -> None:
    budget = Budget(100)
    tasks: list[asyncio.Task[Give]] = []
    sizes: dict[asyncio.Task[Give], int] = {}
    given: set[asyncio.Task[Give]] = set()

    def served() -> list["asyncio.Task[Give]"]:
        return [task for task in tasks if task.done() and not task.cancelled() and task not in given]

    for what, priority, n in script:
        if what == "take":
            tasks.append(_take(budget, n, priority))
            sizes[tasks[-1]] = n
        elif what == "give" and (ready := served()):
            task = ready[n % len(ready)]
            given.add(task)
            task.result()()
        elif what == "cancel" and tasks:
            tasks[n % len(tasks)].cancel()
        else:
            await checkpoint()
        assert 0 <= budget.in_flight <= 100 + 4 * 150  # and one piece of each class
    for _ in range(200):
        for task in served():
            given.add(task)
            task.result()()
        await checkpoint()
    assert all(task.done() for task in tasks)
    assert (budget.in_flight, budget.room.num_waiting) == (0, 0)
    assert sum(sizes[task] for task in given) == sum(sizes[task] for task in tasks if not task.cancelled())
