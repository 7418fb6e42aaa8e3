"""What a class must have to be a backend."""

from collections.abc import Awaitable
from functools import wraps

import pytest

from tiered_kv import Backend, ConfigurationError, SlotBackend
from tiered_kv_backends.memory import MemoryBackend


def _method(_: object) -> None:
    """Do nothing."""


async def _awaited(_: object) -> None:
    """Do nothing, and be awaited."""


@wraps(_awaited)
def _decorated(given: object) -> Awaitable[None]:
    return _awaited(given)


@wraps(_method)
async def _in_a_thread(given: object) -> None:
    _method(given)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("close", "aclose"), ("shutdown", "aclose"), ("lookup_prefixes", "lookup_prefix"), ("locates", "locate")],
)
@pytest.mark.parametrize("base", [MemoryBackend, Backend])
def test_what_looks_like_a_method_of_the_interface_is_refused(base: type[Backend], name: str, meant: str) -> None:
    """Nobody would call it: the class says so when it is made, and what it is to be called."""
    with pytest.raises(ConfigurationError, match=f"^Mine has {name}, which no cache calls: call it {meant}, "):
        type("Mine", (base,), {name: _method})


@pytest.mark.parametrize("name", ["open", "lookup", "lookup_prefix", "locate", "read", "write", "delete", "aclose"])
def test_what_is_awaited_is_async(name: str) -> None:
    """Else each call would fail, by an error of Python's: the class says so when it is made."""
    with pytest.raises(ConfigurationError, match=rf"^Mine\.{name} must be async def"):
        type("Mine", (MemoryBackend,), {name: _method})
    for decorated in (_decorated, _in_a_thread):
        type("Mine", (MemoryBackend,), {name: decorated})


def test_a_slot_backend_is_held_to_its_own_names() -> None:
    """Those of the interface that it implements."""
    with pytest.raises(ConfigurationError, match="resized, which no cache calls: call it resize"):
        type("Mine", (SlotBackend,), {"resized": _method})


def test_helpers_have_any_other_name() -> None:
    """What begins with an underscore is a class's own, and so is what stands beside the method that it helps."""
    type(
        "Mine",
        (MemoryBackend,),
        {"_close": None, "connect": None, "aclose": _awaited, "close": _method},
    )
