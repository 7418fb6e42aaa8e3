"""Makes the golden files of this folder, which change only with the version of the format."""

import os
from pathlib import Path

import numpy as np

from tiered_kv.media.backend import Block
from tiered_kv.media.record import encode
from tiered_kv.media.seal import Seal
from tiered_kv.values.keys import BlockKey, Namespace, Shard
from tiered_kv_backends.nvme.ledger import Ledger, Order

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


def golden_ledger(path: Path) -> bytes:
    """Return a ledger, written to ``path``: two blocks stored, the first slot forgotten, a third block stored."""
    names = np.arange(1, 13, dtype=np.uint64).reshape(3, 4)
    ledger = Ledger(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), Order())
    ledger.grow(8, os.posix_fallocate)
    ledger.write(names[:2], np.array([0, 1]))
    ledger.clear(np.array([0]))
    ledger.write(names[2:], np.array([5]))
    ledger.close()
    return path.read_bytes()


def sealed_record() -> bytes:
    """Return a record of `tests/media/test_seal.py`; its nonce is random, so that this is another one each time."""
    seal, payload = Seal([bytes([1]) * 32]), bytes(range(251)) * 13
    space = Namespace(bytes([7]) * 32, epoch=bytes([8]) * 32, salt=bytes([9]) * 32, shard=Shard(1, 2))
    block = Block.empty(len(payload))
    block.payload[:] = payload
    encode(seal.names.hide_key(BlockKey(space, bytes([10]) * 32)), block, seal=seal)
    return bytes(block)


if __name__ == "__main__":
    (HERE / "record-v3.bin").write_bytes(sealed_record())
    (HERE / "record-v1.bin").write_bytes(golden_record())
    (HERE / "ledger-v2.bin").unlink(missing_ok=True)
    golden_ledger(HERE / "ledger-v2.bin")
