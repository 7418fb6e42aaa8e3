"""How much a call does, whatever the machine does besides."""

import sys
from collections.abc import Callable
from types import FrameType


def num_calls(function: Callable[[], object]) -> int:
    """Count the functions, of Python and of C, that a call calls."""
    count = 0

    def see(_frame: FrameType, kind: str, _arg: object) -> None:
        nonlocal count
        count += kind in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
