"""Copies that tell a scripted device what they read and write, so that it can say which of them nothing orders."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from tiered_kv.memory import PagedCaches, copies
from tiered_kv.testing import ScriptedDevice
from tiered_kv.testing.ordering import Region

NUM_LAYERS = 2
"""Of the layouts that are watched."""
Ids = NDArray[np.int64]


def pages(ids: Iterable[int], layers: slice | None = None) -> list[Region]:
    """Return the regions of the engine's pages, of all layers or of some."""
    return [("page", int(page), layer) for page in ids for layer in range(NUM_LAYERS)[layers or slice(None)]]


def slots(rows: Tensor, ids: Iterable[int], layers: slice | None = None) -> list[Region]:
    """Return the regions of slots."""
    place = rows.untyped_storage().data_ptr()
    return [("slot", place, int(slot), layer) for slot in ids for layer in range(NUM_LAYERS)[layers or slice(None)]]


@contextmanager
def watched(device: ScriptedDevice) -> Iterator[None]:
    """Have every copy of the library, whichever module makes it, tell the device what it touches."""
    kept: list[Tensor] = []  # rows of one copy alone: else the next one's may lie there, and count as the same

    def gather_blocks(
        caches: PagedCaches, page_ids: Ids, rows: Tensor, at: Ids, *, layers: slice | None = None
    ) -> None:
        if rows.untyped_storage().resizable():  # not of a slab
            kept.append(rows)
        device.accessed(pages(page_ids, layers), writes=False)
        device.accessed(slots(rows, at, layers), writes=True)
        originals["gather_blocks"](caches, page_ids, rows, at, layers=layers)

    def scatter_blocks(
        rows: Tensor, at: Ids, caches: PagedCaches, page_ids: Ids, *, layers: slice | None = None
    ) -> None:
        device.accessed(slots(rows, at, layers), writes=False)
        device.accessed(pages(page_ids, layers), writes=True)
        originals["scatter_blocks"](rows, at, caches, page_ids, layers=layers)

    def copy_rows(source: Tensor, source_slots: Ids, target: Tensor, target_slots: Ids) -> None:
        device.accessed(slots(source, source_slots), writes=False)
        device.accessed(slots(target, target_slots), writes=True)
        originals["copy_rows"](source, source_slots, target, target_slots)

    watching: Sequence[Callable[..., None]] = (gather_blocks, scatter_blocks, copy_rows)
    originals: dict[str, Any] = {each.__name__: getattr(copies, each.__name__) for each in watching}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            for each in watching:
                if name.startswith("tiered_kv.") and getattr(module, each.__name__, None) is originals[each.__name__]:
                    patch.setattr(module, each.__name__, each)
        yield
