"""A program's own `emit`."""

from tests.support.caches import open_cache
from tests.support.engine import Engine, contents, prompt
from tiered_kv.events import Event

CPU = {"medium": "cpu", "capacity": "1MiB"}


async def test_an_emit_that_raises_reaches_no_transfer() -> None:
    """Events are for watching: a fault in who watches changes nothing."""

    def emit(event: Event) -> None:
        raise RuntimeError(event.name)

    engine, keys = Engine(), prompt(6)
    async with open_cache(CPU, engine=engine, emit=emit) as kv:
        spec = engine.compute(keys)
        assert (await kv.store(keys, spec)).num_stored == 6
        engine.poison()
        assert (await kv.load(keys, spec)).num_blocks == 6
        assert engine.read(spec) == contents(keys)
