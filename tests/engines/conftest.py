"""Tests with real engines: `make test-engines` builds each one's own environment; elsewhere they are skipped."""

import pathlib

import pytest

from environments import RECIPES, Environment, sources_of


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--engines``: build what is missing, and run; and ``--newer``."""
    parser.addoption("--engines", action="store_true", help="build the engines' environments and run their tests")
    parser.addoption("--newer", action="store_true", help="vLLM 0.33's Python on what 0.32 has compiled")


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
    is_newer = pytestconfig.getoption("--newer", default=False)
    return environment_of("vllm_newer" if is_newer else "vllm", pytestconfig)


@pytest.fixture(scope="session", params=["0.32.0", "0.33.0"])
def vllm_sources(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> pathlib.Path:
    """Return a folder with vLLM's Python files, of each version that the adapters are for."""
    if not pytestconfig.getoption("--engines", default=False):
        pytest.skip("vLLM's sources are read in a run of its own: make test-engines")
    if request.param == RECIPES["vllm"].version:
        (packages,) = environment_of("vllm", pytestconfig).folder.glob("lib/python*/site-packages")
        return packages
    return sources_of("vllm", request.param)


def llama_by(environment: Environment, folders: pytest.TempPathFactory) -> pathlib.Path:
    """Make a checkpoint of a small Llama with random weights. Nothing is downloaded."""
    folder = folders.mktemp("tiny-llama")
    environment.run("make_llama.py", folder)
    return folder


@pytest.fixture(scope="session")
def sglang_llama(sglang: Environment, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return a small checkpoint, made in SGLang's environment."""
    return llama_by(sglang, tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_llama(vllm: Environment, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return a small checkpoint, made in vLLM's environment."""
    return llama_by(vllm, tmp_path_factory)
