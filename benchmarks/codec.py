"""The codec ``exponent`` beside zstd on byte planes and ZipNN: how small, and how fast, on one thread.

KV of real text is made by a real model, all-MiniLM-L6-v2 (trained; an encoder: keys and values of all its layers for
the text of this documentation), or, where that is not installed, drawn from a normal distribution, which is said. Then
any bits at all, which no codec makes smaller. Then the same KV through a cache on an NVMe tier of limited bandwidth,
with the codec and without: where the medium is slower than the codec, it is faster by what it saves.

    pip install "tiered-kv[bench]"
    python benchmarks/codec.py [--path DIR]

Prints two tables, then a line of JSON. Exits with 1 if a byte comes back wrong.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tiered_kv import GPULoadStoreSpec, KVGroup, KVLayout, ModelIdentity, TieredKV, hash_blocks
from tiered_kv.memory.codec import CodecName
from tiered_kv.tiers.records import ExponentCodec

GROUP = KVGroup(6, 12, 32, "bfloat16", 128)
"""What MiniLM's KV is, in blocks of 128 tokens: 1.1 MiB each."""
NUM_BLOCKS, NUM_TOKENS, SEQUENCE = 64, 8192, 512
BANDWIDTHS: dict[str, int | None] = {"0.1 GB/s": 10**8, "0.25 GB/s": 250 * 10**6, "the disk's own": None}
Blocks = NDArray[np.uint16]


@dataclass(frozen=True)
class Rival:
    """Encodes one block, and decodes it again."""

    name: str
    encode: Callable[[Blocks], Any]
    decode: Callable[[Any], Any]
    size: Callable[[Any], int]


