"""What a server shows: a page over all its models, its metrics, and its status at the command line."""

import asyncio
import re
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from anyio import fail_after
from prometheus_client.parser import text_string_to_metric_families

from tests.support.any_layout import STRIDE, AnyEngine, cpu, prompt
from tests.support.caches import a_while
from tests.support.command_line import answer, run
from tests.support.hints import hints
from tests.support.serving import attached, serving
from tiered_kv import BlockState, ConfigurationError, ModelIdentity
from tiered_kv.cli import hosting
from tiered_kv.host.asked_calls import MOST_KEYS
from tiered_kv.values.events import Event

KEYS = prompt(12)
ONE = ModelIdentity('one<script>"', weights="w0")


async def get(socket: Path, path: str) -> httpx.Response:
    """Ask the page of a server that shows it at a socket."""

    def ask() -> httpx.Response:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket))) as client:
            return client.get(f"http://localhost{path}")

    return await asyncio.to_thread(ask)


@pytest.fixture
def shown(tmp_path: Path) -> dict[str, Any]:
    """Settings of a server that shows all that it can."""
    return {"metrics": True, "page": f"unix:{tmp_path / 'page.sock'}"}


async def test_a_page_and_metrics_over_all_models(tmp_path: Path, shown: dict[str, Any]) -> None:
    """Models are listed with their pages; metrics have a value of ``model`` for each of them, and go with it."""
    engine, socket = AnyEngine(), tmp_path / "page.sock"
    with serving(tmp_path, cpu(32), settings=shown) as server:
        async with (
            attached(server, engine, model=ONE) as kv,
            attached(server, model=ModelIdentity("two", weights="w0")),
        ):
            await kv.store(KEYS, engine.fill(KEYS, range(12)))
            async with kv.lease(KEYS[:3]):
                listed, metrics = (await get(socket, "/")).text, (await get(socket, "/metrics")).text
            assert "one&lt;script&gt;&quot;" in listed
            assert "two</a>, 1 clients" in listed
            directory = next(each["directory"] for each in server.health()["shares"] if each["model"] != "two")
            assert f'href="/{directory}/"' in listed
            assert (await get(socket, f"/{directory}/")).text.startswith("<!")
            assert (await get(socket, f"/{directory}/stats.json")).json()["model"] == ONE.name
            assert (await get(socket, "/nobody/")).status_code == 404
            assert 'tiered_kv_host_clients{model="two"} 1.0' in metrics
            assert 'tiered_kv_host_leases{model="one<script>\\""} 1.0' in metrics
            assert f'tiered_kv_host_client_bytes{{client="{server.health()["clients"][0]["name"]}",model=' in metrics
            assert 'tiered_kv_host_share_bytes{model="two",tier="cpu"}' in metrics
            assert "tiered_kv_host_refused_total 0.0" in metrics
            assert metrics.count('model="two"') > 20  # what its cache counts
    assert not socket.exists()
    with serving(tmp_path, cpu(32), settings=shown) as server:
        assert 'model="two"' not in (await get(socket, "/metrics")).text  # others in this process may have theirs


async def test_no_sample_is_there_twice(tmp_path: Path, shown: dict[str, Any]) -> None:
    """Of a process that is attached twice there is one, of all that it holds: a scrape with two of one name fails."""
    engine = AnyEngine()
    with serving(tmp_path, cpu(32), settings=shown) as server:
        async with attached(server, engine, model=ONE) as kv, attached(server, engine, model=ONE) as other:
            await kv.store(KEYS, engine.fill(KEYS, range(12)))
            async with kv.lease(KEYS[:3]), other.lease(KEYS[:2]):
                metrics = (await get(tmp_path / "page.sock", "/metrics")).text
    samples = [each for family in text_string_to_metric_families(metrics) for each in family.samples]
    names = Counter((each.name, *sorted(each.labels.items())) for each in samples)
    assert [name for name, times in names.items() if times > 1] == []
    (held,) = [each.value for each in samples if each.name == "tiered_kv_host_client_bytes"]
    assert held == 5 * STRIDE


async def test_hints_of_a_models_blocks_come_by_http(tmp_path: Path, shown: dict[str, Any]) -> None:
    """Where the server has a token for them, at its page of the model, for blocks that its clients have stored."""
    token, engine, socket = "0123456789abcdef", AnyEngine(), tmp_path / "page.sock"
    with serving(tmp_path, cpu(32), settings=shown | {"page_hints_token": token}) as server:
        async with attached(server, engine, model=ONE) as kv:
            mine = prompt(12, salt="mine")
            await kv.store(mine, engine.fill(mine, range(12)))
            (directory,) = [each["directory"] for each in server.health()["shares"]]
            named = [bytes(each).hex() for each in mine[8:]]
            asked = {"hashes": named, "salt": "mine", "kv_hints": hints(("kv.evict", {}))}

            def send() -> httpx.Response:
                with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket))) as client:
                    where = f"http://localhost/{directory}/hints.json"
                    return client.post(where, json=asked, headers={"Authorization": f"Bearer {token}"})

            assert (await asyncio.to_thread(send)).json() == {"actions": 1, "ignored": 0}
            with fail_after(10):
                while (await kv.lookup(mine)).num_blocks > 8:
                    await a_while()


