"""Models of several kinds of layers below a real SGLang: a small one, and its tree and host pools without a model."""

import functools
import json
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest

from environments import Environment
from folders import NVME, tiers_in
from test_sglang import EVERYWHERE, LAYOUTS, PAGES, Runs

KINDS: Final = {"windows": "swa", "states": "mamba", "index": "indexer"}
PAGE: Final = {"windows": 16, "states": 16, "index": 64}
RIGHT: Final = {"windows": 3 * 16, "states": 1, "index": 5}
"""Of the other pool of five pages: tokens of a window of 40, the state at the end, rows of the index."""
SHARED: Final = ["cpu://?capacity=4MiB", {"medium": "shared_fs", "path": "{folder}/shared", "capacity": "16MiB"}]
Answer = dict[str, Any]


class Trees:
    """Runs SGLang's tree over one folder of storage, in new processes each time."""

    def __init__(self, sglang: Environment, folder: pathlib.Path) -> None:
        self.folder = folder
        self._sglang = sglang

    def run(self, script: str, *, tiers: list[Any] = NVME, by: str = "TieredKVStorage", **wanted: Any) -> Answer:
        """Run a script over storage and return what it found."""
        storage = {
            "backend_name": "tiered_kv",
            "module_path": "tiered_kv.integrations.sglang" if by == "TieredKVStorage" else "sglang_faults",
            "class_name": by,
            "interface_v1": 1,
            "prefetch_threshold": 16,
            "tiered_kv": {"weights": "w", "tiers": tiers_in(self.folder, tiers)},
        }
        arguments = json.dumps({"storage": storage, **wanted})
        answer: Answer = self._sglang.run(script, arguments, variables=EVERYWHERE, timeout_s=600)
        return answer

    def store(self, kind: str, pages: Sequence[int] = (3, 5), **wanted: Any) -> None:
        """Store prompts of so many pages."""
        self.run("sglang_hybrids.py", kind=kind, do="store", pages=list(pages), **wanted)

    def load(self, kind: str, **wanted: Any) -> Answer:
        """Load what there is of the longer prompt, after some pages of KV groups were evicted, and compare."""
        return self.run("sglang_hybrids.py", kind=kind, do="load", pages=[5], **wanted)


