"""transformers' continuous batching with prefixes from tiers.

Its paged cache finds the prefix of a prompt by the hashes of blocks that it has. Three of its calls are extended, on
the one cache of a model: a search brings the blocks that follow from the tiers first, and registers them as if it had
computed them; blocks that a step has completed are stored beside the next step; and when memory is short, what stores
still read is waited for. All three run in the thread of the generation loop, which so owns all that is kept here.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

import torch
import transformers
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import compute_block_hash
from transformers.generation.continuous_batching.requests import RequestStatus

from tiered_kv.cache.blocking import BlockingTieredKV
from tiered_kv.integrations.transformers.model_parts import VERSION, ModelParts, version
from tiered_kv.transfers.submissions import StoreTicket
from tiered_kv.values.errors import ClosedError, ConfigurationError
from tiered_kv.values.keys import BlockKeys, hash_blocks
from tiered_kv.values.layout import KVGroup
from tiered_kv.values.log import log
from tiered_kv.values.specs import GPULoadStoreSpec

BEGIN: Final = "init_continuous_batching"
"""The method through which every continuous batching begins: a model with a cache has one of its own."""


@contextmanager
def tiered_batches(
    model: PreTrainedModel, kv: BlockingTieredKV, parts: ModelParts, salt: str | bytes, check: Callable[[], None]
) -> Iterator[None]:
    """Have every continuous batching of a model that begins in this block use the tiers, one after the other.

    What ``check`` raises is raised as one begins; one that runs then goes on without tiers.
    """
    begin: Any = model.init_continuous_batching
    managers = weakref.WeakSet[Any]()
    pages = _Pages(kv, salt, check)

    def begin_tiered(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - what it wraps
        check()
        group = _group_of(parts)
        manager = begin(*args, **kwargs)
        _check(manager, group)
        if manager not in managers:  # else it was kept for this session, and its call is ours
            managers.add(manager)
            create = manager._create_batch_processor  # noqa: SLF001 - no other call is made once its cache is there
            manager._create_batch_processor = partial(pages.create, manager, create, group)  # noqa: SLF001 - as above
        return manager

    vars(model)[BEGIN] = begin_tiered  # of this one model; its class stays as it is
    try:
        yield
    finally:
        del vars(model)[BEGIN]
        for manager in managers:  # one that is kept may be used again, without tiers or with others
            vars(manager).pop("_create_batch_processor", None)
        pages.end()


class _Pages:
    """Which paged cache the tiers know: that of the continuous batching that has begun last, and no other."""

    def __init__(self, kv: BlockingTieredKV, salt: str | bytes, check: Callable[[], None]) -> None:
        self._kv, self._salt, self._check = kv, salt, check
        self._bound: tuple[Any, TieredBlocks] | None = None  # with whose it is
        self._lock = threading.Lock()  # each begins in a thread of its own

    def create(self, manager: Any, create: Callable[[], Any], group: KVGroup) -> Any:  # noqa: ANN401 - transformers'
        """Return what a continuous batching makes its steps with, new or used again; its paged cache uses the tiers.

        Raises:
            ConfigurationError: Another one is running.
        """
        with self._lock:
            if self._bound is not None and manager.batch_processor is not None:
                last, blocks = self._bound
                if last is manager and not blocks.has_failed:
                    return create()  # which goes on with the paged cache that it has
            self._part_from_last(manager)
            processor = create()
            stream = processor.inputs_and_outputs.compute_stream
            step = partial(getattr, manager, "current_batch", 0)  # it has none before its loop
            blocks = TieredBlocks(self._kv, group, self._salt, processor.cache, stream, self._check, step)
            self._bound = manager, blocks
            return processor

    def end(self) -> None:
        """Leave the paged cache as it was found."""
        with self._lock:
            if self._bound is not None:
                manager, blocks = self._bound
                if manager.is_running():
                    blocks.is_over = True  # its loop leaves by itself
                else:
                    blocks.leave()

    def _part_from_last(self, manager: Any) -> None:  # noqa: ANN401 - transformers'
        """Hold nothing of the last one's memory any more: another's is taken from what is free."""
        if self._bound is None:
            return
        last, blocks = self._bound
        if last is not manager and last.is_running():
            raise ConfigurationError(
                "another continuous batching of this model is running, and tiers serve one at a time: stop that first"
            )
        self._bound = None
        blocks.leave()
        self._kv.unregister_kv_caches()


class TieredBlocks:
    """Brings blocks from tiers into one paged cache, and stores those that it completes.

    Attributes:
        is_over: Whether a generation loop is to go on without tiers, from its next call on.
        has_failed: Whether that is for a fault of ours, and the next batch begins anew, with the same paged cache too.
    """

    def __init__(
        self,
        kv: BlockingTieredKV,
        group: KVGroup,
        salt: str | bytes,
        cache: PagedAttentionCache,
        stream: torch.Stream | None,
        check: Callable[[], None],
        step: Callable[[], int],
    ) -> None:
        """Extend ``cache``.

        Args:
            kv: The tiers.
            group: Its blocks.
            salt: Keeps tenants apart.
            cache: Of one kind of layers.
            stream: In which blocks are computed; None on a CPU, whose calls return when they are done.
            check: Raises if what the model computes is not what the tiers keep of it.
            step: Says which one has been computed last.
        """
        self._check, self._step = check, step
        self._checked: int | None = None  # the step that was looked at: each of its requests asks
        self._kv, self._group, self._salt, self._cache, self._stream = kv, group, salt, cache, stream
        (self._allocator,) = cache.cache_allocators.values()
        self.is_over = self.has_failed = False
        self._storing: list[tuple[StoreTicket, list[int]]] = []  # each block has a reference until it is stored
        self._names = ("search_prefix_match", "mark_complete_blocks", "evict_cached_blocks")
        if isinstance(last := getattr(cache.search_prefix_match, "__self__", None), TieredBlocks):
            last.leave()  # it was over while its loop was idle, which was kept then
        self._search, self._mark, self._evict = (getattr(cache, name) for name in self._names)
        self._evict()  # of one that is kept nobody looked by which adapters, or weights, its pages were computed
        shape = [group.axis_sizes[axis] for axis in "LPNHD"]
        blocks = self._allocator._copy_view.view(cache.dtype).view(-1, *shape)  # noqa: SLF001 - there is no other
        kv.register_kv_caches(blocks, axes="BLPNHD")
        for name in self._names:
            setattr(cache, name, getattr(self, name))

    def leave(self) -> bool:
        """Leave the cache as it was found, in its loop's thread or when that has ended; say if it has blocks back."""
        for name in self._names:
            if getattr(vars(self._cache).get(name), "__self__", None) is self:  # not those of the next one's
                del vars(self._cache)[name]
        return self.let_go(wait=True)

    def let_go(self, *, wait: bool = False) -> bool:
        """Give up the references to blocks whose stores have ended, or of all; say if there were any."""
        ended = [each for each in self._storing if wait or each[0].result is not None]
        self._storing = [each for each in self._storing if each not in ended]
        for ticket, blocks in ended:
            with suppress(ClosedError):  # nobody will say how it ends, and nothing of it goes on
                ticket.wait()
            free = [block for block in blocks if self._allocator.ledger.release(block)]
            self._cache.pool.free_blocks(self._allocator.index, free)
        return bool(ended)

    # What the generation loop calls instead of the cache's own.

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Bring what tiers have of a prompt beyond what is here; then share it with the request.

        What is here is stored again: where a tier has it that is a use of it, so that it does not grow old there.
        """
        self._checked = None
        if self._has_left():
            return int(self._search(request_id, prompt_ids))
        self.let_go()
        here = self._allocator.match_prefix_blocks(prompt_ids)
        keys = self._keys(prompt_ids[:-1])  # one token at least is left to compute: the next one is sampled from it
        try:
            self._bring(keys[len(here) :], prompt_ids, here)
        except Exception as error:  # noqa: BLE001 - see _give_up
            self._give_up(error)
        found = int(self._search(request_id, prompt_ids))
        self._store(keys[: len(here)], self._allocator.block_table.get(request_id, [])[: len(here)])
        return found

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:  # noqa: ANN401 - a RequestState
        """Have the cache name the blocks that a step has completed, and store them."""
        if self._has_left():
            self._mark(state, complete_blocks)
            return
        self.let_go()
        before, tokens = self._num_named(state.request_id), state.initial_tokens + state.generated_tokens
        self._mark(state, complete_blocks)
        if state.status == RequestStatus.FINISHED and state.request_id in self._allocator.block_table:
            for num_blocks in complete_blocks.values():  # the cache leaves them out as the request ends with this step
                self._allocator.mark_complete_blocks(state.request_id, tokens, num_blocks)
        after = self._num_named(state.request_id)
        if after > before:
            keys = self._keys(tokens[: after * self._group.block_size])
            self._store(keys[before:], self._allocator.block_table[state.request_id][before:after])

    def evict_cached_blocks(self) -> bool:
        """Wait for stores, whose blocks can't be had otherwise, then give up what nobody uses."""
        freed = self.leave() if self.is_over else self.let_go(wait=True)
        return bool(self._evict()) or freed

    # What they do.

    def _has_left(self) -> bool:
        """Leave the cache as it was found if that is over, or the model computes something else now; say if so."""
        if (step := self._step()) != self._checked:
            self._checked = step
            try:
                self._check()
            except ConfigurationError as error:
                self._give_up(error)
        if self.is_over:
            self.leave()
        return self.is_over

    def _store(self, keys: BlockKeys, blocks: list[int]) -> None:
        """Begin to store as many as there are both keys and blocks of, which have a reference until it has ended."""
        num_blocks = min(len(keys), len(blocks))
        if not num_blocks:
            return
        try:
            spec = GPULoadStoreSpec(blocks[:num_blocks])
            ticket = self._kv.submit_store(keys[:num_blocks], spec, after=self._event())
        except Exception as error:  # noqa: BLE001 - see _give_up
            self._give_up(error)
            return
        for block in blocks[:num_blocks]:
            self._allocator.ledger.acquire(block)
        self._storing.append((ticket, blocks[:num_blocks]))

    def _give_up(self, error: Exception) -> None:
        """Go on without tiers: an error that is raised at the generation loop ends all of its requests."""
        self.is_over = True
        if not isinstance(error, ClosedError):
            self.has_failed = True
            log("error", "background.failed", exc_info=error, task="continuous batching")

    def _keys(self, tokens: list[int]) -> BlockKeys:
        return hash_blocks(tokens, block_size=self._group.block_size, salt=self._salt)

    def _num_named(self, request_id: str) -> int:
        """Count the leading blocks of a request that have a hash."""
        blocks = self._allocator.block_table.get(request_id, [])
        named = self._allocator.ledger.block_to_hash
        return next((number for number, block in enumerate(blocks) if block not in named), len(blocks))

    def _event(self) -> object:
        return self._stream.record_event() if self._stream is not None else None

    def _bring(self, keys: BlockKeys, prompt_ids: list[int], here: list[int]) -> None:
        """Load blocks that follow those that are here into free ones, and name them."""
        allocator, pool = self._allocator, self._cache.pool
        if not keys:
            return
        room = pool.count_free_blocks(allocator.index) + pool.num_free_sectors * allocator.blocks_per_sector
        keys = keys[: min(self._kv.lookup(keys).num_blocks, room)]
        if not keys:
            return
        size, ledger = self._group.block_size, allocator.ledger
        parent = ledger.block_to_hash[here[-1]] if here else None
        tokens = prompt_ids[len(here) * size : (len(here) + len(keys)) * size]
        names = [*_names(parent, tokens, size)]  # before blocks are taken that an error would lose
        while pool.count_free_blocks(allocator.index) < len(keys):
            pool.allocate_sector(allocator.index)
        blocks = pool.get_free_blocks(allocator.index, len(keys))
        arrived = 0
        try:
            arrived = self._kv.load(keys, GPULoadStoreSpec(blocks), after=self._event()).num_blocks
        finally:
            pool.free_blocks(allocator.index, blocks[arrived:])
        for block, name in zip(blocks[:arrived], names, strict=False):
            if ledger.register_new_hash(block, name) is None:
                ledger.cached_blocks[block] = None  # nobody's until the search that comes next shares it
            else:  # it was here, behind one that was not
                pool.free_blocks(allocator.index, [block])


