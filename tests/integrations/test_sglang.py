import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from tests.support.serving import serving
from tests.support.shelf import Shelf
from tests.support.small_sglang import (
    KEYS,
    LAYOUTS,
    NUM_PAGES,
    OVERRIDES,
    SHELF,
    SIZE,
    Config,
    adapter,
    at,
    filled,
    host_pool,
    storages,
)
from tiered_kv import BlockKeys, ConfigurationError, FileLoadStoreSpec
from tiered_kv.values.results import LoadCost, LookupResult

Open = Callable[..., Any]
CHANGES: dict[str, Any] = {
    "dtype": "float16",
    "model_impl": "transformers",
    "model_config_parser": "mistral",
    "forward_hooks": [{"name": "scaled"}],
    "enable_precise_embedding_interpolation": True,
    "enable_decoder_swa_bounded_replay": False,
    "enable_encoder_swa_bounded_replay": True,
    "flashinfer_mxfp4_moe_precision": "bf16",
    "enable_w4a4_mxfp4_megamoe": True,
    "deepep_dispatcher_output_dtype": "nvfp4",
    "flashinfer_a2a_dispatch_type": "nvfp4",
    "enable_quant_communications": True,
    "kt_method": "AMXINT8",
    "kt_num_gpu_experts": 8,
    "kt_max_deferred_experts_per_token": 2,
    "speculative_draft_model_revision": "main",
    "speculative_draft_model_quantization": "fp8",
    "uno_lora_path": "here",
}
"""Arguments that change KV: each to something that nobody said."""


@pytest.fixture
def opened() -> Iterator[Open]:
    """Return what opens a storage backend as SGLang does; closes all of them."""
    with storages() as open_storage:
        yield open_storage


@pytest.mark.parametrize("is_mla", [False, True], ids=["MHA", "MLA"])
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_what_one_layout_has_stored_another_loads(opened: Open, source: str, target: str, is_mla: bool) -> None:  # noqa: FBT001 - pytest's
    """After a restart too, byte for byte, and without touching another page."""
    pool = host_pool(source, is_mla)
    truth = filled(pool, range(10))
    storage = opened(pool)
    assert storage.batch_exists(KEYS) == 0
    assert storage.batch_set_v1(KEYS, at(*range(10))) == [True] * 10
    storage.close()

    into = host_pool(target, is_mla)
    storage = opened(into)
    assert storage.batch_exists(KEYS) == 10
    pages = [3, 2, 23, 5, 7, 11, 13, 17, 19, 1]
    assert storage.batch_get_v1(KEYS, at(*pages)) == [True] * 10
    assert all(torch.equal(into.page(page), block) for page, block in zip(pages, truth, strict=True))
    assert all(bool((into.page(page) == -1).all()) for page in set(range(NUM_PAGES)) - set(pages))


@pytest.mark.parametrize(("block_s", "prefill", "num_worth"), [(0.001, 0.0, 10), (0.001, 1000.0, 10), (1.0, 1000.0, 0)])
def test_only_what_pays_is_loaded(opened: Open, block_s: float, prefill: float, num_worth: int) -> None:
    """Where it is said how fast SGLang computes: of a tier that is slower than that it is told of no page."""
    pool = host_pool("page_first_direct")
    filled(pool, range(10))
    storage = opened(pool, SHELF, prefill_tokens_per_s=prefill)
    assert storage.batch_set_v1(KEYS, at(*range(10))) == [True] * 10
    storage.kv.flush()
    lookup: Callable[[BlockKeys], Awaitable[LookupResult]] = storage.kv.cache.lookup

    async def costly(keys: BlockKeys) -> LookupResult:
        return replace(await lookup(keys), costs={"shelf": LoadCost(0.001, block_s)})

    storage.kv.cache.lookup = costly
    assert storage.batch_exists(KEYS) == num_worth


def test_engines_share_pages_by_a_server(opened: Open, tmp_path: Path) -> None:
    """By one setting: what one process has stored another loads from the host's server, each rank its part."""
    pool, into = host_pool("page_first"), host_pool("layer_first")
    truth = filled(pool, range(10))
    with serving(tmp_path, {"medium": "cpu", "capacity": "1MiB"}) as server:
        connect = f"unix://{server.path}"
        for rank in range(2):
            assert opened(pool, connect=connect, tp_rank=rank, tp_size=2).batch_exists(KEYS) == 0
        first, second = (opened(into, connect=connect, tp_rank=rank, tp_size=2) for rank in range(2))
        writer = opened(pool, connect=connect, tp_rank=1, tp_size=2)
        assert writer.batch_set_v1(KEYS, at(*range(10))) == [True] * 10
        assert (first.batch_exists(KEYS), second.batch_exists(KEYS)) == (0, 10)
        assert second.batch_get_v1(KEYS, at(*range(10, 20))) == [True] * 10
        assert all(torch.equal(into.page(page + 10), block) for page, block in enumerate(truth))
        for storage in (first, second, writer):
            storage.close()


