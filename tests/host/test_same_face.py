"""The promises of the face, kept by a client of a server as by a cache of one's own: the same tests."""

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.cache import test_promises
from tests.cache.test_promises import tiers_of
from tests.support.any_layout import AnyEngine
from tests.support.caches import AnyTier, until
from tests.support.serving import attached, serving
from tiered_kv import BlockCache, ConnectedKV, TieredKV
from tiered_kv.host.asked_calls import CALLS

OPENING = (
    "test_prefetch_stops_at_what_the_tier_takes",
    "test_a_lease_shows_the_bytes_and_holds_them",
    "test_a_lease_holds_what_fits",
    "test_it_is_attached_while_it_is_open",
    "test_an_evicted_lease_keeps_its_bytes",
    "test_touched_blocks_stay",
    "test_what_the_engine_has_goes_first_in_memory",
)
"""Those that open a cache of their own, of tiers that a server may have."""


@pytest.fixture(params=["cpu", "cpu+nvme", "cpu+memory", "cpu+nvme, in parts"])
async def cache(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[ConnectedKV, AnyEngine]]:
    """A client of a server with each kind of chain, and its engine; once no message of a call is of over three keys."""
    engine = AnyEngine()
    kind, _, in_parts = request.param.partition(", ")
    for remote in CALLS.values() if in_parts else ():
        monkeypatch.setattr(remote, "most_keys", 3)
    with serving(tmp_path, *tiers_of(kind, tmp_path / "disk")) as server:
        async with attached(server, engine) as kv:
            yield kv, engine
            await kv.flush()


@pytest.fixture(autouse=True)
def far(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have the tests that open a cache open a client of a server."""

    @asynccontextmanager
    async def open_far(engine: AnyEngine, *tiers: AnyTier) -> AsyncIterator[ConnectedKV]:
        with serving(tmp_path_factory.mktemp("served"), *tiers) as server:  # type: ignore[arg-type]  # settings, here
            async with attached(server, engine) as kv:
                yield kv

    monkeypatch.setattr(test_promises, "open_any", open_far)
    monkeypatch.setattr(test_promises, "until_idle", until_idle)


async def until_idle(kv: ConnectedKV) -> None:
    """Wait until the server holds nothing for anyone."""
    await until(lambda: not any(tier.leased or tier.pending for tier in kv.stats().tiers))


def test_an_engine_changes_one_line() -> None:
    """Whatever an engine calls of a cache in its process has the same arguments here, and each call is there."""
    calls = [name for name in dir(BlockCache) if not name.startswith("_") and callable(getattr(BlockCache, name))]
    assert len(calls) > 30
    for name in calls:
        if name != "resize":  # whoever runs the server sets the sizes of its tiers
            here, there = (inspect.signature(getattr(kind, name)) for kind in (TieredKV, ConnectedKV))
            assert here == there, name


for _name, _test in vars(test_promises).items():
    if _name.startswith("test_") and "cache" in _test.__code__.co_varnames[: _test.__code__.co_argcount]:
        globals()[_name] = _test
for _name in OPENING:
    globals()[_name] = getattr(test_promises, _name)
