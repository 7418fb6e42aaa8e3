"""What came of a class of faults on a tier: its steps, each in a process of its own, and what they said."""

import json
import os
import pathlib
import select
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, Final, cast

from case import BEGUN, ENDED, MARK
from classes import AFTER, AIMED, OTHERS

START_S: Final = 180.0
"""For a process to have imported its engine, and to have gone when it is ended."""
PATIENCE_S: Final = 45.0
"""Who says nothing for so long hangs."""
WORST: Final = ("wrong bytes", "hangs", "dies", "raises", "miss", "right")
CASE: Final = pathlib.Path(__file__).with_name("case.py")


@dataclass
class Said:
    """What the steps of one class said.

    Attributes:
        came: Of each group of blocks, what came of each.
        notes: What else was seen.
        versions: Of the tier.
        reason: Why the class is not applicable, if it is not.
    """

    came: dict[str, list[str]] = field(default_factory=lambda: {AIMED: [], OTHERS: [], AFTER: []})
    notes: list[str] = field(default_factory=list)
    versions: str = ""
    reason: str = ""

    def take(self, lines: Sequence[Sequence[str]]) -> str | None:
        """Take the lines of a step; return of which group it was trying a block when it ended."""
        pending = None
        for what, group, text in lines:
            if what == "versions":
                self.versions = text
            elif group == "not applicable":
                self.reason = text
            elif what == "trying":
                pending = group
            elif what == "came":
                self.came[group].append(text)
                pending = None
            elif text not in self.notes:
                self.notes.append(text)
        return pending

    def summary(self) -> dict[str, Any]:
        """Return the outcome, and what stands beside it: of all blocks wrong bytes count, else those aimed at."""
        if self.reason:
            return {"outcome": "not applicable", "note": self.reason, "versions": self.versions}
        for group, text in ((OTHERS, "of the other blocks"), (AFTER, "when the fault is over")):
            bad = Counter(each for each in self.came[group] if each != "right")
            if bad:
                counts = ", ".join(f"{count} of {len(self.came[group])} {name}" for name, count in bad.items())
                self.notes.append(f"{text}: {counts}")
        wrong = [each for each in self.came[OTHERS] + self.came[AFTER] if each == WORST[0]]
        outcome = next((name for name in WORST if name in {*self.came[AIMED], *wrong}), "dies")
        by_group = {group: dict(Counter(each)) for group, each in self.came.items() if each}
        return {"outcome": outcome, "note": "; ".join(self.notes), "versions": self.versions, **by_group}


class Steps:
    """Runs the steps of classes on one tier, each in a process of its own; one after another is asked for."""

    def __init__(
        self, python: str, tier: str, folder: pathlib.Path, variables: Mapping[str, str], *, forks: bool
    ) -> None:
        """Say how: where it ``forks``, the tier is imported once for all of them, else anew for each."""
        self._command = [python, str(CASE), tier, str(folder)]
        self._variables = dict(variables)
        self._errors = folder / "errors"
        self._forks = forks
        self._cases: subprocess.Popen[bytes] | None = None

    def run(self, name: str, step: int) -> tuple[list[list[str]], int | None, str]:
        """Run one; return what it said, its exit code, None if it had to be ended, and the last line of its errors."""
        with self._errors.open("a+b") as errors:
            if self._cases is None:
                self._cases = subprocess.Popen(
                    self._command, env=self._variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                    bufsize=0, start_new_session=True,
                )  # fmt: skip
            before = errors.seek(0, os.SEEK_END)
            lines, code = _followed(self._cases, [name, step])
            errors.seek(before)
            last = (errors.read().decode(errors="replace").strip().splitlines() or [""])[-1]
        if not self._forks or self._cases.poll() is not None:
            self.close()
        return lines, code, last

    def close(self) -> None:
        """End what imported the tier."""
        if self._cases is not None:
            cast(IO[bytes], self._cases.stdin).close()
            self._cases.wait()
            cast(IO[bytes], self._cases.stdout).close()
        self._cases = None


def outcome_of(steps: Steps, name: str, num_steps: int) -> dict[str, Any]:
    """Run the steps of a class and return what came of it."""
    said = Said()
    for step in range(num_steps):
        lines, code, last = steps.run(name, step)
        pending = said.take(lines)
        group = pending or (AFTER if said.came[AIMED] else AIMED)
        if said.reason:
            break
        if code is None:
            said.came[group].append("hangs")
            said.notes.append("" if pending else "does not close")
        elif code and not (code == -signal.SIGKILL and step < num_steps - 1):
            said.came[group].append("dies")
            said.notes.append(f"the process ends with {code}: {last}"[:300])
    said.notes = [note for note in said.notes if note]
    return said.summary()


def _followed(cases: "subprocess.Popen[bytes]", step: Sequence[object]) -> tuple[list[list[str]], int | None]:
    """Have a step run; return what it says, and its exit code if it ended by itself; if not, it is ended."""
    to, answers = cast(IO[bytes], cases.stdin), cast(IO[bytes], cases.stdout)
    to.write(json.dumps(step).encode() + b"\n")
    lines: list[list[str]] = []
    output, running, is_over, deadline = b"", cases.pid, True, time.monotonic() + START_S
    while True:
        if not select.select([answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
            is_over, deadline = False, time.monotonic() + START_S
            with suppress(ProcessLookupError):  # it has ended at this moment
                os.killpg(running, signal.SIGKILL)
            continue
        more = answers.read(65536)
        *whole, output = (output + more).split(b"\n")
        for line in whole:
            if not line.startswith(MARK.encode()):
                continue
            said = json.loads(line.removeprefix(MARK.encode()))
            if said[0] == ENDED:
                return lines, int(said[2]) if is_over else None
            if said[0] == BEGUN:
                running = int(said[2])
            else:
                lines.append(said)
            deadline = time.monotonic() + PATIENCE_S
        if not more:  # it could not import the tier
            return lines, cases.wait() if is_over else None
