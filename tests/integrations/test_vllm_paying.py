"""What the connector for vLLM loads and stores because it pays: imitated, without a clock."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.caches import until
from tests.support.serving import serving
from tests.support.small_vllm import BLOCK_SIZE, STRIDE, VLLM, Request, SmallVLLM, group, small_vllm
from tiered_kv import BlockKey, BlockKeys
from tiered_kv.values.results import LoadCost, LookupResult, TierRun
from tiered_kv_backends.memory import MemoryBackend

SMALL = {"medium": "cpu", "capacity": 32 * STRIDE, "policy": "lru"}
opened = contextmanager(small_vllm)


class FarAway(MemoryBackend):
    """A shared tier that says nothing to those that ask what it has."""

    class Settings(MemoryBackend.Settings):
        """As the medium that it is otherwise."""

        medium: str = "tests.integrations.test_vllm_paying:FarAway"

    async def lookup_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Count the first that are there."""
        await asyncio.Event().wait()
        return await super().lookup_prefix(keys)


class Paying:
    """What pays, with a clock and tiers of the test's own."""

    def __init__(
        self,
        *groups: Any,  # noqa: ANN401 - of a package that only exists beside vLLM
        load_when: str = "auto",
        store_when: str = "auto",
        media: dict[str, str] | None = None,
    ) -> None:
        groups = groups or (group(),)
        self.now, self.found = 0.0, LookupResult(0, (), 0, BLOCK_SIZE, costs={"shared": LoadCost(0.0, 0.0)})
        self.groups = groups
        wanted = SimpleNamespace(
            connector=SimpleNamespace(
                load_when=load_when, store_when=store_when, load_timeout_s=5.0, lookup_timeout_s=1.0
            ),
            main=groups[0], loads_parts=len(groups) == 1,
        )  # fmt: skip
        media = {"cpu": "cpu", "disk": "nvme"} if media is None else media
        kv = SimpleNamespace(lookup_nowait=lambda _keys: self.found, cache=SimpleNamespace(media=media))
        self.counts = VLLM.counts.Counts()
        self.paying = VLLM.paying.Paying(kv, wanted, self.counts, num_memory_blocks=100, clock=lambda: self.now)
        self.tracked: dict[str, Any] = {}

    def compute(self, name: str, num_tokens: int, took_s: float) -> None:
        """Have a prompt computed in so many seconds."""
        request = Request(name, num_tokens, 1)
        request.know(num_tokens)
        self.tracked[name] = VLLM.messages.Tracked(request)
        self.paying.step({name: num_tokens}, self.tracked)
        self.now += took_s
        request.know(num_tokens + 1)
        self.paying.step({name: 1}, self.tracked)

    def worth(self, runs: list[tuple[str, int]], num_found: int | None = None, **costs: LoadCost) -> int:
        """Return how many blocks to load, of a prefix that is in these tiers."""
        made, at = [], 0
        for tier, count in runs:
            made.append(TierRun(tier, at, at + count))
            at += count
        self.found = LookupResult(at, tuple(made), 0, BLOCK_SIZE, costs)
        request, num_tokens = Request("r", 4000, 1), (num_found or at) * BLOCK_SIZE
        request.know(4000)
        needs = [VLLM.naming.RequestNaming().need(each, request, 0, num_tokens) for each in self.groups]
        num_worth: int = self.paying.num_worth(needs, num_tokens)
        self.paying.declined(num_tokens - num_worth)
        return num_worth // BLOCK_SIZE

    def patience(
        self,
        num_tokens: int,
        *,
        block_s: float = 0.0,
        answer_s: float = 0.0,
        found_part: float = 1.0,
        **costs: LoadCost,
    ) -> float:
        """Return how long a request waits for tiers that others use, which are asked for so many tokens."""
        costs = costs or {"shared": LoadCost(0.0, block_s, answer_s=answer_s, found_part=found_part)}
        self.found = LookupResult(0, (), 0, BLOCK_SIZE, costs)
        request = Request("r", num_tokens, 1)
        request.know(num_tokens)
        needs = [VLLM.naming.RequestNaming().need(each, request, 0, num_tokens) for each in self.groups]
        waits_s, told_s = self.paying.for_answers(needs, 0, num_tokens)
        assert len(costs) > 1 or told_s == (answer_s if waits_s else 0.0)
        return float(waits_s)

    def asks(self, num_tokens: int, *, found_part: float = 1.0, block_s: float = 0.0) -> bool:
        """Say whether a tier that others use too is asked for so many tokens."""
        self.found = LookupResult(0, (), 0, BLOCK_SIZE, {"shared": LoadCost(0.0, block_s, found_part=found_part)})
        self.now += 1.0
        return bool(self.paying.asks(num_tokens))