def test_a_hole_ends_what_exists_and_what_is_loaded(opened: Open) -> None:
    """SGLang goes on from the first page that is missing; those before it are served, one evicted after a look too."""
    pool = host_pool("page_first")
    truth = filled(pool, range(10))
    storage = opened(pool)
    storage.batch_set_v1(KEYS, at(*range(10)))
    assert storage.batch_exists(KEYS) == 10
    storage.kv.evict(BlockKeys.from_hashes([bytes.fromhex(KEYS[4])], block_size=SIZE))
    assert storage.batch_get_v1(KEYS, at(*range(10, 20))) == [True] * 4 + [False] * 6
    assert storage.batch_exists(KEYS) == 4
    assert not storage.exists(KEYS[4])
    assert all(torch.equal(pool.page(10 + number), truth[number]) for number in range(4))
    assert storage.batch_set_v1(KEYS, at(*range(10))) == [True] * 10  # repaired by the next store
    assert storage.batch_exists(KEYS) == 10


def test_a_stalled_page_keeps_nobody_waiting_for_long(opened: Open) -> None:
    """It is answered with no within the time of a load; stores, and loads of what memory has, go on."""
    pool = host_pool("layer_first")
    filled(pool, range(10))
    opened(pool).batch_set_v1(KEYS[5:], at(*range(5, 10)))
    opened(pool).kv.flush()
    Shelf.stalled.add(bytes.fromhex(KEYS[5])[:8])
    limits = {"load_timeout_s": 0.3, "close_timeout_s": 0.3}
    storage = opened(pool, "cpu://?capacity=1MiB", SHELF, limits=limits)
    assert storage.batch_exists(KEYS[5:6]) == 1
    assert storage.batch_get_v1(KEYS[5:6], at(10)) == [False]
    assert storage.batch_set_v1(KEYS[:2], at(0, 1)) == [True] * 2
    assert storage.batch_get_v1(KEYS[:2], at(11, 12)) == [True] * 2
    assert torch.equal(pool.page(12), pool.page(1))


def test_a_flipped_byte_on_disk_is_not_served(opened: Open, tmp_path: Path) -> None:
    """The pages before it are."""
    tiers = ("cpu://?capacity=0", {"medium": "nvme", "path": str(tmp_path), "capacity": "8MiB"})
    pool = host_pool("page_first_direct")
    filled(pool, range(10))
    storage = opened(pool, *tiers)
    storage.batch_set_v1(KEYS, at(*range(10)))
    storage.kv.flush()
    keys = BlockKeys.from_hashes(map(bytes.fromhex, KEYS), block_size=SIZE)
    (run,) = storage.kv.lookup(keys[6:7], where=True).runs
    storage.close()
    assert isinstance(run.spec, FileLoadStoreSpec)
    ((path, offset, length),) = run.spec.places()
    with Path(path).open("r+b") as file:
        file.seek(offset + length - SIZE)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    storage = opened(pool, *tiers)
    assert storage.batch_get_v1(KEYS, at(*range(10, 20))) == [True] * 6 + [False] * 4
    assert storage.kv.stats()["nvme"].corrupt == 1


def test_ranks_have_blocks_and_directories_of_their_own(opened: Open, tmp_path: Path) -> None:
    """A part of the heads is never another's, in a shared tier either."""
    tiers = ({"medium": "nvme", "path": f"{tmp_path}/{{rank}}", "capacity": "8MiB"}, SHELF)
    pools = [host_pool("layer_first"), host_pool("layer_first")]
    storages = [opened(pool, *tiers, tp_rank=rank, tp_size=2) for rank, pool in enumerate(pools)]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["0-0-0-0", "0-0-0-1"]
    truth = [filled(pool, range(2), seed=rank) for rank, pool in enumerate(pools)]
    storages[0].batch_set_v1(KEYS[:2], at(0, 1))
    assert [storage.batch_exists(KEYS) for storage in storages] == [2, 0]
    storages[1].batch_set_v1(KEYS[:2], at(0, 1))
    for storage, pool, blocks in zip(storages, pools, truth, strict=True):
        assert storage.batch_get_v1(KEYS[:2], at(8, 9)) == [True] * 2
        assert torch.equal(pool.page(8), blocks[0])


