"""The world of a simulation: disks and stores, processes that open caches on them, and what befalls both."""

import asyncio
import errno
import gc
import logging
import random
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

from tiered_kv.cache.tiered_kv import TieredKV
from tiered_kv.settings.registry import resolve
from tiered_kv.settings.settings import CacheLimits
from tiered_kv.system import running_in
from tiered_kv.testing.scripted import ScriptedDevice
from tiered_kv.testing.simulation.disk import DiskFaults, SimulatedDisk, SimulatedFiles
from tiered_kv.testing.simulation.engine import LAYOUT, STRIDE
from tiered_kv.testing.simulation.known import Known, WrongAnswer
from tiered_kv.testing.simulation.media import SharedStore, StoreClient, StoreFaults
from tiered_kv.testing.simulation.shapes import MOST_STRANGERS, NUM_ALL, Shape
from tiered_kv.testing.simulation.simulated_system import SimulatedLoop, SimulatedSystem
from tiered_kv.testing.simulation.tape import Tape
from tiered_kv.testing.simulation.threads import ProcessEnded, SimulatedProcess, SimulatedThread, Turns
from tiered_kv.values.events import BlocksCorrupted, Event, TierFailed, TierStalled, TierTripped
from tiered_kv.values.keys import ModelIdentity, Shard
from tiered_kv.values.layout import PAGE_BYTES
from tiered_kv.values.results import CacheStatistics
from tiered_kv.values.specs import FileLoadStoreSpec

WEIGHTS: Final = ("w0", "w1")
TIMEOUT_S: Final = 1.0
"""Of a storage tier."""
LONGEST_S: Final = 90.0
"""What any call may take that waits for others, on media that are slow and not at fault."""
_LOOKS_S: Final = 0.02
LIMITS: Final = CacheLimits(
    window=2 * STRIDE,
    bounce=16 * STRIDE,
    load_timeout_s=3.0,
    store_timeout_s=2.0,
    open_timeout_s=20.0,
    close_timeout_s=3.0,
    clean_after_s=2.0,
)
_DISK_SLOT: Final = 16_500
"""Bytes of an NVMe tier's capacity for a slot of both groups."""
_MOST_A_WRITE: Final = 32 << 10
"""Bytes of one call of a store."""
_SHORTEST_PAYLOAD: Final = 512
"""Bytes that a record of any block has, encoded or not."""


_RATES: Final = {
    "errors": (True, "error", 1.0),
    "short": (True, "short", 1.0),
    "disk stalls": (True, "stall", 0.25),
    "store errors": (False, "error", 1.0),
    "store lies": (False, "false", 1.0),
    "store stalls": (False, "stall", 0.5),
    "disk hangs": (True, "hang", 0.25),
    "store hangs": (False, "hang", 0.25),
}
"""Of each kind of trouble: whether it is a disk's or a store's, which of its faults, and how often for given odds."""
KINDS_OF_TROUBLE: Final = ("store is broken", "disk is away", *_RATES)


@dataclass(eq=False)
class Trouble:
    """What is wrong with the media now, as the world knows.

    Attributes:
        is_on: Whether anything may go wrong.
        since_told: Whether anything has since the media were last told all that they are to remember.
        ended: When it was switched off last.
        lost_power: Whether the next end of a process is that of its machine.
        is_settled: Whether nothing else is to go wrong: somebody measures how long a call takes.
        slow_until: When media that are slow and well were fast again.
        has_rot: Whether a bit was ever changed: the block there is lost, whatever is promised of it.
        has_lied: Whether a medium ever answered something else than the truth.
        is_stale: Whether a disk is another than the one that was opened.
        has_unentered: Whether a process was killed between a record and its entry in the ledger, whichever came first:
            what is half written, or whole, is in a slot that another block had, or nothing in one that has an entry.
    """

    is_on: bool = False
    since_told: bool = False
    ended: float = 0.0
    lost_power: bool = False
    is_settled: bool = False
    slow_until: float = 0.0
    has_rot: bool = False
    has_lied: bool = False
    is_stale: bool = False
    has_unentered: bool = False

    @property
    def has_been(self) -> bool:
        """Whether anything ever went wrong with a medium, or left there what no ledger has."""
        return self.is_on or self.ended > 0 or any((self.has_rot, self.has_lied, self.is_stale, self.has_unentered))


