"""Read blocks where they are, without a cache: all it takes is a spec and `parse_record`.

    pip install '.[s3]'
    python examples/read_blocks.py [folder]

An engine stores a prompt in an NVMe directory and in an object store, here a folder; a bucket differs by its URL alone.
A lookup says which bytes of which files and objects the blocks' records are. Then another process, which gets these
specs and no more, reads the records and compares them with what the engine has computed. So can a backup or a program
in another language: ``docs/format.md`` has the record.
"""

import asyncio
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import obstore
import torch
from obstore.store import from_url

from tiered_kv import (
    BlockKey,
    FileLoadStoreSpec,
    GPULoadStoreSpec,
    KVLayout,
    LoadStoreSpec,
    ModelIdentity,
    Namespace,
    ObjectLoadStoreSpec,
    TieredKV,
    hash_blocks,
    parse_record,
)

NUM_BLOCKS = 20
KEYS = hash_blocks(range(NUM_BLOCKS * 16), block_size=16, salt="tenant-7")


def records_at(spec: LoadStoreSpec | None) -> Iterator[bytes]:
    """Yield the bytes that a spec names, in the order of its blocks."""
    match spec:
        case FileLoadStoreSpec():
            for path, offset, length in spec.places():
                with Path(path).open("rb") as file:
                    file.seek(offset)
                    yield file.read(length)
        case ObjectLoadStoreSpec():
            store = from_url(spec.url)  # for S3 with credentials of one's own, and spec.endpoint
            for name, offset, length in spec.places():
                yield bytes(obstore.get_range(store, name, start=offset, length=length))
        case _:
            raise NotImplementedError(
                f"memory, a server with a client of its own, or a medium that cannot tell: {spec}"
            )


def check(spec: LoadStoreSpec | None, namespace: Namespace, computed: list[bytes]) -> str:
    """Read all blocks and compare them with the bytes that the engine has computed."""
    is_right = True
    for digest, wanted, data in zip(KEYS, computed, records_at(spec), strict=True):
        record = parse_record(data)  # raises unless every byte is right
        is_right &= record.key == BlockKey(namespace, digest)  # this block, not what may be there by now
        is_right &= record.payload == wanted
    return f"{len(computed)} blocks by {type(spec).__name__}, the engine's bytes: {is_right}"


async def store(tier: dict[str, object], kv_caches: list[torch.Tensor]) -> tuple[LoadStoreSpec | None, Namespace]:
    """Store the engine's first blocks in one medium; return where they are there, and whose they are."""
    layout = KVLayout.from_tensors(kv_caches, block_size=16)
    model = ModelIdentity("example", weights="random")
    async with TieredKV([{"medium": "cpu", "capacity": 0}, tier], model=model, layout=layout) as kv:
        kv.register_kv_caches(kv_caches)
        await kv.store(KEYS, GPULoadStoreSpec(range(NUM_BLOCKS)))
        await kv.flush()
        (run,) = (await kv.lookup(KEYS, where=True)).runs
        return run.spec, kv.namespace("tenant-7")


def main(folder: Path) -> None:
    """Store and close; then read in another process."""
    torch.manual_seed(0)  # another run finds the same KV in the same folder
    kv_caches = [torch.randn(2, 64, 16, 4, 32) for _layer in range(4)]  # K and V, blocks, tokens, heads, dimension
    # A block's payload: for each layer K and V, each with the tokens in the engine's order.
    computed = [b"".join(layer[:, n].numpy().tobytes() for layer in kv_caches) for n in range(NUM_BLOCKS)]
    nvme: dict[str, object] = {"medium": "nvme", "path": folder / "nvme", "capacity": "64MiB"}
    objects: dict[str, object] = {"medium": "s3", "url": f"file://{folder.absolute()}/objects"}
    with multiprocessing.get_context("spawn").Pool(1) as reader:
        for tier in (nvme, objects):
            spec, namespace = asyncio.run(store(tier, kv_caches))
            print(reader.apply(check, (spec, namespace, computed)))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else scratch))