@pytest.mark.parametrize("replicas", [False, True], ids=["data parallel attention", "replicas"])
def test_directories_of_the_environment_are_each_ranks_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replicas: bool,  # noqa: FBT001 - pytest's
) -> None:
    """Those of data parallel ranks too, each of which has all heads; of replicas SGLang does not tell a storage."""
    nvme = {"medium": "nvme", "path": f"{tmp_path}/{{rank}}", "capacity": "8MiB"}
    monkeypatch.setenv("TIERED_KV_TIERS", json.dumps([nvme]))
    extra, made = {"interface_v1": 1, "tiered_kv": {"weights": "w"}}, []
    try:
        for rank in range(2):
            storage_class, parallel = adapter(), SimpleNamespace(dp_rank=rank)
            vars(sys.modules["sglang.srt.runtime_context"])["get_parallel"] = lambda parallel=parallel: parallel
            made.append(storage_class(Config(extra, dp_rank=0 if replicas else rank)))
            made[-1].register_mem_pool_host(host_pool("layer_first"))
            made[-1].on_host_pools_registered()
        assert sorted(folder.name for folder in tmp_path.iterdir()) == ["0-0-0-0", "1-0-0-0"]
    finally:
        for storage in made:
            storage.close()


def test_pipeline_stages_share_nothing(opened: Open) -> None:
    """They have other layers, of as many."""
    pool = host_pool("layer_first")
    opened(pool, pp_rank=0, pp_size=2).batch_set_v1(KEYS[:1], at(0))
    assert opened(pool, pp_rank=1, pp_size=2).batch_exists(KEYS[:1]) == 0
    assert opened(pool, pp_rank=0, pp_size=2).batch_exists(KEYS[:1]) == 1


def test_mla_is_written_once_and_read_by_every_rank(opened: Open, tmp_path: Path) -> None:
    """Latents are the same on all of them: one rank stores; where the others can't find them it is refused."""
    pools = [host_pool("page_first_direct", is_mla=True) for _ in range(2)]
    truth = filled(pools[0], range(2))
    storages = [opened(pool, tp_rank=rank, tp_size=2) for rank, pool in enumerate(pools)]
    assert storages[1].batch_set_v1(KEYS[:2], at(0, 1)) == [True] * 2
    assert not Shelf.shelf
    storages[0].batch_set_v1(KEYS[:2], at(0, 1))
    storages[0].kv.flush()
    assert len(Shelf.shelf) == 2
    assert storages[1].batch_get_v1(KEYS[:2], at(4, 5)) == [True] * 2
    assert torch.equal(pools[1].page(5), truth[1])
    with pytest.raises(ConfigurationError, match="shared tier"):
        opened(pools[0], "cpu://?capacity=1MiB", f"file://{tmp_path}?capacity=8MiB", tp_size=2)


def test_other_weights_are_another_model(opened: Open) -> None:
    """Named, or told from the checkpoint's files."""
    pool = host_pool("layer_first")
    opened(pool, weights="a").batch_set_v1(KEYS[:1], at(0))
    assert opened(pool, weights="b").batch_exists(KEYS[:1]) == 0
    assert opened(pool, weights="a").batch_exists(KEYS[:1]) == 1
    with pytest.raises(ConfigurationError, match="name its weights"):
        opened(pool, weights=None, model_name="no/such-model")


