"""Policies by name.

Where a policy of the program's runs: it is trusted with the order of eviction, and with nothing else.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
from typing_extensions import override

from tiered_kv.catalog.policies.arc import ARCPolicy
from tiered_kv.catalog.policies.base import LRUPolicy, Policy
from tiered_kv.catalog.policies.lhd import LHDPolicy
from tiered_kv.catalog.policies.mq import MQPolicy
from tiered_kv.catalog.table import Slots
from tiered_kv.values.errors import ConfigurationError, in_words
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.keys import Names
from tiered_kv.values.log import log


class GuardedPolicy(Policy):
    """Asks another policy, until that raises or chooses what it may not; from then on the tier goes by LRU.

    It knows by itself which blocks are evictable, so that no block is lost, none is evicted that is leased, and the
    change costs nothing but what the policy had learned. Takes 1 byte a slot.
    """

    def __init__(self, policy: Policy, num_slots: int) -> None:
        """Guard ``policy``, which was made over so many slots and holds nothing yet."""
        super().__init__(num_slots)
        self._policy = policy
        self._capacity = num_slots
        self._is_evictable = np.full(self._capacity, fill_value=False)
        self._num_evictable = 0

    @override
    def resize(self, num_slots: int) -> None:
        super().resize(num_slots)
        self._tell(lambda policy: policy.resize(num_slots))

    def __len__(self) -> int:
        return self._num_evictable

    @override
    def add(self, slots: Slots, names: Names) -> None:
        self._tell(lambda policy: policy.add(slots, names))

    @override
    def use(self, slots: Slots) -> None:
        self._tell(lambda policy: policy.use(slots))

    @override
    def hint(self, slots: Slots, hint: ReuseHint, elapsed_s: float) -> None:
        self._tell(lambda policy: policy.hint(slots, hint, elapsed_s))

    @override
    def hold(self, slots: Slots, absent: Names) -> None:
        self._tell(lambda policy: policy.hold(slots, absent))

    @override
    def leave(self, slots: Slots) -> None:
        self._tell(lambda policy: policy.leave(slots))

    @override
    def park(self, slots: Slots) -> None:
        self._mark(slots, is_evictable=False)
        self._tell(lambda policy: policy.park(slots))

    @override
    def unpark(self, slots: Slots, *, cold: bool = False) -> None:
        self._mark(slots, is_evictable=True)
        self._tell(lambda policy: policy.unpark(slots, cold=cold))

    @override
    def touch(self, slots: Slots) -> None:
        self._tell(lambda policy: policy.touch(slots))

    @override
    def victims(self, n: int, keep: Slots) -> Slots:
        try:
            victims = np.array(self._policy.victims(n, keep), np.int64)  # a copy: it may be a view of what changes next
            self._check(victims, n, keep)
        except Exception as error:  # noqa: BLE001 - whatever it is
            self._give_up(error)
            victims = self._policy.victims(n, keep)
        return victims

    @override
    def evict(self, slots: Slots, names: Names) -> None:
        self._mark(slots, is_evictable=False)
        self._tell(lambda policy: policy.evict(slots, names))

    @override
    def order(self) -> Slots:
        try:
            order = np.asarray(self._policy.order(), np.int64)
            self._check(order, self._num_evictable, order[:0])
        except Exception as error:  # noqa: BLE001 - whatever it is
            self._give_up(error)
            order = self._policy.order()
        return order

    @override
    def clear(self) -> None:
        self._is_evictable[:] = False
        self._num_evictable = 0
        self._tell(lambda policy: policy.clear())

    def _mark(self, slots: Slots, *, is_evictable: bool) -> None:
        self._is_evictable[slots] = is_evictable
        self._num_evictable += len(slots) if is_evictable else -len(slots)

    def _tell(self, call: Callable[[Policy], None]) -> None:
        try:
            call(self._policy)
        except Exception as error:  # noqa: BLE001 - whatever it is
            self._give_up(error)

    def _check(self, slots: Slots, n: int, keep: Slots) -> None:
        """Raise unless these are ``n`` different evictable slots, none of them in ``keep``."""
        is_right = slots.shape == (n,) and (slots >= 0).all() and (np.diff(np.sort(slots)) > 0).all()
        if not is_right or not self._is_evictable[slots].all() or np.isin(slots, keep).any():
            raise ValueError(f"{n} of the evictable blocks were asked for, got slots {slots.tolist()!r:.200}")

    def _give_up(self, error: Exception) -> None:
        """Go by LRU, in which what is evictable now is of one age."""
        log("error", "policy.failed", exc_info=error, policy=type(self._policy).__name__)
        self._policy = LRUPolicy(self._capacity)
        self._policy.resize(self.num_slots)
        self._policy.unpark(self._is_evictable.nonzero()[0])


POLICIES: Final[dict[str, type[Policy]]] = {
    "lru": LRUPolicy, "arc": ARCPolicy, "mq": MQPolicy, "lhd": LHDPolicy,
}  # fmt: skip


def make_policy(policy: str | type[Policy], num_slots: int) -> Policy:
    """Make a policy over ``num_slots`` slots from its name or its class.

    Raises:
        ConfigurationError: There is no policy of this name, or a class of the program's cannot be made.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ConfigurationError(
                f"policy must be one of {', '.join(POLICIES)}, or a class, in settings 'package.module:Class'; "
                f"got {policy!r}"
            )
        return POLICIES[policy](num_slots)
    try:
        return policy(num_slots)
    except Exception as error:
        what = f"{policy.__module__}:{policy.__qualname__}"
        raise ConfigurationError(f"policy {what!r} cannot be made over {num_slots} slots: {in_words(error)}") from error


def guarded_policy(policy: str | type[Policy], num_slots: int) -> Policy:
    """Do as `make_policy`; one of the program's own is guarded."""
    made = make_policy(policy, num_slots)
    return made if isinstance(policy, str) else GuardedPolicy(made, num_slots)
