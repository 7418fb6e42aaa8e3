"""Calls a function within another one, at each of its steps: what a signal's handler may do to it."""

import sys
import threading
from collections.abc import Callable
from itertools import count
from types import FrameType

_WAIT_S = 30.0
"""For what comes at once unless something is broken."""


def interrupted_everywhere(function: Callable[[], object], handler: Callable[[], object], *, of: str) -> int:
    """Call ``function`` again and again, with ``handler`` called at its first step, then at its second, and so on.

    Args:
        function: What is interrupted.
        handler: What a signal's handler would do, in the same thread.
        of: The module whose code is stepped through, one operation of the interpreter at a time.

    Returns:
        How often both were called.

    Raises:
        AssertionError: One of them waits for the other.
    """
    for number in count(1):
        reached = False

        def run(number: int = number) -> None:
            nonlocal reached
            steps = count(1)

            def step(frame: FrameType, kind: str, _arg: object) -> object:
                nonlocal reached
                if frame.f_globals.get("__name__") != of:
                    return None
                frame.f_trace_opcodes = True
                if kind == "opcode" and next(steps) == number:
                    reached = True
                    sys.settrace(None)
                    handler()
                return step

            sys.settrace(step)  # type: ignore[arg-type] # a local trace function may return None
            try:
                function()
            finally:
                sys.settrace(None)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(_WAIT_S)
        assert not thread.is_alive(), f"interrupted at step {number}, the two wait for each other"
        if not reached:
            return number
    raise AssertionError
