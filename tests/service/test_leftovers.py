"""What one call leaves behind does not change what the next ones do."""

import asyncio

import pytest

from tests.service.conftest import Engine, ScriptedBackend, open_cache, prompt, until, until_idle

KEYS = prompt(9)


async def test_a_store_that_is_cancelled_reaches_no_backend() -> None:
    """A store that asks what is below, where nothing keeps blocks above, leaves the question to the cache."""
    engine, keyed = Engine(), ScriptedBackend(name="keyed")
    async with open_cache(keyed, engine=engine) as kv:
        keyed.on_lookup.hold()
        storing = asyncio.create_task(kv.store(KEYS, engine.compute(KEYS)))
        await until(lambda: keyed.on_lookup.num_held == 1)
        storing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await storing
        assert keyed.on_lookup.num_held == 1
        keyed.on_lookup.release()
        await until_idle(kv)
