"""Names of requests' blocks: vLLM's hashes, and what is in the files of the LoRA adapter that computed them.

vLLM's hashes have an adapter's name and path alone. Blocks below outlive the process, and an adapter is trained anew
under the same path: what the old one computed must not be served for the new one.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tiered_kv.cache.groups import GroupNeed
from tiered_kv.integrations.identity import adapter_weights, folder_of
from tiered_kv.integrations.vllm.configuration import EngineGroup
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.keys import BlockKeys
from tiered_kv.values.log import log

MOST_ADAPTERS: Final = 1 << 16
"""Of more nothing is kept: one that was forgotten would be read anew, and vLLM may have its old files in memory."""

_Files = tuple[tuple[str, int, int, int], ...]
"""Of each file its name, size, inode, and when that has changed, which nobody can set: who replaces one, or writes to
it, changes some of it."""


@dataclass
class _Adapter:
    """The adapter that a number stands for.

    Attributes:
        path: That requests name it by; empty once some had another one.
        folder: With its files.
        files: As they were when a request named it first.
        digest: Of what was in them. Empty if they could not be read, which is tried again; or once they are others, as
            nobody says which of them vLLM has in memory.
        is_read: Whether they could be.
    """

    path: str = ""
    folder: Path = Path()
    files: _Files = ()
    digest: bytes = b""
    is_read: bool = False


class RequestNaming:
    """Names blocks as requests come. Used by the scheduler's thread alone."""

    def __init__(self) -> None:
        self._adapters: dict[int, _Adapter] = {}

    def can_name(self, request: Any) -> bool:
        """Say whether it is known what computes a request's blocks: else nothing of it may be kept or found.

        By a number that has had two paths nothing is: vLLM loads nothing for a number that it has, unless it is told
        to, which version 0.33 does not pass on; and then it ends the requests of the first by the weights of the other.
        """
        if (lora := request.lora_request) is None:
            return True
        known = self._adapters.get(lora.lora_int_id)
        if known is not None and known.path != lora.lora_path:
            if known.path:
                self._adapters[lora.lora_int_id] = _Adapter()
                _say(lora, "its number has had another path, and vLLM may compute either by the weights of the other")
            return False
        has_room = known is not None or len(self._adapters) < MOST_ADAPTERS
        if has_room and (known is None or not known.is_read):  # vLLM may have fetched it meanwhile
            self._adapters[lora.lora_int_id] = _read(lora, is_first=known is None)
        return bool(self._digest(lora))

    def hashes(self, group: EngineGroup, request: Any, first: int, stop: int) -> Sequence[bytes]:
        """Return what vLLM itself knows a request's blocks by, of a group as `keys` has them."""
        each = group.hashes_per_block
        hashes: Sequence[bytes] = request.block_hashes[(first + 1) * each - 1 : max(0, stop) * each : each]
        return hashes

    def keys(self, group: EngineGroup, request: Any, first: int, stop: int, *, end: int | None = None) -> BlockKeys:
        """Name a request's blocks of a group, as far as its tokens are known. Images are in vLLM's hashes.

        Args:
            group: Of the blocks.
            request: vLLM's.
            first: The number of the first block.
            stop: That of the one behind them.
            end: Tokens of a prefix that ends inside of the last block: that is named by those, whole hashes of vLLM's.
        """
        hashes, each = self.hashes(group, request, first, stop), group.hashes_per_block
        if end is not None and end < stop * group.block_size:
            hashes = [*hashes[: stop - 1 - first], request.block_hashes[end * each // group.block_size - 1]]
        return self._named(group, request, hashes, first)

    def tails(self, group: EngineGroup, request: Any, ends: Iterable[int]) -> BlockKeys:
        """Name what a block has of each of some prefixes that end inside of it, of so many tokens: a key each."""
        size = group.block_size // group.hashes_per_block
        return self._named(group, request, [request.block_hashes[end // size - 1] for end in ends], 0)

    def need(self, group: EngineGroup, request: Any, first: int, stop: int) -> GroupNeed:
        """Say what a request needs of its tokens from ``first``, at whole blocks, to ``stop``, at a whole hash."""
        size = group.block_size
        keys = self.keys(group, request, first // size, -(-stop // size), end=stop)
        return GroupNeed(keys, group.num_blocks, group.chunk_tokens)

    def needed(self, group: EngineGroup, request: Any, first: int, stop: int) -> BlockKeys:
        """Name what a request needs, see `need`, and nothing else: of short windows that is little of a long prompt."""
        size = group.block_size
        begin, end = first // size, -(-stop // size)
        if group.num_blocks is not None:
            begin = max(begin, end - group.num_blocks)
        keys = self.keys(group, request, begin, end, end=stop)
        return GroupNeed(keys, group.num_blocks, group.chunk_tokens).needed

    def _named(self, group: EngineGroup, request: Any, hashes: Sequence[bytes], first: int) -> BlockKeys:
        salt = request.cache_salt or ""
        if request.lora_request is not None:  # a name that nobody has where it is not known
            key = self._digest(request.lora_request) or os.urandom(32)
            hashes = [hashlib.blake2b(each_hash, key=key, digest_size=32).digest() for each_hash in hashes]
        return BlockKeys.from_hashes(hashes, block_size=group.block_size, start=first, group=group.number, salt=salt)

    def _digest(self, lora: Any) -> bytes:
        """Return what tells an adapter's files from all others; nothing if that is not known."""
        adapter = self._adapters.get(lora.lora_int_id, _UNKNOWN)
        if adapter.path != lora.lora_path:
            return b""
        if adapter.digest and _files_in(adapter.folder) != adapter.files:
            adapter.digest = b""
            _say(lora, "its files are others than when it was first asked for, and vLLM may have either in memory")
        return adapter.digest


_UNKNOWN: Final = _Adapter()


def _read(lora: Any, *, is_first: bool) -> _Adapter:
    found = folder_of(os.path.expanduser(lora.lora_path))  # noqa: PTH111 - it may be a name at Hugging Face
    folder = Path(found or lora.lora_path)
    files = _files_in(folder)
    try:
        weights = adapter_weights(folder)
    except ConfigurationError as error:
        if is_first:
            _say(lora, str(error))
        return _Adapter(lora.lora_path)
    if _files_in(folder) != files:  # somebody is writing them
        return _Adapter(lora.lora_path)
    return _Adapter(lora.lora_path, folder, files, hashlib.sha256(weights.encode()).digest(), is_read=True)


def _files_in(folder: Path) -> _Files:
    try:
        with os.scandir(folder) as found:
            stats = [(each.name, each.stat()) for each in found]
    except OSError:
        return ()
    return tuple(sorted((name, stat.st_size, stat.st_ino, stat.st_ctime_ns) for name, stat in stats))


def _say(lora: Any, why: str) -> None:
    log("warning", "vllm.adapter_unknown", adapter=lora.lora_name, path=lora.lora_path, error=why)
