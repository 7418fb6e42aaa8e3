"""The caches that a server keeps: one for each model and layout, with a share of every tier that it owns.

A model's share is what the settings fix for it, or its weight among those of which nothing is fixed: of all models that
are known, those that clients have attached for and those whose blocks an earlier server has left on a disk. It is made
by resizing the others, lent as `lending` says, and the others' again once it is reclaimed. What each is to have is
decided at once; to get there each goes its own way, and waits for no other's.

A `Share` is one model's cache, what it has of every tier that the server owns, and who uses it; a `DividedTier` is a
tier as the settings have it, of which each model's cache gets a part. Directories of models on disks are named by what
equal models have in common. Which of them a tier has used, and how one goes that nobody uses any more, its medium
knows.
"""

import asyncio
import errno
import gc
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tiered_kv.cache.checks import check_shards, metrics_of, parts_of
from tiered_kv.cache.tiered_kv import TieredKV, seat_of
from tiered_kv.host.lending import KEPT, Claim, divided, rights
from tiered_kv.media.backend import SlotBackend
from tiered_kv.memory.host import check_host_memory
from tiered_kv.settings.chain_settings import CPUTier, GPUTier, tier_name
from tiered_kv.settings.registry import resolve
from tiered_kv.settings.setting_errors import size_in_words
from tiered_kv.settings.settings import TieredKVSettings
from tiered_kv.settings.tier_settings import BookedTierSettings, TierSettings, real_path
from tiered_kv.telemetry.page import Page
from tiered_kv.tiers.tasks import Tasks, in_a_thread
from tiered_kv.values.errors import BackendUnavailableError, ClosedError, ConfigurationError, TieredKVError, in_words
from tiered_kv.values.events import Emit
from tiered_kv.values.keys import ModelIdentity, Shard
from tiered_kv.values.layout import KVLayout, fingerprint
from tiered_kv.values.log import log
from tiered_kv.values.loop_calls import LoopCalls

DIRECTORY_DIGITS: Final = 32
_NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})
_DIRECTORY: Final = re.compile(f"[0-9a-f]{{{DIRECTORY_DIGITS}}}")


@dataclass(eq=False)
class Share:
    """One model's share of the tiers. What an earlier server has left on a disk is a share without name and cache.

    Attributes:
        directory: Its name on disks; what equal models have in common.
        name: The model's.
        weight: Beside those of other models.
        block_bytes: What a block of it takes, of all KV groups and shards together.
        cache: Open, or None.
        page: What shows it, if the server has a page.
        num_clients: That are attached.
        unused_since: On the loop's clock; of no meaning while there are clients.
        opening: What opens its cache, if that is under way.
        going: What closes its cache and deletes its directories, or cuts them, if that is under way.
        right: By owned tier, the bytes that are its own.
        wanted: By owned tier, the bytes that it is to have.
        given: By owned tier, the bytes that it has now, or will have once it is open; of one that was left, on disks.
        resizing: The owned tiers of which it is being given more or less.
        stored_at: When something was to be stored for it last, on the loop's clock, as far as was seen.
        was_open: Whether its directories were this server's: only then is what stays in them no other server's.
    """

    directory: str
    name: str = ""
    weight: float = 1.0
    block_bytes: int = 0
    cache: TieredKV | None = None
    page: Page | None = None
    num_clients: int = 0
    unused_since: float = 0.0
    opening: "asyncio.Task[TieredKVError | None] | None" = None
    going: "asyncio.Task[None] | None" = None
    right: dict[str, int] = field(default_factory=dict)
    wanted: dict[str, int] = field(default_factory=dict)
    given: dict[str, int] = field(default_factory=dict)
    resizing: set[str] = field(default_factory=set)
    stored_at: float = 0.0
    was_open: bool = False
    _num_stored: int = 0

    def has_room_in(self, tier: str, capacity: int) -> bool:
        """Say whether a block has room in so many bytes of a tier, as far as its medium can tell before it has them."""
        if tier in self.given and self.given[tier] <= capacity:
            return True
        if self.cache is None:
            return capacity >= self.block_bytes
        try:
            return seat_of(self.cache).cache.blocks_within(tier, capacity) > 0
        except ConfigurationError:
            return False
        except TieredKVError:  # its medium is away, or it is about to be closed
            return True

    def look(self, now: float) -> None:
        """See whether something was to be stored since the last look, with or without room. The cache must be open."""
        assert self.cache is not None  # noqa: S101 - its caller's
        stats = self.cache.stats()
        if (num_stored := stats.stored + stats.dropped) != self._num_stored:
            self._num_stored, self.stored_at = num_stored, now

    def claim(self, tier: str, since: float) -> Claim:
        """Say what the model, whose cache is open, claims of a tier. It is idle if nothing was stored ``since``."""
        assert self.cache is not None  # noqa: S101 - its caller's
        given = self.given[tier]
        used = int(given * seat_of(self.cache).cache.part_used(tier))
        is_idle = not self.num_clients or self.stored_at < since
        right = self.right[tier]
        return Claim(right, given, used, self.weight, is_idle, lends=self.has_room_in(tier, int(right * KEPT)))

    async def drain(self) -> bool:
        """Take no more stores and write what it has; say whether that was done in time."""
        try:
            return self.cache is None or await self.cache.drain()
        except ClosedError:  # it is being reclaimed: nothing of it is to stay
            return True

    def facts(self) -> dict[str, Any]:
        """Say how it is, for people; to any thread, while the loop's may close it."""
        facts: dict[str, Any] = {
            "model": self.name,
            "directory": self.directory,
            "weight": self.weight,
            "clients": self.num_clients,
            "right": dict(self.right),
            "given": dict(self.given),
        }
        if (cache := self.cache) is not None:
            with suppress(TieredKVError):  # about to be closed
                stats = cache.stats()
                facts["transfers"] = stats.transfers
                facts["tiers"] = [
                    {name: getattr(tier, name) for name in ("tier", "num_slots", "ready", "leased", "pending", "hits")}
                    for tier in stats.tiers
                ]
        return facts


