"""`MooncakeBackend`: blocks in Mooncake Store, the pooled memory of many hosts, by its own client.

What that client does, and what follows here:

- It answers by codes, one per key, and its calls block: they run in threads, a bounded number of bytes each, so that a
  batch of reads ends long before the lease (10 s, unless the master says otherwise) that keeps its blocks in place.
- A put of a key that exists leaves what is there. Overwriting in place would tear what another reads; so a write
  removes first, which the store refuses while a reader's lease lasts: then the old record, of the same key, stays.
- A key that is twice in a read is found twice and filled once: such batches are moved key by key.
- A read of a block whose host has died finds nothing, fails, or is empty: a miss or a failure, never bytes.
- While it joins, or leaves after it gave memory, no other thread of Python runs, for as long as the master says
  nothing. So another process joins first, and is killed if it is late. Nothing bounds leaving.
"""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import numpy as np
from pydantic import ByteSize, Field, field_validator
from typing_extensions import override

from tiered_kv.media.backend import Backend, BackendContext, Block, Outcome, Workers, check_lengths
from tiered_kv.settings.tier_settings import Size, StorageTierSettings, default_size, split_url
from tiered_kv.values.errors import BackendUnavailableError, ClosedError
from tiered_kv.values.keys import BlockKey, salt_digest
from tiered_kv.values.specs import RemoteLoadStoreSpec
from tiered_kv_backends.connecting import Address, connected
from tiered_kv_backends.paths import salt_folder

try:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig
except ModuleNotFoundError as error:
    why = f"{__name__} needs mooncake: pip install 'tiered-kv[mooncake]'"
    raise ModuleNotFoundError(why, name=error.name) from error
except ImportError as error:  # it is there, and what it links is not
    hint = "as without libibverbs (apt-get install libibverbs1)"
    why = f"what 'tiered-kv[mooncake]' installs cannot be loaded, {hint}: {error}"
    raise ImportError(why, name=error.name, path=error.path) from error

T = TypeVar("T")
_Move = Callable[[list[str], list[list[int]], list[list[int]]], list[int]]

_BATCH_BYTES = 16 << 20
"""Moved by one call: some 15 ms at the 1.3 GB/s of TCP on loopback."""
_BATCH_KEYS = 256
_CLIENT_BUFFER_BYTES = 16 << 20  # the least it takes; our calls pass by it
_JOIN = f"""
import os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
print(store.setup(sys.argv[1], "P2PHANDSHAKE", 0, {_CLIENT_BUFFER_BYTES}, "tcp", "", sys.argv[2]), flush=True)
os._exit(0)  # leaving takes a second, and who gave nothing may go without
"""

_THERE, _NOT_THERE = 1, 0  # what batch_is_exist says; less is an error
_NO_SPACE = {-200, -201}
_NOT_READABLE = {-703, -704}
"""Being written or removed; not found."""
_MEANING = {
    "-1": "internal error",
    "-10": "its buffer is too small",
    "-101": "no host gives memory",
    "-200": "no room",
    "-600": "invalid parameters",
    "-703": "being written or removed",
    "-704": "not found",
    "-706": "being read",
    "-707": "the lease ended before the transfer",
    "-800": "the transfer failed",
    "-801": "wrong checksum",
    "-900": "its master, or another host, does not answer",
    "-901": "its master, or another host, is late",
    "-1010": "not in its present state",
}
"""Of its client's codes. Source: Mooncake, "Error Code Explanation", and its ``types.h``."""
_PERHAPS_ANOTHER_LENGTH = {-600, -800}
"""Invalid parameters, and a failed transfer: what buffers longer or shorter than the record come to."""


