"""Change the library one line at a time, and see whether a test notices: `make mutate`, see docs/how-to/mutate.md.

Everything happens in a copy of the tree. A line is changed by one operator of Cosmic Ray, or left out, and the tests
that `tests/mutation.toml` names for its module run until one fails. They run in a fork of a process that has imported
the libraries: starting Python and torch anew would take longer than most tests.
"""

import argparse
import compileall
import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from py_compile import PycInvalidationMode
from typing import Any

import anyio
import cosmic_ray.plugins
import hypothesis
import parso
import pydantic_settings
import pytest
import torch
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIG = pathlib.Path("tests/mutation.toml")
PRELOADED = anyio, hypothesis, pydantic_settings, torch
SECONDS_PER_TEST = 60
LEAST_SECONDS = 60
UNFIT = ("core/VariableReplacer", "core/VariableInserter")  # want arguments
PYTEST = (
    *("-x", "-q", "-m", "not slow", "--no-header", "-p", "no:cacheprovider", f"--timeout={SECONDS_PER_TEST}"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # of what is imported here already
)


class LeaveOut:
    """An operator that Cosmic Ray lacks: leaves out a call, or an assignment to what outlives the function."""

    name = "leave out"

    def mutation_positions(self, node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:  # noqa: ANN401 - of parso
        """Yield where it can be applied."""
        if node.type == "simple_stmt":
            statement = node.children[0]
            target = statement.children[0].type if statement.type == "expr_stmt" else ""
            augments = target == "name" and getattr(statement.children[1], "value", "=") != "="
            if statement.type == "atom_expr" or target == "atom_expr" or augments:
                yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:  # noqa: ANN401 - of parso
        """Return what stands there instead."""
        nothing = parso.parse("pass\n").children[0]
        nothing.get_first_leaf().prefix = node.get_first_leaf().prefix
        return nothing


@dataclass(frozen=True)
class Mutant:
    """One changed line.

    Attributes:
        module: Path in the tree.
        line: Its number.
        operator: What changed it.
        before: The line.
        after: What it became.
        source: The module with it.
    """

    module: str
    line: int
    operator: str
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}\n    - {self.before}\n    + {self.after}"


def main() -> None:
    """Mutate what the arguments say, and print what survived."""
    config = tomllib.loads((ROOT / CONFIG).read_text())
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", choices=list(config["packages"]), help="only this one")
    parser.add_argument("--sample", type=int, help="so many lines of each package; all by default")
    parser.add_argument("--seed", type=int, default=0, help="chooses the lines, and what is done to each")
    given = parser.parse_args()
    known = _known_equivalent(config)
    rows = []
    with tempfile.TemporaryDirectory(prefix="tiered-kv-mutants-") as folder:
        tree = pathlib.Path(folder)
        _copy(tree)
        for package, settings in config["packages"].items():
            if given.package in {None, package}:
                mutants = _mutants_of(settings["modules"], given.sample, given.seed)
                print(f"{package}: {len(mutants)} lines", flush=True)
                rows.append((package, _judge(tree, mutants, settings, known)))
    print(f"\n{'package':12}{'mutants':>9}{'killed':>9}{'survived':>9}{'equivalent':>12}{'found':>8}")
    for package, counts in rows:
        fair = counts["killed"] + counts["survived"]
        found = f"{counts['killed'] / fair:.0%}" if fair else "-"
        print(
            f"{package:12}{counts.total():>9}{counts['killed']:>9}{counts['survived']:>9}{counts['equivalent']:>12}"
            f"{found:>8}"
        )


def _known_equivalent(config: dict[str, Any]) -> set[tuple[str, str, str]]:
    """Return the changes that were looked at by hand and change nothing; refuse those whose line is gone."""
    known = set()
    for each in config.get("equivalent", ()):
        lines = {line.strip() for line in (ROOT / each["module"]).read_text().splitlines()}
        if each["before"] not in lines:
            sys.exit(f"{CONFIG}: {each['module']} has no line {each['before']!r} any more: look at its mutants again")
        known.add((each["module"], each["before"], each["after"]))
    return known


def _copy(tree: pathlib.Path) -> None:
    """Copy what git tracks or would track, compiled so that only a changed module is compiled again."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    for folder in ("tiered_kv", "backends"):
        compileall.compile_dir(tree / folder, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)


def _mutants_of(modules: list[str], sample: int | None, seed: int) -> list[Mutant]:
    """Choose lines of a package, and one change for each."""
    paths = [path for pattern in modules for path in sorted(ROOT.glob(pattern))]
    choices = {(path.relative_to(ROOT).as_posix(), line): at for path in paths for line, at in _changes(path).items()}
    lines = list(choices)
    if sample is not None and sample < len(lines):
        lines = sorted(random.Random(seed).sample(lines, sample))
    mutants = []
    for module, line in lines:
        source = (ROOT / module).read_text()
        before = source.splitlines()[line - 1].strip()
        rng = random.Random(f"{seed} {module} {before}")  # the same for a line wherever it moves
        kinds = choices[module, line]
        operator, occurrence = rng.choice(kinds[rng.choice(sorted(kinds))])
        changed = mutate_code(source, _operator(operator), occurrence)
        after = next(
            (new for old, new in zip(source.splitlines(), changed.splitlines(), strict=False) if old != new), ""
        )
        mutants.append(Mutant(module, line, operator, before, after.strip(), changed))
    return mutants


def _changes(path: pathlib.Path) -> dict[int, dict[str, list[tuple[str, int]]]]:
    """Return by line, then by kind of operator, which operator can change it, and the how many-th change that is."""
    found: defaultdict[int, defaultdict[str, list[tuple[str, int]]]] = defaultdict(lambda: defaultdict(list))
    nodes = list(ast_nodes(get_ast(path.read_text())))
    fit = [_is_code(node) for node in nodes]
    for name in (LeaveOut.name, *cosmic_ray.plugins.operator_names()):
        if name in UNFIT:
            continue
        operator, occurrence = _operator(name), -1
        for node, is_fit in zip(nodes, fit, strict=True):
            for start, _ in operator.mutation_positions(node):
                occurrence += 1
                if is_fit:
                    found[start[0]][name.split("_")[0]].append((name, occurrence))
    return {line: dict(found[line]) for line in sorted(found)}


def _operator(name: str) -> Any:  # noqa: ANN401 - of Cosmic Ray
    return LeaveOut() if name == LeaveOut.name else cosmic_ray.plugins.get_operator(name)()


def _is_code(node: Any) -> bool:  # noqa: ANN401 - of parso
    """Say whether a node does something when the program runs: type annotations only fail to be read."""
    while node.parent is not None:
        outer, at = node.parent, node.parent.children.index(node)
        is_type = outer.type in {"annassign", "tfpdef"} and at == 1
        is_return_type = outer.type == "funcdef" and outer.children[at - 1] == "->"
        if is_type or is_return_type:
            return False
        node = outer
    return True


def _judge(
    tree: pathlib.Path, mutants: list[Mutant], settings: dict[str, Any], known: set[tuple[str, str, str]]
) -> Counter[str]:
    """Run the tests of each mutant; print and count what becomes of it."""
    counts: Counter[str] = Counter()
    first = settings.get("first", {})
    every = dict.fromkeys([*settings["tests"], *(test for tests in first.values() for test in tests)])
    limit_s = _time_limit(tree, tuple(every))
    for mutant in mutants:
        if (mutant.module, mutant.before, mutant.after) in known:
            counts["equivalent"] += 1
            continue
        tests = tuple(dict.fromkeys([*first.get(pathlib.Path(mutant.module).stem, ()), *settings["tests"]]))
        path = tree / mutant.module
        original = path.read_text()
        path.write_text(mutant.source)
        is_killed = _run(tree, tests, limit_s)
        path.write_text(original)
        counts["killed" if is_killed else "survived"] += 1
        print("." if is_killed else f"\nsurvived: {mutant}", end="" if is_killed else "\n", flush=True)
    return counts


def _time_limit(tree: pathlib.Path, tests: tuple[str, ...]) -> float:
    """Run tests on what is not mutated; return how long they may take on what is."""
    started = time.monotonic()
    if _run(tree, tests, float("inf"), writes_bytecode=True):
        sys.exit(f"The tests fail without a mutant, see above: pytest {' '.join(tests)}")
    return LEAST_SECONDS + 2 * (time.monotonic() - started)


def _run(tree: pathlib.Path, tests: tuple[str, ...], timeout_s: float, *, writes_bytecode: bool = False) -> bool:
    """Run tests in a fork of this process; say whether one failed, or they did not end in time."""
    child = os.fork()
    if not child:
        os.setsid()
        _be_tested(tree, tests, writes_bytecode=writes_bytecode)
    ends = time.monotonic() + timeout_s
    status = None
    while status is None:
        ended, code = os.waitpid(child, os.WNOHANG)
        if ended:
            status = code
        elif time.monotonic() > ends:
            status = -1
        else:
            time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # processes that a test started and did not end
    if status == -1:
        os.waitpid(child, 0)
    return status != 0


def _be_tested(tree: pathlib.Path, tests: tuple[str, ...], *, writes_bytecode: bool) -> None:
    """Become the process that runs the tests in the copied tree; does not return."""
    code = 1
    try:
        os.chdir(tree)
        path = [str(tree), str(tree / "backends")]
        os.environ |= {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "" if writes_bytecode else "1"}
        sys.path[:0] = path
        sys.dont_write_bytecode = not writes_bytecode
        log = os.open(tree / "mutate.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        if not writes_bytecode:
            os.dup2(log, 1)
            os.dup2(log, 2)
        code = int(pytest.main([*PYTEST, *tests]))
    except BaseException:  # noqa: BLE001 - nobody is above this
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