def test_what_else_changes_kv_is_another_model(opened: Open, tmp_path: Path) -> None:
    """How weights are quantized as they are loaded, and by which scales an fp8 cache is kept: what their file says."""
    scales = tmp_path / "scales.json"
    scales.write_text('{"layer0": 1.0}')
    plain: dict[str, Any] = {"load_format": "auto", "kv_cache_dtype": "fp8_e4m3"}
    scaled = {**plain, "quantization_param_path": str(scales)}
    pool = host_pool("page_first")

    def has(arguments: dict[str, Any]) -> bool:
        storage = opened(pool, arguments=arguments)
        is_there = bool(storage.batch_exists(KEYS[:1]))
        storage.batch_set_v1(KEYS[:1], at(0))
        storage.close()
        return is_there

    served = [plain, scaled, *({**plain, name: "fp8"} for name in ("modelopt_quant", "rl_quant_profile"))]
    served.append({**plain, "quantize_and_serve": True})
    served += [{**plain, name: value} for name, value in CHANGES.items()]
    assert [has(arguments) for arguments in served] == [False] * len(served)
    assert [has(arguments) for arguments in served] == [True] * len(served)
    assert has({**plain, "dtype": "auto", "forward_hooks": None, "kt_method": "AMXINT4"})  # as nobody said
    scales.write_text('{"layer0": 2.0}')
    assert not has(scaled)
    scales.unlink()
    with pytest.raises(ConfigurationError, match="can't be read"):
        has(scaled)
    for name in ("rl_quant_profile", "decrypted_config_file"):
        for content in ("one", "other"):
            scales.write_text(content)
            assert [has({**plain, name: str(scales)}) for _ in range(2)] == [False, True]
    (tmp_path / "modeling.py").write_text("changed = False")
    trusted = {**plain, "model_path": str(tmp_path), "trust_remote_code": True}
    assert [has(trusted), has(trusted)] == [False, True]
    (tmp_path / "modeling.py").write_text("changed = True")
    assert [has(trusted), has({**trusted, "trust_remote_code": False})] == [False, False]


def test_an_adapter_that_is_trained_anew_is_another_model(opened: Open, tmp_path: Path) -> None:
    """SGLang's hashes of pages have its name and path alone, and are what they were before."""
    pool, ref = host_pool("page_first"), SimpleNamespace(lora_id="of its path", lora_path=str(tmp_path))

    def has(**lora: object) -> bool:
        given = {"enable_lora": True, "lora_paths": [ref], "lora_target_modules": None, **lora}
        storage = opened(pool, arguments={}, lora={"experts_shared_outer_loras": None, **given})
        is_there = bool(storage.batch_exists(KEYS[:1]))
        storage.batch_set_v1(KEYS[:1], at(0))
        storage.close()
        return is_there

    with pytest.raises(ConfigurationError, match="holds weights"):
        has()
    for change in ("adapter_model.bin", "adapter_config.json"):
        (tmp_path / "adapter_model.bin").touch()
        (tmp_path / "adapter_config.json").touch()
        (tmp_path / change).write_text(change)
        assert [has(), has()] == [False, True]
        assert [has(lora_target_modules={"q_proj", "v_proj"}) for _ in range(2)] == [False, True]
    assert [has(lora_paths=paths) for paths in (None, list[object]())] == [False, True]  # the model alone
    with pytest.raises(ConfigurationError, match="have its files there"):
        has(lora_paths=[SimpleNamespace(lora_id="", lora_path="no/such-adapter")])


@pytest.mark.parametrize(
    "said",
    [
        {"load_format": "dummy"},
        {"load_format": "presharded"},
        {"load_format": "remote_instance"},
        {"weight_cache_mode": "client"},
        {"kt_weight_path": "elsewhere"},
        {"modelopt_checkpoint_restore_path": "elsewhere"},
        {"download_dir": "elsewhere", "model_path": "of the hub"},
    ],
    ids=str,
)
def test_weights_that_are_not_the_checkpoint_s_files_must_be_named(
    opened: Open, tmp_path: Path, said: dict[str, str]
) -> None:
    """SGLang makes them up, has kept them of files before these, or has them of another instance, or path."""
    (tmp_path / "model.safetensors").write_bytes(bytes(8) + b"{}")
    arguments = {"model_path": str(tmp_path), **said}
    with pytest.raises(ConfigurationError, match="are in no file"):
        opened(host_pool("page_first"), weights=None, arguments=arguments)
    assert opened(host_pool("page_first"), arguments=arguments).batch_exists(KEYS[:1]) == 0


def test_weights_are_told_by_the_files_that_are_loaded(opened: Open, tmp_path: Path) -> None:
    """Of several kinds in a folder ``--load-format pt`` takes the one, and SGLang left alone the other."""
    pool = host_pool("page_first")
    (tmp_path / "config.json").write_text("{}")
    for name in ("model.bin", "model.pt"):
        (tmp_path / name).write_bytes(bytes(5000))

    def has(load_format: str) -> bool:
        arguments = {"load_format": load_format, "model_path": str(tmp_path)}
        storage = opened(pool, weights=None, arguments=arguments)
        is_there = bool(storage.batch_exists(KEYS[:1]))
        storage.batch_set_v1(KEYS[:1], at(0))
        storage.close()
        return is_there

    assert [has("auto"), has("auto"), has("pt"), has("pt")] == [False, True, False, True]
    (tmp_path / "model.pt").write_bytes(bytes(2500) + b"x" * 2500)  # trained anew
    assert [has("auto"), has("pt")] == [True, False]


