"""What is wanted of the connector, checked at start: what cannot work is refused before a request comes."""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tiered_kv.integrations.identity import CONNECT, TOKENS_PER_STATE, Below, in_all_texts
from tiered_kv.integrations.vllm.compatibility import VERSION
from tiered_kv.integrations.vllm.model_identity import model_identity
from tiered_kv.settings.setting_errors import Checked, hint
from tiered_kv.settings.settings import CacheLimits, Seconds
from tiered_kv.settings.tier_settings import StorageTierSettings
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.hints import StoreWhen
from tiered_kv.values.keys import ModelIdentity

GATHERED_S: Final = 1.0
"""For how long blocks gather in host memory before they are written to storage, where it has room for them."""
RANK: Final = "{dp_rank}"
"""Of data parallelism, in texts that ask for it: each replica has tiers of its own on one machine."""
STAGES_ARE_EQUAL: Final = "all stages must have as many layers of each kind: choose another pipeline_parallel_size"
_WITHOUT: Final = "Serve this model without this connector"
CACHE_SETTINGS: Final = {"tiers", "limits", "codec", CONNECT}
"""What of the settings is the cache's, and not the adapter's."""


class ConnectorSettings(Checked):
    """What ``kv_connector_extra_config`` may say, beside ``tiers``, ``limits`` and ``codec`` of `TieredKVSettings`.

    Or beside ``connect``, the address of a host's server that has them.
    """

    weights: str | None = None
    """Names the weights; read off the checkpoint's files if left out."""
    lookup_timeout_s: Seconds = 1.0
    """How long a request waits for tiers shared with others to say what they have; then it goes on without them."""
    store_when: StoreWhen = "auto"
    """``"computed"``: blocks are stored as steps fill them; or ``"evicted"``: when vLLM is about to drop them, so that
    memory below has what vLLM has not, and what only vLLM has is lost with it. ``"auto"``: the latter where there are
    memory tiers alone, no other engine's, that hold less than four times what vLLM does. For models with one KV group
    that needs all its blocks; of others blocks are stored as they are computed. With ``"auto"`` stores also stop, but
    for a few, while for long nothing comes back."""
    store_generated: bool = True
    """Whether blocks that have tokens of answers are stored, or those of prompts alone: a next turn finds the answer
    before it, and reasoning that no next prompt repeats is stored for nothing."""
    load_when: Literal["always", "auto"] = "auto"
    """``"auto"``: what is found is loaded as far as that takes less time than to compute it; or all of it, always."""
    load_timeout_s: Seconds = 5.0
    """How long a request waits for its blocks to be in host memory; then they are computed."""
    tokens_per_state: Annotated[int, Field(ge=1)] = TOKENS_PER_STATE
    """Each tier of the cache's own has room for one state of Mamba, or of linear attention, for so many tokens of K and
    V, and for one end of each window that is shorter than other layers' blocks (DeepSeek V4): what is not kept of one
    takes no room from the other."""
    hint_share: Annotated[float, Field(ge=0, le=0.5)] = 0.125
    """Of the CPU tier, what KV hints of one tenant, a salt, may keep or bring at once; those of all tenants have half.
    0: hints are not read."""


