"""Lives on several directories: of which some are added, taken out, used apart, away at a start, or take no note.

What was evicted comes back with none of them, wherever a life is cut short; but with one that is opened without any of
those that were in use meanwhile, as that cannot know of it, and where directories of two tiers are put together.
"""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tiered_kv.testing.simulation.acting import scene
from tiered_kv.testing.simulation.disk import SimulatedDisk
from tiered_kv.testing.simulation.shapes import Shape
from tiered_kv.testing.simulation.world import World

if TYPE_CHECKING:
    from tiered_kv.testing.simulation.requester import Numbers
    from tiered_kv.testing.simulation.workload import Requests

NUM_DISKS: Final = 3
MOST_LIVES: Final = 12
_FAILS_AT_A_START: Final = 0.3
_DIES_AT_A_START: Final = 0.25
_DIES_AT_A_NOTE: Final = 0.5
_TURNS_OF_A_NOTE: Final = 12
_LOSES_POWER: Final = 0.3
_TURNS_OF_A_START: Final = 1500
_WAYS_TO_FAIL: Final = ("disk is away", "errors", "disk hangs")
_TAKES_NO_NOTE: Final = 0.3
_NOTICED_S: Final = (0.0, 0.3, 3.0, 8.0)


def others_in_use(world: World, shape: Shape) -> Shape:
    """Return the same tiers on other directories, or in another order."""
    tape = world.tape
    if tape.chance("plan", 0.6):
        world.disks.insert(0, world.disks.pop(tape.draw("plan", NUM_DISKS)))
        shape = replace(shape, num_disks=1 + tape.draw("plan", NUM_DISKS))
    world.known.forget_kept()
    return shape


class Past:
    """What is sure of the directories by the lives before.

    Of two tiers that are put together the one with more of them goes on, which need not be the one that was used last;
    but it has none that was away, as that was used.
    """

    def __init__(self, world: World) -> None:
        """Have none used yet."""
        self._last = set[SimulatedDisk]()  # who know what has gone
        self._tier = set(world.disks)  # of the one that was used last, or never used
        self._missed = set[SimulatedDisk]()  # of others, as ``_last`` know
        self._used = set[SimulatedDisk]()
        self._eras = {disk: disk.era for disk in world.disks}
        self._sound, self._noting = set(world.disks), set(world.disks)  # as the life began

    def begin(self, world: World) -> bool:
        """A life begins; say whether those in use, as far as they are sound, know what has gone."""
        self._sound, self._noting = set(world.sound), world.sound - world.mute
        return not self._sound.isdisjoint(self._last) and self._are_of_one(set(_in_use(world)))

    def _are_of_one(self, in_use: set[SimulatedDisk]) -> bool:
        """Say whether no other tier than the one that was used last can go on on these directories."""
        missed = set() if self._sound.isdisjoint(self._last) else self._missed
        return in_use <= self._tier | missed

    def end(self, world: World, *, has_opened: bool) -> None:
        """A life has ended."""
        in_use, noting = set(_in_use(world)), self._noting
        is_one = self._are_of_one(in_use)
        if has_opened:
            unnamed, has_missed = in_use - self._used - noting, not noting.isdisjoint(self._last)
            if is_one and self._sound & self._tier & self._used:
                self._tier = self._tier - unnamed | noting
            else:
                self._tier, has_missed = set(world.disks) - self._used - in_use | noting, False
            self._missed = ((self._missed if has_missed else set()) | in_use) - self._tier
            self._used |= in_use
            self._last = world.sound - world.mute or set(world.sound)  # where none could be told, all
        elif not is_one:
            self._tier -= in_use
        if old := {disk for disk in world.disks if disk.era != self._eras[disk]}:
            self._tier, self._last, self._missed = self._tier - old, self._last - old, set()
            self._eras = {disk: disk.era for disk in world.disks}


def _in_use(world: World) -> list[SimulatedDisk]:
    return world.disks[: world.shape.num_disks]


def begin(world: World, past: Past) -> None:
    """Have a life begin on these directories, perhaps badly."""
    tape, in_use = world.tape, _in_use(world)
    world.sound, world.mute = set(in_use), set()
    world.tell(f"on {[str(disk.path) for disk in in_use]}")
    if len(in_use) > 1 and tape.chance("plan", _FAILS_AT_A_START):
        _fail(world, tape.draw("plan", len(in_use)))
    elif tape.chance("plan", _FAILS_AT_A_START):
        _mute_some(world)
    world.files.on_note = int
    if tape.chance("plan", _DIES_AT_A_START):
        world.trouble.lost_power = tape.chance("plan", _LOSES_POWER)
        world.die_at = world.turns.num_turns + 1 + tape.draw("plan", _TURNS_OF_A_START)
    elif tape.chance("plan", _DIES_AT_A_START):  # just behind a note
        num_turns = tape.draw("plan", _TURNS_OF_A_NOTE)
        world.files.on_note = lambda: _die_soon(world, num_turns)
    if not past.begin(world):
        world.known.may_be_back()


def _die_soon(world: World, num_turns: int) -> None:
    if world.tape.chance("plan", _DIES_AT_A_NOTE):
        world.files.on_note = int
        world.trouble.lost_power = True
        world.die_at = world.turns.num_turns + 1 + num_turns


def _fail(world: World, number: int) -> None:
    """Have one of the directories fail in some way, and perhaps others take no note of it."""
    in_use = _in_use(world)
    world.fail_disk(in_use[number % len(in_use)], world.tape.pick("plan", _WAYS_TO_FAIL))
    _mute_some(world)


def _mute_some(world: World) -> None:
    """Have some of the directories not say any more of themselves what they are to say."""
    for disk in _in_use(world):
        if world.tape.chance("plan", _TAKES_NO_NOTE):
            world.mute.add(disk)
            world.trouble_of(f"{disk.path} takes no note", [disk], takes_no_note=True)


@scene(lambda shape: shape.has("nvme") and shape.is_owned and shape.ttl_s is None, alone=5)
async def live_on_directories(requests: "Requests", numbers: "Numbers") -> None:
    """Blocks are evicted while one directory is away; then the next life begins, on these or others."""
    world = requests.world
    await requests.store(*(numbers[0] + prompt for prompt in range(1 + numbers[0] % 4)))
    await requests.do("flush", (0, 0, 0, numbers[1]))
    if numbers[1] % 3:
        _fail(world, numbers[2])
        await asyncio.sleep(_NOTICED_S[numbers[3] % 4])
        await requests.store(numbers[0] + numbers[3] % 4)  # which tells who fails
    await requests.evict(*(numbers[0] + prompt for prompt in range(numbers[2] % 4)))
    if numbers[1] >> 2 & 1:
        world.end_trouble()
        await asyncio.sleep(_NOTICED_S[numbers[3] >> 2 & 3])
    if numbers[1] >> 3 & 1:
        await requests.flush(sync=True)
    how = ("die", "die", "reopen", "power")[numbers[3] >> 4 & 3]
    await requests.do(how, (0, 0, 0, numbers[3] >> 6 & 31))
