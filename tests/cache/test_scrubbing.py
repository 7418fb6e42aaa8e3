"""Scrubbing an NVMe tier: damage is found before anyone asks for the block, and nothing else changes."""

import asyncio
import errno
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anyio.lowlevel import checkpoint

from tests.support.any_layout import AnyEngine, nvme, open_any, prompt
from tests.support.backends import ScriptedSlotBackend
from tests.support.caches import Recorder, inside, keep, open_cache, until, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine
from tests.support.engine import prompt as small_prompt
from tiered_kv import (
    BackendUnavailableError,
    BlockKeys,
    BlocksCorrupted,
    CacheClosed,
    ConfigurationError,
    Encryption,
    RecordsRefused,
    TieredKVSettings,
    TierScrubbed,
    TierStalled,
)
from tiered_kv.catalog.index import TierIndex
from tiered_kv.media.backend import BackendContext, Block, Missing, Outcome, Recovered, SlotBackend, Verify
from tiered_kv.tiers.health import StorageHealth
from tiered_kv_backends.nvme import NVMeBackend

N = 12
KEYS: dict[str, Any] = {"keys": ["01" * 32]}


def scrubbed(path: Path, **settings: object) -> dict[str, object]:
    """Return a tier that is verified at once, as fast as it goes."""
    return {**nvme(path), "scrub_bandwidth": "100GiB", **settings}


async def filled(path: Path, **settings: object) -> tuple[AnyEngine, BlockKeys]:
    """Leave a tier with a prompt in it."""
    engine, keys = AnyEngine(), prompt(N)
    async with open_any(engine, {**nvme(path), **settings}) as kv:
        await kv.store(keys, engine.fill(keys, range(N)))
        await kv.flush()
    return engine, keys


def flip(path: Path, at: int) -> None:
    """Flip a bit of the only slab there is."""
    slab = next(path.rglob("slab"))
    data = bytearray(slab.read_bytes())
    data[at] ^= 1
    slab.write_bytes(data)


@pytest.mark.parametrize("settings", [{}, {"encryption": KEYS}])
@pytest.mark.parametrize("at", [4096 + 700, 40, 2000])
async def test_damage_is_found_before_a_load(tmp_path: Path, settings: dict[str, object], at: int) -> None:
    """A block whose payload or header is broken goes, after a restart too; all others stay. Padding does not count."""
    engine, keys = await filled(tmp_path, **settings)
    flip(tmp_path, 3 * 8192 + at)
    events, num_broken = Recorder(), int(at != 2000)
    for removed in (num_broken, 0):
        events.events.clear()
        async with open_any(engine, scrubbed(tmp_path, **settings), emit=events) as kv:
            await until(lambda: bool(events.of(TierScrubbed)))
            done = events.of(TierScrubbed)[0]
            assert (done.tier, done.removed) == ("nvme", removed)
            broken = kv.namespace().names(keys)[3].tobytes().hex()
            assert events.of(BlocksCorrupted) == [BlocksCorrupted("nvme", 1, (broken,))] * removed
            await until_idle(kv)
            assert (await kv.lookup(keys)).num_blocks == (3 if num_broken else N)
            assert (await kv.lookup(keys[4:])).num_blocks == N - 4
            assert kv.stats()["nvme"].corrupt == removed


async def test_scrubbing_is_no_use(tmp_path: Path) -> None:
    """The order in which blocks go is the same after it."""
    engine, _ = await filled(tmp_path)
    events = Recorder()
    async with open_any(engine, scrubbed(tmp_path), emit=events) as kv:
        index = inside(kv).chains[0].owned[0].index
        before = index.names_in_order()[1].tolist()
        await until(lambda: bool(events.of(TierScrubbed)))
        assert index.names_in_order()[1].tolist() == before
        assert events.of(TierScrubbed)[0].blocks == N


@pytest.mark.parametrize("num_times", [1, 1000])
async def test_what_cannot_be_read_is_tried_once_more_and_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_times: int
) -> None:
    """A medium may fail for a moment; a place that stays bad holds up no others, and is not said to be verified."""
    engine, keys = await filled(tmp_path)
    flip(tmp_path, 3 * 8192 + 4096 + 700)
    events, peek, calls = Recorder(), NVMeBackend.peek, list[list[int]]()

    async def fails(self: NVMeBackend, group: int, slots: np.ndarray, into: Sequence[Block]) -> list[Outcome]:
        calls.append(slots.tolist())
        if len(calls) <= num_times:
            raise OSError(errno.EIO, "planted")
        return await peek(self, group, slots, into)

    monkeypatch.setattr(NVMeBackend, "peek", fails)
    async with open_any(engine, scrubbed(tmp_path), emit=events) as kv:
        await until(lambda: bool(events.of(TierScrubbed)))
        done = events.of(TierScrubbed)[0]
        assert (done.blocks, done.removed) == ((N, 1) if num_times == 1 else (0, 0))
        assert calls == [list(range(N))] * 2
        await until_idle(kv)
        assert (await kv.lookup(keys)).num_blocks == (3 if num_times == 1 else N)


