from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from custom_backend import SQLiteBackend
from tests.support import programs
from tiered_kv.media.backend import Outcome
from tiered_kv.testing import BackendTests, block_key, make_block, open_backend
from tiered_kv.values.errors import ConfigurationError

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_backend.py"


class TestSQLiteBackend(BackendTests):
    survives_reopening = True
    capacity_bytes = 300 * 110_000  # it counts blocks, and those of the tests are smaller than this

    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[SQLiteBackend]:
        """One in a new database."""
        async with open_backend(
            SQLiteBackend(SQLiteBackend.Settings(path=tmp_path / "kv.sqlite", max_blocks=300))
        ) as backend:
            yield backend


async def test_the_oldest_go_first(tmp_path: Path) -> None:
    """There are never more blocks than allowed."""
    keys = [block_key(n) for n in range(5)]
    settings = SQLiteBackend.Settings(path=tmp_path / "kv.sqlite", max_blocks=3)
    async with open_backend(SQLiteBackend(settings)) as backend:
        await backend.write(keys, [make_block(bytes(4096), key) for key in keys])
        assert await backend.lookup(keys) == [Outcome.MISS] * 2 + [Outcome.HIT] * 3


async def test_a_path_that_is_none(tmp_path: Path) -> None:
    """A database that cannot be made is a configuration error."""
    with pytest.raises(ConfigurationError, match="unable to open"):
        async with open_backend(SQLiteBackend(SQLiteBackend.Settings(path=tmp_path / "no" / "kv.sqlite"))):
            pass


@pytest.mark.slow
def test_it_runs() -> None:
    """The example stores a prompt and loads the same bytes by another cache."""
    ran = programs.run(EXAMPLE)
    assert ran.returncode == 0, ran.stderr
    lines = (
        ran.stdout.splitlines()
    )  # among the log's, which goes to the same place unless an application says otherwise
    for line in ("first cache, blocks loaded:  0", "second cache, blocks loaded: 10", "the same bytes: True"):
        assert line in lines
