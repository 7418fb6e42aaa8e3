"""What `Room` and `Budget` promise to those who wait in line."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from tests.support.virtual import VirtualLoop, run
from tiered_kv.tiers.gate import Budget, Kind, Pace, Priority, Room, Waiter

Give = Callable[[], None]
SHARES = {Kind.LOAD: 100, Kind.PREFETCH: 75, Kind.STORE: 50, Kind.CLEAN: 25, Kind.LOOK: 25}


def _take(budget: Budget, num_bytes: int, kind: Kind) -> "asyncio.Task[Give]":
    return asyncio.create_task(budget.take(num_bytes, Waiter(kind)))


async def test_loads_go_before_whoever_waited_longer() -> None:
    """When bytes are given back, the line of the highest priority is served first, each line in its order."""
    budget, order = Budget(100), list[str]()
    holder = await budget.take(100, Waiter(Kind.LOAD))
    others = [await budget.take(1, Waiter(each)) for each in (Kind.PREFETCH, Kind.STORE)]  # each its one piece

    async def wait(name: str, kind: Kind) -> None:
        give = await budget.take(50, Waiter(kind))
        order.append(name)
        await checkpoint()
        give()

    arrivals = [("store", Kind.STORE), ("prefetch", Kind.PREFETCH), ("a", Kind.LOAD), ("b", Kind.LOAD)]
    waiting = [asyncio.create_task(wait(name, kind)) for name, kind in arrivals]
    for _ in range(5):
        await checkpoint()
    assert (order, budget.room.num_waiting) == ([], 4)
    for give in (*others, holder):
        give()
    await asyncio.gather(*waiting)
    assert order.index("a") < order.index("b")
    assert budget.in_flight == 0


async def test_none_starves_beside_those_of_higher_priorities_without_end() -> None:
    """Each is asked before them once sixteen of them were served meanwhile; until then they go first."""
    room, order, is_free = Room(), list[str](), [True]

    async def turn(name: str, priority: Priority) -> None:
        await room.acquire(lambda: is_free.pop() if is_free else None, Waiter(Kind.LOAD, priority), is_free.append)
        order.append(name)
        await checkpoint()
        is_free.append(True)
        room.changed()

    async def loads() -> None:
        while len(order) < 100:
            await turn("load", Priority.LOAD)

    endless = [asyncio.create_task(loads()) for _ in range(2)]
    await checkpoint()
    others = [
        asyncio.create_task(turn(each.name, each)) for each in (Priority.PREFETCH, Priority.STORE, Priority.DEMOTE)
    ]
    await asyncio.gather(*endless, *others)
    places = [order.index(each.name) for each in (Priority.PREFETCH, Priority.STORE, Priority.DEMOTE)]
    assert min(places) >= 16
    assert max(places) < 25


def test_none_starves_where_loads_take_all_of_a_pace() -> None:
    """It is never free, and one of them always waits."""

    async def main() -> None:
        budget, loop = _paced(10.0)
        started = loop.time()

        async def loads() -> None:
            while loop.time() < started + 60.0:
                (await budget.take(10, Waiter(Kind.LOAD)))()
                await asyncio.sleep(1.0)

        endless = [asyncio.create_task(loads()) for _ in range(3)]
        await checkpoint()
        (await budget.take(10, Waiter(Kind.PREFETCH)))()
        assert loop.time() < started + 30.0
        await asyncio.gather(*endless)

    run(main)


@pytest.mark.parametrize(("kind", "share"), SHARES.items())
async def test_lower_priorities_fill_a_part_only(kind: Kind, share: int) -> None:
    """What is less urgent gets its share of the bytes and no more, so that urgent loads always find some."""
    budget = Budget(100)
    taken = [_take(budget, 5, kind) for _ in range(30)]
    for _ in range(5):
        await checkpoint()
    assert budget.in_flight == share
    for each in taken:
        (await each)()
    assert (budget.in_flight, budget.room.num_waiting) == (0, 0)


@pytest.mark.parametrize("kind", Kind)
async def test_each_kind_may_have_one_piece(kind: Kind) -> None:
    """A piece larger than the whole budget goes through, one at a time, however full the others have made it."""
    budget = Budget(100)
    full = [_take(budget, 100, each) for each in Kind if each is not kind]
    first, second = _take(budget, 1000, kind), _take(budget, 1000, kind)
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
    holder = await budget.take(10, Waiter(Kind.LOAD))
    early, late, last = (_take(budget, 10, Kind.LOAD) for _ in range(3))
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
    """A waiter only ever gets faster; it is of the kind then of who hurried it, and has the share of its priority."""
    budget = Budget(100)
    stores = await budget.take(50, Waiter(Kind.STORE))
    waiter = Waiter(Kind.STORE)
    waiting = asyncio.create_task(budget.take(40, waiter))
    for _ in range(3):
        await checkpoint()
    assert not waiting.done()
    waiter.hurry(Kind.CLEAN, Priority.DEMOTE)
    assert waiter.priority is Priority.STORE
    waiter.hurry(Kind.LOAD, Priority.LOAD)
    give = await waiting
    assert (waiter.priority, budget.in_flight) == (Priority.LOAD, 90)
    give()
    stores()
    assert budget.in_flight == 0


async def test_hurry_reaches_the_room_a_ticket_waits_in() -> None:
    """Wherever it waits, it passes those of its old line."""
    budget, waiter = Budget(100), Waiter(Kind.PREFETCH)
    gives = [await budget.take(75, Waiter(Kind.PREFETCH))]
    ahead, hurried = _take(budget, 90, Kind.PREFETCH), asyncio.create_task(budget.take(25, waiter))
    for _ in range(3):
        await checkpoint()
    waiter.hurry(Kind.LOAD, Priority.LOAD)
    for _ in range(3):
        await checkpoint()
    assert hurried.done()
    assert not ahead.done()
    gives.pop()()
    (await hurried)()
    (await ahead)()


async def test_hurry_lets_a_waiter_have_the_one_piece_of_its_new_kind() -> None:
    """At once, also where it goes no faster: nobody may give anything back for long."""
    budget, waiter = Budget(100), Waiter(Kind.PREFETCH, Priority.LOAD)
    full = await budget.take(100, Waiter(Kind.PREFETCH, Priority.LOAD))
    waiting = asyncio.create_task(budget.take(10, waiter))
    for _ in range(3):
        await checkpoint()
    assert not waiting.done()
    waiter.hurry(Kind.LOAD, Priority.LOAD)
    for _ in range(3):
        await checkpoint()
    assert waiting.done()
    waiting.result()()
    full()
    assert budget.in_flight == 0


async def test_a_load_of_low_priority_is_a_load() -> None:
    """It waits behind what is more urgent, has the share of its priority, and the one piece that loads may have."""
    budget = Budget(100)
    stores = await budget.take(60, Waiter(Kind.STORE))
    low = await budget.take(60, Waiter(Kind.LOAD, Priority.STORE))
    next_low = asyncio.create_task(budget.take(10, Waiter(Kind.LOAD, Priority.STORE)))
    for _ in range(3):
        await checkpoint()
    assert (budget.in_flight, next_low.done()) == (120, False)
    stores()
    low()
    (await next_low)()
    assert budget.in_flight == 0


class Slots:
    """Numbered things that are had whole or not at all."""

    def __init__(self, room: Room, free: int) -> None:
        self.room = room
        self.free = free
        self.num_asked = 0

    def take(self, n: int, kind: Kind = Kind.LOAD, *, waiter: Waiter | None = None) -> "asyncio.Task[int]":
        """Start to wait for ``n``, as ``waiter`` if it is to be hurried."""

        def attempt() -> int | None:
            self.num_asked += 1
            if n > self.free:
                return None
            self.free -= n
            return n

        return asyncio.create_task(self.room.acquire(attempt, waiter or Waiter(kind), self.give, n))

    def give(self, n: int) -> None:
        """Have ``n`` more."""
        self.free += n
        self.room.changed()


async def test_who_can_never_be_served_does_not_hold_up_who_can() -> None:
    """Behind a first waiter that wants more than there will ever be, smaller ones are served all the same."""
    slots = Slots(Room(), 2)
    large = slots.take(16)
    for _ in range(40):  # more than may pass at once: the line waits for the first now and then, and not for ever
        small = slots.take(2)
        slots.give(await small)
    assert not large.done()
    large.cancel()
    await asyncio.wait({large})
    assert slots.room.num_waiting == 0


async def test_who_is_hurried_while_a_line_waits_for_it_holds_up_its_new_line_no_longer() -> None:
    """What can never be had keeps nobody waiting for good, whatever line it has moved to."""
    slots, large = Slots(Room(), 2), Waiter(Kind.STORE)
    waiting = slots.take(16, waiter=large)
    for _ in range(16):
        slots.give(await slots.take(2, Kind.STORE))
    large.hurry(Kind.LOAD, Priority.LOAD)
    async with asyncio.timeout(30):
        slots.give(await slots.take(2))
    waiting.cancel()
    await asyncio.wait({waiting})


async def test_who_wants_much_is_served_though_others_want_little_all_the_time() -> None:
    """From some number of overtakings on, what gets free is kept for the first waiter until it is enough."""
    slots, others = Slots(Room(), 0), set[asyncio.Task[int]]()
    large = slots.take(4)
    for _ in range(200):
        others.add(slots.take(1))
        await checkpoint()
        if large.done():
            break
        slots.give(1)
    assert large.done()
    for each in others:
        each.cancel()
    await asyncio.wait(others)


def _busy(slots: Slots, num_clients: int, held_s: float) -> tuple[list[asyncio.Task[None]], list[float]]:
    """Start clients that take one thing after another, and hold each for a while; return how long they waited."""
    waits, loop = list[float](), asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.is_busy = lambda: False

    async def client() -> None:
        while True:
            started = loop.time()
            got = await slots.take(1)
            waits.append(loop.time() - started)
            await asyncio.sleep(held_s)
            slots.give(got)

    return [asyncio.create_task(client()) for _ in range(num_clients)], waits


async def _stop(*tasks: "asyncio.Task[None] | asyncio.Task[int]") -> None:
    for each in tasks:
        each.cancel()
    await asyncio.wait(tasks)


def test_who_cannot_be_served_holds_the_others_up_for_little_of_the_time() -> None:
    """However long it waits: for two seconds at most, and for less than a third of all."""

    async def main() -> None:
        slots = Slots(Room(), 2)
        large = slots.take(16)
        clients, waits = _busy(slots, 4, 0.01)
        await asyncio.sleep(120)
        assert not large.done()
        assert max(waits) < 2.1
        assert len(waits) > 2 / 3 * 2 * 120 / 0.01
        await _stop(large, *clients)

    run(main)


@pytest.mark.parametrize("held_s", [0.01, 0.3, 6.0])
def test_who_wants_a_quarter_is_served_however_long_others_hold_what_they_have(held_s: float) -> None:
    """Also where as many as can be are always waiting for a little."""

    async def main() -> None:
        slots, loop = Slots(Room(), 16), asyncio.get_running_loop()
        clients, _ = _busy(slots, 40, held_s)
        await asyncio.sleep(3 * held_s)
        started = loop.time()
        await slots.take(4)
        assert loop.time() - started < 10 * max(held_s, 0.1)
        await _stop(*clients)

    run(main)


async def test_what_is_kept_for_one_that_leaves_is_the_others() -> None:
    """At once: nothing else may get free for long."""
    slots = Slots(Room(), 0)
    large = slots.take(4)
    others = [slots.take(1) for _ in range(17)]
    await checkpoint()
    for _ in range(17):
        slots.give(1)
        await checkpoint()
    assert (sum(each.done() for each in others), slots.free) == (16, 1)  # from now on it is kept for the large one
    large.cancel()
    for _ in range(3):
        await checkpoint()
    assert all(each.done() for each in others)
    await asyncio.wait({large})


async def test_equals_are_served_in_their_order() -> None:
    """Nobody passes who wants as much as the first waiter or more."""
    slots, order = Slots(Room(), 1), list[int]()
    tasks = [slots.take(n) for n in (2, 2, 3, 3)]
    for number, task in enumerate(tasks):
        task.add_done_callback(partial(lambda number, _: order.append(number), number))
    await checkpoint()
    for _ in range(9):
        slots.give(1)
        await checkpoint()
    await asyncio.wait(tasks)
    assert order == [0, 1, 2, 3]


async def test_no_call_walks_the_waiters() -> None:
    """Of thousands in line, each change asks a few, and who waits is counted without asking any."""
    slots = Slots(Room(), 0)
    waiters = [slots.take(1 + n % 7) for n in range(5000)]
    await checkpoint()
    slots.num_asked = 0
    for _ in range(100):
        assert slots.room.num_waiting == 5000
        slots.room.changed()
    assert slots.num_asked <= 100 * 20
    for each in waiters:
        each.cancel()
    await asyncio.wait(waiters)
    assert slots.room.num_waiting == 0


async def test_what_an_attempt_changes_is_served_too() -> None:
    """An attempt that has more given back, as by evicting, does not run inside itself."""
    room, depth, depths = Room(), [0], list[int]()

    def attempt() -> int | None:
        depth[0] += 1
        depths.append(depth[0])
        if len(depths) < 5:
            room.changed()
        depth[0] -= 1
        return 1 if len(depths) >= 5 else None

    assert await room.acquire(attempt, Waiter(Kind.LOAD), lambda _: None) == 1
    assert max(depths) == 1


async def test_an_attempt_that_fails_for_one_serves_the_others() -> None:
    """Whoever gives back is not told; whoever waited is, and the one behind is served."""
    slots = Slots(Room(), 0)

    def attempt() -> int | None:
        if slots.free:
            raise ZeroDivisionError
        return None

    failing = asyncio.create_task(slots.room.acquire(attempt, Waiter(Kind.LOAD), lambda _: None))
    await checkpoint()
    behind = slots.take(1)
    await checkpoint()
    slots.give(1)
    with pytest.raises(ZeroDivisionError):
        await failing
    assert await behind == 1


async def test_a_failing_attempt_reaches_its_own_caller() -> None:
    """An attempt that raises raises in whoever made it, and nobody is left in line."""
    room = Room()

    def attempt() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await room.acquire(attempt, Waiter(Kind.LOAD), lambda _: None)
    assert room.num_waiting == 0


def _paced(bytes_per_s: float) -> tuple[Budget, VirtualLoop]:
    """Return a budget whose reads are paced, on a loop whose time passes while nobody does anything."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.is_busy = lambda: False
    return Budget(1000, Pace(bytes_per_s, loop.time)), loop