class Torn(NVMeBackend):
    """Whatever is peeked at is being overwritten."""

    async def peek(self, group: int, slots: np.ndarray, into: Sequence[Block]) -> list[Outcome]:
        """Fill in what is there, and have it changed."""
        outcomes = await super().peek(group, slots, into)
        for block in into:
            block.payload[-1] ^= 1
        return outcomes


async def test_what_changes_meanwhile_stays(tmp_path: Path) -> None:
    """A block that is written while it is looked at is looked at again, and not removed."""
    engine, keys = await filled(tmp_path)
    events = Recorder()
    async with open_any(engine, Torn(scrubbed(tmp_path)), emit=events) as kv:
        await until(lambda: bool(events.of(TierScrubbed)))
        assert events.of(TierScrubbed)[0].removed == 0
        assert (await kv.lookup(keys)).num_blocks == N


class Replaced(NVMeBackend):
    """What is read, and not merely peeked at, has something happen to it before the answer comes."""

    async def meanwhile(self) -> None:
        """Do nothing, unless a test says otherwise."""

    async def read(
        self, group: int, slots: np.ndarray, into: Sequence[Block], verify: Verify | None = None
    ) -> list[Outcome]:
        """Read what is there, and answer later."""
        outcomes = await super().read(group, slots, into, verify)
        await self.meanwhile()
        return outcomes

    async def peek(self, group: int, slots: np.ndarray, into: Sequence[Block]) -> list[Outcome]:
        """Read, and answer at once."""
        return await super().read(group, slots, into)


async def test_what_is_stored_anew_while_it_is_read_stays(tmp_path: Path) -> None:
    """A block that was found broken, evicted and stored again is not removed from where it is now."""
    engine, keys = await filled(tmp_path)
    flip(tmp_path, 3 * 8192 + 4096 + 700)
    events, backend = Recorder(), Replaced(scrubbed(tmp_path))
    async with open_any(engine, backend, emit=events) as kv:

        async def replace() -> None:
            del backend.meanwhile  # once
            await kv.evict(keys[3:4])
            await kv.store(keys[3:4], engine.fill(keys[3:4], [3]))
            await kv.flush()

        backend.meanwhile = replace  # type: ignore[method-assign]  # until it has happened
        await until(lambda: bool(events.of(TierScrubbed)))
        assert events.of(TierScrubbed)[0].removed == 0
        assert not events.of(BlocksCorrupted)
        await until_idle(kv)
        assert (await kv.lookup(keys)).num_blocks == N


class OpensLater(NVMeBackend):
    """A disk that is mounted after the cache was opened."""

    is_there = False

    async def open(self, context: BackendContext) -> list[Recovered]:
        """Fail until it is there."""
        if not self.is_there:
            raise BackendUnavailableError("not mounted")
        return await super().open(context)


async def test_what_opens_later_is_scrubbed_then(tmp_path: Path) -> None:
    """A tier that is not there when the cache is opened is not taken for one without blocks."""
    engine, _ = await filled(tmp_path)
    flip(tmp_path, 3 * 8192 + 4096 + 700)
    events, backend = Recorder(), OpensLater(scrubbed(tmp_path, required=False))
    async with open_any(engine, backend, emit=events) as kv:
        await checkpoint()  # it has looked for the first time
        backend.is_there = True
        await until(lambda: bool(events.of(TierScrubbed)))
        assert [(done.blocks, done.removed) for done in events.of(TierScrubbed)] == [(N, 1)]
        await until_idle(kv)


async def test_a_removed_key_leaves_nothing_broken(tmp_path: Path) -> None:
    """Records that the tier's keys do not open any more are not broken: it says why they go, and the others stay."""
    names: dict[str, Any] = {"names_key": "03" * 32}
    mine, both = Encryption(**KEYS, **names), Encryption(keys=["02" * 32, *KEYS["keys"]], **names)
    engine, keys = await filled(tmp_path, encryption=mine)
    others = prompt(N, seed=1)
    async with open_any(engine, scrubbed(tmp_path, encryption=both)) as kv:
        await kv.store(others, engine.fill(others, range(N)))
    events = Recorder()
    async with open_any(
        engine, scrubbed(tmp_path, encryption=Encryption(keys=["02" * 32], **names)), emit=events
    ) as kv:
        await until(lambda: bool(events.of(TierScrubbed)))
        assert events.of(TierScrubbed)[0].removed == 0
        assert sum(event.blocks for event in events.of(RecordsRefused)) == N
        await until_idle(kv)
        assert (await kv.lookup(keys)).num_blocks == 0
        assert (await kv.load(others, engine.spec(range(N)))).num_blocks == N


