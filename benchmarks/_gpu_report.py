"""What a run on a GPU says: each figure as it comes, each error where it happened, and all of it in a file of JSON."""

import json
import math
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiered_kv.memory import Device


class Report:
    """The figures and errors of one part. What was printed is in the file, whatever ends the process after it.

    Attributes:
        figures: By what they are about and by name, in the order in which they came.
        errors: What went wrong, by what it was about.
    """

    def __init__(self, part: str, folder: Path | None) -> None:
        """Write ``part.json`` into ``folder``, if there is one."""
        self.part = part
        self.figures: dict[str, dict[str, Any]] = {}
        self.errors: dict[str, str] = {}
        self._path = None if folder is None else folder / f"{part}.json"

    def note(self, about: str, name: str, value: object) -> None:
        """Print and keep a figure, or a fact; what is not a number was not measured, and is left out."""
        if isinstance(value, float) and not math.isfinite(value):
            return
        value = round(value, 4) if isinstance(value, float) else value
        self.figures.setdefault(about, {})[name] = value
        print(f"{self.part}: {about}: {name} = {value}", flush=True)
        self._write()

    def take(self, about: str, name: str, measure: Callable[[], float]) -> float:
        """Measure and `note`; return the figure, or NaN if that raised."""
        with self.catching(f"{about}: {name}"):
            value = measure()
            self.note(about, name, value)
            return value
        return math.nan

    @contextmanager
    def catching(self, about: str) -> Iterator[None]:
        """Go on behind the ``with`` block, whatever goes wrong inside: it is printed and kept."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - one figure less
            self.errors[about] = f"{type(error).__name__}: {error}"
            print(f"{self.part}: {about}: FAILED\n{traceback.format_exc()}", flush=True)
            self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        beside = self._path.with_suffix(".new")
        beside.write_text(json.dumps({"figures": self.figures, "errors": self.errors}, indent=1, default=str) + "\n")
        os.replace(beside, self._path)  # noqa: PTH105 - as one step


@dataclass(frozen=True)
class Run:
    """How a part is run.

    Attributes:
        report: Of what it finds.
        device: Where the engine's cache is.
        is_small: Tiny sizes, to see that it runs: the figures mean nothing.
        path: A folder on NVMe.
        soak_s: How long the soak takes.
    """

    report: Report
    device: Device
    is_small: bool
    path: Path
    soak_s: float

    @property
    def has_gpu(self) -> bool:
        """Whether there is anything to find out."""
        return self.device.kind == "cuda"
