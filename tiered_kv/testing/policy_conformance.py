"""What an eviction policy promises, as tests: see ``conformance.py``.

```python
class TestMyPolicy(PolicyTests):
    @pytest.fixture
    def policy(self) -> type[MyPolicy]:
        return MyPolicy
```
"""

from typing import Final

import numpy as np

from tiered_kv.catalog.policies import Policy
from tiered_kv.catalog.table import Slots
from tiered_kv.testing.promises import Promises
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.keys import Names

_FREE, _PARKED, _EVICTABLE, _GONE = range(4)
_HINTS: Final = ReuseHint(0.0), ReuseHint(0.9, within_s=2.0), ReuseHint(0.5, category="tool call")
_MOSTLY: Final = ("store", "store", "store", "park", "park", "unpark", "unpark", "use", "touch")
_STEPS: Final = 500


class PolicyTests(Promises):
    """Promises of a `Policy`. Define the fixture ``policy``, which returns its class.

    Each makes calls as the cache does, in an order of chance, and looks after each at what the policy answers.
    """

    def test_what_is_unparked_can_be_chosen(self, policy: type[Policy]) -> None:
        """Of blocks that are unparked as many are chosen as are wanted, each once, and none that must stay.

        Blocks are parked when they come, and while they are leased. To choose changes nothing, and no call what it is
        given.
        """
        _walk(policy, *_MOSTLY)

    def test_what_is_cold_goes_next(self, policy: type[Policy]) -> None:
        """Of blocks that are unparked cold the first is the next victim, however often it was used."""
        _walk(policy, *_MOSTLY, "cool")

    def test_what_is_gone_is_forgotten(self, policy: type[Policy]) -> None:
        """Where blocks were evicted, or parked for good, or the tier was cleared, there are others from then on."""
        _walk(policy, *_MOSTLY, "remove", "clear")

    def test_hints_are_no_uses(self, policy: type[Policy]) -> None:
        """What is said of blocks, by hints or of what the engine holds, evicts none and keeps none from eviction."""
        _walk(policy, *_MOSTLY, "hint", "hold")

    def test_a_tier_may_be_resized(self, policy: type[Policy]) -> None:
        """Beyond the end of a tier that is smaller now a block goes once it is unparked; it may be larger again."""
        _walk(policy, *_MOSTLY, "resize")

    def test_a_call_may_be_about_nothing(self, policy: type[Policy]) -> None:
        """A batch may be empty, and a tier have no slot."""
        _walk(policy, *_MOSTLY, "cool", "remove", "clear", "hint", "hold", "resize", num_slots=0)

    def test_calls_come_in_any_order(self, policy: type[Policy]) -> None:
        """All of that holds whatever comes after whatever."""
        _walk(policy, *_MOSTLY, "cool", "remove", "hint", "hold", *_MOSTLY, "cool", "remove", "clear", "resize")


def _walk(policy: type[Policy], *calls: str, num_slots: int | None = None) -> None:
    for size in (1, 5, 80) if num_slots is None else (num_slots,):
        told = _ToldByChance(policy, size)
        for _ in range(_STEPS):
            getattr(told, calls[told.chance.integers(len(calls))])()


