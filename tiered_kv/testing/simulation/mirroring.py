"""A subscriber to a simulated cache's changes: what it makes of them is what the tiers hold, once nothing changes."""

import asyncio
from typing import TYPE_CHECKING, Final

from tiered_kv.testing.simulation.engine import OTHER_SALT, PROMPTS
from tiered_kv.testing.simulation.known import WrongAnswer
from tiered_kv.tiers.changes import Mirror
from tiered_kv.values.results import BlockState

if TYPE_CHECKING:
    from tiered_kv.testing.simulation.requester import Requester

_LOOKS: Final = 40
_LOOKS_AGAIN_S: Final = 0.05
"""In which what is scrubbed, or written behind, comes to rest."""


class Subscriber:
    """Applies each change to a mirror, and sees that none is missed."""

    def __init__(self, requests: "Requester") -> None:
        self._requests = requests
        self._mirror = Mirror()
        self._task = asyncio.ensure_future(self._apply())
        requests.world.bury(self._task)

    async def _apply(self) -> None:
        number = 0
        async for change in self._requests.kv.events():
            if change.sequence != number:
                raise WrongAnswer("events", f"change {change.sequence} comes where {number} is expected")
            self._mirror.apply(change)
            number += 1

    async def check(self) -> None:
        """See that the mirror is as the tiers are, soon."""
        for _ in range(_LOOKS):
            await asyncio.sleep(_LOOKS_AGAIN_S)
            if self._task.done():
                self._task.result()
            if not (wrong := self._differences()):
                return
        raise WrongAnswer("events", f"a mirror of what changes differs: {wrong}")

    def _differences(self) -> list[str]:
        kv, wrong = self._requests.kv, list[str]()
        for tier in kv.stats().tiers:
            if tier.tier not in kv.media:
                continue
            if tier.ready != (num_blocks := self._mirror.count(tier.tier)):
                wrong.append(f"{tier.tier} has {tier.ready} blocks, the mirror {num_blocks}")
            for number, keys in enumerate(PROMPTS):
                salt = OTHER_SALT if number == 4 else ""
                names = kv.namespace(salt, group=keys.group).names(keys)
                there = kv.membership(keys, tier=tier.tier) == BlockState.HIT
                mirrored = [bool(self._mirror.prefix(names[i : i + 1], tier.tier)) for i in range(len(keys))]
                if there.tolist() != mirrored:
                    wrong.append(f"{tier.tier} of prompt {number}: {there.tolist()}, the mirror {mirrored}")
        return wrong
