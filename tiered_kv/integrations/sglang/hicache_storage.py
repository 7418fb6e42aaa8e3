"""SGLang's HiCache with our tiers as its storage: a backend of kind ``dynamic``, interfaces v1 and v2.

SGLang keeps pages in host pools of its own, and asks storage for runs of them by the hashes of its tree. Pages move
between the tiers and these pools where they lie, in whichever order of axes these have. A model of several kinds of
layers has several pools, whose pages have the same hashes; see `pools`. Of its main pool SGLang asks by v1, of the
others by v2, and for all that a prompt needs by one look-up of v2.

SGLang calls from threads of its own, one that looks up, one that loads and one that stores. Nothing here is raised at
them, for a tier or a fault of ours: what does not arrive, or find room, is answered with False, and computed. A thread
of SGLang's that is raised at ends, and whoever waits for it then waits for good.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult
from sglang.version import __version__ as _version

from tiered_kv.cache.block_cache import BlockCache
from tiered_kv.cache.blocking import BlockingTieredKV, open_blocking
from tiered_kv.integrations.identity import (
    CONNECT,
    TOKENS_PER_STATE,
    Below,
    in_all_texts,
)
from tiered_kv.integrations.sglang.pools import KV, VERSION, HostPool, host_pool, is_split
from tiered_kv.integrations.sglang.served_model import model_identity
from tiered_kv.settings.settings import TieredKVSettings
from tiered_kv.settings.tier_settings import BookedTierSettings
from tiered_kv.transfers.submissions import Ticket
from tiered_kv.values.errors import ClosedError, ConfigurationError
from tiered_kv.values.integers import as_int
from tiered_kv.values.keys import BlockKeys, Shard
from tiered_kv.values.layout import KVLayout
from tiered_kv.values.log import Seldom
from tiered_kv.values.results import BlockState, StoreResult
from tiered_kv.values.specs import CPULoadStoreSpec

T = TypeVar("T")
_Pages: TypeAlias = tuple[str, Sequence[str], Any]
"""A pool's name, hashes of pages in hexadecimal, and SGLang's slots of them."""

_ALL_PAGES: Final = "all_pages"
_TRAILING_PAGES: Final = "trailing_pages"
_MAMBA: Final = "mamba"
"""SGLang's name of the pool of states, which each rank has of its own whatever the other pools hold."""

_OURS: Final = {*TieredKVSettings.model_fields, CONNECT, "weights", "tokens_per_state"}
"""What belongs into the object that is ours in the extra config."""
_OF_WEIGHTS: Final = ("model_path", "load_format", "weight_version")
"""What SGLang notes anew as it updates its weights while it runs."""
_OTHER_WEIGHTS: Final = RuntimeError(
    "SGLang's weights were updated while it ran: nothing is loaded or stored until this storage is detached, and "
    'attached with another name of the weights, "tiered_kv": {"weights": ...}'
)
_NOT_OPEN: Final = RuntimeError(
    "this storage could not be opened as it was attached, and SGLang holds on to it: nothing is loaded or stored until "
    "it is detached, and one attached that can be"
)


