"""What KV hints ask of a cache's blocks: done in its event loop, as far as each tenant's share goes.

Whoever reads hints, an adapter or the page's server, names the blocks that they are about, and waits for nothing.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, Self

from tiered_kv.cache.block_cache import BlockCache
from tiered_kv.transfers.jobs import Job
from tiered_kv.values.errors import ClosedError
from tiered_kv.values.hints import HintAction, ReuseHint, delay_of
from tiered_kv.values.keys import BlockKeys
from tiered_kv.values.layout import KVLayout
from tiered_kv.values.log import Seldom

MOST_WAITING: Final = 1024
"""Prompts whose hints are not done yet, delays included: of more they are passed over."""
_STORED_S: Final = 10.0
"""What was not stored by then is passed over."""
_LOOK_S: Final = 0.02
_SWEEP_S: Final = 1.0
_JUDGED: Final = 8
"""Times a tenant's share: so many of its blocks are remembered, about, as right or wrong."""


class Hints:
    """Does what hints ask for, within bounds. For the cache's event loop."""

    def __init__(
        self,
        cache: BlockCache,
        *,
        memory: str,
        layout: KVLayout,
        num_ranks: int,
        each: float,
        together: float,
        favoured: Callable[[int, int], object],
    ) -> None:
        """Begin with none.

        Args:
            cache: That is told.
            memory: The name of the tier that blocks are prefetched to.
            layout: The KV groups, each of which has slots of its own there.
            num_ranks: For each of which a block takes a slot.
            each: The part of a group's slots that may be kept or brought at once for a tenant.
            together: For all tenants together.
            favoured: Called with how many blocks are kept or brought by an action, and how many are not, as they would
                be too many.
        """
        self._cache = cache
        self._memory = memory
        self._groups = layout.groups
        self._num_ranks = num_ranks
        self._each = each
        self._together = together
        self._seldom = Seldom()
        self._favours = [Favours(0, 0) for _ in layout.groups]
        self._seen_s = -inf
        self._favoured = favoured
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    def of(
        cls,
        cache: BlockCache,
        *,
        layout: KVLayout,
        num_ranks: int,
        each: float,
        together: float,
        favoured: Callable[[int, int], object],
    ) -> Self | None:
        """Return the hints of an open cache, for these parts of its CPU tier; None if it has none."""
        memory = next((name for name, medium in cache.media.items() if medium == "cpu"), None)
        if memory is None:
            return None
        return cls(
            cache, memory=memory, layout=layout, num_ranks=num_ranks, each=each, together=together, favoured=favoured
        )

    def begin(self, meant: Sequence[tuple[HintAction, BlockKeys]], salt: str, jobs: Sequence[Job] = ()) -> bool:
        """Begin to do what is meant of a tenant's blocks, once ``jobs`` have stored them; say no if too many wait.

        What comes with a delay is behind all that comes sooner.
        """
        if len(self._tasks) >= MOST_WAITING:
            return False
        task = asyncio.get_running_loop().create_task(self._run(meant, salt, jobs))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def use(self, keys: Sequence[BlockKeys], salt: str) -> None:
        """Take note of what a tenant asks for: hints of it were right."""
        now_s = asyncio.get_running_loop().time()
        for each in keys:
            self._favours[each.group].use(salt, list(each), now_s=now_s)

    async def settle(self) -> None:
        """Wait until all that was begun is done, delays included."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def aclose(self) -> None:
        """End what waits."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, meant: Sequence[tuple[HintAction, BlockKeys]], salt: str, jobs: Sequence[Job]) -> None:
        """Wait until blocks are stored, then act. Whoever awaits a job takes its news from the scheduler."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while any(job.result is None for job in jobs) and loop.time() < began_s + _STORED_S:  # noqa: ASYNC110 - see above
            await asyncio.sleep(_LOOK_S)
        for action, keys in meant:
            wait_s = max(0.0, began_s + delay_of(action) - loop.time())
            await asyncio.sleep(wait_s)  # others have their turn in any case
            try:
                await self._act(action, keys, salt)
            except ClosedError:
                return
            except Exception as error:  # noqa: BLE001 - what somebody has sent must not end the others
                self._seldom.failed("KV hints", error)

    async def _act(self, action: HintAction, keys: BlockKeys, salt: str) -> None:
        favours, blocks = self._favours[keys.group], list(keys)
        if action.kind in {"demote", "evict"}:
            if action.kind == "evict" and salt:  # what has no salt is everybody's
                self._cache.unpin(keys)  # else their room is not free before their pins end, and is still to be counted
                favours.drop(salt, blocks)
                await self._cache.evict(keys)
            else:
                self._cache.touch(keys, hint=ReuseHint(0.0))
            return
        now_s = asyncio.get_running_loop().time()
        self._see_capacity(now_s)
        num_allowed = num_blocks = favours.room(salt, blocks, now_s=now_s)
        if num_allowed and action.kind == "pin":  # what is not there takes no room: nothing is awaited in between
            num_blocks = self._cache.pin(keys[:num_allowed], ttl_s=action.for_s).num_blocks
        stays = action.kind == "pin"  # whether it is used or not
        favours.take(salt, blocks[:num_blocks], now_s=now_s, for_s=action.for_s, stays=stays)
        self._favoured(num_blocks, len(keys) - num_allowed)
        if num_blocks and action.kind == "retain":
            hint = ReuseHint(action.probability, within_s=action.for_s, category="kv.retain")
            self._cache.touch(keys[:num_blocks], hint=hint)
        elif num_blocks and action.kind == "prefetch":
            await self._cache.prefetch(keys[:num_blocks], to=self._memory)

    def _see_capacity(self, now_s: float) -> None:
        """Go by what the tier holds now, as it may be resized; of a host's server it is not asked for every hint."""
        if now_s - self._seen_s >= _SWEEP_S:
            self._seen_s = now_s
            num_slots = sum(tier.num_slots for tier in self._cache.stats().tiers if tier.tier == self._memory)
            num_slots //= self._num_ranks
            num_blocks = bisect_right(range(1, num_slots + 1), num_slots, key=self._slots_for)
            for group, favours in zip(self._groups, self._favours, strict=True):
                num_slots = group.num_slots(num_blocks)
                favours.allow(int(num_slots * self._each), int(num_slots * self._together))

    def _slots_for(self, num_blocks: int) -> int:
        """Return how many slots all groups have in a tier that is to hold so many blocks of prompts."""
        return sum(group.num_slots(num_blocks) for group in self._groups)


