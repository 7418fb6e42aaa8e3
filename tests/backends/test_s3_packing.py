import pytest

from tiered_kv.media.backend import RecordShape
from tiered_kv.values.keys import BlockKey, Namespace, epoch_digest, hash_blocks

pytest.importorskip("obstore", reason="obstore is missing: pip install 'tiered-kv[s3]'")

from tiered_kv_backends.s3.packing import Packing, Unit

SHAPE = RecordShape(b"f" * 32, 4096)
SPACE = Namespace(SHAPE.fingerprint, epoch_digest("w"))
PER_PACK = 4


def chain(num_blocks: int, seed: int = 0) -> list[BlockKey]:
    """Return the keys of a prompt."""
    return SPACE.keys(hash_blocks([seed] * num_blocks, block_size=1))


def new_packing() -> Packing:
    """Return one with four records of 8 KiB in a pack."""
    return Packing([SHAPE], PER_PACK * 8192)


def pack_of(key: BlockKey) -> str:
    """Name the pack whose last key this is."""
    return f"{key.path}.x{PER_PACK}"


def test_groups_are_aligned_to_positions_and_named_by_their_last_key() -> None:
    """Whoever has a group's last key names its pack, wherever the batch begins; the rest are single keys."""
    keys = chain(10)
    first, second = pack_of(keys[3]), pack_of(keys[7])
    whole = [Unit(0, 4, first, 0, 4), Unit(4, 8, second, 0, 4), Unit(8, 9), Unit(9, 10)]
    assert new_packing().units(keys) == whole
    assert new_packing().units(keys[2:6]) == [Unit(0, 2, first, 2, 4), Unit(2, 3), Unit(3, 4)]


def test_last_keys_are_remembered() -> None:
    """A batch that ends within a group finds the pack, once a batch with the group's last key has been seen."""
    seen, keys = new_packing(), chain(8)
    seen.units(keys)
    assert seen.units(keys[4:6]) == [Unit(0, 2, pack_of(keys[7]), 0, 4)]


def test_neighbours_of_other_prompts_share_no_pack() -> None:
    """Where a prompt leaves another within a group, only what they share is sought in the pack that is known."""
    seen, keys, other = new_packing(), chain(4), chain(4, seed=1)
    seen.units(keys)
    assert seen.units([keys[0], keys[1], other[2]]) == [Unit(0, 2, pack_of(keys[3]), 0, 4), Unit(2, 3)]


def test_blocks_of_no_group_of_the_cache_are_single() -> None:
    """Nobody knows how long they are, and so how many a pack would hold."""
    keys = Namespace(b"g" * 32, epoch_digest("w")).keys(hash_blocks([0] * 4, block_size=1))
    assert new_packing().units(keys) == [Unit(n, n + 1) for n in range(4)]


def test_holes_and_duplicates_are_no_whole_group() -> None:
    """Positions must follow each other for keys to be written as a pack."""
    keys = chain(4)
    for batch in ([keys[0], keys[1], keys[3]], [keys[0], keys[1], keys[1], keys[2], keys[3]], keys[::-1]):
        units = new_packing().units(batch)
        assert not any(unit.is_whole for unit in units)
        assert [n for unit in units for n in range(unit.start, unit.stop)] == list(range(len(batch)))


@pytest.mark.parametrize(("pack_bytes", "num_blocks"), [(0, 1), (8191, 1), (16384, 2), (8192 * 7, 4), (1 << 30, 16)])
def test_a_pack_holds_a_power_of_two_of_blocks(pack_bytes: int, num_blocks: int) -> None:
    """As many as fit, 16 at most; one, where two do not fit or packing is off."""
    units = Packing([SHAPE], pack_bytes).units(chain(16))
    assert {unit.stop - unit.start for unit in units} == {num_blocks}
    assert all((unit.pack is None) == (num_blocks == 1) for unit in units)
