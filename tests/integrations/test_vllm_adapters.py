"""What a LoRA adapter has computed is served for its very files, and not for what is trained anew under its path."""

import json
import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs

from tests.support.caches import keep, open_cache, until
from tests.support.engine import PAYLOAD_BYTES, Engine, prompt
from tests.support.small_vllm import BLOCK_SIZE, STRIDE, VLLM, SmallVLLM, small_vllm
from tiered_kv import BlockState
from tiered_kv.telemetry.router_books import RouterBooks

NUM_BLOCKS = 6
opened = contextmanager(small_vllm)


@dataclass
class Lora:
    """A LoRA request of vLLM's."""

    lora_path: str
    lora_int_id: int = 1
    lora_name: str = "sql"
    load_inplace: bool = False

    @property
    def adapter_id(self) -> int:
        """Its number, by another name."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """Its name, by another one."""
        return self.lora_name


def train(folder: Path, seed: int = 0, alpha: int = 16) -> Lora:
    """Write an adapter, by new files in the place of those that were there."""
    folder.mkdir(exist_ok=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).unlink(missing_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": alpha}))
    weights = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
    save_file({"layers.0.q_proj.lora_A.weight": weights}, folder / "adapter_model.safetensors")
    return Lora(str(folder))


def tiers(folder: Path) -> list[dict[str, object]]:
    """Return memory, and NVMe that outlives an engine."""
    nvme = {"medium": "nvme", "path": folder, "capacity": "8MiB", "write": "through"}
    return [{"medium": "cpu", "capacity": 64 * STRIDE}, nvme]


def ask(engine: SmallVLLM, lora: Lora | None) -> tuple[int, int]:
    """Have the prompt computed; return how many of its blocks were loaded, and how many stored."""
    before = engine.scheduling.kv.stats()
    engine.ask(f"r{before}", NUM_BLOCKS * BLOCK_SIZE + 1, 1, prompt="a", lora=lora)
    engine.settle()
    engine.settle_loop()
    now = engine.scheduling.kv.stats()
    num_asked, num_missed = now.requested - before.requested, now.missed - before.missed
    return num_asked - num_missed, now.stored - before.stored


def test_the_same_files_are_served_after_a_restart(tmp_path: Path) -> None:
    """Of the adapter its own blocks, and of the model without one its own."""
    lora = train(tmp_path / "sql")
    with opened(*tiers(tmp_path / "nvme")) as engine:
        assert ask(engine, lora) == (0, NUM_BLOCKS)
        assert ask(engine, None) == (0, NUM_BLOCKS)
        assert ask(engine, lora) == (NUM_BLOCKS, 0)
    with opened(*tiers(tmp_path / "nvme")) as engine:
        assert ask(engine, lora) == (NUM_BLOCKS, 0)


@pytest.mark.parametrize("change", [{"seed": 1}, {"alpha": 32}], ids=["weights", "scaling"])
def test_what_is_trained_anew_under_its_path_finds_nothing_after_a_restart(
    tmp_path: Path, change: dict[str, int]
) -> None:
    """The hashes that vLLM makes are the same: they have the adapter's name and path."""
    with opened(*tiers(tmp_path / "nvme")) as engine:
        ask(engine, train(tmp_path / "sql"))
    with opened(*tiers(tmp_path / "nvme")) as engine:
        assert ask(engine, train(tmp_path / "sql", **change)) == (0, NUM_BLOCKS)


def test_what_an_adapter_computed_is_stored_when_vllm_is_about_to_drop_it(tmp_path: Path) -> None:
    """As what the model itself computed is: vLLM knows the block by a hash that is not its name below."""
    lora, room = train(tmp_path / "sql"), {"medium": "cpu", "capacity": 256 * STRIDE}
    with opened(room, store_when="evicted", has_cache=True, num_blocks=64) as engine:
        for number in range(32):  # eight prompts of twelve blocks, again and again: vLLM has room for five
            engine.ask(f"r{number}", 12 * BLOCK_SIZE + 1, 1, prompt=f"p{number % 8}", lora=lora)
            engine.settle()
            engine.settle_loop()
        kept = engine.scheduling.kv.stats()
    assert kept.stored > 0
    assert kept.requested > kept.missed