class LateOnce(NVMeBackend):
    """A disk that is late just after something was peeked at, and soon is not."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        super().__init__(settings)
        self.health: asyncio.Future[StorageHealth] = asyncio.get_running_loop().create_future()
        self._was_late = False

    async def peek(self, group: int, slots: np.ndarray, into: Sequence[Block]) -> list[Outcome]:
        """Fill in what is there; then have the tier bypassed for a moment."""
        outcomes, health = await super().peek(group, slots, into), await self.health
        if not self._was_late:
            self._was_late = True
            health.late("lookup", 1.0)
            ended = partial(health.ended, "lookup", 1.0, is_late=True, has_failed=False)
            asyncio.get_running_loop().call_later(0.5, ended)
        return outcomes


async def test_what_was_not_read_while_the_tier_was_bypassed_is_read_again(tmp_path: Path) -> None:
    """A pass leaves nothing out for it."""
    engine, _ = await filled(tmp_path)
    flip(tmp_path, 3 * 8192 + 4096 + 700)
    events, backend = Recorder(), LateOnce(scrubbed(tmp_path))
    async with open_any(engine, backend, emit=events) as kv:
        backend.health.set_result(inside(kv).chains[0].storage[0].health)
        await until(lambda: bool(events.of(TierScrubbed)))
        assert [(done.blocks, done.removed) for done in events.of(TierScrubbed)] == [(N, 1)]


_LATE_S = 0.2
"""More than any other call takes, on a machine that is busy too."""


class HangsOnce(NVMeBackend):
    """Hangs when it is first asked in one way, until it is let go; its first slot may be taken out of use for that."""

    def __init__(self, settings: Mapping[str, object], hangs_in: str) -> None:
        super().__init__(settings)
        self.may_go = asyncio.Event()
        self.num_held = 0
        self._hangs_in = hangs_in
        self._missing: Missing | None = None

    async def peek(self, group: int, slots: np.ndarray, into: Sequence[Block]) -> list[Outcome]:
        """Fill in what is there."""
        await self._pass("peek")
        return await super().peek(group, slots, into)

    async def read(
        self, group: int, slots: np.ndarray, into: Sequence[Block], verify: Verify | None = None
    ) -> list[Outcome]:
        """Read what is there."""
        await self._pass("read")
        return await super().read(group, slots, into, verify)

    async def _pass(self, doing: str) -> None:
        if doing == self._hangs_in:
            self._hangs_in = ""
            self.num_held += 1
            await self.may_go.wait()
            self.num_held -= 1

    def lose_a_slot(self) -> None:
        """Have the first slot be of a disk that is out of use."""
        self._missing = Missing(np.arange(self.fit(self.settings.capacity)) == 0, "it hangs")

    def missing(self, group: int) -> Missing | None:
        """Say so."""
        return self._missing


@pytest.mark.parametrize("hangs_in", ["peek", "read"])
async def test_a_read_that_hangs_holds_no_bytes_and_ends_as_others_do(tmp_path: Path, hangs_in: str) -> None:
    """Beyond its time nobody waits for its bytes; when it returns what it has seen counts, and the pass goes on."""
    engine, keys = await filled(tmp_path)
    flip(tmp_path, 3 * 8192 + 4096 + 700)
    events, backend = Recorder(), HangsOnce(scrubbed(tmp_path, timeout_s=_LATE_S), hangs_in)
    async with open_any(engine, backend, emit=events) as kv:
        await until(lambda: bool(events.of(TierStalled)))
        assert backend.num_held == 1
        assert kv.stats()["nvme"].in_flight_bytes == 0
        assert kv.stats()["nvme"].leased == (1 if hangs_in == "read" else 0)  # what is read is not written over
        backend.may_go.set()
        await until(lambda: bool(events.of(TierScrubbed)))
        assert [(done.blocks, done.removed) for done in events.of(TierScrubbed)] == [(N, 1)]
        await until_idle(kv)
        assert (await kv.lookup(keys)).num_blocks == 3


@pytest.mark.parametrize("hangs_in", ["peek", "read"])
async def test_a_read_that_never_ends_keeps_nothing_from_being_scrubbed(tmp_path: Path, hangs_in: str) -> None:
    """Once the disk that it hangs on is out of use the others are verified; and the cache closes beside it."""
    engine, _ = await filled(tmp_path)
    flip(tmp_path, 3 * 8192 + 4096 + 700)
    events, backend = Recorder(), HangsOnce(scrubbed(tmp_path, timeout_s=_LATE_S), hangs_in)
    async with open_any(engine, backend, emit=events) as kv:
        await until(lambda: bool(events.of(TierStalled)))
        backend.lose_a_slot()
        await until(lambda: bool(events.of(TierScrubbed)))
        assert [(done.blocks, done.removed) for done in events.of(TierScrubbed)] == [(N - 1, 1)]
        assert backend.num_held == 1
        assert kv.stats()["nvme"].in_flight_bytes == 0
    assert events.of(CacheClosed)[0].abandoned == 0


class Peeked(ScriptedSlotBackend):
    """A medium in memory that is scrubbed at once, as fast as it goes."""

    def __init__(self, num_slots: int, *, read_bandwidth: int | None = None) -> None:
        super().__init__(num_slots, scrub_bandwidth="100GiB", read_bandwidth=read_bandwidth)

    async def peek(self, group: int, slots: np.ndarray, into: Sequence[Block]) -> list[Outcome]:
        """Fill in what is there."""
        return await self._read(group, slots, into)


async def test_what_waits_for_its_turn_to_be_read_again_is_not_held() -> None:
    """It can be evicted, and its slot is another's then."""
    engine, keys, disk = Engine(), small_prompt(4), Peeked(4, read_bandwidth=1)  # some at once, the next in hours
    async with open_cache(disk, engine=engine) as kv:
        await keep(kv, engine, keys)
    disk.flip_byte(3)
    async with open_cache(disk, engine=engine) as kv:
        await until(lambda: inside(kv).chains[0].storage[0].calls.num_waiting == 1)
        assert kv.stats()["slots"].leased == 0
        await kv.evict(keys[3:])
        assert kv.stats()["slots"].free == 1


