"""What routers are told adds up to what is described and in place, whatever order it comes in."""

from collections.abc import Iterable, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engine import BLOCK_SIZE
from tests.support.router import Index, decoder
from tiered_kv import Added, BlockKeys, Cleared, Namespace, Removed, Shard, Snapshot, TierChange, hash_blocks
from tiered_kv.telemetry.kv_event_values import Form
from tiered_kv.telemetry.router_books import Batch, CacheSpec, Description, EventMedium, RouterBooks, encode

EPOCHS = (b"1" * 32, b"2" * 32)
MEDIA = {
    "gpu": EventMedium("GPU", None),
    "cpu": EventMedium("CPU", None),
    "disk": EventMedium("STORAGE", "LOCAL"),
    "disk-2": EventMedium("STORAGE", "LOCAL"),
}
TREE = [np.arange(6 * BLOCK_SIZE), np.r_[np.arange(3 * BLOCK_SIZE), 1000 + np.arange(3 * BLOCK_SIZE)]]
"""Two prompts that share three blocks."""
KEYS = [hash_blocks(tokens, block_size=BLOCK_SIZE) for tokens in TREE]


def namespace(rank: int, ranks: int, group: int, epoch: bytes = EPOCHS[0]) -> Namespace:
    """Return the namespace of a rank and group."""
    return Namespace(bytes([group]) * 32, epoch, shard=Shard(rank, ranks))


def describe(keys: BlockKeys, tokens: Sequence[int], group: int, ranks: int, epoch: bytes = EPOCHS[0]) -> Description:
    """Describe all blocks of a prompt."""
    names = [namespace(rank, ranks, group, epoch).names(keys) for rank in range(ranks)]
    hashes = keys.words.view(">u8")[:, -1].astype(np.uint64)
    return Description(epoch, names, hashes, None, 0, group, np.asarray(tokens, "<u4").reshape(-1, BLOCK_SIZE))


def tell(index: Index, batches: Iterable[Batch], form: Form = "map") -> int:
    """Send batches over the wire to an index; return how many."""
    sent = [encode(1.0, batch, 0, form) for batch in batches]
    for payload in sent:
        for event in decoder(form)(payload).events:
            index.apply(event)
    return len(sent)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "remove", "clear", "snapshot", "describe", "describe", "epoch", "join"]),
        st.sampled_from(["cpu", "cpu", "cpu", "disk", "disk-2"]),
        st.sampled_from([0, 0, 0, 1]),  # group
        st.integers(0, 1),  # rank
        st.integers(0, 1),  # prompt
        st.sampled_from([0, 0, 0, 1]),  # epoch of the names
        st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True),
    ),
    min_size=12,
    max_size=40,
)


@given(steps=STEPS, ranks=st.integers(1, 2), form=st.sampled_from(["map", "array"]))
def test_events_add_up_to_what_every_rank_has(
    steps: list[tuple[str, str, int, int, int, int, list[int]]], ranks: int, form: Form
) -> None:
    """In each medium, for each group, of the weights served now; no block twice, and none before it is described."""
    places = [(tier, group, rank) for tier in MEDIA for group in (0, 1) for rank in range(ranks)]
    books, index = RouterBooks(places, MEDIA, {}), Index()
    held: dict[tuple[str, int, int], set[tuple[int, int, int]]] = {place: set() for place in places}
    described: set[tuple[int, int, int]] = set()  # group, prompt, epoch
    epoch = 0
    tell(index, books.apply(Cleared(0, "gpu", 0, 0), EPOCHS[epoch]), form)
    for kind, tier, group, rank, prompt, of_epoch, at in steps:
        place = tier, group, rank % ranks
        space = namespace(place[2], ranks, group, EPOCHS[of_epoch])
        names = space.names(KEYS[prompt])[np.array(sorted(at))]
        blocks = {(prompt, of_epoch, number) for number in at}
        change: TierChange | None = None
        match kind:
            case "add":
                change, held[place] = Added(0, *place, names), held[place] | unified(blocks)
            case "remove":
                change, held[place] = Removed(0, *place, names, "evicted"), held[place] - unified(blocks)
            case "clear":
                change, held[place] = Cleared(0, *place), set()
            case "snapshot":
                change, held[place] = Snapshot(0, *place, names), unified(blocks)
            case "epoch":
                epoch = of_epoch
                change = Added(0, *place, names[:0])
            case "describe":
                what = describe(KEYS[prompt], TREE[prompt].tolist(), group, ranks, EPOCHS[of_epoch])
                tell(index, books.describe(what), form)
                described |= {(group, prompt, of_epoch)}
            case _:
                index = Index()
                tell(index, books.everything(), form)
                assert not parents_are_there(index)
        if change is not None:
            tell(index, books.apply(change, EPOCHS[epoch]), form)
        assert index.hashes() == truth(held, described, epoch, ranks)


