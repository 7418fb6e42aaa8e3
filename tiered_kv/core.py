"""What all faces of a cache share: its chains, its tasks, the epoch served now, and whether it may be called."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Final

from tiered_kv.changes import Subscribers
from tiered_kv.errors import ClosedError, ConfigurationError, TieredKVError
from tiered_kv.events import Emit, TierResized
from tiered_kv.integers import as_int
from tiered_kv.keys import BlockKeys, ModelIdentity, Shard, epoch_digest
from tiered_kv.layout import KVLayout
from tiered_kv.loop_calls import LoopCalls
from tiered_kv.memory.device import Device
from tiered_kv.settings import CacheLimits
from tiered_kv.tiers.batch import Batch
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.ledger import Ledger
from tiered_kv.tiers.pins import Pins
from tiered_kv.tiers.tasks import Tasks
from tiered_kv.tiers.upkeep import keep_up
from tiered_kv.transfers.bindings import Bindings
from tiered_kv.transfers.cleaner import Cleaner
from tiered_kv.transfers.resize import resize, slots_within
from tiered_kv.transfers.submissions import Submissions
from tiered_kv.transfers.swap import SwapSpaces
from tiered_kv.validation import check_keys, check_one_rank

_PAST_EPOCHS: Final = 8


class Core:
    """The state of one cache, for the event loop's thread.

    Attributes:
        layout: What blocks are made of.
        shards: Whose parts of them: one rank's, or all.
        limits: Bounds.
        emit: Takes events.
        tasks: Everything under way.
        chains: By KV group, then by rank; none before the cache is open.
        epoch: Digest of the weights that are served.
        cleaners: One per chain with blocks that wait for a tier.
        background: What runs as long as the cache is open, besides ``tasks``.
        past_epochs: Digests of weights that were served before, the last one first; a few.
        ledger: What became of blocks.
        bindings, pins, swaps, subscribers, submissions: What some of the calls keep.
        device: Where the engine's tensors are; known once the cache is open.
        lifetime: Closes what belongs to the cache; None unless it is open.
        on_close: Called when the cache begins to close.
    """

    def __init__(
        self, model: ModelIdentity, layout: KVLayout, shards: tuple[Shard, ...], limits: CacheLimits, emit: Emit
    ) -> None:
        self.layout = layout
        self.shards = shards
        self.limits = limits
        self.emit = emit
        self.tasks = Tasks()
        self.chains: list[Chain] = []
        self.epoch = epoch_digest(model.weights)
        self.past_epochs: list[bytes] = []
        self.ledger = Ledger()
        self.cleaners: list[Cleaner] = []
        self.background = Tasks()
        self._resizing = asyncio.Lock()
        self.pins = Pins(limits.pin_quota)
        self.bindings = Bindings()
        self.swaps = SwapSpaces()
        self.subscribers = Subscribers(self.ledger)
        self.submissions = Submissions()
        self.device: Device
        self.lifetime: AsyncExitStack | None = None
        self.on_close: list[Callable[[], object]] = [self.submissions.close, self.pins.close, self.subscribers.close]
        self._thread = 0
        self._clock: Callable[[], float] = time.monotonic  # until there is a loop
        self._closed_because = "not open yet: use it with 'async with'"

    def opened(self, chains: list[Chain], loop_calls: LoopCalls) -> None:
        """Let calls in, from this thread and its event loop."""
        self.chains = chains
        self._clock = asyncio.get_running_loop().time
        self._thread = threading.get_ident()
        self._closed_because = ""
        self.submissions.open(loop_calls)
        self.cleaners = [Cleaner(chain) for chain in chains if chain.waiting]
        for cleaner in self.cleaners:
            self.background.spawn(cleaner.run(), "cleaner")
        self.background.spawn(keep_up(chains), "upkeep")

    def close(self) -> None:
        """Let no call in any more."""
        self._closed_because = "closed"
        for close in self.on_close:
            close()

    def advance_epoch(self, weights: str) -> None:
        """Serve other weights from now on."""
        epoch = epoch_digest(weights)
        past = [self.epoch, *self.past_epochs]
        self.past_epochs = [each for each in past if each != epoch][:_PAST_EPOCHS]
        self.epoch = epoch

    def check_open(self, *, anywhere: bool = False) -> None:
        """Raise `ClosedError` or `ConfigurationError` unless this is the time, and the thread, for a call."""
        if self._closed_because:
            raise ClosedError(f"this TieredKV is {self._closed_because}")
        if not anywhere:
            self.check_thread()

    def check_thread(self) -> None:
        """Raise `ConfigurationError` in another thread than the one that opened it."""
        if self._thread not in (0, threading.get_ident()):
            raise ConfigurationError("a TieredKV is called from the thread of the event loop that opened it")

    def of_group(self, group: int, *, anywhere: bool = False) -> list[Chain]:
        """Return the chains of one KV group, one per rank."""
        self.check_open(anywhere=anywhere)
        if (group := as_int("a KV group's number", group)) >= len(self.layout.groups):
            raise ConfigurationError(f"KV group {group} of {len(self.layout.groups)}: the layout has no such group")
        num_shards = len(self.shards)
        return self.chains[group * num_shards : (group + 1) * num_shards]

    def of_rank(self, group: int, *, anywhere: bool = False) -> Chain:
        """Return the chain of one KV group, of the one rank that this cache is of."""
        chains = self.of_group(group, anywhere=anywhere)
        check_one_rank(chains)
        return chains[0]

    def batches(
        self, keys: BlockKeys, epoch: str | None = None, *, anywhere: bool = False
    ) -> list[tuple[Chain, Batch]]:
        """Return, per rank, the chain of the keys' KV group, and what the keys are called there.

        Args:
            keys: An engine's.
            epoch: The weights that computed the blocks; those served now by default.
            anywhere: Whether any thread may ask.
        """
        if not isinstance(keys, BlockKeys):
            raise ConfigurationError(
                f"keys must be BlockKeys, from hash_blocks() or BlockKeys.from_hashes(), got {type(keys).__name__}"
            )
        chains = self.of_group(keys.group, anywhere=anywhere)
        check_keys(keys, chains[0].group)
        digest = self.epoch if epoch is None else epoch_digest(epoch)
        return [(chain, chain.naming.batch(keys, digest)) for chain in chains]

    def batch(self, keys: BlockKeys, epoch: str | None = None, *, anywhere: bool = False) -> tuple[Chain, Batch]:
        """Return the same of the one rank that this cache is of."""
        batches = self.batches(keys, epoch, anywhere=anywhere)
        check_one_rank(batches)
        return batches[0]

    async def settle(self) -> None:
        """Wait until every store so far is in every tier or given up, and what waits for a tier is written there.

        What a tier does not take now goes on waiting. Cancellation ends the wait only.
        """
        if settling := {future for chain in self.chains for future in chain.settling}:
            await asyncio.wait(settling)
        for cleaner in self.cleaners:
            await cleaner.drain()

    async def resize(self, name: str, capacity_bytes: int) -> int:
        """Change the capacity of a tier; see `TieredKV.resize`."""
        names = self.chains[0].names
        if name not in names:
            raise ConfigurationError(f"no tier {name!r} here; there are {', '.join(names)}")
        number = names.index(name)
        num_slots = slots_within(self.chains, number, capacity_bytes)
        error = await asyncio.shield(self.tasks.spawn(self._resize(name, num_slots), f"resize {name}"))
        if error is not None:
            raise error
        return num_slots

    async def _resize(self, name: str, num_slots: int) -> TieredKVError | None:
        """Do it, and return the error: whoever asked may have gone, and nobody else is to hear of it."""
        async with self._resizing:
            try:
                number = self.chains[0].names.index(name)
                before, num_evicted = await resize(self.chains, self.cleaners, number, num_slots)
            except TieredKVError as error:
                return error
        self.emit(TierResized(name, num_slots, before, num_evicted))
        return None

    def deadline(self, deadline_s: float | None) -> float:
        """Return when a load's time is up, on the loop's clock. From any thread."""
        return self._clock() + (self.limits.load_timeout_s if deadline_s is None else deadline_s)
