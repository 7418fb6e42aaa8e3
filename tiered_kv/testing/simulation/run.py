"""Runs of a simulation: one seed, many of them, and the plainest tape of a failure.

report = simulate(7, num_steps=200)      # the whole of seed 7
report.failures, report.timeline
shrink(report)                           # "first come, first served, but at choice 36"
"""

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from tiered_kv.testing.simulation import directories
from tiered_kv.testing.simulation.acting import Scene
from tiered_kv.testing.simulation.known import WrongAnswer
from tiered_kv.testing.simulation.shapes import Shape
from tiered_kv.testing.simulation.tape import Numbers, Tape, Track
from tiered_kv.testing.simulation.themes import drawn_theme
from tiered_kv.testing.simulation.threads import SimulatedProcess, Stuck
from tiered_kv.testing.simulation.workload import Requests
from tiered_kv.testing.simulation.world import WEIGHTS, World

_MOST_LIVES: Final = 6
_LOST: Final = 0.4
"""How often disks that were always well have no ledger when a process begins."""
_DIES: Final = 0.7
_TURNS_OF_A_REBUILD: Final = 400
_SOME_BYTES: Final = 200
STEPS_A_SEED: Final = 120


@dataclass(frozen=True)
class RunReport:
    """What became of one run.

    Attributes:
        seed: Where its numbers came from.
        num_steps: Calls of engines and changes of the world.
        num_faults: How often something was made to go wrong.
        failure: What was found first, in words; empty if nothing was.
        kind: The same in one word.
        digest: Of the whole timeline: two runs of one tape have the same.
        tape: All numbers.
        timeline: What happened, where it was asked for.
    """

    seed: int
    num_steps: int
    num_faults: int
    failure: str
    kind: str
    digest: str
    tape: Numbers
    timeline: tuple[str, ...] = ()


def simulate(
    seed: int, num_steps: int = STEPS_A_SEED, *, tape: Numbers | None = None, keeps_timeline: bool = False
) -> RunReport:
    """Run one seed, or the numbers of a run before."""
    numbers = Tape(seed, tape)
    theme, shape = drawn_theme(numbers)
    world = World(numbers, num_steps, shape, keeps_timeline=keeps_timeline)
    with _interrupted_later(), world.begun():
        try:
            _direct(world, theme)
        except Stuck as error:
            world.fail(error)
    failure = world.failures[0] if world.failures else None
    return RunReport(
        seed,
        world.num_steps,
        numbers.num_faults,
        "" if failure is None else f"{type(failure).__name__}: {failure}",
        "" if failure is None else getattr(failure, "what", type(failure).__name__),
        f"{world.num_lines}-{world.hash:08x}",
        numbers.drawn,
        tuple(world.timeline),
    )


@contextmanager
def _interrupted_later() -> Iterator[None]:
    """Have Ctrl-C wait for the end of the run: in the middle of it the director would go on beside whose turn it is.

    The second one does not wait: a run may have no end.
    """
    usual = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return
    is_interrupted = False

    def note(*_: object) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if is_interrupted:
        raise KeyboardInterrupt


def _direct(world: World, theme: Scene) -> None:
    """Begin a process, end it or have it killed, and begin another on what it has left behind."""
    shape = world.shape
    weights, past, is_clean = WEIGHTS[0], directories.Past(world), False
    for life in range(directories.MOST_LIVES if shape.changes_disks else _MOST_LIVES):
        if life:
            world.shape = shape = _changed(world, shape)
        world.die_at = None
        if shape.changes_disks:
            directories.begin(world, past)
        else:
            _may_lose_ledgers(world, is_clean=is_clean)
        process, requests = _live(world, f"engine {life + 1}", weights, theme)
        if world.failures:
            return
        _end(world, process)
        is_clean = not world.trouble.has_been
        if requests:
            weights = requests[0].weights
            past.end(world, has_opened=requests[0].has_opened)
        if world.is_over:
            return


def _live(world: World, name: str, weights: str, theme: Scene) -> tuple[SimulatedProcess, list[Requests]]:
    """Begin a process, and wait until it has ended, is to die, or something was found; return its requests, if any."""
    requests: list[Requests] = []

    async def main(process: SimulatedProcess) -> None:
        requests.append(Requests(world, process, weights, theme))
        world.bury(asyncio.current_task())
        await requests[0].serve(world.tape.pick("plan", (3, 1, 2, 5)))

    def is_over() -> bool:
        return process.has_ended or _is_to_die(world) or bool(world.failures)

    world.tell(f"{name} begins: {world.shape}")
    process, was_over = world.start_process(name, main), False
    while not world.turns.wait(is_over, 600.0, "the engine"):
        if was_over:
            world.fail(WrongAnswer("never ends", f"{name} does not end"))
        was_over = world.is_over  # from now on it has as long again, whenever its last step was done
    return process, requests


