"""Pins: long leases that a user takes on a prefix, with an end in time and a quota per tenant.

Each block is held once, in the fastest owned tier that has it and of which less than half is pinned. A pin is a lease,
so what was evicted by name meanwhile is unfindable all the same, and its slot is freed when the pin ends.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.leases import Lease
from tiered_kv.keys import DIGEST_BYTES, BlockKeys, Names, Namespace
from tiered_kv.tiers.base import BookedTier, Mask, prefix_of
from tiered_kv.tiers.batch import Batch
from tiered_kv.tiers.chain import Chain


@dataclass(eq=False)
class _Pin:
    """Blocks that one call pinned in one tier, less those that were unpinned or pinned again since.

    Attributes:
        slots: By hash of the block. A dict of bytes and ints: nothing for the garbage collector to walk.
        until: On the loop's clock.
    """

    chain: Chain
    tier: BookedTier
    namespace: Namespace
    slots: dict[bytes, int]
    lease: Lease
    until: float

    def names(self) -> Names:
        """What the tier calls the blocks."""
        hashes = np.frombuffer(b"".join(self.slots), np.uint64).reshape(-1, DIGEST_BYTES // 8)
        return hashes ^ self.namespace.mask


class Pins:
    """All pins of one cache. For the event loop's thread."""

    def __init__(self, quota_bytes: int) -> None:
        """Make one without pins; ``quota_bytes`` is for each salt."""
        self._quota_bytes = quota_bytes
        self._pins: defaultdict[bytes, list[_Pin]] = defaultdict(list)  # by salt
        self._num_bytes: Counter[bytes] = Counter()  # by salt
        self._num_pinned: Counter[BookedTier] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def pin(self, parts: Sequence[tuple[Chain, Batch]], keys: BlockKeys, ttl_s: float) -> int:
        """Hold the prefix that is in owned tiers, for every rank; return its length.

        It is cut where the tenant's quota ends, or half of each tier that has the block. What is pinned already stays
        so for the longer of the two times.
        """
        until = asyncio.get_running_loop().time() + ttl_s
        hashes = _hashes(keys)
        places = dict(zip(hashes, range(len(hashes)), strict=True))
        for chain, batch in parts:
            self._drop_stale(chain, batch, places, keys.salt_id)
        chosen = [self._choose(chain, batch, places, keys.salt_id) for chain, batch in parts]
        n = min(prefix_of(tiers >= 0) for tiers, _ in chosen)
        costs = sum(
            np.where(is_pinned, 0, chain.stride_bytes)[:n]
            for (chain, _), (_, is_pinned) in zip(parts, chosen, strict=True)
        )
        n = prefix_of(np.cumsum(costs) <= self._quota_bytes - self._num_bytes[keys.salt_id])
        for (chain, batch), (tiers, _) in zip(parts, chosen, strict=True):
            self._hold(chain, batch[:n], hashes[:n], tiers[:n], keys.salt_id, until)
        self._set_timer()
        return n

    def unpin(self, parts: Sequence[tuple[Chain, Batch]], keys: BlockKeys) -> None:
        """Let go of these blocks, of whatever weights; those not pinned are no error."""
        wanted = set(_hashes(keys))
        for chain, _ in parts:
            for pin in self._of(chain, keys.salt_id):
                self._drop(pin, pin.slots.keys() & wanted)
        self._set_timer()

    def is_pinned(self, chain: Chain, batch: Batch, keys: BlockKeys) -> Mask:
        """Say of each block whether it is pinned, and can still be found."""
        found = np.zeros(len(batch), np.bool_)
        hashes = _hashes(keys)
        places = dict(zip(hashes, range(len(hashes)), strict=True))
        for pin in self._of(chain, keys.salt_id):
            if common := pin.slots.keys() & places.keys():
                slots, _ = pin.tier.index.find(batch.names)
                found[[places[each] for each in common if pin.slots[each] == slots[places[each]]]] = True
        return found

    def close(self) -> None:
        """Let go of everything."""
        for pins in list(self._pins.values()):
            for pin in list(pins):
                self._drop(pin, list(pin.slots))
        self._set_timer()

    def _of(self, chain: Chain, salt: bytes) -> list[_Pin]:
        return [pin for pin in self._pins.get(salt, ()) if pin.chain is chain]

    def _drop_stale(self, chain: Chain, batch: Batch, places: Mapping[bytes, int], salt: bytes) -> None:
        """Let go of those of these blocks that cannot be found where they were pinned: they hold room for nothing."""
        for pin in self._of(chain, salt):
            if common := pin.slots.keys() & places.keys():
                slots, _ = pin.tier.index.find(batch.names)
                self._drop(pin, [each for each in common if pin.slots[each] != slots[places[each]]])

    def _choose(
        self, chain: Chain, batch: Batch, places: Mapping[bytes, int], salt: bytes
    ) -> tuple[NDArray[np.int8], Mask]:
        """Say in which tier of the chain to pin each block, -1 for none; and which are pinned there already."""
        tiers = np.full(len(batch), -1, np.int8)
        for pin in self._of(chain, salt):
            tiers[[places[each] for each in pin.slots.keys() & places.keys()]] = chain.booked.index(pin.tier)
        is_pinned = tiers >= 0
        for number, tier in enumerate(chain.booked):
            if tier.is_in_use:
                slots, _ = tier.index.find(batch.names)
                can = (tiers < 0) & tier.index.ready(batch.names) & ~tier.index.is_transient(slots)
                can &= np.cumsum(can) <= tier.index.num_slots // 2 - self._num_pinned[tier]
                tiers[can] = number
        return tiers, is_pinned

    def _hold(
        self,
        chain: Chain,
        batch: Batch,
        hashes: Sequence[bytes],
        tiers: NDArray[np.int8],
        salt: bytes,
        until: float,
    ) -> None:
        """Pin blocks, each in its tier, and end those pins of theirs that would have ended sooner."""
        before = self._of(chain, salt)
        places = dict(zip(hashes, range(len(hashes)), strict=True))
        left = np.ones(len(batch), np.bool_)
        for pin in before:
            if pin.until >= until:
                left[[places[each] for each in pin.slots.keys() & places.keys()]] = False
        for number in np.unique(tiers[left]).tolist():
            at = np.flatnonzero(left & (tiers == number)).tolist()
            tier = chain.booked[number]
            lease = tier.index.lease(batch.names[at])
            slots = dict(zip([hashes[i] for i in at], lease.slots.tolist(), strict=True))
            pin = _Pin(chain, tier, batch.namespace, slots, lease, until)
            self._pins[salt].append(pin)
            self._count(pin, len(slots))
        for pin in before:
            if pin.until < until:
                self._drop(pin, pin.slots.keys() & places.keys())

    def _drop(self, pin: _Pin, hashes: Iterable[bytes]) -> None:
        """Let go of some blocks of a pin. The others are leased anew before, as a lease ends as a whole."""
        before = len(pin.slots)
        for each in hashes:
            del pin.slots[each]
        if len(pin.slots) == before:
            return
        lease = pin.lease
        if pin.slots:
            pin.lease = pin.tier.index.lease(pin.names())
            pin.slots = {
                each: slot for (each, slot), now in zip(pin.slots.items(), pin.lease.slots, strict=True) if slot == now
            }
        self._count(pin, len(pin.slots) - before)
        pin.chain.release(lease)
        if not pin.slots:
            pin.lease.release()
            self._pins[pin.namespace.salt].remove(pin)
            if not self._pins[pin.namespace.salt]:
                del self._pins[pin.namespace.salt], self._num_bytes[pin.namespace.salt]

    def _count(self, pin: _Pin, n: int) -> None:
        self._num_pinned[pin.tier] += n
        self._num_bytes[pin.namespace.salt] += n * pin.chain.stride_bytes

    def _set_timer(self) -> None:
        """Have one timer, for the pin that ends first."""
        if self._timer is not None:
            self._timer.cancel()
        ends = [pin.until for pins in self._pins.values() for pin in pins]
        self._timer = asyncio.get_running_loop().call_at(min(ends), self._end_due) if ends else None

    def _end_due(self) -> None:
        now = asyncio.get_running_loop().time()
        for pins in list(self._pins.values()):
            for pin in [each for each in pins if each.until <= now]:
                self._drop(pin, list(pin.slots))
        self._timer = None
        self._set_timer()


def _hashes(keys: BlockKeys) -> list[bytes]:
    hashes: list[bytes] = keys.words.view("V32").ravel().tolist()  # at a twentieth of what iterating over keys takes
    return hashes
