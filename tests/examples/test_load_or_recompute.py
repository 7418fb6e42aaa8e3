import re

import pytest

import load_or_recompute
from tests.examples.test_chat import run_demo

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
def test_whatever_is_loaded_the_logits_are_equal() -> None:
    """From a disk that is too slow and from one that is fast: a row each, and equal to the bit.

    The first takes half a minute to read, and the prompt some seconds to compute on a machine with ten things to do.
    """
    demo = run_demo(load_or_recompute.__file__, "--tokens", "640", "--megabytes-per-s", "0.1", "1000")
    assert demo.returncode == 0, demo.stdout
    rows = [line for line in demo.stdout.splitlines() if "equal" in line]
    assert len(rows) == 2
    slow, fast = (tuple(map(int, re.findall(r"(\d+) / (\d+)", row)[0])) for row in rows)
    assert sum(slow) == sum(fast) == 32
    assert slow[1] > fast[1]
