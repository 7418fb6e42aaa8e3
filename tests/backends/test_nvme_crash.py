"""kill -9 of a writing process, again and again. Run as a script this file is that process's parent."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.backend import Block, Outcome
from tiered_kv.record import verify
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


def backend_at(path: Path) -> NVMeBackend:
    """Return the tier that all lives share, small enough that slots are written over and the journal is compacted."""
    return NVMeBackend(NVMeBackend.Settings(path=path, capacity="16MiB", num_threads=4))


async def write_until_killed(path: Path, life: int, acknowledged: int) -> None:
    """Write batches for ever, and a byte to a pipe behind each."""
    backend = backend_at(path)
    with open_context(GROUPS[GROUP]) as context:
        (found,) = await backend.open(context)
        for number in range(1_000_000):
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
    """Whatever moment a writer is killed at, each acknowledged block is there byte for byte, and no other bytes are."""
    delays = np.random.default_rng(50).uniform(0, 0.04, NUM_LIVES)
    expected: dict[int, int] = {}
    names: dict[bytes, int] = {}
    with subprocess.Popen(
        [sys.executable, __file__, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as lives:
        assert lives.stdin is not None
        assert lives.stdout is not None
        for life, delay in enumerate(delays.tolist()):
            lives.stdin.write(f"{delay}\n")
            lives.stdin.flush()
            num_acknowledged = int(lives.stdout.readline())
            assert num_acknowledged
            asyncio.run(check(tmp_path, life, num_acknowledged, expected, names))
        lives.stdin.close()


async def check(
    path: Path, life: int, num_acknowledged: int, expected: dict[int, int], names: dict[bytes, int]
) -> None:
    """Open and compare with ``expected``, as ``{slot: n}``, after what a life did to it; leave there what was found.

    Args:
        path: The tier's directory.
        life: Which one has ended.
        num_acknowledged: Batches that it knew to be stored.
        expected: What was there before.
        names: The number of each block ever written; those of this life are added.
    """
    backend = backend_at(path)
    with open_context(GROUPS[GROUP]) as context:
        (found,) = await backend.open(context)
        batches = [batch_of(life, number, found.num_slots) for number in range(num_acknowledged + 1)]
        for batch in batches:
            names |= {block_names([block_key(n, GROUP)]).tobytes(): n for n in batch.values()}
        *acknowledged, interrupted = batches
        for batch in acknowledged:
            expected |= batch
        into = [Block.empty(GROUPS[GROUP].payload_bytes) for _ in found.slots]
        await backend.read(0, found.slots, into)
        await backend.aclose()
    hits = {}
    for name, slot, block in zip(found.names, found.slots.tolist(), into, strict=True):
        n = names[name.tobytes()]
        if verify(block_key(n, GROUP), block) is Outcome.HIT:
            assert bytes(block.payload) == content(n)
            hits[slot] = n
    certain = expected.keys() - interrupted.keys()
    assert {slot: hits.get(slot) for slot in certain} == {slot: expected[slot] for slot in certain}
    expected.clear()
    expected |= hits


if __name__ == "__main__":
    run_lives()
