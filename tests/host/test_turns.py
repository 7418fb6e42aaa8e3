"""One client after the other: whatever one asks for, the others are answered in between.

Turns are counted, not time.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.host.test_hostile import attached_stranger, reply_on
from tests.support.any_layout import LIMITS, MODEL, SMALL, AnyEngine, cpu, prompt
from tests.support.caches import Recorder, until
from tests.support.serving import attached, serving
from tiered_kv import BlockKeys, ConfigurationError, Reason, Shard, TieredKVSettings
from tiered_kv.host import protocol, wire
from tiered_kv.host.asked_calls import CALLS
from tiered_kv.host.protocol import MOST_BLOCKS, Keys
from tiered_kv.host.shares import Shares

KEYS = prompt(8)
EPOCH = b"e" * 32


async def test_a_flood_of_one_client_lets_the_others_in_after_a_few_messages() -> None:
    """However much of one has come, each turn of the loop takes a few of each client's messages."""
    taken: list[str] = []
    flooding: wire.Link[Any] = wire.Link(
        protocol.request_from, lambda _: taken.append("flood"), lambda: None, broken=taken.append
    )
    small: wire.Link[Any] = wire.Link(
        protocol.request_from, lambda _: taken.append("small"), lambda: None, broken=taken.append
    )
    flooding.data_received(wire.frame(protocol.Ping(1)) * 200)
    for number in range(5):
        small.data_received(wire.frame(protocol.Ping(number)))
        await asyncio.sleep(0)
    last = len(taken) - taken[::-1].index("small")
    assert taken.count("small") == 5
    assert taken[:last].count("flood") <= 5 * 8
    await until(lambda: taken.count("flood") == 200)


async def test_long_messages_of_one_client_let_the_others_in_after_each() -> None:
    """A few of them are as much work as hundreds of others."""
    taken: list[int] = []
    made: wire.Link[Any] = wire.Link(
        protocol.request_from, lambda asked: taken.append(asked.id), lambda: None, broken=print
    )
    long = Keys(bytes(1 << 20), 0, KEYS.block_size, 0, bytes(32), EPOCH)
    made.data_received(b"".join(wire.frame(protocol.Lease(number, long)) for number in range(5)))
    for num_turns in range(1, 6):
        assert taken == list(range(num_turns))
        await asyncio.sleep(0)


@pytest.mark.parametrize("num_ranks", [1, 64])
@pytest.mark.parametrize("name", sorted(name for name, remote in CALLS.items() if remote.has_keys))
def test_what_one_message_may_be_about_is_bounded(name: str, num_ranks: int) -> None:
    """Of every call, and less of many ranks: the server refuses more; a client asks in parts that are taken."""
    remote = CALLS[name]
    n, most = 2 * remote.most_keys + 1, remote.most_keys * 8 // max(8, num_ranks)
    many = BlockKeys(bytes(32) * n, block_size=KEYS.block_size)
    others: dict[str, dict[str, Any]] = {"pin": {"ttl_s": 1.0}, "count_lookup": {"found": np.ones(n, np.bool_)}}
    given = remote.bind(many, **others.get(name, {}))
    with pytest.raises(ConfigurationError, match=rf"{name}\(\) of {n} keys, {most} at most"):
        remote.heard(remote.said(given, Keys.of(many, EPOCH)), num_ranks)
    parts = remote.parts(given, num_ranks)
    assert [each.keys.start for each in parts] == list(range(0, n, most))
    heard = [remote.heard(remote.said(each, Keys.of(each.keys, EPOCH)), num_ranks)[1] for each in parts]
    assert sum(len(each["keys"]) for each in heard) == n
    if name == "count_lookup":
        assert [len(each["found"]) for each in heard] == [len(each["keys"]) for each in heard]


async def test_what_one_transfer_may_be_about_is_bounded(tmp_path: Path) -> None:
    """Of a load, a store, a lease and a plan: more is refused, and counted, before any of it is looked at."""
    keys = Keys(bytes(32) * (MOST_BLOCKS + 1), 0, KEYS.block_size, 0, bytes(32), EPOCH)
    asked: list[wire.Message] = [
        protocol.Load(1, keys, 60.0, 0, layerwise=False, gaps=False),
        protocol.Store(2, keys, layerwise=False, hint=None),
        protocol.Lease(3, keys),
        protocol.PlanJob(4, "store", keys, (), gaps=False, is_bound=True, hint=None),
    ]
    with serving(tmp_path, cpu(24)) as server, attached_stranger(server) as (connection, _):
        said = []
        for each in asked:
            await asyncio.to_thread(connection.sendall, wire.frame(each))
            said.append(await asyncio.to_thread(reply_on, connection))
            if isinstance(each, protocol.Store):
                await asyncio.to_thread(reply_on, connection)  # that it is settled
        assert said[0].missed_because == Reason.TOO_MANY_KEYS
        assert said[1].dropped == {Reason.TOO_MANY_KEYS: MOST_BLOCKS + 1}
        assert "a lease of 262145 keys, 262144 at most" in said[2].why
        assert "a plan of 262145 keys for 1 ranks, 262144 blocks at most" in said[3].why
        async with attached(server) as kv:
            stats = kv.stats()
            assert (stats.missed, stats.dropped) == (MOST_BLOCKS + 1, MOST_BLOCKS + 1)


def test_what_may_be_planned_can_be_said() -> None:
    """Of each block its slot and its position, and of each key whether it was moved: in one message, twice over."""
    assert 2 * (8 + 8 + 1) * MOST_BLOCKS < wire.MOST_FRAME_BYTES


async def test_others_are_answered_while_a_client_of_many_ranks_attaches(tmp_path: Path) -> None:
    """The memory and the books of one rank are made in each turn of the loop."""
    settings = TieredKVSettings(tiers=[cpu(40 * 24)], limits=LIMITS, host={"socket": tmp_path / "kv.sock"})
    shares = Shares(settings, Recorder())
    joining, num_turns = asyncio.ensure_future(shares.join(MODEL, SMALL, Shard.every(40))), 0
    while not joining.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert len(joining.result()[1]) == 40
    assert num_turns >= 40
    await shares.aclose()


async def test_others_are_answered_between_the_parts_of_a_large_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client asks for the next part when it has the answer to one, and stops where the prefix ends."""
    engine, other = AnyEngine(num_blocks=64), AnyEngine()
    many, said = prompt(48, seed=1), list[int]()
    monkeypatch.setattr(CALLS["lookup"], "most_keys", 4)
    with serving(tmp_path, cpu(64)) as server:
        async with attached(server, engine) as kv, attached(server, other) as neighbour:
            await kv.store(many[:40], engine.fill(many[:40], range(40)))
            looking = asyncio.ensure_future(kv.lookup(many))
            while not looking.done():
                await neighbour.lookup(KEYS[:4])
                said.append(1)
            found = await looking
            assert (found.num_blocks, [(run.start, run.stop) for run in found.runs]) == (40, [(0, 40)])
            assert len(said) >= 5
