"""What requests say of their KV: the envelope read, bounded, and acted on by the connector for vLLM, imitated."""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.small_vllm import BLOCK_SIZE, STRIDE, Request, SmallVLLM, group, small_vllm
from tiered_kv import BlockKeys, BlockState
from tiered_kv.integrations.kv_hints import MOST_ACTIONS, MOST_S, Favours, HintAction, read_hints

SMALL = {"medium": "cpu", "capacity": 32 * STRIDE, "policy": "lru"}
PROMPT = 8 * BLOCK_SIZE
opened = contextmanager(small_vllm)


def hints(*actions: tuple[str, dict[str, Any]], version: str = "1.0") -> dict[str, Any]:
    """Return an envelope."""
    return {
        "protocol_version": "0.1",
        "message_id": "m",
        "actions": [
            {"action_id": str(at), "action_type": kind, "action_version": version, "payload": payload}
            for at, (kind, payload) in enumerate(actions)
        ],
    }


def there(engine: SmallVLLM, request: Request, tier: str | None = None) -> int:
    """Count the blocks of a request's prompt that the tiers have."""
    keys = BlockKeys.from_hashes(
        request.block_hashes[: PROMPT // BLOCK_SIZE], block_size=BLOCK_SIZE, salt=request.cache_salt or ""
    )
    return int(np.count_nonzero(engine.scheduling.kv.membership(keys, tier=tier) == BlockState.HIT))


def serve(engine: SmallVLLM, name: str, *actions: tuple[str, dict[str, Any]], salt: str | None = None) -> Request:
    """Have a prompt computed and stored, and its hints acted on."""
    request = engine.ask(name, PROMPT, 1, salt, hints=hints(*actions) if actions else None)
    engine.settle()
    engine.settle_loop()
    engine.scheduling.kv.call(engine.scheduling._hinting.settle)  # noqa: SLF001 - ours
    return request


def counted(engine: SmallVLLM, *names: str) -> list[float]:
    """Return what was counted of these since the last time."""
    stats = engine.scheduling.counts.take()
    return [stats.data.get(name, 0) if stats else 0 for name in names]


@pytest.mark.parametrize(
    "actions",
    [
        "none",
        [None],
        [{"action_type": "kv.pin"}],
        hints(("kv.teleport", {}))["actions"],
        hints(("kv.pin", {}), version="2.0")["actions"],
        hints(("kv.pin", {"ttl_seconds": "long"}))["actions"],
        hints(("kv.pin", {"ttl_seconds": float("nan")}))["actions"],
        hints(("kv.pin", {"start": -1}))["actions"],
        hints(("kv.pin", {"start": True}))["actions"],
        hints(("kv.retain", {"priority": 101}))["actions"],
        hints(("kv.retain", {"directives": [3]}))["actions"],
        hints(("kv.fetch", {"block_hashes": ["1"]}))["actions"],
        hints(("kv.fetch", {"delay_seconds": -1}))["actions"],
        hints(("kv.evict", "all"))["actions"],  # type: ignore[arg-type]  # what is tested
    ],
)
def test_what_is_not_understood_is_counted(actions: object) -> None:
    """It is no error, and nothing is asked for."""
    assert read_hints({"actions": actions}) == ([], 1)


def test_each_action_is_read_by_itself() -> None:
    """Objects as vLLM has them, beside one that nobody knows; what is too long is cut."""
    sent = hints(
        ("kv.unknown", {}),
        ("kv.retain", {"directives": [{"end": 64, "priority": 50, "duration": 20}, {"start": 64, "priority": 0}]}),
        ("kv.pin", {"ttl_seconds": 1e9}),
        ("kv.fetch", {"source_control_endpoint": "tcp://elsewhere", "block_hashes": [-1, 5]}),
    )
    envelope = SimpleNamespace(actions=[SimpleNamespace(**each) for each in sent["actions"]])
    assert read_hints(envelope) == (
        [
            HintAction("retain", 0.5, 20, end=64),
            HintAction("demote", start=64),
            HintAction("pin", for_s=MOST_S),
            HintAction("prefetch", for_s=60, after_s=None, hashes=frozenset({2**64 - 1, 5})),
        ],
        1,
    )


def test_too_many_actions_are_passed_over() -> None:
    """So that no request costs more than others by much."""
    actions, num_ignored = read_hints(hints(*[("kv.demote", {})] * (MOST_ACTIONS + 3)))
    assert (len(actions), num_ignored) == (MOST_ACTIONS, 3)


def test_an_action_is_about_whole_blocks_of_its_request() -> None:
    """By tokens, by names that KV events had, or of the answer alone."""
    names = [bytes(24) + number.to_bytes(8, "big") for number in range(10)]

    def of(**wanted: Any) -> list[range]:  # noqa: ANN401 - a HintAction's
        return list(HintAction("pin", **wanted).ranges(names, 16, 100))

    assert of() == [range(10)]
    assert of(start=1, end=63) == [range(1, 3)]
    assert of(start=None) == [range(7, 10)]
    assert of(hashes=frozenset({2, 3, 7, 99})) == [range(2, 4), range(7, 8)]
    assert of(start=500) == []


def test_a_tenant_has_its_share_and_all_have_theirs() -> None:
    """Of blocks, each counted once, until their time is up."""
    favours, blocks = Favours(4, 6), [bytes([at]) for at in range(8)]
    assert favours.take("a", blocks[:3], now_s=0, for_s=10) == 3
    assert favours.take("a", blocks, now_s=1, for_s=5) == 4  # three of them are the same, and for longer
    assert favours.take("b", blocks, now_s=2, for_s=10) == 2
    assert favours.take("c", blocks, now_s=2, for_s=10) == 0
    assert favours.take("c", blocks, now_s=7, for_s=10) == 1
    assert favours.take("c", blocks, now_s=13, for_s=10) == 4


def test_demoted_blocks_go_first() -> None:
    """Those of a conversation that won't come back, before older ones."""
    with opened(SMALL) as engine:
        old = serve(engine, "old")
        over = serve(engine, "over", ("kv.demote", {}))
        for number in range(3):
            serve(engine, f"new {number}")
        assert (there(engine, old), there(engine, over)) == (8, 0)


def test_retained_blocks_stay_longer() -> None:
    """With a policy that makes use of it; others of their age go."""
    with opened({**SMALL, "policy": "lhd"}, hint_share=0.5) as engine:
        kept = serve(engine, "kept", ("kv.retain", {"priority": 100, "ttl_seconds": 60}))
        others = [serve(engine, f"other {number}") for number in range(12)]
        assert there(engine, kept) == 8
        assert sum(there(engine, each) for each in others[:8]) < 8


def test_pinned_blocks_stay_and_the_share_holds() -> None:
    """With the blocks that were due when the request ended; beyond a tenant's share nothing is pinned."""
    with opened(SMALL, hint_share=0.25) as engine:
        kept = serve(engine, "kept", ("kv.pin", {"ttl_seconds": 60}))
        serve(engine, "more", ("kv.pin", {"ttl_seconds": 60}))
        assert counted(engine, "hint_blocks", "hint_blocks_refused") == [8, 8]
        other = serve(engine, "other", ("kv.pin", {"ttl_seconds": 60}), salt="another tenant")
        assert counted(engine, "hint_blocks", "hint_blocks_refused") == [8, 0]
        for number in range(6):
            serve(engine, f"new {number}")
        assert (there(engine, kept), there(engine, other)) == (8, 8)


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_only_what_is_a_tenants_own_is_evicted(salt: str | None) -> None:
    """Blocks without a salt are everybody's: these are demoted, and still found."""
    with opened(SMALL) as engine:
        same = serve(engine, "same", ("kv.evict", {}), salt=salt)
        other = serve(engine, "other", salt="another")
        assert (there(engine, same), there(engine, other)) == (0 if salt else 8, 8)


def test_blocks_are_fetched_while_their_request_waits(tmp_path: Path) -> None:
    """From storage, before the request has its turn."""
    disk = {"medium": "nvme", "path": tmp_path, "capacity": 512 * STRIDE}
    with opened(SMALL, disk, hint_share=0.5) as engine:
        before = engine.ask("before", PROMPT, 1, prompt="again")
        for number in range(8):
            serve(engine, f"new {number}")
            engine.scheduling.kv.flush()  # what waits for the disk is not evicted
        assert there(engine, before, "cpu") == 0
        request = engine.ask("again", PROMPT, 1, prompt="again", hints=hints(("kv.fetch", {})))
        engine.settle_loop()
        engine.scheduling.kv.call(engine.scheduling._hinting.settle)  # noqa: SLF001 - ours
        assert there(engine, request, "cpu") == 8
        engine.settle()


def test_blocks_are_fetched_for_a_turn_that_is_to_come(tmp_path: Path) -> None:
    """So long after the request has ended: when its tool will have answered."""
    disk = {"medium": "nvme", "path": tmp_path, "capacity": 512 * STRIDE}
    with opened(SMALL, disk, hint_share=0.5) as engine:
        request = engine.ask("r", PROMPT, 1, hints=hints(("kv.evict", {}), ("kv.prefetch", {"delay_seconds": 0.01})))
        engine.settle()
        engine.scheduling.kv.flush()
        engine.scheduling.kv.call(engine.scheduling._hinting.settle)  # noqa: SLF001 - ours
        assert there(engine, request, "cpu") == 8
        assert counted(engine, "hints", "hints_ignored", "hint_blocks") == [2, 0, 8]


def test_hints_come_by_http_too() -> None:
    """In the parameters that vLLM's server takes, as it has no field for them."""
    with opened(SMALL) as engine:
        request = Request("r", PROMPT, 1, kv_transfer_params={"kv_hints": hints(("kv.pin", {}), ("kv.odd", {}))})
        request.know(PROMPT)
        engine.scheduling.come(request)
        assert counted(engine, "hints", "hints_ignored") == [1, 1]


def test_windows_and_states_are_kept_where_they_are_of_use() -> None:
    """Of each KV group the blocks that a request needs to go on."""
    groups = (group(0), group(1, num_blocks=2))
    with opened({**SMALL, "capacity": 64 * STRIDE}, groups=groups, hint_share=0.5) as engine:
        serve(engine, "r", ("kv.pin", {}))
        assert counted(engine, "hint_blocks") == [8 + 2]


def test_hints_may_be_off() -> None:
    """Then nothing is read or counted."""
    with opened(SMALL, hint_share=0.0) as engine:
        engine.ask("r", PROMPT, 1, hints=hints(("kv.pin", {})))
        engine.settle()
        assert counted(engine, "hints", "hint_blocks") == [0, 0]
