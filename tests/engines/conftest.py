"""Tests with real engines: `make test-engines` builds each one's own environment; elsewhere they are skipped."""

import pathlib

import pytest

from environments import Environment


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--engines``: build what is missing, and run."""
    parser.addoption("--engines", action="store_true", help="build the engines' environments and run their tests")


def environment_of(name: str, config: pytest.Config) -> Environment:
    """Return an engine's environment, built; skip where nobody asked for it."""
    if not config.getoption("--engines", default=False):  # only known where this folder is named on the command line
        pytest.skip(f"{name}'s environment is used in a run of its own: make test-engines")
    environment = Environment.of(name)
    environment.build()
    return environment


@pytest.fixture(scope="session")
def sglang(pytestconfig: pytest.Config) -> Environment:
    """Return SGLang's environment."""
    return environment_of("sglang", pytestconfig)


@pytest.fixture(scope="session")
def vllm(pytestconfig: pytest.Config) -> Environment:
    """Return vLLM's environment."""
    return environment_of("vllm", pytestconfig)


@pytest.fixture(scope="session")
def tiny_llama(vllm: Environment, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Make a checkpoint of a small Llama with random weights. Nothing is downloaded."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    vllm.run("make_llama.py", folder)
    return folder
