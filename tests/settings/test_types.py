"""Settings as a type checker of a program of users sees them."""

from pathlib import Path

import pytest

api = pytest.importorskip("mypy.api", reason="mypy is missing: pip install mypy")

PROGRAM = """
from typing import assert_type

from pydantic import ByteSize

from tiered_kv import (
    CacheLimits, CPUTier, Encryption, GPUTier, Size, StorageTierSettings, TieredKVSettings, default_size
)
from tiered_kv_backends.nvme.nvme_settings import NVMeSettings

tiers = [
    GPUTier(capacity="2GiB"),
    CPUTier(capacity="32GiB", max_capacity=64 << 30),
]
assert_type(CPUTier().capacity, ByteSize)
assert_type(CPUTier().max_capacity, ByteSize | None)
settings = TieredKVSettings(tiers=tiers, limits=CacheLimits(bounce="256MiB", window=1 << 24))
assert_type(settings.limits.bounce, ByteSize)
NVMeSettings(path="/mnt/kv", capacity="1TiB", scrub_bandwidth="1GB")  # type: ignore[arg-type]  # the path alone


def keys_of_a_server() -> list[bytes]:
    return [bytes(32)]


Encryption(keys=["..."], names_key="...")
Encryption(keys_file="/run/secrets/kv-keys", names_key_file="/run/secrets/kv-names")
Encryption(keys_from=keys_of_a_server, cipher="aes-256-gmac")
Encryption(keys_from="package.module:name")
Encryption(keys=["..."], cipher="rot13")  # type: ignore[arg-type]
Encryption(key="...")  # type: ignore[call-arg]


class OwnSettings(StorageTierSettings):
    medium: str = "own:Own"
    capacity: Size
    cache: Size = default_size(1 << 20)


OwnSettings(capacity="1GiB")
assert_type(OwnSettings(capacity=5, cache="1MiB").cache, ByteSize)
OwnSettings(capacity=[])  # type: ignore[arg-type]  # no size
CPUTier(capacity=[])  # type: ignore[arg-type]
CPUTier(capacity=None)  # type: ignore[arg-type]
"""


@pytest.mark.slow
def test_strict_mypy_takes_what_the_documentation_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes as text or numbers, keys as text, without a plugin; what is none is an error. A field then has a size."""
    program, none = tmp_path / "program.py", tmp_path / "mypy.ini"
    program.write_text(PROGRAM)
    # torch and numpy, which have no sizes, would take most of the time.
    none.write_text("[mypy]\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\n")
    monkeypatch.setenv("MYPYPATH", f"{Path(__file__).parents[2]}:{Path(__file__).parents[2] / 'backends'}")
    said, errors, _ = api.run(
        ["--strict", "--config-file", str(none), "--cache-dir", str(tmp_path / "cache"), str(program)]
    )
    assert not errors
    assert [line for line in said.splitlines() if line.startswith(str(program))] == [], said
