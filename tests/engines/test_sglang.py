"""A real SGLang on a CPU, end to end: what it generates with us below it is what it generates alone."""

import ast
import json
import os
import pathlib
import shutil
from typing import Any, Final

import pytest

from environments import HERE, ROOT, Environment
from folders import NVME, STALLING, flip_a_byte_in_each_record, tiers_in
from judged import SGLANG

TWO_RANKS: Final = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}  # it counts NUMA nodes otherwise
PAGES: Final = 2 * 18
"""Full pages of both prompts, 16 tokens each: what storage can have of them."""
LAYOUTS: Final = ("layer_first", "page_first", "page_first_direct")
NAMED_BY: Final = {
    "model_path", "revision", "load_format", "model_loader_extra_config", "trust_remote_code", "weight_cache_mode",
    "download_dir", "quantization_param_path", "enable_lora", "lora_paths", "lora_target_modules",
    "experts_shared_outer_loras",
}  # fmt: skip
"""Arguments that the adapter reads to tell models apart, beside those in its lists."""
EVERYWHERE: Final = {
    "PYTHONPATH": os.pathsep.join(map(str, (HERE / "sglang_site", HERE, ROOT, ROOT / "backends"))),
    "SGLANG_USE_CPU_ENGINE": "1",
}

Answer = dict[str, Any]


class Runs:
    """Runs SGLang over one folder of storage, in new processes each time."""

    def __init__(self, sglang: Environment, model: pathlib.Path, folder: pathlib.Path) -> None:
        self.folder = folder
        self._sglang = sglang
        self._model = model

    def storage(self, name: str = "ReportingStorage", tiers: list[Any] = NVME, **limits: float) -> Answer:
        """Return the extra config of HiCache's storage."""
        module = "tiered_kv.integrations.sglang" if name == "TieredKVStorage" else "sglang_faults"
        return {
            "backend_name": "tiered_kv",
            "module_path": module,
            "class_name": name,
            "interface_v1": 1,
            "prefetch_threshold": 16,
            "report": str(self.folder / "report"),
            "tiered_kv": {"tiers": tiers_in(self.folder, tiers), "limits": limits},
        }

    def run(self, name: str = "ReportingStorage", *, tiers: list[Any] = NVME, **wanted: Any) -> Answer:
        """Run the engine and return what it generated and counted."""
        limits = wanted.pop("limits", {})
        storage = wanted.pop("storage", None) or self.storage(name, tiers, **limits)
        arguments = {"model": str(self._model), "storage": storage, **wanted}
        several = TWO_RANKS if not {"tp_size", "dp_size"}.isdisjoint(wanted.get("engine", {})) else {}
        variables = {**EVERYWHERE, **several}
        answer: Answer = self._sglang.run(
            "sglang_generate.py", json.dumps(arguments), variables=variables, timeout_s=600
        )
        return answer


@pytest.fixture(scope="session")
def alone(sglang: Environment, sglang_llama: pathlib.Path) -> list[list[int]]:
    """Return what the engine generates without us, per prompt."""
    answer = sglang.run("sglang_generate.py", json.dumps({"model": str(sglang_llama)}), variables=EVERYWHERE)
    tokens: list[list[int]] = answer["tokens"]
    assert tokens[0] != tokens[1], "what is generated does not depend on the prompt"
    return tokens


@pytest.fixture
def runs(sglang: Environment, sglang_llama: pathlib.Path, tmp_path: pathlib.Path) -> Runs:
    """Return runs over an empty folder."""
    return Runs(sglang, sglang_llama, tmp_path)


