from collections.abc import AsyncIterator

import pytest

from tiered_kv.media.backend import Block, Outcome
from tiered_kv.testing import BackendTests, block_key, make_block, open_backend
from tiered_kv.values.errors import ConfigurationError
from tiered_kv_backends.memory import MemoryBackend


class TestMemoryBackend(BackendTests):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[MemoryBackend]:
        """One with room for what the tests store."""
        async with open_backend(MemoryBackend(MemoryBackend.Settings(capacity="16MiB"))) as backend:
            yield backend


def backend_of(num_bytes: int) -> MemoryBackend:
    """Return one that needs no opening, since memory does not."""
    return MemoryBackend(MemoryBackend.Settings(capacity=num_bytes))


async def test_the_least_recently_used_goes_first() -> None:
    """A read is a use; the blocks together never exceed the capacity."""
    keys = [block_key(n) for n in range(4)]
    backend = backend_of(3 * 8192)
    await backend.write(keys[:3], [make_block(bytes(4096), key) for key in keys[:3]])
    await backend.read(keys[:1], [Block.empty(4096)])
    await backend.write(keys[3:], [make_block(bytes(4096), keys[3])])
    assert await backend.lookup(keys) == [Outcome.HIT, Outcome.MISS, Outcome.HIT, Outcome.HIT]


async def test_what_is_larger_than_everything_is_refused() -> None:
    """A block that cannot fit evicts nothing."""
    backend = backend_of(3 * 8192)
    await backend.write([block_key(1)], [make_block(bytes(4096))])
    assert await backend.write([block_key(2)], [make_block(bytes(65536))]) == [Outcome.REFUSED]
    assert await backend.lookup([block_key(1)]) == [Outcome.HIT]


@pytest.mark.parametrize("capacity", ["0", "much", -1])
def test_a_capacity_is_a_size(capacity: object) -> None:
    """What is no number of bytes above zero is refused when settings are made."""
    with pytest.raises(ConfigurationError):
        MemoryBackend.Settings(capacity=capacity)
