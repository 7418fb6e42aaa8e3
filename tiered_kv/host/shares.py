"""The caches that a server keeps: one for each model and layout, with a share of every tier that it owns.

A model's share is what the settings fix for it, or its weight among those of which nothing is fixed: of all models that
are known, those that clients have attached for and those whose blocks an earlier server has left on a disk. It is made
by resizing the others, lent as `lending` says, and the others' again once it is reclaimed.
"""

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tiered_kv.cache import TieredKV
from tiered_kv.errors import ConfigurationError
from tiered_kv.events import Emit
from tiered_kv.host.left_behind import DIRECTORY_DIGITS, delete, left_in
from tiered_kv.host.lending import divided, rights
from tiered_kv.host.share import Share
from tiered_kv.host.tier_parts import tiers_in
from tiered_kv.keys import ModelIdentity, Shard
from tiered_kv.layout import KVLayout, fingerprint
from tiered_kv.log import log
from tiered_kv.loop_calls import LoopCalls
from tiered_kv.settings import TieredKVSettings
from tiered_kv.telemetry.page import Page
from tiered_kv.tiers.tasks import in_a_thread
from tiered_kv.validation import metrics_of

_LEAST_CHANGE: Final = 1 / 32
"""Of a tier; less is not moved for a model that has its right: each change evicts, or takes memory."""