class TieredKVStorage(HiCacheStorage):  # type: ignore[misc]  # what SGLang gives is not typed
    """A storage backend of HiCache. SGLang makes it, in each rank's process; see the guide for its configuration.

    Of ``--hicache-storage-backend-extra-config`` the key ``tiered_kv`` is ours: fields of `TieredKVSettings`, or
    ``connect``, the address of a host's server, in the place of these; ``weights``, a name of the weights where it is
    not to be told from the checkpoint; and ``tokens_per_state``, 2,048: each tier of the cache's own has room for one
    state of Mamba, or of linear attention, for so many tokens. What it leaves out comes from the environment. In all
    texts of both ``{rank}`` becomes the process's own, for directories.

    Attributes:
        kv: The cache below, from when SGLang has registered its host pools until `close`; else None.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:  # noqa: ANN401 - SGLang's
        """Check what SGLang wants; nothing is opened before it has registered its host pools.

        Raises:
            ConfigurationError: Another SGLang, another interface, settings that can't work, or weights that were
                updated and that nobody named.
        """
        if _version != VERSION:
            raise ConfigurationError(f"this adapter is made for SGLang {VERSION}, and this is SGLang {_version}")
        extra = dict(storage_config.extra_config or {})
        if storage_config.dcp_size > 1:
            raise ConfigurationError(
                f"decode context parallelism over {storage_config.dcp_size} ranks is not served: a page is in pieces"
            )
        if not extra.get("interface_v1"):
            raise ConfigurationError(
                'SGLang asks a dynamic backend for pages where they lie only with "interface_v1": 1 in the extra '
                "config: add it, for models of several pools too"
            )
        if stray := sorted(
            each for each in extra.keys() - {"tiered_kv"} if each in _OURS or _letters(each) == "tieredkv"
        ):
            raise ConfigurationError(
                f"{', '.join(map(repr, stray))} in the extra config: nobody reads it there; settings of ours are in an "
                'object of it, "tiered_kv": {"tiers": [...]}'
            )
        if not isinstance(extra.get("tiered_kv") or {}, Mapping):
            raise ConfigurationError(
                f'"tiered_kv" is an object of settings, {{"tiers": [...]}}, got {extra["tiered_kv"]!r:.80}'
            )
        dp_rank = max(storage_config.dp_rank, _replica())  # the same, or of replicas the first is 0
        ranks = [dp_rank, *(getattr(storage_config, f"{kind}_rank") for kind in ("pp", "attn_cp", "tp"))]
        rank = "{rank}", "-".join(map(str, ranks))
        given = in_all_texts(extra.get("tiered_kv") or {}, *rank)
        self._weights = given.pop("weights", None)
        self._tokens_per_state = as_int("tokens_per_state", given.pop("tokens_per_state", TOKENS_PER_STATE), least=1)
        self._below = Below.of(given or None).filled_in(*rank)
        self._config = storage_config
        self._pools: dict[str, HostPool] = {}
        self.kv: BlockingTieredKV | None = None
        self._is_closed = False
        self._stack = ExitStack()
        self._changing = threading.Lock()
        self._seldom = Seldom()
        self._num_noted = len(_noted())
        self._has_other_weights = False
        if self._weights is None and _are_updated(_noted()):
            raise ConfigurationError(
                "SGLang's weights were updated while it ran, and are not those of the checkpoint that it began with: "
                'name them by "tiered_kv": {"weights": ...}'
            )

    # What SGLang calls to begin and to end.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:  # noqa: ANN401 - SGLang's
        """Take SGLang's main host pool, which says what a page is.

        Raises:
            ConfigurationError: Pages that can't be kept, or tiers that can't serve ranks.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._pools = {}
        own = self._below.settings
        if self._has_copies and own is not None and all(isinstance(tier, BookedTierSettings) for tier in own.tiers):
            raise ConfigurationError(
                f"SGLang has one of {self._config.tp_size} ranks store MLA latents: the others find them in a shared "
                "tier only (shared_fs, s3, redis, mooncake), and there is none"
            )
        self._take(mem_pool_host, KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:  # noqa: ANN401 - SGLang's
        """Take another host pool: of windows, states, an index, a draft model.

        One that comes when the cache is open, as a draft model's does, has it opened anew: blocks are then of another
        layout. SGLang does so before it serves.

        Raises:
            ConfigurationError: Pages that can't be kept, or that only some ranks could find again.
            BackendUnavailableError: A tier cannot be reached.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if (name := str(host_pool_name)) in self._pools:
            if name == KV and host_pool is self.mem_pool_host:
                return
            raise ConfigurationError(f"SGLang has registered two host pools as {name!r}")
        self._take(host_pool, name)
        if self.kv is not None:
            self.on_host_pools_registered()

    def on_host_pools_registered(self) -> None:
        """Open the cache, with SGLang's host pools as memory to load into and to store from.

        Raises:
            ConfigurationError: Weights that nobody named, or settings that can't work.
            BackendUnavailableError: A tier cannot be reached.
        """
        parts = [
            (part, spot) for pool in self._pools.values() for part, spot in zip(pool.parts, pool.spots, strict=True)
        ]
        if not parts:
            raise ConfigurationError("none of SGLang's host pools has memory: there is nothing to keep")
        config = self._config
        cache = self._below.cache(
            model=model_identity(config, self.mem_pool_host, self._weights),
            layout=KVLayout(tuple(part.group for part, _ in parts)),
            # SGLang decides who writes what all ranks have copies of; all of them read the same blocks.
            shard=Shard() if self._has_copies else Shard(config.tp_rank, config.tp_size),
            device="cpu",  # what is on a GPU is SGLang's to move
        )
        with self._changing:
            self.kv = None
            self._stack.close()
            kv = self._stack.enter_context(open_blocking(cache))
            try:
                for number, (part, spot) in enumerate(parts):
                    kv.register_host_pool(spot, part.buffer, group=number, axes=part.axes)
            except BaseException:
                self._stack.close()
                raise
            self.kv = kv  # closed when the program ends, whoever forgot to

    def clear(self) -> None:
        """Empty the tiers that this process owns."""
        if (kv := self.kv) is not None:
            with suppress(ClosedError):
                kv.clear()

    def close(self) -> None:
        """End: what is being written is, within `CacheLimits.close_timeout_s`. Any thread may call, and again."""
        with self._changing:
            self.kv, self._is_closed = None, True
            self._stack.close()

    # Interface v1: of the main pool.

    def batch_exists(self, keys: Sequence[str], extra_info: object = None) -> int:
        """Count the leading pages that can be loaded, or that pay, where it is said how fast SGLang computes.

        It loads what is counted here, and computes the others.
        """
        if (kv := self._in_use()) is None:
            return 0
        with self._passed_over():
            asked = self._pools[KV].keys(keys, _start(extra_info))
            return kv.call(self._leading, kv.cache, asked) if asked else 0
        return 0

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: object = None) -> list[bool]:  # noqa: ANN401 - a tensor
        """Load pages into SGLang's main host pool; say which are in place: a prefix.

        Args:
            keys: Hashes of the pages, in hexadecimal.
            host_indices: ``(len(keys) * page_size,)`` token slots of the pool, page by page.
            extra_info: What SGLang says of the pages before these.
        """
        return self._load([(KV, keys, host_indices)], extra_info)[0]

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: object = None) -> list[bool]:  # noqa: ANN401 - a tensor
        """Store pages of SGLang's main host pool; say which are kept. They are free again when this returns."""
        return self._store([(KV, keys, host_indices)], extra_info)[0]

    # Interface v2: of any pools.

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Sequence[Any] | None = None, extra_info: object = None
    ) -> Any:  # noqa: ANN401 - SGLang's
        """Find how many leading pages SGLang can go on behind, as each pool has what is needed there.

        Of a pool with policy ``all_pages`` that is every page before; with ``trailing_pages`` the last ones, as many
        as its transfer has keys, one if none. A pool with ``block_groups`` never stands in the way.

        Args:
            keys: Hashes of the pages, in hexadecimal.
            pool_transfers: The pools that are needed beside the main one.
            extra_info: What SGLang says of the pages before these.

        Returns:
            SGLang's ``PoolTransferResult``: the most pages, each pool's own limit where it has any, and all numbers of
            pages that will do, in ascending order, as ranks may have others in common than their greatest.
        """
        nothing = PoolTransferResult(0, {}, [])
        if (kv := self._in_use()) is None:
            return nothing
        with self._passed_over():
            start, whole, ends = _start(extra_info), {}, {}
            if main := self._pools[KV].keys(keys, start):
                whole[KV] = main
            for transfer in pool_transfers or ():
                if (pool := self._pools.get(str(transfer.name))) is None:
                    return nothing  # of a pool that nobody has registered nothing was stored
                if not pool.parts:
                    continue  # it only numbers pages, and has them all
                if transfer.hit_policy == _ALL_PAGES:
                    whole[transfer.name] = pool.keys(keys, start)
                elif transfer.hit_policy == _TRAILING_PAGES:
                    ends[transfer.name] = max(1, len(transfer.keys or ())), pool.keys(keys, start)
            return kv.call(self._endpoints, kv.cache, len(keys), whole, ends)
        return nothing

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: object = None) -> dict[Any, list[bool]]:
        """Load pages into SGLang's host pools; say by pool which are in place: a prefix. All are loaded at once.

        Args:
            transfers: Per pool its name, the hashes of pages, and the slots for them.
            extra_info: What SGLang says of the pages before these.
        """
        return _by_pool(transfers, self._load(_wanted(transfers), extra_info))

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: object = None) -> dict[Any, list[bool]]:
        """Store pages of SGLang's host pools; say by pool which are kept. They are free again when this returns."""
        return _by_pool(transfers, self._store(_wanted(transfers), extra_info))

    # What SGLang wants every backend to have, and does not call of this one.

    def exists(self, key: str) -> bool:
        """Say whether a page can be loaded."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: object = None, target_sizes: object = None) -> None:
        """Do nothing: pages are not got so. The next three neither."""

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

    @property
    def _has_copies(self) -> bool:
        """Say whether several ranks have the same of the main pool, and one of them stores it."""
        return bool(self._config.is_mla_model) and self._config.tp_size > 1

    def _take(self, pool: Any, name: str) -> None:  # noqa: ANN401 - SGLang's
        """Take a host pool as memory to load into and to store from, behind those that came before."""
        config, rank = self._config, ""
        if self._has_copies and is_split(pool):
            if name != _MAMBA:
                raise ConfigurationError(
                    f"of the host pool {name!r} each of {config.tp_size} ranks has a part of its own, and SGLang has "
                    "one rank alone store it beside MLA latents: the others would never find theirs"
                )
            rank = f"{config.tp_rank}/{config.tp_size}"
        self._pools[name] = host_pool(
            pool,
            name,
            block_size=self.mem_pool_host.page_size,
            first_group=sum(len(each.parts) for each in self._pools.values()),
            platform=_platform(),
            rank=rank,
            tokens_per_state=self._tokens_per_state,
        )

    def _in_use(self) -> BlockingTieredKV | None:
        """Return the cache; None without one, and once SGLang's weights are others than those that it is of.

        SGLang calls a storage that failed to open, if that was while it served: it neither closes it nor lets it go.
        """
        noted = _noted()
        num_noted = len(noted)
        if _are_updated(noted[self._num_noted : num_noted]):  # only what is new: an adaptive draft notes each change
            self._has_other_weights = True
        self._num_noted = num_noted
        if self.kv is not None and self._has_other_weights:
            self._seldom.failed("HiCache", _OTHER_WEIGHTS)
            return None
        if (kv := self.kv) is None and not self._is_closed:
            self._seldom.failed("HiCache", _NOT_OPEN)
        return kv

    async def _leading(self, cache: BlockCache, asked: Sequence[BlockKeys]) -> int:
        """Count the leading pages of which all parts can be loaded, and pay."""
        own = self._below.settings
        speed = own.prefill_tokens_per_s if own is not None else 0.0
        found = await asyncio.gather(*map(cache.lookup, asked))
        return min(
            each.split(prefill_tokens_per_s=speed).num_blocks if speed and each.num_blocks else each.num_blocks
            for each in found
        )

    async def _endpoints(
        self,
        cache: BlockCache,
        num_pages: int,
        whole: Mapping[Any, Sequence[BlockKeys]],
        ends: Mapping[Any, tuple[int, Sequence[BlockKeys]]],
    ) -> Any:  # noqa: ANN401 - SGLang's
        """Do what `batch_exists_v2` says.

        Args:
            cache: Asked, on its loop.
            num_pages: How many are asked for.
            whole: Of pools of which every page is needed, the keys of each part.
            ends: Of pools of which the last ones are, how many, and the keys of each part.
        """
        counts = await asyncio.gather(*(self._leading(cache, parts) for parts in whole.values()))
        most = counts[0] if KV in whole else num_pages  # a main pool that only numbers pages has them all
        limits = {KV: most} | {name: min(count, most) for name, count in zip(whole, counts, strict=True)}
        will_do = np.arange(1, most + 1) <= min(limits.values())
        there = await asyncio.gather(*(_present(cache, [part[:most] for part in parts]) for _, parts in ends.values()))
        for (name, (length, _)), is_there in zip(ends.items(), there, strict=True):
            has_run = _ends_of_runs(is_there, length)
            limits[name] = int(has_run.nonzero()[0].max(initial=-1)) + 1
            will_do &= has_run
        endpoints = (will_do.nonzero()[0] + 1).tolist()
        hits = {name: limit for name, limit in limits.items() if limit}
        return PoolTransferResult(endpoints[-1] if endpoints else 0, hits, endpoints)

    def _load(self, wanted: Sequence[_Pages], extra_info: object) -> list[list[bool]]:
        """Load pages of several pools, all at once; say of each pool which are in place."""
        if (kv := self._in_use()) is not None:
            with self._passed_over(), _none_left() as tickets:
                answers = []
                begun = [self._begin(kv.submit_load, each, _start(extra_info), tickets) for each in wanted]
                for (_, hashes, _), moves in zip(wanted, begun, strict=True):
                    loaded = [_ended(ticket) for _, ticket in moves or ()]
                    num_pages = min((0 if each is None else each.num_blocks for each in loaded), default=len(hashes))
                    answers.append([number < num_pages and moves is not None for number in range(len(hashes))])
                return answers
        return [[False] * len(hashes) for _, hashes, _ in wanted]

    def _store(self, wanted: Sequence[_Pages], extra_info: object) -> list[list[bool]]:
        """Store pages of several pools, all at once; say of each pool which are kept."""
        if (kv := self._in_use()) is not None:
            with self._passed_over(), _none_left() as tickets:
                answers = []
                # What another rank has as well is written by one of them, for all.
                is_writer = self._config.is_storage_writer
                mine = [is_writer or bool(pool and pool.rank) for pool in map(self._pool_of, wanted)]
                begun = [
                    self._begin(kv.submit_store, each, _start(extra_info), tickets) if is_mine else []
                    for each, is_mine in zip(wanted, mine, strict=True)
                ]
                for (_, hashes, _), moves in zip(wanted, begun, strict=True):
                    is_kept = np.full(len(hashes), moves is not None)
                    for keys, ticket in moves or ():
                        is_kept &= _kept(kv, keys, _ended(ticket))
                    answers.append(is_kept.tolist())
                return answers
        return [[False] * len(hashes) for _, hashes, _ in wanted]

    @contextmanager
    def _passed_over(self) -> Iterator[None]:
        """Go on behind this block after a fault of ours, which is logged, and where the cache was closed."""
        try:
            yield
        except ClosedError:
            pass
        except Exception as error:  # noqa: BLE001 - SGLang's threads take nothing that is raised at them
            self._seldom.failed("HiCache", error)

    def _pool_of(self, wanted: _Pages) -> HostPool | None:
        return self._pools.get(wanted[0])

    def _begin(
        self,
        submit: Callable[[BlockKeys, CPULoadStoreSpec], Ticket[T]],
        wanted: _Pages,
        start: int,
        tickets: list[Ticket[Any]],
    ) -> list[tuple[BlockKeys, Ticket[T] | None]] | None:
        """Begin to move pages of one pool, each part by itself; None where SGLang's slots are not of these pages."""
        _, hashes, host_indices = wanted
        pool = self._pool_of(wanted)
        specs = pool.places(host_indices, len(hashes)) if pool is not None else None
        if pool is None or specs is None:
            return None
        begun: list[tuple[BlockKeys, Ticket[T] | None]] = []
        for keys, spec in zip(pool.keys(hashes, start), specs, strict=True):
            ticket = None
            with suppress(ClosedError):
                ticket = submit(keys, spec)
                tickets.append(ticket)
            begun.append((keys, ticket))
        return begun


