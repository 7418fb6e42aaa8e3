"""Which directories have been used together as one tier, so that none brings back what was evicted while it was away.

Each directory of several has a file ``member``: an identity of its own, and those of all that were in use when one came
or went last, under a number that counts these times. The highest number says who belongs together. Whoever is not named
there was away while blocks may have been evicted, and begins empty.

Killed at any moment, all directories that were in use stay what they were: the first one that has the new number names
the others, whether they have it yet or not.
"""

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, TypeAdapter, ValidationError

from tiered_kv.system import files, system
from tiered_kv_backends.nvme.directory import explained, folders_in, taken
from tiered_kv_backends.nvme.own_files import open_file, open_root

_NAME: Final = "member"
_MAX_BYTES: Final = 4096


@dataclass(frozen=True)
class Member:
    """What a directory says of itself.

    Attributes:
        id: Its identity: 16 hexadecimal digits.
        turn: How often directories had come or gone; 0 in one that was never used with others.
        ids: Of those in use since.
    """

    id: str = field(default_factory=lambda: system().token_bytes(8).hex())
    turn: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = 0
    ids: frozenset[str] = frozenset()


_MEMBER = TypeAdapter(Member)


def read_member(path: Path) -> Member:
    """Return what the directory at ``path`` says; it is made if need be. One that says nothing readable is new.

    Raises:
        ConfigurationError: It cannot be read, or is not this user's alone.
    """
    with explained(path), contextlib.ExitStack() as opened:
        root = open_root(path)
        opened.callback(files().close, root)
        if _NAME not in {entry.name for entry in files().entries(root)}:
            return Member()
        file = open_file(root, _NAME)
        opened.callback(files().close, file)
        try:
            return _MEMBER.validate_json(files().pread(file, _MAX_BYTES, 0))
        except ValidationError:
            return Member()


def write_member(path: Path, member: Member) -> None:
    """Have the directory at ``path`` say this, from one moment to the next.

    Raises:
        OSError: It cannot be written.
    """
    with contextlib.ExitStack() as opened:
        root = open_root(path)
        opened.callback(files().close, root)
        file = open_file(root, f"{_NAME}.new", os.O_TRUNC)
        opened.callback(files().close, file)
        said = {"id": member.id, "turn": member.turn, "ids": sorted(member.ids)}
        files().pwrite(file, json.dumps(said).encode(), 0)
        files().fsync(file)
        files().rename(f"{_NAME}.new", _NAME, dir_fd=root)


def are_settled(members: Sequence[Member]) -> bool:
    """Whether just these were in use together last."""
    if len(members) == 1 and not members[0].turn:
        return True  # a tier of one directory, as it always was
    ids = frozenset(member.id for member in members)
    return all(member.ids == ids and member.turn == members[0].turn for member in members)


def next_turn(members: Sequence[Member]) -> list[Member]:
    """Return what each is to say, where just these are in use from now on."""
    turn, ids = 1 + max(member.turn for member in members), frozenset(member.id for member in members)
    return [replace(member, turn=turn, ids=ids) for member in members]


def were_away(members: Sequence[Member]) -> list[bool]:
    """Say which of them were not in use when others were last."""
    latest = max(members, key=lambda member: member.turn, default=Member())
    seen: set[str] = set()
    away = []
    for member in members:
        away.append(latest.turn > 0 and (member.id not in latest.ids or member.id in seen))
        seen.add(member.id)
    return away


def make_empty(path: Path) -> None:
    """Delete all blocks in a directory, of whichever model, and what it says of itself.

    Raises:
        OSError: They cannot be deleted.
        ConfigurationError: It is not this user's alone, or held by another process.
    """
    with taken(path) as root:
        for folder in folders_in(root):
            files().remove_tree(folder, dir_fd=root)
        with contextlib.suppress(FileNotFoundError):
            files().unlink(_NAME, dir_fd=root)