def _end(world: World, process: SimulatedProcess) -> None:
    """End a process and its workers, if it has not come to its end; and see what its media keep."""
    turns, trouble = world.turns, world.trouble
    lost_power = trouble.lost_power and not process.has_ended
    if not process.has_ended:
        world.tell(f"{process.name} is killed" + (", and power is lost" if lost_power else ""))
    turns.kill(process)
    for worker in list(world.files.pids.values()):
        turns.kill(worker)
    if lost_power:
        for disk in world.disks:
            disk.lose_power()
    world.end_trouble()
    for disk in world.disks:
        world.may_come_back_old(disk)
    if not process.has_ended or trouble.is_stale:
        world.known.restarted(lost_power=lost_power or trouble.is_stale)
    trouble.has_unentered |= not process.has_ended and any(disk.unentered or disk.unwritten for disk in world.disks)
    trouble.has_rot |= lost_power  # what is torn is lost, and nobody can say which it is
    trouble.lost_power = trouble.is_stale = trouble.since_told = False  # who begins owes media nothing


def _may_lose_ledgers(world: World, *, is_clean: bool) -> None:
    """Have each disk's ledger be gone, cut or zeros, perhaps, and whoever rebuilds it perhaps be killed meanwhile.

    What a process has left whose media were at fault, or that no ledger had yet, has no word against it then.
    """
    tape = world.tape
    if not (is_clean and world.shape.has("nvme") and tape.chance("plan", _LOST)):
        return
    for disk in world.disks:
        num_kept = tape.draw("plan", 4) * _SOME_BYTES
        disk.lose("ledger", None if tape.draw("plan", 2) else num_kept)
    world.tell("ledgers are lost")
    world.known.ledgers_are_lost()
    if tape.chance("plan", _DIES):
        world.die_at = world.turns.num_turns + tape.draw("plan", _TURNS_OF_A_REBUILD)


def _is_to_die(world: World) -> bool:
    return world.die_at is not None and world.turns.num_turns >= world.die_at


def _changed(world: World, shape: Shape) -> Shape:
    """Return the settings of the next life: mostly the same."""
    tape = world.tape
    if shape.changes_disks:
        shape = directories.others_in_use(world, shape)
    if tape.chance("plan", 0.3):
        world.known.forget_kept()
        return replace(
            shape,
            cpu_slots=tape.pick("plan", (12, 6, 40)),
            writes_back=bool(tape.draw("plan", 2)),
            disk_slots=tape.pick("plan", (shape.disk_slots, 160, 24)),
            policy=tape.pick("plan", ("lru", "lhd")),
        )
    return shape


def shrink(report: RunReport, num_steps: int = STEPS_A_SEED, most_runs: int = 200) -> RunReport:
    """Return the plainest run that fails in the same way: as many numbers as can be are 0."""
    best, num_runs = report, 0

    def still_fails(tape: dict[Track, list[int]]) -> bool:
        nonlocal best, num_runs
        num_runs += 1
        tried = simulate(report.seed, num_steps, tape=tape)
        if tried.kind != report.kind:
            return False
        best = tried
        return True

    for track in ("turns", "faults", "plan"):
        size = max(1, len(best.tape[track]))
        while size and num_runs < most_runs:
            at = 0
            while at < len(best.tape[track]) and num_runs < most_runs:
                part = best.tape[track][at : at + size]
                if any(part):
                    tape = {each: list(numbers) for each, numbers in best.tape.items()}
                    tape[track][at : at + size] = [0] * len(part)
                    still_fails(tape)
                at += size
            size //= 2
    return best


def in_words(tape: Numbers) -> str:
    """Say what a tape does otherwise than first come, first served."""
    others = [i for i, number in enumerate(tape["turns"]) if number]
    if not others:
        return "first come, first served"
    said = ", ".join(map(str, others[:12])) + (", ..." if len(others) > 12 else "")
    return f"first come, first served, but at {'choice' if len(others) == 1 else 'choices'} {said}"
