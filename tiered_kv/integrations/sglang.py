"""SGLang's HiCache with our tiers as its storage: a backend of kind ``dynamic``, interface v1.

SGLang keeps pages in a host pool of its own, and asks storage for runs of them by the hashes of its tree. Pages move
between the tiers and that pool where they lie, in whichever order of axes it has; blocks are the same bytes in each.

SGLang calls from threads of its own, one that looks up, one that loads and one that stores. Nothing here is raised at
them for a tier: what does not arrive, or find room, is answered with False, and computed.
"""

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.version import __version__ as _version

from tiered_kv.cache.blocking import BlockingTieredKV, open_blocking
from tiered_kv.integrations.identity import Below, checkpoint_weights
from tiered_kv.settings.tier_settings import BookedTierSettings
from tiered_kv.values.errors import ClosedError, ConfigurationError
from tiered_kv.values.keys import BlockKeys, ModelIdentity, Shard
from tiered_kv.values.layout import KVGroup, KVLayout
from tiered_kv.values.results import BlockState
from tiered_kv.values.specs import CPULoadStoreSpec

_VERSION: Final = "0.5.23"
_POOL: Final = "hicache"
_AXES: Final = {
    ("layer_first", False): "PLBNHD",
    ("page_first", False): "PBNLHD",
    ("page_first_direct", False): "PBLNHD",
    ("layer_first", True): "LBND",
    ("page_first", True): "BNLD",
    ("page_first_direct", True): "BLND",
}
"""Of a host pool, by its layout and whether it holds MLA latents."""


