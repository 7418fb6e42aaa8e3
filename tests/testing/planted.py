"""Plant bugs in the library, one at a time, and see how soon the simulation finds each: `make planted`.

`planted.toml` has them, as changes of text. A bug is put into the source of its module as that is imported, in a
process of its own, so that nothing on disk is touched; and where a mend has taken the text away, this says so.

    python -m tests.testing.planted --only "slot freed twice"
"""

import argparse
import importlib.util
import json
import os
import pathlib
import re
import signal
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from statistics import median_low
from types import CodeType, ModuleType
from typing import Final

import pytest

ROOT: Final = pathlib.Path(__file__).resolve().parents[2]
TABLE: Final = pathlib.Path(__file__).with_suffix(".toml")
PAGE: Final = pathlib.Path(__file__).with_suffix(".md")
HEAD: Final = "| Bug | Class | File | Seeds | Found as |\n|---|---|---|---|---|\n"
STEPS: Final = 120
MOST_SEEDS: Final = 200
NUM_RANGES: Final = 3
_APART: Final = 1000
"""From the first seed of one range to that of the next."""
HANGS_AFTER_S: Final = 60
"""Of the process's own time, of which a seed takes less than one; or of real time without any, as no thread goes on."""
_IDLE_S: Final = 0.1
"""Less of its own time in so much real time is none, however busy the machine is."""


class NotPlantedError(Exception):
    """The text to be changed is not there once, so that nothing would be planted, or something else."""


@dataclass(frozen=True)
class Change:
    """Some lines of one file, and what is to stand there instead.

    Attributes:
        module: Path of the file from the repository's root.
        before: What stands there, once.
        after: What is planted.
    """

    module: str
    before: str
    after: str

    @property
    def name(self) -> str:
        """What the module is imported by."""
        return self.module.removeprefix("backends/").removesuffix(".py").replace("/", ".")

    def applied(self, source: str) -> str:
        """Return the source with the bug.

        Raises:
            NotPlantedError: The text is not there once.
        """
        if (n := source.count(self.before)) != 1:
            raise NotPlantedError(f"{self.module} has this {n} times, not once:\n{self.before}")
        return source.replace(self.before, self.after)


@dataclass(frozen=True)
class Planted:
    """A bug.

    Attributes:
        name: What is wrong with it, in a few words.
        kind: Its class.
        changes: What makes it.
        scene: The scene that aims at it; empty where anything finds it.
        unfound: Why the simulation does not find it; empty where it does.
        test: Which test fails with it where the simulation does not find it: a file and a function, as pytest names it.
    """

    name: str
    kind: str
    changes: tuple[Change, ...]
    scene: str
    unfound: str
    test: str

    @property
    def why_not(self) -> str:
        """Say why the simulation does not find it, and what does; empty where it finds it."""
        return f"{self.unfound}: `{self.test}`" if self.unfound else ""


@dataclass(frozen=True)
class Found:
    """How soon a bug was found in one range of seeds.

    Attributes:
        seeds: How many it took; 0 if all were not enough.
        kind: Which promise was broken, in a word.
        failure: The same in full.
    """

    seeds: int
    kind: str
    failure: str


def all_planted() -> list[Planted]:
    """Read the table."""
    return [
        Planted(
            row["name"],
            row["class"],
            tuple(Change(each["module"], each["before"], each["after"]) for each in (row, *row.get("also", ()))),
            row.get("scene", ""),
            row.get("unfound", ""),
            row.get("test", ""),
        )
        for row in tomllib.loads(TABLE.read_text())["planted"]
    ]


# In the process that has the bug.


class _Loader(SourceFileLoader):
    """Loads one module with changes of its text, and no compiled form of it, which would be without them."""

    def __init__(self, name: str, path: str, changes: Sequence[Change]) -> None:
        super().__init__(name, path)
        self._changes = changes

    def get_code(self, fullname: str) -> CodeType:
        """Compile the module with the bug; nothing is written."""
        source = self.get_data(self.path).decode()
        for change in self._changes:
            source = change.applied(source)
        code: CodeType = self.source_to_code(source, self.path)
        return code


