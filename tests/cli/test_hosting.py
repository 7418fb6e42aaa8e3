"""``tiered-kv status --host``: how a server is, as an operator or a readiness probe asks."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.any_layout import SMALL, AnyEngine, cpu, nvme, prompt
from tests.support.serving import attached, serving
from tiered_kv.cli.app import app


async def test_a_server_says_who_is_attached_and_what_it_keeps(tmp_path: Path) -> None:
    """A row for each tier of each model, one for each client, and 0 as the exit code."""
    engine, keys = AnyEngine(), prompt(8)
    with serving(tmp_path, cpu(16)) as server:
        async with attached(server, engine) as kv:
            await kv.store(keys, engine.fill(keys, range(8)))
            shown = CliRunner().invoke(app, ["status", "--host", str(server.path)])
            said = CliRunner().invoke(app, ["status", "--host", f"unix://{server.path}", "--json"])
    assert (shown.exit_code, said.exit_code) == (0, 0)
    (share,) = json.loads(said.stdout)["shares"]
    assert share["tiers"][0] | {"hits": 0} == {
        "tier": "cpu", "num_slots": 16, "ready": 8, "leased": 0, "pending": 0, "hits": 0,
    }  # fmt: skip


async def test_models_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """A client of another dtype has a share of its own: each row says which, and a line says why there are two."""
    other = replace(SMALL, groups=(replace(SMALL.groups[0], dtype="float16"),))
    with serving(tmp_path, cpu(64)) as server:
        async with attached(server, AnyEngine()), attached(server, AnyEngine(other)):
            directories = [share["directory"][:8] for share in server.health()["shares"]]
            shown = CliRunner().invoke(app, ["status", "--host", str(server.path)], env={"COLUMNS": "200"})
    assert len(set(directories)) == 2
    assert all(f"[{directory}]" in shown.stdout for directory in directories)
    assert "differ in dtype, layout or ranks" in shown.stdout


async def test_a_model_that_nobody_has_asked_for_since_the_start_is_named_by_its_folder(tmp_path: Path) -> None:
    """What it is called only its next client knows; until then its row is not an empty one."""
    engine, keys, disk = AnyEngine(), prompt(4), nvme(tmp_path / "kv", 1 << 20)
    with serving(tmp_path, cpu(16), disk) as server:
        async with attached(server, engine) as kv:
            await kv.store(keys, engine.fill(keys, range(4)))
            await kv.flush()
            (share,) = server.health()["shares"]
    with serving(tmp_path, cpu(16), disk) as server:
        shown = CliRunner().invoke(app, ["status", "--host", str(server.path)])
    assert f"not asked for yet [{share['directory'][:8]}]" in shown.stdout


def test_no_server_is_one_line_and_exit_2(tmp_path: Path) -> None:
    """A readiness probe fails; a person reads why."""
    asked = CliRunner().invoke(app, ["status", "--host", str(tmp_path / "none.sock")])
    assert asked.exit_code == 2
    assert asked.stderr.count("\n") == 1
    assert "none.sock: No such file or directory: 'tiered-kv serve' starts one" in asked.stderr


def test_who_asks_for_the_status_imports_no_torch(tmp_path: Path) -> None:
    """A readiness probe asks every few seconds: it is done before torch would be there."""
    code = "import sys; from tiered_kv.cli.app import app; app(standalone_mode=False); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "status", "--host", str(tmp_path / "none.sock")]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (asked.returncode, asked.stderr.startswith("tiered-kv: no server at")) == (0, True)


@pytest.mark.parametrize("page", ["", "127.0.0.1:0"])
def test_metrics_that_nobody_can_read_are_told_of(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are at the page's address, and without one nowhere."""
    told: list[str] = []
    monkeypatch.setattr("tiered_kv.host.serve.run", lambda _: True)
    monkeypatch.setattr("tiered_kv.cli.hosting.log", lambda _level, event, **_: told.append(event))
    monkeypatch.setenv("TIERED_KV_METRICS", "true")
    monkeypatch.setenv("TIERED_KV_PAGE", page)
    assert CliRunner().invoke(app, ["serve"]).exit_code == 0
    assert told == ([] if page else ["host.metrics_unserved"])


def heard_until(last: bytes, systemd: socket.socket) -> list[bytes]:
    """Return what is said before this."""
    return list(iter(lambda: systemd.recv(100), last))


@pytest.mark.slow
async def test_a_server_runs_as_its_environment_says_and_drains_at_sigterm(tmp_path: Path) -> None:
    """It tells systemd when engines may attach, that it lives, and when it ends; what was stored is there."""
    engine, keys, path = AnyEngine(), prompt(8), tmp_path / "kv.sock"
    environment = os.environ | {
        "TIERED_KV_TIERS": json.dumps([cpu(16), nvme(tmp_path / "disk")], default=str),
        "TIERED_KV_HOST__SOCKET": str(path),
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
        "WATCHDOG_USEC": "1000",
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(environment["NOTIFY_SOCKET"])
        command = [sys.executable, "-m", "tiered_kv", "serve"]
        serving_process = await asyncio.create_subprocess_exec(*command, env=environment)
        try:
            assert await asyncio.to_thread(systemd.recv, 100) == b"READY=1"
            shown = await asyncio.to_thread(CliRunner().invoke, app, ["status", "--host", str(path)])
            assert (shown.exit_code, shown.stdout.split(",")[0]) == (0, "ready")
            hearing = asyncio.ensure_future(asyncio.to_thread(heard_until, b"STOPPING=1\nWATCHDOG_USEC=0", systemd))
            async with attached(path, engine) as kv:
                await kv.store(keys, engine.fill(keys, range(8)))
                serving_process.send_signal(signal.SIGTERM)
                assert await serving_process.wait() == 0
            assert set(await hearing) == {b"WATCHDOG=1"}
        finally:
            if serving_process.returncode is None:
                serving_process.kill()
                await serving_process.wait()
    with serving(tmp_path, cpu(16), nvme(tmp_path / "disk")) as server:
        async with attached(server, engine) as kv:
            assert (await kv.lookup(keys)).by_tier == {"nvme": 8}