@dataclass(frozen=True)
class DividedTier:
    """A tier of the server, and how it is divided between models.

    Attributes:
        name: As everywhere.
        capacity: Of all parts together, in bytes; 0 of a tier that the server does not own, which all have whole.
        paths: Where each model has a directory of its own.
    """

    name: str
    capacity: int
    paths: tuple[Path, ...]
    _settings: TierSettings

    @property
    def is_memory(self) -> bool:
        """Whether it is in host memory, of which models get their parts."""
        return isinstance(self._settings, CPUTier)

    @classmethod
    def of(cls, settings: TierSettings) -> "DividedTier":
        """Look at one tier."""
        if not isinstance(settings, BookedTierSettings):
            return cls(tier_name(settings), 0, (), settings)
        facts: dict[str, Any] = dict(settings)  # every owned medium has a capacity; a disk, one directory or several
        path = facts.get("path", ())
        paths = path if isinstance(path, tuple) else (path,)
        return cls(tier_name(settings), facts["capacity"], tuple(map(Path, paths)), settings)

    def check_place(self) -> None:
        """Raise `ConfigurationError` if it can have no directory, or none of its size; of several, one will do.

        One that a cache of its own has used is refused: what that has left counts nowhere, and nobody would delete it.
        """
        for path in self.paths:
            if self._has_left(real_path(path)):  # which follows no link, as a model's directory is none
                raise ConfigurationError(
                    f"tier {self.name!r}: {path} has the blocks of a cache that is no server's, which a server neither "
                    "serves nor counts: choose another directory, or delete what that cache has made there and nothing "
                    "else"
                )
        refusals = [why for path in self.paths if (why := _why_no_folder(path) or _why_too_large(path, self.capacity))]
        if refusals and len(refusals) == len(self.paths):
            raise ConfigurationError(f"tier {self.name!r}: {'; '.join(refusals)}")

    def left(self) -> dict[str, int]:
        """Return the directories of models that are there, and how many bytes each takes where it takes most.

        Others' are none, whatever they are called.

        Raises:
            ConfigurationError: There is no descriptor left to look: what is there would count nowhere.
        """
        found: dict[str, int] = {}
        for path in self.paths:
            try:
                for each in path.iterdir():
                    if _DIRECTORY.fullmatch(each.name) and self._has_left(each):
                        found[each.name] = max(found.get(each.name, 0), _num_bytes(each))
            except OSError as error:
                if error.errno in _NO_DESCRIPTOR:
                    raise self._cannot_look(path, error) from error
        return found

    def cut(self, directory: str, capacity: int) -> bool:
        """Have each of a model's directories take so many bytes at most; say whether they do. Blocks the thread."""
        are_cut = [self._medium().cut_left(path / directory, capacity) for path in self.paths]
        return all(are_cut)

    def left_of(self, directory: str) -> int:
        """Return how many bytes one model's directory takes where it takes most.

        Raises:
            OSError: There is no descriptor left to look.
        """
        return max(_num_bytes(path / directory) for path in self.paths)

    def delete(self, directory: str) -> dict[Path, Exception | None]:
        """Delete a model's directories, and return those that stay: why they cannot go, or None if they may not.

        Blocks the thread as long as their files take.
        """
        stay: dict[Path, Exception | None] = {}
        for path in self.paths:
            try:
                if not self._medium().delete_left(path / directory):
                    stay[path / directory] = None
            except Exception as error:  # noqa: BLE001 - whatever a medium raises: who attaches for it waits for this
                stay[path / directory] = error
        return stay

    def _has_left(self, path: Path) -> bool:
        try:
            return self._medium().has_left(path)
        except OSError as error:
            raise self._cannot_look(path, error) from error

    def _cannot_look(self, path: Path, error: OSError) -> ConfigurationError:
        return ConfigurationError(
            f"tier {self.name!r}: {path} cannot be looked into: {error.strerror}; "
            "raise the limit of open files (ulimit -n)"
        )

    def _medium(self) -> type[SlotBackend]:
        """Return the class of a medium that has directories."""
        found = resolve(self._settings.medium)
        return found if issubclass(found, SlotBackend) else SlotBackend

    def part(self, directory: str, capacity: int) -> TierSettings:
        """Return the settings of one model's part, which may become the whole."""
        if not self.capacity:
            return self._settings
        changed: dict[str, Any] = {"capacity": capacity, "max_capacity": self.capacity}
        if self.paths:
            changed["path"] = tuple(path / directory for path in self.paths)
        return type(self._settings).model_validate({**dict(self._settings), **changed})


