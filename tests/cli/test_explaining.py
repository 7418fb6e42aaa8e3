"""``tiered-kv explain`` on caches that work: each cause of a miss, planted, is found by name."""

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.backends import ScriptedBackend, only
from tests.support.caches import keep, open_cache, until_idle
from tests.support.command_line import answer, run
from tests.support.engine import BLOCK_SIZE, PAYLOAD_BYTES, Engine
from tiered_kv import BlockKeys, CPUTier, Outcome, TieredKV, hash_blocks

CPU = CPUTier(capacity=16 * PAYLOAD_BYTES)
TOKENS = list(range(6 * BLOCK_SIZE))


@pytest.fixture
def at(tmp_path: Path) -> str:
    """Return the address of the cache's page."""
    return f"unix:{tmp_path}/kv.sock"


def keys_of(tokens: list[int], salt: str = "") -> BlockKeys:
    """Return the keys of a prompt."""
    return hash_blocks(tokens, block_size=BLOCK_SIZE, salt=salt)


@asynccontextmanager
async def working(at: str, *tiers: CPUTier | ScriptedBackend) -> AsyncIterator[tuple[TieredKV, Engine]]:
    """Yield a cache that has one prompt."""
    engine = Engine()
    async with open_cache(*tiers, engine=engine, page=at) as kv:
        await keep(kv, engine, keys_of(TOKENS))
        yield kv, engine


async def told(at: str, folder: Path, tokens: list[int], *more: str) -> str:
    """Return what the command says of a prompt that is not there as a whole."""
    (folder / "prompt.json").write_text(json.dumps(tokens))
    result = await run("explain", str(folder / "prompt.json"), "--at", at, *more)
    assert result.exit_code == 1, result.output
    return " ".join(result.stdout.split())


async def test_explain_says_why_a_prompt_is_not_there(at: str, tmp_path: Path) -> None:
    """Block by block, neighbours together, of token ids or of an engine's hashes; exit code 1 if some are missing."""
    prompt, hashes = tmp_path / "prompt.json", tmp_path / "hashes.json"
    prompt.write_text(json.dumps(TOKENS))
    words = hash_blocks(TOKENS, block_size=BLOCK_SIZE).words
    hashes.write_text(json.dumps([row.tobytes().hex() for row in words]))
    async with working(at, CPU) as (kv, engine):
        await kv.evict(keys_of(TOKENS)[4:5])
        said = await answer("explain", str(prompt), "--at", at, code=1)
        assert [block["state"] for block in said["blocks"]] == ["ready"] * 4 + ["removed", "ready"]
        assert said["num_ready"] == 4
        shown = await run("explain", "--hashes", str(hashes), "--at", at)
        assert shown.exit_code == 1
        assert "4 of 6 blocks can be loaded. Block 4 cannot: removed" in " ".join(shown.stdout.split())
        said = await answer("explain", str(prompt), "--salt", "other", "--at", at, code=1)
        assert said["num_ready"] == 0
        await keep(kv, engine, hash_blocks(TOKENS, block_size=BLOCK_SIZE))
        assert (await answer("explain", str(prompt), "--at", at))["num_ready"] == 6


async def test_a_prompt_that_was_never_stored(at: str, tmp_path: Path) -> None:
    """By the names that were asked for: those of the cache, as `tiered-kv inspect` shows them."""
    async with working(at, CPU) as (kv, _):
        said = await told(at, tmp_path, TOKENS[::-1])
        assert "0 of 6 blocks can be loaded. Block 0 cannot: never stored. No prompt that begins so" in said
        space = kv.namespace()
        assert f"model {space.fingerprint.hex()[:12]}, weights {space.epoch.hex()[:8]}, tenant none" in said


async def test_a_prompt_that_goes_on_otherwise(at: str, tmp_path: Path) -> None:
    """Where its parts come in another order, the first token at which it differs is named."""
    system, document, question = (
        TOKENS[: 2 * BLOCK_SIZE],
        TOKENS[2 * BLOCK_SIZE : 5 * BLOCK_SIZE],
        TOKENS[5 * BLOCK_SIZE :],
    )
    async with working(at, CPU):
        said = await told(at, tmp_path, [*system, *question, *document])
        assert "2 of 6 blocks can be loaded. Block 2 cannot: never stored." in said
        assert f"the same first {len(system)} tokens was stored" in said