def _names(parent: int | None, tokens: list[int], size: int) -> Iterator[int]:
    """Yield what the paged cache names blocks by, of a block that may come before them and of their tokens."""
    for start in range(0, len(tokens), size):
        parent = compute_block_hash(parent, tokens[start : start + size])
        yield parent


def _group_of(parts: ModelParts) -> KVGroup:
    """Return the one KV group that continuous batching can share.

    Raises:
        ConfigurationError: There are others.
    """
    if len(parts.all) > 1 or not parts.layers[0].is_whole:
        raise ConfigurationError(
            "continuous batching of transformers shares no prefix of layers with windows or states, and keeps no "
            "latents of MLA: use generate with TieredModel.past(), or generate_batch outside of open_tiered"
        )
    return parts.layers[0].group


def _check(manager: Any, group: KVGroup) -> None:  # noqa: ANN401 - a ContinuousBatchingManager
    """Raise `ConfigurationError` if this continuous batching can't use tiers."""
    if version() != VERSION:  # whose paged cache is no public interface
        raise ConfigurationError(
            f"continuous batching with tiers is made for transformers {VERSION[0]}.{VERSION[1]}, this is "
            f"{transformers.__version__}; TieredModel.past() works with it"
        )
    config = manager.continuous_batching_config
    if config.page_size != group.block_size:
        raise ConfigurationError(
            f"pages of continuous batching have {config.page_size} tokens, blocks of the tiers {group.block_size}: "
            f"ContinuousBatchingConfig(page_size={group.block_size}), or open_tiered(block_size={config.page_size})"
        )
    if not config.allow_block_sharing:
        raise ConfigurationError("continuous batching without block sharing has no prefixes: allow_block_sharing=True")
    if manager.distributed_helper.tp_size > 1:
        raise ConfigurationError(
            f"continuous batching of {manager.distributed_helper.tp_size} ranks is not served: use generate with "
            "TieredModel.past(), or generate_batch outside of open_tiered"
        )
