"""Models with several host pools, by interface v2: what is stored of each, and behind how many pages SGLang goes on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from tests.support.caches import inside
from tests.support.shelf import Shelf
from tests.support.small_sglang import (
    KEYS,
    LAYOUTS,
    SHELF,
    SIZE,
    DeepSeekV4PagedHostPool,
    DSAIndexerPoolHost,
    LogicalHostPool,
    MambaPoolHost,
    MHATokenToKVPoolHost,
    PoolTransfer,
    at,
    filled,
    host_pool,
    storages,
)
from tiered_kv import BlockKeys, ConfigurationError

Open = Callable[..., Any]
TRAILING = "trailing_pages"


@pytest.fixture
def opened() -> Iterator[Open]:
    """Return what opens a storage backend as SGLang does; closes all of them."""
    with storages() as open_storage:
        yield open_storage


def needed(name: str, num_pages: int = 0) -> PoolTransfer:
    """Say of a pool that its last pages are needed, or all."""
    return PoolTransfer(name, KEYS[:num_pages], hit_policy=TRAILING if num_pages else "all_pages")


def moved(name: str, pages: Sequence[int], slots: torch.Tensor | None) -> PoolTransfer:
    """Say which pages of a pool are to be moved from or to where."""
    return PoolTransfer(name, [KEYS[page] for page in pages], slots)


def forget(storage: Any, page: int, group: int) -> None:  # noqa: ANN401 - the adapter
    """Evict one page of a KV group."""
    storage.kv.evict(BlockKeys.from_hashes([bytes.fromhex(KEYS[page])], block_size=SIZE, group=group))


@dataclass
class Windows:
    """A storage that has the KV of ten pages, and of a pool of windows those that a model would have kept."""

    storage: Any
    main: Any
    window: Any
    truth: list[torch.Tensor]


@pytest.fixture
def windows(opened: Open) -> Windows:
    """Return one that has pages 2, 3 and 6 to 9 of the windows."""
    main, window = host_pool("layer_first"), host_pool("layer_first", layer_num=5)
    filled(main, range(10))
    truth = filled(window, range(10), seed=1)
    storage = opened(main, beside={"swa": window})
    assert storage.batch_set_v1(KEYS, at(*range(10))) == [True] * 10
    kept = [2, 3, 6, 7, 8, 9]
    assert storage.batch_set_v2([moved("swa", kept, at(*kept))]) == {"swa": [True] * 6}
    return Windows(storage, main, window, truth)


def test_a_prompt_is_served_where_every_pool_has_what_is_needed(windows: Windows) -> None:
    """All such places are said, and the greatest: ranks choose among them. A hole outside the window costs nothing."""
    found = windows.storage.batch_exists_v2(KEYS, [needed("swa", 2)])
    assert found.kv_hit_pages == 10
    assert found.restorable_prefix_pages == [4, 8, 9, 10]
    assert found.extra_pool_hit_pages == {"kv": 10, "swa": 10}
    assert windows.storage.batch_exists_v2(KEYS, [needed("swa", 4)]).restorable_prefix_pages == [10]
    assert windows.storage.batch_exists_v2(KEYS, [needed("swa", 5)]).kv_hit_pages == 0
    assert windows.storage.batch_exists_v2(KEYS[:7], [needed("swa", 2)]).kv_hit_pages == 4


def test_a_missing_page_of_any_pool_is_never_counted_on(windows: Windows) -> None:
    """Of the main pool it ends the prompt, of a window the places that need it."""
    forget(windows.storage, 9, group=1)
    assert windows.storage.batch_exists_v2(KEYS, [needed("swa", 2)]).restorable_prefix_pages == [4, 8, 9]
    forget(windows.storage, 8, group=0)
    found = windows.storage.batch_exists_v2(KEYS, [needed("swa", 2)])
    assert found.restorable_prefix_pages == [4, 8]
    assert found.extra_pool_hit_pages == {"kv": 8, "swa": 8}
    forget(windows.storage, 2, group=1)
    forget(windows.storage, 7, group=1)
    assert windows.storage.batch_exists_v2(KEYS, [needed("swa", 2)]).kv_hit_pages == 0


def test_a_window_that_begins_with_the_prompt_may_be_short(windows: Windows) -> None:
    """As SGLang's own backends have it: of pages before those that were asked for its tree knows."""
    assert windows.storage.batch_exists_v2(KEYS[2:4], [needed("swa", 8)]).restorable_prefix_pages == [1, 2]