def _start(extra_info: object) -> int:
    """Return how many pages come before those that are asked for, where SGLang is asked to say so."""
    return len(getattr(extra_info, "prefix_keys", None) or ())


def _wanted(transfers: Sequence[Any]) -> list[_Pages]:
    return [(str(each.name), each.keys or (), each.host_indices) for each in transfers]


def _by_pool(transfers: Sequence[Any], answers: Sequence[list[bool]]) -> dict[Any, list[bool]]:
    by_pool: dict[Any, list[bool]] = {}
    for transfer, answer in zip(transfers, answers, strict=True):
        by_pool.setdefault(transfer.name, []).extend(answer)
    return by_pool


@contextmanager
def _none_left() -> Iterator[list[Ticket[Any]]]:
    """Yield a list for transfers; what is raised is raised once all of them have ended: SGLang has its pages back."""
    tickets: list[Ticket[Any]] = []
    try:
        yield tickets
    except BaseException:
        for ticket in tickets:
            ticket.cancel()
        for ticket in tickets:
            with suppress(Exception):
                ticket.wait()
        raise


def _ended(ticket: Ticket[T] | None) -> T | None:
    """Wait for a transfer; None where the cache was closed and nobody can say how it ended."""
    if ticket is not None:
        with suppress(ClosedError):
            return ticket.wait()
    return None