async def test_a_prompt_of_another_salt(at: str, tmp_path: Path) -> None:
    """Is never stored, by another tenant's name than that of what lies there."""
    async with working(at, CPU) as (kv, _):
        said = await told(at, tmp_path, TOKENS, "--salt", "tenant-a")
        assert "Block 0 cannot: never stored" in said
        assert f"tenant {kv.namespace('tenant-a').salt.hex()[:8]}" in said


async def test_a_prompt_of_other_weights(at: str, tmp_path: Path) -> None:
    """Its weights are named, and those that the cache serves."""
    async with working(at, CPU) as (kv, _):
        old = kv.namespace().epoch.hex()[:8]
        kv.advance_epoch("other")
        said = await told(at, tmp_path, TOKENS)
        assert f"Block 0 cannot: old epoch ({old})." in said
        assert f"weights {kv.namespace().epoch.hex()[:8]}" in said


async def test_a_prompt_that_was_evicted(at: str, tmp_path: Path) -> None:
    """By the tier, with what helps."""
    async with working(at, CPU) as (kv, engine):
        for number in range(1, 5):
            await keep(kv, engine, keys_of([1000 * number + token for token in TOKENS]))
        said = await told(at, tmp_path, TOKENS)
        assert "Block 0 cannot: evicted (cpu). Others needed its room" in said


async def test_a_prompt_that_was_dropped(at: str, tmp_path: Path) -> None:
    """Where there was no room for it: all is pinned."""
    async with working(at, CPUTier(capacity=8 * PAYLOAD_BYTES)) as (kv, engine):
        other = [token + 1000 for token in TOKENS]
        async with kv.lease(keys_of(TOKENS)):
            await kv.store(keys_of(other), engine.compute(keys_of(other)))
            said = await told(at, tmp_path, other)
        assert "cannot: dropped" in said
        assert "`tiered-kv status` counts how many, and why" in said


async def test_a_prompt_that_is_corrupt(at: str, tmp_path: Path) -> None:
    """Once a load has met it: before, nobody knows."""
    backend = ScriptedBackend(name="disk")
    async with working(at, CPUTier(capacity=8 * PAYLOAD_BYTES), backend) as (kv, engine):
        other = keys_of([token + 1000 for token in TOKENS + TOKENS])
        await keep(kv, engine, other[:8])
        await until_idle(kv)
        backend.on_read.change_next(only(0, Outcome.CORRUPT))
        await kv.load(keys_of(TOKENS), engine.compute(keys_of(TOKENS)))
        said = await told(at, tmp_path, TOKENS)
        assert "Block 0 cannot: corrupt (disk). Its bytes were not what they should be" in said
        assert "found broken since the cache was opened: disk 1" in (await run("status", "--at", at)).stdout


async def test_a_prompt_in_a_tier_that_is_away(at: str, tmp_path: Path) -> None:
    """The tier is named, and nobody says that the prompt was never stored as if that were known."""
    backend = ScriptedBackend(name="far")
    async with working(at, CPUTier(capacity=8 * PAYLOAD_BYTES), backend) as (kv, engine):
        await keep(kv, engine, keys_of([token + 1000 for token in TOKENS + TOKENS])[:8])
        await until_idle(kv)
        for _ in range(1000):  # probes too
            backend.on_lookup.fail_next(OSError("away"))
        while not kv.stats()["far"].is_bypassed:
            await kv.lookup(keys_of(TOKENS))
        said = await told(at, tmp_path, TOKENS)
        assert "unknown in far" in said
        assert "far may have it, and was not asked" in said


async def test_what_is_no_question_is_refused_in_words(at: str, tmp_path: Path) -> None:
    """A file that is no list, and token ids that are none."""
    file = tmp_path / "prompt.json"
    async with working(at, CPU):
        for text, words in (
            (b"{", "no JSON"),
            (b"\x80\x81", "no JSON"),
            (b"[" * 200_000, "no JSON"),
            (b"{}", "no list"),
            (b"[NaN]", "JSON cannot ask for NaN"),
            (json.dumps(["a"] * BLOCK_SIZE).encode(), "answers"),
        ):
            file.write_bytes(text)
            result = await run("explain", str(file), "--at", at)
            assert result.exit_code == 2
            assert words in result.stderr
        file.write_text("[1]")
        result = await run("explain", str(file), "--at", at, "--salt", os.fsdecode(b"secret\xff"))
        assert result.exit_code == 2
        assert "half a character" in result.stderr
        assert "secret" not in result.stderr
