"""Engines in containers of their own: each sees its processes and shared memory alone, and what it installed.

Of what others write it sees the directory of the socket, and nothing else.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from tests.host.test_deaths import facts, until_clean
from tests.support.caches import a_while

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
APART = ["unshare", "--pid", "--mount", "--ipc", "--fork", "--kill-child", "--mount-proc", "sh", "-ec"]
HIDDEN = """
shared=$1; hidden=$2; shift 2
mount --bind "$shared" /mnt
mount -t tmpfs none "$hidden"
mkdir -p "$shared"
mount --move /mnt "$shared"
mount -t tmpfs none /dev/shm
exec "$@"
"""


def may_unshare(shared: Path) -> bool:
    """Say whether this process may make namespaces, and mount in them."""
    if shutil.which("unshare") is None:
        return False
    command = [*APART, HIDDEN, "sh", str(shared), str(shared.parent), "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextmanager
def contained(shared: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Run Python with these arguments, where of all that tests write it sees one folder; it is killed in the end."""
    command = [*APART, HIDDEN, "sh", str(shared), str(shared.parent), sys.executable, *arguments]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TIERED_KV_TIERS": '["cpu://?capacity=4MiB"]',
        "TIERED_KV_HOST__SOCKET": str(shared / "kv.sock"),
    }
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
async def test_containers_share_blocks_by_the_socket_alone(tmp_path: Path) -> None:
    """One stores, another loads the same bytes; what a third holds ends when it is killed."""
    (shared := tmp_path / "shared").mkdir()
    (tmp_path / "secret").touch()
    if not may_unshare(shared):
        pytest.skip("namespaces cannot be made here: run as root, with unshare of util-linux")
    url = f"unix://{shared}/kv.sock"
    with contained(shared, "-c", f"import os; print(os.listdir({str(tmp_path)!r}), os.getpid())") as process:
        said, _ = await anyio.to_thread.run_sync(process.communicate)
        assert said == "['shared'] 1\n"
    with contained(shared, "-m", "tiered_kv", "serve"):
        with anyio.fail_after(60):
            while not facts(shared).get("is_ready"):
                await a_while()
        for what in ("store", "load"):
            with contained(shared, "-c", ENGINE, what, url) as process:
                said, _ = await anyio.to_thread.run_sync(process.communicate)
            assert said == "8\n", what
        with contained(shared, "-c", ENGINE, "hold", url) as holding:
            assert holding.stdout is not None
            assert await anyio.to_thread.run_sync(holding.stdout.readline) == "8\n"
            assert facts(shared)["clients"][0]["leases"] == 1
        await until_clean(shared)
