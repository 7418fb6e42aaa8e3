"""A real vLLM on a CPU, end to end."""

import json
import pathlib
from typing import Any

import pytest

from environments import Environment


@pytest.fixture(scope="session")
def alone(vllm: Environment, tiny_llama: pathlib.Path) -> Any:  # noqa: ANN401 - JSON
    """Return what the engine generates without us."""
    return vllm.run("vllm_generate.py", json.dumps({"model": str(tiny_llama), "rounds": 2}))


def test_the_engine_alone_generates_the_same_twice(alone: Any) -> None:  # noqa: ANN401 - JSON
    """What the other tests compare with does not depend on chance, and depends on the prompt."""
    first, second = alone["rounds"]
    assert first["tokens"] == second["tokens"]
    assert first["tokens"][0] != first["tokens"][1]
