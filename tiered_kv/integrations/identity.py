"""Which weights a model has, told from its checkpoint's files, for `ModelIdentity`.

Two fine-tunes of one model have files of the same names, sizes and headers, so some of each tensor's bytes are read
too: a page from its middle. That takes a few milliseconds a gigabyte, where a digest of everything takes a second.

What is below an engine: a cache of its own, or the one that a server of this host keeps, by one setting. And what else
adapters read of their settings alike.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

from pydantic import BaseModel

from tiered_kv.cache.block_cache import BlockCache
from tiered_kv.cache.tiered_kv import TieredKV
from tiered_kv.memory.gpu import DeviceLike
from tiered_kv.settings.settings import TieredKVSettings
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.keys import ModelIdentity, Shard
from tiered_kv.values.layout import PAGE_BYTES, KVLayout

CONNECT: Final = "connect"
"""The setting: the address of a server, in the place of all others."""
TOKENS_PER_STATE: Final = 2048
"""Engines keep states of Mamba, or of linear attention, at ends of prompts and of chunks, not behind each block."""


def state_slots(block_size: int, tokens_per_state: int) -> float:
    """Return `KVGroup.slots_per_block` of states, of which there is one for so many tokens."""
    return min(1.0, block_size / tokens_per_state)


def in_all_texts(value: Any, old: str, new: str) -> Any:  # noqa: ANN401 - JSON
    """Put one text for another in all texts and paths of some settings: processes have directories of their own by it.

    Of settings that were read what has no such text stays as it was given, or left out.
    """
    if isinstance(value, str | Path):
        return type(value)(str(value).replace(old, new))
    if isinstance(value, Mapping):
        return {key: in_all_texts(each, old, new) for key, each in value.items()}
    if isinstance(value, BaseModel):
        filled = {name: (each, in_all_texts(each, old, new)) for name, each in value}
        return value.model_copy(update={name: each for name, (before, each) in filled.items() if each != before})
    return type(value)(in_all_texts(each, old, new) for each in value) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Below:
    """Settings of a cache, or the address of a server that has settings of its own.

    Attributes:
        settings: Of a cache of the engine's own; None with a server.
        url: Of the server; empty without one.
    """

    settings: TieredKVSettings | None
    url: str = ""

    @classmethod
    def of(cls, given: TieredKVSettings | Mapping[str, Any] | None) -> Self:
        """Read what an engine was given; the environment if that is nothing.

        Raises:
            ConfigurationError: Settings that cannot work, or some beside ``connect``.
        """
        if not isinstance(given, Mapping) or CONNECT not in given:
            return cls(TieredKVSettings.of(given))
        if others := sorted(given.keys() - {CONNECT}):
            raise ConfigurationError(
                f"{CONNECT!r} is for blocks that a server of this host keeps, which has settings of its own: leave out "
                f"{', '.join(others)}"
            )
        return cls(None, str(given[CONNECT]))

    def filled_in(self, old: str, new: str) -> Self:
        """Return it with a text put for another in its settings, those of the environment too."""
        return replace(self, settings=in_all_texts(self.settings, old, new))

    def cache(
        self,
        *,
        model: ModelIdentity,
        layout: KVLayout,
        shard: Shard | tuple[Shard, ...] | None = None,
        device: DeviceLike | None = None,
    ) -> BlockCache:
        """Return the cache, as `TieredKV.from_settings` or `TieredKV.connect` does.

        Raises:
            ConfigurationError: It cannot be.
        """
        if self.settings is None:
            return TieredKV.connect(self.url, model=model, layout=layout, shard=shard, device=device)
        return TieredKV.from_settings(self.settings, model=model, layout=layout, shard=shard, device=device)


_ADAPTER_CONFIG: Final = "adapter_config.json"
"""Beside a LoRA adapter's weights: its rank and scaling, for example."""
_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".gguf", ".pth")
"""Of files that hold weights. Of several kinds beside each other the first is what engines load."""
_LOADED_BY: Final = {"pt": (".pt",), "npcache": (".bin",), "gguf": (".gguf",)}
"""Of engines' formats to load weights by: which kinds some load, whatever lies beside them."""
_CODE: Final = "**/*.py"
"""Of a checkpoint, which engines run where its code is trusted."""
_OF_THE_HUB: Final = "models--*/snapshots/*"
"""How paths end of what the hub's client keeps: of a commit such files as were asked for on this host."""
_COMMIT: Final = re.compile("[0-9a-f]{40}")
_OF_ANOTHER: Final = "--"
"""Between the name of a checkpoint and that of a class of its code, in the config of another."""
_SAMPLES: Final = 1024
"""Pages read of a file that does not say where its tensors are."""
_MOST_HEADER_BYTES: Final = 100_000_000
"""That a safetensors file may have, as its format says."""


def folder_of(name: str, revision: str | None = None) -> str | None:
    """Return the folder of a checkpoint or an adapter on this host: its path, or where the hub's client keeps it.

    None if it is nowhere.
    """
    if os.path.isdir(name):  # noqa: PTH112 - the name of a model is no path, and may be too long for one
        return name
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - engines bring it, and not every model comes from it

    try:
        return str(snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError):  # not there, or no name of a model there
        return None