def test_a_second_form_of_the_same_pages_never_stands_in_the_way(windows: Windows) -> None:
    """SGLang says so of pools whose policy is ``block_groups``; of such a one nothing is said."""
    found = windows.storage.batch_exists_v2(KEYS, [PoolTransfer("swa", KEYS, hit_policy="block_groups")])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (10, {"kv": 10})


def test_what_is_dropped_is_said_page_by_page(windows: Windows) -> None:
    """A cache that takes no stores any more keeps what it has."""
    windows.storage.kv.drain()
    assert windows.storage.batch_set_v2([moved("swa", [2, 3, 4, 5], at(2, 3, 4, 5))]) == {
        "swa": [True, True, False, False]
    }


def test_windows_are_loaded_byte_for_byte_and_a_hole_ends_them(windows: Windows) -> None:
    """Into the slots that were given, and no others."""
    pages = [20, 21, 22, 23]
    answer = windows.storage.batch_get_v2([moved("swa", [6, 7, 8, 9], at(*pages))])
    assert answer == {"swa": [True] * 4}
    assert all(
        torch.equal(windows.window.page(page), windows.truth[number])
        for page, number in zip(pages, range(6, 10), strict=True)
    )
    assert bool((windows.main.page(20) == -1).all())
    forget(windows.storage, 8, group=1)
    assert windows.storage.batch_get_v2([moved("swa", [6, 7, 8, 9], at(10, 11, 12, 13))]) == {
        "swa": [True, True, False, False]
    }


