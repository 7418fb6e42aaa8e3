"""Which keys share an object. Touched by the event loop only.

The blocks of a prompt are cut into groups of ``size`` positions, aligned to position 0. A group that is written whole
is one object, a pack, named by its last key: the chain makes that key name all before it. A group that is written in
parts is stored block by block. So the pack of a block can be named by whoever knows the last key of its group, from the
batch at hand or from an earlier one. Who deletes a block and cannot, dooms it, see ``doomed.py``.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tiered_kv.media.backend import RecordShape
from tiered_kv.media.record import HEADER_BYTES
from tiered_kv.values.keys import BlockKey

_MAX_BLOCKS = 16
"""A pack is found by those who know its last key, so a long one is of use to fewer."""
_MAX_REMEMBERED = 1 << 16


@dataclass(frozen=True, slots=True)
class Unit:
    """Keys ``[start, stop)`` of a batch that may lie in one object.

    Attributes:
        start: The first key's index.
        stop: One past the last key's index.
        pack: Name of the pack they would be in, if that is known; without one it is a single key.
        place: Of the first key in the pack, in records.
        size: Blocks of a whole pack.
    """

    start: int
    stop: int
    pack: str | None = None
    place: int = 0
    size: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether the keys are a whole pack."""
        return self.pack is not None and self.stop - self.start == self.size

    @property
    def singles(self) -> "list[Unit]":
        """Units of the same keys, each on its own."""
        return [Unit(at, at + 1) for at in range(self.start, self.stop)]


class Packing:
    """Cuts batches into units, and remembers the last keys of groups it has seen, and which blocks lay singly.

    Of everything it remembers as much as has been met last, 65,536 blocks each.
    """

    def __init__(self, groups: Iterable[RecordShape], pack_bytes: int) -> None:
        self._sizes = {shape.fingerprint: _group_size(shape, pack_bytes) for shape in groups}
        self._last_keys: Mapping[int, OrderedDict[bytes, bytes]] = {
            size: OrderedDict() for size in set(self._sizes.values())
        }
        self._single: OrderedDict[bytes, None] = OrderedDict()

    def saw(self, keys: Iterable[BlockKey], *, is_single: bool) -> None:
        """Remember of blocks that have just been stored or read whether each was an object of its own."""
        single = self._single
        for key in keys:
            if is_single:
                single[key.hash] = None
            else:
                single.pop(key.hash, None)
        while len(single) > _MAX_REMEMBERED:
            single.popitem(last=False)

    def is_single(self, keys: Iterable[BlockKey]) -> bool:
        """Whether each of these was an object of its own lately: to ask for their pack first costs a round trip."""
        return all(key.hash in self._single for key in keys)

    @property
    def is_on(self) -> bool:
        """Whether any blocks may lie in packs."""
        return any(size > 1 for size in self._sizes.values())

    def parted(self, keys: Iterable[BlockKey]) -> tuple[list[BlockKey], list[BlockKey]]:
        """Return those of the blocks that lay singly lately, and those that may lie in packs; the rest never do."""
        parts: tuple[list[BlockKey], list[BlockKey]] = [], []
        for key in keys:
            if self._sizes.get(key.namespace.fingerprint, 1) > 1:
                parts[not self.is_single([key])].append(key)
        return parts

    def units(self, keys: Sequence[BlockKey]) -> list[Unit]:
        """Cut a batch: every key is in one unit, in order."""
        units: list[Unit] = []
        start = 0
        while start < len(keys):
            size = self._sizes.get(keys[start].namespace.fingerprint, 1)
            if size == 1:
                units.append(Unit(start, start + 1))
                start += 1
                continue
            stop = _end_of_group(keys, start, size)
            if keys[stop - 1].position % size == size - 1:
                self._remember(size, keys[start:stop])
            units += self._units_of_group(keys, start, stop, size)
            start = stop
        return units

    def _units_of_group(self, keys: Sequence[BlockKey], start: int, stop: int, size: int) -> Iterable[Unit]:
        """Part neighbours whose group's last key is another or is not known."""
        remembered = self._last_keys[size]
        lasts = [remembered.get(key.hash) for key in keys[start:stop]]
        while start < stop:
            last = lasts[-(stop - start)]
            if last is None:
                yield Unit(start, start + 1)
                start += 1
                continue
            end = start + 1
            while end < stop and lasts[-(stop - end)] == last:
                end += 1
            pack = f"{keys[start].namespace.path}/{last.hex()}.x{size}"
            yield Unit(start, end, pack, keys[start].position % size, size)
            start = end

    def _remember(self, size: int, group: Sequence[BlockKey]) -> None:
        remembered, last = self._last_keys[size], group[-1].hash
        for key in group:
            remembered[key.hash] = last
            remembered.move_to_end(key.hash)
        while len(remembered) > _MAX_REMEMBERED:
            remembered.popitem(last=False)


def _end_of_group(keys: Sequence[BlockKey], start: int, size: int) -> int:
    """Return where consecutive positions of one group, from ``start`` on, end in the batch."""
    first = keys[start]
    limit = min(len(keys), start + size - first.position % size)
    stop = start + 1
    while stop < limit and keys[stop].position == first.position + stop - start:
        if keys[stop].namespace is not first.namespace and keys[stop].namespace != first.namespace:
            break
        stop += 1
    return stop


def _group_size(shape: RecordShape, pack_bytes: int) -> int:
    """The largest power of two of records that fit, so that groups of all sizes nest."""
    fitting = min(pack_bytes // (HEADER_BYTES + shape.payload_bytes), _MAX_BLOCKS)
    return 1 << max(0, fitting.bit_length() - 1)