class _Planter(MetaPathFinder):
    def __init__(self, changes: Sequence[Change]) -> None:
        self._changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module that is to be changed; leave all others to others."""
        changes = [each for each in self._changes if each.name == fullname]
        spec = PathFinder.find_spec(fullname, path, target) if changes else None
        if spec is None or spec.origin is None:
            return None
        return importlib.util.spec_from_loader(fullname, _Loader(fullname, spec.origin, changes), origin=spec.origin)


def plant(changes: Sequence[Change]) -> None:
    """Have this process import the library with a bug; to be called before it imports any of it.

    Raises:
        NotPlantedError: A module that is to be changed was imported already.
    """
    if early := [each.module for each in changes if each.name in sys.modules]:
        raise NotPlantedError(f"{early} were imported before they were changed")
    sys.meta_path.insert(0, _Planter(changes))


def find(first: int, most_seeds: int, steps: int, scene: str, say: Callable[[Found], None]) -> None:
    """Try seeds, one after another, until one finds something; say so. With a scene, only those that are about it."""
    from tiered_kv.testing.simulation.run import simulate  # noqa: PLC0415 - only once the bug is planted
    from tiered_kv.testing.simulation.tape import Tape  # noqa: PLC0415 - the same
    from tiered_kv.testing.simulation.themes import drawn_theme  # noqa: PLC0415 - the same

    for n in range(1, most_seeds + 1):
        if scene and drawn_theme(Tape(first + n - 1))[0].__name__ != scene:
            continue
        with ended_if_it_hangs(lambda n=n: say(Found(n, "hangs", f"no end in {HANGS_AFTER_S} s"))):  # type: ignore[misc]  # bound now
            report = simulate(first + n - 1, steps)
        if report.failure:
            say(Found(n, report.kind, report.failure))
            return
    say(Found(0, "", ""))


@contextmanager
def ended_if_it_hangs(say: Callable[[], object]) -> Iterator[None]:
    """End this process, and say so, where what is done meanwhile uses time without end, or comes to a stand."""
    begun = last = time.process_time()

    def look(*_: object) -> None:
        nonlocal last
        before, last = last, time.process_time()
        if last - begun > HANGS_AFTER_S or last - before < _IDLE_S:
            say()
            os._exit(0)  # threads of the simulation may be in its way

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, HANGS_AFTER_S, HANGS_AFTER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


# In the process that starts those.


def look_in_all(planted: Planted, num_ranges: int, most_seeds: int, steps: int, *, aimed: bool = False) -> list[Found]:
    """Say how soon a bug is found in ranges of seeds that have none in common, as far as their median depends on it."""
    found: list[Found] = []
    middle = (num_ranges - 1) // 2
    for n in range(num_ranges):
        known = sorted(each.seeds or sys.maxsize for each in found)
        enough = min([most_seeds, *known[middle : middle + 1]])  # the median is no greater, whatever comes
        if known.count(sys.maxsize) <= middle:
            found.append(look_for(planted, _APART * n, enough, steps, planted.scene if aimed else ""))
    return found


def look_for(planted: Planted, first: int, most_seeds: int, steps: int, scene: str = "") -> Found:
    """Say how soon a bug is found from some seed on, or by those of a scene. What is found without it is passed over.

    Raises:
        NotPlantedError: Its text is not there any more.
    """
    tried = 0
    while True:
        found = _forked(planted.changes, first + tried, most_seeds - tried, steps, scene)
        tried += found.seeds
        if not found.seeds or _is_clean(first + tried - 1, steps):
            return replace(found, seeds=found.seeds and tried)


@cache
def _is_clean(seed: int, steps: int) -> bool:
    """Say whether a seed finds nothing in the library as it is."""
    return not _forked((), seed, 1, steps).seeds


def _forked(changes: Sequence[Change], first: int, most_seeds: int, steps: int, scene: str = "") -> Found:
    """Look for a bug in a process of its own, which has torch already and nothing of the library."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        said: dict[str, object] = {"error": "it has ended"}
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what is broken on purpose has much to say
            plant(changes)
            find(first, most_seeds, steps, scene, lambda found: _write(writing, vars(found)))
            unused = [each.module for each in changes if each.name not in sys.modules]
            said = {"error": f"{unused} are not imported by the simulation"} if unused else {}
        except BaseException as error:  # noqa: BLE001 - carried to the other process
            said = {"error": f"{type(error).__name__}: {error}"}
        finally:
            if said:
                _write(writing, said)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        lines = [json.loads(line) for line in answer]
    os.waitpid(child, 0)
    if errors := [line["error"] for line in lines if "error" in line]:
        raise NotPlantedError(errors[0])
    return Found(**lines[0])


