import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.keys import (
    BlockKey,
    BlockKeys,
    ModelIdentity,
    Namespace,
    Shard,
    epoch_digest,
    hash_blocks,
    hash_tail,
    salt_digest,
)
from tiered_kv.values.layout import KVGroup, KVLayout, fingerprint

MODEL = ModelIdentity("llama", weights="sha256:1", extra=(("rope", "linear"),))
GROUP = KVGroup(num_layers=2, num_kv_heads=4, head_dim=8, dtype="bfloat16", block_size=16)
LAYOUT = KVLayout((GROUP, GROUP))
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=60)


KEYS = hash_blocks([1, 2, 3], block_size=1)


def run_elsewhere(program: str, stdin: bytes = b"") -> str:
    """Run a program in a process that hashes str and bytes in another way than this one."""
    environment = {"PYTHONHASHSEED": "123"}
    done = subprocess.run(
        [sys.executable, "-c", program], input=stdin, capture_output=True, check=True, env=environment, timeout=60
    )
    return done.stdout.decode().strip()


def namespace(
    model: ModelIdentity = MODEL, layout: KVLayout = LAYOUT, group: int = 0, salt: str = "", shard: Shard | None = None
) -> Namespace:
    """Name a space as the cache does."""
    epoch = epoch_digest(model.weights)
    return Namespace(fingerprint(model, layout, group), epoch, salt_digest(salt), shard or Shard())


@pytest.mark.slow
def test_hashes_are_the_same_in_every_process_and_release() -> None:
    """Golden values: a change of any of them loses every cache there is, and has to be a new format version."""
    program = (
        "from tiered_kv.values.keys import *; from tiered_kv.values.layout import *\n"
        "keys = hash_blocks(range(32), block_size=16, salt='tenant', extra=[None, b'lora-7'])\n"
        "print(keys[0].hex()); print(keys[1].hex()); print(hash_blocks([1, 2], block_size=2)[0].hex())\n"
        "model = ModelIdentity('llama', weights='sha256:1', extra=(('rope', 'linear'),))\n"
        "layout = KVLayout((KVGroup(2, 4, 8, 'bfloat16', 16),))\n"
        "print(fingerprint(model, layout, 0).hex()); print(epoch_digest('sha256:1').hex())\n"
        "epoch = epoch_digest('sha256:1')\n"
        "space = Namespace(fingerprint(model, layout, 0), epoch, salt_digest('tenant'), Shard(1, 2))\n"
        "print(space.mask.tobytes().hex()); print(*space.path.split('/'))"
    )
    assert run_elsewhere(program).split() == [
        "8a0f3e0b510b06f3e969d0943f6c3f6f4627efd0bf9f5a0133f105113491de21",
        "4eaa73686d41c427f4de0724fefe553cbfe55c6a75ca35ed5743eda4a57ad5ce",
        "1c303b2bf7683ebf7bc04e2ea65ece22823de76a3cbc30f3961950464a1ffb8d",
        "57821bfb8e24d4b9c5ee7e6515483c03f9454e97a9c2bdaadd0512855322cd86",
        "a6ef5f5b30a15982bdcade435e5f23d1300a54a9d8e1ee430167c6814f185636",
        "ca13647ec4305919240d14599569455c3ea360056555f3515020397f36aaac31",
        "57821bfb8e24d4b9c5ee7e6515483c03f9454e97a9c2bdaadd0512855322cd86",
        "a6ef5f5b30a15982bdcade435e5f23d1",
        "1of2",
        "5069775b224e56c90abf07add0bf7677",
    ]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(namespace(model=replace(MODEL, name="qwen")), id="model"),
        pytest.param(namespace(model=replace(MODEL, weights="sha256:2")), id="weights"),
        pytest.param(namespace(model=replace(MODEL, extra=(("rope", "yarn"),))), id="extra"),
        pytest.param(namespace(group=1), id="group"),
        pytest.param(namespace(salt="tenant"), id="salt"),
        pytest.param(namespace(shard=Shard(0, 2)), id="shard size"),
        pytest.param(namespace(shard=Shard(1, 2)), id="shard rank"),
        *(
            pytest.param(namespace(layout=KVLayout((group, GROUP))), id=field)
            for field, group in {
                "num_layers": replace(GROUP, num_layers=3),
                "num_kv_heads": replace(GROUP, num_kv_heads=5),
                "head_dim": replace(GROUP, head_dim=9),
                "dtype": replace(GROUP, dtype="float16"),
                "order": replace(GROUP, order="HND"),
                "page_size": replace(GROUP, page_size=8),
                "block_size": replace(GROUP, block_size=32, page_size=0),
            }.items()
        ),
        pytest.param(namespace(layout=KVLayout((GROUP, replace(GROUP, num_layers=9)))), id="another group's shape"),
        pytest.param(namespace(layout=KVLayout((GROUP,))), id="number of groups"),
    ],
)
def test_one_differing_field_shares_no_name(other: Namespace) -> None:
    """Blocks of two caches that differ in one field never meet: neither by name nor by path nor as a backend's key."""
    keys = hash_blocks(range(64), block_size=16)
    here = namespace()
    assert not set(map(bytes, here.names(keys))) & set(map(bytes, other.names(keys)))
    assert here != other
    assert not set(here.keys(keys)) & set(other.keys(keys))
    assert here.path != other.path


