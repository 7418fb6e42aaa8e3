"""Blocks that were evicted from packs that nobody could name: no pack that has one of them may be served again.

A pack is named by its group's last key, so who evicts a block without knowing that key cannot delete its pack. Such a
block is doomed: it gets a mark on the store, an empty object ``gone/<path of the block>``, which every process reads
when it opens and again every half minute. The first that is about to ask for the pack and has both names, the block's
and the pack's, deletes the pack and then the mark. Touched by the event loop only.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from tiered_kv.values.keys import BlockKey
from tiered_kv_backends.paths import RECORD
from tiered_kv_backends.s3.packing import Unit

MARKS = "gone"
"""The folder of all marks. What is in it is called as the blocks are."""
MOST_MARKS = 1 << 16
"""That are remembered, of this process's own and of those read from the store, each."""


def mark_of(key: BlockKey) -> str:
    """Name the object that says that a block was evicted."""
    return f"{MARKS}/{key.path}"


def without_mark(name: str) -> str:
    """Return the path of the block that a mark is about, or of the object itself if it is no mark."""
    return name.removeprefix(f"{MARKS}/")


def is_mark(name: str) -> bool:
    """Whether an object is a mark of ours."""
    path = without_mark(name)
    match = RECORD.fullmatch(path) if path != name else None
    return match is not None and match["size"] is None


class Doomed:
    """The blocks that this process has evicted from packs it could not name, and others whose marks it has read."""

    def __init__(self) -> None:
        self._own: OrderedDict[str, bool] = OrderedDict()  # by mark: whether a pack may hold it, as far as was seen
        self._has_lost_own = False
        self._read: frozenset[str] = frozenset()
        self._has_read_all = True

    def add(self, keys: Iterable[BlockKey], *, may_be_packed: bool) -> None:
        """Doom blocks, and remember whether packs may hold them, as far as was seen."""
        for mark in map(mark_of, keys):
            self._own[mark] = may_be_packed
            self._own.move_to_end(mark)
        while len(self._own) > MOST_MARKS:
            mark, may_be_packed = self._own.popitem(last=False)
            self._has_lost_own |= may_be_packed
            self._has_read_all = False  # its mark is on the store, and may be younger than what was read there

    def read(self, marks: frozenset[str], *, are_all: bool) -> None:
        """Take down what marks are on the store now, or some of them if those are too many."""
        self._read, self._has_read_all = marks, are_all

    @property
    def may_be_served(self) -> bool:
        """Whether packs may still have blocks that this process has evicted."""
        return self._has_lost_own or any(self._own.values())

    def suspects(self, keys: Sequence[BlockKey], units: Iterable[Unit]) -> dict[str, list[str]]:
        """Return the packs of a batch that may have to go, and the marks of its blocks that say so."""
        packs: dict[str, list[str]] = {}
        if not (self._own or self._read or not self._has_read_all):
            return packs
        for unit in units:
            if unit.pack is not None:
                marks = map(mark_of, keys[unit.start : unit.stop])
                if found := [mark for mark in marks if self.is_own(mark) or self._may_be_on_store(mark)]:
                    packs.setdefault(unit.pack, []).extend(found)
        return packs

    def is_own(self, mark: str) -> bool:
        """Whether this process has doomed the block: that holds whatever has become of the mark."""
        return mark in self._own

    def spare(self, marks: Iterable[str]) -> None:
        """Forget marks whose packs are gone."""
        marks = set(marks)
        for mark in marks:
            self._own.pop(mark, None)
        self._read -= marks

    def _may_be_on_store(self, mark: str) -> bool:
        return not self._has_read_all or mark in self._read
