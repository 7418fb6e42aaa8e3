"""What requests say of their KV, acted on by the connector for vLLM, imitated."""

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from tests.support.hints import hints
from tests.support.small_vllm import BLOCK_SIZE, STRIDE, VLLM, Request, SmallVLLM, group, small_vllm
from tiered_kv import BlockKeys, BlockState

SLOTS = 32
SMALL = {"medium": "cpu", "capacity": SLOTS * STRIDE, "policy": "lru"}
PROMPT = 8 * BLOCK_SIZE
opened = contextmanager(small_vllm)


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
    engine.scheduling.kv.call(engine.scheduling._hinting._hints.settle)  # noqa: SLF001 - ours
    return request


def counted(engine: SmallVLLM, *names: str) -> list[float]:
    """Return what was counted of these since the last time."""
    stats = engine.scheduling.counts.take()
    return [stats.data.get(name, 0) if stats else 0 for name in names]


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


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_pinned_blocks_stay_and_the_share_holds(num_ranks: int) -> None:
    """With the blocks that were due when the request ended; beyond a tenant's share of each rank nothing is pinned."""
    with opened({**SMALL, "capacity": num_ranks * SLOTS * STRIDE}, hint_share=0.25, num_ranks=num_ranks) as engine:
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


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_blocks_are_fetched_while_their_request_waits(num_ranks: int, tmp_path: Path) -> None:
    """From storage, before the request has its turn; those of all ranks."""
    disk = {"medium": "nvme", "path": tmp_path, "capacity": 512 * STRIDE}
    memory = {**SMALL, "capacity": num_ranks * SLOTS * STRIDE}
    with opened(memory, disk, hint_share=0.5, num_ranks=num_ranks) as engine:
        before = engine.ask("before", PROMPT, 1, prompt="again")
        for number in range(8):
            serve(engine, f"new {number}")
            engine.scheduling.kv.flush()  # what waits for the disk is not evicted
        assert there(engine, before, "cpu") == 0
        request = engine.ask("again", PROMPT, 1, prompt="again", hints=hints(("kv.fetch", {})))
        engine.settle_loop()
        engine.scheduling.kv.call(engine.scheduling._hinting._hints.settle)  # noqa: SLF001 - ours
        assert there(engine, request, "cpu") == 8
        engine.settle()


def test_blocks_are_fetched_for_a_turn_that_is_to_come(tmp_path: Path) -> None:
    """So long after the request has ended: when its tool will have answered."""
    disk = {"medium": "nvme", "path": tmp_path, "capacity": 512 * STRIDE}
    with opened(SMALL, disk, hint_share=0.5) as engine:
        request = engine.ask("r", PROMPT, 1, hints=hints(("kv.evict", {}), ("kv.prefetch", {"delay_seconds": 0.01})))
        engine.settle()
        engine.scheduling.kv.flush()
        engine.scheduling.kv.call(engine.scheduling._hinting._hints.settle)  # noqa: SLF001 - ours
        assert there(engine, request, "cpu") == 8
        assert counted(engine, "hints", "hints_ignored", "hint_blocks") == [2, 0, 8]


def test_hints_come_by_http_too() -> None:
    """In the parameters that vLLM's server takes, as it has no field for them."""
    with opened(SMALL) as engine:
        request = Request("r", PROMPT, 1, kv_transfer_params={"kv_hints": hints(("kv.pin", {}), ("kv.odd", {}))})
        request.know(PROMPT)
        engine.scheduling.come(request)
        assert counted(engine, "hints", "hints_ignored") == [1, 1]


