"""Writing a trace, as `read_trace` reads it: Mooncake's format, with ``block_size`` and what else is known."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

from tiered_kv.traces.requests import Request, Trace


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace; gzip if the path ends in ``.gz``.

    Raises:
        OSError: It cannot be written.
    """
    with path.open("wb") as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as packed:  # equal traces, equal files
                packed.writelines(lines_of(trace.requests, trace.block_size))
        else:
            raw.writelines(lines_of(trace.requests, trace.block_size))


def lines_of(requests: Iterable[Request], block_size: int) -> Iterable[bytes]:
    """Yield the line of each request."""
    for each in requests:
        line: dict[str, object] = {
            "timestamp": round(each.at_s * 1e3, 3),
            "input_length": each.input_tokens,
            "output_length": each.output_tokens,
            "hash_ids": each.ids.tolist(),
            "block_size": block_size,
        }
        if each.session is not None:
            line |= {"session": each.session, "turn": each.turn}
        if each.category:
            line["type"] = each.category
        yield json.dumps(line).encode() + b"\n"
