from pathlib import Path

import pytest

import chat_host
from tests.examples.test_chat import SMALL, run_demo

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
def test_two_engines_share_a_cache_that_is_restarted_under_them(tmp_path: Path) -> None:
    """A small run ends well: the second engine is warm, and both are again after the server's restart; equal output."""
    demo = run_demo(chat_host.__file__, *SMALL, "--conversations=1", "--turns=1", "--out", tmp_path)
    assert demo.returncode == 0, demo.stdout
    rows = [line.split() for line in demo.stdout.splitlines()]
    assert [row[1] for row in rows if row[-2:] == ["equal", "yes"]] == ["two", "one,", "two"]
    assert "Traceback" not in demo.stdout
