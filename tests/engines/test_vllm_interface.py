"""What the adapters use of vLLM, and what they are for it, in the sources of each version they are for.

The engine that runs in these tests is one of these versions; the others are read. Nothing of vLLM is imported.
"""

import ast
import pathlib
from collections.abc import Iterator

import pytest

from environments import ROOT
from judged import VLLM

OURS = ROOT / "tiered_kv" / "integrations" / "vllm"
BASES = {
    "TieredKVConnector": (
        "connector.py",
        "vllm/distributed/kv_transfer/kv_connector/v1/base.py",
        ["KVConnectorBase_V1", "SupportsHMA"],
    ),
    "TieredKVStats": ("counts.py", "vllm/distributed/kv_transfer/kv_connector/v1/metrics.py", ["KVConnectorStats"]),
    "TieredKVTier": ("offload_tier.py", "vllm/v1/kv_offload/tiering/base.py", ["SecondaryTierManager"]),
}
"""Our classes, where they are, and what of vLLM's they derive from."""
NAMED_BY = {
    "vllm.VllmConfig": {
        "model_config", "cache_config", "load_config", "lora_config", "attention_config", "speculative_config"
    },
    "model.ModelConfig": {
        "model", "revision", "dtype", "max_model_len", "quantization", "quantization_config", "model_class_overrides",
        "multimodal_config", "override_generation_config", "hf_config", "model_impl", "trust_remote_code",
        "code_revision", "tokenizer", "tokenizer_revision",
    },
    "cache.CacheConfig": {
        "cache_dtype", "kv_cache_dtype_skip_layers", "mamba_cache_dtype", "mamba_ssm_cache_dtype"
    },
    "load.LoadConfig": {"load_format", "model_loader_extra_config"},
    "lora.LoRAConfig": {
        "target_modules", "lora_dtype", "enable_moe_shared_loras", "enable_mixed_moe_lora_format"
    },
    "multimodal.MultiModalConfig": {
        "language_model_only", "enable_mm_embeds", "mm_processor_cache_gb", "mm_encoder_fp8_scale_path"
    },
    "attention.AttentionConfig": {"use_prefill_query_quantization", "disable_flashinfer_q_quantization"},
    "speculative.SpeculativeConfig": {"draft_model_config"},
    "quantization.QuantizationConfigArgs": {"linear", "moe", "ignore", "targets"},
    "quantization.QuantSpec": {"weight", "activation"},
}  # fmt: skip
"""What a model is told by, and whether its images have names that last: fields of vLLM's configuration, by class."""
NOT_IN_EVERY_VERSION = {
    "supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches", "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT"
}  # fmt: skip
NOT_VLLMS = {"TieredKVStats": {"add"}}
"""Public methods of ours that vLLM does not call."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def class_of(path: pathlib.Path, name: str) -> ast.ClassDef:
    """Return the definition of a class."""
    (found,) = (
        each for each in ast.parse(path.read_text()).body if isinstance(each, ast.ClassDef) and each.name == name
    )
    return found


def methods_of(definition: ast.ClassDef) -> dict[str, Function]:
    """Return the methods of a class by name."""
    return {each.name: each for each in definition.body if isinstance(each, Function)}


def names_in(module: pathlib.Path) -> set[str]:
    """Return what can be imported from a module, as far as its text says."""
    names: set[str] = set()
    for each in ast.walk(ast.parse(module.read_text())):
        match each:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Import(names=imported) | ast.ImportFrom(names=imported):
                names |= {alias.asname or alias.name for alias in imported}
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case _:
                pass
    return names


def fields_of(sources: pathlib.Path, name: str) -> set[str]:
    """Return the fields of one of vLLM's configurations, by its file and class."""
    file, _, config = name.partition(".")
    body = class_of(sources / "vllm" / "config" / f"{file}.py", config).body
    return {ast.unparse(each.target) for each in body if isinstance(each, ast.AnnAssign)}


def listed(name: str) -> set[str]:
    """Return what a list of our own names: of vLLM's fields, or of what is in its environment."""
    (found,) = (
        ast.literal_eval(each.value)
        for each in ast.parse((OURS / "model_identity.py").read_text()).body
        if isinstance(each, ast.AnnAssign) and each.value and ast.unparse(each.target) == name
    )
    return {*found}


def named_of(config: str) -> set[str]:
    """Return the fields of a configuration that name a model."""
    return NAMED_BY.get(config, set()) | (listed("_OF_IMAGES") if config == "multimodal.MultiModalConfig" else set())


