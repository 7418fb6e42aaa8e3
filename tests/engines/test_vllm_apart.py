"""Prefill and decode in two engines that run side by side: one computes and stores, the other loads and goes on."""

import contextlib
import json
import pathlib
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from asked import Asked, asked
from environments import Environment
from tests.support.serving import serving
from tiered_kv import CacheLimits, TieredKVServer

FOUND = 9 * 32
"""Tokens of a prompt of 300 that are full blocks."""


@dataclass
class Apart:
    """The two engines, and what is between them.

    Attributes:
        prefill: Only stores.
        decode: Only loads.
        num_stored: Says how many blocks are between them.
    """

    prefill: Asked
    decode: Asked
    num_stored: Callable[[], int]

    def wait_for(self, num_blocks: int) -> None:
        """Wait until so many blocks are there, or prefill has ended."""
        while self.prefill.process.poll() is None and self.num_stored() < num_blocks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.prefill.process.wait(0.1)


@pytest.fixture(scope="module", params=["shared_fs", "server"])
def apart(
    request: pytest.FixtureRequest,
    vllm: Environment,
    tiny_llama: pathlib.Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Apart]:
    """Return engines of one model over a shared directory, or over a host's server."""
    folder = tmp_path_factory.mktemp("apart")
    with ExitStack() as stack:
        if request.param == "server":
            tiers = [{"medium": "cpu", "capacity": "16MiB"}]
            server = stack.enter_context(serving(folder, *tiers, limits=CacheLimits()))
            extra: Mapping[str, Any] = {"connect": f"unix://{server.path}"}

            def num_stored() -> int:
                shares = TieredKVServer.health_at(server.path)["shares"]
                return sum(tier["ready"] for share in shares for tier in share.get("tiers", ()))
        else:
            extra = {"tiers": ["cpu://?capacity=4MiB", f"shared-fs://{folder}/shared?capacity=64MiB"]}

            def num_stored() -> int:
                return sum(path.stat().st_size > 8192 for path in folder.glob("shared/**/*") if path.is_file())

        def engine(role: str) -> Asked:
            transfer = {
                "kv_connector": "TieredKVConnector",
                "kv_connector_module_path": "tiered_kv.integrations.vllm",
                "kv_role": role,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
            }
            return stack.enter_context(asked(vllm, {"model": str(tiny_llama), "transfer": transfer}))

        yield Apart(engine("kv_producer"), engine("kv_consumer"), num_stored)


@pytest.fixture(scope="module")
def alone(vllm: Environment, tiny_llama: pathlib.Path) -> list[list[int]]:
    """Return what one engine generates, per prompt."""
    answer = vllm.run("vllm_generate.py", json.dumps({"model": str(tiny_llama), "prompts": [0, 1]}))
    tokens: list[list[int]] = answer["rounds"][0]["tokens"]
    return tokens


def test_decode_loads_what_prefill_has_computed(apart: Apart, alone: list[list[int]]) -> None:
    """Prefill gives one token; decode finds every full block of the prompt and generates what one engine would."""
    assert apart.prefill.ask(0, 1)["tokens"] == alone[0][:1]
    apart.wait_for(9)
    answer = apart.decode.ask(0, 16)
    assert answer["tokens"] == alone[0]
    assert answer["cached"] == FOUND


def test_decode_computes_what_is_not_there_and_stores_nothing(apart: Apart, alone: list[list[int]]) -> None:
    """A prompt that prefill never had is answered all the same; it is not found by others."""
    before = apart.num_stored()
    answer = apart.decode.ask(1, 16)
    assert (answer["tokens"], answer["cached"]) == (alone[1], 0)
    assert apart.num_stored() == before
