"""Rules of what takes blocks out, or changes what the cache is: evictions, capacities, flushing, restarts."""

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.cache.model.machine import LONG_S, OPENINGS, SPANS, Machine
from tests.cache.model.media import MOST_SLOTS
from tests.cache.model.world import TIMEOUT_S
from tiered_kv import BackendUnavailableError, BlockKeys


class Changing(Machine):
    """Evicting, resizing, flushing, closing and opening."""

    @rule(keys=SPANS, tier=st.sampled_from([None, None, None, "disk", "keyed", "cpu", "cpu", "gpu"]))
    def evict(self, keys: BlockKeys, tier: str | None) -> None:
        """Evict by name: from every tier, they are gone at once; from one, what is elsewhere stays."""
        if tier is not None and not self.shape.has(tier):
            return
        self.run(self.cache.evict(keys, tier=tier), 2 * TIMEOUT_S)
        if tier is None:
            self.known.evict(keys, self.version(keys))

    @rule(is_meant=st.integers(0, 2))
    def clear(self, is_meant: int) -> None:
        """Empty the tiers that the cache owns; less often than all else."""
        if is_meant:
            return
        self.run(self.cache.clear(), TIMEOUT_S)
        if not self.shape.has("keyed"):
            self.known.clear()

    @rule(tier=st.sampled_from(["cpu", "disk"]), num_blocks=st.integers(1, MOST_SLOTS))
    def resize(self, tier: str, num_blocks: int) -> None:
        """Have another capacity; where the medium does not grow, nothing has changed."""
        if not self.shape.has(tier):
            return
        before = self.cache.stats()[tier].num_slots
        try:
            self.run(self.cache.resize(tier, self.world.capacity(tier, num_blocks)), LONG_S)
        except BackendUnavailableError:
            assert self.world.was_faulty
            assert self.cache.stats()[tier].num_slots == before

    @rule(ends=st.booleans())
    def flush(self, *, ends: bool) -> None:
        """Write what waits: nothing does afterwards, unless a tier is at fault. Or let everything end."""
        if ends:
            self.settle()
            return
        self.run(self.cache.flush(), LONG_S)
        assert self.world.was_faulty or not any(tier.dirty for tier in self.cache.stats().tiers)

    @rule(how=OPENINGS, rank=st.integers(0, 1))
    def reopen(self, how: str, rank: int) -> None:
        """Close, whatever is under way, and begin again with what the tiers have kept; perhaps as another rank."""
        self.close()
        if rank != self.rank and self.shape.ranks == "replicas":
            self.known.restore()  # tiers of its own have not heard of what is gone
        self.rank = rank
        self.open(how)