def text_kv() -> tuple[str, Blocks]:
    """Return what it is, and blocks ``(NUM_BLOCKS, payload_bytes // 2)`` of bf16, as bits."""
    if find_spec("all_minilm_l6_v2") is None or find_spec("transformers") is None:
        generator = torch.Generator().manual_seed(0)
        normal = torch.randn(NUM_BLOCKS, GROUP.payload_bytes // 2, generator=generator)
        return "a normal distribution (no model is installed)", _bits(normal.bfloat16())
    return "MiniLM on this documentation", _bits(_kv_of_minilm())


def _kv_of_minilm() -> Tensor:
    import transformers  # noqa: PLC0415 - takes seconds, and the model may be missing
    from all_minilm_l6_v2 import get_model_zip_path  # noqa: PLC0415 - the same

    kept: list[Tensor] = []
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(get_model_zip_path()) as packed:
            packed.extractall(folder)
        tokenizer: Any = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json")  # type: ignore[no-untyped-call]  # of transformers
        model = transformers.BertModel.from_pretrained(folder).train(mode=False).to(torch.bfloat16)
    docs = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    ids = torch.tensor(tokenizer("\n".join(page.read_text() for page in docs))["input_ids"][:NUM_TOKENS])
    for layer in model.encoder.layer:
        for projection in (layer.attention.self.key, layer.attention.self.value):
            projection.register_forward_hook(lambda _, __, out: kept.append(out))
    with torch.no_grad():
        model(input_ids=ids.view(-1, SEQUENCE))
    planes = [each.reshape(NUM_BLOCKS, -1) for each in kept]
    return torch.cat(planes, dim=1)


def _bits(values: Tensor) -> Blocks:
    bits: Blocks = values.contiguous().view(torch.int16).numpy().view(np.uint16)
    return bits


def rivals() -> list[Rival]:
    """Return our codec, and those that are installed."""
    codec = ExponentCodec(GROUP.payload_bytes)
    out, back = bytearray(codec.stored_bytes), np.zeros(GROUP.payload_bytes // 2, np.uint16)

    def encode(block: Blocks) -> bytearray | None:
        return out if codec.encode(block.data.cast("B"), memoryview(out)) else None

    def decode(stored: bytearray) -> Blocks | None:
        return back if codec.decode(memoryview(stored), back.data.cast("B")) else None

    found = [Rival("exponent", encode, decode, len)]
    if find_spec("zstandard") is not None:
        import zstandard  # noqa: PLC0415 - may be missing

        zstd, undo = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
        planes = np.zeros((2, GROUP.payload_bytes // 2), np.uint8)

        def split(block: Blocks) -> bytes:
            np.copyto(planes, block.view(np.uint8).reshape(-1, 2).T)
            stored: bytes = zstd.compress(planes.data.cast("B"))
            return stored

        def join(stored: bytes) -> Blocks:
            np.copyto(
                back.view(np.uint8).reshape(-1, 2).T, np.frombuffer(undo.decompress(stored), np.uint8).reshape(2, -1)
            )
            return back

        found.append(Rival("zstd 1, byte planes", split, join, len))
    if find_spec("zipnn") is not None:
        import zipnn  # noqa: PLC0415 - may be missing

        huffman = zipnn.ZipNN(bytearray_dtype="bfloat16", input_format="byte")
        found.append(Rival("ZipNN", lambda block: huffman.compress(block.tobytes()), huffman.decompress, len))
    return found


def measure(rival: Rival, blocks: Blocks) -> dict[str, float]:
    """Return the share of blocks that it keeps, their size over the payload's, and GB/s of payload both ways."""
    rates: dict[str, list[float]] = {"encode": [], "decode": []}
    num_kept = num_bytes = 0
    for block in blocks:
        start = time.perf_counter()
        stored = rival.encode(block)
        rates["encode"].append(time.perf_counter() - start)
        if stored is None:
            continue
        num_kept, num_bytes = num_kept + 1, num_bytes + rival.size(stored)
        start = time.perf_counter()
        back = rival.decode(stored)
        rates["decode"].append(time.perf_counter() - start)
        if back is None or bytes(memoryview(back).cast("B")) != block.tobytes():
            raise SystemExit(f"{rival.name}: another block came back")
    found = {"kept": num_kept / len(blocks)}
    if num_kept:
        found["size"] = num_bytes / num_kept / GROUP.payload_bytes
    return found | {f"{way}_gbps": GROUP.payload_bytes / median(each) / 1e9 for way, each in rates.items() if each}


async def through_nvme(blocks: Blocks, codec: CodecName, bandwidth: int | None, folder: Path) -> dict[str, float]:
    """Return GB/s of payload, stored until it is on the medium and loaded from there, and slots in 1 GiB."""
    values = torch.from_numpy(blocks.view(np.int16)).view(NUM_BLOCKS, 6, 2, 128, 12, 32).view(torch.bfloat16)
    tensors = [values[:, layer].movedim(1, 0).contiguous() for layer in range(6)]
    expected = [tensor.clone() for tensor in tensors]
    tier = {
        "medium": "nvme", "path": str(folder), "capacity": "1GiB",
        "read_bandwidth": bandwidth, "write_bandwidth": bandwidth,
    }  # fmt: skip
    layout = KVLayout((GROUP,))
    async with TieredKV(
        [tier], model=ModelIdentity("bench", weights="none"), layout=layout, codec=codec, device="cpu"
    ) as kv:
        kv.register_kv_caches(tensors, axes="PBNHD")
        spec, stores_s = GPULoadStoreSpec(range(NUM_BLOCKS)), []
        for seed in range(3):  # the first has its memory to touch
            tokens = range(seed << 20, (seed << 20) + NUM_BLOCKS * GROUP.block_size)
            keys = hash_blocks(tokens, block_size=GROUP.block_size)
            start = time.perf_counter()
            await (await kv.store(keys, spec)).settled()
            stores_s.append(time.perf_counter() - start)
        for tensor in tensors:
            tensor.zero_()
        loads_s = []
        for _ in range(3):
            start = time.perf_counter()
            loaded = await kv.load(keys, spec, deadline_s=60)
            loads_s.append(time.perf_counter() - start)
        num_slots = kv.stats().tiers[-1].num_slots
    same = all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(tensors, expected, strict=True))
    if loaded.num_blocks != NUM_BLOCKS or not same:
        raise SystemExit(f"{loaded.num_blocks} of {NUM_BLOCKS} blocks came back, the same bytes: {same}")
    return {
        "store_gbps": blocks.nbytes / min(stores_s) / 1e9,
        "load_gbps": blocks.nbytes / min(loads_s) / 1e9,
        "blocks_in_1_gib": float(num_slots),
    }


def show(title: str, rows: Sequence[tuple[str, dict[str, float]]]) -> None:
    """Print a table: a row each, a column a figure."""
    columns = dict.fromkeys(name for _, row in rows for name in row)
    table = Table("", *(name.replace("_", " ").replace("gbps", "GB/s") for name in columns), title=title)
    for name, row in rows:
        table.add_row(name, *(f"{row[column]:.3g}" if column in row else "" for column in columns))
    Console(width=120).print(table)


def main() -> int:
    """Measure, print the tables and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=Path(), help="a folder on NVMe (default: the current one)")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    what, kv = text_kv()
    random = np.random.default_rng(0).integers(0, 1 << 16, kv[:16].shape, dtype=np.uint16)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for title, blocks in ((what, kv), ("random bits", random)):
        figures[title] = {rival.name: measure(rival, blocks) for rival in rivals()}
        show(title, list(figures[title].items()))
    codecs: tuple[CodecName, ...] = ("none", "exponent")
    for name, bandwidth in BANDWIDTHS.items():
        for codec in codecs:
            with tempfile.TemporaryDirectory(dir=options.path) as folder:
                found = asyncio.run(through_nvme(kv, codec, bandwidth, Path(folder)))
            figures.setdefault("NVMe tier", {})[f"{name}, {codec}"] = found
    show("NVMe tier, by its bandwidth", list(figures["NVMe tier"].items()))
    rounded = {
        t: {r: {n: round(v, 3) for n, v in row.items()} for r, row in rows.items()} for t, rows in figures.items()
    }
    print(json.dumps(rounded))
    return 0


if __name__ == "__main__":
    sys.exit(main())
