"""The caches that a server keeps: one for each model and layout, with a share of every tier that it owns.

A model's share is what the settings fix for it, or its weight among those of which nothing is fixed: of all models that
are known, those that clients have attached for and those whose blocks an earlier server has left on a disk. It is made
by resizing the others, lent as `lending` says, and the others' again once it is reclaimed.
"""

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tiered_kv.cache import TieredKV
from tiered_kv.chain_settings import CPUTier, GPUTier, tier_name
from tiered_kv.errors import ClosedError, ConfigurationError, TieredKVError
from tiered_kv.events import Emit
from tiered_kv.host.left_behind import DIRECTORY_DIGITS, delete, left_in
from tiered_kv.host.lending import Claim, divided
from tiered_kv.keys import ModelIdentity, Shard
from tiered_kv.layout import KVLayout, fingerprint
from tiered_kv.log import log
from tiered_kv.loop_calls import LoopCalls
from tiered_kv.settings import TieredKVSettings
from tiered_kv.telemetry.page import Page
from tiered_kv.tier_settings import OwnedTierSettings, TierSettings
from tiered_kv.tiers.pins import Pins
from tiered_kv.tiers.tasks import in_a_thread
from tiered_kv.validation import metrics_of

_LEAST_CHANGE: Final = 1 / 32
"""Of a tier; less is not moved for a model that has its right: each change evicts, or takes memory."""


@dataclass(eq=False)
class Share:
    """One model's cache, and who uses it.

    Attributes:
        directory: Its name on disks; what equal models have in common.
        name: The model's.
        weight: Beside those of other models.
        cache: Open, or None of what an earlier server has left.
        page: What shows it, if the server has a page.
        pins: None of its own: what the pins of all clients are counted with.
        unused_since: On the loop's clock; of no meaning while there are clients.
        num_clients: That are attached.
        num_stored: How many blocks were stored for it when that was looked at last.
        given: By owned tier, the bytes that it has now.
        right: By owned tier, the bytes that are its own.
        stored_at: When something was stored for it last, on the loop's clock, as far as was seen.
    """

    directory: str
    name: str
    weight: float
    cache: TieredKV | None
    pins: Pins
    unused_since: float
    page: Page | None = None
    num_clients: int = 0
    given: dict[str, int] = field(default_factory=dict)
    right: dict[str, int] = field(default_factory=dict)
    stored_at: float = 0.0
    num_stored: int = 0


