"""What an eviction policy must do: keep the evictable blocks of one tier in the order in which they may go.

`LRUPolicy` is the simplest one: where another fails, the tier goes by it.
"""

from abc import ABC, abstractmethod

from tiered_kv.catalog.slots import SlotQueue
from tiered_kv.catalog.table import Slots
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.keys import Names


class Policy(ABC):
    """The order in which the blocks of one tier are evicted.

    A policy's queues hold the evictable blocks and no others. A block that is leased is *parked*: it is in no queue,
    and is put back by its last release. So no victim is ever skipped, and how many blocks can be evicted is a length.
    (Another reason to keep a block from eviction, such as a copy below that is still to be written, is to keep it
    parked.)

    Slots come and go in batches, without repeats, and but for `add` least recently used first. A policy changes none
    that it is given. A call costs time in the size of its batch, not of the tier, and looks at no clock.

    `tiered_kv.testing.PolicyTests` proves one.
    """

    def __init__(self, num_slots: int) -> None:
        """Make a policy over the slots ``0 <= slot < num_slots``, all of them empty; there are never more."""
        self.num_slots = num_slots

    def resize(self, num_slots: int) -> None:
        """Only the slots below ``num_slots`` hold blocks from now on.

        In those above it there are none any more, but for what is parked there, or being filled and then added: that is
        parked for good as soon as it is unparked.
        """
        self.num_slots = num_slots

    @abstractmethod
    def __len__(self) -> int:
        """Count the evictable blocks."""

    @abstractmethod
    def add(self, slots: Slots, names: Names) -> None:
        """New blocks are in these slots. They start parked, and get places when unparked: the head of a prompt last.

        A block is parked whenever it is leased. A policy whose order is not that of use keeps the places itself.
        """

    @abstractmethod
    def use(self, slots: Slots) -> None:
        """These parked blocks, or none, were asked for and found. Each takes its new place when it is unparked.

        One that was leased when it was removed, or the tier cleared, may be among them: that never is.
        """

    def hint(self, slots: Slots, hint: ReuseHint, elapsed_s: float) -> None:  # noqa: B027 - a policy may do without
        """Take note of what a caller says of these parked blocks, until they are used again.

        By default nothing is noted: a policy need not know hints. What is not expected at all is unparked ``cold``.

        Args:
            slots: Of the blocks.
            hint: What is said.
            elapsed_s: Since the tier was opened: a policy looks at no clock, and may have to turn seconds into uses.
        """

    def hold(self, slots: Slots, absent: Names) -> None:  # noqa: B027 - a policy may do without
        """Take note that the engine has blocks in its own cache: these parked ones, and those of these names.

        What is parked here is unparked ``cold`` then, and its uses are told by `use`, as all are. What is not here was
        used just now. When it is added, that is no use: the engine has dropped it. By default nothing is noted.
        """

    def leave(self, slots: Slots) -> None:  # noqa: B027 - likewise
        """These parked blocks, which the engine had, it has not any more."""

    @abstractmethod
    def park(self, slots: Slots) -> None:
        """Take evictable blocks out of the order of eviction, to be unparked later or never to come back."""

    @abstractmethod
    def unpark(self, slots: Slots, *, cold: bool = False) -> None:
        """Make parked blocks evictable: the last one is the most recently used; if ``cold``, the first goes next."""

    def touch(self, slots: Slots) -> None:
        """These evictable blocks were asked for and found: as if they were parked, used and unparked."""
        self.park(slots)
        self.use(slots)
        self.unpark(slots)

    @abstractmethod
    def victims(self, n: int, keep: Slots) -> Slots:
        """Choose the ``n`` evictable blocks to go first, none of ``keep``, and change nothing.

        Args:
            n: At most ``len(self) - len(keep)``.
            keep: Evictable blocks that must stay.
        """

    @abstractmethod
    def evict(self, slots: Slots, names: Names) -> None:
        """These evictable blocks, chosen by `victims`, are gone for want of room."""

    @abstractmethod
    def order(self) -> Slots:
        """Return all evictable blocks, the first to go first: after a restart they are added in this order.

        Walks the tier: for checkpoints only, which put what is leased last.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget every block, evictable or parked, and all that was learned."""


class LRUPolicy(Policy):
    """Evicts what was used least recently. Takes 8 bytes a slot."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._queue = SlotQueue(num_slots)

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, slots: Slots, names: Names) -> None:
        """Nothing to note: a block's place is given to it when it is unparked."""

    def use(self, slots: Slots) -> None:
        """Nothing to note: one use and many are the same to LRU."""

    def park(self, slots: Slots) -> None:
        """Take blocks out of the queue."""
        self._queue.remove(slots)

    def unpark(self, slots: Slots, *, cold: bool = False) -> None:
        """Put blocks at the hot or the cold end of the queue."""
        self._queue.push_cold(slots) if cold else self._queue.push(slots)

    def victims(self, n: int, keep: Slots) -> Slots:
        """Choose from the cold end."""
        return self._queue.head(n, skip=keep)

    def evict(self, slots: Slots, names: Names) -> None:
        """Take blocks out of the queue."""
        self._queue.remove(slots)

    def order(self) -> Slots:
        """Return the queue."""
        return self._queue.head(len(self._queue))

    def clear(self) -> None:
        """Empty the queue."""
        self._queue.clear()