FAST, SLOW = LoadCost(0.001, 0.0001), LoadCost(0.001, 0.1)  # a block of 4 tokens is computed in 0.004 s


def test_what_a_copy_takes_is_measured_beside_what_computing_takes() -> None:
    """By copies and prompts of late; nothing is said of it while one is not known, or where a user has decided."""
    of = Paying()
    of.paying.copied(10, 0.01)
    assert of.paying.copy_cost == 0.0
    of.compute("first", 1000, 1.0)  # a block of 4 tokens in 0.004 s
    assert of.paying.copy_cost == pytest.approx(0.25)
    for _ in range(50):
        of.paying.copied(10, 0.08)
    assert of.paying.copy_cost == pytest.approx(2.0, rel=0.02)
    of.paying.copied(0, 9.0)  # nothing was copied, whatever that took
    assert of.paying.copy_cost == pytest.approx(2.0, rel=0.02)
    told = Paying(store_when="evicted")
    told.compute("first", 1000, 1.0)
    told.paying.copied(10, 0.01)
    assert told.paying.copy_cost == 0.0


def test_a_load_is_waited_for_as_long_as_it_can_pay() -> None:
    """A tier that hangs costs a request four times what computing takes, or a moment, and not the whole timeout."""
    of, always = Paying(), Paying(load_when="always")
    assert of.paying.patience_s(1000) == 5.0
    for each in (of, always):
        each.compute("first", 1000, 1.0)
    assert [of.paying.patience_s(num_tokens) for num_tokens in (10, 500, 9000)] == [0.25, 2.0, 5.0]
    assert always.paying.patience_s(10) == 5.0


def test_an_answer_is_waited_for_no_longer_than_computing_takes() -> None:
    """A tier that is far, or hangs in look-ups, costs a request as much again as it would compute in, or a moment."""
    of, always = Paying(media={"cpu": "cpu"}), Paying(media={"cpu": "cpu"}, load_when="always")
    assert of.patience(1000) == 1.0
    for each in (of, always):
        each.compute("first", 1000, 1.0)
    assert [of.patience(num_tokens) for num_tokens in (4, 500, 10**6)] == [0.01, 0.5, 1.0]
    assert always.patience(4) == 1.0


def test_nobody_asks_where_that_would_save_nothing() -> None:
    """Of tiers that had nothing of late, or would be too slow, one in sixteen asks; of all others everybody does."""
    of = Paying()
    assert of.asks(100, found_part=0.0)  # it is not known what computing takes
    of.compute("first", 1000, 1.0)
    assert all(of.asks(100, found_part=0.02) for _ in range(40))  # two thousandths of a second
    assert not any(of.asks(10, found_part=0.02) for _ in range(7))
    assert sum(of.asks(1000, found_part=0.0) for _ in range(160)) == 10
    assert sum(of.asks(100, block_s=0.004) for _ in range(160)) == 10  # loading takes what computing does
    assert all(of.asks(100, block_s=0.002) for _ in range(40))
    always = Paying(load_when="always")
    always.compute("first", 1000, 1.0)
    assert all(always.asks(100, found_part=0.0) for _ in range(40))