class Shares:
    """All of them. For the event loop's thread."""

    def __init__(self, settings: TieredKVSettings, emit: Emit) -> None:
        """Know those that are on a disk already.

        Raises:
            ConfigurationError: A tier cannot be a server's, or what is fixed for models is more than there is.
        """
        self._settings = settings
        self._emit = emit
        self._tiers = tiers_in(settings)
        self._owned = [tier for tier in self._tiers if tier.capacity]
        self._paths = [path for tier in self._tiers for path in tier.paths]
        self._lock = asyncio.Lock()
        self._shares: dict[str, Share] = {}
        now = asyncio.get_running_loop().time()
        for path in self._paths:
            for directory in left_in(path):
                self._shares.setdefault(directory, Share(directory, unused_since=now))
        for share, right in self._rights(list(self)).items():
            share.right = right

    def __iter__(self) -> Iterator[Share]:
        return iter(list(self._shares.values()))

    async def join(self, model: ModelIdentity, layout: KVLayout, shards: Sequence[Shard]) -> tuple[Share, list[Shard]]:
        """Return the share of a client's model, opened if it is the first, and the client's shards as it has them.

        Raises:
            TieredKVError: It cannot be opened. The others have what they had.
        """
        ranks = _ranks_of(shards)
        of_cache = [Shard(0, 1)] if ranks[0].size == 1 else list(Shard.every(ranks[0].size))
        digest = hashlib.sha256(f"{ranks[0].size}".encode())
        for group in range(len(layout.groups)):
            digest.update(fingerprint(model, layout, group, self._settings.codec))
        directory = digest.hexdigest()[:DIRECTORY_DIGITS]
        async with self._lock:
            share = self._shares.get(directory)
            if share is None or share.cache is None:
                share = await self._open(directory, model, layout, of_cache)
            share.num_clients += 1
        return share, ranks

    def leave(self, share: Share) -> None:
        """A client has ended."""
        share.num_clients -= 1
        share.unused_since = asyncio.get_running_loop().time()

    async def reclaim(self, after_s: float) -> None:
        """Give up the blocks of models that nobody has used for so long; the others get their share."""
        now = asyncio.get_running_loop().time()
        async with self._lock:
            unused = [each for each in self if not each.num_clients and now - each.unused_since >= after_s]
            for share in unused:
                if share.cache is not None:
                    await share.cache.aclose()
                del self._shares[share.directory]
                for path in self._paths:
                    is_gone = await in_a_thread(LoopCalls(asyncio.get_running_loop()), delete, path / share.directory)
                    if not is_gone:
                        log("warning", "host.directory_kept", path=str(path / share.directory))
                log("info", "host.share_reclaimed", model=share.name, directory=share.directory)
            if unused:
                await self._divide_by_right()

    async def lend(self, after_s: float) -> None:
        """Lend what models do not use that stored nothing for so long, and give those that store their own back."""
        now = asyncio.get_running_loop().time()
        async with self._lock:
            open_ = [share for share in self if share.cache is not None and share.given]
            for share in open_:
                share.look(now)
            for tier in self._owned:
                # What an earlier server has left in memory is nothing, on a disk it is there.
                kept = sum(each.right[tier.name] for each in self if each.cache is None) if tier.paths else 0
                claims = [share.claim(tier.name, now - after_s) for share in open_]
                wanted = divided(tier.capacity - kept, claims)
                moved = max((abs(to - claim.given) for to, claim in zip(wanted, claims, strict=True)), default=0)
                is_due = any(claim.is_wanting and claim.given < claim.right for claim in claims)
                if moved > tier.capacity * _LEAST_CHANGE or (moved and is_due):
                    await _resize(tier.name, dict(zip(open_, wanted, strict=True)))

    async def drain(self) -> bool:
        """Have every cache take no more stores and write what it has; say whether all did in time."""
        return all(await asyncio.gather(*(share.drain() for share in self)))

    async def aclose(self) -> None:
        """Close every cache, side by side."""
        async with self._lock:
            caches = [share.cache for share in self if share.cache is not None]
            for error in await asyncio.gather(*(cache.aclose() for cache in caches), return_exceptions=True):
                if isinstance(error, BaseException):
                    log("error", "host.close_failed", exc_info=error)

    async def _open(self, directory: str, model: ModelIdentity, layout: KVLayout, shards: Sequence[Shard]) -> Share:
        """Open a model's cache. Nothing changes for the others before all that can be checked was."""
        host, before = self._settings.host, self._shares.get(directory)
        if before is None and len(self._shares) >= host.models:
            raise ConfigurationError(f"the server has {len(self._shares)} models, which is what it may have")
        share = Share(directory, model.name, host.weights.get(model.name, 1.0))
        share.page = Page() if self._settings.page else None
        share.right = self._rights([share, *(each for each in self if each is not before)])[share]
        cache = self._made(share, model, layout, shards)
        self._shares[directory] = share
        try:
            await self._divide_by_right()
            share.cache = await cache.__aenter__()
        except BaseException:
            del self._shares[directory]
            if before is not None:
                self._shares[directory] = before
            await self._divide_by_right()
            raise
        share.given = dict(share.right)
        share.stored_at = asyncio.get_running_loop().time()
        log("info", "host.share_opened", model=model.name, directory=directory, given=dict(share.given))
        return share

    def _made(self, share: Share, model: ModelIdentity, layout: KVLayout, shards: Sequence[Shard]) -> TieredKV:
        """Make a model's cache, with the part of each tier that is its own.

        Raises:
            ConfigurationError: It holds no block.
        """
        stride_bytes = len(shards) * sum(group.stride_bytes for group in layout.groups)
        if small := next((tier for tier, right in share.right.items() if right < stride_bytes), ""):
            raise ConfigurationError(
                f"model {model.name!r:.80} would have {share.right[small]} bytes of tier {small!r}, and a block of it "
                f"takes {stride_bytes}"
            )
        settings = self._settings
        return TieredKV(
            [tier.part(share.directory, share.right.get(tier.name, 0)) for tier in self._tiers],
            model=model,
            layout=layout,
            shard=tuple(shards) if len(shards) > 1 else shards[0],
            limits=settings.limits,
            device="cpu",  # it copies nothing: clients do
            codec=settings.codec,
            emit=self._emit,
            metrics=metrics_of(settings, given=None),
            page=share.page or False,
        )

    def _rights(self, shares: Sequence[Share]) -> Mapping[Share, dict[str, int]]:
        """Return what is each model's own of every tier.

        Raises:
            ConfigurationError: More is fixed than there is: equal names of other layouts have as much each.
        """
        all_: dict[Share, dict[str, int]] = {share: {} for share in shares}
        weights = [share.weight for share in shares]
        for tier in self._owned:
            fixed = [self._settings.host.fixed.get(share.name, {}).get(tier.name) for share in shares]
            for share, right in zip(shares, rights(tier.name, tier.capacity, fixed, weights), strict=True):
                all_[share][tier.name] = right
        return all_

    async def _divide_by_right(self) -> None:
        for share, right in self._rights(list(self)).items():
            share.right = right
        for tier in self._owned:
            await _resize(tier.name, {share: share.right[tier.name] for share in self})


async def _resize(tier: str, wanted: Mapping[Share, int]) -> None:
    """Give models so much of a tier: first those that shrink, and the others only if they all did."""
    for share, capacity in sorted(wanted.items(), key=lambda item: item[1] - item[0].given.get(tier, 0)):
        if not await share.resize(tier, capacity):
            return


def _ranks_of(shards: Sequence[Shard]) -> list[Shard]:
    """Return a client's shards as the server's cache has them: replicas share one copy here."""
    if not shards or len({(each.size, each.replicated) for each in shards}) > 1:
        raise ConfigurationError("a client stands for one shard, or for all of them")
    return [each.part for each in shards][: 1 if shards[0].replicated else None]
