"""Names by small numbers, and blocks by these in an index."""

import numpy as np
import pytest

from tiered_kv.catalog import TierIndex
from tiered_kv.catalog.policies.make_policy import POLICIES
from tiered_kv.values.keys import Names

every_policy = pytest.mark.parametrize("policy", list(POLICIES))


def names_of(*batch: int) -> Names:
    """Return names that are an engine's own small integers: three words of four are zero."""
    names = np.zeros((len(batch), 4), dtype=np.uint64)
    names[:, 0] = batch
    return names


def ids_of(names: Names) -> list[int]:
    """Return what `names_of` made names of."""
    ids: list[int] = names[:, 0].astype(np.int64).tolist()
    return ids


def store(index: TierIndex, *batch: int) -> list[int]:
    """Store blocks as a caller would; return what was evicted for them."""
    with index.reserve(names_of(*batch)) as reservation:
        reservation.commit().release()
    return ids_of(reservation.evicted)
