"""What a server and its clients say to each other is written down: whoever changes it changes the version."""

import typing
from pathlib import Path

import msgspec

from tiered_kv.host import protocol, wire
from tiered_kv.host.asked_calls import CALLS

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


def test_what_is_written_down_is_what_is_said() -> None:
    """Each message with its fields, each call with its arguments: no side takes another version for its own."""
    unions = (protocol.Opening, protocol.Opened, protocol.Request, protocol.Reply)
    said = f"Version {wire.VERSION}\n\n" + "\n".join([*map(declared, unions), callable_by_clients()])
    assert WRITTEN.read_text() == said, f"{WRITTEN.name} is to say, once the version has gone up:\n{said}"
    assert f"on a Unix socket. Version {wire.VERSION}." in PAGE.read_text()
