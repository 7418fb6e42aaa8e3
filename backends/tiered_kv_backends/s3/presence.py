"""What is there, by few questions. A chained key names all before it, so a prefix is found by bisection.

Bisection over holes is an estimate, and so is an answer of a second ago: a load decides, and what it finds missing is
remembered as such. An answer that comes after a store or a deletion of this process, and was asked for before, is older
than that. Touched by the event loop only.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tiered_kv.values.keys import BlockKey, Namespace
from tiered_kv_backends.s3.packing import Unit

T = TypeVar("T")

_MAX_ANSWERS = 1 << 16


@dataclass(eq=False)
class Question:
    """A question under way: which keys were stored since it was asked, and whether any were refuted."""

    stored: set[bytes] = field(default_factory=set)
    is_refuted: bool = False


class PresenceAnswers:
    """What was said lately about keys, each answer believed for ``ttl_s`` seconds."""

    def __init__(self, clock: Callable[[], float], ttl_s: float) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._num_answers = 0
        self._under_way: set[Question] = set()
        self._by_namespace: defaultdict[Namespace, dict[bytes, tuple[bool, float]]] = defaultdict(dict)

    @contextmanager
    def asking(self) -> Iterator[Question]:
        """Yield a question that is asked from here on, for `put` and `refute`."""
        question = Question()
        self._under_way.add(question)
        try:
            yield question
        finally:
            self._under_way.discard(question)

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

    def put(self, key: BlockKey, *, is_there: bool, question: Question | None = None) -> None:
        """Believe for a while that a key, and with it those before it, is there; or that it is not.

        Unless, since the question was asked, any were refuted, or the key was stored.
        """
        is_older = question is not None and (question.is_refuted if is_there else key.hash in question.stored)
        if self._ttl_s <= 0 or is_older:
            return
        if self._num_answers >= _MAX_ANSWERS:
            self._by_namespace.clear()
            self._num_answers = 0
        self._num_answers += 1
        self._by_namespace[key.namespace][key.hash] = is_there, self._clock() + self._ttl_s

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Believe nothing about these keys themselves: they were stored."""
        for question in self._under_way:
            question.stored.update(key.hash for key in keys)
        for key in keys:
            if known := self._by_namespace.get(key.namespace):
                known.pop(key.hash, None)

    def refute(self, keys: Iterable[BlockKey], missing: Iterable[BlockKey], question: Question | None = None) -> None:
        """Believe nothing in the namespaces of ``keys``, which a load did not find as told, except what it saw."""
        for each in self._under_way:
            each.is_refuted = True
        for namespace in {key.namespace for key in keys}:
            self._by_namespace.pop(namespace, None)
        for key in missing:
            self.put(key, is_there=False, question=question)


async def all_of(questions: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the answers to questions that are asked at once; if one fails the others end, and then it is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(each) for each in questions]
    except BaseExceptionGroup as errors:
        error = errors.exceptions[0]
    else:
        return [each.result() for each in asked]
    raise error


async def count_blocks(
    keys: Sequence[BlockKey],
    units: Sequence[Unit],
    num_known: int,
    exists: Callable[[str], Coroutine[Any, Any, bool]],
    is_single: Callable[[Sequence[BlockKey]], bool],
) -> int:
    """Count the leading keys that are there, the first ``num_known`` and no others being known to be.

    Groups are asked for as packs, which most are; where that ends, block by block. A group that is there in parts may
    be followed by others, so from there on both are asked for.

    Args:
        keys: Of one namespace.
        units: Cut from the keys.
        num_known: Fewer than there are keys.
        exists: Asks for one object.
        is_single: Whether keys lay singly lately.
    """
    in_parts = False

    async def has_unit(number: int) -> bool:
        unit = units[number]
        names = [] if unit.pack is None else [unit.pack]
        if not names or in_parts or is_single(keys[unit.start : unit.stop]):
            names.append(keys[unit.stop - 1].path)
        return any(await all_of(map(exists, names)))

    first = next(number for number, unit in enumerate(units) if unit.stop > num_known)
    while (num_units := await count_prefix(first, len(units), has_unit)) < len(units):
        unit = units[num_units]
        if unit.pack is None:
            return unit.start
        start = max(unit.start, num_known)
        middle = (start + unit.stop - 1) // 2  # mostly none of them is there, or the few last blocks of a prompt
        n = await count_prefix(start, unit.stop, lambda at: exists(keys[at].path), with_first=middle)
        if n < unit.stop:
            return n
        first, in_parts = num_units + 1, True
    return len(keys)


async def count_prefix(
    first: int, num_items: int, is_there: Callable[[int], Coroutine[Any, Any, bool]], *, with_first: int | None = None
) -> int:
    """Count the leading items that are there, the first ``first`` being known to be.

    Asks about two at once, then bisects: at most ``2 + log2(num_items)`` questions.

    Args:
        first: The first item that may not be there.
        num_items: How many there may be.
        is_there: Asks about one.
        with_first: Which to ask about together with ``first``; the last if left out, for most prefixes are there whole
            or not at all.
    """
    if first >= num_items:
        return first
    present, absent = first - 1, num_items
    both = sorted({first, num_items - 1 if with_first is None else with_first})
    for number, found in zip(both, await all_of(map(is_there, both)), strict=True):
        if not found:
            absent = number
            break
        present = number
    while absent - present > 1:
        middle = (present + absent) // 2
        if await is_there(middle):
            present = middle
        else:
            absent = middle
    return absent
