import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tiered_kv.catalog.policies.base import LRUPolicy
from tiered_kv.settings.registry import known_media, make_backend, medium_for_scheme, resolve, resolve_policy
from tiered_kv.settings.tier_settings import StorageTierSettings
from tiered_kv.values.errors import ConfigurationError
from tiered_kv_backends.memory import MemoryBackend

FAKE = """
    from tiered_kv.media.backend import Backend
    from tiered_kv.settings.tier_settings import StorageTierSettings

    class Tape(Backend):
        schemes = ("tape+tcp",)
        class Settings(StorageTierSettings):
            medium: str = "tape"
            url: str = ""
        def __init__(self, settings): self.settings = settings
        async def lookup(self, keys): return []
        async def read(self, keys, into): return []
        async def write(self, keys, blocks): return []
        async def delete(self, keys): pass

    class Half(Backend):
        Settings = StorageTierSettings
        async def lookup(self, keys): return []

    class Unset(Tape):
        Settings = dict

    not_a_class = 7
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package of another author's: some media that work and some that do not."""
    (tmp_path / "registry_fakes.py").write_text(textwrap.dedent(FAKE))
    (tmp_path / "registry_fakes_driver.py").write_text("import registry_fakes_absent_driver\n")
    (tmp_path / "registry_fakes_broken.py").write_text("1 / 0\n")
    info = tmp_path / "other_media-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-media\nVersion: 1.0\nProvides-Extra: drum\n")
    entries = {
        "tape": "registry_fakes:Tape",
        "drum": "registry_fakes_driver:Drum",
        "half": "registry_fakes:Half",
        "number": "registry_fakes:not_a_class",
    }
    lines = "\n".join(f"{name} = {value}" for name, value in entries.items())
    (info / "entry_points.txt").write_text(f"[tiered_kv.backends]\n{lines}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_our_media_are_found_by_name() -> None:
    """What comes with the library needs no path; the cache's own tiers come first."""
    assert resolve("memory") is MemoryBackend
    assert known_media()[:2] == ("gpu", "cpu")
    assert {"memory", "nvme"} <= set(known_media())


def test_media_of_other_packages_are_found_by_name(installed: Path) -> None:
    """An installed package's entry point is all it takes."""
    assert "tape" in known_media()
    assert resolve("tape").__name__ == "Tape"
    assert resolve("tape") is resolve("registry_fakes:Tape")


@pytest.mark.parametrize(
    ("medium", "message"),
    [
        ("memroy", "no medium is called 'memroy': did you mean 'memory'? known are cpu, drum, gpu, half, memory,"),
        ("gpu", "'gpu' is made by the cache itself"),
        ("drum", "No module named 'registry_fakes_absent_driver'): pip install 'other-media[drum]'"),
        ("half", "'half' does not implement delete, read, write"),
        ("number", "is 7, no subclass of Backend or SlotBackend"),
        ("registry_fakes:Unset", "registry_fakes:Unset needs a class attribute Settings"),
        ("registry_fakes:Tap", "module registry_fakes has no class 'Tap': did you mean 'Tape'?"),
        ("os.path:Nope", "module os.path has no class 'Nope', nor any other"),
        ("registry_fake_:Tape", "install what provides 'registry_fake_', or correct the path"),
        ("registry_fakes_broken:Tape", "cannot be imported (ZeroDivisionError: division by zero)"),
        ("registry_fakes:", "write 'package.module:Class'"),
        (":Tape", "write 'package.module:Class'"),
        ("builtins:int", "no subclass of Backend"),
    ],
)
def test_what_is_no_medium_says_what_to_write(installed: Path, medium: str, message: str) -> None:
    """Each way of being wrong has a message of its own, never an ImportError or AttributeError."""
    with pytest.raises(ConfigurationError) as caught:
        resolve(medium)
    assert message in str(caught.value)


def test_the_cause_of_a_failed_import_is_kept(installed: Path) -> None:
    """A traceback shows where in the package it failed."""
    with pytest.raises(ConfigurationError) as caught:
        resolve("drum")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_two_packages_cannot_take_one_name(installed: Path) -> None:
    """Which of them is meant is not left to the order of sys.path."""
    info = installed / "second-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: second\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tiered_kv.backends]\nmemory = registry_fakes:Tape\n")
    with pytest.raises(ConfigurationError, match="offered by several packages"):
        resolve("memory")


