"""Hashes of blocks from token ids: each chained over all before it, the same in every process and on every host."""

import hashlib
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered_kv.errors import ConfigurationError
from tiered_kv.integers import as_int, as_ints
from tiered_kv.keys import BlockKeys, salt_digest

TokenIds = Sequence[int] | NDArray[np.integer[Any]]

_ROOT = b"tiered_kv block hash v1"
_TAIL = b"tiered_kv tail hash v1"
_MAX_TOKEN_ID = 2**32


def hash_blocks(
    token_ids: TokenIds,
    *,
    block_size: int,
    salt: str | bytes = b"",
    parent: BlockKeys | None = None,
    extra: Sequence[bytes | None] | None = None,
    group: int = 0,
) -> BlockKeys:
    """Hash every *full* block of a prompt, each chained over all before it: the same in every process, on every host.

    Args:
        token_ids: ``(num_tokens,)`` non-negative ints below 2**32; a trailing partial block is left out.
        block_size: Tokens per block.
        salt: Keeps tenants apart: equal prompts of different salts share nothing. Secret salts stay secret: only
            digests leave this function.
        parent: Keys of the prefix that ``token_ids`` continue (all of it full blocks); salt and group must agree.
        extra: Per full block, bytes that name what else went into it (a LoRA's id, an image's digest), or None.
        group: The KV group.

    Returns:
        One key per full block; ``start`` is one after ``parent``'s last.

    Raises:
        ConfigurationError: A token id out of range, too few ``extra`` or no bytes, a negative group, a parent of
            another salt, group or block size, or an empty slice as parent, which does not say what came before it.

    Source: chained prefix hashing as in vLLM's "Automatic Prefix Caching"; the encoding is our own and versioned.
    """
    block_size, group = as_int("block_size", block_size, least=1), as_int("a KV group's number", group)
    tokens = _as_token_array(token_ids)
    num_blocks = len(tokens) // block_size
    salt_id = salt_digest(salt)
    if extra is not None and len(extra) < num_blocks:
        msg = f"extra must name every full block: {num_blocks} blocks, {len(extra)} entries"
        raise ConfigurationError(msg)
    start, previous = _chain_from(parent, salt_id, group, block_size)
    body, stride = tokens[: num_blocks * block_size].tobytes(), block_size * 4
    digests = []
    for block in range(num_blocks):
        hashed = previous + body[block * stride : (block + 1) * stride]
        if extra is not None and (named := extra[block]) is not None:
            if not isinstance(named, bytes):
                raise ConfigurationError(f"extra[{block}] must be bytes or None, got {named!r:.80}")
            hashed += b"extra" + len(named).to_bytes(8, "little") + named
        previous = hashlib.sha256(hashed).digest()  # one call: a prompt of 32k tokens has thousands of blocks
        digests.append(previous)
    return BlockKeys(b"".join(digests), block_size=block_size, start=start, group=group, salt_id=salt_id)


def hash_tail(token_ids: TokenIds, *, parent: BlockKeys, extra: bytes | None = None) -> BlockKeys:
    """Name the partial block that `hash_blocks` leaves out, for a sequence that is swapped out whole.

    The name is chained over all before it and says how many tokens there are, and it never meets a full block's: the
    same block, once full, has another. ``keys + hash_tail(rest, parent=keys)`` are the keys of the whole sequence.

    Args:
        token_ids: The tokens after the last full block, fewer than a block has.
        parent: Keys of all full blocks before, with what went into them; of a sequence shorter than a block the empty
            keys that `hash_blocks` returns. Salt, group and block size are its own.
        extra: What else went into the partial block, as for `hash_blocks`.

    Returns:
        One key, or none if there are no tokens.

    Raises:
        ConfigurationError: A full block or more, a token id out of range, or an empty slice as parent.
    """
    tokens = _as_token_array(token_ids)
    _check_parent(parent)
    if len(tokens) >= parent.block_size:
        raise ConfigurationError(
            f"a tail has fewer than {parent.block_size} tokens, got {len(tokens)}: name full blocks"
        )
    start, previous = _chain_from(parent, parent.salt_id, parent.group, parent.block_size)
    digest = hashlib.sha256(_TAIL + previous + len(tokens).to_bytes(4, "little") + tokens.tobytes())
    if extra is not None:
        if not isinstance(extra, bytes):
            raise ConfigurationError(f"extra must be bytes or None, got {extra!r:.80}")
        digest.update(b"extra" + len(extra).to_bytes(8, "little") + extra)
    name = digest.digest() if len(tokens) else b""
    return BlockKeys(name, block_size=parent.block_size, start=start, group=parent.group, salt_id=parent.salt_id)


def _chain_from(parent: BlockKeys | None, salt_id: bytes, group: int, block_size: int) -> tuple[int, bytes]:
    """Return the position after ``parent`` and the digest to chain the next block to."""
    root = hashlib.sha256(_ROOT + salt_id + block_size.to_bytes(4, "little")).digest()
    if parent is None:
        return 0, root
    _check_parent(parent)
    if (parent.salt_id, parent.group, parent.block_size) != (salt_id, group, block_size):
        msg = "the parent's salt, KV group or block size differs from this call's"
        raise ConfigurationError(msg)
    start = parent.start + len(parent)
    if start and not len(parent):  # hashed from the root, these tokens would pass for the beginning of a prompt
        msg = f"the parent is empty but starts at block {start}: give one that has the block before it"
        raise ConfigurationError(msg)
    return start, parent[-1] if len(parent) else root


def _check_parent(parent: object) -> None:
    if not isinstance(parent, BlockKeys):
        raise ConfigurationError(f"parent must be the BlockKeys of what comes before, got {type(parent).__name__}")


def _as_token_array(token_ids: TokenIds) -> NDArray[np.uint32]:
    if isinstance(token_ids, str):
        raise ConfigurationError("token_ids must be ints, got str: a tokenizer makes tokens of text")
    if isinstance(token_ids, list) and token_ids and type(token_ids[0]) is int:
        with suppress(OverflowError, TypeError):  # `as_ints` finds the words for it
            return np.frombuffer(array("I", token_ids), "=u4").astype("<u4", copy=False)  # thrice as fast
    tokens = as_ints("token_ids", token_ids)
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= _MAX_TOKEN_ID):
        msg = f"token ids must lie in [0, 2**32), got {int(tokens.min())} to {int(tokens.max())}"
        raise ConfigurationError(msg)
    return tokens.astype("<u4")
