"""What docstrings and pages name exists: a name of ours that is written in backticks leads somewhere."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tiered_kv.cli.configuring import all_keys

REPOSITORY = Path(__file__).parents[1]
ROOTS = (REPOSITORY, REPOSITORY / "backends")
MODULES = {
    ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
    for root, package in zip(ROOTS, ("tiered_kv", "tiered_kv_backends"), strict=True)
    for path in sorted((root / package).rglob("*.py"))
}
PAGES = [
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
]
NAME = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\))?`(?!`)")
REFERENCE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
FILE = re.compile(r"(?<!`)`((?:[\w-]+/)+[\w-]+\.(?:py|toml|md))`(?!`)")
SUFFIXES = {"bin", "json", "lock", "md", "py", "svg", "toml", "txt"}
NOT_OURS = {
    "Engine.blocks",  # of an example
    "Engine.generate",  # SGLang's
    "model.generate",  # of transformers
    "model.generate_batch",
    "record.event",  # of the standard library's logging
    "record.values",
    "tiered_kv.connect",  # keys of SGLang's extra config
    "tiered_kv.weights",
}


class House(ast.NodeVisitor):
    """What the library defines: names by module, attributes and bases by class, and every string."""

    def __init__(self) -> None:
        self.of_module: dict[str, set[str]] = {}
        self.of_class: defaultdict[str, set[str]] = defaultdict(set)
        self.bases: defaultdict[str, set[str]] = defaultdict(set)
        self.strings: set[str] = set()
        for name, path in MODULES.items():
            tree = ast.parse(path.read_text())
            self.of_module[name] = set(_names_in(tree.body))
            self.visit(tree)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Note what a class has, its instances' attributes included, and what it inherits from."""
        self.bases[node.name].update(_last(base) for base in node.bases)
        self.of_class[node.name].update(_names_in(node.body))
        for each in ast.walk(node):
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and _last(each.value) == "self":
                self.of_class[node.name].add(each.attr)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Note a string: names of events are strings."""
        if isinstance(node.value, str):
            self.strings.add(node.value)

    def has(self, name: str) -> bool | None:
        """Whether there is such a name; None if it is not for us to say."""
        *head, last = name.split(".")
        if head[-1] in self.of_class:
            return self._class_has(head[-1], last)
        if any(f".{module}".endswith(f".{name}") for module in MODULES):
            return True
        if modules := [module for module in MODULES if f".{module}".endswith(f".{'.'.join(head)}")]:
            if any(last in self.of_module[module] for module in modules):
                return True
            is_variable = len(head) == 1 and all(MODULES[module].name != "__init__.py" for module in modules)
            return is_variable and any(last in has for has in self.of_class.values())
        return False if any(f".{head[0]}." in f".{module}" for module in MODULES) else None

    def _class_has(self, name: str, attribute: str) -> bool:
        return attribute in self.of_class[name] or any(
            self._class_has(base, attribute) for base in self.bases[name] if base in self.of_class and base != name
        )


def _last(node: ast.expr) -> str:
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _names_in(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield from (each.id for each in ast.walk(node) if isinstance(each, ast.Name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _names_in(node.body)


def test_every_name_of_ours_leads_somewhere() -> None:
    """Nobody is sent to a class, a method or a module that has moved, or was never there."""
    house = House()
    known = NOT_OURS | {each.key for each in all_keys()} | house.strings
    found = [
        f"{path.relative_to(REPOSITORY)}:{number} {name}"
        for path in [*MODULES.values(), *PAGES]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for name in NAME.findall(line)
        if name not in known and name.rpartition(".")[2] not in SUFFIXES and house.has(name) is False
    ]
    assert not found, "\n".join(found)


def test_every_file_that_is_named_exists() -> None:
    """From the root, from the library or from the backends."""
    roots = (
        REPOSITORY,
        *ROOTS,
        REPOSITORY / "tiered_kv",
        REPOSITORY / "backends/tiered_kv_backends",
        REPOSITORY / "docs",
    )
    found = [
        f"{path.relative_to(REPOSITORY)}:{number} {file}"
        for path in [*MODULES.values(), *PAGES]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for file in FILE.findall(line)
        if file not in NOT_OURS and not any((root / file).exists() for root in roots)
    ]
    assert not found, "\n".join(found)


def test_the_reference_is_made_of_what_there_is() -> None:
    """Each directive names a module, or something in a module, by its full path."""
    house = House()
    named = [(page, name) for page in PAGES for name in REFERENCE.findall(page.read_text())]
    found = [f"{page.relative_to(REPOSITORY)} {name}" for page, name in named if house.has(name) is not True]
    assert named
    assert not found, "\n".join(found)


def test_the_reference_says_in_which_files_it_is() -> None:
    """Who reads it in the repository, where a directive shows nothing, is sent to the docstrings."""
    missing = [
        f"{page.relative_to(REPOSITORY)} {file}"
        for page in PAGES
        for text in [page.read_text()]
        for file in map(_file_of, REFERENCE.findall(text))
        if f"`{file}`" not in text
    ]
    assert not missing, "\n".join(missing)


def _file_of(name: str) -> Path:
    """Return the file of the module that a full name begins with."""
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return MODULES[name].relative_to(REPOSITORY)