def test_nobody_waits_for_answers_that_are_later_than_what_they_save() -> None:
    """Whoever would compute for longer than they take waits, where what is asked for is there; else few do, or none."""
    of = Paying(media={"cpu": "cpu"})
    of.compute("first", 1000, 1.0)
    assert [of.patience(num_tokens, answer_s=0.2) for num_tokens in (20, 100, 200)] == [0.0, 0.0, 0.2]
    assert [of.patience(num_tokens, answer_s=0.2, found_part=0.5) for num_tokens in (200, 400)] == [0.0, 0.4]
    assert of.patience(400, answer_s=0.001, found_part=0.0) == 0.0
    assert of.patience(400, answer_s=0.01) == 0.04  # what takes four times as long as of late is late


def test_a_tier_that_is_asked_after_a_slow_one_is_as_slow_at_least() -> None:
    """It is asked for what the one before it lacks."""
    of = Paying(media={"cpu": "cpu"})
    of.compute("first", 1000, 1.0)
    slow, fast = LoadCost(0.0, 0.0, answer_s=0.3, found_part=0.0), LoadCost(0.0, 0.0, answer_s=0.001)
    assert of.patience(400, slow=slow, fast=fast) > 0.3
    assert of.patience(200, slow=slow, fast=fast) == 0.0
    assert of.patience(200, fast=fast, slow=slow) > 0.0


def test_nobody_waits_to_hear_of_what_would_be_computed_all_the_same() -> None:
    """A tier that is slow to read may answer soon."""
    of = Paying(media={"cpu": "cpu"})
    of.compute("first", 1000, 1.0)
    assert of.patience(400, block_s=0.1) == 0.0
    assert of.patience(400, block_s=0.0001) == 0.4


def test_all_is_loaded_while_nothing_is_known() -> None:
    """How fast the engine is, for one."""
    assert Paying().worth([("disk", 100)], disk=SLOW) == 100


def test_a_slow_tier_serves_nothing_and_a_fast_one_all() -> None:
    """Against what prompts took; memory costs nothing, and what is not loaded is counted."""
    of = Paying()
    of.compute("first", 1000, 1.0)
    assert of.worth([("disk", 100)], disk=FAST) == 100
    assert of.worth([("disk", 100)], disk=SLOW) == 0
    assert of.worth([("cpu", 60), ("disk", 40)], disk=SLOW) == 60
    assert of.counts.take().data["load_blocks_declined"] == 140


def test_the_line_at_a_tier_counts() -> None:
    """What others are going to ask for comes in turns with ours: so a convoy ends in computing."""
    of = Paying()
    of.compute("first", 1000, 1.0)
    assert of.worth([("disk", 100)], disk=LoadCost(0.001, 0.003)) == 100
    assert of.worth([("disk", 100)], disk=LoadCost(0.001, 0.003, num_others=8, others_blocks=4000)) == 0


def test_a_tier_that_others_use_has_what_is_nowhere_else() -> None:
    """It has a cost too."""
    of = Paying(media={"cpu": "cpu"})
    of.compute("first", 1000, 1.0)
    assert of.worth([("cpu", 10)], num_found=50, shared=SLOW) == 10
    assert of.worth([("cpu", 10)], num_found=50, shared=FAST) == 50


def test_of_several_groups_all_or_nothing() -> None:
    """As a part of them is of no use."""
    of = Paying(group(0), group(1, num_blocks=4))
    of.compute("first", 1000, 1.0)
    assert of.worth([("disk", 100)], disk=FAST) == 100
    assert of.worth([("cpu", 60), ("disk", 40)], disk=SLOW) == 0


def test_always_is_always() -> None:
    """Where nothing is to be chosen."""
    of = Paying(load_when="always")
    of.compute("first", 1000, 1.0)
    assert of.worth([("disk", 100)], disk=SLOW) == 100


