"""Pins: long leases that a user takes on a prefix, with an end in time and a quota per tenant.

Each block is held once, in the fastest owned tier that has it and of which less than half is pinned. A pin is a lease,
so what was evicted by name meanwhile is unfindable all the same, and its slot is freed when the pin ends.

What a call costs grows with its blocks, and not with the pins that there are.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.catalog.table import Slots
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.tier import Batch, BookedTier, prefix_of
from tiered_kv.values.integers import Mask
from tiered_kv.values.keys import BlockKeys, rows_of

_ENDED_AT_ONCE: Final = 64
"""Pins whose time is up: what is left of them is for the next turn of the event loop."""
_FEW: Final = 64
"""Entries of pins that have ended, among those of pins that have not: fewer are not worth an effort."""


@dataclass(eq=False)
class _Pin:
    """Blocks that one call pinned in one tier, less those that were unpinned or pinned again since.

    Attributes:
        slots: By hash of the block. A dict of bytes and ints: nothing for the garbage collector to walk.
        give_back: Gives the right to some of the slots back.
        until: On the loop's clock.
    """

    chain: Chain
    salt: bytes
    tier: BookedTier
    slots: dict[bytes, int]
    give_back: Callable[[Slots], None]
    until: float


@dataclass
class _Found:
    """The pins of some blocks, by position; -1 where nothing is pinned.

    Attributes:
        pins: Numbers of pins.
        tiers: Numbers of owned tiers, in the chain.
        slots: Slots there.
    """

    pins: NDArray[np.int64]
    tiers: NDArray[np.int8]
    slots: Slots


class Pins:
    """All pins of one cache, or of one of the engines that share it. For the event loop's thread."""

    def __init__(
        self, quota_bytes: int, beside: "Pins | None" = None, *, room_bytes: Callable[[], float] = lambda: inf
    ) -> None:
        """Begin without pins.

        Args:
            quota_bytes: For each salt.
            beside: Another's pins of the same tiers: no more than half of a tier is pinned by all together.
            room_bytes: Says how much more may be pinned, whatever the salt.
        """
        self._quota_bytes = quota_bytes
        self._room_bytes = room_bytes
        self._pins: dict[int, _Pin] = {}
        self._numbers = count()
        self._pin_of: dict[tuple[int, bytes], dict[bytes, int]] = {}  # by chain and salt, then by hash
        self._ends: list[tuple[float, int]] = []  # a heap; pins that have ended sooner are in it still
        self._num_bytes: Counter[bytes] = Counter()  # by salt
        self._num_pinned: Counter[BookedTier] = Counter() if beside is None else beside._num_pinned  # noqa: SLF001 - its own class's
        self._timer: asyncio.Handle | None = None
        self._timer_ends = 0.0  # on the loop's clock: not every loop's handle says for when it is

    @property
    def num_bytes(self) -> int:
        """Bytes of slots that are pinned, of all tenants."""
        return self._num_bytes.total()

    def pinned_bytes(self, chains: Iterable[Chain]) -> int:
        """Count the bytes of slots that these pins, and those beside them, hold in some chains."""
        return sum(self._num_pinned[tier] * chain.stride_bytes for chain in chains for tier in chain.booked)

    def pin(self, parts: Sequence[tuple[Chain, Batch]], keys: BlockKeys, ttl_s: float) -> int:
        """Hold the prefix that is in owned tiers, for every rank; return its length.

        It is cut where the tenant's quota ends, or the room for all, or half of each tier that has the block. What is
        pinned already stays so for the longer of the two times.
        """
        until = asyncio.get_running_loop().time() + ttl_s
        hashes, salt = rows_of(keys.words), keys.salt_id
        chosen = []
        for chain, batch in parts:
            self._drop_stale(chain, salt, batch, hashes)
            found = self._find(chain, salt, hashes)
            chosen.append((found, self._choose(chain, batch, found)))
        n = min(prefix_of(tiers >= 0) for _, tiers in chosen)
        costs = sum(
            np.where(found.pins >= 0, 0, chain.stride_bytes)[:n]
            for (chain, _), (found, _) in zip(parts, chosen, strict=True)
        )
        n = prefix_of(np.cumsum(costs) <= min(self._quota_bytes - self._num_bytes[salt], self._room_bytes()))
        for (chain, batch), (found, tiers) in zip(parts, chosen, strict=True):
            self._hold(chain, salt, batch[:n], hashes[:n], found.pins[:n], tiers[:n], until)
        self._set_timer()
        return n

    def unpin(self, parts: Sequence[tuple[Chain, Batch]], keys: BlockKeys) -> None:
        """Let go of these blocks, of whatever weights; those not pinned are no error."""
        hashes = rows_of(keys.words)
        for chain, _ in parts:
            self._drop(hashes, self._pins_of(chain, keys.salt_id, hashes))
        self._set_timer()

    def is_pinned(self, chain: Chain, batch: Batch, keys: BlockKeys) -> Mask:
        """Say of each block whether it is pinned, and can still be found."""
        found = self._find(chain, keys.salt_id, rows_of(keys.words))
        return (found.pins >= 0) & ~_stale(chain, batch, found)

    def close(self) -> None:
        """Let go of everything."""
        for number in list(self._pins):
            self._end(number)
        self._set_timer()

    def _pins_of(self, chain: Chain, salt: bytes, hashes: Sequence[bytes]) -> list[int]:
        """Return the number of each block's pin, -1 where there is none."""
        pin_of = self._pin_of.get((id(chain), salt), {})
        return [pin_of.get(each, -1) for each in hashes] if pin_of else [-1] * len(hashes)

    def _find(self, chain: Chain, salt: bytes, hashes: Sequence[bytes]) -> _Found:
        n, pins = len(hashes), self._pins_of(chain, salt, hashes)
        found = _Found(np.array(pins, np.int64), np.full(n, -1, np.int8), np.full(n, -1, np.int64))
        numbers: dict[BookedTier, int] = {tier: number for number, tier in enumerate(chain.booked)}
        at = (found.pins >= 0).nonzero()[0].tolist()
        found.tiers[at] = [numbers[self._pins[pins[i]].tier] for i in at]
        found.slots[at] = [self._pins[pins[i]].slots[hashes[i]] for i in at]
        return found

    def _drop_stale(self, chain: Chain, salt: bytes, batch: Batch, hashes: Sequence[bytes]) -> None:
        """Let go of those of these blocks that cannot be found where they were pinned: they hold room for nothing."""
        found = self._find(chain, salt, hashes)
        self._drop(hashes, np.where(_stale(chain, batch, found), found.pins, -1).tolist())

    def _choose(self, chain: Chain, batch: Batch, found: _Found) -> NDArray[np.int8]:
        """Say in which owned tier of the chain to pin each block, -1 for none: where it is pinned, if it is."""
        tiers = found.tiers.copy()
        for number, tier in enumerate(chain.booked):
            if tier.is_in_use:
                slots, _ = tier.index.find(batch.names)
                can = (tiers < 0) & tier.index.ready(batch.names) & ~tier.index.is_bounce(slots)
                can &= np.cumsum(can) <= tier.index.num_slots // 2 - self._num_pinned[tier]
                tiers[can] = number
        return tiers

    def _hold(
        self,
        chain: Chain,
        salt: bytes,
        batch: Batch,
        hashes: Sequence[bytes],
        pins: NDArray[np.int64],
        tiers: NDArray[np.int8],
        until: float,
    ) -> None:
        """Pin blocks, each in its tier, and end those pins of theirs that would have ended sooner."""
        ends_sooner = np.array([each < 0 or self._pins[each].until < until for each in pins.tolist()], np.bool_)
        made: list[tuple[int, _Pin]] = []
        for tier_number in np.unique(tiers[ends_sooner]).tolist():
            at = (ends_sooner & (tiers == tier_number)).nonzero()[0].tolist()
            tier = chain.booked[tier_number]
            lease = tier.index.lease(batch.names[at])
            slots = dict(zip([hashes[i] for i in at], lease.slots.tolist(), strict=True))
            made.append((next(self._numbers), _Pin(chain, salt, tier, slots, lease.split(), until)))
        self._drop(hashes, np.where(ends_sooner, pins, -1).tolist())  # held anew by now: nothing is evicted in between
        for number, pin in made:
            self._pins[number] = pin
            self._pin_of.setdefault((id(chain), salt), {}).update(dict.fromkeys(pin.slots, number))
            heappush(self._ends, (until, number))
            self._count(pin, len(pin.slots))

    def _drop(self, hashes: Sequence[bytes], pins: Sequence[int]) -> None:
        """Let go of blocks of the pins whose numbers are given by position, -1 for none."""
        of_pin: dict[int, list[bytes]] = {}
        for each, number in zip(hashes, pins, strict=True):
            if number >= 0:
                of_pin.setdefault(number, []).append(each)
        for number, some in of_pin.items():
            self._let_go(number, list(dict.fromkeys(some)))

    def _end(self, number: int) -> None:
        if (pin := self._pins.get(number)) is not None:
            self._let_go(number, list(pin.slots))

    def _let_go(self, number: int, hashes: list[bytes]) -> None:
        """Give back a pin's right to some of its blocks, each named once, and let whoever waits for slots have them."""
        pin = self._pins[number]
        pin_of = self._pin_of[id(pin.chain), pin.salt]
        slots = [pin.slots.pop(each) for each in hashes]
        for each in hashes:
            del pin_of[each]
        self._count(pin, -len(slots))
        pin.give_back(np.array(slots, np.int64))
        pin.chain.room.changed()
        if not pin.slots:
            del self._pins[number]
        if not pin_of:
            del self._pin_of[id(pin.chain), pin.salt]

    def _count(self, pin: _Pin, n: int) -> None:
        self._num_pinned[pin.tier] += n
        self._num_bytes[pin.salt] += n * pin.chain.stride_bytes
        if not self._num_bytes[pin.salt]:
            del self._num_bytes[pin.salt]

    def _set_timer(self) -> None:
        """Set the timer for the pin that ends first: there is one timer for all."""
        if len(self._ends) > 2 * len(self._pins) + _FEW:
            self._ends = [each for each in self._ends if each[1] in self._pins]
            heapify(self._ends)
        while self._ends and self._ends[0][1] not in self._pins:
            heappop(self._ends)
        if self._timer is not None:
            if self._ends and self._timer_ends == self._ends[0][0]:
                return
            self._timer.cancel()
            self._timer = None
        if self._ends:
            self._timer_ends = self._ends[0][0]
            self._timer = asyncio.get_running_loop().call_at(self._timer_ends, self._end_due)

    def _end_due(self) -> None:
        now, self._timer = asyncio.get_running_loop().time(), None
        for _ in range(_ENDED_AT_ONCE):
            if not self._ends or self._ends[0][0] > now:
                break
            self._end(heappop(self._ends)[1])
        self._set_timer()  # which has this called in the next turn if more are due


def _stale(chain: Chain, batch: Batch, found: _Found) -> Mask:
    """Say which blocks cannot be found where they are pinned."""
    stale = np.zeros(len(batch), np.bool_)
    for number, tier in enumerate(chain.booked):
        if len(at := (found.tiers == number).nonzero()[0]):
            slots, _ = tier.index.find(batch.names[at])
            stale[at] = slots != found.slots[at]
    return stale