class _ToldByChance:
    """A policy and what it is told of a tier. A slot is free, or its block parked, evictable, or gone and leased."""

    def __init__(self, policy: type[Policy], num_slots: int) -> None:
        self.chance = np.random.default_rng(num_slots)
        self._end = num_slots
        self._policy = policy(num_slots)
        self._states = np.full(num_slots, _FREE)
        self._names = _names(range(num_slots))
        self._num_calls = 0

    def _slots(self, *states: int) -> Slots:
        return np.isin(self._states, states).nonzero()[0]

    def _some(self, *states: int) -> Slots:
        slots = self.chance.permutation(self._slots(*states))
        return slots[: self.chance.integers(len(slots) + 1)]

    def _absent(self) -> list[int]:
        there = self._names[self._slots(_PARKED, _EVICTABLE), 0]
        return list(self.chance.permutation(np.setdiff1d(np.arange(3 * len(self._states)), there)))

    def _tell(self, call: str, slots: Slots, *more: object, becomes: int | None = None, **named: object) -> None:
        given, self._num_calls = slots.copy(), self._num_calls + 1
        getattr(self._policy, call)(given, *more, **named)
        assert given.tolist() == slots.tolist(), f"{call}() has changed the slots that it was given"
        if becomes is not None:
            self._states[slots] = becomes
        self._look(f"{call}({slots.tolist()})")

    def _look(self, call: str) -> None:
        evictable = self._slots(_EVICTABLE)
        assert len(self._policy) == len(evictable), f"after {call}: how many blocks can be evicted"
        ordered = sorted(self._policy.order().tolist())
        assert ordered == evictable.tolist(), f"after {call}: order() has what can be evicted, each once"
        keep = self._some(_EVICTABLE)
        self._victims(int(self.chance.integers(len(evictable) - len(keep) + 1)), keep)

    def _victims(self, n: int, keep: Slots) -> Slots:
        first, second = (np.array(self._policy.victims(n, keep.copy()), np.int64) for _ in range(2))
        others = np.setdiff1d(self._slots(_EVICTABLE), keep)
        is_right = len(first) == n and len(np.intersect1d(first, others)) == n
        assert is_right, f"{n} of {others.tolist()} were to be chosen, not {first.tolist()}"
        assert second.tolist() == first.tolist(), "choosing changes nothing: asked again it is the same"
        return first

    def store(self) -> None:
        free, keep = self._slots(_FREE), self._some(_EVICTABLE)
        free = free[free < self._end]
        n = int(self.chance.integers(len(free) + len(self._slots(_EVICTABLE)) - len(keep) + 1))
        if n > len(free):
            victims = self._victims(n - len(free), keep)
            self._tell("evict", victims, self._names[victims], becomes=_FREE)
            free = np.concatenate((free, victims))
        self._add(np.sort(free[:n]))

    def _add(self, slots: Slots) -> None:
        self._names[slots] = _names(self._absent()[: len(slots)])
        self._tell("add", slots, self._names[slots], becomes=_PARKED)

    def park(self) -> None:
        self._tell("park", self._some(_EVICTABLE), becomes=_PARKED)

    def unpark(self, *, cold: bool = False) -> None:
        slots = self._some(_PARKED)
        self._tell("unpark", slots, cold=cold, becomes=_EVICTABLE)
        if cold and len(slots):
            assert self._victims(1, slots[:0]).tolist() == slots[:1].tolist(), "what is cold goes next"
        self._tell("park", slots[slots >= self._end], becomes=_FREE)

    def cool(self) -> None:
        self.unpark(cold=True)

    def use(self) -> None:
        self._tell("use", self._some(_PARKED, _GONE))

    def touch(self) -> None:
        self._tell("touch", self._some(_EVICTABLE))

    def hint(self) -> None:
        self._tell("hint", self._some(_PARKED), _HINTS[self.chance.integers(len(_HINTS))], self._num_calls / 100)

    def hold(self) -> None:
        held = self._some(_PARKED)
        self._tell("hold", held, _names(self._absent()[:3]))
        self._tell("leave", held[::2])

    def remove(self) -> None:
        self._states[self._some(_GONE)] = _FREE
        self._states[self._some(_PARKED)] = _GONE
        self._tell("park", self._some(_EVICTABLE), becomes=_FREE)

    def clear(self) -> None:
        self._states = np.choose(self._states, (_FREE, _GONE, _FREE, _GONE))
        self._policy.clear()
        self._look("clear()")

    def resize(self) -> None:
        end, idle, free = int(self.chance.integers(len(self._states) + 1)), self._slots(_EVICTABLE), self._some(_FREE)
        self._tell("park", idle[idle >= end][::-1], becomes=_FREE)
        self._policy.resize(end)
        self._end, filling = end, free[(free >= end) & (free < self._end)]
        self._add(filling)


def _names(numbers: "range | list[int]") -> Names:
    names = np.zeros((len(numbers), 4), np.uint64)
    names[:, 0] = list(numbers)
    return names
