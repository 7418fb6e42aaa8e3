"""The promises of the face, kept by a client of a server as by a cache of one's own: the same tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.cache import test_promises
from tests.cache.test_promises import tiers_of
from tests.support.any_layout import AnyEngine
from tests.support.serving import attached, serving
from tiered_kv import ConnectedKV


@pytest.fixture(params=["cpu", "cpu+nvme", "cpu+memory"])
async def cache(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[ConnectedKV, AnyEngine]]:
    """A client of a server with each kind of chain, and its engine."""
    engine = AnyEngine()
    with serving(tmp_path, *tiers_of(request.param, tmp_path / "disk")) as server:
        async with attached(server, engine) as kv:
            yield kv, engine
            await kv.flush()


for _name, _test in vars(test_promises).items():
    if _name.startswith("test_") and "cache" in _test.__code__.co_varnames[: _test.__code__.co_argcount]:
        globals()[_name] = _test