def test_each_field_of_a_namespace_tells_it_apart() -> None:
    """Two shards of one size share no name either, whatever the rest is."""
    spaces = [namespace(shard=Shard(rank, size)) for size in (1, 2, 11) for rank in range(size)]
    assert len({space.mask.tobytes() for space in spaces}) == len(spaces)


def test_names_lead_back_to_keys() -> None:
    """What an owned medium remembers of a block, its name, is enough to know its key again."""
    keys = hash_blocks(range(64), block_size=16)
    space = namespace(salt="tenant")
    assert space.keys_of(space.names(keys), np.arange(4)) == space.keys(keys)
    assert space.keys(keys)[1] == BlockKey(space, keys[1])


def test_the_first_of_some_keys_is_named_alone_as_with_the_others() -> None:
    """In any namespace, from wherever in a prompt the keys are."""
    keys = hash_blocks(range(64), block_size=16)
    for space in (Namespace(b"f" * 32, b"e" * 32), Namespace(b"g" * 32, b"e" * 32, b"s" * 32)):
        for some in (keys, keys[1:], keys[3:]):
            assert space.first_name(some) == space.names(some)[0].tobytes()


def test_paths_are_made_of_digests_alone() -> None:
    """Nothing that a caller wrote gets into a path, so no salt and no model's name can leave the folder."""
    model = ModelIdentity("../../etc", weights="/passwd")
    space = namespace(model=model, salt="../..", shard=Shard(1, 2))
    path = space.keys(hash_blocks(range(16), block_size=16))[0].path
    assert [set(part) <= set("0123456789abcdef") for part in path.split("/")] == [True, True, False, True, True]
    assert path.split("/")[2] == "1of2"


@pytest.mark.slow
def test_a_namespace_travels_to_another_process() -> None:
    """Pickled after its hash was taken, it still equals and hashes like one made there."""
    space = namespace(salt="tenant")
    assert len({space, namespace(salt="tenant")}) == 1
    program = (
        "import pickle, sys; from tiered_kv.values.keys import *; from tiered_kv.values.keys import *\n"
        "space = pickle.loads(sys.stdin.buffer.read())\n"
        "made = Namespace(space.fingerprint, space.epoch, space.salt, space.shard)\n"
        "print(space == made, hash(space) == hash(made), {made: 'found'}[space])"
    )
    assert run_elsewhere(program, pickle.dumps(space)) == "True True found"


def test_keys_travel_to_another_process() -> None:
    """Unpickled keys are the keys, position, group and salt included."""
    keys = hash_blocks(range(64), block_size=16, salt="tenant", group=1)[1:3]
    assert pickle.loads(pickle.dumps(keys)) == keys


