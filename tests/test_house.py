"""The core can be read: it has so many files, they are so long, and a name leads to one place."""

import ast
import io
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
LIBRARY = REPOSITORY / "tiered_kv"
ROOMS = ("cache", "catalog", "media", "memory", "settings", "tiers", "transfers", "values")
NAMED_BY_PYTHON = {"__init__.py", "__main__.py"}
"""These hand on."""
CORE = sorted(
    path
    for path in (*LIBRARY.glob("*.py"), *(path for room in ROOMS for path in (LIBRARY / room).rglob("*.py")))
    if path.name not in NAMED_BY_PYTHON
)
ALL = sorted(path for root in (LIBRARY, REPOSITORY / "backends/tiered_kv_backends") for path in root.rglob("*.py"))
MESSAGES = {LIBRARY / "host/protocol.py", LIBRARY / "integrations/vllm/messages.py"}
"""Messages are named after what they ask for."""
POLICIES = LIBRARY / "catalog/policies"
"""Each is read by itself, by whoever chooses one: a new one is a file of its own."""
MOST_FILES, LEAST_LINES, MOST_LINES_OF_CODE = 100, 60, 500
NOT_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def lines_of_code(text: str) -> int:
    """Count the lines that have more than comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def classes_in(paths: Iterable[Path]) -> dict[str, set[Path]]:
    """Return in which files there are classes of each name."""
    found = defaultdict(set)
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].add(path)
    return found


def shown(found: dict[str, set[Path]]) -> Iterator[str]:
    """Yield in words which names lead to more than one place."""
    for name, paths in sorted(found.items()):
        if len(paths) > 1:
            yield f"{name}: {', '.join(sorted(str(path.relative_to(REPOSITORY)) for path in paths))}"


def test_the_core_has_few_files() -> None:
    """Whoever is to change it can have read all of them."""
    n = len([path for path in CORE if path.parent != POLICIES])
    assert n <= MOST_FILES, f"{n} files in the core, at most {MOST_FILES} can be read: make a new one a part of another"


def test_no_file_of_the_core_is_a_part_of_its_neighbour() -> None:
    """What takes fewer lines than these says nothing alone, and is found sooner where it is used."""
    short = [f"{path.name} has {n} lines" for path in CORE if (n := len(path.read_text().splitlines())) < LEAST_LINES]
    assert not short


def test_every_file_of_the_core_can_be_read_in_one_go() -> None:
    """It is about one concept: docstrings and comments may take as much as they need."""
    long = [f"{path.name} has {n}" for path in CORE if (n := lines_of_code(path.read_text())) > MOST_LINES_OF_CODE]
    assert not long


def test_a_name_of_a_file_leads_to_one_file() -> None:
    """No two files have the same name, but those that Python names."""
    found = defaultdict(set)
    for path in ALL:
        if path.name not in NAMED_BY_PYTHON:
            found[path.name].add(path)
    assert not list(shown(found))


def test_a_name_of_a_class_leads_to_one_class() -> None:
    """No two classes of the core have one name, and no class elsewhere has one of the core's, messages aside."""
    core = classes_in(CORE)
    found = {name: paths for name, paths in classes_in(set(ALL) - MESSAGES).items() if name in core}
    assert not list(shown(found))


def test_what_mutation_passes_over_is_in_the_library() -> None:
    """Each change that nobody could see is of a line as it is today, in so many places; all files named are there."""
    table = tomllib.loads((REPOSITORY / "tests/mutation.toml").read_text())
    wrong = []
    for each in table["equivalent"]:
        path = REPOSITORY / each["module"]
        lines = [line.strip() for line in path.read_text().splitlines()] if path.is_file() else []
        if (n := lines.count(each["before"])) != each.get("places", 1):
            wrong.append(f"{each['module']} has {n} times {each['before']}")
    for name, package in table["packages"].items():
        patterns = (*package["modules"], *package["tests"])
        wrong += [f"{name}: no {pattern}" for pattern in patterns if not list(REPOSITORY.glob(pattern))]
    assert not wrong
