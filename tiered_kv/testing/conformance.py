"""What a backend promises, as tests: the docstring of one that fails is the promise that was broken.

```python
class TestMyBackend(BackendTests):
    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[MyBackend]:
        async with open_backend(MyBackend(MyBackend.Settings(path=tmp_path))) as backend:
            yield backend
```
"""

import asyncio
from itertools import chain
from typing import ClassVar

import numpy as np
import pytest

from tiered_kv.backend import Backend, Block, Outcome, Recovered, SlotBackend
from tiered_kv.errors import LayoutMismatchError
from tiered_kv.keys import BlockKey
from tiered_kv.record import verify
from tiered_kv.testing.helpers import GROUPS, block_key, block_names, close_backend, make_block, open_context

_SIZE = GROUPS[0].payload_bytes
_ODD = GROUPS[-1].payload_bytes


def _content(n: int, num_bytes: int = _SIZE) -> bytes:
    return (b"%08d" % n * (num_bytes // 8 + 1))[:num_bytes]


_ON_ASYNCIO = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"], scope="session")]


class BackendTests:
    """Promises of a `Backend`. Define the async fixture ``backend``: opened by `open_backend`, empty, of 16 MiB."""

    pytestmark = _ON_ASYNCIO

    survives_reopening: ClassVar[bool] = False
    """Whether blocks have to be there after closing and opening again."""

    async def test_returns_every_byte(self, backend: Backend) -> None:
        """What was written is read, header and payload, for whole pages and for odd lengths."""
        for group, shape in enumerate(GROUPS):
            key, into = block_key(1, group), Block.empty(shape.payload_bytes)
            block = make_block(_content(1, shape.payload_bytes), key)
            assert await backend.write([key], [block]) == [Outcome.STORED]
            assert await backend.lookup([key]) == [Outcome.HIT]
            assert await backend.read([key], [into]) == [Outcome.HIT]
            assert bytes(into) == bytes(block)

    async def test_keeps_many_blocks_apart(self, backend: Backend) -> None:
        """A large batch is stored and read as it is ordered, each key with its own bytes."""
        keys = [block_key(n) for n in range(300)]
        blocks = [make_block(_content(n), key) for n, key in enumerate(keys)]
        assert await backend.write(keys, blocks) == [Outcome.STORED] * 300
        into = [Block.empty(_SIZE) for _ in keys]
        assert await backend.read(keys[::-1], into) == [Outcome.HIT] * 300
        assert [bytes(block) for block in into[::-1]] == [bytes(block) for block in blocks]

    async def test_an_absent_key_is_a_miss(self, backend: Backend) -> None:
        """Asking for, reading or deleting what was never there is no error."""
        assert await backend.lookup([block_key(1)]) == [Outcome.MISS]
        assert await backend.read([block_key(1)], [Block.empty(_SIZE)]) == [Outcome.MISS]
        await backend.delete([block_key(1)])

    async def test_one_outcome_per_key_whatever_is_missing(self, backend: Backend) -> None:
        """A hole in a batch is one miss; the blocks around it still arrive."""
        keys = [block_key(n) for n in range(5)]
        await backend.write([keys[1], keys[4]], [make_block(_content(1), keys[1]), make_block(_content(4), keys[4])])
        expected = [Outcome.MISS, Outcome.HIT, Outcome.MISS, Outcome.MISS, Outcome.HIT]
        into = [Block.empty(_SIZE) for _ in keys]
        assert await backend.lookup(keys) == expected
        assert await backend.read(keys, into) == expected
        assert [bytes(into[n].payload) for n in (1, 4)] == [_content(1), _content(4)]

    async def test_duplicates_in_a_batch_are_harmless(self, backend: Backend) -> None:
        """A key that is in a batch twice gets an outcome, and its bytes, at both places."""
        a, b = block_key(1), block_key(2)
        blocks = [make_block(_content(n), key) for n, key in ((1, a), (2, b), (1, a))]
        assert await backend.write([a, b, a], blocks) == [Outcome.STORED] * 3
        into = [Block.empty(_SIZE) for _ in range(3)]
        assert await backend.lookup([a, a, b]) == [Outcome.HIT] * 3
        assert await backend.read([a, a, b], into) == [Outcome.HIT] * 3
        assert [bytes(block.payload) for block in into] == [_content(1), _content(1), _content(2)]
        await backend.delete([a, a])
        assert await backend.lookup([a, b]) == [Outcome.MISS, Outcome.HIT]

    async def test_an_empty_batch_is_harmless(self, backend: Backend) -> None:
        """No keys, no outcomes."""
        assert await backend.lookup([]) == []
        assert await backend.read([], []) == []
        assert await backend.write([], []) == []
        await backend.delete([])

    async def test_a_write_replaces(self, backend: Backend) -> None:
        """The last write of a key is what is read: a bad record is repaired by storing it again."""
        key, into = block_key(1), Block.empty(_SIZE)
        for n in (1, 2):
            assert await backend.write([key], [make_block(_content(n), key)]) == [Outcome.STORED]
        assert await backend.read([key], [into]) == [Outcome.HIT]
        assert bytes(into.payload) == _content(2)

    async def test_a_deleted_key_is_gone(self, backend: Backend) -> None:
        """Deleting removes what was named and nothing else."""
        keys = [block_key(n) for n in range(3)]
        await backend.write(keys, [make_block(_content(n), key) for n, key in enumerate(keys)])
        await backend.delete(keys[1:2])
        into = [Block.empty(_SIZE) for _ in keys]
        assert await backend.lookup(keys) == [Outcome.HIT, Outcome.MISS, Outcome.HIT]
        assert await backend.read(keys, into) == [Outcome.HIT, Outcome.MISS, Outcome.HIT]

    async def test_keys_of_other_namespaces_do_not_meet(self, backend: Backend) -> None:
        """Equal hashes of other models, salts, epochs or shards are other keys."""
        mine, other = block_key(1, 0), BlockKey(block_key(1, 1).namespace, block_key(1, 0).hash)
        await backend.write([mine], [make_block(_content(1), mine)])
        assert await backend.lookup([mine, other]) == [Outcome.HIT, Outcome.MISS]
        await backend.delete([other])
        assert await backend.lookup([mine]) == [Outcome.HIT]

    async def test_another_length_is_corrupt(self, backend: Backend) -> None:
        """A record longer or shorter than the buffers is never a hit, in part or padded."""
        for stored, wanted in ((_ODD, _SIZE), (_SIZE, _ODD)):
            key = block_key(stored)
            await backend.write([key], [make_block(_content(1, stored), key)])
            assert await backend.read([key], [Block.empty(wanted)]) == [Outcome.CORRUPT]

    async def test_one_block_per_key(self, backend: Backend) -> None:
        """More keys than blocks, or fewer, is an error, and nothing is written."""
        with pytest.raises(LayoutMismatchError):
            await backend.write([block_key(1), block_key(2)], [make_block(_content(1), block_key(1))])
        with pytest.raises(LayoutMismatchError):
            await backend.read([block_key(1)], [])
        assert await backend.lookup([block_key(1), block_key(2)]) == [Outcome.MISS] * 2

    async def test_buffers_are_lent_for_the_call_only(self, backend: Backend) -> None:
        """What happens to a block after a write has returned does not reach what was stored."""
        key, block, into = block_key(1), Block.empty(_SIZE), Block.empty(_SIZE)
        block.fill(bytes(make_block(_content(1), key)))
        await backend.write([key], [block.read_only()])
        block.payload[:] = _content(2)
        assert await backend.read([key], [into]) == [Outcome.HIT]
        assert bytes(into.payload) == _content(1)

    async def test_readers_and_writers_of_one_key(self, backend: Backend) -> None:
        """Whoever reads while others write gets one of the records whole, or a miss; never a mixture."""
        key = block_key(1, len(GROUPS) - 1)
        blocks = [make_block(_content(n, _ODD), key) for n in range(8)]
        into = [Block.empty(_ODD) for _ in blocks]
        await backend.write([key], [blocks[0]])
        pairs = zip(blocks, into, strict=True)
        calls = ((backend.write([key], [block]), backend.read([key], [buffer])) for block, buffer in pairs)
        outcomes = await asyncio.gather(*chain.from_iterable(calls))
        written = {bytes(block) for block in blocks}
        for block, (outcome,) in zip(into, outcomes[1::2], strict=True):
            assert outcome in {Outcome.HIT, Outcome.MISS}
            assert outcome is Outcome.MISS or bytes(block) in written

    async def test_reopening(self, backend: Backend) -> None:
        """After closing and opening again a block is whole or a miss, and what was deleted stays deleted."""
        keys = [block_key(n) for n in range(3)]
        await backend.write(keys, [make_block(_content(n), key) for n, key in enumerate(keys)])
        await backend.delete(keys[2:])
        await close_backend(backend)
        with open_context() as context:
            await backend.open(context)
            into = [Block.empty(_SIZE) for _ in keys]
            outcomes = await backend.read(keys, into)
            await backend.aclose()
        assert outcomes[2] is Outcome.MISS
        assert outcomes[:2] == [Outcome.HIT] * 2 if self.survives_reopening else set(outcomes) <= set(_FOUND)
        for n, outcome in enumerate(outcomes):
            assert outcome is Outcome.MISS or bytes(into[n].payload) == _content(n)


_FOUND = (Outcome.HIT, Outcome.MISS)


class SlotBackendTests:
    """Promises of a `SlotBackend`. Define the fixture ``backend``: opened by `open_backend`, empty, of 32 MiB."""

    pytestmark = _ON_ASYNCIO

    survives_reopening: ClassVar[bool] = True
    """Whether blocks have to be there after closing and opening again."""

    async def test_returns_every_byte(self, backend: SlotBackend) -> None:
        """What was written to a slot is read from it, header and payload, for whole pages and for odd lengths."""
        for group, shape in enumerate(GROUPS):
            into = Block.empty(shape.payload_bytes)
            block = make_block(_content(1, shape.payload_bytes), block_key(1, group))
            assert await _write(backend, {3: 1}, group) == [Outcome.STORED]
            assert await backend.read(group, _slots([3]), [into]) == [Outcome.HIT]
            assert bytes(into) == bytes(block)

    async def test_groups_do_not_meet(self, backend: SlotBackend) -> None:
        """A slot of one KV group is not the slot of that number of another."""
        for group in range(len(GROUPS)):
            await _write(backend, {0: group}, group)
        for group, shape in enumerate(GROUPS):
            into = Block.empty(shape.payload_bytes)
            assert await backend.read(group, _slots([0]), [into]) == [Outcome.HIT]
            assert verify(block_key(group, group), into) is Outcome.HIT

    async def test_keeps_many_blocks_apart(self, backend: SlotBackend) -> None:
        """A large batch goes to its slots whatever their order; neighbours do not touch each other."""
        slots = np.random.default_rng(1).permutation(150)
        assert await _write(backend, {slot: slot for slot in slots.tolist()}) == [Outcome.STORED] * 150
        into = [Block.empty(_SIZE) for _ in slots]
        assert await backend.read(0, np.arange(150), into) == [Outcome.HIT] * 150
        assert [bytes(block.payload) for block in into] == [_content(n) for n in range(150)]

    async def test_one_outcome_per_slot(self, backend: SlotBackend) -> None:
        """An empty batch has none, and a slot read twice in a batch has two."""
        assert await _write(backend, {}) == []
        assert await backend.read(0, _slots([]), []) == []
        await _write(backend, {5: 1})
        into = [Block.empty(_SIZE) for _ in range(2)]
        assert await backend.read(0, _slots([5, 5]), into) == [Outcome.HIT] * 2
        assert [bytes(block.payload) for block in into] == [_content(1)] * 2

    async def test_an_unwritten_slot_is_no_block(self, backend: SlotBackend) -> None:
        """A slot that nothing was written to reads as a miss, or as bytes that are no record of any key."""
        into = [Block.empty(_SIZE) for _ in range(3)]
        await _write(backend, {1: 1})
        outcomes = await backend.read(0, _slots([0, 1, 2]), into)
        assert outcomes[1] is Outcome.HIT
        for n in (0, 2):
            assert outcomes[n] is Outcome.MISS or verify(block_key(1), into[n]) is not Outcome.HIT

    async def test_a_write_replaces(self, backend: SlotBackend) -> None:
        """A slot holds what was written to it last, and is found under that name alone."""
        await _write(backend, {2: 1})
        await _write(backend, {2: 7})
        into = Block.empty(_SIZE)
        assert await backend.read(0, _slots([2]), [into]) == [Outcome.HIT]
        assert bytes(into.payload) == _content(7)
        assert await self._reopen(backend, [1, 7]) in self._allowed({7: 2})

    async def test_one_block_per_slot(self, backend: SlotBackend) -> None:
        """More slots than blocks, or fewer, is an error."""
        with pytest.raises(LayoutMismatchError):
            await backend.read(0, _slots([0, 1]), [Block.empty(_SIZE)])
        with pytest.raises(LayoutMismatchError):
            await backend.write(0, _slots([]), block_names([]), [Block.empty(_SIZE)])

    async def test_a_block_of_another_length_goes_nowhere(self, backend: SlotBackend) -> None:
        """A block that is longer or shorter than a slot is an error, and leaves the neighbours as they are."""
        await _write(backend, {0: 0, 1: 1, 2: 2})
        for size in (_SIZE + 1, _ODD):
            with pytest.raises(LayoutMismatchError):
                await backend.write(0, _slots([1]), block_names([block_key(9)]), [make_block(_content(9, size))])
            with pytest.raises(LayoutMismatchError):
                await backend.read(0, _slots([1]), [Block.empty(size)])
        into = [Block.empty(_SIZE) for _ in range(3)]
        await backend.read(0, np.arange(3), into)
        assert [bytes(block.payload) for block in into] == [_content(n) for n in range(3)]

    async def test_many_calls_at_once(self, backend: SlotBackend) -> None:
        """Reads and writes of other slots run side by side, each with its own bytes."""
        await _write(backend, {n: n for n in range(40)})
        into = [[Block.empty(_SIZE) for _ in range(4)] for _ in range(10)]
        reads = [backend.read(0, np.arange(4 * n, 4 * n + 4), blocks) for n, blocks in enumerate(into)]
        writes = [_write(backend, {slot: slot + 1000}) for slot in range(40, 80)]
        await asyncio.gather(*reads, *writes)
        assert [bytes(block.payload) for block in chain(*into)] == [_content(n) for n in range(40)]
        blocks = [Block.empty(_SIZE) for _ in range(40)]
        await backend.read(0, np.arange(40, 80), blocks)
        assert [bytes(block.payload) for block in blocks] == [_content(n + 1000) for n in range(40, 80)]

    async def test_what_was_stored_is_recovered(self, backend: SlotBackend) -> None:
        """After closing and opening again each block is found once, in its slot, the last written last."""
        await _write(backend, {4: 40, 9: 90})
        await _write(backend, {0: 10})
        assert await self._reopen(backend, [10, 40, 90]) in self._allowed({40: 4, 90: 9, 10: 0})

    async def test_what_was_forgotten_is_not_recovered(self, backend: SlotBackend) -> None:
        """A forgotten slot does not come back, and one written anew behind it does."""
        await _write(backend, {0: 1, 1: 2, 2: 3})
        await backend.forget(0, _slots([0, 2]))
        await _write(backend, {2: 4})
        assert await self._reopen(backend, [1, 2, 3, 4]) in self._allowed({2: 1, 4: 2})

    async def test_a_checkpoint_is_what_is_recovered(self, backend: SlotBackend) -> None:
        """After a checkpoint its blocks, least recently used first, and those stored since are found, and no others."""
        await _write(backend, {0: 1, 1: 2, 2: 3})
        names = block_names([block_key(3), block_key(1)])
        await backend.checkpoint(0, names, _slots([2, 0]), sync=True)
        await _write(backend, {5: 6})
        assert await self._reopen(backend, [1, 2, 3, 6]) in self._allowed({3: 2, 1: 0, 6: 5})

    def _allowed(self, exactly: dict[int, int]) -> list[list[tuple[int, int]]]:
        """What may be recovered, as (key, slot) in order."""
        return [list(exactly.items())] + [[]] * (not self.survives_reopening)

    async def _reopen(self, backend: SlotBackend, known: list[int]) -> list[tuple[int, int]]:
        """Close and open; return the (key, slot) of the first group that are found, in order, and check their bytes."""
        await close_backend(backend)
        with open_context() as context:
            recovered = (await backend.open(context))[0]
            names = {block_names([block_key(n)]).tobytes(): n for n in known}
            found = [(names[name.tobytes()], int(slot)) for name, slot in _pairs(recovered)]
            into = [Block.empty(_SIZE) for _ in found]
            outcomes = await backend.read(0, recovered.slots, into)
            await backend.aclose()
        assert outcomes == [Outcome.HIT] * len(found)
        assert [bytes(block.payload) for block in into] == [_content(n) for n, _ in found]
        return found


def _slots(slots: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.array(slots, np.int64)


def _pairs(recovered: Recovered) -> "zip[tuple[np.ndarray[tuple[int], np.dtype[np.uint64]], np.int64]]":
    return zip(recovered.names, recovered.slots, strict=True)


async def _write(backend: SlotBackend, blocks: dict[int, int], group: int = 0) -> list[Outcome]:
    """Write ``{slot: n}``: the ``n``-th key's block to each slot."""
    keys = [block_key(n, group) for n in blocks.values()]
    size = GROUPS[group].payload_bytes
    records = [make_block(_content(n, size), key) for n, key in zip(blocks.values(), keys, strict=True)]
    return await backend.write(group, _slots(list(blocks)), block_names(keys), records)
