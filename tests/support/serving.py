"""Servers of one cache for a host, in a thread of their own as in a process of their own, and clients of them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from tests.support.any_layout import LIMITS, MODEL, SMALL, AnyEngine
from tests.support.caches import Recorder
from tiered_kv import (
    CacheLimits,
    ConnectedKV,
    KVLayout,
    ModelIdentity,
    TieredKV,
    TieredKVServer,
    TieredKVSettings,
    TierSettings,
)
from tiered_kv.memory.codec import CodecName
from tiered_kv.values.events import Emit
from tiered_kv_backends.nvme import NVMeBackend


@contextmanager
def serving(
    path: Path,
    *tiers: TierSettings | Mapping[str, Any] | str,
    codec: CodecName = "none",
    limits: CacheLimits = LIMITS,
    host: Mapping[str, object] | None = None,
    settings: Mapping[str, Any] | None = None,
    emit: Emit | None = None,
) -> Iterator[TieredKVServer]:
    """Have a server of these tiers listen at ``path / "kv.sock"``, on an event loop of its own."""
    listening = {"socket": path / "kv.sock", **(host or {})}
    given = TieredKVSettings(tiers=tiers, limits=limits, codec=codec, host=listening, **(settings or {}))
    server = TieredKVServer(given, emit=emit or Recorder())
    began, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    errors: list[BaseException] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        async with server:
            began.set()
            await stop.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # noqa: BLE001 - raised in the test's thread
            errors.append(error)
        finally:
            began.set()

    thread = threading.Thread(target=run, name="server", daemon=True)
    thread.start()
    began.wait()
    try:
        if not errors:
            yield server
    finally:
        if not errors:
            loops[0].call_soon_threadsafe(stop.set)
        thread.join(60)
    if errors:
        raise errors[0]


@asynccontextmanager
async def attached(
    server: TieredKVServer | Path,
    engine: AnyEngine | None = None,
    *,
    model: ModelIdentity = MODEL,
    layout: KVLayout = SMALL,
    **how: Any,  # noqa: ANN401 - as for `TieredKV.connect`
) -> AsyncIterator[ConnectedKV]:
    """Attach a client, with an engine's tensors registered if there is one."""
    layout = engine.layout if engine is not None else layout
    asked: dict[str, Any] = {"device": "cpu", "emit": Recorder(), **how}
    async with TieredKV.connect(
        f"unix://{server if isinstance(server, Path) else server.path}", model=model, layout=layout, **asked
    ) as kv:
        for group, caches in enumerate(engine.caches if engine is not None else []):
            kv.register_kv_caches(caches, group=group)
        assert isinstance(kv, ConnectedKV)
        yield kv


def models_in(path: Path) -> list[str]:
    """Name the directories of models on a disk."""
    return [each.name for each in path.iterdir() if NVMeBackend.has_left(each)]