async def test_what_clients_count_as_lookups_is_in_the_metrics(tmp_path: Path, shown: dict[str, Any]) -> None:
    """As of a cache of one's own: from any thread, once for each call, with what befell the rest."""

    async def counted(sample: str) -> bool:
        return re.search(sample, (await get(tmp_path / "page.sock", "/metrics")).text) is not None

    engine = AnyEngine()
    with serving(tmp_path, cpu(32), settings=shown) as server:
        async with attached(server, engine, model=ModelIdentity("one", weights="w0")) as kv:
            await kv.store(KEYS, engine.fill(KEYS, range(12)))
            await kv.evict(KEYS[8:])
            found = kv.membership(KEYS) == BlockState.HIT
            await asyncio.to_thread(kv.count_lookup, KEYS, found)
            kv.count_lookup(KEYS[:2], found[:2])
            kv.count_lookup(KEYS[:0], found[:0])
            async with asyncio.timeout(60):
                while not await counted(r'kv_lookup_blocks_total{.*model="one"} 14\.0'):
                    pass
            assert await counted(r'kv_lookup_missed_blocks_total{.*model="one",reason="removed"} 4\.0')
            with pytest.raises(ConfigurationError, match="12 keys"):
                kv.count_lookup(KEYS, found[:3])
            long = prompt(MOST_KEYS + 100)  # of which other calls would be asked in parts
            kv.count_lookup(long, np.arange(len(long)) < 8)
            async with asyncio.timeout(60):
                while not await counted(rf'kv_lookup_blocks_total{{.*model="one"}} {14 + len(long)}\.0'):
                    pass
            missed = 4 + len(long) - 8
            assert await counted(rf'kv_lookup_missed_blocks_total{{.*model="one",reason="removed"}} {missed}\.0')


async def test_a_long_prompt_that_is_looked_up_is_asked_for_once(tmp_path: Path, shown: dict[str, Any]) -> None:
    """However many blocks it has: a lookup in parts would be several, of which the last ones nobody makes."""
    engine, long, socket = AnyEngine(), prompt(MOST_KEYS + 100), tmp_path / "page.sock"
    with serving(tmp_path, cpu(32), settings=shown) as server:
        async with attached(server, engine, model=ModelIdentity("one", weights="w0")) as kv:
            await kv.store(long[:8], engine.fill(long[:8], range(8)))
            assert (await kv.lookup(long)).num_blocks == 8
            assert (await kv.load(long[:8], engine.spec(range(8)))).num_blocks == 8
            (directory,) = (await get(socket, "/stats.json")).json()["models"]
            asked = (await get(socket, f"/{directory}/stats.json")).json()["asked"]
            assert (asked["requested"], asked["missing"]) == (len(long), len(long) - 8)


async def test_a_server_that_cannot_begin_leaves_nothing_behind(tmp_path: Path, shown: dict[str, Any]) -> None:
    """Neither its socket, nor its lock, nor its page: the next one listens there."""

    def refuse(event: Event) -> None:
        raise ZeroDivisionError(event.name)

    with pytest.raises(ZeroDivisionError), serving(tmp_path, cpu(32), settings=shown, emit=refuse):
        pass
    assert not (tmp_path / "kv.sock").exists()
    with serving(tmp_path, cpu(32), settings=shown):
        assert (await get(tmp_path / "page.sock", "/")).status_code == 200


async def test_a_server_that_shows_nothing_has_no_page(tmp_path: Path) -> None:
    """Neither page nor metrics unless they are asked for."""
    with serving(tmp_path, cpu(32), settings={"page": f"unix:{tmp_path / 'page.sock'}"}) as server:
        async with attached(server):
            assert (await get(tmp_path / "page.sock", "/metrics")).status_code == 404


async def test_the_command_line_is_told_where_each_model_is(tmp_path: Path, shown: dict[str, Any]) -> None:
    """The server's address shows no cache: the error lists the models' addresses, and those work."""
    with serving(tmp_path, cpu(32), settings=shown) as server:
        async with attached(server, model=ModelIdentity("two", weights="w0")):
            for arguments in (("status",), ("explain", "--hashes", str(tmp_path / "hashes.json"))):
                (tmp_path / "hashes.json").write_text("[]")
                result = await run(*arguments, "--at", shown["page"])
                assert result.exit_code == 2
                address, _, name = result.stderr.partition("by --at: ")[2].strip().partition(" ")
                assert name == "(two)"
            assert (await answer("status", "--at", address))["model"] == "two"


async def test_status_shows_shares_clients_and_leases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What each model has and has a right to, and what each client holds."""
    engine = AnyEngine()
    with serving(tmp_path, cpu(32)) as server:
        async with attached(server, engine, name="engine-1") as kv:
            await kv.store(KEYS, engine.fill(KEYS, range(12)))
            async with kv.lease(KEYS[:3]):
                hosting.show(await asyncio.to_thread(hosting.state_of, server.path))
    said = capsys.readouterr().out
    assert "1 client attached" in said
    tier, client = (next(line for line in said.splitlines() if word in line).split() for word in (" cpu ", "engine-1"))
    assert tier[-4:] == ["12", "32", "3", "0"]
    assert client[-6:] == ["0", "0", "0", "0", "1", "0"]
