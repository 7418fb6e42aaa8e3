"""The NVMe tier against a bare loop of direct I/O of the same size, depth, threads and alignment, in the same run.

Ours is what a store or a load does: encode each record and write it, or read it and verify it, in batches that are all
under way at once. The bare loop moves the same bytes, one `preadv` or `pwritev` a block, in as many threads, and
looks at none of them. The backend alone, without checksums, shows what of the difference is hashing: it matters where
the disk is fast and cores are few. Encrypted, a payload goes through memory of its own on its way to the disk,
and is decrypted in place on its way back; that is compared with ours without keys. Rounds of all these alternate, and a
ratio is the median over rounds, since a disk drifts.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiered_kv.media.backend import Block, Outcome, RecordShape
from tiered_kv.media.record import encode, verify
from tiered_kv.media.seal import Seal
from tiered_kv.testing import ThreadWorkers, block_names, open_backend
from tiered_kv.tiers.records import SpareBlocks
from tiered_kv.values.keys import BlockKey, Namespace
from tiered_kv_backends.nvme import NVMeBackend

SIZES = {"2MiB": 2 << 20, "128KiB": 128 << 10}
NUM_BYTES = 512 << 20
"""Of one round, and of the buffers."""
BATCH_BYTES = 16 << 20
"""Of one call of ours."""
NUM_THREADS = 8
BARS = {"read_2MiB": 0.98, "write_2MiB": 0.95, "read_128KiB": 0.8, "write_128KiB": 0.8}


@contextmanager
def bare_loop(
    path: Path, blocks: Sequence[Sequence[memoryview]], stride_bytes: int
) -> Iterator[Callable[[bool], float]]:
    """Yield a function that writes or reads all blocks, each by one call at its own offset, and returns the seconds."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0)
    try:
        fd = os.open(path, flags, 0o600)
    except OSError:  # where the tier goes through the page cache too
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(fd, 0, len(blocks) * stride_bytes)

    def move(first: int, *, is_write: bool) -> None:
        call = os.pwritev if is_write else os.preadv
        for i in range(first, len(blocks), NUM_THREADS):
            if call(fd, blocks[i], i * stride_bytes) != stride_bytes:
                raise OSError("a short call")

    def run(is_write: bool) -> float:  # noqa: FBT001 - the only argument
        threads = [threading.Thread(target=move, args=(i,), kwargs={"is_write": is_write}) for i in range(NUM_THREADS)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    try:
        yield run
    finally:
        os.close(fd)
        path.unlink()


class Ours:
    """The tier as the cache uses it: many batches under way, headers made and checked in threads."""

    def __init__(self, backend: NVMeBackend, shape: RecordShape, blocks: Sequence[Block]) -> None:
        space = Namespace(shape.fingerprint, epoch=bytes(32))
        self.backend = backend
        self.blocks = blocks
        self.keys = [BlockKey(space, i.to_bytes(32, "little")) for i in range(len(blocks))]
        self.names = block_names(self.keys)
        self.slots = np.arange(len(blocks))
        self.spare_blocks = SpareBlocks(shape)
        self.workers = ThreadWorkers(os.cpu_count() or 1)
        batch = max(1, BATCH_BYTES // shape.stride_bytes)
        self.batches = [slice(start, start + batch) for start in range(0, len(blocks), batch)]

    async def write(self, batch: slice, *, with_checksums: bool, seal: Seal | None) -> None:
        """Encode and write one batch."""
        keys, blocks = self.keys[batch], self.blocks[batch]
        if seal is not None:
            staged = self.spare_blocks.take(len(blocks))
            await self.workers.run(encode_all, keys, blocks, staged, seal)
            outcomes = await self.backend.write(0, self.slots[batch], self.names[batch], staged)
            self.spare_blocks.give(staged)
        else:
            if with_checksums:
                await self.workers.run(encode_all, keys, blocks, blocks)
            outcomes = await self.backend.write(0, self.slots[batch], self.names[batch], blocks)
        if set(outcomes) != {Outcome.STORED}:
            raise OSError("a block was not stored")

    async def read(self, batch: slice, *, with_checksums: bool, seal: Seal | None) -> None:
        """Read and verify one batch."""
        keys, blocks = self.keys[batch], self.blocks[batch]
        outcomes = await self.backend.read(0, self.slots[batch], blocks)
        if with_checksums:
            outcomes = await self.workers.run(verify_all, keys, blocks, seal)
        if set(outcomes) != {Outcome.HIT}:
            raise OSError("a block did not come back")

    async def run(self, *, is_write: bool, with_checksums: bool = True, seal: Seal | None = None) -> float:
        """Move all blocks and return the seconds."""
        move = self.write if is_write else self.read
        start = time.perf_counter()
        await asyncio.gather(*(move(batch, with_checksums=with_checksums, seal=seal) for batch in self.batches))
        return time.perf_counter() - start


def encode_all(
    keys: Sequence[BlockKey], blocks: Sequence[Block], into: Sequence[Block], seal: Seal | None = None
) -> None:
    """Make a record of each block."""
    for key, block, record in zip(keys, blocks, into, strict=True):
        encode(key, record, seal=seal, payload=block.payload)


def verify_all(keys: Sequence[BlockKey], blocks: Sequence[Block], seal: Seal | None) -> list[Outcome]:
    """Verify each record, in place."""
    return [verify(key, block, seal=seal) for key, block in zip(keys, blocks, strict=True)]


@dataclass
class Found:
    """Medians: GB/s, and ratios to the bare loop within a round."""

    ours: float
    bare: float
    ratio: float
    ratio_without_checksums: float
    encrypted: float
    """Ours with encryption over ours without."""


async def compare(folder: Path, payload_bytes: int, num_rounds: int) -> dict[str, Found]:
    """Measure one size of block in both directions."""
    shape = RecordShape(bytes([payload_bytes >> 12 & 255]) * 32, payload_bytes)
    num_blocks = NUM_BYTES // shape.stride_bytes
    blocks = [Block.empty(payload_bytes) for _ in range(num_blocks)]
    generator = np.random.default_rng(1)
    for block in blocks:
        block.payload[:] = generator.bytes(payload_bytes)
    settings = NVMeBackend.Settings(path=folder / "tier", capacity=2 * NUM_BYTES, num_threads=NUM_THREADS)
    seal = Seal([os.urandom(32)])
    rounds: dict[bool, list[list[float]]] = {True: [], False: []}
    async with open_backend(NVMeBackend(settings), shape) as backend:
        with bare_loop(folder / "bare", [(each.header, each.padded) for each in blocks], shape.stride_bytes) as bare:
            ours = Ours(backend, shape, blocks)
            print(f"io: {backend.describe()['io']} {backend.describe()['io_reason']}")
            await ours.run(is_write=True)  # fresh places of the disk are slow the first time
            bare(True)  # noqa: FBT003 - as above
            for _ in range(num_rounds):
                for is_write, seconds in rounds.items():
                    whole_s = await ours.run(is_write=is_write)
                    bare_s = bare(is_write)
                    alone_s = await ours.run(is_write=is_write, with_checksums=False)
                    seconds.append([whole_s, bare_s, alone_s])
                for is_write, seconds in rounds.items():  # after the others: what it writes, only it can read
                    seconds[-1].append(await ours.run(is_write=is_write, seal=seal))
            ours.workers.close()
    return {
        "read": summarize(rounds[False], num_blocks * shape.stride_bytes),
        "write": summarize(rounds[True], num_blocks * shape.stride_bytes),
    }


def summarize(rounds: list[list[float]], num_bytes: int) -> Found:
    """Return the medians of (ours, bare, ours without checksums, ours encrypted), in seconds."""
    return Found(
        ours=num_bytes / 1e9 / statistics.median(ours for ours, _, _, _ in rounds),
        bare=num_bytes / 1e9 / statistics.median(bare for _, bare, _, _ in rounds),
        ratio=statistics.median(bare / ours for ours, bare, _, _ in rounds),
        ratio_without_checksums=statistics.median(bare / alone for _, bare, alone, _ in rounds),
        encrypted=statistics.median(ours / sealed for ours, _, _, sealed in rounds),
    )


def main() -> None:
    """Compare both sizes, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path, default=Path(), help="a folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    ratios = {}
    print(f"{'':<12} {'ours':>6} {'bare':>6} GB/s {'ratio':>6} {'bar':>5} {'without checksums':>18} {'encrypted':>9}")
    for name, payload_bytes in SIZES.items():
        with tempfile.TemporaryDirectory(dir=options.path, prefix=".nvme-benchmark-") as folder:
            found = asyncio.run(compare(Path(folder), payload_bytes, options.rounds))
        for way, row in found.items():
            key = f"{way}_{name}"
            ratios[f"{key}_over_ceiling"] = round(row.ratio, 3)
            ratios[f"{key}_without_checksums"] = round(row.ratio_without_checksums, 3)
            ratios[f"{key}_encrypted_over_plain"] = round(row.encrypted, 3)
            numbers = f"{row.ours:6.2f} {row.bare:6.2f}      {row.ratio:6.2f} {BARS[key]:5.2f}"
            print(f"{key:<12} {numbers} {row.ratio_without_checksums:18.2f} {row.encrypted:9.2f}")
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