@dataclass(frozen=True)
class EngineGroup:
    """Layers of one block table of vLLM's, with pages of one size: a KV group of ours.

    Attributes:
        number: Of the group, in our layout.
        table: Which of vLLM's block tables.
        block_size: Tokens of one of vLLM's blocks, which are ours.
        hashes_per_block: vLLM's hashes a block.
        layer_names: Of its layers.
        page_bytes: Of one layer's part of a block.
        num_blocks: How many of the last blocks of a prefix a request needs to go on behind it; None: all.
        is_handed_over: Whether vLLM says which blocks to store, as they are in no table.
        chunk_tokens: Of these no more than its last chunk of so many tokens; None: there are no chunks.
        are_copies: Whether all tensor parallel ranks hold the same, as of latents.
    """

    number: int
    table: int
    block_size: int
    hashes_per_block: int
    layer_names: tuple[str, ...]
    page_bytes: int
    num_blocks: int | None = None
    is_handed_over: bool = False
    chunk_tokens: int | None = None
    are_copies: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether a request needs all blocks of a prefix, and keeps them."""
        return self.num_blocks is None and self.chunk_tokens is None

    def num_left(self, num_tokens: int) -> int:
        """Count the first blocks that are of no use to a request behind so many tokens: it gives them back."""
        if self.is_whole:
            return 0
        if self.chunk_tokens is not None:
            return num_tokens // self.chunk_tokens * self.chunk_tokens // self.block_size
        return max(0, (num_tokens - 1) // self.block_size + 1 - (self.num_blocks or 0))


@dataclass(frozen=True)
class Configuration:
    """What both sides of the connector go by.

    Attributes:
        connector: How it behaves.
        below: What the cache is made of, or whose it is.
        model: Whose blocks these are.
        num_ranks: Workers that have a part of each block: of each pipeline stage its tensor parallel ranks.
        num_stages: Of pipeline parallelism.
        groups: The KV groups.
        tables: Of vLLM's block tables, those that nothing is kept of included: tokens of a block, and how many blocks a
            request has at once at most.
        num_engine_blocks: In vLLM's cache.
        num_step_blocks: That a step may fill.
        loads: Whether anything is loaded.
        stores: Whether anything is stored.
        tells_events: Whether vLLM publishes KV events.
        writes_first: Whether vLLM's model runner writes to blocks that it hands out anew (empties them, copies to them)
            before it tells the workers whose they were: its second one does.
        is_async: Whether vLLM schedules a step before it has the output of the one before it.
        retention_tokens: vLLM's ``--prefix-cache-retention-interval``: of short windows what a prefix needs that ends
            behind so many tokens, or a multiple; 0: none of that; None: wherever one may end.
    """

    connector: ConnectorSettings
    below: Below
    model: ModelIdentity
    num_ranks: int
    num_stages: int
    groups: tuple[EngineGroup, ...]
    tables: tuple[tuple[int, int], ...]
    num_engine_blocks: int
    num_step_blocks: int
    loads: bool
    stores: bool
    tells_events: bool
    writes_first: bool
    is_async: bool
    retention_tokens: int | None = None

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any) -> Self:
        """Read vLLM's configuration.

        Raises:
            ConfigurationError: Something in it cannot work, or would give wrong answers.
        """
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            raise ConfigurationError(
                f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: then vLLM answers a request with "
                'nothing where a block is gone between its lookup and its load. Set it to "recompute"'
            )
        parallel = vllm_config.parallel_config
        _check_parallel(parallel)
        _check_hashes(vllm_config.cache_config)
        _check_prefixes(vllm_config)
        _check_images(vllm_config)
        _check_sleep(vllm_config.model_config)
        groups = _groups_of(kv_cache_config)
        rank = RANK, str(parallel.data_parallel_index)
        extra = in_all_texts(dict(transfer.kv_connector_extra_config), *rank)
        connector, below = settings_of(extra)
        return cls(
            connector=connector,
            below=below.filled_in(*rank),
            model=model_identity(vllm_config, connector.weights),
            num_ranks=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
            num_stages=parallel.pipeline_parallel_size,
            groups=groups,
            tables=tuple(_table_of(group.kv_cache_spec, vllm_config) for group in kv_cache_config.kv_cache_groups),
            num_engine_blocks=kv_cache_config.num_blocks,
            num_step_blocks=vllm_config.scheduler_config.max_num_batched_tokens // groups[0].block_size,
            loads=transfer.is_kv_consumer,
            stores=transfer.is_kv_producer,
            tells_events=bool(getattr(vllm_config.kv_events_config, "enable_kv_cache_events", False)),
            writes_first=bool(vllm_config.use_v2_model_runner),
            is_async=bool(vllm_config.scheduler_config.async_scheduling),
            retention_tokens=kv_cache_config.prefix_cache_retention_interval,
        )

    @cached_property
    def num_parts(self) -> int:
        """Of a block: of each pipeline stage one for each tensor parallel rank, or one that all of these hold."""
        return self.num_stages if all(group.are_copies for group in self.groups) else self.num_ranks

    @cached_property
    def step(self) -> int:
        """Tokens: a prefix of so many, or a multiple, is whole blocks of every group."""
        return math.lcm(*(group.block_size for group in self.groups))

    @cached_property
    def finest(self) -> int:
        """Tokens: no block of any group is to be stored where there are not so many, or a multiple."""
        return math.gcd(*(self.step if self._is_of_ends(group) else group.block_size for group in self.groups))

    @cached_property
    def has_ends(self) -> bool:
        """Whether there are windows of which little is stored, see `stored_of`."""
        return any(self._is_of_ends(group) for group in self.groups)

    def _is_of_ends(self, group: EngineGroup) -> bool:
        """Whether it is a window that is shorter than a step: of most of its blocks no prefix has a use."""
        is_window = group.num_blocks is not None and not group.is_handed_over
        return is_window and (group.num_blocks or 0) * group.block_size < self.step

    def stored_of(self, group: EngineGroup, blocks: range, ends: Iterable[int]) -> list[range]:
        """Return which of a request's blocks to store, as runs: all but of a window that is shorter than a step.

        Such a window's are few tokens each, of as many bytes as others' blocks. As in vLLM's own cache those are kept
        that a prefix needs which ends where some are likely to, and by `retention_tokens`.

        Args:
            group: Of the blocks.
            blocks: By number.
            ends: Tokens: where prefixes of this one are likely to end.
        """
        if not self._is_of_ends(group):
            return [blocks]
        stops = {end // self.step * self.step // group.block_size for end in ends}
        if every := (self.step if self.retention_tokens is None else self.retention_tokens) // group.block_size:
            stops.update(range((blocks.start // every + 1) * every, blocks.stop + every, every))
        runs, first = list[range](), blocks.start
        for stop in sorted(stops):
            run = range(max(first, stop - (group.num_blocks or 0)), min(stop, blocks.stop))
            if run:
                runs.append(run)
                first = run.stop
        return runs

    def slots_per_block(self, group: EngineGroup) -> float:
        """Return how many slots a group has in tiers, see `KVGroup`."""
        return self._per_token(group) / max(self._per_token(each) for each in self.groups)

    def _per_token(self, group: EngineGroup) -> float:
        """Return how many blocks are kept for each token: all, or those of one state or end of a window for so many."""
        if not (group.is_handed_over or self._is_of_ends(group)):
            return 1 / group.block_size
        every = max(self.connector.tokens_per_state, self.step, self.retention_tokens or 0)
        return min(1 / group.block_size, (group.num_blocks or 1) / every)

    @cached_property
    def tail_tokens(self) -> int:
        """Tokens: a prefix of so many, or a multiple, may end inside of a block; 0 where none may.

        So it is where vLLM matches prefixes by less than a block (``--prefix-match-unit``): of a recurrent state it
        hands over the one at a prompt's end then, and attention has all tokens before it.
        """
        sizes = {(group.block_size, group.hashes_per_block) for group in self.groups}
        if not self.has_states or len(sizes) > 1:
            return 0
        ((block_size, num_hashes),) = sizes
        is_able = num_hashes > 1 and all(group.is_whole or group.is_handed_over for group in self.groups)
        return block_size // num_hashes if is_able else 0

    @cached_property
    def loads_parts(self) -> bool:
        """Whether a load that brings a part of a prefix is of use: where one group needs all blocks, and no other."""
        return len(self.tables) == len(self.groups) == 1 and self.is_whole

    @cached_property
    def loads_first(self) -> bool:
        """Whether a step may begin with a load that it computes with; else requests wait for theirs beside steps.

        Not where a host's server may go before it has begun, and a step more is scheduled by then: vLLM computes anew
        what the first of them had, and answers with the token that the other has made of it.
        """
        return self.loads_parts and (self.below.settings is not None or not self.is_async)

    @cached_property
    def is_whole(self) -> bool:
        """Whether every group is: then no request gives back a block before it ends."""
        return all(group.is_whole for group in self.groups)

    @cached_property
    def has_states(self) -> bool:
        """Whether there are groups whose blocks vLLM hands over."""
        return any(group.is_handed_over for group in self.groups)

    @cached_property
    def main(self) -> EngineGroup:
        """The group whose blocks are counted: one that needs them all, if there is one."""
        return next((group for group in self.groups if group.is_whole), self.groups[0])


def settings_of(given: Mapping[str, Any]) -> tuple[ConnectorSettings, Below]:
    """Read ``kv_connector_extra_config``: how the connector behaves, and what is below it.

    Raises:
        ConfigurationError: A setting is unknown, or cannot work.
    """
    known = {*CACHE_SETTINGS, *ConnectorSettings.model_fields}
    if unknown := sorted(given.keys() - known):
        word = unknown[0]
        is_limit = word in CacheLimits.model_fields
        meant = f": did you mean 'limits.{word}'?" if is_limit else hint(word, known)
        raise ConfigurationError(f"{word}: there is no such setting of the connector{meant}")
    connector = ConnectorSettings(**{key: given[key] for key in given if key not in CACHE_SETTINGS})
    return connector, below_of({key: given[key] for key in given if key in CACHE_SETTINGS})


def below_of(given: Mapping[str, Any]) -> Below:
    """Return what is below a vLLM. Where nobody says when storage is written, that is by windows, once a second.

    Each write tells the event loop, which takes the interpreter from vLLM's own thread; blocks that steps fill are few.

    Raises:
        ConfigurationError: Settings that cannot work, or some beside ``connect``.
    """
    below = Below.of(given)
    settings = below.settings
    if settings is None or "clean_after_s" in settings.limits.model_fields_set:
        return below
    if any("write" in tier.model_fields_set for tier in settings.tiers):
        return below
    tiers = tuple(
        tier.model_copy(update={"write": "back"})
        if isinstance(tier, StorageTierSettings) and not tier.read_only
        else tier
        for tier in settings.tiers
    )
    limits = settings.limits.model_copy(update={"clean_after_s": GATHERED_S})
    return replace(below, settings=settings.model_copy(update={"tiers": tiers, "limits": limits}))


def _check_parallel(parallel: Any) -> None:
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            raise ConfigurationError(
                f"{name} is {size}: then a block's tokens lie on {size} ranks. tiered_kv keeps blocks whose layers or "
                "heads do, of pipeline, tensor and data parallelism"
            )


def _check_hashes(cache: Any) -> None:
    algorithm = str(cache.prefix_caching_hash_algo)
    if not algorithm.startswith("sha256") and "PYTHONHASHSEED" not in os.environ:
        raise ConfigurationError(
            f"prefix_caching_hash_algo is {algorithm!r}: without PYTHONHASHSEED it names blocks anew in each process, "
            'so that nothing is found after a restart. Set it to "sha256"'
        )


def _check_prefixes(vllm_config: Any) -> None:
    if not vllm_config.cache_config.enable_prefix_caching and not vllm_config.scheduler_config.enable_chunked_prefill:
        raise ConfigurationError(
            "prefix caching and chunked prefill are both off: vLLM turns them off where it computes a prompt in one "
            "piece only (MLA on a CPU, layers that are not causal), and would answer wrongly after a prefix that was "
            "loaded. If it was you, turn one of them on; else serve this model without this connector"
        )


def _check_images(vllm_config: Any) -> None:
    """Refuse images that vLLM names by counting them in each process: the next one's first would be this one's.

    Those that come as embeddings have such names too, and with ``language_model_only`` vLLM 0.32 takes them always.
    """
    images = getattr(vllm_config.model_config, "multimodal_config", None)
    if images is None or (images.language_model_only and not images.enable_mm_embeds):
        return
    if images.mm_processor_cache_gb == 0 and not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigurationError(
            "prefix caching is off and mm_processor_cache_gb is 0: then vLLM numbers images, videos and sounds anew in "
            "each process, and after a restart one would be answered with another's blocks. Turn either on, or take "
            "text alone, from vLLM 0.33 on: --language-model-only without --enable-mm-embeds"
        )


def _check_sleep(model: Any) -> None:
    """Refuse to sleep where vLLM tells its connectors nothing of it: a copy would read memory that is gone."""
    if VERSION == "0.32" and getattr(model, "enable_sleep_mode", False):
        raise ConfigurationError("enable_sleep_mode: vLLM 0.32 sleeps beside copies under way; 0.33 waits for them")


def _groups_of(kv_cache_config: Any) -> tuple[EngineGroup, ...]:
    """Return our KV groups: of each of vLLM's one for each size of page that its layers have."""
    hash_size = kv_cache_config.hash_block_size
    groups: list[EngineGroup] = []
    for table, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = _specs(group)
        if not specs:
            raise ConfigurationError(f"block table {table} has no layer in this pipeline stage: {STAGES_ARE_EQUAL}")
        if all(_is_made_anew(spec) for spec in specs.values()):
            continue
        kinds = {_kind_of(spec) for spec in specs.values()}
        if len(kinds) > 1 or not getattr(group, "enable_kv_transfer", True):
            named = ", ".join(dict.fromkeys(type(spec).__name__ for spec in specs.values()))
            raise ConfigurationError(
                f"layers that share a block table keep it in ways of their own ({named}). {_WITHOUT}"
            )
        (kind,) = kinds
        block_size = group.kv_cache_spec.block_size
        by_page: dict[int, list[str]] = {}
        for name, spec in specs.items():
            by_page.setdefault(int(spec.page_size_bytes), []).append(name)
        for page_bytes, names in by_page.items():
            each = block_size // (hash_size or block_size)
            are_copies = all(getattr(specs[name], "max_tp_shards", None) == 1 for name in names)
            said = table, block_size, each, tuple(names), page_bytes, *kind
            groups.append(EngineGroup(len(groups), *said, are_copies=are_copies))
    if not groups:
        raise ConfigurationError(f"no layer of this model keeps anything that a prefix needs. {_WITHOUT}")
    return tuple(groups)


