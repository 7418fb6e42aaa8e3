"""A server that stores and loads all the time, until SIGTERM: started by test_drain.

Prints ``ready``, ``written SEED`` for each prompt whose blocks the disk is reported to have, and in the end ``drained
True`` and ``loaded NUM_BLOCKS``. With ``stuck`` its disk never answers, and ``begun`` says that the drain has begun.
"""

import asyncio
import signal
import sys
from itertools import count
from pathlib import Path

from tests.support.any_layout import AnyEngine, cpu, nvme, open_any, prompt
from tests.support.backends import ScriptedSlotBackend
from tiered_kv import StoreResult


def say(*words: object) -> None:
    """Print a line at once."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def report(seed: int, result: StoreResult) -> None:
    """Say when the disk has all blocks of a prompt."""
    of_disk = (await result.settled())[-1]
    if of_disk.written + of_disk.present == 8:
        say("written", seed)


async def serve(path: Path) -> None:
    """Serve until the signal."""
    engine = AnyEngine(num_blocks=16)
    async with open_any(engine, cpu(32), nvme(path)) as kv, asyncio.TaskGroup() as reports:
        with kv.drain_on(signal.SIGTERM) as draining:
            say("ready")
            for seed in count():
                keys = prompt(8, seed)
                result = await kv.store(keys, engine.fill(keys, range(8)))
                if "draining" in result.drop_reasons:
                    break
                reports.create_task(report(seed, result))
                await kv.load(prompt(8, max(0, seed - 2)), engine.spec(range(8, 16)))
            assert draining.begun.is_set()
            say("drained", await draining.wait())
            say("loaded", (await kv.load(prompt(8, seed - 1), engine.spec(range(8)))).num_blocks)


async def hang() -> None:
    """Begin a drain that takes an hour."""
    engine, disk = AnyEngine(num_blocks=8), ScriptedSlotBackend(timeout_s=3600)
    async with open_any(engine, cpu(32), disk) as kv:
        disk.on_write.hold()
        with kv.drain_on(signal.SIGTERM, signal.SIGINT, timeout_s=3600) as draining:
            await kv.store(prompt(8), engine.fill(prompt(8), range(8)))
            say("ready")
            await draining.begun.wait()
            say("begun")
            await draining.wait()


if __name__ == "__main__":
    asyncio.run(hang() if sys.argv[1] == "stuck" else serve(Path(sys.argv[1])))
