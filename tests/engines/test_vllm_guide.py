"""The commands of docs/how-to/vllm.md, run one after the other with a real vLLM."""

import json
import os
import pathlib
import re
import socket
import subprocess

import pytest

from environments import ROOT, EngineFailedError, Environment

GUIDE = ROOT / "docs" / "how-to" / "vllm.md"
ON_A_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def blocks_of(text: str, kind: str) -> list[str]:
    """Return the fenced blocks of a kind, in order."""
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


@pytest.mark.timeout(660)  # a server starts twice, and takes minutes on a busy machine
def test_the_guide_leads_to_a_hit_after_a_restart(
    vllm: Environment, tiny_llama: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Who does what it says is answered the same after a restart, by blocks from NVMe."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    text = GUIDE.read_text().replace("8000", port)
    for given, here in {"/mnt/nvme/kv": f"{tmp_path}/kv", "1TiB": "64MiB", "32GiB": "16MiB"}.items():
        text = text.replace(given, here)
    (settings,) = blocks_of(text, 'json title="kv.json"')
    (tmp_path / "kv.json").write_text(settings)
    install, *commands = blocks_of(text, "shell")
    assert install == "pip install vllm tiered-kv\n", "which the environment stands for"
    # The `vllm` of the CPU's build asks for a distribution of that name, which its own has not.
    shim = tmp_path / "vllm"
    shim.write_text(
        f'#!/bin/sh\nshift\nexec {vllm.python} -m vllm.entrypoints.openai.api_server --enforce-eager --model "$@"\n'
    )
    shim.chmod(0o755)
    # A shell that somebody types in goes on where a job was killed, and its user sees where a server did not start.
    script = "".join(commands).replace("kill %1 && wait\n", "kill %% && wait || true\n")
    script = script.replace("do sleep 1;", "do kill -0 $!; sleep 1;")
    script = f"set -e -o pipefail -m\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{script}"
    done = subprocess.run(
        ["/bin/bash", "-c", script],
        cwd=tmp_path,
        env={
            **os.environ,
            **ON_A_CPU,
            "PATH": os.pathsep.join([str(tmp_path), str(vllm.python.parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")]),
            "MODEL": str(tiny_llama),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        },
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise EngineFailedError(done.stdout[-2000:] + done.stderr[-6000:])
    first, second = (
        json.loads((tmp_path / name).read_text())["choices"][0]["text"] for name in ("first.json", "second.json")
    )
    assert first == second
    counted = dict(re.findall(r"^vllm:(\w+)_total\{.*?\} (\d+)", done.stdout, re.MULTILINE))
    assert int(counted["external_prefix_cache_hits"]) > 0
    assert int(counted["tiered_kv_load_blocks"]) > 0
