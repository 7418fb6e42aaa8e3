"""The storage of an engine's test: a folder, and what can be done to what is in it."""

import json
import pathlib
from typing import Any, Final

NVME: Final = ["cpu://?capacity=4MiB", "file://{folder}/nvme?capacity=16MiB"]
STALLING: Final = [
    "cpu://?capacity=4MiB",
    {"medium": "stalling:StallingBackend", "path": "{folder}/shared", "capacity": "16MiB"},
]


def tiers_in(folder: pathlib.Path, tiers: list[Any] | None) -> Any:
    """Put a folder in the place of ``{folder}``."""
    return json.loads(json.dumps(tiers).replace("{folder}", str(folder)))


def flip_a_byte_in_each_record(folder: pathlib.Path, record_bytes: int) -> None:
    """Change a byte in each record of this length, or a longer one, of the only NVMe tier in a folder."""
    (slab,) = folder.glob("nvme/*/slab")
    stored = bytearray(slab.read_bytes())
    for place in range(8192, len(stored), record_bytes // 2):
        stored[place] ^= 1
    slab.write_bytes(stored)