@pytest.fixture(scope="session")
def filled(
    sglang: Environment, sglang_llama: pathlib.Path, alone: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    """Return a folder in which a first engine, which was killed then, has stored the pages of both prompts."""
    folder = tmp_path_factory.mktemp("filled")
    cold = Runs(sglang, sglang_llama, folder).run(num_stored=PAGES)
    assert cold == {"tokens": alone, "from_storage": [0, 0]}
    return folder


@pytest.fixture
def warm(filled: pathlib.Path, runs: Runs) -> Runs:
    """Return runs over a copy of what the first engine has stored."""
    shutil.copytree(filled, runs.folder, dirs_exist_ok=True)
    return runs


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_a_restarted_engine_generates_the_same_from_storage(warm: Runs, alone: list[list[int]], layout: str) -> None:
    """New processes find all full pages, the engine counts them, and the tokens are the same, in another layout too."""
    assert warm.run(layout=layout) == {"tokens": alone, "from_storage": [288, 288]}


def test_what_is_loaded_is_what_is_used(warm: Runs, alone: list[list[int]]) -> None:
    """Where the loaded pages are wiped the tokens differ: the tests above would see wrong bytes."""
    answer = warm.run("WipingStorage")
    assert answer["from_storage"] == [288, 288]
    assert all(ours != right for ours, right in zip(answer["tokens"], alone, strict=True))


def test_a_page_that_is_evicted_before_its_load_is_computed(warm: Runs, alone: list[list[int]]) -> None:
    """What is gone between look-up and load is computed, what is left is loaded, and the tokens are right."""
    answer = warm.run("EvictingStorage")
    assert answer == {"tokens": alone, "from_storage": [64, 64]}


def test_a_flipped_byte_on_disk_is_computed_again(warm: Runs, alone: list[list[int]]) -> None:
    """A page whose bytes have changed is never served."""
    flip_a_byte_in_each_record(warm.folder, 16 * 1024)
    assert warm.run() == {"tokens": alone, "from_storage": [0, 0]}


def test_stalled_storage_does_not_hold_up_the_engine(runs: Runs, alone: list[list[int]]) -> None:
    """Pages that storage says it has and does not give are computed, after as long as a load may take."""
    assert runs.run(tiers=STALLING, num_stored=PAGES)["tokens"] == alone
    assert runs.run(tiers=STALLING)["from_storage"] == [288, 288]
    (runs.folder / "stall").write_text("3600")
    assert runs.run(tiers=STALLING, limits={"load_timeout_s": 0.5}) == {"tokens": alone, "from_storage": [0, 0]}


@pytest.mark.parametrize(("engine", "second"), [({"tp_size": 2}, "0-0-0-1"), ({"dp_size": 2}, "1-0-0-0")])
def test_two_ranks_store_and_load_their_parts(runs: Runs, alone: list[list[int]], engine: Answer, second: str) -> None:
    """In directories of their own, by what stands for a rank: of each block, or, as replicas, one prompt each."""
    tiers = ["cpu://?capacity=4MiB", {"medium": "nvme", "path": "{folder}/{rank}", "capacity": "16MiB"}]
    several: Answer = {"tiers": tiers, "engine": engine}
    assert runs.run(**several, num_stored=PAGES) == {"tokens": alone, "from_storage": [0, 0]}
    assert {each.name for each in runs.folder.iterdir()} == {"0-0-0-0", second, "report"}
    assert runs.run(**several) == {"tokens": alone, "from_storage": [288, 288]}


@pytest.mark.parametrize("is_mla", [False, True], ids=["MHA", "MLA"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_controller_alone_stores_and_loads_every_layout(
    sglang: Environment,
    layout: str,
    is_mla: bool,  # noqa: FBT001 - pytest's
    tmp_path: pathlib.Path,
) -> None:
    """Byte for byte after a restart, through SGLang's own threads; it closes us when it lets us go."""
    storage = Runs(sglang, tmp_path, tmp_path).storage("TieredKVStorage")
    storage["tiered_kv"]["weights"] = "w"
    pages = {"layout": layout, "num_pages": 20, "is_mla": is_mla}
    wanted = json.dumps({**pages, "storage": storage, "folder": str(tmp_path)})
    cold = sglang.run("sglang_controller.py", wanted, variables=EVERYWHERE)
    assert cold == {"found": 0, "loaded": 0, "is_right": False, "stored": 320}
    warm = sglang.run("sglang_controller.py", wanted, variables=EVERYWHERE)
    assert warm == {"found": 320, "loaded": 320, "is_right": True, "stored": 0}


def fields_of(sources: pathlib.Path) -> dict[str, set[str]]:
    """Return SGLang's arguments by their namespace, as its sources have them."""
    return {
        f"{path.stem}.{of.name}": {ast.unparse(each.target) for each in of.body if isinstance(each, ast.AnnAssign)}
        for path in (sources / "sglang" / "srt" / "arg_groups" / "fields").glob("*.py")
        for of in ast.parse(path.read_text()).body
        if isinstance(of, ast.ClassDef)
    }


def said_in(path: pathlib.Path, names: tuple[str, ...]) -> dict[str, Any]:
    """Return what a module's text gives some names, at its top level or in a class."""
    return {
        ast.unparse(each.target): ast.literal_eval(each.value)
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.AnnAssign) and each.value is not None and ast.unparse(each.target) in names
    }


def test_what_no_model_is_told_by_was_judged(sglang: Environment) -> None:
    """Each argument is in a name, or changes nothing that matters: one of a new version is in neither."""
    (sources,) = sglang.folder.glob("lib/python*/site-packages")
    ours = ROOT / "tiered_kv" / "integrations" / "sglang" / "served_model.py"
    lists = said_in(ours, ("_ARGUMENTS", "_WHERE_SAID", "_BESIDE", "_FILES"))
    there, named = fields_of(sources), NAMED_BY.union(*lists.values())
    assert named <= set[str]().union(*there.values())
    assert there.keys() == SGLANG.keys()
    for namespace, fields in there.items():
        judged = [name for names in SGLANG[namespace].values() for name in names.split()]
        assert sorted({*judged} - named) == sorted(judged), f"{namespace}: twice"
        if judged != ["*"]:
            assert fields - named == {*judged}, f"{namespace}: read what these do, see judged.py"
    defaults = dict[str, Any]()
    for path in (sources / "sglang" / "srt" / "arg_groups" / "fields").glob("*.py"):
        defaults |= said_in(path, (*lists["_WHERE_SAID"],))
    assert defaults == lists["_WHERE_SAID"], "what is in no name where nobody says it"
