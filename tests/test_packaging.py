import re
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import requires, version
from pathlib import Path
from zipfile import ZipFile

import pytest
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


def test_it_says_who_made_it() -> None:
    """Of a package that is found somewhere."""
    assert PROJECT["authors"]


def test_what_is_published_can_be_built_and_tested_again(tmp_path: Path) -> None:
    """The source distribution has what its Makefile and tests need; a wheel made of it is the one made of the tree.

    What an index shows of it has no link to a file beside it.
    """
    pytest.importorskip("hatchling", reason="hatchling is missing: pip install hatchling")

    def built(target: str, of: Path, into: Path) -> Path:
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)]
        subprocess.run(command, cwd=of, check=True, capture_output=True)
        (file,) = into.iterdir()
        return file

    with tarfile.open(built("sdist", REPOSITORY, tmp_path / "sdist")) as packed:
        packed.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("tiered_kv-*")
    needed = {".ci", "Makefile", "constraints.txt", "mkdocs.yml", "tests", "examples", "benchmarks", "deploy", "docs"}
    assert needed <= {each.name for each in source.iterdir()}
    wheels = [built("wheel", of, tmp_path / f"wheel-{number}") for number, of in enumerate((REPOSITORY, source))]
    of_tree, of_source = (
        {each.filename: each.CRC for each in ZipFile(wheel).infolist() if not each.filename.endswith("RECORD")}
        for wheel in wheels
    )
    assert of_source == of_tree
    assert {"tiered_kv/py.typed", "tiered_kv/telemetry/page/page.js", "tiered_kv_backends/py.typed"} <= set(of_tree)
    with ZipFile(wheels[0]) as wheel:
        (metadata,) = (each for each in wheel.namelist() if each.endswith(".dist-info/METADATA"))
        shown = wheel.read(metadata).decode().partition("\n\n")[2]
    assert (REPOSITORY / "examples" / "quickstart.py").read_text() in shown
    assert [target for target in re.findall(r"\]\(([^)]*)\)", shown) if not target.startswith("https://")] == []


@pytest.mark.slow
def test_what_a_gpu_is_to_run_needs_no_xdist() -> None:
    """`.ci/on_gpu` runs its tests by whatever pytest the machine has."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--collect-only", "tests/gpu", "tests/memory"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout


def test_a_kit_for_a_gpu_has_versions_that_were_tested() -> None:
    """What `make gpu-kit` downloads is pinned; and all that this library needs and torch does not bring is in it."""
    (names,) = re.findall(r"(?m)^GPU_KIT := (.*)", (REPOSITORY / "Makefile").read_text())
    kit = names.split()
    pinned = {re.split("==|<=", line)[0].lower().replace("_", "-") for line in CONSTRAINTS.read_text().splitlines()}
    assert set(kit) <= pinned
    there = {"anyio", "numpy", "torch", "typing-extensions"}
    assert {Requirement(line).name for line in PROJECT["dependencies"]} - there <= set(kit)