def test_prompts_are_measured_as_long_as_they_take() -> None:
    """Lately most; short ones and those that were preempted or aborted say nothing."""
    of = Paying()
    of.compute("short", 8, 5.0)
    assert of.paying.tokens_per_s == 0
    of.compute("a", 1000, 1.0)
    assert of.paying.tokens_per_s == 1000
    for number in range(60):
        of.compute(f"b{number}", 1000, 0.5)
    assert of.paying.tokens_per_s == pytest.approx(2000, rel=0.01)
    request = Request("c", 1000, 1)
    request.know(1000)
    of.paying.step({"c": 500}, {"c": VLLM.messages.Tracked(request)})
    of.now += 100
    of.paying.end("c")
    of.paying.give_up("c")
    assert of.paying.tokens_per_s == pytest.approx(2000, rel=0.01)


def asked(of: Paying, count: int, num_known: int = 0, *, has_asked: bool = True) -> int:
    """Have so many new prompts asked for; return of how many what they compute is stored."""
    num_wanted = 0
    for number in range(count):
        request = Request(f"{of.now} {number}", 64, 1)
        request.know(64)
        num_wanted += of.paying.wants(request, num_known, has_asked=has_asked)
        of.paying.stored(16)
    of.now += 1
    return num_wanted


def test_stores_stop_where_nothing_comes_back_and_begin_again() -> None:
    """One prompt of sixteen is stored all the same; the first that comes again has all stored."""
    of = Paying()
    assert asked(of, 63) == 63
    assert 10 <= asked(of, 640) <= 80
    assert asked(of, 1, num_known=16) == 1
    assert asked(of, 20) == 20


@pytest.mark.parametrize("when", ["computed", "evicted"])
def test_stores_go_on_where_that_is_wanted(when: str) -> None:
    """As it is said when."""
    assert asked(Paying(store_when=when), 640) == 640


def test_who_has_not_asked_all_tiers_says_nothing_of_what_comes_back() -> None:
    """What it wants may be in one that others use too: stores stop by those alone that have asked."""
    of = Paying()
    assert asked(of, 1000, has_asked=False) == 1000
    assert asked(of, 63) == 63
    assert asked(of, 640) <= 80
    assert asked(of, 1, num_known=16, has_asked=False) == 1
    assert asked(of, 20) == 20


def test_what_a_server_has_is_known_anew_once_it_has_restarted(tmp_path: Path) -> None:
    """Shared tiers that it did not have before are asked as requests come; while it is away they are not forgotten."""
    cpu, shared = {"medium": "cpu", "capacity": 64 * STRIDE}, {"medium": "memory", "capacity": "8MiB"}
    with ExitStack() as servers:
        servers.enter_context(serving(tmp_path, cpu))
        with opened(connect=f"unix://{tmp_path / 'kv.sock'}") as engine:
            engine.step()
            paying, kv = engine.scheduling._paying, engine.scheduling.kv  # noqa: SLF001 - ours
            assert not paying.has_others
            servers.close()
            with serving(tmp_path, cpu, shared):
                kv.call(until, lambda: kv.cache.is_attached)
                engine.step()
                assert paying.has_others
            kv.call(until, lambda: not kv.cache.is_attached)
            engine.step()
            assert paying.has_others


def serve(engine: SmallVLLM, *names: str, num_blocks: int = 8) -> None:
    """Have prompts of so many blocks computed, one after the other."""
    for name in names:
        engine.ask(f"{name} {len(engine.orders)}", num_blocks * BLOCK_SIZE, 1, prompt=name)
        engine.settle()
        engine.settle_loop()
        engine.scheduling.kv.flush()


