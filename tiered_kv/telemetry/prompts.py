"""What was asked for and was not there, each prompt once, however many calls asked for it. For the event loop's thread.

An engine looks a prompt up, and then loads what was found: that is one request. A load belongs to the last lookup whose
blocks it asks for, of those remembered; another one is a request of its own.
"""

import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # it brings torch, which who reads events alone does without
    from tiered_kv.tiers.tier import Batch

_REMEMBERED: Final = 128
"""Lookups whose loads may still come. Takes 8 bytes for each of their blocks."""
_SHOWN: Final = 32


@dataclass
class Shortfall:
    """A prompt that was not there to its end.

    Attributes:
        at: When it was asked for, in seconds since 1970.
        call: What fell short first: ``"lookup"`` or ``"load"``.
        requested: Its blocks.
        found: Those that were there, or came.
        because: What befell the first of the others.
        salt: Digest of its tenant's, zeros without one.
        fingerprint: Of its KV group.
    """

    at: float
    call: str
    requested: int
    found: int
    because: str
    salt: bytes
    fingerprint: bytes


@dataclass(frozen=True)
class Asked:
    """What was asked for, and was not there; blocks.

    Attributes:
        requested, missing: Of every prompt once.
        missing_because: By what befell the first block of each that was missing.
        looked_up, not_found, not_found_because: The same of lookups alone.
    """

    requested: int
    missing: int
    missing_because: Mapping[str, int]
    looked_up: int
    not_found: int
    not_found_because: Mapping[str, int]


@dataclass
class _Prompt:
    """A lookup: its blocks, where the first of them is in the prompt, how many there were, and why not the others."""

    ids: NDArray[np.uint64]
    start: int
    found: int
    missing: dict[str, int]
    shortfall: Shortfall | None


class Prompts:
    """Counts what callers asked for.

    Attributes:
        shortfalls: The last prompts that were not there to their ends.
    """

    def __init__(self) -> None:
        self.shortfalls: deque[Shortfall] = deque(maxlen=_SHOWN)
        self._requested = self._looked_up = 0
        self._missing, self._not_found = Counter[str](), Counter[str]()
        self._lookups: deque[_Prompt] = deque(maxlen=_REMEMBERED)

    def looked_up(self, batch: "Batch", found: int, because: str) -> None:
        """Count a lookup; ``because`` says what befell the first block that was not found, if one was not."""
        if not len(batch):
            return
        self._requested += len(batch)
        self._looked_up += len(batch)
        missing, shortfall = dict[str, int](), None
        if found < len(batch):
            missing = {because: len(batch) - found}
            self._missing.update(missing)
            self._not_found.update(missing)
            shortfall = self._fell_short("lookup", batch, len(batch), found, because)
        ids = batch.names[:, 0].copy()  # a part of a name tells prompts apart well enough to count them
        self._lookups.append(_Prompt(ids, int(batch.positions[0]), found, missing, shortfall))

    def loaded(self, batch: "Batch", num_blocks: int, because: str) -> None:
        """Count a load that has ended, of a prompt that was looked up, or of another one."""
        if not len(batch):
            return
        start, last = int(batch.positions[0]), batch.names[-1, 0]
        for prompt in reversed(self._lookups):
            at = start - prompt.start
            if at >= 0 and at + len(batch) <= len(prompt.ids) and prompt.ids[at + len(batch) - 1] == last:
                expected = min(max(0, prompt.found - at), len(batch))
                if expected != num_blocks:
                    self._correct(prompt, batch, num_blocks - expected, because)
                return
        self._requested += len(batch)
        if num_blocks < len(batch):
            self._missing[because] += len(batch) - num_blocks
            self._fell_short("load", batch, len(batch), num_blocks, because)

    def counted(self) -> Asked:
        """Return what was counted so far, for another thread."""
        return Asked(
            requested=self._requested,
            missing=self._missing.total(),
            missing_because=dict(self._missing),
            looked_up=self._looked_up,
            not_found=self._not_found.total(),
            not_found_because=dict(self._not_found),
        )

    def _fell_short(self, call: str, batch: "Batch", requested: int, found: int, because: str) -> Shortfall:
        space = batch.namespace
        told = Shortfall(time.time(), call, requested, found, because, space.salt, space.fingerprint)
        self.shortfalls.append(told)
        return told

    def _correct(self, prompt: _Prompt, batch: "Batch", more: int, because: str) -> None:
        """Count what a load brought of a prompt beyond what its lookup had found, or less than that."""
        prompt.found += more
        if more > 0:  # it had been on its way
            for why in reversed(tuple(prompt.missing)):
                came = min(more, prompt.missing[why])
                prompt.missing[why] -= came
                self._missing[why] -= came
                more -= came
            if (told := prompt.shortfall) is not None:
                told.found = prompt.found
                if told.found == told.requested:
                    prompt.shortfall = None
                    with suppress(ValueError):  # others have taken its place
                        self.shortfalls.remove(told)
            return
        self._missing[because] -= more
        prompt.missing[because] = prompt.missing.get(because, 0) - more
        if prompt.shortfall is None:
            prompt.shortfall = self._fell_short("load", batch, len(prompt.ids), prompt.found, because)
        else:
            prompt.shortfall.call, prompt.shortfall.found, prompt.shortfall.because = "load", prompt.found, because
