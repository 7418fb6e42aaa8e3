"""Keeping tenants of a shared medium within a quota, by listing it."""

from pathlib import Path

import pytest

from tests.support.any_layout import AnyEngine, open_any, prompt
from tiered_kv import ConfigurationError
from tiered_kv_backends.memory import MemoryBackend
from tiered_kv_backends.quotas import keep_quota

obstore = pytest.importorskip("obstore", reason="obstore is missing: pip install 'tiered-kv[s3]'")
RECORD = 4096 + 1536


def num_files_in(path: Path) -> int:
    """Count objects."""
    return sum(each.is_file() for each in path.rglob("*"))


async def test_of_a_salt_that_has_too_much_some_goes(tmp_path: Path) -> None:
    """As much as it is over, and nothing of others; a second run finds nothing to do."""
    from tiered_kv_backends.s3 import S3Backend  # noqa: PLC0415 - it takes an extra

    settings = {"medium": "s3", "url": f"file://{tmp_path}", "pack_bytes": 0}
    engine = AnyEngine()
    async with open_any(engine, settings) as kv:
        for salt in ("ann", "bob"):
            keys = prompt(12 if salt == "ann" else 6, salt=salt)
            await kv.store(keys, engine.fill(keys, range(len(keys))))
        await kv.flush()
    assert await keep_quota(S3Backend, settings, 8 * RECORD) == 4
    assert await keep_quota(S3Backend, settings, 8 * RECORD) == 0
    assert num_files_in(tmp_path) == 8 + 6
    with pytest.raises(ConfigurationError, match="positive"):
        await keep_quota(S3Backend, settings, 0)
    with pytest.raises(ConfigurationError, match="cannot list"):
        await keep_quota(MemoryBackend, {"capacity": "1MiB"}, 1)
