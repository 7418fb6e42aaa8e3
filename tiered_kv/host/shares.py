"""The caches that a server keeps: one for each model and layout, with a share of every tier that it owns.

A model's share is what the settings fix for it, or its weight among those of which nothing is fixed: of all models that
are known, those that clients have attached for and those whose blocks an earlier server has left on a disk. It is made
by resizing the others, lent as `lending` says, and the others' again once it is reclaimed.

Directories of models on disks: which there are, and how one goes that nobody uses any more.

What is deleted is what an NVMe tier has made and nobody holds: a directory of this user's alone, with a holder file,
folders of blocks, the page that its disk is probed by and what it says of itself, and nothing else. Anything of others
in it, or a tier that has it open, keeps it whole.

One model of a server: its cache, what it has of every tier that the server owns, and who uses it.

A server's tiers as its settings have them, and the part that one model's cache gets of each that is divided.
"""

import asyncio
import fcntl
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tiered_kv.cache.checks import metrics_of
from tiered_kv.cache.tiered_kv import TieredKV
from tiered_kv.host.lending import Claim, divided, rights
from tiered_kv.settings.chain_settings import CPUTier, GPUTier, tier_name
from tiered_kv.settings.settings import TieredKVSettings
from tiered_kv.settings.tier_settings import OwnedTierSettings, TierSettings
from tiered_kv.telemetry.page import Page
from tiered_kv.tiers.pins import Pins
from tiered_kv.tiers.tasks import in_a_thread
from tiered_kv.values.errors import ClosedError, ConfigurationError, TieredKVError
from tiered_kv.values.events import Emit
from tiered_kv.values.keys import ModelIdentity, Shard
from tiered_kv.values.layout import KVLayout, fingerprint
from tiered_kv.values.log import log
from tiered_kv.values.loop_calls import LoopCalls

DIRECTORY_DIGITS: Final = 32
_DIRECTORY: Final = re.compile(f"[0-9a-f]{{{DIRECTORY_DIGITS}}}")
_HOLDER: Final = "holder"
_FILES: Final = frozenset({_HOLDER, "probe", "member", "member.new"})
_FOLDER: Final = re.compile(r"[0-9a-f]{64}(-\d+of\d+)?")
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def left_in(path: Path) -> list[str]:
    """Name the directories of models in a directory; others' are none, whatever they are called."""
    with suppress(OSError):
        return [each.name for each in path.iterdir() if _DIRECTORY.fullmatch(each.name) and _is_a_models(each)]
    return []


def delete(path: Path) -> bool:
    """Delete a model's directory; return whether it is gone. Blocks the thread for as long as its files take."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which an open tier has
        if not _is_a_models(path) or not _is_ours(fd):
            return False
        for name in os.listdir(fd):  # noqa: PTH208 - a Path has no descriptors
            if name not in _FILES:
                shutil.rmtree(name, dir_fd=fd)
            elif name != _HOLDER:
                os.unlink(name, dir_fd=fd)
        os.unlink(_HOLDER, dir_fd=fd)  # the last: without it this would be no model's at the next start
        path.rmdir()
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)


def _is_a_models(path: Path) -> bool:
    with suppress(OSError):
        return not path.is_symlink() and stat.S_ISREG((path / _HOLDER).lstat().st_mode)
    return False


def _is_ours(fd: int) -> bool:
    """Say whether all that lies in a directory is what a tier of this user's keeps there."""
    about = os.fstat(fd)
    if about.st_uid != os.geteuid() or about.st_mode & _OTHERS_MAY_WRITE:
        return False
    with os.scandir(fd) as entries:
        return all(
            each.is_dir(follow_symlinks=False)
            if _FOLDER.fullmatch(each.name)
            else each.name in _FILES and each.is_file(follow_symlinks=False)
            for each in entries
        )


