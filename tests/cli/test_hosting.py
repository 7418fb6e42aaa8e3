"""``tiered-kv status --host``: how a server is, as an operator or a readiness probe asks."""

import json
from pathlib import Path

from typer.testing import CliRunner

from tests.support.any_layout import AnyEngine, cpu, prompt
from tests.support.serving import attached, serving
from tiered_kv.cli.app import app


async def test_a_server_says_who_is_attached_and_what_it_keeps(tmp_path: Path) -> None:
    """A row for each tier of each model, one for each client, and 0 as the exit code."""
    engine, keys = AnyEngine(), prompt(8)
    with serving(tmp_path, cpu(16)) as server:
        async with attached(server, engine) as kv:
            await kv.store(keys, engine.fill(keys, range(8)))
            shown = CliRunner().invoke(app, ["status", "--host", str(server.path)])
            said = CliRunner().invoke(app, ["status", "--host", str(server.path), "--json"])
    assert (shown.exit_code, said.exit_code) == (0, 0)
    (share,) = json.loads(said.stdout)["shares"]
    assert share["tiers"][0] | {"hits": 0} == {
        "tier": "cpu", "num_slots": 16, "ready": 8, "leased": 0, "pending": 0, "hits": 0,
    }  # fmt: skip


def test_no_server_is_one_line_and_exit_2(tmp_path: Path) -> None:
    """A readiness probe fails; a person reads why."""
    asked = CliRunner().invoke(app, ["status", "--host", str(tmp_path / "none.sock")])
    assert asked.exit_code == 2
    assert asked.stderr.count("\n") == 1