def test_an_adapter_whose_files_change_while_it_is_served_is_neither_stored_nor_found(tmp_path: Path) -> None:
    """In memory are its old weights or, loaded in place, the new ones; under another number it is read anew."""
    lora = train(tmp_path / "sql")
    with opened(*tiers(tmp_path / "nvme")) as engine:
        ask(engine, lora)
        train(tmp_path / "sql", seed=1)
        with capture_logs() as logs:
            assert [ask(engine, lora), ask(engine, lora)] == [(0, 0)] * 2
        assert [each["event"] for each in logs].count("vllm.adapter_unknown") == 1
        again = Lora(lora.lora_path, lora_int_id=2)
        assert [ask(engine, again), ask(engine, again)] == [(0, NUM_BLOCKS), (NUM_BLOCKS, 0)]


def test_what_was_begun_before_the_files_changed_is_not_stored(tmp_path: Path) -> None:
    """Nobody knows which weights have computed the rest of it: it takes no room, and what was due is counted."""
    lora = train(tmp_path / "sql")
    with opened(*tiers(tmp_path / "nvme")) as engine:
        request = engine.ask("r", BLOCK_SIZE + 1, 4 * BLOCK_SIZE, lora=lora)
        engine.step(2)
        engine.ask("due", 3 * BLOCK_SIZE + 1, 1, lora=lora)
        engine.step()
        engine.scheduling.counts.take()
        train(tmp_path / "sql", seed=1)
        engine.settle()
        engine.settle_loop()
        assert engine.scheduling.kv.stats().stored == 1
        assert engine.scheduling.counts.take().data["store_blocks_skipped"] == 3
        train(tmp_path / "sql")
        naming = VLLM.naming.RequestNaming()
        assert naming.can_name(request)
        states = engine.scheduling.kv.membership(naming.keys(engine.groups[0], request, 0, 5))
        assert list(states[1:]) == [BlockState.MISS] * 4


def test_what_was_begun_before_another_path_came_in_its_place_is_not_stored(tmp_path: Path) -> None:
    """Its rest is computed by the new weights, and beside it what is asked of these may be by the old ones."""
    old, new = train(tmp_path / "sql"), train(tmp_path / "anew", seed=1)
    new.load_inplace = True
    with opened(*tiers(tmp_path / "nvme")) as engine:
        begun = engine.ask("r", BLOCK_SIZE + 1, 4 * BLOCK_SIZE, lora=old)
        engine.step(2)
        assert ask(engine, new) == (0, 1)  # the one of the other's that was computed before
        assert [ask(engine, new), ask(engine, old)] == [(0, 0)] * 2
        naming = VLLM.naming.RequestNaming()
        assert naming.can_name(begun)
        states = engine.scheduling.kv.membership(naming.keys(engine.groups[0], begun, 0, 5))
        assert list(states[1:]) == [BlockState.MISS] * 4


def test_of_a_number_that_two_adapters_have_nothing_is_stored_nor_found(tmp_path: Path) -> None:
    """The second is computed by the weights of the first until vLLM has dropped these."""
    first, second = train(tmp_path / "sql"), train(tmp_path / "prose", seed=1)
    with opened(*tiers(tmp_path / "nvme")) as engine:
        with capture_logs() as logs:
            assert [ask(engine, each) for each in (first, second, first)] == [(0, NUM_BLOCKS), (0, 0), (0, 0)]
        assert [each["event"] for each in logs].count("vllm.adapter_unknown") == 1


def test_of_an_adapter_that_came_back_in_the_place_of_another_nothing_is_stored_nor_found(tmp_path: Path) -> None:
    """The first one's weights are in memory again: what is asked of the second, and not loaded, is computed by them."""
    first, second = train(tmp_path / "sql"), train(tmp_path / "prose", seed=1)
    with opened(*tiers(tmp_path / "nvme")) as engine:
        assert ask(engine, first) == (0, NUM_BLOCKS)
        for each in (replace(second, load_inplace=True), replace(first, load_inplace=True)):
            ask(engine, each)
        assert [ask(engine, each) for each in (second, second, first)] == [(0, 0)] * 3


def test_an_adapter_that_is_not_there_yet_is_served_once_it_is(tmp_path: Path) -> None:
    """It may be fetched only when the first request is about to be computed."""
    lora = Lora(str(tmp_path / "sql"))
    with opened(*tiers(tmp_path / "nvme")) as engine:
        assert ask(engine, lora) == (0, 0)
        train(tmp_path / "sql")
        assert [ask(engine, lora), ask(engine, lora)] == [(0, NUM_BLOCKS), (NUM_BLOCKS, 0)]


