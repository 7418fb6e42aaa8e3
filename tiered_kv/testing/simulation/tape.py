"""The choice tape: every choice of a simulation is a number drawn here, so that the numbers are the whole run.

A run draws its numbers from its seed and keeps them; played back, they make the same run. 0 is always the plainest
choice (go on with the same thread, no fault, the shortest delay), so that a failing run is made plainer by writing 0.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeVar, get_args

T = TypeVar("T")
Track = Literal["plan", "turns", "faults"]
"""What there is and what is asked of it; who goes on; what goes wrong, and how long things take."""
_TRACKS: Final[tuple[Track, ...]] = get_args(Track)
Numbers = Mapping[Track, Sequence[int]]


class Tape:
    """Numbers in several tracks, drawn from a seed or played back.

    Attributes:
        seed: Where they come from.
        drawn: What was drawn so far.
        num_faults: How often something was chosen to go wrong.
    """

    def __init__(self, seed: int, played: Numbers | None = None) -> None:
        """Draw from ``seed``; or play numbers back, and 0 when they have run out."""
        self.seed = seed
        self.drawn: dict[Track, list[int]] = {track: [] for track in _TRACKS}
        self.num_faults = 0
        self._played = played
        self._rngs = {track: random.Random(f"{seed} {track}") for track in _TRACKS}  # noqa: S311 - no secret

    def draw(self, track: Track, n: int, odds: float = 1.0) -> int:
        """Choose one of ``n``: the first, or with a chance of ``odds`` any."""
        if self._played is None:
            rng = self._rngs[track]
            number = int(rng.random() * n) if odds >= 1.0 or rng.random() < odds else 0
        else:
            number = self.next_played(track) % n
        self.drawn[track].append(number)
        return number

    def chance(self, track: Track, odds: float) -> bool:
        """Say yes with a chance of ``odds``."""
        is_so = self._rngs[track].random() < odds if self._played is None else self.next_played(track) > 0
        number = int(is_so)
        self.drawn[track].append(number)
        return number > 0

    def fault(self, odds: float) -> bool:
        """Say whether something goes wrong now."""
        is_wrong = odds > 0 and self.chance("faults", odds)
        self.num_faults += is_wrong
        return is_wrong

    def pick(self, track: Track, choices: Sequence[T]) -> T:
        """Choose one; the first is the plainest."""
        return choices[self.draw(track, len(choices))]

    @property
    def is_played(self) -> bool:
        """Whether the numbers come from a run before."""
        return self._played is not None

    def next_played(self, track: Track) -> int:
        """Return the next number of the run before, 0 after its last."""
        assert self._played is not None
        at, numbers = len(self.drawn[track]), self._played.get(track, ())
        return numbers[at] if at < len(numbers) else 0