class Shares:
    """All of them. For the event loop's thread."""

    def __init__(self, settings: TieredKVSettings, emit: Emit) -> None:
        """Know those that are on a disk already.

        Raises:
            ConfigurationError: A tier cannot be a server's, or what is fixed for models is more than there is.
        """
        if any(isinstance(tier, GPUTier) for tier in settings.tiers):
            raise ConfigurationError("a server has no gpu tier: each engine's GPU is its own")
        cpu = next((tier for tier in settings.tiers if isinstance(tier, CPUTier)), None)
        if cpu is None or not cpu.capacity:
            raise ConfigurationError("a server needs a cpu tier: blocks pass to and from its clients through it")
        self._settings = settings
        self._owned = {
            tier_name(tier): _capacity_of(tier) for tier in settings.tiers if isinstance(tier, OwnedTierSettings)
        }
        _check_fixed(settings.host.fixed, self._owned)
        self._emit = emit
        self._lock = asyncio.Lock()
        self._shares: dict[str, Share] = {}
        now = asyncio.get_running_loop().time()
        for path in self._paths():
            for directory in left_in(path):
                self._shares.setdefault(directory, Share(directory, "", 1.0, None, Pins(0), now))
        for tier in self._owned:
            for share, right in self._rights(tier, list(self)).items():
                share.right[tier] = right

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
                for path in self._paths():
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
                _look_at(share, now)
            on_disk = {tier_name(tier) for tier in self._settings.tiers if _directories_of(tier)}
            for tier, capacity in self._owned.items():
                kept = sum(each.right[tier] for each in self if each.cache is None) if tier in on_disk else 0
                claims = [_claim_of(share, tier, now - after_s) for share in open_]
                wanted = divided(capacity - kept, claims)
                moved = max((abs(to - claim.given) for to, claim in zip(wanted, claims, strict=True)), default=0)
                is_due = any(claim.is_wanting and claim.given < claim.right for claim in claims)
                if moved > capacity * _LEAST_CHANGE or (moved and is_due):
                    await self._resize(tier, dict(zip(open_, wanted, strict=True)))

    async def drain(self) -> bool:
        """Have every cache take no more stores and write what it has; say whether all did in time."""
        return all(await asyncio.gather(*(_drained(share.cache) for share in self if share.cache is not None)))

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
        share = Share(directory, model.name, host.weights.get(model.name, 1.0), None, Pins(0), 0.0)
        share.page = Page() if self._settings.page else None
        known = [share, *(each for each in self if each is not before)]
        share.right = {tier: self._rights(tier, known)[share] for tier in self._owned}
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
            [self._part_of(tier, share) for tier in settings.tiers],
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

    def _rights(self, tier: str, shares: Sequence[Share]) -> dict[Share, int]:
        """Return what is each model's own of a tier.

        Raises:
            ConfigurationError: More is fixed than there is.
        """
        capacity, fixed = self._owned[tier], self._settings.host.fixed
        rights = {share: int(fixed[share.name][tier]) for share in shares if tier in fixed.get(share.name, {})}
        left = capacity - sum(rights.values())
        if left < 0:
            raise ConfigurationError(
                f"{capacity - left} bytes of tier {tier!r} are fixed for models, it has {capacity}"
            )
        weights = sum(share.weight for share in shares if share not in rights)
        return rights | {share: int(left * share.weight / weights) for share in shares if share not in rights}

    async def _divide_by_right(self) -> None:
        for tier in self._owned:
            rights = self._rights(tier, list(self))
            for share, right in rights.items():
                share.right[tier] = right
            await self._resize(tier, rights)

    async def _resize(self, tier: str, wanted: dict[Share, int]) -> None:
        """Give models so much of a tier: first those that shrink, and the others only if they all did."""
        for share, capacity in sorted(wanted.items(), key=lambda item: item[1] - item[0].given.get(tier, 0)):
            if share.cache is None or capacity == share.given.get(tier):
                continue
            try:
                await share.cache.resize(tier, capacity)
            except TieredKVError as error:
                log("warning", "host.resize_failed", tier=tier, model=share.name, error=str(error))
                return
            share.given[tier] = capacity

    def _part_of(self, tier: TierSettings, share: Share) -> TierSettings:
        """Return the settings of one model's part of a tier."""
        if not isinstance(tier, OwnedTierSettings):
            return tier
        changed: dict[str, Any] = {"capacity": share.right[tier_name(tier)], "max_capacity": _capacity_of(tier)}
        if paths := _directories_of(tier):
            changed["path"] = tuple(path / share.directory for path in paths)
        return type(tier).model_validate({**dict(tier), **changed})

    def _paths(self) -> list[Path]:
        """The directories of the tiers that have one of their own."""
        return [path for tier in self._settings.tiers for path in _directories_of(tier)]


async def _drained(cache: TieredKV) -> bool:
    try:
        return await cache.drain()
    except ClosedError:  # it is being reclaimed: nothing of it is to stay
        return True


def _look_at(share: Share, now: float) -> None:
    """See whether something was stored for a model since the last time."""
    assert share.cache is not None  # noqa: S101 - its caller's
    if (num_stored := share.cache.stats().stored) != share.num_stored:
        share.num_stored, share.stored_at = num_stored, now


def _claim_of(share: Share, tier: str, since: float) -> Claim:
    assert share.cache is not None  # noqa: S101 - its caller's
    slots, given = share.cache.stats()[tier], share.given[tier]
    used = given * (slots.ready + slots.pending) // max(1, slots.num_slots)
    is_idle = not share.num_clients or share.stored_at < since
    return Claim(share.right[tier], given, used, share.weight, is_idle)


def _check_fixed(fixed: Mapping[str, Mapping[str, int]], owned: Mapping[str, int]) -> None:
    for model, parts in fixed.items():
        if unknown := [tier for tier in parts if tier not in owned]:
            raise ConfigurationError(
                f"host.fixed of {model!r}: no tier {unknown[0]!r} of the server's own; there are {', '.join(owned)}"
            )
    for tier, capacity in owned.items():
        if (total := sum(parts.get(tier, 0) for parts in fixed.values())) > capacity:
            raise ConfigurationError(f"host.fixed: {total} bytes of tier {tier!r}, which has {capacity}")


def _directories_of(tier: TierSettings) -> list[Path]:
    path = getattr(tier, "path", ()) if isinstance(tier, OwnedTierSettings) else ()
    return [each for each in (path if isinstance(path, tuple) else (path,)) if isinstance(each, Path)]


def _capacity_of(tier: OwnedTierSettings) -> int:
    capacity: int = tier.capacity  # type: ignore[attr-defined]  # every owned medium of ours has one
    return capacity


def _ranks_of(shards: Sequence[Shard]) -> list[Shard]:
    """Return a client's shards as the server's cache has them: replicas share one copy here."""
    if not shards or len({(each.size, each.replicated) for each in shards}) > 1:
        raise ConfigurationError("a client stands for one shard, or for all of them")
    return [each.part for each in shards][: 1 if shards[0].replicated else None]
