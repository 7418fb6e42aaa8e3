import re
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement

import tiered_kv

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


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
