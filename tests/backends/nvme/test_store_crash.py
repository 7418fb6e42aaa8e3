"""kill -9 of a writing process, again and again. Run as a script this file is that process's parent."""

import asyncio
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tests.support.programs import started
from tiered_kv.media.backend import Block, Outcome
from tiered_kv.media.record import verify
from tiered_kv.testing import GROUPS, block_key, block_names, make_block, open_context
from tiered_kv_backends.nvme import NVMeBackend

GROUP = len(GROUPS) - 1
NUM_LIVES = 50
BATCH = 8


def content(n: int) -> bytes:
    """Return the bytes of block ``n``: no two are alike anywhere."""
    return np.random.default_rng(n).bytes(GROUPS[GROUP].payload_bytes)


def batch_of(life: int, number: int, num_slots: int) -> dict[int, int]:
    """Return what the ``number``-th write of a life is: ``{slot: n}``, each block a new one."""
    slots = np.random.default_rng([life, number]).choice(num_slots, BATCH, replace=False)
    return {slot: life * 1_000_000 + number * BATCH + i for i, slot in enumerate(slots.tolist())}


def is_forgetting(number: int) -> bool:
    """Whether the ``number``-th step of a life forgets what the step before it wrote."""
    return number % 4 == 3


def backend_at(path: Path) -> NVMeBackend:
    """Return the tier that all lives share, small enough that slots are written over."""
    return NVMeBackend(NVMeBackend.Settings(path=path, capacity="16MiB", num_threads=4))


async def write_until_killed(path: Path, life: int, acknowledged: int) -> None:
    """Write batches and forget some for ever, and write a byte to a pipe after each."""
    backend = backend_at(path)
    with open_context(GROUPS[GROUP]) as context:
        (found,) = await backend.open(context)
        for number in range(1_000_000):
            if is_forgetting(number):
                await backend.forget(0, np.array(list(batch_of(life, number - 1, found.num_slots))))
                os.write(acknowledged, b"x")
                continue
            batch = batch_of(life, number, found.num_slots)
            keys = [block_key(n, GROUP) for n in batch.values()]
            blocks = [make_block(content(n), key) for n, key in zip(batch.values(), keys, strict=True)]
            assert set(await backend.write(0, np.array(list(batch)), block_names(keys), blocks)) == {Outcome.STORED}
            os.write(acknowledged, b"x")


def run_lives() -> None:
    """For each delay read, start a writer, kill it that long after its first write, say how many were acknowledged."""
    path = Path(sys.argv[1])
    for life, line in enumerate(sys.stdin):
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            asyncio.run(write_until_killed(path, life, writer))
        os.close(writer)
        num_acknowledged = len(os.read(reader, 1))
        time.sleep(float(line))  # the moment of death: nothing waits for it
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while received := os.read(reader, 65536):
            num_acknowledged += len(received)
        os.close(reader)
        sys.stdout.write(f"{num_acknowledged}\n")
        sys.stdout.flush()


@pytest.mark.slow
def test_after_kill_every_block_found_is_whole(tmp_path: Path) -> None:
    """Whatever moment a writer is killed at, each acknowledged block is there byte for byte, and no other bytes are.

    What it was told to forget stays away. Every other time a byte of the ledger is flipped before the restart, which
    changes nothing of that.
    """
    rng = np.random.default_rng(50)
    history = History()
    with started(__file__, tmp_path) as lives:
        for life, delay in enumerate(rng.uniform(0, 0.04, NUM_LIVES).tolist()):
            lives.stdin.write(f"{delay}\n")
            lives.stdin.flush()
            num_acknowledged = int(lives.stdout.readline())
            assert num_acknowledged
            if life % 2:
                flip_a_byte(next(tmp_path.glob("*/ledger")), rng)
            asyncio.run(check(tmp_path, life, num_acknowledged, history))
    assert history.forgotten


@dataclass
class History:
    """What all lives so far have done."""

    expected: dict[int, int] = field(default_factory=dict)
    """What is there, as ``{slot: n}``."""
    names: dict[bytes, int] = field(default_factory=dict)
    """The number of each block ever written."""
    forgotten: set[int] = field(default_factory=set)
    """The numbers of blocks that must not come back."""

    def apply(self, life: int, num_acknowledged: int, num_slots: int) -> set[int]:
        """Do what a life did; return the slots of what it was doing when it was killed."""
        for number in range(num_acknowledged + 1):
            batch = batch_of(life, number - is_forgetting(number), num_slots)
            if number == num_acknowledged:
                self.names |= {} if is_forgetting(number) else _names_of(batch)
                return set(batch)
            if is_forgetting(number):
                self.forgotten |= set(batch.values())
                self.expected = {slot: n for slot, n in self.expected.items() if slot not in batch}
            else:
                self.names |= _names_of(batch)
                self.expected |= batch
        raise AssertionError


def _names_of(batch: dict[int, int]) -> dict[bytes, int]:
    return {block_names([block_key(n, GROUP)]).tobytes(): n for n in batch.values()}


def flip_a_byte(path: Path, rng: np.random.Generator) -> None:
    """Flip a byte of a file somewhere."""
    with path.open("r+b") as file:
        at = int(rng.integers(path.stat().st_size))
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))


async def check(path: Path, life: int, num_acknowledged: int, history: History) -> None:
    """Open and compare with the history, after what a life did to it; go on from what was found.

    Args:
        path: The tier's directory.
        life: Which one has ended.
        num_acknowledged: Steps that it knew to be done.
        history: Of all lives; this one's is added.
    """
    backend = backend_at(path)
    with open_context(GROUPS[GROUP]) as context:
        (found,) = await backend.open(context)
        interrupted = history.apply(life, num_acknowledged, found.num_slots)
        into = [Block.empty(GROUPS[GROUP].payload_bytes) for _ in found.slots]
        await backend.read(0, found.slots, into)
        await backend.aclose()
    hits = {}
    for name, slot, block in zip(found.names, found.slots.tolist(), into, strict=True):
        n = history.names[name.tobytes()]
        if verify(block_key(n, GROUP), block) is Outcome.HIT:
            assert bytes(block.payload) == content(n)
            hits[slot] = n
    assert not history.forgotten.intersection(hits.values())
    certain = history.expected.keys() - interrupted
    assert {slot: hits.get(slot) for slot in certain} == {slot: history.expected[slot] for slot in certain}
    history.expected = hits


if __name__ == "__main__":
    run_lives()
