"""Rules of several KV groups, and of several ranks: what counts is what all of them have."""

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.cache.model.engine import LAYOUT, PROMPTS
from tests.cache.model.machine import LONG_S, Machine
from tests.cache.model.world import VirtualWorld
from tests.support.any_layout import MODEL
from tests.support.caches import Recorder
from tiered_kv import BlockKeys, GroupNeed, GroupsLoad, ModelIdentity, Shard, TieredKV, chunk, full, state, window

HEADS, LATENTS = PROMPTS[0], PROMPTS[-1]
"""Of the same tokens."""


class Groups(Machine):
    """A model with heads and latents."""

    @rule(
        num_latents=st.integers(0, len(LATENTS)),
        width=st.none() | st.integers(0, 20),
        last=st.sampled_from([window, chunk]),
        is_load=st.booleans(),
    )
    def find_both(
        self, num_latents: int, width: int | None, last: Callable[[BlockKeys, int], GroupNeed], *, is_load: bool
    ) -> None:
        """Find or load what both groups need at the longest length: all of it could be there, and is right."""
        latents = LATENTS[:num_latents]
        other = full(latents) if width is None else last(latents, width) if width else state(latents)
        needs = [full(HEADS[: 2 * num_latents]), other]
        if not is_load:
            found = self.run(self.cache.lookup_groups(needs), LONG_S)
            assert all(self.prefix(keys) == len(keys) for keys in found.needed)
            assert [need.at(found.num_tokens) for need in needs] == list(found.needed)
            return
        loaded = self.run(self._load_both(needs), LONG_S)
        for need, result in zip(needs, loaded.results, strict=True):
            asked = need.at(len(need.keys) * need.keys.block_size)
            assert self.has(asked, result.num_blocks)
            needed = need.at(loaded.num_tokens)
            assert not len(needed) or needed.start + len(needed) <= asked.start + result.num_blocks
        self.poison()

    async def _load_both(self, needs: list[GroupNeed]) -> GroupsLoad:
        wanted = [need.at(len(need.keys) * need.keys.block_size) for need in needs]
        self.asked["load"] += sum(map(len, wanted))
        into = [self.engine.pages(keys) for keys in wanted]
        return await self.cache.load_groups(needs, into)


class Ranks(Groups):
    """Two ranks, of which this is one."""

    @precondition(lambda self: self.shape.ranks == "parts" and self.shape.has("keyed"))
    @rule(which=st.integers(0, len(PROMPTS) - 1))
    def ask_for_every_rank(self, which: int) -> None:
        """Ask as a scheduler does, in a process that sees what all ranks share: a block is there with all its parts."""
        found = self.run(self._found_of_all(which), LONG_S)
        here = self.rank
        for self.rank in range(2):
            assert found <= self.prefix(PROMPTS[which])
        self.rank = here

    async def _found_of_all(self, which: int) -> int:
        assert isinstance(self.world, VirtualWorld)
        scheduler = TieredKV(
            [self.world.shared()],
            model=ModelIdentity(MODEL.name, self.weights),
            layout=LAYOUT,
            shard=Shard.every(2),
            device=self.world.device,
            codec=self.shape.codec,
            emit=Recorder(),
        )
        async with scheduler:
            return (await scheduler.lookup(PROMPTS[which])).num_blocks
