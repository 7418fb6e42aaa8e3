"""The page about formats says what is said: every message of a server and its clients, field by field."""

import typing
from pathlib import Path

import msgspec

from tiered_kv.host import protocol, wire
from tiered_kv.host.asked_calls import CALLS

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


def declared(union: object) -> str:
    """Return a line for each message: its tag, and its fields in their order."""
    kinds: tuple[type[wire.Message], ...] = typing.get_args(union)
    infos = sorted((str(kind.__struct_config__.tag), kind) for kind in kinds)
    fields = {tag: " ".join(each.name for each in msgspec.structs.fields(kind)) for tag, kind in infos}
    return "".join(f"{tag:<15}{names}".rstrip() + "\n" for tag, names in fields.items())


def callable_by_clients() -> str:
    """Return a line for each call of the face that a client may make: its name, and its arguments in their order."""
    return "".join(f"{name:<15}{' '.join(call.arguments)}".rstrip() + "\n" for name, call in sorted(CALLS.items()))


def test_the_page_lists_every_call_that_a_client_may_make() -> None:
    """With its arguments: one that gets another changes what is said, and so the version."""
    said = callable_by_clients()
    assert f"```text\n{said}```" in PAGE.read_text(), f"docs/format.md is to say:\n{said}"


def test_the_page_lists_every_message_and_its_fields() -> None:
    """Whoever changes one changes the page, and the version: sides of two versions must not take one for the other."""
    page = PAGE.read_text()
    for union in (protocol.Opening, protocol.Opened, protocol.Request, protocol.Reply):
        assert f"```text\n{declared(union)}```" in page, f"docs/format.md is to say:\n{declared(union)}"
    assert f"on a Unix socket. Version {wire.VERSION}." in page
