"""kill -9 of a whole cache, whatever it does: storing, evicting, scrubbing, sweeping, resizing, opening, closing.

Four lives of each kind of tier; `make kills` ends a hundred of each.
"""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cache.kill_process import KINDS, PROMPT_BLOCKS, tier_of
from tests.support.any_layout import AnyEngine, cpu, open_any, prompt
from tests.support.programs import started

_REMEMBERED = 40
"""Prompts of former lives that are there; as many that were evicted last are looked for."""

Said = list[list[Any]]


@dataclass
class History:
    """What all lives so far have said.

    Attributes:
        known: Prompts that may be there.
        stored: Those that the medium has, as was said.
        must: Those that a `flush(sync=True)` came after: they are there.
        gone: Those that were evicted, and flushed, and not stored since: they are not.
        killed_in: How often a life ended within which step.
    """

    known: list[int] = field(default_factory=list)
    stored: set[int] = field(default_factory=set)
    must: set[int] = field(default_factory=set)
    gone: dict[int, None] = field(default_factory=dict)
    killed_in: Counter[str] = field(default_factory=Counter)
    _syncing: set[int] = field(default_factory=set)
    _is_resized: bool = False

    def apply(self, said: Said) -> None:
        """Take note of what a life has said."""
        self.stored, self._syncing = set(), set()
        for step, seed, *done in said:
            (self._ended if done else self._begun)(step, seed)
        last_step, _, *done = said[-1]
        self.killed_in["between two" if done else last_step] += 1

    def drop_old(self) -> list[int]:
        """Return the prompts that are to be evicted now; remember some that were."""
        old, self.known = self.known[:-_REMEMBERED], self.known[-_REMEMBERED:]
        self.must.difference_update(old)
        self.gone = dict.fromkeys([*self.gone, *old][-_REMEMBERED:])
        return old

    def _begun(self, step: str, seed: int) -> None:
        if step == "store":
            self.gone.pop(seed, None)
            self.known += [] if seed in self.known else [seed]
        elif step == "sync":
            self._syncing = set(self.stored)
        elif step == "evict":
            for prompts in (self.stored, self._syncing, self.must):
                prompts.discard(seed)
        elif step in {"resize", "open"}:
            self._is_resized = step == "resize"

    def _ended(self, step: str, seed: int) -> None:
        if step == "store" and not self._is_resized:  # else it may lie in a slot that a restart does not have
            self.stored.add(seed)
        elif step == "sync":
            self.must |= self._syncing
        elif step == "evict":
            self.gone[seed] = None


@pytest.fixture(scope="module")
def end_a_life() -> Iterator[Callable[[dict[str, object]], Said]]:
    """A function that has a cache live, as its order says, and returns what it said before it was killed."""
    with started("-m", "tests.cache.kill_process", folder=Path(__file__).parents[2]) as lives:

        def end(order: dict[str, object]) -> Said:
            lives.stdin.write(json.dumps(order) + "\n")
            lives.stdin.flush()
            said: Said = json.loads(lives.stdout.readline())
            return said

        yield end


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_whenever_it_is_killed_nothing_is_wrong_lost_or_back(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest, end_a_life: Callable[[dict[str, object]], Said]
) -> None:
    """After each kill: every block served is right, what was flushed is there, what was evicted is not."""
    num_kills = request.config.getoption("--kills")
    rng = np.random.default_rng(num_kills)
    history = History()
    num_served = num_musts = num_gone = 0
    for life in count(1):
        if life > num_kills and (num_served or life > 10 * num_kills):  # on a busy machine a few may begin nothing
            break
        moment = {"after_s": rng.uniform(0, 0.3), "from": str(rng.choice(["open", "done"]))}
        history.apply(
            end_a_life({"kind": kind, "path": str(tmp_path), "life": life, "prompts": history.known, **moment})
        )
        num_musts, num_gone = num_musts + len(history.must), num_gone + len(history.gone)
        num_served += asyncio.run(look(kind, tmp_path, history))
    assert num_served
    sys.stdout.write(
        f"{kind}: {life - 1} kills, in the midst of {dict(history.killed_in)}; {num_served} blocks served, "
        f"{num_musts} prompts that had to be there, {num_gone} that had not\n"
    )


async def look(kind: str, path: Path, history: History) -> int:
    """Load every block that may be there, or must not be; return how many were; then evict what is old."""
    engine = AnyEngine(num_blocks=PROMPT_BLOCKS)
    num_served = 0
    async with open_any(engine, cpu(0), tier_of(kind, path)) as kv:
        for seed in {*history.known, *history.gone}:
            keys = prompt(PROMPT_BLOCKS, seed)
            right = 0
            for n in range(PROMPT_BLOCKS):
                engine.wipe()
                if (await kv.load(keys[n : n + 1], engine.spec([n]))).num_blocks:
                    assert engine.right(keys[n : n + 1], [n]) == [True], "wrong bytes"
                    right += 1
            num_served += right
            assert seed not in history.gone or not right, f"prompt {seed} is back"
            assert seed not in history.must or right == PROMPT_BLOCKS, f"{right} blocks of prompt {seed} are there"
        for seed in history.drop_old():
            await kv.evict(prompt(PROMPT_BLOCKS, seed))
        await kv.flush(sync=True)
    return num_served
