"""The bugs of `planted.toml` can be planted, and the simulation finds them."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.testing.planted import HEAD, PAGE, ROOT, Change, NotPlantedError, all_planted
from tiered_kv.testing.simulation.themes import THEMES

QUICK = (
    "a revoked copy runs all the same",
    "blocks of all weights have one name",
    "stored blocks can be read before they are copied",
    "written-down bytes stay in the store queue",
)
"""Found within a few seeds."""


def test_each_bug_can_be_planted() -> None:
    """Its text is there, once: a mend that changes it must plant it anew."""
    for each in all_planted():
        sources: dict[str, str] = {}
        for change in each.changes:
            source = sources.get(change.module) or (ROOT / change.module).read_text()
            sources[change.module] = change.applied(source)
        for module, source in sources.items():
            compile(source, module, "exec")


def test_what_is_not_there_is_not_planted() -> None:
    """Nor is what is there twice: nobody could tell which is meant."""
    for before in ("c = 3", "a = 1"):
        with pytest.raises(NotPlantedError):
            Change("tiered_kv/some.py", before, "").applied("a = 1\nb = 2\na = 1\n")


@pytest.mark.parametrize("what", ["threading.Event().wait()", "while True: pass"])
def test_a_bug_that_hangs_is_found(what: str) -> None:
    """Whether its threads stand still or go round."""
    program = f"""
import threading
from tests.testing import planted
planted.HANGS_AFTER_S = 0.2
with planted.ended_if_it_hangs(lambda: print("hangs", flush=True)):
    {what}
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout == "hangs\n"


def rows() -> list[list[str]]:
    """Return the cells of the table."""
    page = PAGE.read_text()
    table = page[page.index(HEAD) + len(HEAD) :].split("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


def test_the_page_has_each_bug() -> None:
    """As `make planted` has written it."""
    assert [name for name, *_ in rows()] == [each.name for each in all_planted()]


def test_the_documentation_says_how_many_are_found() -> None:
    """As the table has it."""
    num_found = sum(not each.unfound for each in all_planted())
    said = (ROOT / "docs/explanation/planted-bugs.md").read_text()
    assert f"{num_found} of {len(all_planted())}" in said


def test_each_bug_is_found_or_its_row_says_why_not() -> None:
    """The median of its seeds, or a reason and a test; a bug that has both has been found since, and needs none."""
    for each, (name, _, _, seeds, how) in zip(all_planted(), rows(), strict=True):
        is_found = re.match(r"(at most )?\d+ \(", seeds) is not None
        assert is_found != bool(each.unfound), f"{name}: {seeds}"
        if each.unfound:
            assert how == f"not found: {each.why_not}", name
            path, test = each.test.split("::")
            assert f"def {test}(" in (ROOT / path).read_text(), name


@pytest.mark.slow
def test_a_test_that_is_named_for_a_bug_fails_with_it() -> None:
    """And one that does not, as it looks at something else, is told from it."""
    program = """
from dataclasses import replace
import torch  # once, for all processes that run a test
from tests.testing.planted import all_planted, fails_with
planted = {each.name: each for each in all_planted()}
its = planted["a medium that cannot describe itself ends statistics"]
others = replace(planted["what leaves the books is not told to the medium"], test=its.test)
print([fails_with(each) for each in (its, others)])
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])}
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines()[-1] == "[True, False]"


def test_each_scene_that_aims_at_a_bug_is_acted() -> None:
    """Seeds are about it, so that `--aimed` finds some."""
    assert {each.scene for each in all_planted()} <= {scene.__name__ for scene in THEMES} | {""}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_planted_bug_is_found() -> None:
    """Each in a process that has it and no other."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.testing.planted", "--json", "--ranges", "1", "--seeds", "20", "--only", *QUICK],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ended.stdout.splitlines()[-1])["found"] == len(QUICK)
