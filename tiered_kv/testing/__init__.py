"""Tests for authors of backends: inherit `BackendTests` or `SlotBackendTests` and define the ``backend`` fixture.

Needs pytest and AnyIO's plugin: ``pip install "tiered-kv[test]"``.
"""

import pytest

pytest.register_assert_rewrite("tiered_kv.testing.conformance")  # or a failure would show no values; before its import

from tiered_kv.testing.conformance import BackendTests, SlotBackendTests  # noqa: E402 - only where it can be imported
from tiered_kv.testing.helpers import (  # noqa: E402 - only where it can be imported
    GROUPS,
    ThreadWorkers,
    block_key,
    block_names,
    make_block,
    open_backend,
    open_context,
)
from tiered_kv.testing.scripted import (  # noqa: E402 - only where it can be imported
    ScriptedDevice,
    ScriptedEvent,
    ScriptedStream,
)

__all__ = [
    "GROUPS",
    "BackendTests",
    "ScriptedDevice",
    "ScriptedEvent",
    "ScriptedStream",
    "SlotBackendTests",
    "ThreadWorkers",
    "block_key",
    "block_names",
    "make_block",
    "open_backend",
    "open_context",
]
