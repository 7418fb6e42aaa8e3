"""Runs of a real vLLM over one folder of storage, in a new process each time."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any, Final

from environments import Environment
from folders import NVME, tiers_in

PROMPTS: Final = [0, 1]
Answer = dict[str, Any]


class Runs:
    """Runs vLLM over one folder of storage, in a new process each time."""

    def __init__(self, vllm: Environment, model: pathlib.Path, folder: pathlib.Path) -> None:
        self.folder = folder
        self._vllm = vllm
        self._model = model

    def arguments(
        self,
        *,
        connector: str = "TieredKVConnector",
        module: str = "tiered_kv.integrations.vllm",
        tiers: list[Any] | None = NVME,
        extra: Mapping[str, Any] | None = None,
        **wanted: Any,
    ) -> str:
        """Return the JSON of what to run."""
        tiers = tiers_in(self.folder, tiers)
        ours = {"load_when": "always", **(extra or {})}  # what pays, a small model on some machine must not decide
        transfer = {
            "kv_connector": connector,
            "kv_connector_module_path": module,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {**({"tiers": tiers} if tiers is not None else {}), **ours},
        }
        return json.dumps({"model": str(self._model), "prompts": PROMPTS, "transfer": transfer, **wanted})

    def run(self, **wanted: Any) -> Answer:
        """Run it to its end and return what it generated and counted."""
        metrics = {"TIERED_KV_METRICS": "true"}
        answer: Answer = self._vllm.run("vllm_generate.py", self.arguments(**wanted), variables=metrics)
        return answer

    def run_faulty(self, connector: str, **wanted: Any) -> Answer:
        """Run it with one of the connectors of `vllm_faults`."""
        return self.run(connector=connector, module="vllm_faults", **wanted)


def hits_of(answer: Answer) -> int:
    """Return the tokens that the engine itself counted as external hits."""
    return int(answer["counters"]["vllm:external_prefix_cache_hits"])