def _table_of(spec: Any, vllm_config: Any) -> tuple[int, int]:
    """Return how many tokens a block has, and how many blocks a request has at most, as vLLM sizes its pool."""
    return spec.block_size, -(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes)


def _is_made_anew(spec: Any) -> bool:
    """Whether vLLM fills a layer's blocks behind any prefix that it finds, in its own cache too.

    By the last tokens of the prefix, which it computes again, or as there is nothing in them where a prefix may end.
    """
    return type(spec) is CircularBufferSpec or (type(spec) is SlidingWindowMLASpec and spec.bounded_replay)


def _kind_of(spec: Any) -> tuple[int | None, bool, int | None]:
    """Return how many of the last blocks a layer needs, whether vLLM says which, and its chunks. By exact types.

    Types that derive from these free blocks as they go, keep nothing to find, or share them otherwise.
    """
    kind, size = type(spec), spec.block_size
    if kind in {FullAttentionSpec, MLAAttentionSpec}:
        return None, False, None
    if kind in {SlidingWindowSpec, SlidingWindowMLASpec} and spec.sliding_window > 1:
        return -(-(spec.sliding_window - 1 + spec.extra_retained_tokens) // size), False, None
    if kind is ChunkedLocalAttentionSpec:
        return None, False, spec.attention_chunk_size
    if kind is MambaSpec and spec.mamba_cache_mode == "align":
        return 1, True, None
    if kind is MambaSpec:
        raise ConfigurationError(
            f"this model has recurrent layers, and mamba_cache_mode is {spec.mamba_cache_mode!r}: tiered_kv keeps the "
            'states that vLLM keeps for prefixes in the mode "align", which --enable-prefix-caching sets. '
            f"Or else: {_WITHOUT[0].lower()}{_WITHOUT[1:]}"
        )
    raise ConfigurationError(
        f"tiered_kv keeps the blocks of full attention, MLA, windows, chunks and recurrent states, and this model has "
        f"{kind.__name__}: of that vLLM keeps no block for each token of a prefix. {_WITHOUT}"
    )


def _specs(group: Any) -> dict[str, Any]:
    """Return what is said of each of a group's layers."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return dict(spec.kv_cache_specs)
    return dict.fromkeys(group.layer_names, spec)
