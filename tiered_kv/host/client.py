"""A cache that a server of this host keeps: how it is made, by `TieredKV.connect`, and opened and closed.

The server decides and has the storage; this process copies between its tensors and memory that both have mapped. While
no server is there lookups miss, loads bring 0 blocks, and stores are dropped and counted; it is attached again as soon
as there is one. Nothing of that raises where an engine serves.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Final, Self
from urllib.parse import urlsplit

from tiered_kv.errors import ConfigurationError
from tiered_kv.events import Emit
from tiered_kv.host.connection import Connection
from tiered_kv.host.far_calls import FarCalls
from tiered_kv.host.far_changes import FarSubscribers
from tiered_kv.host.far_jobs import FarJobs
from tiered_kv.host.far_planner import FarPlanner
from tiered_kv.host.far_side import FarSide
from tiered_kv.host.opening import Attach
from tiered_kv.keys import ModelIdentity, Shard
from tiered_kv.layout import KVLayout
from tiered_kv.log import guarded, log_event
from tiered_kv.memory.make import DeviceLike, resolve
from tiered_kv.validation import check_emit, check_seconds, check_shards

_SCHEME: Final = "unix"


class ConnectedKV(FarCalls):
    """A cache whose tiers are a server's; made by `TieredKV.connect`. Its calls are those of `BlockCache`."""

    def __init__(
        self,
        url: str,
        *,
        model: ModelIdentity,
        layout: KVLayout,
        shard: Shard | tuple[Shard, ...] | None = None,
        device: DeviceLike | None = None,
        emit: Emit | Sequence[Emit] = log_event,
        name: str = "",
        read_only: bool = False,
        timeout_s: float = 5.0,
    ) -> None:
        """See `TieredKV.connect`."""
        if not isinstance(model, ModelIdentity) or not isinstance(layout, KVLayout):
            raise ConfigurationError("connect() needs model=ModelIdentity(...) and layout=KVLayout(...)")
        check_seconds("timeout_s", timeout_s)
        name = name or f"{os.path.basename(sys.argv[0]) or 'python'}-{os.getpid()}"  # noqa: PTH119 - of no path
        shards, emit = check_shards(shard), guarded(check_emit(emit))
        opening = Attach.of(name, model, layout, shards, is_read_only=read_only)
        make_side = partial(FarSide, resolve(device), layout, shards, emit)
        super().__init__(Connection(_path_in(url), opening, make_side, timeout_s), model, layout, shards, emit)

    @property
    def is_attached(self) -> bool:
        """Whether a server is there and answers."""
        there = self._connection.there
        return there is not None and there.is_open and not there.is_silent

    # Opening and closing.

    async def __aenter__(self) -> Self:
        """Attach.

        Raises:
            ConfigurationError: The server refuses this client, or is of another version.
            BackendUnavailableError: There is none, within the time of a call.
        """
        await self._connection.open()
        jobs = FarJobs(self._connection, len(self._shards))
        self._planner = FarPlanner(self._connection, self._starts, jobs)
        self._subscribers = FarSubscribers(self._connection)
        return self

    async def aclose(self) -> None:
        """See `BlockCache.aclose`. What was stored stays with the server."""
        await self._connection.aclose()


def _path_in(url: str) -> str:
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme != _SCHEME or parts.netloc or not parts.path:
        raise ConfigurationError(f"a server's address is e.g. 'unix:///run/tiered-kv/kv.sock', got {url!r:.200}")
    return parts.path
