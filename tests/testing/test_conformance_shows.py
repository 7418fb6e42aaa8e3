"""What an author of a backend reads when the suite fails."""

import subprocess
import sys
from pathlib import Path

import pytest

from tiered_kv.testing.promises import assert_bytes

BROKEN = """
from collections.abc import AsyncIterator

import pytest

from tiered_kv.media.backend import Outcome
from tiered_kv.testing import BackendTests, open_backend
from tiered_kv_backends.memory import MemoryBackend


class Forgetful(MemoryBackend):
    async def lookup(self, keys):
        return [Outcome.MISS for _ in keys]


class TestForgetful(BackendTests):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[Forgetful]:
        async with open_backend(Forgetful(Forgetful.Settings(capacity="16MiB"))) as backend:
            yield backend
"""


def test_blocks_that_differ_are_said_by_number_and_byte() -> None:
    """Not shown whole: a diff of hundreds of kilobytes takes minutes, and tells nothing."""
    good, bad = bytes(100_000), bytes(70_000) + b"\x01" + bytes(29_999)
    assert_bytes([good, bad], [good, bad])
    with pytest.raises(AssertionError, match=r"^block 1 of 2 is not what was written: at byte 70000 it has b'\\x01"):
        assert_bytes([good, bad], [good, good])
    with pytest.raises(AssertionError, match=r"at byte 5 it has b'', not .* 5 bytes, of 100000"):
        assert_bytes([good[:5]], [good])
    with pytest.raises(AssertionError, match="as many blocks as were written"):
        assert_bytes([good], [good, good])


def test_a_failure_shows_the_values(tmp_path: Path) -> None:
    """In an author's own folder too, where pytest rewrites the assertions of test files only."""
    (tmp_path / "test_forgetful.py").write_text(BROKEN)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", "."]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "Outcome.MISS" in ran.stdout, ran.stdout
    promise = "What was written is read, header and payload, for whole pages and for odd lengths."
    assert f"AssertionError: {promise}" in ran.stdout, ran.stdout


def test_the_scripted_device_needs_no_pytest() -> None:
    """Who simulates an engine, or writes tests with something else, has it; a suite says what it needs."""
    program = """
import sys
sys.modules["pytest"] = None
from tiered_kv.testing import ScriptedDevice, make_block, open_backend
print(ScriptedDevice().pending)
try:
    from tiered_kv.testing import BackendTests
except ModuleNotFoundError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "0\nBackendTests needs pytest: pip install 'tiered-kv[testing]'\n"
