"""Tests for authors of backends: inherit `BackendTests` or `SlotBackendTests` and define the ``backend`` fixture.

Needs pytest and AnyIO's plugin: ``pip install "tiered-kv[test]"``.
"""

from tiered_kv.testing.conformance import BackendTests, SlotBackendTests
from tiered_kv.testing.helpers import (
    GROUPS,
    ThreadWorkers,
    block_key,
    block_names,
    make_block,
    open_backend,
    open_context,
)

__all__ = [
    "GROUPS",
    "BackendTests",
    "SlotBackendTests",
    "ThreadWorkers",
    "block_key",
    "block_names",
    "make_block",
    "open_backend",
    "open_context",
]
