from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from fastapi_app import NUM_BLOCKS, Engine, app
from tests.support import programs
from tiered_kv.values.errors import ClosedError

EXAMPLE = Path(__file__).parents[2] / "examples" / "fastapi_app.py"


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application while that is up, lifespan included."""
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://kv") as client:
        yield client


async def ask(client: httpx.AsyncClient, token_ids: list[int], tenant: str = "") -> dict[str, object]:
    """Send a prompt; return what became of its blocks."""
    answer = await client.post("/prompts", json={"token_ids": token_ids, "tenant": tenant})
    assert answer.status_code == 200
    found: dict[str, object] = answer.json()
    return found


async def test_a_shared_prefix_is_loaded(client: httpx.AsyncClient) -> None:
    """The second prompt computes only what differs, and gets the first one's KV for the rest."""
    first, second = list(range(96)), [*range(64), *range(500, 532)]
    assert await ask(client, first) == {"loaded_blocks": 0, "by_tier": {}, "computed_blocks": 6}
    engine: Engine = app.state.engine
    for layer in engine.kv_caches:
        layer.fill_(-1)
    assert await ask(client, second) == {"loaded_blocks": 4, "by_tier": {"cpu": 4}, "computed_blocks": 2}
    expected = sorted([*range(64), *range(500, 532)])
    for number, layer in enumerate(engine.kv_caches):
        values = layer[0, :, :, 0, 0]
        assert sorted((values[values >= 0] - number).int().tolist()) == expected


async def test_tenants_share_nothing(client: httpx.AsyncClient) -> None:
    """The same prompt of another tenant is computed."""
    await ask(client, list(range(32)), "a")
    assert (await ask(client, list(range(32)), "b"))["loaded_blocks"] == 0


async def test_a_prompt_below_one_block(client: httpx.AsyncClient) -> None:
    """There is nothing to load and nothing to keep."""
    assert await ask(client, [1, 2, 3]) == {"loaded_blocks": 0, "by_tier": {}, "computed_blocks": 0}


async def test_blocks_are_given_back(client: httpx.AsyncClient) -> None:
    """However many prompts come, one after the other, none finds the engine full."""
    for start in range(0, 10_000, 2_000):
        assert (await ask(client, list(range(start, start + 16 * NUM_BLOCKS))))["computed_blocks"] == NUM_BLOCKS


async def test_behind_its_lifespan_the_cache_is_closed() -> None:
    """The application opens the cache and closes it; a second lifespan is a new cache."""
    async with app.router.lifespan_context(app):
        first = app.state.kv
    with pytest.raises(ClosedError, match="closed"):
        first.stats()
    async with app.router.lifespan_context(app):
        assert app.state.kv is not first
        assert app.state.kv.stats()["cpu"].ready == 0


@pytest.mark.slow
def test_it_runs() -> None:
    """As a script it shows a prefix loaded by the second prompt."""
    ran = programs.run(EXAMPLE)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert "{'loaded_blocks': 0, 'by_tier': {}, 'computed_blocks': 10}" in lines
    assert "{'loaded_blocks': 6, 'by_tier': {'cpu': 6}, 'computed_blocks': 4}" in lines