@dataclass(eq=False)
class Share:
    """One model's. What an earlier server has left on a disk is one too: it has no name, and no cache yet.

    Attributes:
        directory: Its name on disks; what equal models have in common.
        name: The model's.
        weight: Beside those of other models.
        cache: Open, or None.
        page: What shows it, if the server has a page.
        pins: None of its own: what the pins of all clients are counted with.
        num_clients: That are attached.
        unused_since: On the loop's clock; of no meaning while there are clients.
        right: By owned tier, the bytes that are its own.
        given: By owned tier, the bytes that it has now.
        least: By owned tier, the bytes that it kept when it was to keep fewer, in which no block has room.
        stored_at: When something was stored for it last, on the loop's clock, as far as was seen.
    """

    directory: str
    name: str = ""
    weight: float = 1.0
    cache: TieredKV | None = None
    page: Page | None = None
    pins: Pins = field(default_factory=lambda: Pins(0))
    num_clients: int = 0
    unused_since: float = 0.0
    right: dict[str, int] = field(default_factory=dict)
    given: dict[str, int] = field(default_factory=dict)
    least: dict[str, int] = field(default_factory=dict)
    stored_at: float = 0.0
    _num_stored: int = 0

    async def resize(self, tier: str, capacity: int) -> bool:
        """Have so many bytes of a tier from now on; say whether that is so."""
        if self.cache is None or capacity == self.given.get(tier):
            return True
        try:
            await self.cache.resize(tier, capacity)
        except TieredKVError as error:
            if isinstance(error, ConfigurationError):
                self.least[tier] = self.given.get(tier, 0)
            log("warning", "host.resize_failed", tier=tier, model=self.name, error=str(error))
            return False
        self.given[tier] = capacity
        return True

    def look(self, now: float) -> None:
        """See whether something was stored since the last time; of one that is open."""
        assert self.cache is not None  # noqa: S101 - its caller's
        if (num_stored := self.cache.stats().stored) != self._num_stored:
            self._num_stored, self.stored_at = num_stored, now

    def claim(self, tier: str, since: float) -> Claim:
        """Say what it claims of a tier, if it is open; idle is who has stored nothing ``since``."""
        assert self.cache is not None  # noqa: S101 - its caller's
        slots, given = self.cache.stats()[tier], self.given[tier]
        used = given * (slots.ready + slots.pending) // max(1, slots.num_slots)
        is_idle = not self.num_clients or self.stored_at < since
        return Claim(self.right[tier], given, used, self.weight, is_idle, self.least.get(tier, 0))

    async def drain(self) -> bool:
        """Take no more stores and write what it has; say whether that was done in time."""
        try:
            return self.cache is None or await self.cache.drain()
        except ClosedError:  # it is being reclaimed: nothing of it is to stay
            return True

    def facts(self) -> dict[str, Any]:
        """Say how it is, for people."""
        facts: dict[str, Any] = {
            "model": self.name,
            "directory": self.directory,
            "weight": self.weight,
            "clients": self.num_clients,
            "right": dict(self.right),
            "given": dict(self.given),
        }
        if self.cache is not None:
            with suppress(TieredKVError):  # about to be closed
                stats = self.cache.stats()
                facts["transfers"] = stats.transfers
                facts["tiers"] = [
                    {name: getattr(tier, name) for name in ("tier", "num_slots", "ready", "leased", "pending", "hits")}
                    for tier in stats.tiers
                ]
        return facts


@dataclass(frozen=True)
class TierParts:
    """One tier, and how it is taken apart.

    Attributes:
        name: As everywhere.
        capacity: Of all parts together, in bytes; 0 of a tier that the server does not own, which all have whole.
        paths: Where each model has a directory of its own.
    """

    name: str
    capacity: int
    paths: tuple[Path, ...]
    _settings: TierSettings

    @classmethod
    def of(cls, settings: TierSettings) -> "TierParts":
        """Look at one tier."""
        if not isinstance(settings, OwnedTierSettings):
            return cls(tier_name(settings), 0, (), settings)
        facts: dict[str, Any] = dict(settings)  # every owned medium has a capacity; a disk, one directory or several
        path = facts.get("path", ())
        paths = path if isinstance(path, tuple) else (path,)
        return cls(tier_name(settings), facts["capacity"], tuple(map(Path, paths)), settings)

    def part(self, directory: str, capacity: int) -> TierSettings:
        """Return the settings of one model's part, which may become the whole."""
        if not self.capacity:
            return self._settings
        changed: dict[str, Any] = {"capacity": capacity, "max_capacity": self.capacity}
        if self.paths:
            changed["path"] = tuple(path / directory for path in self.paths)
        return type(self._settings).model_validate({**dict(self._settings), **changed})


def tiers_in(settings: TieredKVSettings) -> list[TierParts]:
    """Return a server's tiers.

    Raises:
        ConfigurationError: One cannot be a server's, or what is fixed for models is more than there is.
    """
    if any(isinstance(tier, GPUTier) for tier in settings.tiers):
        raise ConfigurationError("a server has no gpu tier: each engine's GPU is its own")
    if not any(isinstance(tier, CPUTier) and tier.capacity for tier in settings.tiers):
        raise ConfigurationError("a server needs a cpu tier: blocks pass to and from its clients through it")
    tiers = [TierParts.of(tier) for tier in settings.tiers]
    _check_fixed(settings.host.fixed, [tier for tier in tiers if tier.capacity])
    return tiers


def _check_fixed(fixed: Mapping[str, Mapping[str, int]], owned: Sequence[TierParts]) -> None:
    names = [tier.name for tier in owned]
    for model, parts in fixed.items():
        if unknown := [tier for tier in parts if tier not in names]:
            raise ConfigurationError(
                f"host.fixed of {model!r}: no tier {unknown[0]!r} of the server's own; there are {', '.join(names)}"
            )
    for tier in owned:
        if (total := sum(parts.get(tier.name, 0) for parts in fixed.values())) > tier.capacity:
            raise ConfigurationError(f"host.fixed: {total} bytes of tier {tier.name!r}, which has {tier.capacity}")


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
