"""A client of a server in this process: the face is `TieredKV`'s, and every byte comes back."""

from pathlib import Path

from tests.support.any_layout import AnyEngine, cpu, nvme, prompt
from tests.support.serving import attached, serving


async def test_round_trip(tmp_path: Path) -> None:
    """What one client stores another loads, byte for byte."""
    with serving(tmp_path, cpu(24), nvme(tmp_path / "disk")) as server:
        one, two = AnyEngine(), AnyEngine()
        async with attached(server, one) as a, attached(server, two) as b:
            keys = prompt(40)
            stored = await a.store(keys, one.fill(keys, range(40)))
            assert stored.num_stored == 40, stored
            found = await b.lookup(keys)
            assert found.num_blocks == 40
            loaded = await b.load(keys, two.spec(range(40)))
            assert loaded.num_blocks == 40 == two.count_right(keys, range(40))
            two.wipe()
            handle = b.start_load(keys[:10], two.spec(range(10)), layerwise=True)
            assert await handle.admitted() == 10
            await handle.layer(0)
            assert (await handle).num_blocks == 10 == two.count_right(keys[:10], range(10))
