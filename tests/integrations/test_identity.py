import json
import shutil
import struct
from pathlib import Path

import pytest

from tiered_kv import ConfigurationError
from tiered_kv.integrations.identity import Below, checkpoint_weights, code_of

TENSOR_BYTES = 64 * 1024


def checkpoint(folder: Path, *, fill: int = 1, num_tensors: int = 3) -> Path:
    """Write a checkpoint of one file, each tensor of one value."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    offsets = [[i * TENSOR_BYTES, (i + 1) * TENSOR_BYTES] for i in range(num_tensors)]
    entries = {
        f"layers.{i}": {"dtype": "U8", "shape": [TENSOR_BYTES], "data_offsets": each} for i, each in enumerate(offsets)
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    data = struct.pack("<Q", len(header)) + header + bytes([fill]) * (num_tensors * TENSOR_BYTES)
    (folder / "model.safetensors").write_bytes(data)
    return folder


def change(path: Path, at: int) -> None:
    """Flip one byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_the_same_files_have_the_same_name_wherever_they_are(tmp_path: Path) -> None:
    """A restart, another host and another path agree."""
    first = checkpoint(tmp_path / "a")
    shutil.copytree(first, tmp_path / "elsewhere")
    assert checkpoint_weights(first) == checkpoint_weights(str(tmp_path / "elsewhere"))


def test_fine_tunes_of_equal_shapes_differ(tmp_path: Path) -> None:
    """Names, sizes and headers are equal, the weights are not."""
    first, second = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b", fill=2)
    assert checkpoint_weights(first) != checkpoint_weights(second)


