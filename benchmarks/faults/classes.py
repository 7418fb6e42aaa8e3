"""The sixteen classes of faults. Each is a few steps, and each step runs in a process of its own over the same folder.

A step opens the tier, stores, does the damage, and loads; it says of every block what came of it, as it comes, so that
a process that hangs or dies has said what it could.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from driver import Driver, NotApplicableError, Setting, content, place_of
from medium import Medium

HIT: Final = (0, 3)
"""The blocks that a fault is aimed at; the others are to be served as if nothing had been."""
BLOCKS: Final = tuple(range(8))
MORE: Final = tuple(range(8, 16))
RECOVERY_S: Final = 20.0
Between = Callable[[], object] | None


@dataclass
class Bench:
    """What a step has at hand.

    Attributes:
        tier: Opens the tier.
        setting: How.
        medium: What its files are on.
        say: Tells what came of something: what it was, of which group it is, and how it ended.
    """

    tier: type[Driver]
    setting: Setting
    medium: Medium
    say: Callable[[str, str, str], None]

    @contextlib.contextmanager
    def opened(self, **changes: Any) -> Iterator[Driver]:  # noqa: ANN401 - fields of `Setting`
        """Open the tier, perhaps otherwise, for a ``with`` block."""
        driver = self.tier(replace(self.setting, **changes))
        yield driver
        driver.close()  # not after an error: what is broken may hang

    def look(self, group: str, driver: Driver, numbers: Sequence[int], between: Between = None) -> None:
        """Load each block and say what came of it."""
        for number in numbers:
            self.try_(group, number, partial(driver.load, number, between=between), driver)

    def try_(self, group: str, number: int, load: Callable[[], bytes | None], driver: Driver) -> None:
        """Say what came of a load that should give the bytes of a block, or nothing."""
        self.say("trying", group, str(number))
        try:
            got = load()
        except NotApplicableError:
            raise
        except TimeoutError:
            self.say("came", group, "hangs")
        except BaseException as error:  # noqa: BLE001 - whatever reaches the engine
            self.say("came", group, "raises")
            self.say("note", group, f"{type(error).__name__}: {error}"[:120])
        else:
            is_right = got == content(number, driver.block_bytes)
            self.say("came", group, "miss" if got is None else "right" if is_right else "wrong bytes")

    def recovers(self, driver: Driver, numbers: Sequence[int], prepare: Callable[[], object] = lambda: None) -> None:
        """Now that the fault is over: try again until all blocks are right, for a while, and say how long it took."""
        began = time.monotonic()
        while True:
            prepare()
            came = [_fate(partial(driver.load, number)) for number in numbers]
            took_s = time.monotonic() - began
            if all(got == content(number, driver.block_bytes) for number, got in zip(numbers, came, strict=True)):
                break
            if took_s > RECOVERY_S or None not in came:
                break
            time.sleep(0.5)
        self.look(AFTER, driver, numbers)
        if took_s > 1.0:
            self.say("note", AFTER, f"{took_s:.0f} s until the tier was in use again, or given up")


def _fate(load: Callable[[], bytes | None]) -> bytes | None:
    try:
        return load()
    except Exception:  # noqa: BLE001 - said when it is looked at
        return None


Step = Callable[[Bench], None]
AIMED, OTHERS, AFTER = "aimed at", "others", "afterwards"


def _damaged(damage: Callable[[Bench, Driver], None]) -> Step:
    """Make a step: store, damage what lies there, load all."""

    def step(bench: Bench) -> None:
        with bench.opened() as driver:
            driver.store(BLOCKS)
            driver.forget()
            damage(bench, driver)
            bench.look(AIMED, driver, HIT)
            bench.look(OTHERS, driver, [number for number in BLOCKS if number not in HIT])

    return step


def _flip(bench: Bench, driver: Driver) -> None:
    for number in HIT:
        place = place_of(number, bench.setting.folder, driver)
        with place.path.open("r+b") as file:
            file.seek(place.start + driver.header_bytes + driver.block_bytes // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))


def _truncate(bench: Bench, driver: Driver) -> None:
    for number in HIT:  # a file of many blocks: the cut goes to its end, and takes others with it
        place = place_of(number, bench.setting.folder, driver)
        if place.is_whole_file:
            os.truncate(place.path, place.path.stat().st_size // 2)
        else:
            with place.path.open("r+b") as file:
                file.seek(place.start + place.num_bytes // 2)
                file.write(bytes(place.num_bytes - place.num_bytes // 2))
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _exchange(bench: Bench, driver: Driver) -> None:
    """Put the whole records of other blocks in the places of those aimed at."""
    for number, other in zip(HIT, (1, 2), strict=True):
        place, its = (place_of(each, bench.setting.folder, driver) for each in (number, other))
        record = its.path.read_bytes()[its.start : its.start + its.num_bytes]
        with place.path.open("r+b") as file:
            file.seek(place.start)
            file.write(record)


def _tear(bench: Bench, driver: Driver) -> None:
    """Leave zeros in the second halves: what a disk has that lost power in the middle, and kept the length."""
    for number in HIT:
        place = place_of(number, bench.setting.folder, driver)
        with place.path.open("r+b") as file:
            half = place.num_bytes // 2
            file.seek(place.start + half)
            file.write(bytes(place.num_bytes - half))


def _store(bench: Bench) -> None:
    with bench.opened() as driver:
        driver.store(BLOCKS)


def _load_all(bench: Bench) -> None:
    with bench.opened() as driver:
        bench.look(AIMED, driver, BLOCKS)


def _other_weights(bench: Bench) -> None:
    """Of other weights everything must be a miss: the bytes are right, and would be wrong KV."""
    with bench.opened(weights="second weights") as driver:
        for number in BLOCKS:
            bench.say("trying", AIMED, str(number))
            bench.say("came", AIMED, "miss" if driver.load(number) is None else "wrong bytes")


def _other_tenant(bench: Bench) -> None:
    """Another tenant who asks for the same tokens must not be told that anybody had them."""
    with bench.opened() as driver:
        driver.store(BLOCKS)
        driver.forget()
        for number in BLOCKS:
            bench.say("trying", AIMED, str(number))
            bench.say("came", AIMED, "miss" if driver.load(number, tenant="b") is None else "wrong bytes")
        bench.look(OTHERS, driver, BLOCKS)


def _enospc(bench: Bench) -> None:
    with bench.opened() as driver:
        driver.store(BLOCKS)
        bench.medium.be_full()
        try:
            driver.store(MORE)
        except Exception as error:  # noqa: BLE001 - whatever reaches the engine
            bench.say("came", AIMED, "raises")
            bench.say("note", AIMED, f"the store: {type(error).__name__}")
        bench.medium.be_fine()
        driver.forget()
        bench.look(AIMED, driver, MORE)
        bench.look(OTHERS, driver, BLOCKS)
        bench.recovers(driver, MORE, lambda: (driver.store(MORE), driver.forget()))


def _eio(bench: Bench) -> None:
    with bench.opened() as driver:
        driver.store(BLOCKS)
        driver.forget()
        bench.medium.fail_reads()
        bench.look(AIMED, driver, HIT)
        bench.medium.be_fine()
        bench.look(OTHERS, driver, [number for number in BLOCKS if number not in HIT])


def _hung(bench: Bench) -> None:
    with bench.opened() as driver:
        driver.store(BLOCKS)
        driver.forget()
        bench.medium.hang_reads()
        bench.look(AIMED, driver, HIT[:1])
        bench.medium.be_fine()
        bench.recovers(driver, BLOCKS[4:])


def _late(bench: Bench) -> None:
    with bench.opened() as driver:
        driver.store(BLOCKS)
        driver.forget()
        bench.medium.delay_reads(2.0)
        if type(driver).late is Driver.late:
            bench.look(AIMED, driver, HIT[:1])
        else:
            bench.say("trying", AIMED, "0")
            number, got = driver.late(0, 5)
            is_right = got == content(number, driver.block_bytes)
            bench.say("came", AIMED, "wrong bytes" if not is_right else "miss" if number else "right")
        bench.medium.be_fine()
        bench.recovers(driver, BLOCKS[4:])


def _cancelled(bench: Bench) -> None:
    with bench.opened() as driver:
        driver.store(BLOCKS)
        driver.forget()
        if type(driver).cancelled is Driver.cancelled:
            driver.cancelled(0, 5, bench.medium.be_fine)
        bench.medium.hang_reads()
        bench.try_(AIMED, 5, lambda: driver.cancelled(0, 5, bench.medium.be_fine), driver)
        bench.medium.be_fine()
        bench.recovers(driver, BLOCKS)


def _killed(bench: Bench) -> None:
    with bench.opened() as driver:
        driver.store(BLOCKS)
        bench.medium.kill_at_write(3)
        driver.store(MORE)
        bench.say("note", AIMED, "was not killed")


def _after_kill(bench: Bench) -> None:
    bench.medium.be_fine()
    with bench.opened() as driver:
        bench.look(AIMED, driver, MORE)
        bench.look(OTHERS, driver, BLOCKS)


def _evicted(bench: Bench) -> None:
    with bench.opened() as driver:
        driver.store(BLOCKS)
        driver.forget()

        def evict(number: int) -> None:
            place = place_of(number, bench.setting.folder, driver)
            if place.is_whole_file:  # as a cleaner or another process does
                place.path.unlink()
            else:
                driver.evict(number)

        for number in HIT:
            bench.look(AIMED, driver, [number], between=partial(evict, number))
        bench.look(OTHERS, driver, [number for number in BLOCKS if number not in HIT])


def _full(bench: Bench) -> None:
    room = 8
    with bench.opened(room=room) as driver:
        for number in range(0, 64, 4):
            driver.store(range(number, number + 4))
        driver.forget()
        bench.look(AIMED, driver, range(64))
        used = sum(path.stat().st_blocks * 512 for path in bench.setting.folder.rglob("*") if path.is_file())
        record = driver.header_bytes + driver.block_bytes
        bench.say("note", AIMED, f"{used / record:.1f} blocks' space used, of {room}")


def _lying(bench: Bench) -> None:
    with bench.opened() as driver:
        bench.medium.lie()
        driver.store(BLOCKS)
        num_lies = bench.medium.be_fine()
        driver.forget()
        bench.look(AIMED, driver, BLOCKS)
        bench.say("note", AIMED, f"{num_lies} writes were lies")


CLASSES: Final[dict[str, tuple[Step, ...]]] = {
    "flipped": (_damaged(_flip),),
    "truncated": (_damaged(_truncate),),
    "foreign": (_damaged(_exchange),),
    "stale epoch": (_store, _other_weights),
    "wrong tenant": (_other_tenant,),
    "torn": (_damaged(_tear),),
    "ENOSPC": (_enospc,),
    "EIO": (_eio,),
    "hung": (_hung,),
    "late": (_late,),
    "killed in the middle": (_killed, _after_kill),
    "evicted in the middle": (_evicted,),
    "full": (_full,),
    "cancelled": (_cancelled,),
    "restarted": (_store, _load_all),
    "lying medium": (_lying,),
}
"""By name, in the order of the table."""