def unified(blocks: Iterable[tuple[int, int, int]]) -> set[tuple[int, int, int]]:
    """Call the blocks that both prompts begin with by one name."""
    return {(0 if number < 3 else prompt, epoch, number) for prompt, epoch, number in blocks}


def truth(
    held: dict[tuple[str, int, int], set[tuple[int, int, int]]],
    described: set[tuple[int, int, int]],
    epoch: int,
    ranks: int,
) -> dict[tuple[str | None, str | None, int | None], set[int]]:
    """Return what an index should have: described, of these weights, in some tier of the medium for every rank."""
    known = {
        (group, block)
        for group, prompt, of_epoch in described
        for block in unified((prompt, of_epoch, number) for number in range(6))
        if of_epoch == epoch
    }
    found: dict[tuple[str | None, str | None, int | None], set[int]] = {}
    for medium in set(MEDIA.values()):
        tiers = [tier for tier in MEDIA if MEDIA[tier] == medium]
        for group in (0, 1):
            parts = [set.union(*(held[tier, group, rank] for tier in tiers)) for rank in range(ranks)]
            there = {block for block in set.intersection(*parts) if (group, block) in known}
            if there:
                hashes = {int.from_bytes(KEYS[prompt][number][-8:], "big") for prompt, _, number in there}
                found[medium.medium, medium.locality, group] = hashes
    return found


def parents_are_there(index: Index) -> bool:
    """Whether a parent of an orphan came all the same, in the same place."""
    return any(index.blocks[place][orphan][0] in index.blocks[place] for place, orphan in index.orphans)


def test_neighbours_are_told_of_together_and_parents_first() -> None:
    """However the tier's own order is: one event for a prompt, then one for the branch off it."""
    books, index = RouterBooks([("cpu", 0, 0)], MEDIA, {}), Index()
    for keys, tokens in zip(KEYS, TREE, strict=True):
        tell(index, books.describe(describe(keys, tokens.tolist(), 0, 1)))
    names = np.concatenate([namespace(0, 1, 0).names(KEYS[1])[::-1], namespace(0, 1, 0).names(KEYS[0])[:2:-1]])
    tell(index, books.apply(Snapshot(0, "cpu", 0, 0, names), EPOCHS[0]))
    cleared, *events = index.events
    assert type(cleared).__name__ == "AllBlocksCleared"
    assert sorted(len(event.block_hashes) for event in events) == [3, 6]
    assert not index.orphans
    tokens = {tokens for _, tokens in index.blocks["CPU", None, 0].values()}
    assert tokens == {tuple(each) for prompt in TREE for each in prompt.reshape(-1, BLOCK_SIZE).tolist()}


def test_a_later_snapshot_is_told_as_the_difference() -> None:
    """As after the publisher has fallen behind: routers hear what came and what went, and of no more."""
    books, index, names = RouterBooks([("cpu", 0, 0)], MEDIA, {}), Index(), namespace(0, 1, 0).names(KEYS[0])
    tell(index, books.describe(describe(KEYS[0], TREE[0].tolist(), 0, 1)))
    tell(index, books.apply(Snapshot(0, "cpu", 0, 0, names[:4]), EPOCHS[0]))
    told = len(index.events)
    tell(index, books.apply(Snapshot(1, "cpu", 0, 0, names[1:5]), EPOCHS[0]))
    went, came = index.events[told:]
    assert went.block_hashes == [int.from_bytes(KEYS[0][0][-8:], "big")]
    assert came.block_hashes == [int.from_bytes(KEYS[0][4][-8:], "big")]


