"""What a caller holds of a load: its result, and before that how many blocks there will be, layer by layer."""

import asyncio
import threading
from typing import Protocol

from tiered_kv.errors import ConfigurationError
from tiered_kv.memory.lanes import LaneCopy
from tiered_kv.memory.waiting import wait_in
from tiered_kv.results import LoadResult
from tiered_kv.transfers.handles import Handle


class Loading(Protocol):
    """What a handle asks of its load."""

    num_layers: int
    thread: int

    @property
    def is_admitted(self) -> bool:
        """Whether it is known how many blocks will be in place."""

    async def wait_admitted(self) -> int:
        """Wait until that is known, and return it."""

    def copy_of(self, layer: int) -> LaneCopy | None:
        """Return the copy after which a layer of all admitted blocks is in place; None if there is no need to wait."""

    @property
    def is_copying(self) -> bool:
        """Whether something may have been written to the engine's blocks."""

    def stop_before(self, block: int) -> int:
        """See `LoadHandle.stop_before`."""

    def revoke(self) -> None:
        """Stop as soon as possible."""


class LoadHandle(Handle[LoadResult]):
    """A load under way. Await it for its result: the blocks that are in place.

    `admitted` says sooner how many there will be. From then on the engine may go on layer by layer, by `wait_layer` or
    `layer`, and awaits the handle before it trusts what it computed: only the result tells whether the device failed,
    the load was cancelled or its ``after`` came too late, or the weights changed meanwhile.
    """

    def __init__(self, ended: "asyncio.Future[LoadResult]", load: "Loading") -> None:
        super().__init__(ended, load.revoke)
        self._load = load
        self._loop = asyncio.get_running_loop()

    async def admitted(self) -> int:
        """Return how many blocks will be in place: all are verified, and in slots that are theirs until copied.

        Cancellation ends the wait only.
        """
        return await self._load.wait_admitted()

    @property
    def is_admitted(self) -> bool:
        """Whether `admitted` would answer at once."""
        return self._load.is_admitted

    @property
    def is_copying(self) -> bool:
        """Whether it may have begun to write to the engine's blocks."""
        return self._load.is_copying

    def stop_before(self, block: int) -> int:
        """Claim the blocks before ``block`` for the engine, which is about to compute them.

        Of a load with ``order="back"``. Parts of it that have not begun to be copied are given up where they are
        claimed; the engine never waits for a medium.

        Returns:
            The block from which on the load writes, ``block`` or one before it: all before are the engine's for good.
            Once that is where the engine is already, the two have met, and awaiting the handle takes no longer than
            copies do. Where the load has ended early, what it brought is from there on.

        Raises:
            ConfigurationError: The load is of another order, or there is no such block.
        """
        return self._load.stop_before(block)

    async def layer(self, layer: int) -> None:
        """Wait until a layer of all admitted blocks has been copied. Cancellation ends the wait only."""
        await self.admitted()
        if (copy := self._copy_of(layer)) is not None:
            await asyncio.wait({copy.ended})

    def wait_layer(self, layer: int, stream: object = None) -> None:
        """Have ``stream`` wait for a layer of all admitted blocks, without waiting for it here.

        Of a load that was not started with ``layerwise=True`` all layers come at once, the last block's last.

        Args:
            layer: Its position in the KV group.
            stream: A torch stream of the engine's device. None blocks the calling thread instead, which must not be the
                event loop's: there, await `layer`.

        Raises:
            ConfigurationError: No such layer, nothing is admitted yet, or there is nothing that could wait.
        """
        if stream is None:
            self._block(layer)
            return
        if not self._load.is_admitted:
            raise ConfigurationError("await handle.admitted() comes before handle.wait_layer()")
        if (copy := self._copy_of(layer)) is not None and copy.event is not None:
            wait_in(stream, copy.event)

    def _block(self, layer: int) -> None:
        if threading.get_ident() == self._load.thread:
            raise ConfigurationError("wait_layer() without a stream would block the event loop: await handle.layer()")
        asyncio.run_coroutine_threadsafe(self.layer(layer), self._loop).result()

    def _copy_of(self, layer: int) -> LaneCopy | None:
        if not 0 <= layer < self._load.num_layers:
            raise ConfigurationError(f"layer {layer} is not one of the KV group's {self._load.num_layers}")
        return self._load.copy_of(layer)
