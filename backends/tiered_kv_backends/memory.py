"""Records kept in this process's own memory. A whole backend: read it before you write one."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from tiered_kv.media.backend import Backend, BackendContext, Block, Outcome, check_lengths
from tiered_kv.settings.tier_settings import Size, StorageTierSettings
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.keys import BlockKey


class MemoryBackend(Backend):
    """Keeps the most recently used records within a number of bytes. What it holds ends with the process.

    It shows everything a `Backend` has to do. Keys come in and bytes go out, in batches, with one outcome per key; it
    evicts for itself; it neither makes nor checks headers. A medium that blocks would run its calls in
    ``context.workers(num_threads)``, given to `open`; memory does not. What is imported from inside of tiered_kv here,
    because both are parts of one house, a backend of yours imports from `tiered_kv`.
    """

    class Settings(StorageTierSettings):
        """``{"medium": "memory", "capacity": "4GiB"}``."""

        medium: str = "memory"
        capacity: Size = Field(gt=0)
        """Bytes of all records together, headers included."""

    def __init__(self, settings: Settings | Mapping[str, Any] | str) -> None:
        self.settings = self.Settings.of(settings)
        self._records: OrderedDict[BlockKey, bytes] = OrderedDict()  # least recently used first
        self._num_bytes = 0

    async def open(self, context: BackendContext) -> None:
        """Take nothing yet. A capacity that no record fits into is wrong: nothing would ever be kept."""
        largest = max((shape.record_bytes for shape in context.groups), default=0)
        if largest > self.settings.capacity:
            raise ConfigurationError(
                f"the memory tier's capacity of {self.settings.capacity} bytes is below one block of {largest} bytes: "
                "give it more, or leave it out"
            )

    async def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Say HIT or MISS for each key. Exact, and no use of the block."""
        return [Outcome.HIT if key in self._records else Outcome.MISS for key in keys]

    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        """Copy the records out: HIT, MISS or, where the length is another, CORRUPT."""
        check_lengths(keys, into)
        return [self._read_one(key, block) for key, block in zip(keys, into, strict=True)]

    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        """Copy the records in: STORED, or REFUSED if one is larger than everything."""
        check_lengths(keys, blocks)
        return [self._write_one(key, block) for key, block in zip(keys, blocks, strict=True)]

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Forget the keys."""
        for key in keys:
            self._num_bytes -= len(self._records.pop(key, b""))

    def _read_one(self, key: BlockKey, block: Block) -> Outcome:
        record = self._records.get(key)
        if record is None:
            return Outcome.MISS
        self._records.move_to_end(key)
        return Outcome.HIT if block.fill(record) else Outcome.CORRUPT

    def _write_one(self, key: BlockKey, block: Block) -> Outcome:
        if block.num_bytes > self.settings.capacity:
            return Outcome.REFUSED
        self._num_bytes += block.num_bytes - len(self._records.pop(key, b""))
        self._records[key] = bytes(block)  # a copy: the block is lent for the length of the call
        while self._num_bytes > self.settings.capacity:
            _, evicted = self._records.popitem(last=False)
            self._num_bytes -= len(evicted)
        return Outcome.STORED
