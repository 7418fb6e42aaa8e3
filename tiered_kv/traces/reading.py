"""Reading and writing traces: JSON lines, plain or gzip, in the format of Mooncake or of Alibaba's Bailian.

Both have ``timestamp``, ``input_length``, ``output_length`` and ``hash_ids``. Mooncake's times are milliseconds and its
blocks 512 tokens. Bailian's times are seconds and its blocks 16 tokens, and it says which request continues which:
``chat_id``, ``parent_chat_id`` (-1 for none), ``turn``, ``type``. What this library records and writes is Mooncake's
format with ``block_size``, and may have ``session``, ``turn`` and ``type``.

Sources: the trace release of R. Qin et al., "Mooncake", FAST 2025; the Qwen-Bailian anonymous dataset of "KVCache Cache
in the Wild", USENIX ATC 2025.
"""

import gzip
import inspect
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import parse_qsl

import numpy as np

from tiered_kv.traces.requests import Ids, Request, Trace
from tiered_kv.traces.synthetic import SYNTHETIC
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.integers import is_number

Format = Literal["mooncake", "bailian"]

_SYNTHETIC: Final = "synthetic:"
_BLOCK_SIZE: Final[dict[Format, int]] = {"mooncake": 512, "bailian": 16}
_UNITS_A_SECOND: Final[dict[Format, float]] = {"mooncake": 1e3, "bailian": 1.0}
_GZIP_MAGIC: Final = b"\x1f\x8b"
_MOST_LINE_BYTES: Final = 1 << 26
_MOST: Final = 2**63 - 1
_MAY_BE_ZERO = {"seed", "exponent", "jitter"}


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no request: its number, from 1 on, and what is wrong with it."""

    number: int
    why: str


def open_trace(
    where: str, *, block_size: int | None = None, on_bad_line: Callable[[BadLine], None] = lambda _: None
) -> Trace:
    """Read a file, or make up what ``"synthetic:chat?num_requests=500"`` says; see `read_trace` and `SYNTHETIC`.

    Raises:
        ConfigurationError: There is no such synthetic trace, or argument of it; or as for `read_trace`.
        OSError: The file cannot be read.
    """
    if not where.startswith(_SYNTHETIC):
        return read_trace(where, block_size=block_size, on_bad_line=on_bad_line)
    name, _, query = where.removeprefix(_SYNTHETIC).partition("?")
    if name not in SYNTHETIC:
        raise ConfigurationError(f"no synthetic trace {name!r}: there are {', '.join(sorted(SYNTHETIC))}")
    arguments = dict(parse_qsl(query, keep_blank_values=True))
    defaults = {key: each.default for key, each in inspect.signature(SYNTHETIC[name]).parameters.items()}
    try:
        given = {key: type(defaults[key])(value) for key, value in arguments.items()}
        if wrong := [key for key, value in given.items() if key not in _MAY_BE_ZERO and not value > 0]:
            raise ValueError(f"{wrong[0]} must be more than 0")  # noqa: TRY301 - told as the others are
        if wrong := [key for key, value in given.items() if not math.isfinite(value)]:
            raise ValueError(f"{wrong[0]} must be finite")  # noqa: TRY301 - as above
        return SYNTHETIC[name](**given)
    except (KeyError, ValueError, ArithmeticError) as error:
        known = ", ".join(f"{key}={value}" for key, value in defaults.items())
        raise ConfigurationError(f"{where}: {error}: after the '?' come numbers for any of {known}") from None


def read_trace(
    path: str | os.PathLike[str],
    *,
    block_size: int | None = None,
    on_bad_line: Callable[[BadLine], None] = lambda _: None,
) -> Trace:
    """Read a whole trace to memory: 8 bytes a block, and some 200 a request. Bad lines are left out.

    Args:
        path: Text or gzip, whatever it is called. The first good line says in which format.
        block_size: Tokens a block; by default what the trace or its format says.
        on_bad_line: Told of each line that is no request.

    Returns:
        The requests, sorted by time, the first one at 0 seconds.

    Raises:
        ConfigurationError: There is no good line in it.
        OSError: It cannot be read.
    """
    reader = _Reader()
    num_bad = 0
    first_bad: BadLine | None = None
    path = Path(path)
    for number, line in _lines(path):
        try:
            if isinstance(line, Exception):
                raise _BadLineError(str(line))  # noqa: TRY301 - the same place tells of every bad line
            if line.strip():
                reader.take(_parsed(line))
        except _BadLineError as error:
            num_bad += 1
            bad = BadLine(number, str(error))
            first_bad = first_bad or bad
            on_bad_line(bad)
    if not reader.requests:
        why = f"; line {first_bad.number}: {first_bad.why}" if first_bad else ""
        raise ConfigurationError(f"{path} has no requests in it ({num_bad} bad lines{why})")
    return Trace(path.name, reader.in_order(), block_size or reader.block_size or _BLOCK_SIZE[reader.format])


class _BadLineError(Exception):
    """A line is no request."""


@dataclass
class _Reader:
    """Makes requests of objects, one after the other."""

    requests: list[Request] = field(default_factory=list)
    format: Format = "mooncake"
    block_size: int = 0
    _roots: dict[int, int] = field(default_factory=dict)

    def take(self, line: Mapping[str, Any]) -> None:
        """Add one request.

        Raises:
            _BadLineError: It is none.
        """
        if not self.requests:
            self.format = "bailian" if "chat_id" in line else "mooncake"
        at_s = _number(line, "timestamp") / _UNITS_A_SECOND[self.format]
        ids = _ids(line)
        input_tokens, output_tokens = _count(line, "input_length"), _count(line, "output_length", default=0)
        turn, category = _count(line, "turn", default=1), str(line.get("type", ""))
        block_size = _count(line, "block_size", default=self.block_size)
        if self.requests and block_size != self.block_size:
            raise _BadLineError(f"block_size is {block_size}, and {self.block_size} before")
        session = self._session(line)
        self.block_size = block_size
        self.requests.append(Request(at_s, ids, input_tokens, output_tokens, session, turn, category))

    def in_order(self) -> list[Request]:
        """Return them by time, from 0 on."""
        first = min(each.at_s for each in self.requests)
        return [replace(each, at_s=each.at_s - first) for each in sorted(self.requests, key=lambda each: each.at_s)]

    def _session(self, line: Mapping[str, Any]) -> int | None:
        """Return the first request of its conversation."""
        if self.format == "mooncake":
            return _count(line, "session") if "session" in line else None
        chat, parent = _count(line, "chat_id"), line.get("parent_chat_id", -1)
        if type(parent) is not int:
            raise _BadLineError(f"parent_chat_id must be an int, got {parent!r:.40}")
        root = chat if parent < 0 else self._roots.get(parent, parent)
        self._roots[chat] = root
        return root


def _lines(path: Path) -> Iterator[tuple[int, bytes | Exception]]:
    """Yield lines and their numbers, and, last, what kept the rest of the file from being read."""
    number = 1
    with path.open("rb") as raw:
        is_gzip = raw.read(2) == _GZIP_MAGIC
        raw.seek(0)
        lines = gzip.GzipFile(fileobj=raw) if is_gzip else raw
        try:
            while line := lines.readline(_MOST_LINE_BYTES):
                yield number, line
                number += 1
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            yield number, error


def _parsed(line: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadLineError(f"no JSON: {error}"[:120]) from None
    if not isinstance(value, dict):
        raise _BadLineError(f"a request is an object, not {type(value).__name__}")
    return value


def _number(line: Mapping[str, Any], name: str) -> float:
    value = line.get(name)
    if not is_number(value) or not 0 <= value < math.inf:
        raise _BadLineError(f"{name} must be a number of 0 or more, got {value!r:.40}")
    return float(value)


def _count(line: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = line.get(name, default)
    if type(value) is not int or not 0 <= value <= _MOST:
        raise _BadLineError(f"{name} must be an int of 0 or more, got {value!r:.40}")
    return value


def _ids(line: Mapping[str, Any]) -> Ids:
    value = line.get("hash_ids")
    if not isinstance(value, list):
        raise _BadLineError(f"hash_ids must be a list, got {value!r:.40}")
    try:
        ids = np.array(value) if value else np.empty(0, np.int64)
    except (ValueError, OverflowError):
        ids = np.empty(0)
    if ids.dtype != np.int64 or ids.ndim != 1 or (ids.size and ids.min() < 0):
        raise _BadLineError("hash_ids must be ints from 0 to 2**63 - 1")
    if len(np.unique(ids)) < len(ids):
        raise _BadLineError("hash_ids names a block twice: each stands for a whole prefix")
    return ids


def write_trace(path: str | os.PathLike[str], trace: Trace) -> None:
    """Write a trace; gzip if the path ends in ``.gz``.

    Raises:
        OSError: It cannot be written.
    """
    path, lines = Path(path), (each.line(trace.block_size) for each in trace.requests)
    with path.open("wb") as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as packed:  # equal traces, equal files
                packed.writelines(lines)
        else:
            raw.writelines(lines)