class TieredKVStorage(HiCacheStorage):  # type: ignore[misc]  # what SGLang gives is not typed
    """A storage backend of HiCache. SGLang makes it, in each rank's process; see the guide for its configuration.

    Of ``--hicache-storage-backend-extra-config`` the key ``tiered_kv`` is ours: fields of `TieredKVSettings`, or
    ``connect``, the address of a host's server, in the place of these; and ``weights``, a name of the weights where it
    is not to be told from the checkpoint. In all of its texts ``{rank}`` becomes the process's own, for directories.
    Without it settings come from the environment.

    Attributes:
        kv: The cache below, from the registration of the host pool until `close`; else None.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:  # noqa: ANN401 - SGLang's
        """Check what SGLang wants; nothing is opened before it registers its host pool.

        Raises:
            ConfigurationError: Another SGLang, another interface, or settings that can't work.
        """
        if _version != _VERSION:
            raise ConfigurationError(f"this adapter is made for SGLang {_VERSION}, and this is SGLang {_version}")
        extra = dict(storage_config.extra_config or {})
        if storage_config.dcp_size > 1:
            raise ConfigurationError(
                f"decode context parallelism over {storage_config.dcp_size} ranks is not served: a page is in pieces"
            )
        if not extra.get("interface_v1"):
            raise ConfigurationError('this adapter has interface v1: add "interface_v1": 1 to the extra config')
        ranks = [getattr(storage_config, f"{kind}_rank") for kind in ("dp", "pp", "attn_cp", "tp")]
        given = _in_all_texts(extra.get("tiered_kv") or {}, "{rank}", "-".join(map(str, ranks)))
        self._weights = given.pop("weights", None)
        self._below = Below.of(given or None)
        self._config = storage_config
        self.kv: BlockingTieredKV | None = None
        self._stack = ExitStack()
        self._closing = threading.Lock()

    # What SGLang calls.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:  # noqa: ANN401 - SGLang's
        """Open the cache, with SGLang's host pool as memory to load into and to store from.

        Raises:
            ConfigurationError: Pages that can't be kept, weights that nobody named, or tiers that can't serve ranks.
            BackendUnavailableError: A tier cannot be reached.
        """
        super().register_mem_pool_host(mem_pool_host)
        config = self._config
        is_mla = bool(config.is_mla_model)
        group, axes = _group_of(mem_pool_host, is_mla=is_mla)
        if config.is_mla_model and config.tp_size > 1:
            own = self._below.settings
            if own is not None and all(isinstance(tier, BookedTierSettings) for tier in own.tiers):
                raise ConfigurationError(
                    f"SGLang has one of {config.tp_size} ranks store MLA latents: the others find them in a shared "
                    "tier only (shared_fs, s3, redis, mooncake), and there is none"
                )
            shard = Shard()  # SGLang decides who writes; all ranks read the same blocks
        else:
            shard = Shard(config.tp_rank, config.tp_size)
        cache = self._below.cache(
            model=_identity(config, mem_pool_host, self._weights),
            layout=KVLayout((group,)),
            shard=shard,
            device="cpu",  # what is on a GPU is SGLang's to move
        )
        self._page_size = group.block_size
        kv = self._stack.enter_context(open_blocking(cache))
        try:
            kv.register_host_pool(_POOL, _pages(mem_pool_host, axes), axes=axes)
        except BaseException:
            self._stack.close()
            raise
        self.kv = kv  # closed when the program ends, whoever forgot to

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:  # noqa: ANN401 - SGLang's
        """Refuse a second host pool: its pages would be missing beside those that are kept.

        Raises:
            ConfigurationError: It is another than the one that `register_mem_pool_host` has got.
        """
        if host_pool is not self.mem_pool_host:
            raise ConfigurationError(
                f"models with a host pool {str(host_pool_name)!r} beside their KV (windows, states, indexes) are not "
                "served: use another storage backend"
            )

    def batch_exists(self, keys: Sequence[str], extra_info: object = None) -> int:
        """Count the leading pages that can be loaded, or that pay, where it is said how fast SGLang computes.

        It loads what is counted here, and computes the others.
        """
        if (kv := self.kv) is None:
            return 0
        try:
            found = kv.lookup(self._keys(keys, extra_info))
        except ClosedError:
            return 0
        own = self._below.settings
        if own is None or not own.prefill_tokens_per_s or not found.num_blocks:
            return found.num_blocks
        return found.split(prefill_tokens_per_s=own.prefill_tokens_per_s).num_blocks

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: object = None) -> list[bool]:  # noqa: ANN401 - a tensor
        """Load pages into SGLang's host pool; say which are in place: a prefix.

        Args:
            keys: Hashes of the pages, in hexadecimal.
            host_indices: ``(len(keys) * page_size,)`` token slots of the pool, page by page.
            extra_info: What SGLang says of the pages before these.
        """
        num_blocks = 0
        if (kv := self.kv) is not None:
            with suppress(ClosedError):
                num_blocks = kv.load(self._keys(keys, extra_info), self._spec(host_indices)).num_blocks
        return [number < num_blocks for number in range(len(keys))]

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: object = None) -> list[bool]:  # noqa: ANN401 - a tensor
        """Store pages of SGLang's host pool; say which are kept. The pages are free again when this returns."""
        if (kv := self.kv) is None:
            return [False] * len(keys)
        if not self._config.is_storage_writer:
            return [True] * len(keys)  # another rank writes them, for all
        named = self._keys(keys, extra_info)
        try:
            if not kv.store(named, self._spec(host_indices)).num_dropped:
                return [True] * len(keys)
            return [bool(state >= BlockState.PENDING) for state in kv.membership(named)]
        except ClosedError:
            return [False] * len(keys)

    def clear(self) -> None:
        """Empty the tiers that this process owns."""
        if (kv := self.kv) is not None:
            with suppress(ClosedError):
                kv.clear()

    def close(self) -> None:
        """End: what is being written is, within `CacheLimits.close_timeout_s`. Any thread may call, and again."""
        with self._closing:
            self.kv = None
            self._stack.close()

    def exists(self, key: str) -> bool:
        """Say whether a page can be loaded."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: object = None, target_sizes: object = None) -> None:
        """Do nothing: interface v1 does not get pages so. The next three neither."""

    def batch_get(
        self, keys: Sequence[str], target_locations: object = None, target_sizes: object = None
    ) -> list[None]:
        """Return nothing for each page."""
        return [None] * len(keys)

    def set(self, key: str, value: object = None, target_location: object = None, target_sizes: object = None) -> bool:
        """Keep nothing."""
        return False

    def batch_set(
        self,
        keys: Sequence[str],
        values: object = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Keep nothing."""
        return False

    # What they do.

    def _keys(self, keys: Sequence[str], extra_info: object) -> BlockKeys:
        before = getattr(extra_info, "prefix_keys", None) or ()  # SGLang says them where it is asked to
        return BlockKeys.from_hashes(map(bytes.fromhex, keys), block_size=self._page_size, start=len(before))

    def _spec(self, host_indices: Any) -> CPULoadStoreSpec:  # noqa: ANN401 - a tensor
        return CPULoadStoreSpec((host_indices[:: self._page_size] // self._page_size).tolist(), pool=_POOL)


def _group_of(pool: Any, *, is_mla: bool) -> tuple[KVGroup, str]:  # noqa: ANN401 - SGLang's
    """Return what a page of a host pool is made of, and the axes of its memory.

    Raises:
        ConfigurationError: Pages of another kind.
    """
    axes = _AXES.get((pool.layout, is_mla))
    if axes is None:
        known = ", ".join(layout for layout, mla in _AXES if not mla)
        raise ConfigurationError(f"hicache_mem_layout={pool.layout!r} is not served; these are: {known}")
    if getattr(pool, "kv_buffer", None) is None or not hasattr(pool.kv_buffer, "data_ptr"):
        raise ConfigurationError(f"{type(pool).__name__} has no memory of one tensor: it is not served")
    if is_mla:
        heads, dim = 1, pool.kv_cache_dim
    elif pool.head_dim != pool.v_head_dim:
        raise ConfigurationError(f"keys of {pool.head_dim} and values of {pool.v_head_dim} a head are not served")
    else:
        heads, dim = pool.head_num, pool.head_dim
    group = KVGroup(
        num_layers=pool.layer_num,
        num_kv_heads=heads,
        head_dim=dim,
        dtype=str(pool.dtype).removeprefix("torch."),
        block_size=pool.page_size,
        order="MLA" if is_mla else "NHD",
    )
    return group, axes


def _pages(pool: Any, axes: str) -> Any:  # noqa: ANN401 - SGLang's, a tensor
    """See a host pool's memory, in which tokens may follow each other over pages, page by page. Copies nothing."""
    sizes = {"P": 2, "L": pool.layer_num, "B": pool.page_num, "N": pool.page_size}
    heads = {"H": getattr(pool, "head_num", 1), "D": pool.kv_cache_dim if "H" not in axes else pool.head_dim}
    return pool.kv_buffer.view([{**sizes, **heads}[axis] for axis in axes])


def _identity(config: Any, pool: Any, weights: str | None) -> ModelIdentity:  # noqa: ANN401 - SGLang's
    """Say which weights, and which part of them, compute the pages.

    Raises:
        ConfigurationError: There is no telling, and nobody named them.
    """
    from sglang.srt.runtime_context import get_server_args  # noqa: PLC0415 - by now the engine has begun

    facts = {"pp": f"{config.pp_rank}/{config.pp_size}", "cp": f"{config.attn_cp_rank}/{config.attn_cp_size}"}
    facts["format"] = str(pool.storage_format_tag)
    try:
        arguments = get_server_args()
    except Exception:  # noqa: BLE001 - there is no engine, only its controller
        arguments = None
    for name in ("quantization", "json_model_override_args", "speculative_draft_model_path", "kv_cache_dtype"):
        facts[name] = str(getattr(arguments, name, None))
    path = str(getattr(arguments, "model_path", None) or config.model_name or "")
    if weights is None:
        weights = checkpoint_weights(_folder_of(path, getattr(arguments, "revision", None)))
    return ModelIdentity(Path(path).name or "model", weights, extra=tuple(sorted(facts.items())))


def _folder_of(path: str, revision: str | None) -> str:
    """Return the folder of a checkpoint: its path, or where the hub's client keeps it.

    Raises:
        ConfigurationError: It is nowhere on this host.
    """
    if Path(path).is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - SGLang brings it

        return str(snapshot_download(path, revision=revision, local_files_only=True))
    except Exception as error:
        raise ConfigurationError(
            f'the checkpoint {path!r} is no folder here ({error}): name its weights by "tiered_kv": {{"weights": ...}}'
        ) from error


def _in_all_texts(value: Any, old: str, new: str) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, Mapping):
        return {key: _in_all_texts(each, old, new) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_in_all_texts(each, old, new) for each in value]
    return value