def fails_with(planted: Planted) -> bool:
    """Say whether the test that is named for a bug fails where that is planted, and passes where it is not."""
    has_failed = _tested(planted.changes, planted.test) == pytest.ExitCode.TESTS_FAILED
    return has_failed and _tested((), planted.test) == pytest.ExitCode.OK


def _tested(changes: Sequence[Change], test: str) -> int:
    """Run one test in a process of its own that has a bug."""
    if not (child := os.fork()):
        code = int(pytest.ExitCode.INTERNAL_ERROR)
        try:
            plant(changes)
            code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", str(ROOT / test)]))
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _write(fd: int, said: dict[str, object]) -> None:
    os.write(fd, json.dumps(said).encode() + b"\n")


def median(found: Sequence[Found]) -> int:
    """Return how many seeds it takes in the middle; 0 where that is more than were tried."""
    middle = median_low([each.seeds or sys.maxsize for each in found])
    return 0 if middle == sys.maxsize else middle


def row_of(planted: Planted, found: Sequence[Found] = (), most_seeds: int = 0, *, aimed: bool = False) -> str:
    """Return a row of the table."""
    middle = median(found) if found else 0
    ranges = ", ".join(str(each.seeds or "-") for each in found)
    most = "at most " if aimed and planted.scene else ""
    seeds = f"{most}{middle} ({ranges})" if middle else f"over {most_seeds} ({ranges})" if found else "not tried"
    kinds = ", ".join(kind for kind, _ in Counter(each.kind for each in found if each.seeds).most_common(2))
    why_not = f"not found: {planted.why_not}" if planted.unfound else "not found" if found else ""
    how = kinds if middle else f"{kinds}, in one range only" if kinds else why_not
    files = ", ".join(dict.fromkeys(f"`{pathlib.Path(each.module).name}`" for each in planted.changes))
    return f"| {planted.name} | {planted.kind} | {files} | {seeds} | {how} |\n"


def written(page: str, rows: dict[str, str]) -> str:
    """Return the page with these rows, by name, in the places of those before, in the order of `planted.toml`."""
    start = page.index(HEAD) + len(HEAD)
    lines = re.match(r"(\|.*\n)*", page[start:])
    assert lines is not None
    known = {line.split("|")[1].strip(): line for line in lines[0].splitlines(keepends=True)} | rows
    table = "".join(known.get(each.name) or row_of(each) for each in all_planted())
    return page[:start] + table + page[start + lines.end() :]


def _wanted(only: Sequence[str]) -> Iterator[Planted]:
    everything = all_planted()
    if unknown := set(only) - {each.name for each in everything}:
        raise SystemExit(f"no such bugs: {sorted(unknown)}")
    yield from (each for each in everything if not only or each.name in only)


def main() -> None:
    """Look for the bugs that the arguments name, or for all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="these bugs; all by default")
    parser.add_argument("--seeds", type=int, default=MOST_SEEDS, help="the most of a range")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a seed")
    parser.add_argument("--ranges", type=int, default=NUM_RANGES, help="of seeds; the median of them counts")
    parser.add_argument("--aimed", action="store_true", help="only by seeds about the scene that aims at it")
    parser.add_argument("--write", action="store_true", help=f"enter the rows in {PAGE.relative_to(ROOT)}")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    given = parser.parse_args()
    import torch  # noqa: F401, PLC0415 - once, for all processes that have a bug

    medians: dict[str, int] = {}
    for planted in _wanted(given.only):
        num_ranges = 1 if planted.unfound else given.ranges
        found = look_in_all(planted, num_ranges, given.seeds, given.steps, aimed=given.aimed)
        medians[planted.name] = median(found)
        if planted.test and not fails_with(planted):
            raise SystemExit(f"{planted.test} does not find {planted.name!r}")
        row = row_of(planted, found, given.seeds, aimed=given.aimed)
        print(row, *(f"    {each.seeds}: {each.failure}" for each in found if each.seeds), sep="\n", flush=True)  # noqa: T201
        if given.write:
            PAGE.write_text(written(PAGE.read_text(), {planted.name: row}))
    num_found = sum(map(bool, medians.values()))
    if given.json:
        print(json.dumps({"planted": len(medians), "found": num_found, "medians": medians}))  # noqa: T201
    else:
        print(f"{num_found} of {len(medians)} found")  # noqa: T201


if __name__ == "__main__":
    main()