@pytest.mark.parametrize("tensor", [0, 1, 2])
def test_a_change_of_any_one_tensor_is_seen(tmp_path: Path, tensor: int) -> None:
    """A fine-tune of one layer is another model."""
    first, second = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b")
    change(second / "model.safetensors", -TENSOR_BYTES * (3 - tensor) + TENSOR_BYTES // 2)
    assert checkpoint_weights(first) != checkpoint_weights(second)


def test_another_config_is_another_model(tmp_path: Path) -> None:
    """RoPE scaling changes the KV, and no weight."""
    first, second = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b")
    (second / "config.json").write_text('{"model_type": "llama", "rope_theta": 1e6}')
    assert checkpoint_weights(first) != checkpoint_weights(second)


def test_what_is_beside_the_weights_counts_for_nothing(tmp_path: Path) -> None:
    """A tokenizer, a licence, and weights of a kind that is not loaded where there are safetensors."""
    folder = checkpoint(tmp_path / "a")
    before = checkpoint_weights(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(bytes(5000))
    assert checkpoint_weights(folder) == before


@pytest.mark.parametrize("load_format", ["auto", "pt", "npcache", "gguf"])
def test_files_of_the_kind_that_an_engine_loads_are_told_by(tmp_path: Path, load_format: str) -> None:
    """By its format: ``.pt`` with ``pt``, whatever is beside them; safetensors or else ``.bin`` if nobody said so."""
    files = [tmp_path / f"model{suffix}" for suffix in (".bin", ".pt", ".gguf", ".pth")]
    for file in files:
        file.write_bytes(bytes(5000))
    seen = []
    for file in files:
        before = checkpoint_weights(tmp_path, load_format)
        change(file, 2500)
        if checkpoint_weights(tmp_path, load_format) != before:
            seen.append(file.suffix)
    assert seen == [{"auto": ".bin", "npcache": ".bin"}.get(load_format, f".{load_format}")]


def test_files_of_another_kind_are_sampled(tmp_path: Path) -> None:
    """A torch file does not say where its tensors are."""
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(bytes(3 * 4096 + 5))
    before = checkpoint_weights(tmp_path)
    change(path, 3 * 4096 + 1)
    assert checkpoint_weights(tmp_path) != before


def test_a_folder_without_weights_says_what_to_do(tmp_path: Path) -> None:
    """As does one that is not there."""
    with pytest.raises(ConfigurationError, match="name the weights yourself"):
        checkpoint_weights(tmp_path)
    with pytest.raises(ConfigurationError, match="can't be read"):
        checkpoint_weights(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "header",
    [
        '{"a": {"data_offsets": [0, 1180591620717411303424]}}',
        '{"a": {"data_offsets": [0.5, 8.5]}}',
        '{"a": {"data_offsets": [0, 1e999]}}',
        '{"a": {"data_offsets": [-4000, 8]}}',
        '{"a": {"data_offsets": [8, 0]}}',
        '{"a": ' + 100_000 * "[" + 100_000 * "]" + "}",
    ],
    ids=["beyond all files", "fractions", "infinite", "before the file", "backwards", "nested"],
)
def test_a_header_that_cannot_be_is_refused(tmp_path: Path, header: str) -> None:
    """With the error that its callers expect: vLLM's scheduler reads adapters, and nothing else may be raised there."""
    data = len(header).to_bytes(8, "little") + header.encode() + bytes(64)
    (tmp_path / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(ConfigurationError, match=r"cut off|complete"):
        checkpoint_weights(tmp_path)


@pytest.mark.parametrize("length", [4, 50, 1000])
def test_a_file_that_is_cut_off_has_no_name(tmp_path: Path, length: int) -> None:
    """A download that ended early is not the weights that its header promises."""
    path = checkpoint(tmp_path / "a") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ConfigurationError, match=r"cut off|complete"):
        checkpoint_weights(path.parent)


COMMITS = 40 * "a", 40 * "b"


def commit_of(hub: Path, name: str, commit: str) -> Path:
    """Have the hub's client keep a commit, the newest of its model, and return its folder."""
    model = hub / f"models--{name.replace('/', '--')}"
    (folder := model / "snapshots" / commit).mkdir(parents=True)
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / "main").write_text(commit)
    return folder


@pytest.mark.parametrize("classes", ["some/code--modeling.Model", ["modeling.Slow", "some/code--modeling.Model"]])
def test_code_of_another_checkpoint_is_told_by_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, classes: object
) -> None:
    """A fine-tune's config names classes of the model that it was made of, and engines run the newest of that."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    tune = checkpoint(tmp_path / "tune")
    alone = code_of(tune)
    (tune / "config.json").write_text(json.dumps({"auto_map": {"AutoModelForCausalLM": classes}}))
    seen = [alone, code_of(tune)]
    for commit in COMMITS:
        folder = commit_of(tmp_path, "some/code", commit)
        seen.append(code_of(tune))
        (folder / "modeling.py").write_text("")
        assert code_of(tune) == seen[-1]  # files of a commit come as they are asked for
    assert [code_of(tune, commit) for commit in COMMITS] == seen[2:]
    assert all(one != other for at, one in enumerate(seen) for other in seen[:at])


@pytest.mark.parametrize("config", ["", "[]", '{"auto_map": 1}', '{"auto_map": {"AutoModel": [null, "here.Model"]}}'])
def test_a_config_that_names_no_others_changes_nothing(tmp_path: Path, config: str) -> None:
    """Nor does one that says anything else there."""
    before = code_of(checkpoint(tmp_path / "a"))
    (tmp_path / "a" / "config.json").write_text(config)
    assert code_of(tmp_path / "a") == before


def test_what_is_no_commit_is_told_by_its_files(tmp_path: Path) -> None:
    """Somebody has put it where the hub's client keeps commits, and changes it there."""
    for name, is_told_by_files in ("main", True), (COMMITS[0], False):
        folder = commit_of(tmp_path, "some/code", name)
        before = code_of(folder)
        (folder / "modeling.py").write_text("changed = True")
        assert (code_of(folder) != before) is is_told_by_files


def test_ranks_are_filled_in_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """In paths and texts, with nothing else said by that: what nobody has set is left to the adapters."""
    tiers = [
        {"medium": "nvme", "path": "/kv/{dp_rank}", "capacity": "1GiB"},
        {"medium": "s3", "url": "s3://kv/{dp_rank}", "max_retries": 0},
    ]
    monkeypatch.setenv("TIERED_KV_TIERS", json.dumps(tiers))
    said = Below.of({"codec": "none"})
    filled = said.filled_in("{dp_rank}", "3").settings
    assert said.settings is not None
    assert filled is not None
    nvme, s3 = (tier.model_dump() for tier in filled.tiers)
    assert (nvme["path"], s3["url"], s3["max_retries"]) == (Path("/kv/3"), "s3://kv/3", 0)
    assert [each.model_fields_set for each in filled.tiers] == [each.model_fields_set for each in said.settings.tiers]
    assert filled.model_fields_set == said.settings.model_fields_set