class Favours:
    """The blocks that hints keep or bring, each for a time: a limited number for each tenant, and for all together.

    A tenant whose blocks are not asked for in their time gets less: its share is what it is of the part that were, to
    the third power. So hints that are wrong at random soon cost little, and once they are right again they count again.
    Nobody is judged before anyone has said what is asked for: hints by HTTP come without.
    """

    def __init__(self, most_each: int, most_all: int) -> None:
        self.allow(most_each, most_all)
        self._until: dict[str, dict[bytes, float]] = {}  # by tenant and block, on the caller's clock
        self._staying: dict[tuple[str, bytes], bool] = {}  # of those that stay for their time, whether they were used
        self._judged: dict[str, _Judged] = {}  # the tenant used least recently first
        self._num_all = 0
        self._swept_s = -inf
        self._hears_of_uses = False

    def allow(self, most_each: int, most_all: int) -> None:
        """Allow so many blocks to each tenant, and to all together, from now on."""
        self._most_each = most_each
        self._most_all = most_all

    def room(self, tenant: str, blocks: Sequence[bytes], *, now_s: float) -> int:
        """Return how many of these blocks, the first ones, `take` would favour."""
        if now_s - self._swept_s >= _SWEEP_S:
            self._sweep(now_s)
        most = (
            max(1, int(self._most_each * self._judged[tenant].trust ** 3))
            if tenant in self._judged
            else self._most_each
        )
        favoured = self._until.get(tenant, {})
        num_left = min(most - len(favoured), self._most_all - self._num_all)
        new: set[bytes] = set()
        for at, block in enumerate(blocks):
            if block not in favoured:
                new.add(block)
                if len(new) > num_left:
                    return at
        return len(blocks)

    def take(self, tenant: str, blocks: Sequence[bytes], *, now_s: float, for_s: float, stays: bool = False) -> int:
        """Favour the first of these blocks, as many as are allowed, for so long; return how many.

        Until they are used, or for all of that time if they stay.
        """
        num_taken = self.room(tenant, blocks, now_s=now_s)
        favoured = self._until.setdefault(tenant, {})
        self._num_all -= len(favoured)
        for block in blocks[:num_taken]:
            favoured[block] = max(favoured.get(block, 0.0), now_s + for_s)
            if stays:
                self._staying.setdefault((tenant, block), False)
        self._num_all += len(favoured)
        if not favoured:
            del self._until[tenant]
        return num_taken

    def drop(self, tenant: str, blocks: Sequence[bytes]) -> None:
        """Forget favours of a tenant's blocks that are to go: they were neither right nor wrong."""
        favoured = self._until.get(tenant, {})
        self._num_all -= len(favoured)
        for block in blocks:
            favoured.pop(block, None)
            self._staying.pop((tenant, block), None)
        self._num_all += len(favoured)
        if not favoured:
            self._until.pop(tenant, None)

    def use(self, tenant: str, blocks: Sequence[bytes], *, now_s: float) -> None:
        """Take note that a tenant asks for blocks: favours that were right are over."""
        self._hears_of_uses = True
        if now_s - self._swept_s >= _SWEEP_S:
            self._sweep(now_s)
        favoured = self._until.get(tenant, {})
        num_used = 0
        for block in blocks:
            if self._staying.get((tenant, block)) is False:
                self._staying[tenant, block] = True
                num_used += 1
            elif (tenant, block) not in self._staying and favoured.pop(block, None) is not None:
                self._num_all -= 1
                num_used += 1
        self._judge(tenant, num_used, 0)
        if tenant in self._until and not favoured:
            del self._until[tenant]

    def _sweep(self, now_s: float) -> None:
        """Forget the favours whose time is up."""
        self._swept_s = now_s
        for tenant in list(self._until):
            left = {block: until for block, until in self._until[tenant].items() if until > now_s}
            gone = self._until[tenant].keys() - left.keys()
            self._num_all -= len(gone)
            num_missed = sum(not self._staying.pop((tenant, block), False) for block in gone)
            if self._hears_of_uses:
                self._judge(tenant, 0, num_missed)
            if left:
                self._until[tenant] = left
            else:
                del self._until[tenant]

    def _judge(self, tenant: str, num_used: int, num_missed: int) -> None:
        if not num_used and not num_missed:
            return
        judged = self._judged.pop(tenant, None) or _Judged(self._most_each / 16, self._most_each / 16)
        if judged.used + judged.missed > _JUDGED * self._most_each:
            judged.used, judged.missed = judged.used / 2, judged.missed / 2
        judged.used += num_used
        judged.missed += num_missed
        self._judged[tenant] = judged
        if len(self._judged) > MOST_WAITING:
            del self._judged[next(iter(self._judged))]


@dataclass
class _Judged:
    """How many favoured blocks of a tenant were asked for in their time, and how many were not, lately."""

    used: float
    missed: float

    @property
    def trust(self) -> float:
        return self.used / (self.used + self.missed)