def imports_of_vllm() -> Iterator[tuple[str, str]]:
    """Yield each name that our modules import from vLLM, and the module that it comes from."""
    for path in sorted(OURS.glob("*.py")):
        for each in ast.walk(ast.parse(path.read_text())):
            if isinstance(each, ast.ImportFrom) and (each.module or "").partition(".")[0] == "vllm":
                yield from ((str(each.module), alias.name) for alias in each.names)


def test_who_is_told_of_sleep_lets_go_and_binds_again(vllm_sources: pathlib.Path) -> None:
    """Where vLLM's worker tells connectors before its memory goes and once it is back; where it doesn't, we refuse."""
    worker = methods_of(class_of(vllm_sources / "vllm/v1/worker/gpu_worker.py", "Worker"))

    def calls(method: str) -> list[str]:
        found = [each for each in ast.walk(worker[method]) if isinstance(each, ast.Call)]
        found.sort(key=lambda each: (each.lineno, each.col_offset))
        named = [each.func.attr for each in found if isinstance(each.func, ast.Attribute)]
        return [name for name in named if name in {"unregister_kv_caches", "suspend", "restore_kv_caches", "resume"}]

    ours = methods_of(class_of(OURS / "connector.py", "TieredKVConnector"))
    told = ["unregister_kv_caches", "suspend"], ["resume", "restore_kv_caches"]
    is_told = (calls("sleep"), calls("wake_up")) == told
    version = (vllm_sources / "vllm/_version.py").read_text()
    assert is_told == ("0.32" not in version)
    assert {"unregister_kv_caches", "restore_kv_caches"} <= ours.keys()


def test_hooks_that_do_not_pay_are_not_claimed(vllm_sources: pathlib.Path) -> None:
    """VLLM has them, in each version; why we do without is said in the guide to models."""
    theirs = methods_of(class_of(vllm_sources / BASES["TieredKVConnector"][1], "KVConnectorBase_V1"))
    ours = methods_of(class_of(OURS / "connector.py", "TieredKVConnector"))
    unused = {"supports_divergent_local_hybrid_hits", "register_finished_partial_tail"}
    assert unused <= theirs.keys()
    assert unused.isdisjoint(ours)


def test_what_a_model_is_told_by_is_there(vllm_sources: pathlib.Path) -> None:
    """Of a field that vLLM calls otherwise an imitation says something, and vLLM the same of every model."""
    for name in NAMED_BY:
        assert named_of(name) <= fields_of(vllm_sources, name)
    environment = (vllm_sources / "vllm" / "envs.py").read_text()
    assert {name for name in listed("_ENVIRONMENT") if f'"{name}"' not in environment} <= NOT_IN_EVERY_VERSION


def test_what_no_model_is_told_by_was_judged(vllm_sources: pathlib.Path) -> None:
    """Each field of a configuration is in a name, or changes nothing that matters: a new one is in neither."""
    for name in VLLM.keys() | NAMED_BY.keys():
        named = named_of(name)
        others = [field for fields in VLLM.get(name, {}).values() for field in fields.split()]
        assert sorted({*others} - named) == sorted(others), f"{name}: twice"
        assert fields_of(vllm_sources, name) - named - {*others} == set(), f"{name}: read what these do, see judged.py"


def test_all_that_is_imported_is_there(vllm_sources: pathlib.Path) -> None:
    """Each name, in the module that it is imported from."""
    missing = []
    for module, name in imports_of_vllm():
        path = vllm_sources / module.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not file.exists() or name not in names_in(file):
            missing.append(f"{module}.{name}")
    assert missing == []


@pytest.mark.parametrize("name", BASES)
def test_methods_fit(vllm_sources: pathlib.Path, name: str) -> None:
    """What vLLM calls can be called as it does: all that it must find is there, with its parameters, in its order."""
    ours_in, bases_in, bases = BASES[name]
    ours, theirs = methods_of(class_of(OURS / ours_in, name)), dict[str, Function]()
    for base in bases:
        theirs |= methods_of(class_of(vllm_sources / bases_in, base))
    abstract = {
        method
        for method, definition in theirs.items()
        if any(isinstance(each, ast.Name) and each.id == "abstractmethod" for each in definition.decorator_list)
    }
    assert abstract <= ours.keys(), "what has no default"
    for method, definition in ours.items():
        if method.startswith("_") and method != "__init__":
            continue
        if method not in theirs:
            assert method in NOT_IN_EVERY_VERSION | NOT_VLLMS.get(name, set()), f"vLLM does not know {method}"
            continue
        if method == "__init__":
            continue  # vLLM's factories call it with what its configuration says, by name
        given, wanted = (
            [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
            for function in (definition, theirs[method])
        )
        assert given[: len(wanted)] == wanted, f"{name}.{method}"
        optional = len(definition.args.defaults)
        assert len(given) - optional <= len(wanted), f"{name}.{method} wants more than vLLM gives"