@pytest.fixture(scope="module")
def stored(sglang: Environment, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """Return what says in which folder the prompts of a kind of model are stored, once for all tests."""

    @functools.cache
    def store(kind: str) -> pathlib.Path:
        folder = tmp_path_factory.mktemp(kind)
        Trees(sglang, folder).store(kind)
        return folder

    return store


@pytest.fixture
def trees(sglang: Environment, tmp_path: pathlib.Path) -> Trees:
    """Return runs over an empty folder."""
    return Trees(sglang, tmp_path)


@pytest.fixture
def load(trees: Trees, stored: Callable[[str], pathlib.Path]) -> Callable[..., Answer]:
    """Return what loads the longer prompt of a kind of model from a copy of what was stored."""

    def load(kind: str, **wanted: Any) -> Answer:
        shutil.copytree(stored(kind), trees.folder, dirs_exist_ok=True)
        return trees.load(kind, **wanted)

    return load


def right(kind: str, num_pages: int, num_others: int) -> Answer:
    """Return the answer of a load that is right."""
    num_tokens, other = num_pages * PAGE[kind], KINDS[kind]
    return {"loaded": num_tokens, "right": {"kv": num_tokens, other: num_others}, "wrong": {"kv": 0, other: 0}}


Load = Callable[..., Answer]


@pytest.mark.parametrize("kind", KINDS)
def test_another_process_loads_all_that_a_model_needs(load: Load, kind: str) -> None:
    """Through SGLang's own threads, to the device, right in every layer: windows, a state, an index beside latents."""
    assert load(kind) == right(kind, 5, RIGHT[kind])


@pytest.mark.parametrize(
    ("kind", "evicted", "num_pages", "num_others"),
    [
        ("windows", (1, 4), 4, 3 * 16),  # the window ends a page sooner
        ("windows", (0, 3), 3, 3 * 16),
        ("states", (1, 4), 3, 1),  # a part of the last state: the one before is behind three pages
        ("index", (1, 2), 2, 2),
    ],
)
def test_sglang_goes_on_where_every_pool_has_what_is_needed(
    load: Load, kind: str, evicted: tuple[int, int], num_pages: int, num_others: int
) -> None:
    """That is the greatest such place, when a page of one pool is gone."""
    assert load(kind, evicted=[evicted]) == right(kind, num_pages, num_others)


def test_a_hole_outside_the_window_costs_nothing(load: Load) -> None:
    """What the model can't see any more need not be there."""
    assert load("windows", evicted=[(1, 0), (1, 1)]) == right("windows", 5, 3 * 16)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_loaded_is_what_is_compared(load: Load, kind: str) -> None:
    """A control: where what was loaded is wiped, it is seen to be wrong."""
    assert load(kind, by="WipingPools")["wrong"] == {"kv": 0, KINDS[kind]: RIGHT[kind]}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_gone_between_look_up_and_load_is_not_served(load: Load, kind: str) -> None:
    """SGLang takes nothing for loaded that is not, and computes it."""
    answer = load(kind, by="EvictingPools")
    assert not any(answer["wrong"].values())
    assert answer["loaded"] < 5 * PAGE[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_host_memory_may_be_passed_through_alone(trees: Trees, kind: str) -> None:
    """With SGLang's ``--hicache-host-memory-mode buffer_only`` nothing stays in its host pools, and all is as above."""
    trees.store(kind, pages=[5], memory="buffer_only")
    assert trees.load(kind, memory="buffer_only") == right(kind, 5, RIGHT[kind])


def test_records_of_two_pools_that_were_swapped_are_not_served(trees: Trees) -> None:
    """They are of one length and have the same names: what each is of is in the record."""
    trees.store("windows", tiers=SHARED)
    one, other = (folder for folder in (trees.folder / "shared").iterdir() if folder.is_dir())
    one.rename(trees.folder / "third")
    other.rename(one)
    (trees.folder / "third").rename(other)
    assert trees.load("windows", tiers=SHARED) == {"loaded": 0, "right": {}, "wrong": {}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kind_of_host_pool_is_seen_as_sglang_sees_it(trees: Trees, layout: str) -> None:
    """Pages are stored and loaded byte for byte where SGLang says that they are, and no other page is touched."""
    answer = trees.run("sglang_pools.py", layout=layout)
    assert len(answer) == (6 if layout == "layer_first" else 8)
    for pool, seen in answer.items():
        assert (seen["stored"], seen["loaded"]) == ([True] * 5, [True] * 5), pool
        assert (seen["right"], seen["touched"]) == (5, 0), pool


def test_a_restarted_engine_with_windows_generates_the_same_from_storage(
    sglang: Environment, tmp_path: pathlib.Path
) -> None:
    """A small Mellum: new processes say the same tokens by hits. Where windows are wiped as they come, others."""
    model = tmp_path / "mellum"
    sglang.run("make_mellum.py", model)
    runs = Runs(sglang, model, tmp_path)
    cold = runs.run(num_stored=PAGES)
    assert cold["from_storage"] == [0, 0]
    assert cold["tokens"][0] != cold["tokens"][1], "what is generated does not depend on the prompt"
    assert len([folder for folder in (tmp_path / "nvme").iterdir() if folder.is_dir()]) == 2  # one a KV group
    assert runs.run(layout="page_first_direct") == {**cold, "from_storage": [288, 288]}
    wiped = runs.run("WipingPools")
    assert wiped["from_storage"] == [288, 288]
    assert all(ours != right for ours, right in zip(wiped["tokens"], cold["tokens"], strict=True))