def test_what_moves_in_a_second_is_bounded() -> None:
    """Over any time no more bytes than the rate allows, but for one piece; and no less is served."""

    async def main() -> None:
        budget, loop = _paced(100.0)
        started, times = loop.time(), list[float]()
        for _ in range(50):
            (await budget.take(20, Waiter(Kind.LOAD)))()
            times.append(loop.time() - started)
        assert times == pytest.approx([n / 5 for n in range(50)])

    run(main)


@pytest.mark.parametrize("kind", [Kind.PREFETCH, Kind.LOOK])
def test_the_pace_of_reads_holds_up_no_writes(kind: Kind) -> None:
    """Each direction has its own; a waiter of the other one is served meanwhile, and one who leaves takes nothing."""

    async def main() -> None:
        budget, loop = _paced(10.0)
        (await budget.take(100, Waiter(Kind.LOAD)))()
        started = loop.time()
        gone, waiting = _take(budget, 50, Kind.LOAD), _take(budget, 10, kind)
        await checkpoint()
        (await budget.take(100, Waiter(Kind.STORE)))()
        assert loop.time() == started
        gone.cancel()
        (await waiting)()
        assert loop.time() - started == pytest.approx(10)
        assert (budget.in_flight, budget.room.num_waiting) == (0, 0)

    run(main)


