"""A cache and its restarts, orderly and by kill -9. As a script this file is the parent of processes to be killed."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.any_layout import AnyEngine, cpu, nvme, open_any, prompt
from tests.support.caches import until_nothing_left
from tests.support.programs import started
from tiered_kv import BlockKeys, KVGroup, KVLayout
from tiered_kv.tiers.chain import Chain

NUM_LIVES = 15
"""Of each kind of tier."""
PROMPT_BLOCKS = 8
STORES_AT_ONCE = 2
TWO_GROUPS = KVLayout((KVGroup(2, 1, 48, "bfloat16", 4), KVGroup(1, 2, 64, "float32", 8, "HND", 4)))


async def test_a_warm_restart_serves_every_byte(tmp_path: Path) -> None:
    """What was stored before an orderly end is there after it, whole, whatever the block's shape."""
    engine = AnyEngine(TWO_GROUPS)
    keys = [prompt(20, group=group, block_size=each.block_size) for group, each in enumerate(TWO_GROUPS.groups)]
    async with open_any(engine, cpu(8, 12288), nvme(tmp_path)) as kv:
        for each in keys:
            await kv.store(each, engine.fill(each, range(20)))
    for tiers in ([cpu(8, 12288), nvme(tmp_path)], [nvme(tmp_path)]):
        async with open_any(engine, *tiers) as kv:
            for each in keys:
                engine.wipe()
                assert (await kv.lookup(each)).by_tier == {"nvme": 20}
                loaded = await kv.load(each, engine.spec(range(19, -1, -1), each.group))
                assert loaded.num_blocks == 20
                assert engine.count_right(each, range(19, -1, -1)) == 20


async def test_what_was_evicted_or_cleared_stays_away(tmp_path: Path) -> None:
    """A restart brings back nothing that was evicted by name, nor anything at all behind `clear`."""
    engine = AnyEngine()
    keys, other = prompt(12), prompt(6, seed=1)
    async with open_any(engine, cpu(4), nvme(tmp_path)) as kv:
        await kv.store(keys, engine.fill(keys, range(12)))
        await kv.store(other, engine.fill(other, range(12, 18)))
        await kv.flush()
        assert (await kv.evict(keys[5:7])).num_blocks == 2
    async with open_any(engine, cpu(4), nvme(tmp_path)) as kv:
        assert (await kv.lookup(keys)).num_blocks == 5
        assert (await kv.lookup(keys[5:])).num_blocks == 0
        assert (await kv.lookup(keys[7:])).num_blocks == 5
        await kv.clear()
        assert (await kv.lookup(keys)).num_blocks == 0
    async with open_any(engine, cpu(4), nvme(tmp_path)) as kv:
        assert (await kv.lookup(keys)).num_blocks == (await kv.lookup(other)).num_blocks == 0


