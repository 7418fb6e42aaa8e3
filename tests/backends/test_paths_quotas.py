"""Keeping tenants of a shared medium within a quota, by listing it."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

import pytest
from typing_extensions import override

from tests.support.any_layout import AnyEngine, open_any, prompt
from tiered_kv import ConfigurationError
from tiered_kv.media.inventory import Found, Inventory, Place
from tiered_kv_backends.memory import MemoryBackend
from tiered_kv_backends.paths import keep_quota

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


class TwiceNamed(Inventory):
    """Has ten records of one byte each, and names some of them twice, as Redis does while its table grows."""

    def __init__(self) -> None:
        self.deleted: list[str] = []
        self.is_held = False

    @override
    async def hold(self) -> None:
        self.is_held = True

    @override
    async def found(self, salt: str = "") -> AsyncIterator[list[Found]]:
        assert self.is_held  # else a cache may put others in the place of what is found
        for numbers in (range(8), range(2, 10)):
            yield [Found(str(n), Place("f", "e", "replicated", "ann"), 1) for n in numbers]

    @override
    async def read(self, found: Found) -> bytes | None:
        return None

    @override
    async def delete(self, found: Sequence[Found]) -> None:
        self.deleted += [each.where for each in found]


@pytest.mark.parametrize(("quota", "num_deleted"), [(10, 0), (12, 0), (7, 3)])
async def test_what_is_named_twice_counts_once(quota: int, num_deleted: int) -> None:
    """Nobody within the quota loses a block, and of what is beyond it all goes."""
    inventory = TwiceNamed()

    class Medium(MemoryBackend):
        @classmethod
        @override
        def inventory(cls, settings: object) -> AbstractAsyncContextManager[Inventory]:
            return nullcontext(inventory)

    assert await keep_quota(Medium, {"capacity": "1MiB"}, quota) == num_deleted
    assert len(set(inventory.deleted)) == len(inventory.deleted) == num_deleted
