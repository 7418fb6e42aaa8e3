"""Change the library one line at a time, and see whether a test notices: `make mutate`, see CONTRIBUTING.md.

Everything happens in a copy of the tree. A line is changed by one operator of Cosmic Ray, or left out, and the tests
that run it, of those that `tests/mutation.toml` names for its package, run until one fails.
"""

import argparse
import compileall
import pathlib
import random
import subprocess
import sys
import tempfile
import tomllib
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from py_compile import PycInvalidationMode
from typing import Any, NamedTuple, TypeVar

import cosmic_ray.plugins
import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from mutate_tests import Suite

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIG = pathlib.Path("tests/mutation.toml")
UNFIT = ("core/VariableReplacer", "core/VariableInserter")  # want arguments
ASSERTED = ("frozen", "slots", "strict")

T = TypeVar("T")


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


class _Change(NamedTuple):
    operator: str
    occurrence: int
    """The how many-th change of the module by this operator."""
    lines: range
    """See `Mutant`."""


@dataclass(frozen=True)
class Mutant:
    """One changed line.

    Attributes:
        module: Path in the tree.
        line: Its number.
        lines: Those that run when it does; of what runs as the module is imported, all.
        before: The line.
        after: What it became.
        source: The module with it.
    """

    module: str
    line: int
    lines: range
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}\n    - {self.before}\n    + {self.after}"


def main() -> None:
    """Mutate what the arguments say, and print what survived."""
    config = tomllib.loads((ROOT / CONFIG).read_text())
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", nargs="+", choices=list(config["packages"]), help="only these")
    parser.add_argument("--sample", type=int, help="so many lines of each package; all by default")
    parser.add_argument("--seed", type=int, default=0, help="chooses the lines, and what is done to each")
    given = parser.parse_args()
    known = _known_equivalent(config)
    packages = {name: settings for name, settings in config["packages"].items() if name in (given.package or [name])}
    rows = []
    with tempfile.TemporaryDirectory(prefix="tiered-kv-mutants-") as folder:
        tree = pathlib.Path(folder)
        _copy(tree)
        tests = dict.fromkeys(test for settings in packages.values() for test in settings["tests"])
        suite = Suite.recorded(tree, list(tests))
        for package, settings in packages.items():
            mutants = _mutants_of(settings["modules"], given.sample, given.seed)
            print(f"\n{package}: {len(mutants)} lines", flush=True)
            rows.append((package, _judge(suite, mutants, known)))
    print(f"\n{'package':12}{'changes':>9}{'equivalent':>12}{'found':>8}")
    for package, counts in rows:
        fair = counts["found"] + counts["missed"]
        print(f"{package:12}{counts.total():>9}{counts['equivalent']:>12}{counts['found']:>5} of {fair}", end="")
        print(f"{counts['found'] / fair:>7.0%}" if fair else "")


def _known_equivalent(config: dict[str, Any]) -> set[tuple[str, str, str]]:
    """Return the changes that were looked at by hand and change nothing; refuse those whose line is gone, or is new."""
    known = set()
    for each in config.get("equivalent", ()):
        lines = [line.strip() for line in (ROOT / each["module"]).read_text().splitlines()]
        if (n := lines.count(each["before"])) != each.get("places", 1):
            sys.exit(f"{CONFIG}: {each['module']} has {n} times {each['before']!r}: look at its mutants again")
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
        drawn = [each for kind in _shuffled(rng, kinds) for each in _shuffled(rng, kinds[kind])]
        changed, change = next(
            (changed, each)
            for each in drawn
            if _is_python(changed := mutate_code(source, _operator(each.operator), each.occurrence))
        )
        after = next(
            (new for old, new in zip(source.splitlines(), changed.splitlines(), strict=False) if old != new), ""
        )
        mutants.append(Mutant(module, line, change.lines, before, after.strip(), changed))
    return mutants


def _shuffled(rng: random.Random, items: Collection[T]) -> list[T]:
    return rng.sample(list(items), len(items))


def _is_python(source: str) -> bool:
    with warnings.catch_warnings(action="ignore"):  # of what is odd
        try:
            compile(source, "changed", "exec")
        except SyntaxError:
            return False
    return True


def _changes(path: pathlib.Path) -> dict[int, dict[str, list[_Change]]]:
    """Return by line, then by kind of operator, what can be done to it."""
    found: defaultdict[int, defaultdict[str, list[_Change]]] = defaultdict(lambda: defaultdict(list))
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
                    found[start[0]][name.split("_")[0]].append(_Change(name, occurrence, _run_with(node)))
    return {line: dict(found[line]) for line in sorted(found)}


def _operator(name: str) -> Any:  # noqa: ANN401 - of Cosmic Ray
    return LeaveOut() if name == LeaveOut.name else cosmic_ray.plugins.get_operator(name)()


def _is_code(node: Any) -> bool:  # noqa: ANN401 - of parso
    """Say whether a node does something when the program runs.

    Type annotations do not, nor a ``*`` among parameters, nor ``strict``, ``frozen`` and ``slots``, which forbid what
    is never done.
    """
    if node.type == "operator" and node.parent.type == "parameters":
        return False
    if node.type == "keyword" and node.parent.type == "argument" and node.parent.children[0].value in ASSERTED:
        return False
    while node.parent is not None:
        outer, at = node.parent, node.parent.children.index(node)
        is_type = (outer.type, at) in {("annassign", 1), ("tfpdef", 2)}
        is_return_type = outer.type == "funcdef" and outer.children[at - 1] == "->"
        if is_type or is_return_type:
            return False
        node = outer
    return True


def _run_with(node: Any) -> range:  # noqa: ANN401 - of parso
    """Return the lines of a node's statement, or of its part of a compound one; all, outside of functions."""
    part, is_in_function = node, False
    while (outer := node.parent) is not None:
        if outer.type == "simple_stmt" and not is_in_function:
            part = outer
        is_in_function |= outer.type in {"funcdef", "lambdef"} and node is outer.children[-1]
        node = outer
    first, last = (part.start_pos[0], part.end_pos[0]) if is_in_function else (1, node.end_pos[0])
    return range(first, last + 1)


def _judge(suite: Suite, mutants: list[Mutant], known: set[tuple[str, str, str]]) -> Counter[str]:
    """Run the tests of each mutant; print and count what becomes of it."""
    counts: Counter[str] = Counter()
    for mutant in mutants:
        if (mutant.module, mutant.before, mutant.after) in known:
            counts["equivalent"] += 1
            continue
        tests = suite.running(mutant.module, mutant.lines)
        path = suite.tree / mutant.module
        original = path.read_text()
        path.write_text(mutant.source)
        is_found = suite.finds(tests)
        path.write_text(original)
        counts["found" if is_found else "missed"] += 1
        print(
            "." if is_found else f"\nmissed by {len(tests)} tests: {mutant}", end="" if is_found else "\n", flush=True
        )
    return counts


if __name__ == "__main__":
    main()
