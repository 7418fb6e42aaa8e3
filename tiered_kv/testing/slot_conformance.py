"""What a backend promises whose slots the cache owns, as tests: see ``conformance.py``."""

import asyncio
from itertools import chain
from typing import ClassVar

import numpy as np
import pytest

from tiered_kv.media.backend import Block, Outcome, Recovered, SlotBackend
from tiered_kv.media.record import verify
from tiered_kv.testing.helpers import GROUPS, block_key, block_names, close_backend, make_block, open_context
from tiered_kv.testing.promises import ODD, SIZE, BackendPromises, assert_bytes, assert_loop_goes_on, content
from tiered_kv.values.errors import ConfigurationError, LayoutMismatchError


class SlotBackendTests(BackendPromises):
    """Promises of a `SlotBackend`. Define the fixture ``backend``: opened by `open_backend`, empty, of 32 MiB."""

    survives_reopening: ClassVar[bool] = True
    """Whether blocks have to be there after closing and opening again."""

    async def test_returns_every_byte(self, backend: SlotBackend) -> None:
        """What was written to a slot is read from it, header and payload, for whole pages and for odd lengths."""
        for group, shape in enumerate(GROUPS):
            into = Block.empty(shape.payload_bytes)
            block = make_block(content(1, shape.payload_bytes), block_key(1, group))
            assert await _write(backend, {3: 1}, group) == [Outcome.STORED]
            assert await backend.read(group, _slots([3]), [into]) == [Outcome.HIT]
            assert_bytes([bytes(into)], [bytes(block)])

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
        into = [Block.empty(SIZE) for _ in slots]
        assert await backend.read(0, np.arange(150), into) == [Outcome.HIT] * 150
        assert_bytes([bytes(block.payload) for block in into], [content(n) for n in range(150)])

    async def test_one_outcome_per_slot(self, backend: SlotBackend) -> None:
        """An empty batch has none, and a slot read twice in a batch has two."""
        assert await _write(backend, {}) == []
        assert await backend.read(0, _slots([]), []) == []
        await _write(backend, {5: 1})
        into = [Block.empty(SIZE) for _ in range(2)]
        assert await backend.read(0, _slots([5, 5]), into) == [Outcome.HIT] * 2
        assert_bytes([bytes(block.payload) for block in into], [content(1)] * 2)

    async def test_an_unwritten_slot_is_no_block(self, backend: SlotBackend) -> None:
        """A slot that nothing was written to reads as a miss, or as bytes that are no record of any key."""
        into = [Block.empty(SIZE) for _ in range(3)]
        await _write(backend, {1: 1})
        outcomes = await backend.read(0, _slots([0, 1, 2]), into)
        assert outcomes[1] is Outcome.HIT
        for n in (0, 2):
            assert outcomes[n] is Outcome.MISS or verify(block_key(1), into[n]) is not Outcome.HIT

    async def test_no_call_holds_up_the_loop(self, backend: SlotBackend) -> None:
        """What blocks is done in threads: while a call waits for the medium, the event loop goes on."""
        slots, into = np.arange(20), [Block.empty(SIZE) for _ in range(20)]
        names = block_names([block_key(n) for n in range(20)])
        await assert_loop_goes_on(
            {
                "write": lambda: _write(backend, dict(enumerate(range(20)))),
                "read": lambda: backend.read(0, slots, into),
                "locate": lambda: backend.locate(0, slots),
                "checkpoint": lambda: backend.checkpoint(0, names, slots),
                "forget": lambda: backend.forget(0, slots),
            }
        )

    async def test_a_write_replaces(self, backend: SlotBackend) -> None:
        """A slot holds what was written to it last, and is found under that name alone."""
        await _write(backend, {2: 1})
        await _write(backend, {2: 7})
        into = Block.empty(SIZE)
        assert await backend.read(0, _slots([2]), [into]) == [Outcome.HIT]
        assert_bytes([bytes(into.payload)], [content(7)])
        assert await self._reopen(backend, [1, 7]) in self._allowed({7: 2})

    async def test_one_block_per_slot(self, backend: SlotBackend) -> None:
        """More slots than blocks, or fewer, is an error."""
        with pytest.raises(LayoutMismatchError):
            await backend.read(0, _slots([0, 1]), [Block.empty(SIZE)])
        with pytest.raises(LayoutMismatchError):
            await backend.write(0, _slots([]), block_names([]), [Block.empty(SIZE)])

    async def test_a_block_of_another_length_goes_nowhere(self, backend: SlotBackend) -> None:
        """A block that is longer or shorter than a slot is an error, and leaves the neighbours as they are."""
        await _write(backend, {0: 0, 1: 1, 2: 2})
        for size in (SIZE + 1, ODD):
            with pytest.raises(LayoutMismatchError):
                await backend.write(0, _slots([1]), block_names([block_key(9)]), [make_block(content(9, size))])
            with pytest.raises(LayoutMismatchError):
                await backend.read(0, _slots([1]), [Block.empty(size)])
        into = [Block.empty(SIZE) for _ in range(3)]
        await backend.read(0, np.arange(3), into)
        assert_bytes([bytes(block.payload) for block in into], [content(n) for n in range(3)])

    async def test_many_calls_at_once(self, backend: SlotBackend) -> None:
        """Reads and writes of other slots run side by side, each with its own bytes."""
        await _write(backend, {n: n for n in range(40)})
        into = [[Block.empty(SIZE) for _ in range(4)] for _ in range(10)]
        reads = [backend.read(0, np.arange(4 * n, 4 * n + 4), blocks) for n, blocks in enumerate(into)]
        writes = [_write(backend, {slot: slot + 1000}) for slot in range(40, 80)]
        await asyncio.gather(*reads, *writes)
        assert_bytes([bytes(block.payload) for block in chain(*into)], [content(n) for n in range(40)])
        blocks = [Block.empty(SIZE) for _ in range(40)]
        await backend.read(0, np.arange(40, 80), blocks)
        assert_bytes([bytes(block.payload) for block in blocks], [content(n + 1000) for n in range(40, 80)])

    async def test_locate_says_where_the_records_are(self, backend: SlotBackend) -> None:
        """What `locate` names is, byte for byte, the record in each slot; or it cannot tell."""
        for group, shape in enumerate(GROUPS):
            assert await _write(backend, {5: 1, 0: 2, 6: 3}, group) == [Outcome.STORED] * 3
            blocks = [make_block(content(n, shape.payload_bytes), block_key(n, group)) for n in (2, 3, 1)]
            wanted = [bytes(block) for block in blocks]
            if (spec := await backend.locate(group, _slots([0, 6, 5]))) is not None:
                assert len(spec) == 3
                assert_bytes(await self.records_at(spec), wanted)
                assert_bytes(await self.records_at(spec[1:]), wanted[1:])

    async def test_what_was_stored_is_recovered(self, backend: SlotBackend) -> None:
        """After closing and opening again each block is found once, in its slot, the last written last."""
        await _write(backend, {4: 40, 9: 90})
        await _write(backend, {0: 10})
        assert await self._reopen(backend, [10, 40, 90]) in self._allowed({40: 4, 90: 9, 10: 0})

    async def test_what_was_forgotten_is_not_recovered(self, backend: SlotBackend) -> None:
        """A forgotten slot does not come back, and one written anew after it does."""
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

    async def test_what_is_written_is_not_changed(self, backend: SlotBackend) -> None:
        """A write only reads the blocks it is given, by no pointer either: the cache serves them from there."""
        block = make_block(content(1), block_key(1))
        before = bytes(block)
        await backend.write(0, _slots([0]), block_names([block_key(1)]), [block])
        assert_bytes([bytes(block)], [before])

    async def test_nothing_touches_a_buffer_after_its_call(self, backend: SlotBackend) -> None:
        """Once a read has returned its buffers are another block's: nothing is written there any more."""
        await _write(backend, {n: n for n in range(4)})
        into = [Block.empty(SIZE) for _ in range(4)]
        await backend.read(0, np.arange(4), into)
        anothers = b"\xa5" * SIZE
        for block in into:
            block.header[:], block.payload[:] = anothers[: len(block.header)], anothers
        for _ in range(16):  # turns of the loop, and calls that wait behind whatever threads are still doing
            await backend.read(0, np.arange(4), [Block.empty(SIZE) for _ in range(4)])
            await asyncio.sleep(0)
        await close_backend(backend)
        touched = [n for n, block in enumerate(into) if bytes(block) != anothers[: len(block.header)] + anothers]
        assert touched == [], "these buffers of a read were written to after it had returned"

    async def test_a_medium_that_can_be_resized_keeps_what_stays(self, backend: SlotBackend) -> None:
        """Who overrides `fit` and `resize` keeps the blocks of the slots that stay, grows again, and finds all."""
        if type(backend).fit is SlotBackend.fit:
            with pytest.raises(ConfigurationError):
                backend.fit(16 << 20)
            return
        few, many = backend.fit(16 << 20), backend.fit(32 << 20)
        assert 1 < few < many, "more bytes have more slots"
        with pytest.raises(ConfigurationError):
            backend.fit(1)
        await _write(backend, {0: 1, few - 1: 2, many - 1: 3})
        last = GROUPS[1].num_slots(few) - 1
        await _write(backend, {last: 5}, group=1)
        await backend.forget(0, _slots([many - 1]))  # what is given up holds nothing
        await backend.resize(few)
        await self._check(backend, {0: 1, few - 1: 2})
        await self._check(backend, {last: 5}, group=1)
        await backend.resize(many)
        assert await _write(backend, {many - 1: 4}) == [Outcome.STORED], "what was given back can be written again"
        await self._check(backend, {0: 1, few - 1: 2, many - 1: 4})
        assert await self._reopen(backend, [1, 2, 3, 4]) in self._allowed({1: 0, 2: few - 1, 4: many - 1})

    async def _check(self, backend: SlotBackend, blocks: dict[int, int], group: int = 0) -> None:
        """Check that slots hold the blocks ``{slot: n}``."""
        size = GROUPS[group].payload_bytes
        into = [Block.empty(size) for _ in blocks]
        assert await backend.read(group, _slots(list(blocks)), into) == [Outcome.HIT] * len(blocks)
        assert_bytes([bytes(block.payload) for block in into], [content(n, size) for n in blocks.values()])

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
            into = [Block.empty(SIZE) for _ in found]
            outcomes = await backend.read(0, recovered.slots, into)
            await backend.aclose()
        assert outcomes == [Outcome.HIT] * len(found)
        assert_bytes([bytes(block.payload) for block in into], [content(n) for n, _ in found])
        return found


def _slots(slots: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.array(slots, np.int64)


def _pairs(recovered: Recovered) -> "zip[tuple[np.ndarray[tuple[int], np.dtype[np.uint64]], np.int64]]":
    return zip(recovered.names, recovered.slots, strict=True)


async def _write(backend: SlotBackend, blocks: dict[int, int], group: int = 0) -> list[Outcome]:
    """Write ``{slot: n}``: the ``n``-th key's block to each slot."""
    keys = [block_key(n, group) for n in blocks.values()]
    size = GROUPS[group].payload_bytes
    records = [make_block(content(n, size), key) for n, key in zip(blocks.values(), keys, strict=True)]
    return await backend.write(group, _slots(list(blocks)), block_names(keys), records)
