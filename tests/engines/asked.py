"""An engine that is asked from outside, while others are asked too."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from environments import EngineFailedError, Environment


class Asked:
    """A running `vllm_asked`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        """Wait until it is ready."""
        self.process = process
        self._said: list[str] = []
        self._answer()

    def ask(self, prompt: int, num_tokens: int) -> dict[str, Any]:
        """Return the answer to a prompt.

        Raises:
            EngineFailedError: It has ended.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps([prompt, num_tokens])}\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.append(line)
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise EngineFailedError("".join(self._said)[-8000:])


@contextmanager
def asked(vllm: Environment, wanted: Mapping[str, Any]) -> Iterator[Asked]:
    """Start an engine, and end it and all that it started."""
    process = vllm.start("vllm_asked.py", json.dumps(wanted))
    try:
        engine = Asked(process)
        yield engine
        process.communicate()  # by the end of what it is asked, as a server that stops
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.communicate()
