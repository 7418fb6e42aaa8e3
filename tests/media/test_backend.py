"""What a class must have to be a backend."""

import pytest

from tiered_kv import Backend, ConfigurationError, SlotBackend
from tiered_kv_backends.memory import MemoryBackend


def _method(_: object) -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    ("name", "meant"),
    [("close", "aclose"), ("shutdown", "aclose"), ("lookup_prefixes", "lookup_prefix"), ("locates", "locate")],
)
@pytest.mark.parametrize("base", [MemoryBackend, Backend])
def test_what_looks_like_a_method_of_the_interface_is_refused(base: type[Backend], name: str, meant: str) -> None:
    """Nobody would call it: the class says so when it is made, and what it is to be called."""
    with pytest.raises(ConfigurationError, match=f"^Mine has {name}, which no cache calls: call it {meant}, "):
        type("Mine", (base,), {name: _method})


def test_a_slot_backend_is_held_to_its_own_names() -> None:
    """Those of the interface that it implements."""
    with pytest.raises(ConfigurationError, match="resized, which no cache calls: call it resize"):
        type("Mine", (SlotBackend,), {"resized": _method})


def test_helpers_have_any_other_name() -> None:
    """What begins with an underscore is a class's own, and so is what stands beside the method that it helps."""
    type(
        "Mine",
        (MemoryBackend,),
        {"_close": None, "connect": None, "aclose": _method, "close": _method},
    )
