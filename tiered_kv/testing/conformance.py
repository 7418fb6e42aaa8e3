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

import pytest

from tiered_kv.media.backend import Backend, Block, Outcome
from tiered_kv.testing.helpers import GROUPS, block_key, close_backend, make_block, open_context
from tiered_kv.testing.promises import ODD, SIZE, BackendPromises, assert_bytes, assert_loop_goes_on, content
from tiered_kv.values.errors import LayoutMismatchError
from tiered_kv.values.keys import BlockKey


class BackendTests(BackendPromises):
    """Promises of a `Backend`. Define the async fixture ``backend``: opened by `open_backend`, and empty."""

    survives_reopening: ClassVar[bool] = False
    """Whether blocks have to be there after closing and opening again."""
    capacity_bytes: ClassVar[int | None] = 16 << 20
    """What the fixture's backend may keep, in bytes of records with their headers: 300 blocks of 8 KiB at least. None
    where it has no limit of its own, but the server that it stores to has."""

    async def test_returns_every_byte(self, backend: Backend) -> None:
        """What was written is read, header and payload, for whole pages and for odd lengths."""
        for group, shape in enumerate(GROUPS):
            key, into = block_key(1, group), Block.empty(shape.payload_bytes)
            block = make_block(content(1, shape.payload_bytes), key)
            assert await backend.write([key], [block]) == [Outcome.STORED]
            assert await backend.lookup([key]) == [Outcome.HIT]
            assert await backend.read([key], [into]) == [Outcome.HIT]
            assert_bytes([bytes(into)], [bytes(block)])

    async def test_keeps_many_blocks_apart(self, backend: Backend) -> None:
        """A large batch is stored and read as it is ordered, each key with its own bytes."""
        keys = [block_key(n) for n in range(300)]
        blocks = [make_block(content(n), key) for n, key in enumerate(keys)]
        assert await backend.write(keys, blocks) == [Outcome.STORED] * 300
        into = [Block.empty(SIZE) for _ in keys]
        assert await backend.read(keys[::-1], into) == [Outcome.HIT] * 300
        assert_bytes([bytes(block) for block in into[::-1]], [bytes(block) for block in blocks])

    async def test_an_absent_key_is_a_miss(self, backend: Backend) -> None:
        """Asking for, reading or deleting what was never there is no error."""
        assert await backend.lookup([block_key(1)]) == [Outcome.MISS]
        assert await backend.read([block_key(1)], [Block.empty(SIZE)]) == [Outcome.MISS]
        await backend.delete([block_key(1)])

    async def test_one_outcome_per_key_whatever_is_missing(self, backend: Backend) -> None:
        """A hole in a batch is one miss; the blocks around it still arrive."""
        keys = [block_key(n) for n in range(5)]
        await backend.write([keys[1], keys[4]], [make_block(content(1), keys[1]), make_block(content(4), keys[4])])
        expected = [Outcome.MISS, Outcome.HIT, Outcome.MISS, Outcome.MISS, Outcome.HIT]
        into = [Block.empty(SIZE) for _ in keys]
        assert await backend.lookup(keys) == expected
        assert await backend.read(keys, into) == expected
        assert_bytes([bytes(into[n].payload) for n in (1, 4)], [content(1), content(4)])

    async def test_duplicates_in_a_batch_are_harmless(self, backend: Backend) -> None:
        """A key that is in a batch twice gets an outcome, and its bytes, at both places."""
        a, b = block_key(1), block_key(2)
        blocks = [make_block(content(n), key) for n, key in ((1, a), (2, b), (1, a))]
        assert await backend.write([a, b, a], blocks) == [Outcome.STORED] * 3
        into = [Block.empty(SIZE) for _ in range(3)]
        assert await backend.lookup([a, a, b]) == [Outcome.HIT] * 3
        assert await backend.read([a, a, b], into) == [Outcome.HIT] * 3
        assert_bytes([bytes(block.payload) for block in into], [content(1), content(1), content(2)])
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
        key, into = block_key(1), Block.empty(SIZE)
        for n in (1, 2):
            assert await backend.write([key], [make_block(content(n), key)]) == [Outcome.STORED]
        assert await backend.read([key], [into]) == [Outcome.HIT]
        assert_bytes([bytes(into.payload)], [content(2)])

    async def test_a_deleted_key_is_gone(self, backend: Backend) -> None:
        """Deleting removes what was named and nothing else."""
        keys = [block_key(n) for n in range(3)]
        await backend.write(keys, [make_block(content(n), key) for n, key in enumerate(keys)])
        await backend.delete(keys[1:2])
        into = [Block.empty(SIZE) for _ in keys]
        assert await backend.lookup(keys) == [Outcome.HIT, Outcome.MISS, Outcome.HIT]
        assert await backend.read(keys, into) == [Outcome.HIT, Outcome.MISS, Outcome.HIT]

    async def test_keys_of_other_namespaces_do_not_meet(self, backend: Backend) -> None:
        """Equal hashes of other models, salts, epochs or shards are other keys."""
        mine, other = block_key(1, 0), BlockKey(block_key(1, 1).namespace, block_key(1, 0).hash)
        await backend.write([mine], [make_block(content(1), mine)])
        assert await backend.lookup([mine, other]) == [Outcome.HIT, Outcome.MISS]
        await backend.delete([other])
        assert await backend.lookup([mine]) == [Outcome.HIT]

    async def test_another_length_is_corrupt(self, backend: Backend) -> None:
        """A record longer or shorter than the buffers is never a hit, in part or padded."""
        for stored, wanted in ((ODD, SIZE), (SIZE, ODD)):
            key = block_key(stored)
            await backend.write([key], [make_block(content(1, stored), key)])
            assert await backend.read([key], [Block.empty(wanted)]) == [Outcome.CORRUPT]

    async def test_one_block_per_key(self, backend: Backend) -> None:
        """More keys than blocks, or fewer, is an error, and nothing is written."""
        with pytest.raises(LayoutMismatchError):
            await backend.write([block_key(1), block_key(2)], [make_block(content(1), block_key(1))])
        with pytest.raises(LayoutMismatchError):
            await backend.read([block_key(1)], [])
        assert await backend.lookup([block_key(1), block_key(2)]) == [Outcome.MISS] * 2

    async def test_buffers_are_lent_for_the_call_only(self, backend: Backend) -> None:
        """What happens to a block after a write has returned does not reach what was stored."""
        key, block, into = block_key(1), Block.empty(SIZE), Block.empty(SIZE)
        block.fill(bytes(make_block(content(1), key)))
        await backend.write([key], [block.read_only()])
        block.payload[:] = content(2)
        assert await backend.read([key], [into]) == [Outcome.HIT]
        assert_bytes([bytes(into.payload)], [content(1)])

    async def test_what_is_written_is_not_changed(self, backend: Backend) -> None:
        """A write only reads the blocks it is given, by no pointer either: the cache serves them from there."""
        keys = [block_key(n, len(GROUPS) - 1) for n in range(4)]
        blocks = [make_block(content(n, ODD), key) for n, key in enumerate(keys)]
        before = [bytes(block.header) + bytes(block.padded) for block in blocks]
        await backend.write(keys, blocks)
        assert_bytes([bytes(block.header) + bytes(block.padded) for block in blocks], before)

    async def test_nothing_touches_a_buffer_after_its_call(self, backend: Backend) -> None:
        """Once a read has returned, hit or miss, its buffers are another block's: nothing is written there any more."""
        keys = [block_key(n) for n in range(6)]
        await backend.write(keys[:4], [make_block(content(n), key) for n, key in enumerate(keys[:4])])
        into = [Block.empty(SIZE) for _ in keys]
        await backend.read(keys, into)
        anothers = b"\xa5" * SIZE
        for block in into:
            block.header[:], block.payload[:] = anothers[: len(block.header)], anothers
        for _ in range(16):  # turns of the loop, and calls that wait behind whatever threads are still doing
            await backend.lookup(keys)
            await backend.read(keys, [Block.empty(SIZE) for _ in keys])
            await asyncio.sleep(0)
        await close_backend(backend)
        touched = [n for n, block in enumerate(into) if bytes(block) != anothers[: len(block.header)] + anothers]
        assert touched == [], "these buffers of a read were written to after it had returned"

    async def test_a_prefix_is_not_longer_than_what_is_there(self, backend: Backend) -> None:
        """`lookup_prefix` counts the leading keys that are there: none if the first is missing, and never one too many.

        Only behind a hole inside may it count on: that is found by the read.
        """
        keys = [block_key(n) for n in range(9)]
        assert await backend.lookup_prefix(keys) == 0, "nothing was stored yet"
        await backend.write(keys[:4], [make_block(content(n), key) for n, key in enumerate(keys[:4])])
        for asked in range(len(keys) + 1):
            assert await backend.lookup_prefix(keys[:asked]) == min(asked, 4), f"4 are there, {asked} were asked for"
        assert await backend.lookup_prefix(keys[4:]) == 0, "none of these is there"
        await backend.delete(keys[:1])
        assert await backend.lookup_prefix(keys) == 0, "the first is not there any more"

    async def test_it_keeps_no_more_than_its_capacity(self, backend: Backend) -> None:
        """A backend evicts for itself: what is beyond its capacity takes the place of something, or is refused."""
        if self.capacity_bytes is None:
            return  # what it stores to has a limit, not it
        shape, num_bytes = len(GROUPS) - 1, Block.empty(ODD).num_bytes
        keys = [block_key(n, shape) for n in range(3 * self.capacity_bytes // (2 * num_bytes))]
        for at in range(0, len(keys), 16):
            some = keys[at : at + 16]
            outcomes = await backend.write(some, [make_block(content(at + n, ODD), key) for n, key in enumerate(some)])
            assert set(outcomes) <= {Outcome.STORED, Outcome.REFUSED}, "a full medium is no failed one"
        found = [(await backend.read([key], [Block.empty(ODD)]))[0] for key in keys]
        kept = found.count(Outcome.HIT) * num_bytes
        assert kept <= self.capacity_bytes, f"{kept} bytes are kept, {self.capacity_bytes} are allowed"
        assert kept, "of all that was stored nothing is left"

    async def test_readers_and_writers_of_one_key(self, backend: Backend) -> None:
        """Whoever reads while others write gets one of the records whole, or a miss; never a mixture."""
        key = block_key(1, len(GROUPS) - 1)
        blocks = [make_block(content(n, ODD), key) for n in range(8)]
        into = [Block.empty(ODD) for _ in blocks]
        await backend.write([key], [blocks[0]])
        pairs = zip(blocks, into, strict=True)
        calls = ((backend.write([key], [block]), backend.read([key], [buffer])) for block, buffer in pairs)
        outcomes = await asyncio.gather(*chain.from_iterable(calls))
        written = {bytes(block) for block in blocks}
        for block, (outcome,) in zip(into, outcomes[1::2], strict=True):
            assert outcome in {Outcome.HIT, Outcome.MISS}
            assert outcome is Outcome.MISS or bytes(block) in written

    async def test_no_call_holds_up_the_loop(self, backend: Backend) -> None:
        """What blocks is done in threads: while a call waits for the medium, the event loop goes on."""
        keys = [block_key(n) for n in range(20)]
        blocks, into = [make_block(content(n), key) for n, key in enumerate(keys)], [Block.empty(SIZE) for _ in keys]
        await assert_loop_goes_on(
            {
                "write": lambda: backend.write(keys, blocks),
                "lookup": lambda: backend.lookup(keys),
                "lookup_prefix": lambda: backend.lookup_prefix(keys),
                "locate": lambda: backend.locate(keys),
                "read": lambda: backend.read(keys, into),
                "delete": lambda: backend.delete(keys),
            }
        )

    async def test_locate_says_where_the_records_are(self, backend: Backend) -> None:
        """What `locate` names is, byte for byte, the record of each key, packed or not; or it cannot tell."""
        for group, shape in enumerate(GROUPS):
            space = block_key(0, group).namespace
            keys = [BlockKey(space, block_key(n, group).hash, position=n) for n in range(20)]
            blocks = [make_block(content(n, shape.payload_bytes), key) for n, key in enumerate(keys)]
            assert await backend.write(keys, blocks) == [Outcome.STORED] * len(keys)
            for some in (slice(None), slice(3, 8), slice(0)):
                wanted = [bytes(block) for block in blocks[some]]
                if (spec := await backend.locate(keys[some])) is not None:
                    assert len(spec) == len(wanted)
                    assert_bytes(await self.records_at(spec), wanted)
                    assert_bytes(await self.records_at(spec[1:]), wanted[1:])

    async def test_reopening(self, backend: Backend) -> None:
        """After closing and opening again a block is whole or a miss, and what was deleted stays deleted."""
        keys = [block_key(n) for n in range(3)]
        await backend.write(keys, [make_block(content(n), key) for n, key in enumerate(keys)])
        await backend.delete(keys[2:])
        await close_backend(backend)
        with open_context() as context:
            await backend.open(context)
            into = [Block.empty(SIZE) for _ in keys]
            outcomes = await backend.read(keys, into)
            await backend.aclose()
        assert outcomes[2] is Outcome.MISS
        assert set(outcomes) <= {Outcome.HIT, Outcome.MISS}
        if self.survives_reopening:
            assert outcomes[:2] == [Outcome.HIT] * 2
        for n, outcome in enumerate(outcomes):
            assert outcome is Outcome.MISS or bytes(into[n].payload) == content(n)
