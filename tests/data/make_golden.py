"""Makes the golden files of this folder, which change only with the version of the format."""

from pathlib import Path

import numpy as np

from tiered_kv.backend import Block
from tiered_kv.keys import BlockKey, Namespace, Shard
from tiered_kv.record import encode
from tiered_kv_backends.nvme.journal import Journal

HERE = Path(__file__).parent
PAYLOAD = bytes(range(256)) * 4 + b"the last page is not full"
KEY = BlockKey(
    Namespace(bytes(range(32)), epoch=bytes(range(32, 64)), salt=bytes(range(64, 96)), shard=Shard(1, 4)),
    bytes(range(96, 128)),
)


def golden_record() -> bytes:
    """Return the record of a fixed key and payload."""
    block = Block.empty(len(PAYLOAD))
    block.payload[:] = PAYLOAD
    encode(KEY, block)
    return bytes(block)


def golden_journal(path: Path) -> bytes:
    """Return a journal, written to ``path``: two blocks stored, the first slot forgotten, a third block stored."""
    names = np.arange(1, 13, dtype=np.uint64).reshape(3, 4)
    journal = Journal(path, stride_bytes=8192, num_slots=8)
    journal.append(names[:2], np.array([0, 1]))
    journal.append(np.zeros((1, 4), np.uint64), np.array([0]))
    journal.append(names[2:], np.array([5]))
    journal.close()
    return path.read_bytes()


if __name__ == "__main__":
    (HERE / "record-v1.bin").write_bytes(golden_record())
    (HERE / "journal-v1.bin").unlink(missing_ok=True)
    golden_journal(HERE / "journal-v1.bin")
