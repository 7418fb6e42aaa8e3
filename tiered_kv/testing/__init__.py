"""Tests for authors of backends: inherit `BackendTests` or `SlotBackendTests` and define the ``backend`` fixture.

For those of eviction policies: `PolicyTests`, with the fixture ``policy``. These three need pytest:
``pip install "tiered-kv[testing]"``. The rest needs nothing, the scripted device among it.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tiered_kv.testing.helpers import (
    GROUPS,
    ThreadWorkers,
    block_key,
    block_names,
    make_block,
    open_backend,
    open_context,
    records_in_files,
)
from tiered_kv.testing.ordering import Actor, Race
from tiered_kv.testing.scripted import ScriptedDevice, ScriptedEvent, ScriptedStream

if TYPE_CHECKING:
    from tiered_kv.testing.conformance import BackendTests
    from tiered_kv.testing.policy_conformance import PolicyTests
    from tiered_kv.testing.slot_conformance import SlotBackendTests

__all__ = [
    "GROUPS",
    "Actor",
    "Race",
    "ScriptedDevice",
    "ScriptedEvent",
    "ScriptedStream",
    "ThreadWorkers",
    "block_key",
    "block_names",
    "make_block",
    "open_backend",
    "open_context",
    "records_in_files",
]
if find_spec("pytest") is not None:  # else who asks for them hears of the extra; `help` and ``import *`` ask for all
    __all__ += ["BackendTests", "PolicyTests", "SlotBackendTests"]

_SUITES = {
    "BackendTests": "tiered_kv.testing.conformance",
    "PolicyTests": "tiered_kv.testing.policy_conformance",
    "SlotBackendTests": "tiered_kv.testing.slot_conformance",
}


def __getattr__(name: str) -> object:
    """Import a suite when it is asked for."""
    if name not in _SUITES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        pytest = import_module("pytest")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{name} needs pytest: pip install 'tiered-kv[testing]'", name="pytest") from error
    pytest.register_assert_rewrite(*_SUITES.values())  # or a failure would show no values; before their import
    return getattr(import_module(_SUITES[name]), name)