@given(tokens=tokens, block_size=st.integers(1, 5), cut=st.integers(0, 12), extra=st.binary(max_size=3))
def test_hashing_in_two_steps_gives_what_hashing_at_once_gives(
    tokens: list[int], block_size: int, cut: int, extra: bytes
) -> None:
    """A turn that goes on from its parent's keys finds the blocks of the whole conversation."""
    named = [extra if block % 2 else None for block in range(len(tokens) // block_size)]
    whole = hash_blocks(tokens, block_size=block_size, extra=named)
    cut = min(cut, len(whole))
    parent = hash_blocks(tokens[: cut * block_size], block_size=block_size, extra=named[:cut])
    rest = hash_blocks(tokens[cut * block_size :], block_size=block_size, parent=parent, extra=named[cut:])
    assert parent == whole[:cut]
    assert rest == whole[cut:]


@given(tokens=tokens, at=st.integers(0, 59))
def test_a_changed_token_changes_its_block_and_all_behind(tokens: list[int], at: int) -> None:
    """A hash stands for the whole prefix: what is before the change is still found, nothing behind it is."""
    if at >= len(tokens):
        return
    changed = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    before, after = hash_blocks(tokens, block_size=4), hash_blocks(changed, block_size=4)
    assert [a == b for a, b in zip(before, after, strict=True)] == [block < at // 4 for block in range(len(before))]


def test_what_else_went_into_a_block_changes_it_and_all_behind() -> None:
    """Equal tokens under another LoRA or image share nothing from there on. None is not empty bytes."""
    extras: list[list[bytes | None]] = [[None, None], [b"", None], [b"a", None], [None, b"a"]]
    keys = [hash_blocks(range(8), block_size=4, extra=extra) for extra in extras]
    assert len({key[1] for key in keys}) == 4
    assert keys[0][0] == keys[3][0]


def test_salt_and_block_size_change_every_hash() -> None:
    """Tenants share nothing, and blocks of two sizes are no prefix of each other."""
    variants = [
        hash_blocks([7] * 64, block_size=16),
        hash_blocks([7] * 64, block_size=16, salt="a"),
        hash_blocks([7] * 64, block_size=32),
    ]
    assert len({digest for keys in variants for digest in keys}) == 4 + 4 + 2


def test_only_full_blocks_are_named() -> None:
    """The partial block at the end of a prompt has no key yet."""
    assert [len(hash_blocks(range(n), block_size=16)) for n in (0, 15, 16, 31, 32)] == [0, 0, 1, 1, 2]


def test_tokens_hash_alike_however_they_are_held() -> None:
    """A list, a tuple and arrays of any int dtype are the same prompt."""
    prompt = [1, 2, 3, 4]
    wanted = hash_blocks(prompt, block_size=4)
    assert hash_blocks(tuple(prompt), block_size=4) == wanted
    for dtype in ("<i2", "<u8", ">i8"):
        assert hash_blocks(np.array(prompt, dtype), block_size=4) == wanted


def test_a_slice_keeps_its_position() -> None:
    """The tail of a prompt's keys still says where in the prompt it is, also when it is sliced again or is empty."""
    keys = hash_blocks(range(96), block_size=16, salt="s", group=2)
    tail = keys[2:][1:3]
    assert (tail.start, len(tail), tail.block_size, tail.group) == (3, 2, 16, 2)
    assert tail.salt_id == salt_digest("s")
    assert list(tail) == list(keys)[3:5]
    assert (keys[4:1].start, len(keys[4:1])) == (4, 0)
    assert keys[-1] == list(keys)[-1]
    assert keys[2:] != hash_blocks(range(96), block_size=16, salt="s", group=2)[1:]


@given(tokens=tokens, cut=st.integers(0, 60))
def test_a_tail_is_named_by_all_its_tokens_and_all_before(tokens: list[int], cut: int) -> None:
    """Each shorter and each longer sequence has another tail, and none has the name of a full block."""
    block_size = 4
    full = hash_blocks(tokens, block_size=block_size)
    rest = tokens[len(full) * block_size :]
    keys = full + hash_tail(rest, parent=full)
    assert len(keys) == -(-len(tokens) // block_size)
    assert (keys.start, keys[: len(full)]) == (0, full)
    shorter = tokens[:cut]
    if cut < len(tokens):
        full = hash_blocks(shorter, block_size=block_size)
        other = full + hash_tail(shorter[len(full) * block_size :], parent=full)
        if cut % block_size:
            assert other[-1] not in list(keys)
    filled = hash_blocks([*tokens, *[0] * (-len(tokens) % block_size)], block_size=block_size)
    if rest:
        assert keys[-1] != filled[-1]


def test_a_tail_knows_what_went_into_it() -> None:
    """Salt, group and what else went into the blocks tell tails apart; zeros are tokens too."""
    tails = [
        hash_tail([1, 2], parent=hash_blocks(range(8), block_size=4)),
        hash_tail([1, 2], parent=hash_blocks(range(8), block_size=4), extra=b""),
        hash_tail([1, 2], parent=hash_blocks(range(8), block_size=4), extra=b"lora"),
        hash_tail([1, 2], parent=hash_blocks(range(8), block_size=4, extra=[None, b"lora"])),
        hash_tail([1, 2], parent=hash_blocks(range(8), block_size=4, salt="tenant")),
        hash_tail([1, 2], parent=hash_blocks(range(4), block_size=4)),
        hash_tail([1, 2, 0], parent=hash_blocks(range(8), block_size=4)),
        hash_tail([1, 2], parent=hash_blocks([], block_size=4)),
        hash_tail([1, 2], parent=hash_blocks([], block_size=8)),
    ]
    assert len({tail[0] for tail in tails}) == len(tails)
    assert [tail.start for tail in tails] == [2, 2, 2, 2, 2, 1, 2, 0, 0]
    assert len(hash_tail([], parent=hash_blocks(range(8), block_size=4))) == 0


def test_an_engines_own_hashes_are_taken_as_they_are() -> None:
    """Hashes of 8 to 32 bytes become keys of the salt and group they are given for."""
    keys = BlockKeys.from_hashes([b"h" * 8, b"H" * 32], block_size=16, start=5, group=1, salt="s")
    assert list(keys) == [b"h" * 8 + bytes(24), b"H" * 32]
    assert (keys.start, keys.group, keys.salt_id) == (5, 1, salt_digest("s"))
    assert keys.words.shape == (2, 4)
    assert not keys.words.flags.writeable


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hash_blocks([-1], block_size=1), r"\[0, 2\*\*32\), got -1"),
        (lambda: hash_blocks([2**32], block_size=1), "got 4294967296"),
        (lambda: hash_blocks([2**80], block_size=1), "flat sequence of ints"),
        (lambda: hash_blocks([1.5], block_size=1), "flat sequence of ints"),  # type: ignore[list-item]
        (lambda: hash_blocks([[1]], block_size=1), "flat sequence of ints"),  # type: ignore[list-item]
        (lambda: hash_blocks([1], block_size=0), "block_size must be a positive int, got 0"),
        (lambda: hash_blocks([1], block_size=True), "got True"),
        (lambda: hash_blocks([1], block_size=1, salt=7), "str or bytes, got int"),  # type: ignore[arg-type]
        (lambda: hash_blocks([1, 2], block_size=1, extra=[None]), "2 blocks, 1 entries"),
        (lambda: hash_blocks([1], block_size=1, parent=hash_blocks([1], block_size=2)), "block size differs"),
        (lambda: hash_blocks([1], block_size=1, parent=hash_blocks([1], block_size=1, salt="a")), "salt"),
        (lambda: hash_blocks([1], block_size=1, parent=hash_blocks([1, 2], block_size=1)[1:1]), "starts at block 1"),
        (lambda: hash_blocks([1, 2], block_size=1)[::2], "step 1, not 2"),
        (lambda: hash_tail([1], parent=hash_blocks([1], block_size=1)), "fewer than 1 tokens, got 1"),
        (lambda: hash_tail([1], parent=hash_blocks([1, 2], block_size=2)[1:]), "starts at block 1"),
        (
            lambda: hash_blocks([1], block_size=1) + hash_blocks([1], block_size=1),
            "here block 1 comes next, the others begin with block 0",
        ),
        (lambda: BlockKeys.from_hashes([b"short"], block_size=1), "hash 0 must be 8 to 32 bytes"),
        (lambda: BlockKeys.from_hashes([12345678], block_size=1), "hash 0"),  # type: ignore[list-item]
        (
            lambda: ModelIdentity("m", weights=""),
            "weights must be a non-empty str, got '': give a checkpoint's revision",
        ),
        (lambda: ModelIdentity("m", "\ud800"), "ModelIdentity.weights must be text that UTF-8 can hold"),
        (lambda: ModelIdentity("m", "w", (("k", "\ud800"),)), "ModelIdentity.extra must be text that UTF-8 can hold"),
        (lambda: hash_blocks([1], block_size=1, salt="\ud800"), "salt must be text that UTF-8 can hold"),
        (lambda: epoch_digest("\ud800"), "weights must be text that UTF-8 can hold"),
        (lambda: ModelIdentity("m", "w", extra={"rope": "yarn"}), "tuple of"),  # type: ignore[arg-type]
        (lambda: ModelIdentity("m", "w", extra=("ab",)), "tuple of"),  # type: ignore[arg-type]
        (lambda: Shard(2, 2), "rank 2 of size 2"),
        (lambda: Shard("0", 2), "a shard's rank must be an int, 0 or more, got '0'"),  # type: ignore[arg-type]
        (lambda: Shard(-1, 2), "a shard's rank must be an int, 0 or more, got -1"),
        (lambda: Shard.every(0), "the number of ranks must be a positive int, got 0"),
        (lambda: hash_blocks("hello", block_size=1), "got str: a tokenizer makes tokens"),  # type: ignore[arg-type]
        (lambda: hash_blocks(torch.zeros(1, 4, dtype=torch.int64), block_size=1), "give one row"),  # type: ignore[arg-type]
        (lambda: hash_blocks([1], block_size=True), "block_size must be a positive int, got True"),
        (lambda: hash_blocks([1], block_size=1, group=-1), "a KV group's number must be an int, 0 or more, got -1"),
        (lambda: hash_blocks([1], block_size=1, parent=[b""]), "parent must be the BlockKeys .*, got list"),  # type: ignore[arg-type]
        (lambda: hash_tail([1], parent=None), "parent must be the BlockKeys .*, got NoneType"),  # type: ignore[arg-type]
        (lambda: hash_tail([1], parent=hash_blocks([], block_size=2), extra="x"), "extra must be bytes .*, got 'x'"),  # type: ignore[arg-type]
        (lambda: BlockKeys([b"x" * 32], block_size=1), r"made by hash_blocks\(.* not list"),  # type: ignore[arg-type]
        (lambda: BlockKeys(b"x" * 33, block_size=1), "not 33 bytes"),
        (lambda: BlockKeys(bytes(32), block_size=1, start=-1), "start must be an int, 0 or more, got -1"),
        (lambda: BlockKeys(bytes(32), block_size=1, salt_id=b"tenant"), "salt_id must be the 32 bytes of salt_digest"),
        (lambda: BlockKeys(bytes(32), block_size=1, start=2**63), "start must be 4611686018427387904 at most"),
        (lambda: hash_blocks(range(4), block_size=2**32), "block_size must be 4294967295 at most, got 4294967296"),
        (lambda: BlockKeys.from_hashes(bytes(32), block_size=1), "hashes must be a list, .* got 32 bytes"),  # type: ignore[arg-type]
        (lambda: BlockKeys.from_hashes(None, block_size=1), "hashes must be a list, .* got NoneType"),  # type: ignore[arg-type]
        (lambda: BlockKeys.from_hashes(["ab" * 32], block_size=1), r"hash 0 .* got str .*: bytes.fromhex\(\)"),  # type: ignore[list-item]
        (lambda: KEYS + hash_blocks([1], block_size=2), "here 1 tokens a block and group 0, there 2 and 0"),
        (lambda: KEYS + hash_blocks([1], block_size=1, group=1), "here 1 tokens a block and group 0, there 1 and 1"),
        (lambda: KEYS + hash_blocks([1], block_size=1, salt="b"), "keys of different salts cannot be joined$"),
    ],
)
def test_what_can_name_no_block_is_refused(call: Callable[[], object], message: str) -> None:
    """Bad input is an error of ours that says what was given, never a key that finds another prompt's blocks."""
    with pytest.raises(ConfigurationError, match=message):
        call()


def test_ints_of_any_library_make_the_same_keys() -> None:
    """Sizes read off an array, as engines have them, are as good as Python's."""
    wanted = hash_blocks([1, 2, 3, 4], block_size=2, group=1)
    assert hash_blocks(torch.tensor([1, 2, 3, 4]), block_size=np.int64(2), group=np.uint8(1)) == wanted  # type: ignore[arg-type]
    assert Shard(np.int64(1), torch.tensor(2)) == Shard(1, 2)  # type: ignore[arg-type]
    assert str(Shard(np.int64(1), 2)) == "1of2"  # type: ignore[arg-type]


def test_a_wrong_index_is_told_in_blocks() -> None:
    """Whoever counts tokens, or indexes with a list, reads what keys count and take."""
    with pytest.raises(IndexError, match="block 99 of 3: BlockKeys count blocks, not tokens"):
        KEYS[99]
    with pytest.raises(TypeError, match=r"BlockKeys take an int or a slice in \[\], not list"):
        KEYS[[0, 1]]  # type: ignore[call-overload]  # wrong on purpose


def test_a_salt_is_not_shown() -> None:
    """What is printed or logged of keys names no tenant."""
    assert "tenant" not in repr(hash_blocks(range(16), block_size=16, salt="tenant"))