def test_a_scheme_leads_to_its_medium(installed: Path) -> None:
    """By the medium's name, or by what its class lists, though other media cannot be imported."""
    schemes = ("cpu", "memory", "tape", "tape+tcp", "file", "shared-fs")
    assert [medium_for_scheme(scheme) for scheme in schemes] == ["cpu", "memory", "tape", "tape", "nvme", "shared_fs"]


def test_an_unknown_scheme_says_which_media_could_not_be_asked(installed: Path) -> None:
    """It may belong to the medium whose driver is missing."""
    with pytest.raises(ConfigurationError, match=r"no medium takes URLs of tapes://: .*'tape'.*other-media\[drum\]"):
        medium_for_scheme("tapes")


def test_an_unknown_scheme_says_nothing_of_media_that_come_with_us() -> None:
    """Which schemes are theirs is known, whether their drivers are there or not."""
    code = (
        "import sys; sys.modules['redis'] = sys.modules['mooncake'] = sys.modules['obstore'] = None\n"
        "from tiered_kv.settings.registry import medium_for_scheme\n"
        "print(medium_for_scheme('rediss'), medium_for_scheme('gs'))\n"
        "try: medium_for_scheme('ftp')\n"
        "except ValueError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("redis s3\nno medium takes URLs of ftp://: known are abfs,")
    assert "cannot be imported" not in said


@pytest.mark.parametrize(("medium", "driver"), [("s3", "obstore"), ("redis", "redis"), ("mooncake", "mooncake")])
def test_an_import_without_its_driver_names_the_extra_once(medium: str, driver: str) -> None:
    """Of a class that a program imports by itself, too."""
    code = (
        f"import sys; sys.modules['{driver}'] = None\n"
        "from tiered_kv.settings.registry import resolve\n"
        f"try: import tiered_kv_backends.{medium}\n"
        "except ImportError as error: print(error)\n"
        f"try: resolve('{medium}')\n"
        "except ValueError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert [line.count(f"pip install 'tiered-kv[{medium}]'") for line in said.splitlines()] == [1, 1]


def test_a_client_that_cannot_be_loaded_is_not_to_be_installed_again(tmp_path: Path) -> None:
    """Mooncake's is there, and links a library of the system that is not."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake/__init__.py").touch()
    (tmp_path / "mooncake/store.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object file')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from tiered_kv.settings.registry import resolve\n"
        "try: resolve('mooncake')\n"
        "except ValueError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "apt-get install libibverbs1" in said
    assert "libibverbs.so.1: cannot open" in said
    assert "pip install" not in said


def test_a_backend_is_made_from_its_settings() -> None:
    """It has them, and is not open."""
    settings = MemoryBackend.Settings(capacity="1MiB")
    backend = make_backend(settings)
    assert isinstance(backend, MemoryBackend)
    assert backend.settings is settings


def test_a_backend_is_not_made_from_settings_of_another(installed: Path) -> None:
    """The message names both models."""
    with pytest.raises(
        ConfigurationError, match=r"'tape' takes registry_fakes:Tape\.Settings, got .*:StorageTierSettings"
    ):
        make_backend(StorageTierSettings(medium="tape"))


def test_policies_are_found_by_name_and_by_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Names go to the catalog as they are, paths as classes."""
    (tmp_path / "registry_policy.py").write_text(
        "from tiered_kv.catalog.policies.base import LRUPolicy\nclass Mine(LRUPolicy): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve_policy("arc") == "arc"
    mine = resolve_policy("registry_policy:Mine")
    assert isinstance(mine, type)
    assert issubclass(mine, LRUPolicy)
    assert resolve_policy(mine) is mine


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: resolve_policy("lrv"), "one of lru, arc"),
        (
            lambda: resolve_policy("tiered_kv.catalog.policies.make_policy:LRU"),  # which imports many other classes
            "has no class 'LRU': known are ARCPolicy, GuardedPolicy, LHDPolicy, LRUPolicy, MQPolicy$",
        ),
        (lambda: resolve_policy("builtins:int"), r"no subclass of tiered_kv\.Policy$"),
        (lambda: resolve_policy("tiered_kv.catalog.policies.base:Policy"), "does not implement __len__, add"),
        (lambda: resolve("tiered_kv.media.backend:Backend"), "does not implement delete, lookup"),
    ],
)
def test_what_is_no_policy_is_refused(call: Callable[[], object], message: str) -> None:
    """Before a tier is made of it."""
    with pytest.raises(ConfigurationError, match=message):
        call()