def test_a_message_is_bounded() -> None:
    """However many blocks come at once; and parents are still first."""
    tokens = np.arange(2000 * BLOCK_SIZE)
    keys = hash_blocks(tokens, block_size=BLOCK_SIZE)
    books, index = RouterBooks([("cpu", 0, 0)], MEDIA, {}), Index()
    assert tell(index, books.describe(describe(keys, tokens.tolist(), 0, 1))) == 0
    books_batches = books.apply(Snapshot(0, "cpu", 0, 0, namespace(0, 1, 0).names(keys)), EPOCHS[0])
    assert tell(index, books_batches) == 8
    assert len(index.blocks["CPU", None, 0]) == 2000
    assert not index.orphans


def test_descriptions_of_what_is_nowhere_are_bounded() -> None:
    """The newest are kept, and what is in a tier keeps its own for as long as it is there."""
    books, index, space = RouterBooks([("cpu", 0, 0)], MEDIA, {}), Index(), namespace(0, 1, 0)
    tell(index, books.describe(describe(KEYS[0], TREE[0].tolist(), 0, 1)))
    tell(index, books.apply(Snapshot(0, "cpu", 0, 0, space.names(KEYS[0])[:1]), EPOCHS[0]))
    many = np.arange(1 << 17, dtype=np.uint64)
    names = np.stack([many, many, many, many], axis=1)
    tokens = np.zeros((len(many), 1), "<u4")
    tell(index, books.describe(Description(EPOCHS[0], [names], many, None, 0, 0, tokens)))
    tell(index, books.apply(Added(0, "cpu", 0, 0, space.names(KEYS[0])[1:]), EPOCHS[0]))
    assert len(index.blocks["CPU", None, 0]) == 1
    assert books.num_undescribed == 5
    tell(index, books.apply(Added(0, "cpu", 0, 0, names[-9:]), EPOCHS[0]))
    assert len(index.blocks["CPU", None, 0]) == 10


def test_what_left_and_comes_back_needs_no_new_description() -> None:
    """As when a block goes down from memory to the disk, in whatever order the two say so."""
    books, index, names = RouterBooks([("cpu", 0, 0), ("disk", 0, 0)], MEDIA, {}), Index(), None
    names = namespace(0, 1, 0).names(KEYS[0])
    tell(index, books.describe(describe(KEYS[0], TREE[0].tolist(), 0, 1)))
    tell(index, books.apply(Snapshot(0, "cpu", 0, 0, names), EPOCHS[0]))
    tell(index, books.apply(Removed(0, "cpu", 0, 0, names, "evicted"), EPOCHS[0]))
    assert index.hashes() == {}
    tell(index, books.apply(Added(0, "disk", 0, 0, names), EPOCHS[0]))
    assert len(index.blocks["STORAGE", "LOCAL", 0]) == 6


def test_all_that_can_be_said_of_a_block_is_said() -> None:
    """LoRA, extra keys and the kind of attention; in the older form up to the last field that is known."""
    for form in ("map", "array"):
        books, index = RouterBooks([("gpu", 1, 0)], MEDIA, {1: CacheSpec("sliding_window", 4096)}), Index()
        plain = describe(KEYS[0], TREE[0].tolist(), 1, 1)
        extra_keys = [("adapter", ("image", 3)), None, None, None, None, None]
        fields = vars(plain) | {"lora_id": 7, "lora_name": "adapter", "extra_keys": extra_keys}
        tell(index, books.describe(Description(**fields)))
        tell(index, books.apply(Snapshot(0, "gpu", 1, 0, namespace(0, 1, 1).names(KEYS[0])), EPOCHS[0]), form)
        event = index.events[-1]
        assert (event.lora_id, event.lora_name, event.group_idx) == (7, "adapter", 1)
        assert event.extra_keys == [("adapter", ["image", 3]), None, None, None, None, None]
        assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == ("sliding_window", 4096)
        assert (event.medium, event.locality, event.block_size) == ("GPU", None, BLOCK_SIZE)
