"""Real engines in environments of their own, built once and kept by version; scripts run in them and answer in JSON.

An engine pins its own torch and a hundred packages more, so none of them goes into the environment of the tests. Each
is named by a `Recipe` in `RECIPES`, built under ``.venv/engines`` of the checkout, and built anew when that changes.
"""

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

HERE: Final = pathlib.Path(__file__).resolve().parent
ROOT: Final = HERE.parent.parent


@dataclass(frozen=True)
class Recipe:
    """How an engine's environment is made.

    Attributes:
        name: Of the engine, and of its file in ``requirements/``.
        version: Of the engine: part of the folder's name.
        without: Packages that its requirements bring along and that break it where they are of no use.
        bare: Requirements that are installed without what they ask for.
        python_of: A package of which this version has no build for CPUs: its Python files are laid over those of the
            one that is installed. What is compiled stays.
    """

    name: str
    version: str
    without: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    python_of: str = ""

    @property
    def requirements(self) -> pathlib.Path:
        """Written by hand: what to install, exactly."""
        return HERE / "requirements" / f"{self.name}.txt"

    @property
    def digest(self) -> str:
        """Changes with anything that the environment is made from."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        ours = project["dependencies"], project["entry-points"]
        facts = (self.requirements.read_text(), self.without, self.bare, self.python_of, ours)
        return hashlib.sha256(repr(facts).encode()).hexdigest()


RECIPES: Final = {
    recipe.name: recipe
    for recipe in (
        # Its own requirements are CUDA's and clouds'; for the fault bench, which drives its local disk.
        Recipe("lmcache", "0.5.6", bare=("lmcache==0.5.6",)),
        # Its own requirements are CUDA's; `sglang_stub` stands in for what it imports of them.
        Recipe("sglang", "0.5.23", bare=("sglang==0.5.23",)),
        # Its torch comes without the three of its family that its requirements name: their import fails.
        Recipe("vllm", "0.32.0", without=("torchvision", "torchaudio", "torchcodec")),
        Recipe("vllm_newer", "0.33.0", without=("torchvision", "torchaudio", "torchcodec"), python_of="vllm"),
    )
}


def sources_of(package: str, version: str) -> pathlib.Path:
    """Return the folder with the Python files of a package that is not installed anywhere, fetched once.

    Raises:
        EngineFailedError: pip could not.
    """
    folder = ROOT / ".venv" / "engines" / f"{package}-{version}-sources"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
            _checked([*pip, "download", "--no-deps", "--dest", temporary, f"{package}=={version}"])
            (wheel,) = pathlib.Path(temporary).glob("*.whl")
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(f"{temporary}/python", [name for name in packed.namelist() if name.endswith(".py")])
            pathlib.Path(temporary, "python").rename(folder)
    return folder


class EngineFailedError(Exception):
    """A script ended badly in an engine's environment; the message ends with what it wrote."""


@dataclass(frozen=True)
class Environment:
    """A built environment: a folder with a Python of its own.

    Attributes:
        recipe: What it was made from.
        folder: Where it is.
        variables: What every script finds in its environment, beside the caller's own.
    """

    recipe: Recipe
    folder: pathlib.Path
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str) -> "Environment":
        """Name the environment of an engine, built or not."""
        recipe = RECIPES[name]
        return cls(recipe, ROOT / ".venv" / "engines" / f"{name}-{recipe.version}")

    @property
    def python(self) -> pathlib.Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def is_built(self) -> bool:
        """Whether it is whole, and of this recipe."""
        stamp = self.folder / "built"
        return stamp.exists() and stamp.read_text() == self.recipe.digest

    def build(self) -> None:
        """Make it, minutes and gigabytes the first time; return at once where it is built.

        Raises:
            EngineFailedError: pip could not.
        """
        if self.is_built:
            return
        if self.python.exists():
            (self.folder / "built").unlink(missing_ok=True)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
            _checked([sys.executable, "-m", "venv", self.folder])
        pip = [self.python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        _checked([*pip, "install", "-r", self.recipe.requirements])
        if self.recipe.bare:
            _checked([*pip, "install", "--no-deps", *self.recipe.bare])
        if self.recipe.without:
            _checked([*pip, "uninstall", "--yes", *self.recipe.without])
        if self.recipe.python_of:
            self._lay_over(self.recipe.python_of, self.recipe.version)
        _checked([*pip, "install", "-e", ROOT])  # backends are found by entry points: a path alone would not do
        (self.folder / "built").write_text(self.recipe.digest)

    def _lay_over(self, package: str, version: str) -> None:
        (packages,) = self.folder.glob("lib/python*/site-packages")
        for path in (packages / package).rglob("*.py"):
            path.unlink()
        shutil.copytree(sources_of(package, version) / package, packages / package, dirs_exist_ok=True)
        metadata = packages / f"{package}-{version}+cpu.dist-info"  # vLLM asks its version for the platform
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}+cpu\n")

    def start(
        self, script: str, *arguments: object, variables: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        """Start a script of this folder in the environment; for tests that end it before it does."""
        return subprocess.Popen(
            [self.python, HERE / script, *map(str, arguments)],
            env=self._variables(variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(
        self, script: str, *arguments: object, variables: Mapping[str, str] | None = None, timeout_s: float = 300
    ) -> Any:
        """Run a script of this folder to its end and return the JSON of its last line.

        Raises:
            EngineFailedError: It ended badly, or was not over in time; then all that it started is ended.
        """
        process = self.start(script, *arguments, variables=variables)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # workers that it started too
            output, _ = process.communicate()
            raise EngineFailedError(f"{script} was not over after {timeout_s} s\n{output[-8000:]}") from None
        if process.returncode:
            raise EngineFailedError(f"{script} ended with {process.returncode}\n{output[-8000:]}")
        return answer_of(output)

    def _variables(self, more: Mapping[str, str] | None) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}}
        path = os.pathsep.join([str(ROOT), str(ROOT / "backends"), str(HERE)])
        return {**inherited, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **self.variables, **(more or {})}


def answer_of(output: str) -> Any:
    """Return the JSON of the last line that is some, as engines like to say good-bye.

    Raises:
        EngineFailedError: There is none.
    """
    for line in reversed(output.splitlines()):
        if line.startswith(("{", "[")):
            try:
                return json.loads(line)
            except ValueError:
                continue
    raise EngineFailedError(f"no line of JSON was written\n{output[-8000:]}")


def _checked(command: Sequence[object]) -> None:
    done = subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True)
    if done.returncode:
        raise EngineFailedError(f"{' '.join(map(str, command))}\n{(done.stdout + done.stderr)[-8000:]}")
