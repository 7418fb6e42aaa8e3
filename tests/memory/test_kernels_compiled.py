"""The kernels as GPUs would run them: no GPU is needed to compile for one, and to look at what it would do."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton: pip install 'tiered-kv[cuda]'")
ROOT = Path(__file__).parents[2]
ARCHITECTURES = (80, 89, 90, 100, 120)
WIDEST = {16: "v2.b64", 8: "b64", 4: "b32", 2: "b16", 1: "b8"}
ALL = [(each, alignment) for each in ARCHITECTURES for alignment in WIDEST]
VARIANTS = ALL if "ALL_KERNELS" in os.environ else [each for each in ALL if each[1] == 16 or each[0] == 90]
"""What engines' tensors are, for every GPU; and odd ones for one of them, or for all: ``make test-gpu``."""


@pytest.fixture(scope="module")
def compiled() -> list[Any]:
    """All variants, compiled by Triton's own compiler in one process; then what it would specialise on comes first."""
    wanted = [f"{architecture}:{alignment}" for architecture, alignment in VARIANTS]
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.compile_kernels", *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_every_variant_compiles_and_moves_the_widest_words_there_are(compiled: list[Any]) -> None:
    """16 bytes at a time, four of them in flight, where all is aligned to that; never more than is aligned."""
    variants = compiled[1:]
    assert [each["variant"][:2] for each in variants[::2]] == [list(each) for each in VARIANTS]
    for each in variants:
        _, alignment, _ = each["variant"]
        moves = {f"{kind}.global.{WIDEST[alignment]}" for kind in ("ld", "st")}
        assert moves <= set(each["ptx"]) <= moves | {"ld.global.b64"}, each  # the table of fragments, and ids
        if alignment == 16:
            assert set(each["accesses"]) == {"LDG.E.128", "STG.E.128", "LDG.E.64"}, each
            assert min(each["accesses"]["LDG.E.128"], each["accesses"]["STG.E.128"]) >= 4, each


@pytest.mark.slow
def test_no_variant_takes_much_of_a_gpu(compiled: list[Any]) -> None:
    """No shared memory, nothing spilled; so few registers that 64 programs find room beside the engine's kernels."""
    for each in compiled[1:]:
        _, alignment, _ = each["variant"]
        assert (each["usage"]["shared"], each["usage"]["stack"], each["usage"]["local"]) == (0, 0, 0), each
        assert each["usage"]["reg"] <= (48 if alignment >= 8 else 176), each  # Triton 3.6 takes 170 for single bytes


@pytest.mark.slow
def test_no_argument_has_a_kernel_compiled_again(compiled: list[Any]) -> None:
    """Neither its value nor its alignment: an odd number of pages would hold the event loop for half a second."""
    assert compiled[0] == []