def digest_of(facts: Mapping[str, Any]) -> str:
    """Digest what else changes KV, by name, in hexadecimal."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def checkpoint_weights(folder: str | Path, load_format: str = "auto") -> str:
    """Name the weights in a checkpoint's folder: the same on every host that has the same files, wherever they lie.

    Made of ``config.json``, the names and sizes of the files with weights, and 4 KiB from the middle of each tensor: a
    change of fewer bytes, by hand, can stay unseen, so name such weights yourself. What was changed after loading, or
    is beside the checkpoint (a LoRA), is not in the name either.

    Args:
        folder: With the files as engines load them: ``.safetensors``, or else torch's own or GGUF.
        load_format: Of vLLM and SGLang: with ``pt``, ``npcache`` or ``gguf`` they load one kind of files alone.

    Returns:
        ``"files:"`` and a SHA-256 in hexadecimal, for `ModelIdentity.weights`.

    Raises:
        ConfigurationError: There is no folder or no weights in it, a file can't be read, or is cut off.
    """
    try:
        suffixes = _LOADED_BY.get(load_format, _SUFFIXES)
        found = sorted(path for path in Path(folder).iterdir() if path.suffix in suffixes and path.is_file())
        kinds = {path.suffix for path in found}
        kind = next((suffix for suffix in suffixes if suffix in kinds), None)
        if kind is None:
            raise ConfigurationError(
                f"no file in {str(folder)!r} holds weights ({', '.join(suffixes)}), so what computes the KV is not "
                "known: name the weights yourself, by anything that changes when they do"
            )
        digest = hashlib.sha256(b"tiered_kv checkpoint v1")
        config = Path(folder) / "config.json"
        digest.update(hashlib.sha256(config.read_bytes() if config.exists() else b"").digest())
        for path in found:
            if path.suffix == kind:
                _add(digest, path)
    except OSError as error:
        raise ConfigurationError(f"the weights in {str(folder)!r} can't be read: {error}") from error
    return f"files:{digest.hexdigest()}"


def adapter_weights(folder: str | Path) -> str:
    """Name the weights in a LoRA adapter's folder, and how much of them is added: by its files, wherever they lie.

    Raises:
        ConfigurationError: As `checkpoint_weights`, or there is no configuration.
    """
    weights = checkpoint_weights(folder)
    return f"{weights}, {file_digest(Path(folder) / _ADAPTER_CONFIG, f'the adapter in {str(folder)!r}')}"


def file_digest(path: str | Path, what: str) -> str:
    """Digest what is in a file, in hexadecimal.

    Raises:
        ConfigurationError: It can't be read.
    """
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigurationError(f"{what} can't be read: {error}") from error


def file_digests(folder: str | Path, *patterns: str) -> dict[str, str]:
    """Digest the files in a folder that have such names, by name.

    Raises:
        ConfigurationError: One can't be read.
    """
    files = (file for pattern in patterns for file in Path(folder).glob(pattern) if file.is_file())
    return {str(file.relative_to(folder)): file_digest(file, str(file)) for file in files}


def code_of(folder: str | Path, revision: str | None = None) -> object:
    """Tell the code of a checkpoint's folder, and that of others of the hub which its config names classes of.

    By its files, or the commit in whose name the hub's client keeps some.

    Args:
        folder: The checkpoint's.
        revision: Of the others; else the newest that is on this host, as engines take it.

    Raises:
        ConfigurationError: A file can't be read.
    """
    path = Path(folder)
    others = {name: folder_of(name, revision) for name in _others_of(path)}
    told = {name: "" if there is None else _code_in(Path(there)) for name, there in others.items()}
    return [_code_in(path), told] if told else _code_in(path)


def commit_in(names: Iterable[str]) -> str:
    """Return the commit among some names, of folders or modules; nothing if none is one."""
    return next(filter(_COMMIT.fullmatch, names), "")


def _code_in(path: Path) -> dict[str, str] | str:
    return path.name if path.match(_OF_THE_HUB) and commit_in([path.name]) else file_digests(path, _CODE)


def _others_of(path: Path) -> set[str]:
    """Return the checkpoints of the hub that a config, if it can be read, names classes of."""
    try:
        classes = json.loads((path / "config.json").read_bytes())["auto_map"].values()
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return set()
    named = (each for some in classes for each in (some if isinstance(some, list) else [some]))
    return {each.partition(_OF_ANOTHER)[0] for each in named if isinstance(each, str) and _OF_ANOTHER in each}


def _add(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        header, places = _tensors(file, path, size) if path.suffix == ".safetensors" else (b"", _spread(size))
        digest.update(json.dumps([path.name, size, len(header)]).encode() + header)
        for start, num_bytes in places:
            file.seek(min(start, size))
            page = file.read(num_bytes)
            if len(page) < num_bytes:
                raise ConfigurationError(f"{path} ends within a tensor, at byte {start + len(page)}: is it complete?")
            digest.update(page)


def _tensors(file: BinaryIO, path: Path, size: int) -> tuple[bytes, list[tuple[int, int]]]:
    """Read a safetensors header; return it, and the bytes in the middle of each tensor as (start, length)."""
    num_bytes = int.from_bytes(file.read(8), "little")
    header = file.read(num_bytes) if num_bytes <= min(_MOST_HEADER_BYTES, size - 8) else b""
    try:
        offsets = [each["data_offsets"] for name, each in json.loads(header).items() if name != "__metadata__"]
        data = 8 + num_bytes
        return header, [_middle(data + index(start), data + index(stop)) for start, stop in sorted(offsets)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} is no safetensors file, or cut off: {size} bytes, of which {num_bytes} are to be the header"
        ) from error


def _middle(start: int, stop: int) -> tuple[int, int]:
    if not 0 <= start <= stop:
        raise ValueError
    num_bytes = min(stop - start, PAGE_BYTES)
    return start + (stop - start - num_bytes) // 2, num_bytes


def _spread(size: int) -> Iterator[tuple[int, int]]:
    step = max(size // _SAMPLES, PAGE_BYTES)
    return ((start, min(PAGE_BYTES, size - start)) for start in range(0, size, step))