def test_what_does_not_pay_is_computed(tmp_path: Path) -> None:
    """In the connector: found, not loaded, computed, and not taken for lost."""
    disk = {"medium": "nvme", "path": tmp_path, "capacity": 512 * STRIDE}
    with opened(SMALL, disk) as engine:
        serve(engine, "again", *map(str, range(8)))
        lookup = engine.scheduling.kv.lookup_nowait

        def slow(keys: BlockKeys) -> LookupResult:
            found = lookup(keys)
            return LookupResult(found.num_blocks, found.runs, 0, found.block_size, {"nvme": LoadCost(9.0, 9.0)})

        engine.scheduling.kv.lookup_nowait = slow
        engine.scheduling._paying._num_tokens = engine.scheduling._paying._seconds = 1.0  # noqa: SLF001 - ours
        engine.scheduling._paying._num_tokens = 1000.0  # noqa: SLF001 - likewise
        engine.scheduling.counts.take()
        serve(engine, "again")
        said = engine.scheduling.counts.take().data
        assert (said["load_blocks_declined"], said.get("load_requests", 0)) == (7, 0)


def test_who_waits_for_room_in_memory_computes_once_loading_pays_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others are loading may hang meanwhile."""
    disk = {"medium": "nvme", "path": tmp_path, "capacity": 512 * STRIDE}
    with opened(SMALL, disk) as engine:
        serve(engine, "again", *map(str, range(8)))
        engine.scheduling._paying._num_tokens, engine.scheduling._paying._seconds = 10.0, 1.0  # noqa: SLF001 - ours
        monkeypatch.setattr(type(engine.scheduling._loads), "num_bringing", 1000)  # noqa: SLF001 - likewise
        now = 0.0
        engine.scheduling._loads._clock = lambda: now  # noqa: SLF001 - likewise
        engine.ask("again, later", 8 * BLOCK_SIZE, 1, prompt="again")
        engine.step()
        assert engine.waiting
        lookup = engine.scheduling.kv.lookup_nowait

        def slow(keys: BlockKeys) -> LookupResult:
            found = lookup(keys)
            return LookupResult(found.num_blocks, found.runs, 0, found.block_size, {"nvme": LoadCost(9.0, 9.0)})

        engine.scheduling.kv.lookup_nowait = slow
        engine.step()
        assert engine.waiting
        now = 1.0
        engine.step()
        assert not engine.waiting
        engine.settle()


def test_who_has_all_in_memory_waits_for_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others hold as much as is for loads, and what they load may hang: that is nothing to who brings nothing there."""
    disk = {"medium": "nvme", "path": tmp_path, "capacity": 512 * STRIDE}
    with opened(SMALL, disk) as engine:
        serve(engine, "on disk", *map(str, range(8)))
        monkeypatch.setattr(type(engine.scheduling._loads), "num_bringing", 1000)  # noqa: SLF001 - ours
        engine.scheduling.counts.take()
        for prompt in ("7", "on disk"):
            engine.ask(f"{prompt}, again", 8 * BLOCK_SIZE, 1, prompt=prompt)
        for _ in range(3):
            engine.step()
            engine.settle_loop()
        assert [request.request_id for request in engine.waiting] == ["on disk, again"]
        assert engine.scheduling.counts.take().data["load_blocks"] == 7
        monkeypatch.undo()
        engine.settle()


def until_it_answers_later_than(seconds: float, tier: str, engine: SmallVLLM) -> None:
    """Wait until a tier that does not answer has been asked for so long."""
    nothing = BlockKeys.from_hashes([], block_size=BLOCK_SIZE)
    while engine.scheduling.kv.lookup_nowait(nothing).costs[tier].answer_s <= seconds:
        engine.settle_loop()


def test_who_comes_after_one_that_waited_in_vain_does_not_wait() -> None:
    """A request is in the queue while a shared tier is asked; others go on with their step while it is."""
    far = {"medium": "tests.integrations.test_vllm_paying:FarAway", "capacity": "8MiB", "timeout_s": 3}
    with opened(SMALL, far, lookup_timeout_s=0.2) as engine:
        engine.scheduling._paying._num_tokens, engine.scheduling._paying._seconds = 1000.0, 1.0  # noqa: SLF001 - ours
        engine.ask("first", 8 * BLOCK_SIZE, 1)
        engine.step()
        assert engine.waiting
        engine.settle()
        until_it_answers_later_than(0.2, "FarAway", engine)
        for name in ("second", "third"):
            engine.ask(name, 8 * BLOCK_SIZE, 1)
            engine.step()
            assert not engine.waiting
        engine.settle()


