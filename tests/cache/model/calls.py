"""Calls of the face by name, for rules that interrupt them: by cancelling, by closing, by the end of the process."""

from tests.cache.model.engine import LAST_SLOT, Place
from tests.cache.model.machine import Machine
from tiered_kv import BlockKeys, full

MOVING = ("load", "gaps", "store", "layers", "swap_out", "swap", "load_groups")
"""Those that touch the engine's memory."""
CALLS = (*MOVING, "lookup", "lookup_groups", "lease", "prefetch", "evict", "clear", "flush", "explain")


class Calls(Machine):
    """One coroutine per call, which checks its answer if there is one."""

    async def call(self, what: str, keys: BlockKeys, place: Place) -> None:
        """Make a call about some blocks, in a region that is nobody else's."""
        if what in ("lease", "prefetch") and not self.shape.has("cpu"):
            return
        await getattr(self, f"_call_{what}")(keys, place)

    async def _call_load(self, keys: BlockKeys, place: Place) -> None:
        self.asked["load"] += len(keys)
        weights = self.weights
        loaded = await self.cache.load(keys, self.engine.at(keys, place))
        assert self.has(keys, loaded.num_blocks, place, weights)

    async def _call_gaps(self, keys: BlockKeys, place: Place) -> None:
        self.asked["load"] += len(keys)
        weights = self.weights
        loaded = await self.cache.load(keys, self.engine.at(keys, place), gaps=True)
        assert self.has_all_of(keys, loaded.mask, place, weights)

    async def _call_store(self, keys: BlockKeys, place: Place) -> None:
        await self.cache.store(keys, self.computed(keys, place))

    async def _call_layers(self, keys: BlockKeys, place: Place) -> None:
        handle = self.cache.start_store(keys, self.computed(keys, place), layerwise=True)
        handle.store_layer(1)
        await self.world.pass_turns(1, 0)
        handle.store_layer(0)
        await handle

    async def _call_swap_out(self, keys: BlockKeys, place: Place) -> None:
        self.has_pins = True
        await self.cache.swap_out(keys, self.computed(keys, Place(place.region)), ttl_s=100.0)

    async def _call_swap(self, keys: BlockKeys, place: Place) -> None:
        page = self.engine.first_number(keys.group, place.region)
        await self.cache.swap(blocks_to_swap_out={page: LAST_SLOT}, blocks_to_copy={page: [page + 1]}, group=keys.group)

    async def _call_load_groups(self, keys: BlockKeys, place: Place) -> None:
        self.asked["load"] += len(keys)
        weights = self.weights
        loaded = await self.cache.load_groups([full(keys)], [self.engine.pages(keys, place.region)])
        assert self.has(keys, loaded.results[0].num_blocks, Place(place.region), weights)

    async def _call_lookup(self, keys: BlockKeys, _: Place) -> None:
        found = await self.cache.lookup(keys, where=self.shape.ranks == "one")
        assert all(run.spec is None or len(run.spec) == run.stop - run.start for run in found.runs)

    async def _call_lookup_groups(self, keys: BlockKeys, _: Place) -> None:
        await self.cache.lookup_groups([full(keys)])

    async def _call_lease(self, keys: BlockKeys, _: Place) -> None:
        async with self.cache.lease(keys) as lease:
            assert lease.num_blocks <= self.prefix(keys)

    async def _call_prefetch(self, keys: BlockKeys, _: Place) -> None:
        await self.cache.prefetch(keys)

    async def _call_evict(self, keys: BlockKeys, _: Place) -> None:
        await self.cache.evict(keys)

    async def _call_clear(self, _keys: BlockKeys, _place: Place) -> None:
        await self.cache.clear()

    async def _call_flush(self, _keys: BlockKeys, _place: Place) -> None:
        await self.cache.flush()

    async def _call_explain(self, keys: BlockKeys, _: Place) -> None:
        await self.cache.explain(keys, ask=True)
