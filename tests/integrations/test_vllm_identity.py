"""Whose KV a block of vLLM's is: what computes other bytes has another name, and what does not has the same."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.small_vllm import PAGE_BYTES, VLLM, group
from tiered_kv import ConfigurationError, ModelIdentity

PLAIN = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}

NAME_OF_PLAIN = "96634d7ad5a6213ea79972c9d2771bae5f70a8b4cee8c2c38427a88cc4d4e37a"
"""As it has been since blocks are named so."""

UNSAID: dict[str, Any] = {
    "model": "nowhere", "revision": None, "quantization": None, "quantization_config": None,
    "model_class_overrides": {}, "model_impl": "auto", "trust_remote_code": False, "code_revision": None,
}  # fmt: skip


def identity(
    config: dict[str, Any],
    *,
    max_model_len: int = 1024,
    tuned: bool | None = None,
    lora: dict[str, Any] | None = None,
    queries: dict[str, bool] | None = None,
    draft: object = None,
    state_dtype: str = "auto",
    skip_layers: tuple[str, ...] = (),
    load_format: str = "auto",
    weights: str | None = "w",
    **arguments: object,
) -> ModelIdentity:
    """Name a model that vLLM serves."""
    model = SimpleNamespace(
        hf_config=SimpleNamespace(to_dict=lambda: config, architectures=["Some"]),
        dtype="bfloat16",
        max_model_len=max_model_len,
        try_get_generation_config=lambda: {"temperature": 0.6},
        override_generation_config={} if tuned is None else {"attn_temperature_tuning": tuned},
        **{**UNSAID, "tokenizer": arguments.get("model", "nowhere"), "tokenizer_revision": None, **arguments},
    )
    load = SimpleNamespace(load_format=load_format, model_loader_extra_config={})
    cache = SimpleNamespace(
        cache_dtype="auto",
        kv_cache_dtype_skip_layers=list(skip_layers),
        mamba_cache_dtype="auto",
        mamba_ssm_cache_dtype=state_dtype,
    )
    attention = {"use_prefill_query_quantization": False, "disable_flashinfer_q_quantization": False}
    adapters = {
        "target_modules": None,
        "lora_dtype": "bfloat16",
        "enable_moe_shared_loras": False,
        "enable_mixed_moe_lora_format": False,
    }
    wanted = SimpleNamespace(
        model_config=model,
        load_config=load,
        cache_config=cache,
        attention_config=SimpleNamespace(**{**attention, **(queries or {})}),
        lora_config=None if lora is None else SimpleNamespace(**{**adapters, **lora}),
        speculative_config=draft,
    )
    return VLLM.model_identity.model_identity(wanted, weights)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "phi3", "rope_parameters": {"rope_type": "longrope"}},
        {"model_type": "phi3", "rope_scaling": {"type": "su"}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "dynamic"},
                "sliding_attention": {"rope_type": "default"},
            }
        },
        {"model_type": "some_vl", "text_config": {"rope_parameters": {"rope_type": "longrope"}}},
        {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}},
    ],
)
def test_a_model_that_vllm_computes_by_the_longest_prompt_is_another_with_another_one(config: dict[str, Any]) -> None:
    """Its keys are rotated by other factors, or its attention is tuned, whatever the prompt's own length."""
    assert identity(config) == identity(config)
    assert identity(config, max_model_len=512) != identity(config)


def test_a_plain_model_finds_its_blocks_after_a_start_with_another_length() -> None:
    """Positions are rotated alike; a method of quantization that is called dynamic is no rope."""
    quantized = {**PLAIN, "quantization_config": {"activation_scheme": "dynamic", "quant_method": "fp8"}}
    for config in (PLAIN, quantized):
        assert identity(config, max_model_len=512) == identity(config)


def test_attention_that_is_tuned_by_hand_is_another_model() -> None:
    """Llama 4's, by its generation config; what that says of sampling is nothing of KV's."""
    config = {"model_type": "llama4_text"}
    assert len({identity(config, tuned=tuned) for tuned in (None, False, True)}) == 3