steps = st.lists(
    st.tuples(st.sampled_from(["take", "give", "cancel", "turn"]), st.sampled_from(Kind), st.integers(1, 150)),
    max_size=60,
)


@given(steps)
def test_bytes_are_conserved_and_nobody_is_forgotten(script: list[tuple[str, Kind, int]]) -> None:
    """Whatever is taken, given back and cancelled: bounds hold at each step, and at the end all is free and served."""
    asyncio.run(_play(script))


async def _play(script: list[tuple[str, Kind, int]]) -> None:
    budget = Budget(100)
    tasks: list[asyncio.Task[Give]] = []
    sizes: dict[asyncio.Task[Give], int] = {}
    given: set[asyncio.Task[Give]] = set()

    def served() -> list["asyncio.Task[Give]"]:
        return [task for task in tasks if task.done() and not task.cancelled() and task not in given]

    for what, kind, n in script:
        if what == "take":
            tasks.append(_take(budget, n, kind))
            sizes[tasks[-1]] = n
        elif what == "give" and (ready := served()):
            task = ready[n % len(ready)]
            given.add(task)
            task.result()()
        elif what == "cancel" and tasks:
            tasks[n % len(tasks)].cancel()
        else:
            await checkpoint()
        assert 0 <= budget.in_flight <= 100 + len(Kind) * 150  # and one piece of each kind
    for _ in range(200):
        for task in served():
            given.add(task)
            task.result()()
        await checkpoint()
    assert all(task.done() for task in tasks)
    assert (budget.in_flight, budget.room.num_waiting) == (0, 0)
    assert sum(sizes[task] for task in given) == sum(sizes[task] for task in tasks if not task.cancelled())
