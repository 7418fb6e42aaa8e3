"""Engines in containers of their own: other processes and mounts, nothing in common but the directory of the socket."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint

from tests.host.test_deaths import facts, until_clean

ENGINE = """
import asyncio, sys, threading
import torch
from tiered_kv import GPULoadStoreSpec, KVLayout, ModelIdentity, TieredKV, hash_blocks

async def main(what, url):
    caches = [torch.zeros(2, 16, 16, 2, 16, dtype=torch.bfloat16) for _ in range(2)]
    layout = KVLayout.from_tensors(caches, block_size=16)
    keys = hash_blocks(range(128), block_size=16)
    model = ModelIdentity("contained", weights="w0")
    async with TieredKV.connect(url, model=model, layout=layout, device="cpu") as kv:
        kv.register_kv_caches(caches)
        if what == "store":
            for number, cache in enumerate(caches):
                cache[:, :8] = torch.arange(8).view(1, 8, 1, 1, 1) + 10 * number
            print((await kv.store(keys, GPULoadStoreSpec(range(8)))).num_stored, flush=True)
        elif what == "load":
            loaded = await kv.load(keys, GPULoadStoreSpec(range(8, 16)))
            right = all(bool((cache[:, 8:] == torch.arange(8).view(1, 8, 1, 1, 1) + 10 * number).all())
                        for number, cache in enumerate(caches))
            print(loaded.num_blocks if right else "other bytes", flush=True)
        else:
            async with kv.lease(keys) as lease:
                print(lease.num_blocks, flush=True)
                threading.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""
CONFIG = """
[[tiers]]
medium = "cpu"
capacity = "4MiB"
[host]
socket = "{}"
"""
APART = ["unshare", "--pid", "--mount", "--ipc", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
HIDDEN = 'mount -t tmpfs none /dev/shm && exec "$@"'


def may_unshare() -> bool:
    """Say whether this process may make namespaces."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*APART, HIDDEN, "sh", "true"], capture_output=True, check=False).returncode == 0


@contextmanager
def contained(*arguments: str | Path) -> Iterator["subprocess.Popen[str]"]:
    """Run Python with these arguments, where it sees no other process and no shared memory; it is killed in the end."""
    command = [*APART, HIDDEN, "sh", sys.executable, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
async def test_containers_share_blocks_by_the_socket_alone(tmp_path: Path) -> None:
    """One stores, another loads the same bytes; what a third holds ends when it is killed."""
    if not may_unshare():
        pytest.skip("namespaces cannot be made here: run as root, with unshare of util-linux")
    socket, config, engine = tmp_path / "kv.sock", tmp_path / "kv.toml", tmp_path / "engine.py"
    config.write_text(CONFIG.format(socket))
    engine.write_text(ENGINE)
    with contained("-m", "tiered_kv.cli", "serve", "--config", config):
        with anyio.fail_after(60):
            while not facts(tmp_path).get("is_ready"):
                await checkpoint()
        for what in ("store", "load"):
            with contained(engine, what, f"unix://{socket}") as process:
                said, _ = await anyio.to_thread.run_sync(process.communicate)
            assert said == "8\n", what
        with contained(engine, "hold", f"unix://{socket}") as holding:
            assert holding.stdout is not None
            assert await anyio.to_thread.run_sync(holding.stdout.readline) == "8\n"
            assert facts(tmp_path)["clients"][0]["leases"] == 1
        await until_clean(tmp_path)