def _why_no_folder(path: Path) -> str:
    """Say why no folder can be made where ``path`` leads to; nothing if one can, or could on a disk with room."""
    there = next(each for each in (path, *path.parents) if os.path.lexists(each))
    try:
        Path(tempfile.mkdtemp(dir=there)).rmdir()
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            return f"no directory can be made at {path}: {error.strerror}, at {there}"
    return ""


def _why_too_large(path: Path, capacity: int) -> str:
    """Say why the filesystem of ``path`` can never have ``capacity`` bytes; nothing if it could, were it empty."""
    status = os.statvfs(next(each for each in (path, *path.parents) if each.exists()))
    if capacity <= (total := status.f_blocks * status.f_frsize):
        return ""
    return f"capacity ({size_in_words(capacity)}) is more than the filesystem of {path} has ({size_in_words(total)})"


def _num_bytes(path: Path) -> int:
    """Return what a directory takes, also while another server deletes it: what is gone takes nothing.

    Raises:
        OSError: There is no descriptor left to look.
    """

    def fail(error: OSError) -> None:
        if error.errno in _NO_DESCRIPTOR:
            raise error

    num_blocks = 0
    for folder, _, names in os.walk(path, onerror=fail):  # else it passes over what cannot be read
        for name in (".", *names):
            with suppress(OSError):
                num_blocks += Path(folder, name).lstat().st_blocks
    return num_blocks * 512


def tiers_in(settings: TieredKVSettings) -> list[DividedTier]:
    """Return a server's tiers.

    Raises:
        ConfigurationError: One cannot be a server's, or what is fixed for models is more than there is.
    """
    if any(isinstance(tier, GPUTier) for tier in settings.tiers):
        raise ConfigurationError("a server has no gpu tier: each engine's GPU is its own")
    if not any(isinstance(tier, CPUTier) and tier.capacity for tier in settings.tiers):
        raise ConfigurationError("a server needs a cpu tier: blocks pass to and from its clients through it")
    tiers = [DividedTier.of(tier) for tier in settings.tiers]
    _check_fixed(settings.host.fixed, [tier for tier in tiers if tier.capacity])
    return tiers