def nested(depth: int) -> list[Any]:
    """Return a list in a list, and so on: more than an interpreter can put into words."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "params",
    ["kv_hints", [["kv_hints"]], {"kv_hints": {"actions": [{"action_type": nested(100_000)}]}}],
    ids=["text", "list", "nested"],
)
def test_whatever_a_request_brings_its_engine_goes_on(params: Any) -> None:  # noqa: ANN401 - whatever somebody sends
    """What cannot be read is counted and logged, and the request computed and stored; the next one's hints are read."""
    with opened(SMALL, hint_share=0.5) as engine, capture_logs() as logs:
        request = engine.ask("r", PROMPT, 1, params=params)
        engine.settle()
        serve(engine, "s", ("kv.pin", {}))
        assert there(engine, request) == 8
        assert counted(engine, "hints", "hints_ignored", "hint_blocks") == [1, 1, 8]
    assert [(each["event"], each["task"]) for each in logs] == [("background.failed", "KV hints")]


def test_requests_that_cannot_be_read_do_not_fill_the_log() -> None:
    """Whoever sends them decides how many there are; all of them are counted."""
    with opened(SMALL, hint_share=0.5) as engine, capture_logs() as logs:
        for number in range(20):
            engine.ask(f"r{number}", PROMPT, 1, params="kv_hints")
            engine.settle()
        assert counted(engine, "hints_ignored") == [20]
    assert [(each["event"], each["task"]) for each in logs if each["log_level"] == "error"] == [
        ("background.failed", "KV hints")
    ]


@pytest.mark.parametrize("delay", [{}, {"delay_seconds": 0.01}], ids=["as it comes", "as it ends"])
def test_hints_that_cannot_be_acted_on_cost_themselves(
    monkeypatch: pytest.MonkeyPatch, delay: dict[str, float]
) -> None:
    """A fault of ours in one request's: the engine goes on, and another's that end in the same step are acted on."""
    blocks_meant = VLLM.hinting.blocks_meant

    def fails(actions: Any, hashes: Any, *, num_prompt_tokens: int, **sizes: int) -> Any:  # noqa: ANN401 - as above
        if num_prompt_tokens == PROMPT:
            raise RuntimeError("planted")
        return blocks_meant(actions, hashes, num_prompt_tokens=num_prompt_tokens, **sizes)

    monkeypatch.setattr(VLLM.hinting, "blocks_meant", fails)
    with opened(SMALL, hint_share=0.5) as engine, capture_logs() as logs:
        engine.ask("r", PROMPT, 1, hints=hints(("kv.prefetch", delay), ("kv.prefetch", delay)))
        engine.ask("s", PROMPT - BLOCK_SIZE, 1, hints=hints(("kv.pin", {})))
        engine.settle()
        engine.settle_loop()
        engine.scheduling.kv.call(engine.scheduling._hinting._hints.settle)  # noqa: SLF001 - ours
        assert counted(engine, "hints", "hint_blocks") == [3, 7]
    assert [(each["event"], each["task"]) for each in logs] == [("background.failed", "KV hints")]


def test_a_fault_costs_what_it_is_about_and_no_other_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes as a request ends is done all the same, and of one that has brought no hints none is counted."""
    begin, use = VLLM.hinting.Hinting._begin, VLLM.hinting.Hinting._use  # noqa: SLF001 - ours

    def fails(hinting: Any, jobs: Any, request: Any, actions: Any) -> None:  # noqa: ANN401 - as the method has it
        if actions[0].after_s is None:
            raise RuntimeError("planted")
        begin(hinting, jobs, request, actions)

    def fails_later(hinting: Any, request: Any) -> None:  # noqa: ANN401 - as the method has it
        if request.request_id == "none":
            raise RuntimeError("planted")
        use(hinting, request)

    with opened(SMALL, hint_share=0.5) as engine, capture_logs():
        monkeypatch.setattr(VLLM.hinting.Hinting, "_begin", fails)
        monkeypatch.setattr(VLLM.hinting.Hinting, "_use", fails_later)
        serve(engine, "r", ("kv.prefetch", {}), ("kv.fetch", {}), ("kv.pin", {}))
        assert counted(engine, "hints_ignored", "hint_blocks") == [2, 8]
        serve(engine, "none")
        assert counted(engine, "hints_ignored") == [0]


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
