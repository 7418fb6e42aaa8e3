"""One tier of peers.py, in a process and an environment of its own: ``_peer.py MODULE NAME FOLDER SPACE``.

It answers a line of JSON when it is open, and one for each line of stdin: what a turn took.
"""

import abc
import gc
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Space:
    """What is stored and loaded.

    Attributes:
        block_bytes: Of a block.
        num_blocks: Of all requests.
        num_requests: That come at once.
    """

    block_bytes: int
    num_blocks: int
    num_requests: int

    @property
    def num_bytes(self) -> int:
        """Of all blocks."""
        return self.num_blocks * self.block_bytes

    def requests(self, turn: int) -> Sequence[range]:
        """Return which blocks each request of a turn is about: no other turn's."""
        each, start = self.num_blocks // self.num_requests, turn * self.num_blocks
        return [range(first, first + each) for first in range(start, start + self.num_blocks, each)]

    def contents(self) -> Iterator[Row]:
        """Yield what the blocks hold, each something else."""
        common = np.random.default_rng(1).integers(0, 256, self.block_bytes, np.uint8)
        for number in range(self.num_blocks):
            yield np.roll(common, 61 * number)


class Peer(abc.ABC):
    """One tier, opened, and the memory that its engine has on a CPU. Only `store` and `load` are timed.

    Attributes:
        says: Whose version it is, and how it reads and writes.
    """

    says: str

    @abc.abstractmethod
    def __init__(self, folder: Path, space: Space) -> None:
        """Open it, with files below a folder that is there."""

    @abc.abstractmethod
    def fill(self, contents: Iterable[Row], requests: Sequence[range]) -> None:
        """Have the blocks in the engine's memory; no tier has had blocks of these numbers."""

    @abc.abstractmethod
    def store(self) -> None:
        """Store all blocks, request by request, and return when the tier has told that it has them."""

    @abc.abstractmethod
    def blank(self) -> None:
        """Have zeros in the engine's memory, and nothing in any memory above the tier's files."""

    @abc.abstractmethod
    def load(self) -> None:
        """Find and load all blocks, request by request, and return when all are in the engine's memory."""

    @abc.abstractmethod
    def blocks(self) -> Iterable[Row]:
        """Give what the engine's memory has of each block."""

    @abc.abstractmethod
    def close(self) -> None:
        """End it."""


def turn(peer: Peer, folder: Path, space: Space, number: int) -> Mapping[str, float]:
    """Store all and load it twice; return the seconds, and those of processor time. Writes of others have ended."""
    found: dict[str, float] = {}

    def timed(name: str, call: Callable[[], None]) -> None:
        cpu_s, start = _cpu_s(), time.perf_counter()
        call()
        found[name] = time.perf_counter() - start
        found[f"{name}_cpu"] = _cpu_s() - cpu_s

    peer.fill(space.contents(), space.requests(number))
    os.sync()
    timed("store", peer.store)
    timed("flush", os.sync)
    for name in ("load", "load_cold"):
        if name == "load_cold":
            forget_pages(folder)
        peer.blank()
        timed(name, peer.load)
        pairs = zip(peer.blocks(), space.contents(), strict=True)
        if num_wrong := sum(not np.array_equal(*pair) for pair in pairs):
            sys.exit(f"{name}: {num_wrong} of {space.num_blocks} blocks are not what was stored")
    return found


def forget_pages(folder: Path) -> None:
    """Have the page cache drop all files in a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(module: str, name: str, folder: Path, space: Space) -> None:
    """Open the tier, have a turn that is not told, for places of the disk are slow the first time, and then those."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print
    kind: type[Peer] = importlib.import_module(module).PEERS[name]
    peer = kind(folder, space)
    turn(peer, folder, space, 0)
    gc.collect()
    gc.freeze()  # as engines do once they have started: else it stops one tier or another meanwhile
    print(json.dumps(peer.says), file=answers, flush=True)
    for number, _ in enumerate(sys.stdin, 1):
        print(json.dumps(turn(peer, folder, space, number)), file=answers, flush=True)
    peer.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Space(**json.loads(sys.argv[4])))