def _check_fixed(fixed: Mapping[str, Mapping[str, int]], owned: Sequence[DividedTier]) -> None:
    names = [tier.name for tier in owned]
    for model, parts in fixed.items():
        if unknown := [tier for tier in parts if tier not in names]:
            raise ConfigurationError(
                f"host.fixed of {model!r}: no tier {unknown[0]!r} of the server's own; there are {', '.join(names)}"
            )
    for tier in owned:
        if (total := sum(parts.get(tier.name, 0) for parts in fixed.values())) > tier.capacity:
            raise ConfigurationError(f"host.fixed: {total} bytes of tier {tier.name!r}, which has {tier.capacity}")


_ROOM_S: Final = 1.0
"""How long a model that is new waits until others have given up what is its own. What they lease goes back later, and
what a slow disk deletes."""
_GONE_S: Final = 5.0
"""How long one that was known waits until its directories are deleted, or cut: it comes again, and counts meanwhile."""
_LEAST_CHANGE: Final = 1 / 32
"""Of a tier; less is not moved for a model that has its right: each change evicts, or takes memory."""


class Shares:
    """The shares of all models in a server's tiers. For the event loop's thread."""

    def __init__(self, settings: TieredKVSettings, emit: Emit) -> None:
        """Begin with the models that have directories on a disk already.

        Raises:
            ConfigurationError: A tier cannot be a server's, or have a directory, or what is fixed for models is more
                than there is; or memory or room is wanted that the machine can never give: no client could attach.
        """
        self._settings = settings
        self._emit = emit
        self._tiers = tiers_in(settings)
        of_tiers = sum(tier.capacity for tier in self._tiers if tier.is_memory)
        check_host_memory(of_tiers + settings.limits.bounce + settings.limits.swap_space, ever=True)
        self._owned = [tier for tier in self._tiers if tier.capacity]
        self._tasks = Tasks()
        self._changed = asyncio.Event()
        self._shares: dict[str, Share] = {}
        now = asyncio.get_running_loop().time()
        for tier in self._tiers:
            tier.check_place()
            for directory, num_bytes in tier.left().items():
                share = self._shares.setdefault(directory, Share(directory, unused_since=now))
                share.given[tier.name] = num_bytes
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
        while (share := self._shares.get(directory)) is not None and (going := share.going) is not None:
            _, underway = await asyncio.wait([going], timeout=_GONE_S)  # only then are its directories another's
            if underway:
                raise BackendUnavailableError(f"what is left of model {model.name!r:.80} is being deleted, or cut")
        if share is None or (share.cache is None and share.opening is None):
            share = self._begin(directory, model, layout, of_cache)
        share.num_clients += 1
        error: BaseException | None = None
        try:
            error = await asyncio.shield(share.opening) if share.opening is not None else None
        except BaseException as caught:  # noqa: BLE001 - a cancellation, too: who else waits for it has it
            error = caught
        if error is not None:
            self.leave(share)
            raise error
        return share, ranks

    def leave(self, share: Share) -> None:
        """A client has ended."""
        share.num_clients -= 1
        share.unused_since = asyncio.get_running_loop().time()

    async def reclaim(self, after_s: float) -> None:
        """Begin to give up the blocks of models that nobody has used for so long; the others get their share."""
        now = asyncio.get_running_loop().time()
        for share in self:
            is_there = share.opening is None and share.going is None
            if is_there and not share.num_clients and now - share.unused_since >= after_s:
                share.going = self._tasks.spawn(self._go(share), f"reclaim {share.directory}")

    async def lend(self, after_s: float) -> None:
        """Lend what models do not use that stored nothing for so long, and give those that store their own back."""
        now = asyncio.get_running_loop().time()
        open_ = [share for share in self if share.cache is not None and share.going is None]
        for share in open_:
            share.look(now)
        for tier in self._owned:
            if any(tier.name in share.resizing or share.opening is not None for share in self):
                continue  # what there is to lend is known when they have what they are to have
            # What an earlier server has left in memory is nothing, on a disk it is there.
            kept = sum(each.right[tier.name] for each in self if each.cache is None) if tier.paths else 0
            claims = [share.claim(tier.name, now - after_s) for share in open_]
            wanted = divided(tier.capacity - kept, claims)
            moved = max((abs(to - claim.given) for to, claim in zip(wanted, claims, strict=True)), default=0)
            is_due = any(claim.is_wanting and claim.given < claim.right for claim in claims)
            if moved > tier.capacity * _LEAST_CHANGE or (moved and is_due):
                self._want(tier, dict(zip(open_, wanted, strict=True)))

    async def drain(self) -> bool:
        """Have every cache take no more stores and write what it has; say whether all did in time."""
        return all(await asyncio.gather(*(share.drain() for share in self)))

    async def aclose(self) -> None:
        """Close every cache, side by side."""
        await self._tasks.aclose(0.0)
        caches = [share.cache for share in self if share.cache is not None]
        for error in await asyncio.gather(*(cache.aclose() for cache in caches), return_exceptions=True):
            if isinstance(error, BaseException):
                log("error", "host.close_failed", exc_info=error)

    # Models come and go.

    def _begin(self, directory: str, model: ModelIdentity, layout: KVLayout, shards: Sequence[Shard]) -> Share:
        """Begin to open a model's cache. Nothing changes for the others before all that can be checked was."""
        host, before = self._settings.host, self._shares.get(directory)
        if before is None and len(self._shares) >= host.models:
            raise ConfigurationError(f"the server has {len(self._shares)} models, which is what it may have")
        share = Share(directory, model.name, host.weights.get(model.name, 1.0))
        token = self._settings.page_hints_token.get_secret_value()
        share.page = Page(hints_token=token) if self._settings.page else None
        share.block_bytes = len(shards) * sum(group.stride_bytes for group in layout.groups)
        rights_ = self._rights([share, *(each for each in self if each is not before)])
        _check_room(rights_)
        share.right = rights_[share]
        share.given = dict(share.right)
        cache = self._made(share, model, layout, shards)
        self._shares[directory] = share
        share.opening = self._tasks.spawn(self._open(share, before, cache), f"open {directory}")
        return share

    async def _open(self, share: Share, before: Share | None, cache: TieredKV) -> TieredKVError | None:
        """Open a model's cache, once the others have made room, or after a while; return why not, for who waits."""
        try:
            self._divide_by_right()
            self._cut_left()
            with suppress(TimeoutError):
                async with asyncio.timeout(_ROOM_S):
                    while any(self._free_bytes(tier) < 0 for tier in self._owned):
                        self._changed.clear()
                        await self._changed.wait()
            share.cache = await cache.__aenter__()
        except BaseException as error:
            del self._shares[share.directory]
            if before is not None:
                self._shares[share.directory] = before
            if isinstance(error, TieredKVError):
                return error
            raise
        finally:
            share.opening = None
            self._divide_by_right()
        share.stored_at = asyncio.get_running_loop().time()
        log("info", "host.share_opened", model=share.name, directory=share.directory, given=dict(share.given))
        return None

    def _cut_left(self) -> None:
        """Where a tier is full, begin to cut models that nobody has attached for yet to what is their own."""
        full = [tier for tier in self._owned if self._free_bytes(tier) < 0]
        for share in self:
            if full and share.cache is None and share.opening is None and share.going is None:
                share.going = self._tasks.spawn(self._cut(share, full), f"cut {share.directory}")

    async def _cut(self, share: Share, tiers: Sequence[DividedTier]) -> None:
        """Cut a model's directories; what another server has open stays, and counts as it did."""
        try:
            for tier in tiers:
                right = share.right[tier.name]
                if share.given.get(tier.name, 0) > right and await in_a_thread(
                    LoopCalls(asyncio.get_running_loop()), tier.cut, share.directory, right
                ):
                    share.given[tier.name] = right
                    self._resize(tier)
        finally:
            share.going = None

    async def _go(self, share: Share) -> None:
        """Give up a model's blocks. What has to stay of them counts, as if an earlier server had left it."""
        was_open = share.was_open or share.cache is not None
        if share.cache is not None:
            try:
                await share.cache.aclose()
            except Exception as error:  # noqa: BLE001 - whatever a medium raises: nothing of it is to stay
                log("error", "host.close_failed", exc_info=error)
            share.cache = share.page = None
        try:
            left = await self._delete(share, was_open=was_open)
        except Exception as error:  # noqa: BLE001 - no thread is to be had, say
            log("warning", "host.reclaim_failed", model=share.name, directory=share.directory, error=in_words(error))
            left = {
                tier.name: share.given[tier.name] for tier in self._owned if tier.paths and tier.name in share.given
            }
        if left:  # which is tried again, as long after this
            now = asyncio.get_running_loop().time()
            kept = Share(share.directory, share.name, share.weight, unused_since=now, given=left)
            kept.was_open = was_open
            self._shares[share.directory] = kept
        else:
            del self._shares[share.directory]
            log("info", "host.share_reclaimed", model=share.name, directory=share.directory)
        self._divide_by_right()
        gc.collect()  # a closed cache is a circle with tables of megabytes, of too few objects to be looked for soon

    async def _delete(self, share: Share, *, was_open: bool) -> dict[str, int]:
        """Delete a model's directories; return the bytes of those that have to stay, by tier."""
        left = dict[str, int]()
        loop = asyncio.get_running_loop()
        for tier in self._tiers:
            stay = await in_a_thread(LoopCalls(loop), tier.delete, share.directory)
            for path, failure in stay.items():
                why = in_words(failure) if failure is not None else "it is in use, or others' files are in it"
                log("warning", "host.directory_kept", model=share.name, path=str(path), error=why)
            if any(was_open or failure is not None for failure in stay.values()):
                left[tier.name] = await in_a_thread(LoopCalls(loop), tier.left_of, share.directory)
        return left

    def _made(self, share: Share, model: ModelIdentity, layout: KVLayout, shards: Sequence[Shard]) -> TieredKV:
        """Make a model's cache, with the part of each tier that is its own."""
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

    # What each is to have, and has.

    def _divide_by_right(self) -> None:
        for share, right in self._rights(list(self)).items():
            share.right = right
        for tier in self._owned:
            self._want(tier, {share: share.right[tier.name] for share in self})

    def _want(self, tier: DividedTier, wanted: Mapping[Share, int]) -> None:
        """Have models get so much of a tier: some shrink at once, others get what that leaves as it comes."""
        for share, capacity in wanted.items():
            share.wanted[tier.name] = capacity
        self._resize(tier)

    def _resize(self, tier: DividedTier) -> None:
        """Begin to give models what they are to have of a tier, as far as there is room, after any change to either."""
        self._changed.set()
        name = tier.name
        for share in self:
            if share.cache is None or share.going is not None or name in share.resizing:
                continue
            wanted, given = share.wanted[name], share.given[name]
            capacity = min(wanted, given + max(0, self._free_bytes(tier)))
            if capacity != given:
                share.resizing.add(name)
                share.given[name] = max(given, capacity)  # what it is to get is nobody else's
                self._tasks.spawn(self._resized(share, tier, given, capacity), f"resize {name}")

    async def _resized(self, share: Share, tier: DividedTier, before: int, capacity: int) -> None:
        """Change one model's part of a tier, then give others what they wait for. What fails is not tried again."""
        assert share.cache is not None  # noqa: S101 - it is open
        try:
            await share.cache.resize(tier.name, capacity)
            share.given[tier.name] = capacity
        except Exception as error:  # noqa: BLE001 - whatever it is, no other tier or model is to wait for it
            log("warning", "host.resize_failed", tier=tier.name, model=share.name, error=in_words(error))
            share.given[tier.name] = share.wanted[tier.name] = before
        share.resizing.discard(tier.name)
        self._resize(tier)

    def _free_bytes(self, tier: DividedTier) -> int:
        """Say what of a tier no model has; less than 0 of one that a model is to have and others have yet."""
        return tier.capacity - sum(share.given.get(tier.name, 0) for share in self)


def _check_room(rights_: Mapping[Share, Mapping[str, int]]) -> None:
    """Raise unless every model that stays has room for a block in what is to be its own of each tier."""
    for share, right in rights_.items():
        for tier, num_bytes in right.items():
            if share.going is None and not share.has_room_in(tier, num_bytes):
                raise ConfigurationError(
                    f"model {share.name!r:.80} would have {num_bytes} bytes of tier {tier!r}: "
                    f"too few for a block of it, of {share.block_bytes} bytes"
                )


def _ranks_of(shards: Sequence[Shard]) -> list[Shard]:
    """Return a client's shards as the server's cache has them: replicas share one copy here."""
    given = check_shards(shards[0] if len(shards) == 1 else tuple(shards))
    return [each.part for each in parts_of(given)]
