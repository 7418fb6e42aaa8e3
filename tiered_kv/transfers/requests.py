"""What a load or store is asked for, once it has been checked: made in any thread, moved on the event loop."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiered_kv.memory.lanes import Lane
from tiered_kv.tiers.batch import Batch
from tiered_kv.tiers.budget import Priority
from tiered_kv.tiers.chain import Chain
from tiered_kv.transfers.bindings import Binding


@dataclass(frozen=True)
class LoadRequest:
    """One load of one KV group.

    Attributes:
        chain: The tiers.
        batch: What to load.
        binding: The engine's memory.
        pages: ``(n, pages_per_block)`` page ids in it, in key order.
        lane: Behind the pages' last use; released when the load has ended.
        deadline: On the loop's clock.
        priority: Of its reads.
        is_current: False once the weights have changed: then the load returns 0 blocks.
        layerwise: Whether to copy layer by layer.
    """

    chain: Chain
    batch: Batch
    binding: Binding
    pages: NDArray[np.int64]
    lane: Lane
    deadline: float
    priority: Priority
    is_current: Callable[[], bool]
    layerwise: bool = False


@dataclass(frozen=True)
class StoreRequest:
    """One store of one KV group.

    Attributes:
        chain: The tiers.
        batch: What to store, in the namespace of the weights that computed it.
        binding: The engine's memory.
        pages: ``(n, pages_per_block)`` page ids in it, in key order.
        lane: Behind the pages' computation; released when the store has let go of them.
        layerwise: Whether layers are given one by one.
    """

    chain: Chain
    batch: Batch
    binding: Binding
    pages: NDArray[np.int64]
    lane: Lane
    layerwise: bool = False
