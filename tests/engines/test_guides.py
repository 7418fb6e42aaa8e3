"""The commands of docs/how-to/vllm.md and docs/how-to/sglang.md, run one after the other with real engines.

And the programs of docs/how-to/why-a-miss.md, which print the names that engines give blocks.
"""

import json
import os
import pathlib
import re
import subprocess
from collections.abc import Mapping
from typing import Any, Final

import pytest

from environments import HERE, ROOT, EngineFailedError, Environment, answer_of
from ports import free_port

OURS: Final = (ROOT, ROOT / "backends")


class Guide:
    """A guide's commands, in a folder, with the engine of an environment.

    Attributes:
        commands: Its blocks of commands, in order.
    """

    def __init__(self, name: str, settings: str, folder: pathlib.Path, replaced: Mapping[str, str]) -> None:
        """Write the file of settings that it shows; what is ``replaced`` is another here."""
        self._folder = folder
        text = (ROOT / "docs" / "how-to" / f"{name}.md").read_text()
        for given, here in replaced.items():
            assert given in text, f"the guide does not say {given!r}"
            text = text.replace(given, here)
        (shown,) = self._blocks(text, f'json title="{settings}"')
        (folder / settings).write_text(shown)
        self.commands = self._blocks(text, "shell")

    @staticmethod
    def _blocks(text: str, kind: str) -> list[str]:
        return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)

    def has_program(self, name: str, command: str) -> None:
        """Put a program in the place of another."""
        shim = self._folder / name
        shim.write_text(f"#!/bin/sh\n{command}\n")
        shim.chmod(0o755)

    def follow(self, environment: Environment, variables: Mapping[str, str]) -> str:
        """Run all commands but the first, which the environment stands for; return what they write.

        Raises:
            EngineFailedError: One of them has failed.
        """
        # A shell that somebody types in goes on where a job was killed.
        script = "".join(self.commands[1:]).replace("kill %1 && wait\n", "kill %% && wait || true\n")
        script = f"set -e -o pipefail -m\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{script}"
        path = os.pathsep.join([str(self._folder), str(environment.python.parent), os.environ["PATH"]])
        done = subprocess.run(
            ["/bin/bash", "-c", script],
            cwd=self._folder,
            env={**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables},
            check=False,
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            raise EngineFailedError(done.stdout[-2000:] + done.stderr[-6000:])
        return done.stdout

    def answers(self) -> tuple[Any, Any]:
        """Return what was answered before the restart and after it."""
        first, second = (json.loads((self._folder / name).read_text()) for name in ("first.json", "second.json"))
        assert first["choices"][0]["text"] == second["choices"][0]["text"]
        return first, second


@pytest.fixture
def ports() -> list[str]:
    """Return ports of which nobody listens on one."""
    return [str(free_port()) for _ in range(2)]


@pytest.mark.timeout(660)  # a server starts twice, and takes minutes on a busy machine
def test_vllms_guide_leads_to_a_hit_after_a_restart(
    vllm: Environment, tiny_llama: pathlib.Path, tmp_path: pathlib.Path, ports: list[str]
) -> None:
    """Who does what it says is answered the same after a restart, by blocks from NVMe."""
    here = {"8000": ports[0], "/mnt/nvme/kv": f"{tmp_path}/kv", "1TiB": "64MiB", "32GiB": "16MiB"}
    guide = Guide("vllm", "kv.json", tmp_path, here)
    assert guide.commands[0] == "pip install 'vllm==0.32.*' .\n"
    # The `vllm` of the CPU's build asks for a distribution of that name, which its own has not.
    server = f'shift\nexec {vllm.python} -m vllm.entrypoints.openai.api_server --enforce-eager --model "$@"'
    guide.has_program("vllm", server)
    on_a_cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    path = os.pathsep.join(map(str, OURS))
    said = guide.follow(vllm, {**on_a_cpu, "PYTHONPATH": path, "MODEL": str(tiny_llama)})
    guide.answers()
    counted = dict(re.findall(r"^vllm:(\w+)_total\{.*?\} (\d+)", said, re.MULTILINE))
    assert int(counted["external_prefix_cache_hits"]) > 0
    assert int(counted["tiered_kv_load_blocks"]) > 0


@pytest.mark.timeout(660)  # as above
def test_sglangs_guide_leads_to_a_hit_after_a_restart(
    sglang: Environment, sglang_llama: pathlib.Path, tmp_path: pathlib.Path, ports: list[str]
) -> None:
    """As vLLM's, with nothing compiled before; SGLang says in its answer how many tokens it did not compute."""
    here = {"30000": ports[0], "8420": ports[1], "/mnt/kv": f"{tmp_path}/kv"}
    guide = Guide("sglang", "tiered_kv.json", tmp_path, here)
    assert guide.commands[0] == "pip install sglang==0.5.23 '.[page,metrics]'\n"
    on_a_cpu = (
        "--device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch "
        "--disable-cuda-graph --disable-overlap-schedule --disable-custom-all-reduce --max-total-tokens 4096 "
        "--skip-server-warmup"
    )
    stub = os.pathsep.join(map(str, (HERE / "sglang_site", HERE, *OURS)))
    variables = f"PYTHONPATH={stub} SGLANG_USE_CPU_ENGINE=1"  # of the server alone: no other python here has torch
    guide.has_program("sglang", f'exec env {variables} {sglang.python.parent}/sglang "$@" {on_a_cpu}')
    extensions = {"TORCH_EXTENSIONS_DIR": f"{tmp_path}/extensions"}  # as after an installation: it compiles one
    guide.follow(sglang, {"MODEL": str(sglang_llama), **extensions})
    first, second = guide.answers()
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (first, second)]
    assert cached[0] == 0
    assert cached[1] >= 20 * 64


def printed_by(environment: Environment, folder: pathlib.Path, name: str, *arguments: str) -> list[str]:
    """Return the hashes that a program of the guide to misses prints in an engine's environment."""
    text = (ROOT / "docs" / "how-to" / "why-a-miss.md").read_text()
    (program,) = re.findall(rf'```python title="{name}"\n(.*?)```', text, re.DOTALL)
    (folder / name).write_text(program)
    words = [str(environment.python), name, *arguments]
    path = os.pathsep.join(map(str, (HERE / "sglang_site", HERE)))
    done = subprocess.run(
        words, cwd=folder, env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True, text=True
    )
    return [str(each) for each in answer_of(done.stdout)]


@pytest.mark.parametrize("salt", ["", "tenant-7"])
def test_vllms_hashes_are_those_of_its_requests(vllm: Environment, tmp_path: pathlib.Path, salt: str) -> None:
    """What `explain --hashes` is given names the blocks that the connector stores."""
    (tmp_path / "prompt.json").write_text(json.dumps(list(range(40))))
    hashes = printed_by(vllm, tmp_path, "vllm_hashes.py", "prompt.json", *([salt] if salt else []))
    assert hashes == vllm.run("vllm_names.py", json.dumps([list(range(40)), salt]))


def test_sglangs_hashes_are_those_of_its_tree(sglang: Environment, tmp_path: pathlib.Path) -> None:
    """As vLLM's: of whole pages, each chained to the one before."""
    (tmp_path / "prompt.json").write_text(json.dumps(list(range(130))))
    hashes = printed_by(sglang, tmp_path, "sglang_hashes.py", "prompt.json")
    assert hashes == sglang.run("sglang_names.py", json.dumps(list(range(130))))