@pytest.mark.parametrize("noted", [{"model_path": "new", "load_format": "auto"}, {"weight_version": "2"}])
def test_of_weights_that_are_updated_nothing_is_found_or_kept(opened: Open, noted: dict[str, object]) -> None:
    """Until SGLang attaches a storage with a name for them; it has no say itself of what they are."""
    pool, main = host_pool("page_first"), KEYS[:2]
    filled(pool, range(2))
    storage = opened(pool)
    assert storage.batch_set_v1(main, at(0, 1)) == [True] * 2
    OVERRIDES.append(("of another kind", {"hicache_write_policy": "write_back"}))
    assert storage.batch_exists(main) == 2
    OVERRIDES.append(("an update", noted))
    with capture_logs() as logs:
        assert storage.batch_exists(main) == storage.batch_exists_v2(main).kv_hit_pages == 0
        assert storage.batch_get_v1(main, at(2, 3)) == storage.batch_set_v1(main, at(0, 1)) == [False] * 2
    assert "attached with another name" in str(logs[0]["exc_info"])
    storage.close()
    with pytest.raises(ConfigurationError, match="were updated while it ran"):
        opened(pool, weights=None)
    assert opened(pool, weights="new").batch_exists(main) == 0
    named = opened(pool, weights="w")
    assert named.batch_exists(main) == 2
    OVERRIDES.append(("the same again", noted))
    assert named.batch_exists(main) == 0


def test_a_storage_that_failed_to_open_says_why_it_keeps_nothing(opened: Open, tmp_path: Path) -> None:
    """SGLang calls one that failed as it was attached while SGLang served, and takes it for attached."""
    pool, main = host_pool("page_first"), KEYS[:2]
    (tmp_path / "kv").write_text("a file, where a directory is to be")
    nvme = {"medium": "nvme", "path": str(tmp_path / "kv"), "capacity": "1MiB"}
    ours = {"weights": "w", "tiers": [nvme]}
    storage = adapter()(Config({"interface_v1": 1, "tiered_kv": ours}), {})
    storage.register_mem_pool_host(pool)
    with pytest.raises(ConfigurationError, match="it is a file"):
        storage.on_host_pools_registered()
    with capture_logs() as logs:
        assert storage.batch_exists(main) == storage.batch_exists_v2(main).kv_hit_pages == 0
        assert storage.batch_get_v1(main, at(2, 3)) == storage.batch_set_v1(main, at(0, 1)) == [False] * 2
    assert "until it is detached" in str(logs[0]["exc_info"])
    storage.close()
    closed = opened(pool)
    closed.close()
    with capture_logs() as logs:
        assert closed.batch_exists(main) == 0
    assert not logs


def test_what_sglang_has_noted_is_read_once(opened: Open) -> None:
    """A draft that adapts notes each change of its steps, for as long as the server runs: a call costs no more then."""
    read: list[str] = []

    class Fields(dict[str, object]):
        def keys(self) -> Any:  # noqa: ANN401 - a view
            read.append("once")
            return super().keys()

    def note() -> None:
        OVERRIDES.append(("adaptive_spec.restore", Fields(speculative_num_steps=3)))

    storage = opened(host_pool("layer_first"))
    for _ in range(3):
        note()
        read.clear()
        for _ in range(2):
            storage.batch_exists(KEYS[:1])
        assert len(read) == 1


def test_after_closing_nothing_is_there(opened: Open) -> None:
    """SGLang may still ask: it is told no, and raised nothing at; closing again is harmless."""
    pool = host_pool("layer_first")
    storage = opened(pool)
    storage.batch_set_v1(KEYS[:1], at(0))
    storage.close()
    storage.close()
    assert storage.batch_exists(KEYS[:1]) == 0
    assert storage.batch_get_v1(KEYS[:1], at(0)) == [False]
    assert storage.batch_set_v1(KEYS[:1], at(0)) == [False]