def test_what_is_quantized_kept_or_computed_in_another_way_is_another_model() -> None:
    """Weights and queries quantized here, what code computes, types of states and layers, what adapters change."""
    ways: list[dict[str, Any]] = [
        {},
        {"quantization": "online", "quantization_config": "linear=int8"},
        {"quantization": "online", "quantization_config": "linear=fp8"},
        {"model_class_overrides": {"Some": "their_models:Another"}},
        {"skip_layers": ("0",)},
        {"skip_layers": ("1",)},
        {"state_dtype": "bfloat16"},
        {"state_dtype": "float16"},
        {"lora": {"target_modules": ["o_proj"]}},
        {"lora": {"target_modules": ["q_proj", "o_proj"]}},
        {"lora": {"lora_dtype": "float16"}},
        {"lora": {"enable_moe_shared_loras": True}},
        {"lora": {"enable_mixed_moe_lora_format": True}},
        {"queries": {"use_prefill_query_quantization": True}},
        {"queries": {"disable_flashinfer_q_quantization": True}},
        {"model_impl": "transformers"},
        {"trust_remote_code": True},
        {"trust_remote_code": True, "code_revision": "main"},
    ]
    named = [identity(PLAIN, **way) for way in ways]
    assert len({*named}) == len(ways)
    assert named == [identity(PLAIN, **way) for way in ways]
    assert named[0] == identity(PLAIN, lora={}) == identity(PLAIN, model_impl="vllm")


