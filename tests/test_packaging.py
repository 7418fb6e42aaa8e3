import re
import tomllib
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import tiered_kv

REPOSITORY = Path(__file__).parents[1]
INDEX = REPOSITORY / "docs" / "index.md"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
CONSTRAINTS = REPOSITORY / "constraints.txt"


def test_the_version_is_said_once() -> None:
    """What a program prints of the library is what its package is called."""
    assert re.fullmatch(r"\d+\.\d+\.\d+", tiered_kv.__version__)
    assert version("tiered-kv") == tiered_kv.__version__


def test_every_requirement_is_pinned_within_its_range() -> None:
    """What tests and demo run with is one set of versions, and each is among those that users may have."""
    lines = [line.partition("#")[0].strip() for line in CONSTRAINTS.read_text().splitlines()]
    pins = dict(re.split("==|<=", line) for line in lines if line)  # "<=" where torch may bring an older one
    requirements = [Requirement(line) for line in requires("tiered-kv") or []]
    assert requirements
    for requirement in requirements:
        assert requirement.name in pins, f"constraints.txt does not pin {requirement.name}"
        assert requirement.specifier.contains(pins[requirement.name])


def test_every_extra_is_explained() -> None:
    """Whoever installs it finds all that there is in one table, and nothing that is not there."""
    table = re.findall(r"(?m)^\| (`[^|]*)\|", INDEX.read_text().partition("## Install")[2])
    explained = [extra for row in table for extra in re.findall(r"`(\w+)`", row)]
    assert sorted(explained) == sorted(PROJECT["optional-dependencies"])


def test_it_claims_what_is_true() -> None:
    """asyncio, and no other loop; the versions of Python that it may be installed on, and no other."""
    claims = PROJECT["classifiers"]
    assert [claim for claim in claims if claim.startswith("Framework")] == ["Framework :: AsyncIO"]
    pythons = SpecifierSet(PROJECT["requires-python"])
    assert all(claim.rpartition(" ")[2] in pythons for claim in claims if re.search(r"Python :: \d\.\d+", claim))


def test_a_kit_for_a_gpu_has_versions_that_were_tested() -> None:
    """What `make gpu-kit` downloads is pinned; and all that this library needs and torch does not bring is in it."""
    (names,) = re.findall(r"(?m)^GPU_KIT := (.*)", (REPOSITORY / "Makefile").read_text())
    kit = names.split()
    pinned = {re.split("==|<=", line)[0].lower().replace("_", "-") for line in CONSTRAINTS.read_text().splitlines()}
    assert set(kit) <= pinned
    there = {"aiofiles", "anyio", "numpy", "torch", "typing-extensions", "xxhash"}
    assert {Requirement(line).name for line in PROJECT["dependencies"]} - there <= set(kit)