class NeverIdle(Peeked):
    """A medium of which a read ends once the next one has begun, until it may rest."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.may_rest = False
        self._last: asyncio.Event | None = None

    async def read(self, group: int, slots: np.ndarray, into: Sequence[Block]) -> list[Outcome]:
        """Fill in what is there, once the next one has begun."""
        if self._last is not None:
            self._last.set()
        self._last = next_begun = asyncio.Event()
        if not self.may_rest:
            await next_begun.wait()
        return await super().read(group, slots, into)

    def rest(self) -> None:
        """End the last read, and those to come at once."""
        self.may_rest = True
        if self._last is not None:
            self._last.set()


async def test_prefetches_without_end_keep_no_pass_from_its_end() -> None:
    """Some of what is read is always theirs."""
    engine, disk, prompts = Engine(num_pages=64), NeverIdle(512), [small_prompt(64, seed=seed) for seed in range(8)]
    events, cpu = Recorder(), {"medium": "cpu", "capacity": 512 * PAYLOAD_BYTES}
    async with open_cache(cpu, disk, engine=engine) as kv:
        for keys in prompts:
            await keep(kv, engine, keys)

    async def prefetch(keys: BlockKeys) -> None:
        while not disk.may_rest:
            await kv.evict(keys, tier="cpu")
            await kv.prefetch(keys)

    async with open_cache(cpu, disk, engine=engine, emit=events) as kv:
        prefetching = [asyncio.ensure_future(prefetch(keys)) for keys in prompts]
        try:
            await until(lambda: bool(events.of(TierScrubbed)))
        finally:
            disk.rest()
        await asyncio.gather(*prefetching)
    assert events.of(TierScrubbed)[0].blocks == 512


async def test_what_cannot_be_scrubbed_says_so(tmp_path: Path) -> None:
    """Memory is not, nor a medium that cannot be looked at beside its calls."""
    with pytest.raises(ConfigurationError, match="scrub_bandwidth"):
        TieredKVSettings(tiers=[{"medium": "cpu", "scrub_bandwidth": "1MiB"}])
    backend = NVMeBackend(scrubbed(tmp_path))
    plain = type("Plain", (NVMeBackend,), {"peek": SlotBackend.peek})
    with pytest.raises(ConfigurationError, match="peek"):
        async with open_any(AnyEngine(), plain(backend.settings)):
            pass


def test_ready_blocks_are_walked_in_the_order_of_slots() -> None:
    """Each is met once, however few are asked for at once; what is pending or free is not."""
    index = TierIndex(100_000)
    names = np.arange(4 * 50, dtype=np.uint64).reshape(50, 4) + np.uint64(1)
    index.restore(names, np.arange(0, 100_000, 2000))
    met, start = list[int](), 0
    while start < index.num_slots:
        found, slots, start = index.ready_from(start, 3)
        assert index.find(found)[0].tolist() == slots.tolist()
        met += slots.tolist()
    assert met == list(range(0, 100_000, 2000))
