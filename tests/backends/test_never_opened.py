"""A backend that could not be opened is closed like any other."""

from pathlib import Path

import pytest

from tiered_kv.settings.chain_settings import tier_from
from tiered_kv.settings.registry import make_backend


@pytest.mark.parametrize(
    "url",
    [
        "memory://?capacity=1MiB",
        "file:///kv?capacity=1MiB",
        "shared-fs:///kv?capacity=1MiB",
        "redis://127.0.0.1:1",
        "redis://127.0.0.1:1?cluster=true",
        "s3://bucket/prefix",
        "mooncake://127.0.0.1:1",
    ],
)
async def test_closing_is_quiet(tmp_path: Path, url: str) -> None:
    """Nothing is raised, twice."""
    if url.startswith("mooncake"):
        pytest.importorskip("mooncake.store", exc_type=ImportError)
    backend = make_backend(tier_from(url.replace("/kv", f"{tmp_path}/kv")))
    await backend.aclose()
    await backend.aclose()
