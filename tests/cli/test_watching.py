"""``tiered-kv status``, ``top`` and ``explain`` on caches that work."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.backends import ScriptedBackend
from tests.support.caches import keep, open_cache
from tests.support.command_line import answer, run
from tests.support.engine import BLOCK_SIZE, MODEL, PAYLOAD_BYTES, Engine
from tiered_kv import CPUTier, TieredKV, hash_blocks

CPU = CPUTier(capacity=16 * PAYLOAD_BYTES)
TOKENS = list(range(6 * BLOCK_SIZE))


@pytest.fixture
def at(tmp_path: Path) -> str:
    """Return the address of the cache's page."""
    return f"unix:{tmp_path}/kv.sock"


@asynccontextmanager
async def working(at: str, backend: ScriptedBackend) -> AsyncIterator[tuple[TieredKV, Engine]]:
    """Yield a cache that has a prompt, but for one block, and has missed it once."""
    engine, keys = Engine(), hash_blocks(TOKENS, block_size=BLOCK_SIZE)
    async with open_cache(CPU, backend, engine=engine, page=at) as kv:
        await keep(kv, engine, keys)
        await kv.evict(keys[4:5])
        await kv.load(keys, engine.compute(keys))
        yield kv, engine


async def test_status_says_what_is_there_and_whether_all_is_well(at: str) -> None:
    """Tiers, hits and misses as `stats` has them; with a tier in trouble the exit code is 1, and it is named."""
    backend = ScriptedBackend()
    async with working(at, backend) as (kv, engine):
        state = await answer("status", "--at", at)
        assert state["model"] == MODEL.name
        assert state["hour"]["missed_because"] == {"removed": 2}
        shown = (await run("status", "--at", at)).stdout
        assert "all well" in shown
        assert "removed 2" in shown
        for seed in range(3):
            backend.on_write.fail_next(OSError("full"))
            await keep(kv, engine, hash_blocks(range(BLOCK_SIZE * (seed + 1)), block_size=BLOCK_SIZE, salt="t")[seed:])
        result = await run("status", "--at", at)
        assert result.exit_code == 1
        assert "no writes" in result.stdout


async def test_top_looks_again_and_again(at: str) -> None:
    """A line of JSON for each look, or a picture that is drawn anew."""
    async with working(at, ScriptedBackend()):
        result = await run("top", "--at", at, "--every", "0.2", "--looks", "2", "--json")
        first, second = map(json.loads, result.stdout.splitlines())
        assert first["at"] < second["at"]
        result = await run("top", "--at", at, "--every", "0.2", "--looks", "2")
        assert result.exit_code == 0
        assert "cpu" in result.stdout


async def test_explain_says_why_a_prompt_is_not_there(at: str, tmp_path: Path) -> None:
    """Block by block, neighbours together, of token ids or of an engine's hashes; exit code 1 if some are missing."""
    prompt, hashes = tmp_path / "prompt.json", tmp_path / "hashes.json"
    prompt.write_text(json.dumps(TOKENS))
    words = hash_blocks(TOKENS, block_size=BLOCK_SIZE).words
    hashes.write_text(json.dumps([row.tobytes().hex() for row in words]))
    async with working(at, ScriptedBackend()) as (kv, engine):
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


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "--at", "unix:/no/such.sock"),
        ("status", "--at", "127.0.0.1:1"),
        ("status", "--at", "no address"),
        ("top", "--at", "http://127.0.0.1:1/cache"),
        ("explain", "--at", "127.0.0.1:1"),
        ("explain", "/no/such/file", "--at", "127.0.0.1:1"),
    ],
)
async def test_what_cannot_be_asked_is_said_in_one_line(arguments: tuple[str, ...]) -> None:
    """With a remedy, and exit code 2."""
    result = await run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("tiered-kv: ")
    assert result.stderr.count("\n") == 1


async def test_what_is_no_question_is_refused_in_words(at: str, tmp_path: Path) -> None:
    """A file that is no list, and token ids that are none."""
    file = tmp_path / "prompt.json"
    async with working(at, ScriptedBackend()):
        for text, words in (("{", "no JSON"), ("{}", "no list"), (json.dumps(["a"] * BLOCK_SIZE), "answers")):
            file.write_text(text)
            result = await run("explain", str(file), "--at", at)
            assert result.exit_code == 2
            assert words in result.stderr