def test_closing_overtakes_a_call(opened: Open) -> None:
    """SGLang closes in another thread than those that ask: whoever is asking at that moment is told no, too."""

    class Closing(list[str]):
        def __iter__(self) -> Iterator[str]:
            storage.close()
            return super().__iter__()

    pool = host_pool("layer_first")
    for call, answer in {
        "batch_exists": 0,
        "batch_get_v1": [False] * 2,
        "batch_set_v1": [False] * 2,
    }.items():
        storage = opened(pool)
        storage.batch_set_v1(KEYS[:2], at(0, 1))
        arguments = (Closing(KEYS[:2]), *([at(0, 1)] if call != "batch_exists" else []))
        assert getattr(storage, call)(*arguments) == answer, call


def test_a_fault_that_lasts_is_not_logged_with_every_call(opened: Open) -> None:
    """SGLang calls for each request: a log that has an entry for each fills a disk."""
    pool = host_pool("layer_first")
    storage = opened(pool)
    with capture_logs() as logs:
        for _ in range(20):
            assert storage.batch_exists(["no hash"]) == 0
            assert storage.batch_get_v1(["no hash"], at(0)) == [False]
            assert storage.batch_set_v1(["no hash"], at(0)) == [False]
    assert [(each["event"], each["task"]) for each in logs] == [("background.failed", "HiCache")]


def test_what_is_dropped_is_said_page_by_page(opened: Open) -> None:
    """A cache that takes no stores any more keeps what it has."""
    pool = host_pool("layer_first")
    storage = opened(pool)
    storage.batch_set_v1(KEYS[:2], at(0, 1))
    storage.kv.drain()
    assert storage.batch_set_v1(KEYS[:4], at(0, 1, 2, 3)) == [True, True, False, False]


def test_a_program_ends_although_nobody_closes_it(tmp_path: Path) -> None:
    """The process ends by itself, and the next one finds what was stored."""
    for expected in (0, 10):
        command = [sys.executable, "-m", "tests.integrations.test_sglang", str(tmp_path)]
        ran = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=60, cwd=Path(__file__).parents[2]
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert json.loads(ran.stdout.splitlines()[-1]) == expected


def test_what_cannot_be_served_is_refused_at_once(opened: Open) -> None:
    """With what was found and what is possible."""
    with pytest.raises(ConfigurationError, match=r"SGLang 0\.5\.23, and this is SGLang 0\.6\.0"):
        adapter("0.6.0")(Config({"interface_v1": 1}))
    with pytest.raises(ConfigurationError, match="interface_v1"):
        adapter()(Config({}))
    for wrong in ("cpu://?capacity=1MiB", [{"medium": "cpu"}]):
        with pytest.raises(ConfigurationError, match='"tiered_kv" is an object of settings'):
            adapter()(Config({"interface_v1": 1, "tiered_kv": wrong}))
    for stray in ("tiers", "connect", "weights", "tiered-kv", "TieredKV"):
        with pytest.raises(ConfigurationError, match=f"'{stray}' in the extra config: nobody reads it"):
            adapter()(Config({"interface_v1": 1, stray: {}, "report": "another's"}))
    with pytest.raises(ConfigurationError, match="'page_head' is not served; these are: layer_first, page_first"):
        opened(host_pool("page_head"))
    with pytest.raises(ConfigurationError, match="context parallelism over 2 ranks"):
        opened(host_pool("layer_first", is_mla=True), tp_size=2, dcp_size=2)
    with pytest.raises(ConfigurationError, match="'mamba' is a SimpleNamespace, whose pages are not known here"):
        opened(pool := host_pool("layer_first")).register_mem_host_pool_v2(SimpleNamespace(), "mamba")
    opened(pool).register_mem_host_pool_v2(pool, "kv")  # the same one, as SGLang has it


def main(folder: str) -> None:
    """Be a process that stores, and ends without closing anything."""
    extra = {"tiers": ["cpu://?capacity=1MiB", f"file://{folder}?capacity=8MiB"], "weights": "w"}
    storage = adapter()(Config({"interface_v1": 1, "tiered_kv": extra}))
    pool = host_pool("layer_first")
    storage.register_mem_pool_host(pool)
    storage.on_host_pools_registered()
    print(storage.batch_exists(KEYS))  # noqa: T201 - read by the test
    filled(pool, range(10))
    storage.batch_set_v1(KEYS, at(*range(10)))


if __name__ == "__main__":
    main(*sys.argv[1:])
