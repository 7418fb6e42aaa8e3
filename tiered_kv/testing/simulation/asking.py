"""What a simulated engine asks and does ahead of its transfers, and what must be true of the answers."""

import asyncio
from dataclasses import replace

import numpy as np

from tiered_kv.cache.groups import full, window
from tiered_kv.testing.simulation.engine import BOTH_GROUPS, span
from tiered_kv.testing.simulation.known import WrongAnswer, names_of
from tiered_kv.testing.simulation.requester import Numbers
from tiered_kv.testing.simulation.transferring import Transferring
from tiered_kv.testing.simulation.world import LONGEST_S
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.results import BlockState


class Asking(Transferring):
    """An engine that looks up, leases, pins, prefetches and says what it will need, also of both KV groups at once."""

    async def _lookup(self, numbers: Numbers) -> None:
        keys, known = span(numbers), self.world.known
        asked = known.ask(names_of(keys, self.weights))
        where = numbers[3] % 3 == 0
        found = await self.within(LONGEST_S, "lookup", self.kv.lookup(keys, where=where))
        known.check(asked, np.arange(len(keys)) < found.num_blocks, "a lookup")
        owned = self.kv.lookup_nowait(keys)
        asked = known.ask(names_of(keys, self.weights))
        known.check(asked, np.arange(len(keys)) < owned.num_blocks, "a lookup of owned tiers")
        states = self.kv.membership(keys, prefix_only=numbers[3] % 2 == 0)
        known.check(asked, np.asarray(states == BlockState.HIT), "membership")

    async def _prefetch(self, numbers: Numbers) -> None:
        if "cpu" not in self.shape.chain:
            return
        keys = span(numbers)
        self.world.known.used(names_of(keys, self.weights), self.now)
        handle = self.kv.prefetch(keys)
        if numbers[3] % 3 == 0:
            await asyncio.sleep(0)
            handle.cancel()
        elif numbers[3] % 3 == 1:
            return
        task = asyncio.ensure_future(handle)
        await asyncio.wait({task}, timeout=LONGEST_S)
        if not task.done():
            raise WrongAnswer("never ends", "prefetch")
        self.world.known.used(names_of(keys, self.weights), self.now)

    async def _touch(self, numbers: Numbers) -> None:
        keys = span(numbers)
        self.kv.touch(keys, hint=ReuseHint(0.0) if numbers[3] % 4 == 0 else None)

    async def _pin(self, numbers: Numbers) -> None:
        ttl_s = (0.5, 5.0, 30.0)[numbers[3] % 3]
        self.kv.pin(span(numbers), ttl_s=ttl_s)
        self._pinned_until = max(self._pinned_until, self.now + ttl_s)

    async def _unpin(self, numbers: Numbers) -> None:
        self.kv.unpin(span(numbers))

    async def _lease(self, numbers: Numbers) -> None:
        if "cpu" not in self.shape.chain:
            return
        keys, known = span(numbers), self.world.known

        async def hold() -> None:
            names = names_of(keys, self.weights)
            asked = known.ask(names)
            known.used(names, self.now)
            async with self.kv.lease(keys) as lease:
                known.check(asked, np.arange(len(keys)) < lease.num_blocks, "a lease")
                await asyncio.sleep((0.0, 0.1, 2.0)[numbers[3] % 3])
            known.used(names, self.now)

        await self.within(LONGEST_S, "lease", hold())

    async def _explain(self, numbers: Numbers) -> None:
        keys = span(numbers)
        await self.within(LONGEST_S, "explain", self.kv.explain(keys, ask=numbers[3] % 2 == 0))

    async def _stats(self, _: Numbers) -> None:
        self.kv.stats()

    async def _groups(self, numbers: Numbers) -> None:
        """Look up and load both KV groups of a prompt, of which one may have a window."""
        known, weights, both = self.world.known, self.weights, BOTH_GROUPS[numbers[0] % 2]
        regions = [region for region in (self.memory.take(), self.memory.take()) if region is not None]
        try:
            if len(regions) < len(both):
                return
            needs = [full(both[0]), full(both[1]) if numbers[1] % 3 == 0 else window(both[1], 8 * (numbers[1] % 3))]
            if numbers[1] % 2:
                needs = [replace(need, keys=need.keys[4 // (1 + i) :]) for i, need in enumerate(needs)]
            asked = [known.ask(names_of(need.keys, weights)) for need in needs]
            found = await self.within(LONGEST_S, "lookup_groups", self.kv.lookup_groups(needs))
            for each, need, needed in zip(asked, needs, found.needed, strict=True):
                starts = needed.start - need.keys.start
                at = np.arange(len(need.keys))
                known.check(each, (at >= starts) & (at < starts + len(needed)), "a lookup of groups")
            needs = [need.until(found.num_tokens) for need in needs]
            wanted = [need.at(found.num_tokens) for need in needs]
            if not found.num_tokens or weights != self.weights:
                return
            asked = [known.ask(names_of(keys, weights)) for keys in wanted]
            self.count_asked("load", sum(map(len, wanted)), is_sure=True)
            into = [self.memory.pages(keys, region) for keys, region in zip(wanted, regions, strict=True)]
            loaded = await self.within(LONGEST_S, "load_groups", self.kv.load_groups(needs, into))
            if loaded.num_tokens > found.num_tokens:
                raise WrongAnswer("counts", f"{loaded.num_tokens} of {found.num_tokens} tokens were loaded")
            for each, keys, region, result in zip(asked, wanted, regions, loaded.results, strict=True):
                self.check_load(each, keys, region, result, weights, in_pool=False)
                names = names_of(keys, weights)
                known.used(names, self.now)
                known.loaded(name for name, is_there in zip(names, result.mask, strict=True) if is_there)
            for need, keys, result in zip(needs, wanted, loaded.results, strict=True):
                needed = need.at(loaded.num_tokens)
                if loaded.num_tokens and needed.start + len(needed) > keys.start + result.num_blocks:
                    raise WrongAnswer("counts", f"{loaded.num_tokens} tokens need more than {result} brought")
        finally:
            for region in regions:
                self.memory.give(region)