def test_only_so_many_are_brought_at_once(tmp_path: Path) -> None:
    """Those that are next; the others wait, and all are served: half of the memory is room enough for them."""
    disk = {"medium": "nvme", "path": tmp_path, "capacity": 512 * STRIDE}
    with opened(SMALL, disk, num_blocks=512) as engine:
        names = [str(number) for number in range(16)]
        serve(engine, *names, *"others")  # which are in memory then, and take no more of it
        engine.scheduling.counts.take()
        for name in names:
            engine.ask(f"{name} again", 8 * BLOCK_SIZE, 1, prompt=name)
        most = 0
        while engine.running or engine.waiting:
            engine.step()
            engine.settle_loop()
            most = max(most, engine.scheduling.num_bringing)
        assert 7 <= most <= 16
        engine.settle()
        said = engine.scheduling.counts.take().data
        assert (said["load_blocks"], said["load_blocks_lost"]) == (16 * 7, 0)


@contextmanager
def one_waits_for_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SmallVLLM, Request, list[float]]]:
    """Have a request wait that brings more than half of the memory holds; and the time, by which it may for a second.

    Another prompt is in memory, and three are below.
    """
    monkeypatch.setattr(VLLM.loading, "_PATIENCE_S", 60.0)  # here it is no matter of the machine's speed
    disk = {"medium": "nvme", "path": path, "capacity": 512 * STRIDE}
    with opened(SMALL, disk, num_blocks=512) as engine:
        serve(engine, "much", num_blocks=20)
        serve(engine, "0.0", "0.5", "1.5", num_blocks=4)
        serve(engine, "else", num_blocks=28)
        serve(engine, "in memory", num_blocks=4)
        loads, now = engine.scheduling._loads, [0.0]  # noqa: SLF001 - ours
        monkeypatch.setattr(loads, "_clock", lambda: now[0])
        monkeypatch.setattr(loads._paying, "patience_s", lambda _num_tokens: 1.0)  # noqa: SLF001 - likewise
        engine.ask("first", 4 * BLOCK_SIZE + 1, 1, prompt="in memory")
        engine.step()
        much = engine.ask("much, again", 20 * BLOCK_SIZE + 1, 1, prompt="much")
        yield engine, much, now


def test_nobody_waits_for_good_for_room_that_others_do_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each step another request loads what memory has: there is room, once one has waited as long as for a load."""
    with one_waits_for_room(tmp_path, monkeypatch) as (engine, much, now):
        bringing = engine.scheduling._loads._bringing  # noqa: SLF001 - ours
        while much in engine.waiting and much.request_id not in bringing:
            engine.ask(f"at {now[0]}", 4 * BLOCK_SIZE + 1, 1, prompt="in memory")
            now[0] += 0.25
            engine.step()
            assert now[0] < 3.0
        assert now[0] > 1.0
        engine.settle()


def test_who_has_waited_for_room_for_long_is_not_overtaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By others that bring less, for which there always is room; what memory has takes none."""
    with one_waits_for_room(tmp_path, monkeypatch) as (engine, much, now):
        for name in ("num_bringing", "_num_coming"):
            monkeypatch.setattr(type(engine.scheduling._loads), name, 1)  # noqa: SLF001 - ours
        for at in (0.0, 0.5, 1.5):
            now[0] = at
            for prompt in (str(at), "in memory"):
                engine.ask(f"{prompt} at {at}", 4 * BLOCK_SIZE + 1, 1, prompt=prompt)
            engine.step(4)
            while at < 1.0 and len(engine.waiting) > 1:
                engine.step()
        assert not engine.scheduling._loads._bringing  # noqa: SLF001 - likewise
        assert [each.request_id for each in engine.waiting] == [much.request_id, "1.5 at 1.5"]
        monkeypatch.undo()
        engine.settle()
