"""What is there, by few questions. A chained key names all before it, so a prefix is found by bisection.

Bisection over holes is an estimate, and so is an answer of a second ago: a load decides, and what it finds missing is
remembered as such. Touched by the event loop only.
"""

from asyncio import gather
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence

from tiered_kv.keys import BlockKey, Namespace

_MAX_ANSWERS = 1 << 16


class Answers:
    """What was said lately about keys, each answer believed for ``ttl_s`` seconds."""

    def __init__(self, clock: Callable[[], float], ttl_s: float) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._num_answers = 0
        self._by_namespace: defaultdict[Namespace, dict[bytes, tuple[bool, float]]] = defaultdict(dict)

    def bounds(self, keys: Sequence[BlockKey]) -> tuple[int, int]:
        """Return how many leading keys are there for sure, and at most: those before the first that is known to lack.

        Args:
            keys: Of one namespace, as all keys of a lookup are.
        """
        known = self._by_namespace.get(keys[0].namespace) if keys else None
        if not known:
            return 0, len(keys)
        num_known, now = 0, self._clock()
        for n, key in enumerate(keys):
            is_there, until = known.get(key.hash, (False, now))
            if until <= now:
                continue
            if not is_there:
                return num_known, n
            num_known = n + 1
        return num_known, len(keys)

    def put(self, key: BlockKey, *, is_there: bool) -> None:
        """Believe for a while that a key, and with it those before it, is there; or that it is not."""
        if self._ttl_s <= 0:
            return
        if self._num_answers >= _MAX_ANSWERS:
            self._by_namespace.clear()
            self._num_answers = 0
        self._num_answers += 1
        self._by_namespace[key.namespace][key.hash] = is_there, self._clock() + self._ttl_s

    def drop(self, keys: Iterable[BlockKey]) -> None:
        """Believe nothing about these keys themselves: they were stored."""
        for key in keys:
            if known := self._by_namespace.get(key.namespace):
                known.pop(key.hash, None)

    def refute(self, keys: Iterable[BlockKey], missing: Iterable[BlockKey]) -> None:
        """Believe nothing in the namespaces of ``keys``, which a load did not find as told, except what it saw."""
        for namespace in {key.namespace for key in keys}:
            self._by_namespace.pop(namespace, None)
        for key in missing:
            self.put(key, is_there=False)


async def count_prefix(first: int, num_items: int, is_there: Callable[[int], Awaitable[bool]]) -> int:
    """Count the leading items that are there, the first ``first`` being known to be.

    Asks about the two ends at once, for most prefixes are there whole or not at all, then bisects: at most
    ``2 + log2(num_items)`` questions.
    """
    if first >= num_items:
        return first
    last = num_items - 1
    has_first, has_last = await gather(is_there(first), is_there(last)) if first < last else [await is_there(last)] * 2
    if not has_first:
        return first
    if has_last:
        return num_items
    present, absent = first, last
    while absent - present > 1:
        middle = (present + absent) // 2
        if await is_there(middle):
            present = middle
        else:
            absent = middle
    return absent
