"""What is public is importable from `tiered_kv`, its `testing` and its `telemetry`, and nobody is sent deeper."""

import enum
import inspect
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import tiered_kv
import tiered_kv.telemetry
import tiered_kv.testing

REPOSITORY = Path(__file__).parents[1]
PUBLIC: list[ModuleType] = [tiered_kv, tiered_kv.testing, tiered_kv.telemetry]
DEEPER = re.compile(r"(?m)^\s*(?:from|import) (tiered_kv\.(?!(?:testing|telemetry|integrations\.\w+) import\b)[\w.]+)")
SHOWN = [
    *(REPOSITORY / "docs").rglob("*.md"),
    *(REPOSITORY / "examples").rglob("*.py"),
    REPOSITORY / "README.md",
]
MADE_BY_THE_CACHE = {
    *("JobBook", "Loading", "OpenCache", "Seat", "Store", "Storing"),  # what handles are made with
    *("HostSlab", "PageLocking", "Stream"),  # what passes between a cache and its device
    *("Reading", "Watch", "Watched"),  # what passes between a cache and its metrics
    *("Access", "Change", "HasChanges", "HasIndex", "IndexPlace"),  # what passes from a cache to its streams of changes
}
"""No caller makes or keeps one."""


def callables_of(item: object) -> Iterator[object]:
    """Yield a function, or a class and what may be called of it."""
    yield item
    if inspect.isclass(item) and not issubclass(item, enum.Enum | BaseException):
        for name, member in inspect.getmembers(item):
            if not name.startswith("_") or name in {"__init__", "__aenter__", "__enter__", "__await__"}:
                yield member.fget if isinstance(member, property) else member


def classes_in(hint: object) -> Iterator[type]:
    """Yield the classes that an annotation names."""
    if inspect.isclass(hint):
        yield hint
    for part in typing.get_args(hint):
        yield from classes_in(part)


def named_by(module: ModuleType) -> set[str]:
    """Return our classes that the signatures of a module's public names speak of."""
    found = set()
    for name in module.__all__:
        for each in callables_of(getattr(module, name)):
            try:
                hints = typing.get_type_hints(each)
            except (TypeError, NameError, AttributeError):  # no function, or names that only a type checker knows
                continue
            for hint in hints.values():
                found |= {
                    cls.__qualname__
                    for cls in classes_in(hint)
                    if cls.__module__.startswith("tiered_kv") and not cls.__name__.startswith("_")
                }
    return found


def test_all_that_is_announced_is_there() -> None:
    """Each name of ``__all__`` can be imported, is there once, and is found where one looks for it."""
    for module in PUBLIC:
        assert len(set(module.__all__)) == len(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize(
    ("module", "absent", "name"),
    [("tiered_kv", "msgspec", "ConnectedKV"), ("tiered_kv.testing", "pytest", "BackendTests")],
)
def test_without_an_extra_all_the_others_are_there(module: str, absent: str, name: str) -> None:
    """What is installed without extras can be imported at once and shown by `help`; the others name their extra."""
    script = (
        f"import pydoc, sys; sys.modules[{absent!r}] = None; import {module} as it; from {module} import *;"
        f"pydoc.render_doc(it)\ntry: it.{name}\n"
        "except Exception as error: assert 'pip install' in str(error)\nelse: raise AssertionError"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_readers_of_events_do_without_torch() -> None:
    """A router imports `Mirror` and `tiered_kv.telemetry` at once; a name that needs torch brings it."""
    script = (
        "import sys; from tiered_kv import Mirror, Namespace, hash_blocks; import tiered_kv.telemetry;"
        "assert 'torch' not in sys.modules; from tiered_kv import TieredKV; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_what_signatures_speak_of_is_public() -> None:
    """Whoever annotates what a call takes or returns, or writes a backend or a receiver of events, finds it."""
    public = {name for module in PUBLIC for name in module.__all__}
    missing = {name for module in PUBLIC for name in named_by(module)} - public - MADE_BY_THE_CACHE
    assert not missing
    assert {event.__name__ for event in tiered_kv.Event.__subclasses__()} <= public


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_nobody_is_sent_deeper(path: Path) -> None:
    """Documentation and examples import what is public from where it is public."""
    assert DEEPER.findall(path.read_text()) == []


def test_every_call_of_a_cache_says_what_it_does() -> None:
    """What a cache promises is said once, in `BlockCache`; `help` finds it in every cache that there is."""
    calls = [name for name, _ in inspect.getmembers(tiered_kv.BlockCache, callable) if not name.startswith("_")]
    for cls in (tiered_kv.BlockCache, tiered_kv.ConnectedKV, tiered_kv.TieredKV):
        assert [name for name in calls if not inspect.getdoc(getattr(cls, name))] == []