class World:
    """All that there is.

    Attributes:
        known: What could be served.
        known_of_ranks: The same of an engine of several ranks, whose parts of blocks are no others'.
        scheduler: Of that, the last process.
        trouble: What is wrong.
        timeline: What happened, if it is kept.
        digest_of: Hashes the timeline, kept or not.
        num_steps: Calls of engines and changes of the world, so far.
        num_tier_faults: How often a cache said that a tier has failed, or was late.
        told: Why tiers have failed, as caches said: how often by what, in a word.
        has_neighbour: Whether another engine has ever shared the store: what one evicts the other may store again.
        has_flooded: Whether more blocks were stored than media have room for: others may have gone for them.
        sound: Those disks of the process that goes on which have never been at fault since it began.
        mute: Those that could not always say of themselves what they were to say.
        gpu_s: What a copy of a GPU takes, now and then.
        slow_copies: How many take that.
    """

    def __init__(self, tape: Tape, num_steps: int, shape: Shape, *, keeps_timeline: bool = False) -> None:
        gc.freeze()  # `_collect` walks what is made from here on, and not all of torch
        self.tape = tape
        depth = tape.pick("plan", (None, None, None, 3, 10))
        self.turns = Turns(tape, pct_depth=depth)
        self.files = SimulatedFiles(self.turns)
        self.system = SimulatedSystem(self.turns, tape, self.files)
        self.known = Known(sends_below=shape.is_owned and not (shape.has("gpu") or shape.has_short_queue))
        self.known_of_ranks = Known()
        self.trouble = Trouble()
        self.shape = shape
        self.timeline: list[str] = []
        self.num_lines = 0
        self.hash = 0
        self._keeps_timeline = keeps_timeline
        self.turns.tell, self.turns.found = self.tell, self.fail
        self.num_steps = 0
        self.num_tier_faults = 0
        self.told = Counter[str]()
        self.has_flooded = self.has_neighbour = False
        self.gpu_s = tape.pick("plan", (0.0, 0.0, 0.001, 0.005))
        self.slow_copies = 0.2
        self.most_steps = num_steps
        self.failures: list[BaseException] = []
        self.disks = [self._disk(f"/sim/disk{n}") for n in range(3 if shape.changes_disks else 2)]
        self.sound, self.mute = set(self.disks), set[SimulatedDisk]()
        self.store = SharedStore(self.shape.store_bytes, tape, self.turns)
        self.other = SharedStore(1 << 30, tape, self.turns)
        self.other.faults = StoreFaults(lookup_s=tape.pick("plan", (0.002, 0.2, 0.4)), latency_s=0.3, most_calls=2)
        self.die_at: int | None = None
        self.scheduler: SimulatedProcess | None = None
        self._graveyard: list[object] = []
        self._num_processes = 0
        self._num_numbers = 0
        self._num_engines = 0
        self._measuring: set[object] = set()
        self._damaged: set[str] = set()
        self._began = self.turns.now

    def _disk(self, path: str) -> SimulatedDisk:
        come_along = not self.tape.chance("plan", 0.5)
        disk = SimulatedDisk(Path(path), 64 << 20, self.tape, self.turns, names_come_along=come_along)
        self.files.mount(disk)
        return disk

    def tell(self, what: str) -> None:
        """Note what happened."""
        line = f"{self.turns.now:10.4f} {self.turns.current.name:<24} {what}"
        self.hash = zlib.crc32(line.encode(), self.hash)  # the same in every process
        self.num_lines += 1
        if self._keeps_timeline:
            self.timeline.append(line)

    def fail(self, error: BaseException) -> None:
        """Note what was found; the first counts."""
        self.tell(f"FOUND {error}")
        self.failures.append(error)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be begun."""
        return bool(self.failures) or self.num_steps >= self.most_steps

    @property
    def may_be_wrong(self) -> bool:
        """Whether anything may go wrong now, or did a moment ago: then blocks may be missing, and calls late."""
        trouble = self.trouble
        return trouble.is_on or trouble.is_stale or self.turns.now < trouble.ended + 12.0

    def may_have_been_wrong(self, since: float) -> bool:
        """Say whether anything may go wrong now, or did at some time since then: calls may stall for long after it."""
        return self.may_be_wrong or self.trouble.ended >= since

    @property
    def may_be_late(self) -> bool:
        """Whether calls may take longer than healthy media explain, or did a moment ago, or one stalls yet."""
        now, trouble = self.turns.now, self.trouble
        is_stalling = any(now < disk.stalls_until for disk in self.disks)
        return self.may_be_wrong or trouble.is_settled or now < trouble.slow_until + 12.0 or is_stalling

    def tiers(self, shape: Shape) -> list[object]:
        """Make the tiers of a cache."""
        write = "back" if shape.writes_back and ("cpu" in shape.chain or "gpu" in shape.chain) else "through"
        sealed = {"encryption": {"keys": ["01" * 32], "cipher": shape.cipher}} if shape.cipher else {}
        storage: dict[str, Any] = {
            "write": write, "admit_after": shape.admit_after, "timeout_s": TIMEOUT_S, **sealed,
        }  # fmt: skip
        found: list[object] = []
        for name in shape.chain:
            if name == "gpu":
                found.append({"medium": "gpu", "capacity": 6 * STRIDE, "ttl_s": shape.ttl_s, "policy": shape.policy})
            elif name == "cpu":
                size = {"capacity": shape.cpu_slots * STRIDE, "max_capacity": 2 * NUM_ALL * STRIDE}
                found.append({"medium": "cpu", "ttl_s": shape.ttl_s, "policy": shape.policy, **size})
            elif name == "nvme":
                paths = [str(disk.path / "kv") for disk in self.disks[: shape.num_disks]]
                scrubs = {"scrub_bandwidth": shape.scrub_bytes_per_s, "scrub_interval_s": shape.scrub_interval_s}
                found.append(
                    _resolve("nvme")({  # which lies on the real disk, so that it is looked up once
                        "path": paths if len(paths) > 1 else paths[0], "num_threads": 2,
                        "capacity": self.disk_bytes(shape.disk_slots // shape.num_disks),
                        "max_capacity": self.disk_bytes(2 * NUM_ALL), "ttl_s": shape.ttl_s, "policy": shape.policy,
                        **storage, **scrubs,
                    })
                )  # fmt: skip
            else:
                pace = {"read_bandwidth": 40 * 8192} if shape.is_paced and name == "store" else {}
                if name == "store" and shape.wear is not None:
                    pace["max_write_bytes_per_day"] = 24 * shape.wear
                store = self.store if name == "store" else self.other
                found.append(StoreClient(store, name=name, **storage, **pace))
        return found

    @staticmethod
    def disk_bytes(num_slots: int) -> int:
        """Return a capacity of the NVMe tier for so many slots of each group."""
        return 300_000 + num_slots * _DISK_SLOT

    def begin_trouble(self, number: int, kind: str = "") -> None:
        """Have something go wrong from now on, of some kind or any, often where a kind is named."""
        tape = self.tape
        odds = 0.6
        if not kind:
            kind = tape.pick("plan", KINDS_OF_TROUBLE)
            odds = tape.pick("plan", (0.03, 0.2, 0.6))
        if kind == "disk is away":
            self.fail_disk(self.disks[number % self.shape.num_disks], kind)
        elif kind == "store is broken":
            broken = tape.pick("plan", ("locate", "describe", "lookup", "delete", "write"))
            self.trouble_of(f"the store cannot {broken}", [self.store], broken_methods=(broken,))
        elif _RATES[kind][0]:
            self.fail_disk(self.disks[number % len(self.disks)], kind, odds)
        else:
            self.trouble.has_lied |= kind == "store lies"
            _, what, share = _RATES[kind]
            self.trouble_of(f"{kind} {odds}", [self.store], **{what: odds * share})

    def fail_disk(self, disk: SimulatedDisk, kind: str, odds: float = 0.6) -> None:
        """Have a disk be away, or fail often, in one of the ways in which disks do."""
        if kind == "disk is away":
            disk.gone = errno.ENODEV
            self.trouble_of(f"{disk.path} is away", ())
        else:
            _, what, share = _RATES[kind]
            self.trouble_of(f"{disk.path}, {kind} {odds}", [disk], **{what: odds * share})

    def trouble_of(self, what: str, media: Sequence[SimulatedDisk | SharedStore], **faults: object) -> None:
        """Have something go wrong with some media from now on: some of their faults are as is said."""
        for medium in media:
            for name, rate in faults.items():
                setattr(medium.faults, name, rate)
        self._see_sound()
        self.known.trouble_begins()
        self.trouble.is_on = self.trouble.since_told = True
        self.tell(f"trouble: {what}")

    def fail_once(self, number: int, at: int, num_calls: int = 1) -> None:
        """Have the ``at``'th call of a disk from now on fail, and perhaps some after it, and no others."""
        disk = self.disks[number % self.shape.num_disks]
        self.trouble_of(f"call {at} of {disk.path} fails, {num_calls} in a row", [disk], once=at, num_once=num_calls)

    def fail_all(self) -> None:
        """Have every call of every disk fail."""
        self.trouble_of("all calls of disks fail", self.disks, error=1.0)

    def stall_all(self) -> None:
        """Have every call of every medium take longer than it should."""
        self.trouble_of("all calls stall", [*self.disks, self.store], stall=1.0)

    def _see_sound(self) -> None:
        self.sound = {disk for disk in self.sound if not (disk.gone or disk.faults.are_any)}

    @property
    def is_slow(self) -> bool:
        """Whether media are as slow as somebody has said who measures by that."""
        return bool(self._measuring)

    @contextmanager
    def slow(self, *, lookup_s: float = 1e-3, latency_s: float = 0.02) -> Iterator[None]:
        """Have disks that take 10 ms a call, a store that takes what is said, and no other trouble from now on."""
        self.end_trouble()
        if not self._measuring:  # else others measure by what they have said
            self.trouble.is_settled = True
            for disk in self.disks:
                disk.faults.latency_s = 0.01
            self.store.faults.lookup_s, self.store.faults.latency_s = lookup_s, latency_s
        me = object()
        self._measuring.add(me)
        self.turns.current.process.on_end.append(lambda: self._has_measured(me))
        try:
            yield
        finally:
            self._has_measured(me)

    def _has_measured(self, who: object) -> None:
        """Take note that somebody has, or is dead; with the last of them media are fast again, and may fail."""
        if who not in self._measuring:
            return
        self._measuring.remove(who)
        if not self._measuring:
            self.trouble.is_settled = False
            self.trouble.slow_until = self.turns.now
            self._mend()

    def number(self) -> int:
        """Return a number that was never returned before: most are of blocks that nobody has named before either."""
        self._num_numbers += 1
        if self._num_numbers > MOST_STRANGERS and not self.has_flooded:
            self.flood()
        return self._num_numbers

    def flood(self) -> None:
        """Have more blocks be stored than media have room for: others may go for them, and none is promised to stay."""
        self.has_flooded = True
        self.known.forget_kept()

    def end_trouble(self) -> None:
        """Have nothing go wrong any more."""
        if not self.trouble.is_on:
            return
        self._mend()
        self.trouble.is_on = False
        self.trouble.ended = self.turns.now

    def _mend(self) -> None:
        self._see_sound()
        for disk in self.disks:
            disk.faults = DiskFaults()
            if disk.gone:
                disk.gone = 0
                self.may_come_back_old(disk)
        self.store.faults = StoreFaults()

    def may_come_back_old(self, disk: SimulatedDisk) -> None:
        """Have what was on a disk when it was remembered last, perhaps; what was promised since is not."""
        if self.tape.chance("faults", 0.3) and disk.come_back_old():
            self.trouble.is_stale = self.trouble.has_rot = True
            self.known.media_are_old()

    def check(self) -> None:
        """Raise `WrongAnswer` unless every limit holds."""
        if self.shape.has("nvme"):
            for disk in self.disks:
                most = self.disk_bytes(2 * NUM_ALL) + (1 << 20)
                if disk.used_bytes > most:
                    raise WrongAnswer("limit", f"{disk.path} has {disk.used_bytes} bytes, {most} at most")

        if (wear := self.shape.wear) is not None:
            hours = (self.turns.now - self._began) / 3600.0 + self._num_engines
            most_written = hours * wear + _MOST_A_WRITE * self._num_engines
            if self.store.bytes_written > most_written:
                raise WrongAnswer("limit", f"{self.store.bytes_written} bytes written, {most_written:.0f} at most")

    # Processes.

    def start_process(
        self, name: str, main: Callable[[SimulatedProcess], Coroutine[Any, Any, None]]
    ) -> SimulatedProcess:
        """Start a process with an event loop, which ends with ``main``."""
        process = self.new_process(name)
        self._num_engines += 1
        loop = SimulatedLoop(self.turns, self.files.has_ended)
        loop.set_exception_handler(lambda _, context: self._crashed(process, context))
        self._graveyard.append(loop)

        def run() -> None:
            try:
                loop.run_until_complete(main(process))
            except ProcessEnded:
                raise
            except BaseException as error:  # noqa: BLE001 - whatever it is, it was found
                self.fail(error)
            process.has_ended = True

        self.turns.start(process, run, name)
        return process

    async def until(self, what: str, is_so: Callable[[], bool]) -> None:
        """Wait until something is so, or anything was found; it is to be so in time."""
        for _ in range(int(LONGEST_S / _LOOKS_S)):
            if is_so() or self.failures:
                return
            await asyncio.sleep(_LOOKS_S)
        raise WrongAnswer("never ends", f"{what} has not come after {LONGEST_S:g} s")

    async def until_ended(self, process: SimulatedProcess) -> None:
        """Wait for a process that was begun beside an engine, and let nothing of it be left."""
        await self.until(f"the end of {process.name}", lambda: process.has_ended or process.is_dead)
        if not self.failures:
            self.turns.kill(process)

    def new_process(self, name: str) -> SimulatedProcess:
        """Make a process without threads yet."""
        self._num_processes += 1
        process = SimulatedProcess(name, 100 + self._num_processes)
        self.files.pids[process.pid] = process
        process.on_end.append(lambda: self.files.close_all_of(process))
        return process

    def start_thread(self, process: SimulatedProcess, target: Callable[[], object], name: str) -> SimulatedThread:
        """Start a thread of a process; what it raises was found."""

        def run() -> None:
            try:
                target()
            except ProcessEnded:
                raise
            except BaseException as error:  # noqa: BLE001 - the same
                self.fail(error)

        return self.turns.start(process, run, name)

    def device(self, process: SimulatedProcess) -> ScriptedDevice:
        """Make a GPU of a process: its copies run in some order of those that are allowed, some time."""
        device = ScriptedDevice(chance=_TapeRandom(self.tape))

        def work() -> None:
            while True:
                self.turns.wait(device.is_any_ready, what="copies")
                if self.gpu_s and self.tape.chance("turns", self.slow_copies):
                    self.turns.sleep(self.gpu_s)
                device.step()
                self.turns.pause()

        self.turns.start(process, work, f"{process.name}: GPU")
        return device

    def emit_of(self, process: SimulatedProcess) -> Callable[[Event], None]:
        """Return what takes the events of a process's cache."""

        def emit(event: Event) -> None:
            if process.is_dead:
                return
            self.tell(f"event {type(event).__name__}")
            self.num_tier_faults += isinstance(event, TierFailed | TierStalled | TierTripped)
            if isinstance(event, TierFailed):
                self.told[event.error.split(":")[0]] += 1
            trouble = self.trouble
            is_explained = trouble.has_rot or trouble.has_lied or trouble.is_stale or trouble.has_unentered
            if isinstance(event, BlocksCorrupted) and not is_explained and not self._are_damaged(event.keys):
                self.fail(WrongAnswer("corrupt", f"{event.keys} are not what was written, though nothing is damaged"))

        return emit

    def damage(self, where: FileLoadStoreSpec, names: Iterable[str]) -> None:
        """Change a bit of each of some records on disks; events name their blocks by something that ends so."""
        self.tape.num_faults += 1
        self._damaged.update(names)
        for name, offset, _ in where.places():
            path = Path(name)
            disk = next(each for each in self.disks if path.is_relative_to(each.path))
            disk.flip(path, offset + PAGE_BYTES + self.tape.draw("plan", _SHORTEST_PAYLOAD))

    def _are_damaged(self, keys: Sequence[str]) -> bool:
        """Say whether all blocks that an event names were damaged, as far as can be said where names are hidden."""
        if self._damaged and self.shape.cipher:
            return True
        return all(any(key.endswith(name) for name in self._damaged) for key in keys)

    def new_cache(
        self,
        process: SimulatedProcess,
        shape: Shape,
        device: ScriptedDevice,
        weights: str,
        shard: Shard | tuple[Shard, ...] | None = None,
    ) -> TieredKV:
        """Make a cache of a process, not open yet; that of a scheduler stands for all ranks."""
        return TieredKV(
            self.tiers(shape),  # type: ignore[arg-type]  # a list of what it takes
            model=ModelIdentity("model", weights=weights),
            layout=LAYOUT,
            shard=shard,
            limits=LIMITS.model_copy(
                update={"low_water": shape.low_water, "promote": shape.promote, "store_queue": shape.queue_bytes}
            ),
            device=device,
            codec=shape.codec,  # type: ignore[arg-type]  # one of those that there are
            emit=self.emit_of(process),
        )

    def bury(self, *what: object) -> None:
        """Keep what belonged to a process until the end: what it would do when it is collected must not be done."""
        self._graveyard += what

    def _crashed(self, process: SimulatedProcess, context: dict[str, Any]) -> None:
        if not process.is_dead:
            error = context.get("exception")
            self.fail(WrongAnswer("crashed", f"{context.get('message')}: {error!r}"))

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Run the code under test in this world."""
        gc_was_on = gc.isenabled()
        gc.disable()  # what it would collect, and when, no seed says
        log = _Log(self)
        logger = logging.getLogger("tiered_kv")
        logger.addHandler(log)
        propagates, logger.propagate = logger.propagate, False
        try:
            with running_in(self.system):
                try:
                    yield
                finally:
                    self.turns.end()
        finally:
            self._collect()
            logger.removeHandler(log)
            logger.propagate = propagates
            if gc_was_on:
                gc.enable()

    def _collect(self) -> None:
        """Let go of what dead processes had; nobody hears of it."""
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        asyncio_log = logging.getLogger("asyncio")
        was_disabled, asyncio_log.disabled = asyncio_log.disabled, True
        try:
            with running_in(self.system), warnings.catch_warnings(category=RuntimeWarning, action="ignore"):
                self.turns.bury()
                for error in self.failures:
                    error.__traceback__ = error.__context__ = error.__cause__ = None
                while self._graveyard:
                    if isinstance(self._graveyard[-1], SimulatedLoop):
                        self._graveyard[-1].bury()
                    self._graveyard.pop()
                while gc.collect():  # what ends in the first pass may leave tracebacks, which hold more
                    pass
        finally:
            gc.unfreeze()
            sys.unraisablehook = hook
            asyncio_log.disabled = was_disabled


@cache
def _resolve(medium: str) -> Callable[[Mapping[str, Any]], object]:
    return cast(Callable[[Mapping[str, Any]], object], resolve(medium))


class _Log(logging.Handler):
    """Errors that the code under test logs were found, but for those of media that are at fault."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        """Note one."""
        said = record.getMessage()
        is_crash = "transfer.crashed" in said or "background.failed" in said
        if is_crash and not self._world.turns.current.process.is_dead:
            self._world.fail(WrongAnswer("crashed", self.format(record)))


class _TapeRandom(random.Random):
    """Chooses by the tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(0)
        self._tape = tape

    def choice(self, seq: Sequence[Any]) -> Any:  # type: ignore[override]  # noqa: ANN401 - of whatever there is
        """Choose one."""
        return seq[self._tape.draw("turns", len(seq), 0.3)]


def what_is_held(stats: CacheStatistics) -> list[str]:
    """Say what statistics say is held of a cache in which nothing moves: nothing, if it is well."""
    held: list[str] = []
    for tier in stats.tiers:
        if tier.leased or tier.pending:
            held.append(f"{tier.tier}: {tier.leased} leased, {tier.pending} pending")
        if tier.in_flight_bytes:
            held.append(f"{tier.tier}: {tier.in_flight_bytes} bytes in flight")
        if tier.num_slots and tier.free + tier.ready + tier.withheld != tier.num_slots:
            held.append(f"{tier.tier}: {tier.free} free, {tier.ready} ready of {tier.num_slots} slots")
    if stats.bounce_free != stats.bounce_slots:
        held.append(f"{stats.bounce_slots - stats.bounce_free} bounce slots")
    if stats.store_queue_bytes:
        held.append(f"{stats.store_queue_bytes} bytes in the store queue")
    return held