@pytest.mark.parametrize(
    ("name", "usual", "other"),
    [
        ("VLLM_SSM_CONV_STATE_LAYOUT", "SD", "DS"),
        ("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "False", "1"),
        ("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "NONE", "INT4"),
        ("VLLM_CPU_INT4_W4A8", "1", "0"),
        ("VLLM_MARLIN_INPUT_DTYPE", "", "fp8"),
        ("VLLM_HUMMING_ONLINE_QUANT_CONFIG", "", '{"quant_method": "fp8"}'),
    ],
)
def test_an_environment_that_lays_out_or_computes_otherwise_is_another_model(
    monkeypatch: pytest.MonkeyPatch, name: str, usual: str, other: str
) -> None:
    """A page of a state is bytes, whichever axis of a convolution lies first in it; vLLM on a CPU says the usual."""
    unsaid = identity(PLAIN)
    monkeypatch.setenv(name, usual)
    assert identity(PLAIN) == unsaid
    monkeypatch.setenv(name, other)
    assert identity(PLAIN) != unsaid


def test_an_environment_is_told_by_what_it_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A variable may name a file of JSON, on each host another one, and a switch has several spellings."""

    def named(name: str, value: object) -> ModelIdentity:
        monkeypatch.setenv(name, str(value))
        return identity(PLAIN)

    files = tmp_path / "one.json", tmp_path / "other.json"
    for file in files:
        file.write_text('{"quant_method": "fp8"}')
    first, second = (named("VLLM_HUMMING_ONLINE_QUANT_CONFIG", file) for file in files)
    assert first == second
    files[0].write_text('{"quant_method": "int8"}')
    assert named("VLLM_HUMMING_ONLINE_QUANT_CONFIG", files[0]) != first
    monkeypatch.delenv("VLLM_HUMMING_ONLINE_QUANT_CONFIG")
    for spellings in (["0", "False", "false"], ["1", "True", "true"]):
        assert len({named("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", value) for value in spellings}) == 1


def test_a_name_is_what_it_was_where_nobody_says_anything() -> None:
    """What a later tiered_kv tells models apart by changes none: blocks that were stored are found."""
    plain = identity(PLAIN)
    assert plain.extra == (("vllm config", NAME_OF_PLAIN),)


def test_code_of_a_checkpoint_that_was_changed_is_another_model(tmp_path: Path) -> None:
    """It may compute, or prepare images; where none of it is trusted it does neither."""
    (tmp_path / "parts").mkdir()
    for file in (tmp_path / "processing.py", tmp_path / "parts" / "vision.py"):
        before = [identity(PLAIN, model=str(tmp_path), trust_remote_code=trusted) for trusted in (True, False)]
        file.write_text("changed = True")
        after = [identity(PLAIN, model=str(tmp_path), trust_remote_code=trusted) for trusted in (True, False)]
        assert [new == old for new, old in zip(after, before, strict=True)] == [False, True]


def test_code_of_the_hub_is_told_by_its_commit(tmp_path: Path) -> None:
    """Its client fetches files as they are asked for: a host has more of them than another, or than at its start."""
    hosts = [tmp_path / host / "models--some--model" / "snapshots" / (40 * "a") for host in ("first", "second")]
    for folder in hosts:
        folder.mkdir(parents=True)
        (folder / "configuration.py").write_text("")
    (hosts[1] / "processing.py").write_text("")
    first, second = (identity(PLAIN, model=str(folder), trust_remote_code=True) for folder in hosts)
    assert first == second
    later = hosts[1].rename(hosts[1].with_name(40 * "b"))
    assert identity(PLAIN, model=str(later), trust_remote_code=True) != first


def test_towers_of_other_models_are_told_by_their_weights(tmp_path: Path) -> None:
    """Ultravox loads them from other folders than its own, which its own files say nothing of."""
    for name in ("own", "tower"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.bin").write_bytes(bytes(5000))
    config = {**PLAIN, "text_model_id": str(tmp_path / "tower"), "audio_model_id": None}
    before = identity(config, weights=None, model=str(tmp_path / "own"))
    assert before == identity(config, weights=None, model=str(tmp_path / "own"))
    (tmp_path / "tower" / "model.bin").write_bytes(bytes(2500) + b"x" * 2500)
    assert identity(config, weights=None, model=str(tmp_path / "own")) != before


def test_a_draft_whose_kv_is_kept_is_told_by_its_weights(tmp_path: Path) -> None:
    """Blocks have its KV too, of as many layers whichever it is; one that has none of its own changes nothing."""
    (tmp_path / "model.bin").write_bytes(bytes(5000))

    def named(path: object, layers: int = 1, *, has_kv: bool = True) -> ModelIdentity:
        config = SimpleNamespace(to_dict=lambda: {"layers": layers})
        draft = SimpleNamespace(hf_config=config, model=str(path), revision=None, quantization=None)
        return identity(PLAIN, draft=SimpleNamespace(uses_draft_kv_cache=lambda: has_kv, draft_model_config=draft))

    of_files = named(tmp_path)
    others = [identity(PLAIN), of_files, named("nowhere"), named("nowhere", 2), named("no/such-model")]
    assert len({*others}) == len(others)
    assert named(tmp_path) == of_files
    (tmp_path / "model.bin").write_bytes(bytes(2500) + b"x" * 2500)
    assert named(tmp_path) != of_files
    assert named(tmp_path, has_kv=False) == identity(PLAIN)
    (tmp_path / "model.bin").unlink()
    assert named(tmp_path) == named(tmp_path)  # of --download-dir only a config is where its name leads to
    assert named(tmp_path) not in others


def test_a_draft_of_eagle_is_the_same_wherever_it_lies(tmp_path: Path) -> None:
    """In vLLM's config of it the draft's own is another one, which says where it was read."""

    def named(folder: Path) -> ModelIdentity:
        folder.mkdir()
        (folder / "model.bin").write_bytes(bytes(5000))
        path = {"_name_or_path": str(folder)}
        config = SimpleNamespace(to_dict=lambda: {**path, "model": {**path, "num_hidden_layers": 1}})
        draft = SimpleNamespace(hf_config=config, model=str(folder), revision=None, quantization=None)
        return identity(PLAIN, draft=SimpleNamespace(uses_draft_kv_cache=lambda: True, draft_model_config=draft))

    assert named(tmp_path / "first") == named(tmp_path / "second")


def test_weights_are_told_by_the_files_that_are_loaded(tmp_path: Path) -> None:
    """Of several kinds in a folder ``--load-format pt`` takes the one, and vLLM left alone the other."""
    for name in ("model.bin", "model.pt"):
        (tmp_path / name).write_bytes(bytes(5000))

    def named(load_format: str) -> ModelIdentity:
        return identity(PLAIN, weights=None, model=str(tmp_path), load_format=load_format)

    auto, by_pt = named("auto"), named("pt")
    assert auto != by_pt
    assert auto.weights != "w"
    (tmp_path / "model.pt").write_bytes(bytes(2500) + b"x" * 2500)  # trained anew
    assert named("auto") == auto
    assert named("pt") != by_pt
    (tmp_path / "consolidated.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert named("mistral") != named("hf")  # of these some load a part


@pytest.mark.parametrize("load_format", ["dummy", "ipc_cache", "modelexpress", "tensorizer"])
def test_weights_that_are_not_the_checkpoint_s_files_must_be_named(tmp_path: Path, load_format: str) -> None:
    """Made up, of a daemon that may have loaded files before these, of another engine, of a path of their own."""
    (tmp_path / "model.bin").write_bytes(bytes(5000))
    with pytest.raises(ConfigurationError, match=f"load_format '{load_format}' loads"):
        identity(PLAIN, weights=None, model=str(tmp_path), load_format=load_format)
    assert identity(PLAIN, model=str(tmp_path), load_format=load_format).weights == "w"


def test_images_that_an_engine_prepares_in_another_way_are_of_another_model() -> None:
    """VLLM's hashes have an image and what its request says of it, and not what the engine was started with."""
    ways: list[dict[str, Any]] = [
        {},
        {"mm_processor_kwargs": {"max_pixels": 1024}},
        {"mm_processor_kwargs": {"max_pixels": 2048}},
        {"media_io_kwargs": {"video": {"num_frames": 40}}},
        {"video_pruning_rate": 0.5},
        {"video_pruning_rate": 0.5, "video_pruning_method": "vidcom2"},
        {"mm_encoder_attn_dtype": "fp8"},
    ]
    named = [identity(PLAIN, multimodal_config=SimpleNamespace(**way)) for way in ways]
    assert len({*named}) == len(ways)
    assert named == [identity(PLAIN, multimodal_config=SimpleNamespace(**way)) for way in ways]
    assert identity(PLAIN, multimodal_config=None) == identity(PLAIN)


def test_images_that_are_encoded_by_other_scales_are_of_another_model(tmp_path: Path) -> None:
    """Those of an fp8 encoder are in a file, wherever that is, and whatever it was before."""
    files = [tmp_path / name for name in ("one.json", "same.json", "other.json")]
    for file, scale in zip(files, (1.5, 1.5, 2.5), strict=True):
        file.write_text(json.dumps({"layer": {"q": scale}}))
    one, same, other = (
        identity(PLAIN, multimodal_config=SimpleNamespace(mm_encoder_fp8_scale_path=str(file))) for file in files
    )
    dynamic = identity(PLAIN, multimodal_config=SimpleNamespace(mm_encoder_fp8_scale_path=None))
    assert one == same
    assert len({one, other, dynamic}) == 3
    with pytest.raises(ConfigurationError, match="scales of the encoder"):
        identity(PLAIN, multimodal_config=SimpleNamespace(mm_encoder_fp8_scale_path=str(tmp_path / "gone.json")))


def test_images_that_a_checkpoint_has_prepared_in_another_way_are_of_another_model(tmp_path: Path) -> None:
    """By files beside its weights, which neither those nor vLLM's hashes of an image know; text has none of that."""
    folders = {which: tmp_path / which for which in ("model", "tokenizer")}
    images: dict[str, Any] = {"multimodal_config": SimpleNamespace()} | {name: str(at) for name, at in folders.items()}
    for folder in folders.values():
        folder.mkdir()
    named = [identity(PLAIN, **images)]
    transformers = "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"
    for which, name in [*(("model", name) for name in transformers), ("tokenizer", "tekken.json")]:
        for size in (448, 896):
            (folders[which] / name).write_text(f'{{"size": {size}}}')
            named.append(identity(PLAIN, **images))
    assert len({*named}) == 9
    assert identity(PLAIN, **images) == named[-1]
    assert identity(PLAIN, **{**images, "multimodal_config": None}) == identity(PLAIN)


@dataclass
class Layer:
    """One of vLLM's, as its model runner has set it up."""

    isa: str = "vec"
    backend: str = "CPU_ATTN"

    def get_attn_backend(self) -> Any:  # noqa: ANN401 - vLLM's
        """Say which kernels it has."""
        return SimpleNamespace(get_name=lambda: self.backend)


def page_tag(
    monkeypatch: pytest.MonkeyPatch,
    layer: Layer,
    *,
    order: tuple[int, ...] = (0, 1, 2, 3),
    blocks: int = 8,
    heads: int = 4,
) -> str:
    """Say what the pages of a layer are, of blocks of heads of 16 tokens, which lie in memory in some order."""
    monkeypatch.setattr(VLLM.moving, "get_layers_from_vllm_config", lambda *_: {"l": layer})
    sizes = (blocks, heads, 16, 32)
    pages = torch.zeros([sizes[axis] for axis in order]).permute(*map(order.index, range(4)))
    wanted = SimpleNamespace(
        num_engine_blocks=blocks,
        num_stages=1,
        num_ranks=1,
        groups=(group(page=2048 * heads),),
        slots_per_block=lambda _: 1.0,
    )
    worker = VLLM.moving.MovingSide(None, wanted)
    worker.register_kv_caches(dict.fromkeys(wanted.groups[0].layer_names, pages))
    return worker.hello().layout.groups[0].tag  # type: ignore[no-any-return]


def chunk_tag() -> str:
    """Say what a chunk of vLLM's CPU tier is."""
    parallel = SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, is_parallelism_agnostic=True)
    config = SimpleNamespace(
        groups=(SimpleNamespace(tokens_per_block=16, layer_names=("l",)),), parallel=parallel, replicated_layout=False,
        model=SimpleNamespace(name="org/model", dtype="fp8"), cache=1, kv_cache_layout="LBNHC", canonical_layout=False,
    )  # fmt: skip
    return VLLM.offload_tier._tag(config)  # type: ignore[no-any-return]  # noqa: SLF001 - ours


def test_pages_are_told_apart_by_how_kernels_pack_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's backend, by the instructions that a CPU has, and by the order of a page's heads and tokens."""
    plain = page_tag(monkeypatch, Layer())
    assert plain == page_tag(monkeypatch, Layer())
    others = [
        page_tag(monkeypatch, Layer(isa="amx")),
        page_tag(monkeypatch, Layer(backend="TRITON_ATTN")),
        page_tag(monkeypatch, Layer(), order=(0, 2, 1, 3)),
    ]
    assert len({plain, *others}) == 4


def test_pages_are_the_same_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one head is all that a page has, and lies before all blocks: another start finds what one stored."""
    tags = {page_tag(monkeypatch, Layer(), order=(1, 0, 2, 3), blocks=n, heads=1) for n in (8, 9)}
    assert len(tags) == 1


def test_another_make_of_gpu_reads_none_of_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is called fp8 is another number there; so it is with chunks of vLLM's CPU tier."""
    tags = []
    for name, fp8 in (("cuda", "e4m3fn"), ("rocm", "e4m3fn"), ("rocm", "e4m3fnuz")):
        here = SimpleNamespace(device_name=name, fp8_dtype=lambda fp8=fp8: f"torch.float8_{fp8}")
        monkeypatch.setattr(VLLM.compatibility, "current_platform", here)
        tags += [page_tag(monkeypatch, Layer()), chunk_tag()]
    assert len({*tags}) == 6


def test_below_vllm_s_own_tier_a_model_of_the_hub_must_be_named() -> None:
    """A tier is told no revision, and the newest one here may be another than the one that is served."""
    config = SimpleNamespace(model=SimpleNamespace(name="org/model"), parallel=SimpleNamespace(data_parallel_index=0))
    with pytest.raises(ConfigurationError, match="which revision of it is served"):
        VLLM.offload_tier.TieredKVTier(
            SimpleNamespace(config=config), memoryview(bytearray(4096)), "t", ["cpu://?capacity=1MiB"]
        )


def test_below_vllm_s_own_tier_an_interrupt_at_its_end_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is unmapped then, and nothing may touch that any more; nor is the disk kept from another one."""
    parallel = SimpleNamespace(
        data_parallel_index=0, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, is_parallelism_agnostic=True
    )
    config = SimpleNamespace(
        groups=(SimpleNamespace(tokens_per_block=16, layer_names=("l",)),), parallel=parallel, replicated_layout=False,
        model=SimpleNamespace(name="org/model", dtype="fp8"), cache=SimpleNamespace(blocks_per_chunk=1),
        kv_cache_layout="LBNHC", canonical_layout=False,
    )  # fmt: skip
    disk = {"medium": "nvme", "path": str(tmp_path), "capacity": "8MiB"}

    def opened() -> Any:  # noqa: ANN401 - a class that only exists beside vLLM
        memory = memoryview(bytearray(8 * PAGE_BYTES)).cast("B", (8, PAGE_BYTES))
        return VLLM.offload_tier.TieredKVTier(SimpleNamespace(config=config), memory, "t", [disk], weights="w")

    def fails() -> None:
        raise KeyboardInterrupt("planted")

    tier = opened()
    with monkeypatch.context() as patched:
        patched.setattr(tier.kv, "drain", fails)
        with pytest.raises(KeyboardInterrupt, match="planted"):
            tier.shutdown()
    opened().shutdown()
    tier.shutdown()