def _kept(kv: BlockingTieredKV, keys: BlockKeys, stored: StoreResult | None) -> NDArray[np.bool_]:
    """Say which blocks of a store that has ended are kept: all, unless some found no room."""
    if stored is not None and not stored.num_dropped:
        return np.ones(len(keys), np.bool_)
    with suppress(ClosedError):
        return np.asarray(kv.membership(keys) >= BlockState.PENDING)
    return np.zeros(len(keys), np.bool_)


async def _present(cache: BlockCache, parts: Sequence[BlockKeys]) -> NDArray[np.bool_]:
    """Say of each page if all its parts are there, ``(len(parts[0]),)``."""
    there = await asyncio.gather(*map(cache.presence, parts))
    return np.asarray(np.all(there, axis=0))


def _ends_of_runs(is_there: NDArray[np.bool_], length: int) -> NDArray[np.bool_]:
    """Say behind which pages the last ``length`` are there, or all from the first if there are no more."""
    numbers = np.arange(len(is_there))
    last_hole = np.maximum.accumulate(np.where(is_there, -1, numbers))
    return np.asarray(last_hole < np.maximum(0, numbers + 1 - length))


def _platform() -> str:
    """Say what computes: of one format of floats the bits mean another number on another make of GPU."""
    return "hip" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"


def _letters(text: str) -> str:
    return "".join(filter(str.isalpha, text)).lower()


def _replica() -> int:
    """Return SGLang's data parallel rank of this process: of replicas its storage's configuration does not have it.

    0 without an engine, as where SGLang's controller is driven alone.
    """
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415 - by now the engine has begun

    return getattr(get_parallel(), "dp_rank", None) or 0


def _noted() -> Sequence[tuple[str, Mapping[str, Any]]]:
    """Return what SGLang has noted of each change of its configuration since it began; not a copy, as it gives out."""
    from sglang.srt.runtime_context import get_context  # noqa: PLC0415 - by now the engine has begun

    return get_context()._overrides_log  # type: ignore[no-any-return]  # noqa: SLF001 - of one version, as all here


def _are_updated(noted: Sequence[tuple[str, Mapping[str, Any]]]) -> bool:
    """Say whether weights are among what was changed: by some of a disk, or of what version."""
    return any(not fields.keys().isdisjoint(_OF_WEIGHTS) for _, fields in noted)
