"""What a trace is made of."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tiered_kv.values.keys import Names

Ids = NDArray[np.int64]
"""Names of the blocks of one prompt in order, ``(n,)``: equal ids are the same block after the same prefix."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request: which blocks its prompt has.

    Attributes:
        at_s: When it came, in seconds.
        ids: Its prompt's blocks. The last one may be partly filled, as its trace has it.
        input_tokens: Of the prompt.
        output_tokens: That were generated.
        session: The conversation that it belongs to, or None where the trace does not say.
        turn: Its place in the conversation, from 1 on.
        category: What the trace calls its kind, e.g. ``"chat"``; or empty.
    """

    at_s: float
    ids: Ids
    input_tokens: int
    output_tokens: int = 0
    session: int | None = None
    turn: int = 1
    category: str = ""

    def line(self, block_size: int) -> bytes:
        """Write it as a line of a trace in the format of Mooncake, see `read_trace`; ``block_size`` in tokens."""
        line: dict[str, object] = {
            "timestamp": round(self.at_s * 1e3, 3),
            "input_length": self.input_tokens,
            "output_length": self.output_tokens,
            "hash_ids": self.ids.tolist(),
            "block_size": block_size,
        }
        if self.session is not None:
            line |= {"session": self.session, "turn": self.turn}
        if self.category:
            line["type"] = self.category
        return json.dumps(line).encode() + b"\n"


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order of their times.

    Attributes:
        name: Where they come from.
        requests: In order.
        block_size: Tokens a block.
    """

    name: str
    requests: Sequence[Request]
    block_size: int

    @cached_property
    def num_references(self) -> int:
        """How many blocks were asked for, repeats counted."""
        return sum(len(each.ids) for each in self.requests)

    @cached_property
    def input_tokens(self) -> int:
        """Of all prompts together."""
        return sum(each.input_tokens for each in self.requests)

    @cached_property
    def num_blocks(self) -> int:
        """How many different blocks there are."""
        return len(np.unique(np.concatenate([each.ids for each in self.requests]))) if self.requests else 0

    @property
    def seconds(self) -> float:
        """From the first request to the last."""
        return self.requests[-1].at_s - self.requests[0].at_s if self.requests else 0.0


def names_of(ids: Ids) -> Names:
    """Return names for the catalog, ``(n, 4)``: the ids themselves, in the first word."""
    names = np.zeros((len(ids), 4), dtype=np.uint64)
    names[:, 0] = ids
    return names
