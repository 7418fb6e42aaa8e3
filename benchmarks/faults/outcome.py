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
from dataclasses import dataclass, field
from typing import Any, Final

from case import MARK
from classes import AFTER, AIMED, OTHERS

START_S: Final = 180.0
"""For a process to have imported its engine."""
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


def outcome_of(
    python: str, tier: str, name: str, num_steps: int, folder: pathlib.Path, variables: Mapping[str, str]
) -> dict[str, Any]:
    """Run the steps of a class and return what came of it."""
    said = Said()
    for step in range(num_steps):
        with (folder / f"errors-{step}").open("w+b") as errors:
            reads, writes = os.pipe()
            process = subprocess.Popen(
                [python, CASE, tier, name, str(step), folder],
                env=dict(variables), stdout=writes, stderr=errors, start_new_session=True,
            )  # fmt: skip
            os.close(writes)
            lines, is_over = _lines_of(process, reads)
            os.close(reads)
            errors.seek(0)
            last = (errors.read().decode(errors="replace").strip().splitlines() or [""])[-1]
        pending = said.take(lines)
        group = pending or (AFTER if said.came[AIMED] else AIMED)
        if said.reason:
            break
        if not is_over:
            said.came[group].append("hangs")
            said.notes.append("" if pending else "does not close")
        elif process.returncode and not (process.returncode == -signal.SIGKILL and step < num_steps - 1):
            said.came[group].append("dies")
            said.notes.append(f"the process ends with {process.returncode}: {last}"[:300])
    said.notes = [note for note in said.notes if note]
    return said.summary()


def _lines_of(process: "subprocess.Popen[bytes]", reads: int) -> tuple[list[list[str]], bool]:
    """Return what a process says, and whether it ended by itself; if not, it and all that it started are ended."""
    output, deadline, is_over = b"", time.monotonic() + START_S, False
    while select.select([reads], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (more := os.read(reads, 65536)):
            is_over = True
            break
        output += more
        if MARK.encode() in more:
            deadline = time.monotonic() + PATIENCE_S
    if not is_over:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    lines = output.decode(errors="replace").splitlines()
    return [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)], is_over