@pytest.mark.parametrize("is_spread", [True, False], ids=["as_it_is", "without_spread_of_use"])
async def test_hot_heads_outlive_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_spread: bool) -> None:
    """A head served from CPU through a churn of other prompts is on the disk after a restart.

    The disk sees none of those hits. Without their spread to it the head would have gone: the second case shows it.
    """
    if not is_spread:
        monkeypatch.setattr(Chain, "touch_there", lambda *_, **__: None)
    engine = AnyEngine()
    head = prompt(4)
    async with open_any(engine, cpu(16), nvme(tmp_path, 700_000)) as kv:
        num_slots = kv.stats()["nvme"].num_slots
        await kv.store(head, engine.fill(head, range(4)))
        for turn in range(1, num_slots // 6 + 3):  # more than the disk holds
            loaded = await kv.load(head, engine.spec(range(4)))
            assert loaded.by_tier == {"cpu": 4}
            churn = prompt(6, seed=turn)
            await kv.store(churn, engine.fill(churn, range(4, 10)))
            await kv.flush()
        assert kv.stats()["nvme"].evicted > 0
    async with open_any(engine, nvme(tmp_path, 700_000)) as kv:
        engine.wipe()
        loaded = await kv.load(head, engine.spec(range(4)))
        assert loaded.by_tier == ({"nvme": 4} if is_spread else {})
        assert engine.count_right(head, range(4)) == (4 if is_spread else 0)


def mortal(path: Path, kind: str) -> dict[str, object]:
    """Return the tier of a cache that is killed; the disk is small, so that records are written over."""
    more = {"encryption": {"keys": ["01" * 32]}, "scrub_bandwidth": "1GiB"} if kind == "encrypted" else {}
    return {**nvme(path, "1MiB"), **more}


def prompts_of(life: int) -> list[BlockKeys]:
    """Return what a life stores, in this order, as far as it gets."""
    return [prompt(PROMPT_BLOCKS, seed=1 + life * 80 + number) for number in range(80)]


async def store_until_killed(path: Path, kind: str, life: int, acknowledged: int) -> None:
    """Store prompts for ever, several at once, and write a byte to a pipe for each that is on the disk."""
    engine = AnyEngine()
    left = iter(prompts_of(life))
    async with open_any(engine, cpu(12), mortal(path, kind)) as kv:

        async def store_some(number: int) -> None:
            ids = range(number * PROMPT_BLOCKS, (number + 1) * PROMPT_BLOCKS)
            for keys in left:
                result = await kv.store(keys, engine.fill(keys, ids))
                (settled,) = [tier for tier in await result.settled() if tier.tier == "nvme"]
                assert settled.written == PROMPT_BLOCKS
                os.write(acknowledged, (keys.words[0, :1]).tobytes())

        await asyncio.gather(*(store_some(number) for number in range(STORES_AT_ONCE)))
        os.write(acknowledged, b"exhaust!")
        await asyncio.Event().wait()


def run_lives() -> None:
    """For each delay read, start a life, kill it that long after its first store, say what it had acknowledged."""
    path, kind = Path(sys.argv[1]), sys.argv[2]
    for life, line in enumerate(sys.stdin):
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            asyncio.run(store_until_killed(path, kind, life, writer))
        os.close(writer)
        acknowledged = os.read(reader, 8)
        time.sleep(float(line))  # the moment of death: nothing waits for it
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while received := os.read(reader, 65536):
            acknowledged += received
        os.close(reader)
        sys.stdout.write(f"{acknowledged.hex()}\n")
        sys.stdout.flush()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "encrypted"])
def test_after_kill_only_right_bytes_are_served(tmp_path: Path, kind: str) -> None:
    """Killed at any moment, a cache serves after its restart what was stored, byte for byte, or nothing in its place.

    What was acknowledged last is there whole; encrypted, and scrubbed meanwhile, it is the same.
    """
    delays = np.random.default_rng(50).uniform(0, 0.06, NUM_LIVES)
    num_served = 0
    with started("-m", "tests.cache.test_restart", tmp_path, kind, folder=Path(__file__).parents[2]) as lives:
        for life, delay in enumerate(delays.tolist()):
            lives.stdin.write(f"{delay}\n")
            lives.stdin.flush()
            acknowledged = bytes.fromhex(lives.stdout.readline())
            assert acknowledged
            num_served += asyncio.run(check(tmp_path, kind, life, acknowledged))
    assert num_served > NUM_LIVES * PROMPT_BLOCKS


async def check(path: Path, kind: str, life: int, acknowledged: bytes) -> int:
    """Load what can be found of the prompts of this life and the one before, compare it, and return how much it was."""
    engine = AnyEngine()
    num_served, whole = 0, set()
    async with open_any(engine, cpu(0), mortal(path, kind)) as kv:
        for keys in [keys for each in range(max(0, life - 1), life + 1) for keys in prompts_of(each)]:
            for start in (0, PROMPT_BLOCKS // 2):  # behind a hole too
                tail = keys[start:]
                if not (await kv.lookup(tail)).num_blocks:
                    continue
                engine.wipe()
                n = (await kv.load(tail, engine.spec(range(len(tail))))).num_blocks
                assert engine.count_right(tail, range(len(tail))) == n
                num_served += n
                if n == PROMPT_BLOCKS:
                    whole.add(keys.words[0, :1].tobytes())
                break
        await until_nothing_left(kv)
    last = acknowledged[-8:]
    assert last in whole, f"life {life}: what was acknowledged last is gone"
    return num_served


if __name__ == "__main__":
    run_lives()