class MooncakeBackend(Backend):
    """Keeps records in Mooncake Store, which evicts for itself. Neither it nor its master knows authentication.

    With RDMA, the memory of blocks is registered when it is first seen and stays so until the tier closes.
    """

    class Settings(StorageTierSettings):
        """``{"medium": "mooncake", "url": "mooncake://master.example:50051"}``."""

        medium: str = "mooncake"
        url: str = Field(examples=["mooncake://10.0.0.1:50051"])
        """Host and port of ``mooncake_master``."""
        metadata: str = "P2PHANDSHAKE"
        """Where the hosts find each other: by themselves, or ``etcd://...``, ``http://...`` as the other hosts do."""
        host: str = ""
        """This host's address for the other ones; found out by the way to the master if left out."""
        protocol: Literal["tcp", "rdma"] = "tcp"
        devices: str = ""
        """RDMA devices, by commas; all if left out."""
        segment: Size = Field(default=default_size(0), ge=0)
        """Memory that this process gives to the store for as long as it is open; none where others do."""
        num_replicas: int = Field(default=1, ge=1)
        """Hosts that keep a copy of each block."""
        num_threads: int = Field(default=4, ge=1, le=64)
        """Calls under way at once. Over TCP one at a time moves blocks, in each direction."""

        @field_validator("url")
        @classmethod
        def _check_url(cls, url: str) -> str:
            parts = split_url(url)
            more = "@" in parts.netloc or parts.path.strip("/") or parts.query or parts.fragment
            if parts.scheme != "mooncake" or not parts.hostname or not parts.port or more:
                raise ValueError("write mooncake://host:port of the master, e.g. mooncake://10.0.0.1:50051")
            return url

    @classmethod
    @override
    async def delete_tenant(cls, settings: Settings | Mapping[str, Any] | str, salt: str | bytes) -> int:
        """Have the master look at all keys, which it lists to nobody: the blocks go whoever reads them."""
        joined = cls.Settings.of(settings).model_copy(update={"segment": ByteSize(0)})
        backend = cls(joined)
        await backend.open(BackendContext((), lambda _: _OwnThreads(), time.monotonic))
        try:
            return await backend.delete_salt(salt_folder(await asyncio.to_thread(joined.on_medium, salt_digest(salt))))
        finally:
            await backend.aclose()

    def __init__(self, settings: Settings | Mapping[str, Any] | str) -> None:
        self.settings = settings = self.Settings.of(settings)
        parts = urlsplit(settings.url)
        self._master = str(parts.hostname), int(parts.port or 0)
        self._store: MooncakeDistributedStore | None = None
        self._running: set[asyncio.Future[Any]] = set()
        self._registered: set[int] = set()
        self.keeps_memory = settings.protocol != "tcp"

    async def open(self, context: BackendContext) -> None:
        """Join the store.

        Raises:
            BackendUnavailableError: The master does not answer within ``timeout_s``, or the store cannot be joined.
        """
        settings, (host, port) = self.settings, self._master
        self._threads = context.workers(settings.num_threads)
        try:
            async with asyncio.timeout(settings.timeout_s):
                own_host = await _address_towards(host, port)
                code = await self._threads.run(_join_elsewhere, own_host, f"{host}:{port}", settings.timeout_s)
        except OSError as error:  # TimeoutError is one
            reason = error.strerror or str(error) or f"no answer within {settings.timeout_s} s"
            raise BackendUnavailableError(f"Mooncake's master at {host}:{port}: {reason}") from error
        if code != "0":
            raise BackendUnavailableError(f"Mooncake at {host}:{port} cannot be joined: {_said(code)}")
        # one call moves its blocks in parallel: over TCP, two at once wait for each other on the processors
        num_moving = 1 if settings.protocol == "tcp" else settings.num_threads
        self._readers, self._writers = context.workers(num_moving), context.workers(num_moving)
        self._config = ReplicateConfig()
        self._config.replica_num = settings.num_replicas
        store = MooncakeDistributedStore()
        joining = asyncio.ensure_future(
            self._threads.run(
                store.setup, settings.host or own_host, settings.metadata, int(settings.segment), _CLIENT_BUFFER_BYTES,
                settings.protocol, settings.devices, f"{host}:{port}",
            )
        )  # fmt: skip
        done: set[asyncio.Future[int]] = set()
        try:
            done, _ = await asyncio.wait([joining], timeout=settings.timeout_s)
        finally:
            if not done:  # late or cancelled: it goes on, and nobody else knows of it
                joining.add_done_callback(partial(self._leave, store))
        if not done:
            raise BackendUnavailableError(f"Mooncake at {host}:{port} was not joined within {settings.timeout_s} s")
        if code := joining.result():
            raise BackendUnavailableError(f"Mooncake at {host}:{port} cannot be joined: {_said(code)}")
        self._store = store

    async def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Say HIT or MISS for each key, in one question to the master.

        Raises:
            BackendUnavailableError: The master does not answer.
        """
        store = self._check_open()
        if not keys:
            return []
        codes = await asyncio.shield(self._call(self._threads, store.batch_is_exist, [key.path for key in keys]))
        if errors := [code for code in codes if code < _NOT_THERE]:
            raise self._unavailable(f"{len(errors)} of {len(keys)} keys could not be asked for", errors[0])
        return [Outcome.HIT if code == _THERE else Outcome.MISS for code in codes]

    async def locate(self, keys: Sequence[BlockKey]) -> RemoteLoadStoreSpec:
        """Say which keys of the store the records are. Asks nobody."""
        return RemoteLoadStoreSpec(range(len(keys)), [key.path for key in keys], self.settings.url)

    async def read(self, keys: Sequence[BlockKey], into: Sequence[Block]) -> list[Outcome]:
        """Read the records into the blocks: HIT, MISS, CORRUPT (wrong length) or FAILED each.

        Raises:
            BackendUnavailableError: Every block failed.
        """
        store = self._check_open()

        def get(paths: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> list[int]:
            codes: list[int] = store.batch_get_into_multi_buffers(paths, pointers, sizes)
            for i, code in enumerate(codes):
                if code in _PERHAPS_ANOTHER_LENGTH and (stored := store.get_size(paths[i])) != sum(sizes[i]):
                    codes[i] = max(stored, code)
            return codes

        codes = await self._move(self._readers, get, keys, into)
        return self._outcomes([_of_read(code, block) for code, block in zip(codes, into, strict=True)], codes)

    async def write(self, keys: Sequence[BlockKey], blocks: Sequence[Block]) -> list[Outcome]:
        """Put the records: STORED, REFUSED (the store is full) or FAILED each.

        A record that someone is reading stays as it is, and counts as stored: it is the same key's.

        Raises:
            BackendUnavailableError: Every block failed.
        """
        store = self._check_open()

        def put(paths: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> list[int]:
            store.batch_remove(paths, False)  # noqa: FBT003 - the client's own signature
            codes: list[int] = store.batch_put_from_multi_buffers(paths, pointers, sizes, self._config)
            return codes

        codes = await self._move(self._writers, put, keys, blocks)
        return self._outcomes([_of_write(code) for code in codes], codes)

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Remove the records, whoever reads them.

        Raises:
            BackendUnavailableError: The master does not answer.
        """
        store = self._check_open()
        if keys:
            removing = self._call(self._threads, store.batch_remove, [key.path for key in keys], True)  # noqa: FBT003 - force; it has no keyword
            codes = await asyncio.shield(removing)
            if errors := [code for code in codes if code < 0 and code not in _NOT_READABLE]:
                raise self._unavailable(f"{len(errors)} of {len(keys)} keys could not be removed", errors[0])

    async def delete_salt(self, folder: str) -> int:
        """Remove every record whose path has ``folder`` for its salt; return how many.

        Raises:
            BackendUnavailableError: The master does not answer.
        """
        pattern = f"^[0-9a-f]{{64}}/[0-9a-f]{{32}}/[^/]+/{folder}/.*"
        count = await asyncio.shield(self._call(self._threads, self._check_open().remove_by_regex, pattern, True))  # noqa: FBT003 - force
        if count < 0:
            raise self._unavailable("a tenant could not be removed", count)
        return int(count)

    async def aclose(self) -> None:
        """Leave the store, and take this process's segment out of it. If a call is stuck, the process's end does it."""
        store, self._store = self._store, None
        if store is not None and not self._running:
            await self._threads.run(store.close)  # up to 16 s where the master is gone

    def _leave(self, store: MooncakeDistributedStore, joining: "asyncio.Future[int]") -> None:
        """Leave what was joined too late, and take the memory out of it: opening again gives as much anew."""
        if not joining.cancelled() and joining.exception() is None and joining.result() == 0:
            leaving = asyncio.ensure_future(self._threads.run(store.close))
            leaving.add_done_callback(asyncio.Future.exception)  # nobody is left to hear of it

    def _check_open(self) -> MooncakeDistributedStore:
        if self._store is None:
            raise ClosedError(f"the Mooncake tier at {self.settings.url} is not open")
        return self._store

    async def _move(
        self, workers: Workers, move: _Move, keys: Sequence[BlockKey], blocks: Sequence[Block]
    ) -> list[int]:
        """Move blocks some at a time; return the client's code for each. Ends when every call has."""
        check_lengths(keys, blocks)
        largest = max((block.num_bytes for block in blocks), default=1)
        share = max(1, min(_BATCH_KEYS, _BATCH_BYTES // largest)) if len(set(keys)) == len(keys) else 1
        calls = []
        for start in range(0, len(keys), share):
            segments = [block.segments for block in blocks[start : start + share]]
            pointers = [[_pointer(segment) for segment in each] for each in segments]
            sizes = [[len(segment) for segment in each] for each in segments]
            paths = [key.path for key in keys[start : start + share]]
            calls.append(self._call(workers, self._registering(move), paths, pointers, sizes))
        if calls:
            await asyncio.wait(calls)  # for all of them, whatever one raises: the blocks are lent until this returns
        return list(chain.from_iterable(call.result() for call in calls))

    def _registering(self, move: _Move) -> _Move:
        """Have RDMA know the memory before it moves."""
        if self.settings.protocol == "tcp":
            return move
        store = self._check_open()

        def registered(paths: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> list[int]:
            for pointer, size in zip(chain(*pointers), chain(*sizes), strict=True):
                if pointer not in self._registered and not store.register_buffer(pointer, size):
                    self._registered.add(pointer)
            return move(paths, pointers, sizes)

        return registered

    def _call(self, workers: Workers, function: Callable[..., T], *args: object) -> "asyncio.Future[T]":
        """Begin a call of the client in a thread: shield it, as it goes on whoever waits, and `aclose` looks for it."""
        call = asyncio.ensure_future(workers.run(function, *args))
        self._running.add(call)
        call.add_done_callback(self._running.discard)
        return call

    def _outcomes(self, outcomes: list[Outcome], codes: list[int]) -> list[Outcome]:
        if failed := [code for outcome, code in zip(outcomes, codes, strict=True) if outcome is Outcome.FAILED]:
            error = self._unavailable(f"{len(failed)} of {len(outcomes)} blocks could not be moved", failed[-1])
            if len(failed) == len(outcomes):
                raise error
            self.last_error = str(error)
        return outcomes

    def _unavailable(self, what: str, code: int) -> BackendUnavailableError:
        return BackendUnavailableError(f"Mooncake at {self._master[0]}:{self._master[1]}: {what}, {_said(code)}")


def _said(code: int | str) -> str:
    meaning = _MEANING.get(str(code))
    return f"its client says {code}" + (f" ({meaning})" if meaning else "")


class _OwnThreads:
    """`Workers` for a job outside of a cache."""

    def run(self, function: Callable[..., T], *args: object) -> Awaitable[T]:
        return asyncio.to_thread(function, *args)

    def begin_each(self, calls: Sequence[Callable[[], T]], then: Callable[[Callable[[], list[T]]], object]) -> None:
        asyncio.gather(*map(asyncio.to_thread, calls)).add_done_callback(lambda ended: then(ended.result))


def _of_read(code: int, block: Block) -> Outcome:
    if code == block.num_bytes:
        return Outcome.HIT
    if code in _NOT_READABLE or code == 0:
        return Outcome.MISS
    return Outcome.CORRUPT if code > 0 else Outcome.FAILED


def _of_write(code: int) -> Outcome:
    if code == 0:
        return Outcome.STORED
    return Outcome.REFUSED if code in _NO_SPACE else Outcome.FAILED


def _pointer(segment: memoryview) -> int:
    return int(np.frombuffer(segment, np.uint8).ctypes.data)


def _join_elsewhere(own_host: str, master: str, timeout_s: float) -> str:
    """Join by a process that gives no memory; return what the client says there: its code, or its last words.

    Raises:
        TimeoutError: It took longer, and the process is killed.
    """
    command = [sys.executable, "-P", "-c", _JOIN, own_host, master]
    try:
        ended = subprocess.run(  # noqa: S603 - a program of our own
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError from error
    words = (ended.stdout if ended.returncode == 0 else ended.stderr).decode(errors="replace").strip()
    return words.rpartition("\n")[2]


async def _address_towards(host: str, port: int) -> str:
    """Connect, and return the address of ours that the connection has."""
    with await connected(Address(host, port)) as there:
        address: str = there.getsockname()[0]
        return f"[{address}]" if there.family == socket.AF_INET6 else address