def test_a_file_that_is_written_in_place_is_another_whatever_its_date(tmp_path: Path) -> None:
    """A copy that keeps dates does so."""
    lora = train(tmp_path / "sql")
    file = tmp_path / "sql" / "adapter_model.safetensors"
    with opened(*tiers(tmp_path / "nvme")) as engine:
        ask(engine, lora)
        dates = file.stat()
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        os.utime(file, ns=(dates.st_atime_ns, dates.st_mtime_ns))
        assert ask(engine, lora) == (0, 0)


def test_of_more_adapters_than_are_remembered_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are remembered are served on."""
    monkeypatch.setattr(VLLM.naming, "MOST_ADAPTERS", 1)
    first, second = train(tmp_path / "sql"), train(tmp_path / "prose", seed=1)
    second.lora_int_id = 2
    with opened(*tiers(tmp_path / "nvme")) as engine:
        assert [ask(engine, each) for each in (first, second, second, first)] == [
            (0, NUM_BLOCKS), (0, 0), (0, 0), (NUM_BLOCKS, 0),
        ]  # fmt: skip


async def test_after_a_fault_in_the_books_routers_are_told_everything_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have missed what the work that failed was about: what is there is told again, and goes on being told."""
    engine, keys = Engine(), prompt(3)
    request = SimpleNamespace(lora_request=Lora("/adapters/sql"), all_token_ids=range(3 * keys.block_size))
    told: list[Any] = []

    def fails(*_: object) -> list[Any]:
        raise RuntimeError("planted")

    def have_come(number: int) -> bool:
        told.extend(each for each in events.take() if isinstance(each, VLLM.tier_events.BlockStored))
        return len(told) == number

    async with open_cache({"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}, engine=engine) as kv:
        events = VLLM.tier_events.TierEvents(kv)
        try:
            events.describe(request, keys, [bytes(31) + bytes([at]) for at in range(3)])
            await keep(kv, engine, keys)
            await until(lambda: have_come(1))
            with monkeypatch.context() as patched, capture_logs() as logs:
                patched.setattr(RouterBooks, "describe", fails)
                events.describe(request, keys, [bytes(32)] * 3)
                await until(lambda: have_come(2))
            assert [each["event"] for each in logs] == ["background.failed"]
        finally:
            await events.aclose()
    assert [each.block_hashes for each in told] == [[0, 1, 2]] * 2


async def test_after_a_fault_on_the_way_to_vllm_routers_know_nothing_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was to be removed and never came to them is removed when all is told anew."""
    engine, keys = Engine(), prompt(3)
    request = SimpleNamespace(lora_request=Lora("/adapters/sql"), all_token_ids=range(3 * keys.block_size))
    known: set[int] = set()  # what a router believes

    def fails(_: object) -> Any:  # noqa: ANN401 - stands for an event
        raise MemoryError("planted")

    def believes(hashes: set[int]) -> bool:
        for event in events.take():
            is_stored = isinstance(event, VLLM.tier_events.BlockStored)
            (known.update if is_stored else known.difference_update)(event.block_hashes)
        return known == hashes

    async with open_cache({"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}, engine=engine) as kv:
        events = VLLM.tier_events.TierEvents(kv)
        try:
            events.describe(request, keys, [bytes(31) + bytes([at]) for at in range(3)])
            await keep(kv, engine, keys)
            await until(lambda: believes({0, 1, 2}))
            with monkeypatch.context() as patched, capture_logs() as logs:
                patched.setattr(VLLM.tier_events, "_of_vllm", fails)
                await kv.evict(keys[2:])
                await until(lambda: any(each["event"] == "background.failed" for each in logs))
            await until(lambda: believes({0, 1}))
        finally:
            await events.aclose()


async def test_routers_hear_of_an_adapters_blocks() -> None:
    """By the hashes that vLLM has for them, and with the adapter's number and name."""
    engine, keys = Engine(), prompt(3)
    hashes = [bytes(31) + bytes([at]) for at in range(3)]
    request = SimpleNamespace(lora_request=Lora("/adapters/sql"), all_token_ids=range(3 * keys.block_size))
    told: list[Any] = []

    def have_come() -> bool:
        told.extend(events.take())
        return bool(told)

    async with open_cache({"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES}, engine=engine) as kv:
        events = VLLM.tier_events.TierEvents(kv)
        try:
            events.describe(request, keys, hashes)
            await keep(kv, engine, keys)
            await until(have_come)
        finally:
            await events.aclose()
    (event,) = told
    assert (event.block_hashes, event.lora_id, event.lora_name) == ([0, 1, 2], 1, "sql")
