"""What a server and its clients say to each other is written down: whoever changes it changes the version."""

import dataclasses
import difflib
import typing
from enum import Enum
from pathlib import Path

import msgspec
import pytest

from tiered_kv.host import protocol, wire
from tiered_kv.host.asked_calls import CALLS
from tiered_kv.values.errors import Reason, TierFault
from tiered_kv.values.layout import KVGroup

PAGE = Path(__file__).parents[2] / "docs" / "format.md"
WRITTEN = Path(__file__).parents[1] / "data" / "wire.txt"


def declared(union: object) -> str:
    """Return a line for each message: its tag, and its fields in their order."""
    kinds: tuple[type[wire.Message], ...] = typing.get_args(union)
    infos = sorted((str(kind.__struct_config__.tag), kind) for kind in kinds)
    fields = {tag: " ".join(each.name for each in msgspec.structs.fields(kind)) for tag, kind in infos}
    return "".join(f"{tag:<15}{names}".rstrip() + "\n" for tag, names in fields.items())


def callable_by_clients() -> str:
    """Return a line for each call of the face that a client may make: its name, and its arguments in their order."""
    return "".join(f"{name:<15}{' '.join(call.arguments)}".rstrip() + "\n" for name, call in sorted(CALLS.items()))


def fields_of(kind: type) -> tuple[str, ...]:
    """Return the names of the fields of a class whose values pass; none of another type."""
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    return tuple(each.name for each in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


def within(*hints: object) -> dict[str, str]:
    """Return what may be within messages of these types: by name the fields of each class, the values of each enum."""
    found: dict[str, str] = {}
    for hint in hints:
        found |= within(*typing.get_args(hint))
        if not isinstance(hint, type):
            continue
        if issubclass(hint, Enum):
            found[hint.__name__] = " | ".join(str(each.value) for each in hint)
        elif fields := fields_of(hint):
            types = typing.get_type_hints(hint)
            found |= within(*(types[name] for name in fields))
            if not issubclass(hint, wire.Message):
                found[hint.__name__] = " ".join(fields)
    return found


def passing() -> str:
    """Return a line for each kind of value that passes, within messages and as an argument or an answer of a call."""
    unions = (protocol.Opening, protocol.Opened, protocol.Request, protocol.Reply)
    found = within(*unions, KVGroup, *(each for call in CALLS.values() for each in call.passed))
    return "".join(f"{name} {fields}\n" for name, fields in sorted(found.items()))


def test_what_is_written_down_is_what_is_said() -> None:
    """Each message, call and value with its fields: no side takes another version for its own, or cannot read it."""
    unions = (protocol.Opening, protocol.Opened, protocol.Request, protocol.Reply)
    said = f"Version {wire.VERSION}\n\n" + "\n".join([*map(declared, unions), callable_by_clients(), passing()])
    written, new = WRITTEN.read_text().splitlines(), said.splitlines()
    names = "tests/data/wire.txt", "what it is to say once the version has gone up"
    if changed := list(difflib.unified_diff(written, new, *names, n=0, lineterm="")):
        pytest.fail("\n".join(changed), pytrace=False)
    assert f"on a Unix socket. Version {wire.VERSION}." in PAGE.read_text()


def test_a_text_that_is_none_hides_nothing_else() -> None:
    """What a medium says of a file whose name is of any bytes comes as Python shows it, and all beside it as said."""
    fault = TierFault("disk", Reason.FAILED, 3, "no caf\udce9 there")
    told = protocol.Loaded(7, 3, {"cpu": 3}, 4096, 0.5, (fault,), "failed", bytes(range(8)))
    heard = protocol.reply_from(wire.frame(told)[wire.LENGTH.size :])
    shown = dataclasses.replace(fault, detail="no caf\\udce9 there")
    assert heard == msgspec.structs.replace(told, faults=(shown,))


@pytest.mark.parametrize("said", [b"x", bytearray(b"x"), memoryview(b"x"), {("a", 1): 2}, {b"x": {1, 2}}, [None, 1.5]])
def test_a_text_that_is_none_changes_nothing_beside_it(said: object) -> None:
    """A medium may say anything of itself: bytes stay bytes, and what has several parts may be a name."""
    beside, whole = (msgspec.msgpack.decode(wire.encoded([said, text])) for text in ("caf\udce9", "caf"))
    assert beside == [whole[0], "caf\\udce9"]