@pytest.mark.parametrize("way", ["load", "store"])
def test_what_was_begun_has_ended_when_a_call_raises(
    windows: Windows, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang has its pages back then, and gives them to others."""
    told: list[str] = []

    def wait() -> None:
        told.append("waited")
        raise OSError

    def submit(keys: BlockKeys, _: object) -> Any:  # noqa: ANN401 - a ticket
        if keys.group:
            raise KeyboardInterrupt("no such pages")
        return SimpleNamespace(cancel=lambda: told.append("cancelled"), wait=wait)

    monkeypatch.setattr(windows.storage.kv, f"submit_{way}", submit)
    move = windows.storage.batch_get_v2 if way == "load" else windows.storage.batch_set_v2
    with pytest.raises(KeyboardInterrupt, match="no such pages"):
        move([moved("kv", [6, 7], at(1, 2)), moved("swa", [6, 7], at(1, 2))])
    assert told == ["cancelled", "waited"]


@pytest.mark.parametrize("call", ["batch_exists", "batch_exists_v2", "batch_get_v1", "batch_set_v1"])
def test_a_fault_of_ours_is_answered_with_no(windows: Windows, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of SGLang's that is raised at ends, and all prefetches or stores after it wait for it for good."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    arguments: tuple[Any, ...] = (KEYS, at(*range(10))) if call.endswith("v1") else (KEYS,)
    with monkeypatch.context() as patched, capture_logs() as logs:
        for name in ("call", "submit_load", "submit_store"):
            patched.setattr(windows.storage.kv, name, fails)
        answer = getattr(windows.storage, call)(*arguments)
    assert getattr(answer, "kv_hit_pages", answer) == ([False] * 10 if call.endswith("v1") else 0)
    assert [each["task"] for each in logs if each["event"] == "background.failed"] == ["HiCache"]
    assert windows.storage.batch_exists(KEYS) == 10


@pytest.mark.parametrize("way", ["load", "store"])
def test_what_was_begun_before_a_fault_has_ended_when_it_is_answered(
    windows: Windows, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all pools nothing is said to be in place, nor is anything moved any more."""
    told: list[str] = []

    def wait() -> None:
        told.append("waited")

    def submit(keys: BlockKeys, _spec: object) -> Any:  # noqa: ANN401 - stands for a ticket
        if keys.group:
            raise ValueError("no such pages")
        return SimpleNamespace(cancel=lambda: told.append("cancelled"), wait=wait)

    monkeypatch.setattr(windows.storage.kv, f"submit_{way}", submit)
    move = windows.storage.batch_get_v2 if way == "load" else windows.storage.batch_set_v2
    with capture_logs() as logs:
        answer = move([moved("kv", [6, 7], at(1, 2)), moved("swa", [6, 7], at(1, 2))])
    assert answer == {"kv": [False] * 2, "swa": [False] * 2}
    assert told == ["cancelled", "waited"]
    assert [each["task"] for each in logs if each["event"] == "background.failed"] == ["HiCache"]


def test_what_does_not_fit_is_answered_with_no(windows: Windows) -> None:
    """Slots of other pages than those that are named, none at all, or a pool that nobody has registered."""
    for slots in (at(1), None):
        assert windows.storage.batch_get_v2([moved("swa", [6, 7], slots)]) == {"swa": [False] * 2}
        assert windows.storage.batch_set_v2([moved("swa", [6, 7], slots)]) == {"swa": [False] * 2}
    assert windows.storage.batch_get_v2([moved("mamba", [6], at(1))]) == {"mamba": [False]}
    assert windows.storage.batch_exists_v2(KEYS, [needed("mamba", 1)]).kv_hit_pages == 0


def test_no_pool_is_served_the_record_of_another(opened: Open) -> None:
    """Two pools of one shape have pages of the same hashes: swapped below, they are not taken for each other."""
    main, window = host_pool("layer_first"), host_pool("layer_first")
    filled(main, range(4))
    filled(window, range(4), seed=1)
    storage = opened(main, "cpu://?capacity=0", SHELF, beside={"swa": window})
    storage.batch_set_v1(KEYS[:4], at(*range(4)))
    storage.batch_set_v2([moved("swa", range(4), at(*range(4)))])
    storage.kv.flush()
    assert len(Shelf.shelf) == 8
    assert storage.batch_exists_v2(KEYS[:4], [needed("swa", 4)]).kv_hit_pages == 4
    for key in KEYS[:4]:
        one, other = (name for name in Shelf.shelf if name.hash == bytes.fromhex(key))
        Shelf.shelf[one], Shelf.shelf[other] = Shelf.shelf[other], Shelf.shelf[one]
    assert storage.batch_get_v1(KEYS[:4], at(*range(10, 14))) == [False] * 4
    assert storage.batch_get_v2([moved("swa", range(4), at(*range(10, 14)))]) == {"swa": [False] * 4}


def test_a_state_is_all_of_its_parts_or_nothing(opened: Open) -> None:
    """What is recurrent, the convolution's and what lies beside them: where one is missing there is no state."""
    main, states = host_pool("page_first_direct"), MambaPoolHost()
    filled(main, range(10))
    truth = states.fill(range(3))
    storage = opened(main, beside={"mamba": states})
    storage.batch_set_v1(KEYS, at(*range(10)))
    assert storage.batch_set_v2([moved("mamba", [1, 5, 8], torch.tensor([0, 1, 2]))]) == {"mamba": [True] * 3}
    assert storage.batch_exists_v2(KEYS, [needed("mamba", 1)]).restorable_prefix_pages == [2, 6, 9]
    assert storage.batch_get_v2([moved("mamba", [8], torch.tensor([17]))]) == {"mamba": [True]}
    assert torch.equal(states.page(17), truth[2])
    for part, left in ((2, [2, 6]), (1, [2])):  # of the state after the ninth page, then of the one after the sixth
        forget(storage, 8 if part == 2 else 5, group=1 + part)
        assert storage.batch_exists_v2(KEYS, [needed("mamba", 1)]).restorable_prefix_pages == left
    assert storage.batch_get_v2([moved("mamba", [5], torch.tensor([18]))]) == {"mamba": [False]}


def test_states_have_room_by_tokens(opened: Open) -> None:
    """What SGLang keeps at ends of prompts takes no room from pages that it does not use."""
    main = host_pool("page_first_direct")
    storage = opened(main, beside={"mamba": MambaPoolHost()}, tokens_per_state=4 * main.page_size)
    shares = [chain.group.slots_per_block for chain in inside(storage.kv.cache).chains]
    assert shares == [1.0, *[0.25] * (len(shares) - 1)]
    with pytest.raises(ConfigurationError, match="tokens_per_state"):
        opened(main, tokens_per_state=0)


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_rows_that_only_sglang_can_read_are_shared_by_layouts(opened: Open, source: str, target: str) -> None:
    """The index of MLA's sparse attention: of every page before, and after a restart with another layout too."""
    main, index = host_pool(source, is_mla=True), DSAIndexerPoolHost(source)
    filled(main, range(10))
    for page in range(10):
        index.page(page).random_(0, 255)
    storage = opened(main, beside={"indexer": index})
    storage.batch_set_v1(KEYS, at(*range(10)))
    storage.batch_set_v2([moved("indexer", range(9), at(*range(9)))])
    storage.close()

    into = DSAIndexerPoolHost(target)
    storage = opened(host_pool(target, is_mla=True), beside={"indexer": into})
    found = storage.batch_exists_v2(KEYS, [needed("indexer")])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (9, list(range(1, 10)))
    assert found.extra_pool_hit_pages == {"kv": 10, "indexer": 9}
    assert storage.batch_get_v2([moved("indexer", range(9), at(*range(10, 19)))]) == {"indexer": [True] * 9}
    assert all(torch.equal(into.page(10 + page), index.page(page)) for page in range(9))
    forget(storage, 4, group=1)
    assert storage.batch_exists_v2(KEYS, [needed("indexer")]).kv_hit_pages == 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_main_pool_may_only_number_pages(opened: Open, layout: str) -> None:
    """As DeepSeek V4's does: what other pools have decides."""
    whole, window = DeepSeekV4PagedHostPool(layout, "c4"), DeepSeekV4PagedHostPool(layout, "swa")
    values = torch.randint(0, 255, (3, 48), dtype=torch.uint8)
    whole.fill(7, values)
    storage = opened(LogicalHostPool(layout), beside={"deepseek_v4_c4": whole, "swa": window}, is_mla_model=True)
    assert storage.batch_set_v1(KEYS, at(*range(10))) == [True] * 10  # there is nothing to store
    assert storage.batch_exists(KEYS) == 0
    storage.batch_set_v2([moved("deepseek_v4_c4", range(8), at(*range(7, -1, -1)))])
    storage.batch_set_v2([moved("swa", [4, 5], at(4, 5))])
    wanted = [needed("deepseek_v4_c4"), needed("swa", 2)]
    assert storage.batch_exists_v2(KEYS, wanted).restorable_prefix_pages == [6]
    assert storage.batch_get_v1(KEYS[:6], at(*range(6))) == [True] * 6
    assert storage.batch_get_v2([moved("deepseek_v4_c4", [0], at(20))]) == {"deepseek_v4_c4": [True]}
    assert torch.equal(whole.page(20), values)


def test_states_are_each_ranks_own_beside_latents_that_all_share(opened: Open) -> None:
    """As Kimi's are: one rank stores latents for all, and each its own states under names of its own."""
    pools = [host_pool("page_first", is_mla=True) for _ in range(2)]
    states = [MambaPoolHost() for _ in range(2)]
    first, second = (
        opened(pool, beside={"mamba": own}, tp_rank=rank, tp_size=2)
        for rank, (pool, own) in enumerate(zip(pools, states, strict=True))
    )
    filled(pools[0], range(2))
    truth = [own.fill(range(1), seed=rank) for rank, own in enumerate(states)]
    assert second.batch_set_v1(KEYS[:2], at(0, 1)) == [True] * 2
    first.batch_set_v1(KEYS[:2], at(0, 1))
    first.kv.flush()
    first.batch_set_v2([moved("mamba", [1], torch.tensor([0]))])
    first.kv.flush()
    assert second.batch_exists_v2(KEYS[:2], [needed("mamba", 1)]).kv_hit_pages == 0
    second.batch_set_v2([moved("mamba", [1], torch.tensor([0]))])
    second.kv.flush()
    for storage, own, blocks in zip((first, second), states, truth, strict=True):
        assert storage.batch_exists_v2(KEYS[:2], [needed("mamba", 1)]).kv_hit_pages == 2
        assert storage.batch_get_v2([moved("mamba", [1], torch.tensor([9]))]) == {"mamba": [True]}
        assert torch.equal(own.page(9), blocks[0])


def test_what_ranks_would_never_find_again_is_refused(opened: Open) -> None:
    """Heads of a draft model beside latents: SGLang has one rank alone store them."""
    with pytest.raises(ConfigurationError, match="'draft' each of 2 ranks has a part of its own"):
        opened(host_pool("page_first", is_mla=True), beside={"draft": host_pool("page_first")}, tp_size=2)
    draft = host_pool("page_first", is_mla=True)
    opened(host_pool("page_first", is_mla=True), beside={"draft": draft}, tp_size=2)


def test_a_pool_that_comes_late_is_stored_too(opened: Open) -> None:
    """As a draft model's does. What was stored without it is of another layout, and stays."""
    main, draft = host_pool("layer_first"), host_pool("layer_first", layer_num=1)
    filled(main, range(4))
    storage = opened(main)
    storage.batch_set_v1(KEYS[:4], at(*range(4)))
    storage.register_mem_host_pool_v2(draft, "draft")
    assert storage.batch_exists_v2(KEYS[:4], [needed("draft")]).kv_hit_pages == 0
    storage.batch_set_v1(KEYS[:4], at(*range(4)))
    assert storage.batch_exists_v2(KEYS[:4], [needed("draft")]).kv_hit_pages == 0
    storage.batch_set_v2([moved("draft", range(3), at(*range(3)))])
    assert storage.batch_exists_v2(KEYS[:4], [needed("draft")]).kv_hit_pages == 3
    storage.close()
    assert opened(main).batch_exists(KEYS[:4]) == 4


def test_a_kind_of_pool_that_is_not_known_is_refused_at_once(opened: Open) -> None:
    """A subclass too: it may keep more beside what is known. And a second pool of a name."""

    class WithScales(MHATokenToKVPoolHost):
        pass

    with pytest.raises(ConfigurationError, match="'kv' is a WithScales, whose pages are not known here"):
        opened(WithScales("layer_first"))
    with pytest.raises(ConfigurationError, match="two host pools as 'kv'"):
        opened(host_pool("layer_first"), beside={"kv": host_pool("layer_first")})
    with pytest.raises(ConfigurationError, match="there is nothing to keep"):
        opened(LogicalHostPool("layer_first"))


def test_after_closing_no_pool_has_anything(windows: Windows) -> None:
    """SGLang may still ask: it is told no, and raised nothing at."""
    windows.storage.close()
    found = windows.storage.batch_exists_v2(KEYS, [needed("swa", 2)])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])
    assert windows.storage.batch_get_v2([moved("swa", [6], at(0))]) == {"swa": [False]}
    assert windows.storage.batch_set_v2([moved("swa", [6], at(0))]) == {"swa": [False]}


def test_a_stalled_page_keeps_nobody_waiting_for_long(opened: Open) -> None:
    """It is answered with no within the time of a load; what memory has is there."""
    main, window = host_pool("layer_first"), host_pool("layer_first", layer_num=1)
    filled(window, range(2))
    limits = {"load_timeout_s": 0.3, "close_timeout_s": 0.3}
    storage = opened(main, "cpu://?capacity=0", SHELF, beside={"swa": window}, limits=limits)
    storage.batch_set_v2([moved("swa", [0, 1], at(0, 1))])
    storage.kv.flush()
    Shelf.stalled.add(bytes.fromhex(KEYS[0])[:8])
    assert storage.batch_get_v2([moved("swa", [0, 1], at(4, 5))]) == {"swa": [False] * 2}
