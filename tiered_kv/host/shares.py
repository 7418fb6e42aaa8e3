"""The caches that a server keeps: one for each model and layout, with a share of every tier that it owns.

A model's share is its weight among all that are known: those that clients have attached for, and those whose blocks an
earlier server has left on a disk. It is made by resizing the others, and grows again when one of them is reclaimed.
"""

import asyncio
import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tiered_kv.backend import OwnedTierSettings, TierSettings
from tiered_kv.cache import TieredKV
from tiered_kv.errors import ConfigurationError, TieredKVError
from tiered_kv.events import Emit
from tiered_kv.keys import ModelIdentity, Shard
from tiered_kv.layout import KVLayout, fingerprint
from tiered_kv.log import log
from tiered_kv.loop_calls import LoopCalls
from tiered_kv.settings import CPUTier, GPUTier, TieredKVSettings, tier_name
from tiered_kv.tiers.pins import Pins
from tiered_kv.tiers.tasks import in_a_thread

_DIRECTORY_DIGITS: Final = 32
_HOLDER: Final = "holder"
"""A file that an NVMe tier keeps in its directory."""


@dataclass(eq=False)
class Share:
    """One model's cache, and who uses it.

    Attributes:
        directory: Its name on disks; what equal models have in common.
        name: The model's.
        weight: Beside those of other models.
        cache: Open, or None of what an earlier server has left.
        pins: None of its own: what the pins of all clients are counted with.
        num_clients: That are attached.
        unused_since: On the loop's clock; of no meaning while there are clients.
    """

    directory: str
    name: str
    weight: float
    cache: TieredKV | None
    pins: Pins
    unused_since: float
    num_clients: int = 0


class Shares:
    """All of them. For the event loop's thread."""

    def __init__(self, settings: TieredKVSettings, emit: Emit) -> None:
        """Know those that are on a disk already.

        Raises:
            ConfigurationError: A tier cannot be a server's.
        """
        if any(isinstance(tier, GPUTier) for tier in settings.tiers):
            raise ConfigurationError("a server has no gpu tier: each engine's GPU is its own")
        cpu = next((tier for tier in settings.tiers if isinstance(tier, CPUTier)), None)
        if cpu is None or not cpu.capacity:
            raise ConfigurationError("a server needs a cpu tier: blocks pass to and from its clients through it")
        self._settings = settings
        self._emit = emit
        self._lock = asyncio.Lock()
        self._shares: dict[str, Share] = {}
        now = asyncio.get_running_loop().time()
        for path in self._paths():
            for directory in _left_in(path):
                self._shares.setdefault(directory, Share(directory, "", 1.0, None, Pins(0), now))

    def __iter__(self) -> Iterator[Share]:
        return iter(list(self._shares.values()))

    async def join(self, model: ModelIdentity, layout: KVLayout, shards: Sequence[Shard]) -> tuple[Share, list[Shard]]:
        """Return the share of a client's model, opened if it is the first, and the client's shards as it has them.

        Raises:
            TieredKVError: It cannot be opened.
        """
        ranks = _ranks_of(shards)
        of_cache = [Shard(0, 1)] if ranks[0].size == 1 else list(Shard.every(ranks[0].size))
        digest = hashlib.sha256(f"{ranks[0].size}".encode())
        for group in range(len(layout.groups)):
            digest.update(fingerprint(model, layout, group, self._settings.codec))
        directory = digest.hexdigest()[:_DIRECTORY_DIGITS]
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
                for path in self._paths():
                    loop_calls = LoopCalls(asyncio.get_running_loop())
                    await in_a_thread(loop_calls, _delete, path / share.directory)
                del self._shares[share.directory]
                log("info", "host.share_reclaimed", model=share.name, directory=share.directory)
            if unused:
                await self._resize(self._weights())

    async def aclose(self) -> None:
        """Close every cache, side by side."""
        async with self._lock:
            caches = [share.cache for share in self if share.cache is not None]
            for error in await asyncio.gather(*(cache.aclose() for cache in caches), return_exceptions=True):
                if isinstance(error, BaseException):
                    log("error", "host.close_failed", exc_info=error)

    async def _open(self, directory: str, model: ModelIdentity, layout: KVLayout, shards: Sequence[Shard]) -> Share:
        weight = self._settings.host.weights.get(model.name, 1.0)
        before = self._shares.get(directory)
        others = sum(each.weight for each in self if each is not before)
        await self._resize(others + weight)
        share = Share(directory, model.name, weight, None, Pins(0), 0.0)
        part = weight / (others + weight)
        try:
            cache = TieredKV(
                [self._part_of(tier, directory, part) for tier in self._settings.tiers],
                model=model,
                layout=layout,
                shard=tuple(shards) if len(shards) > 1 else shards[0],
                limits=self._settings.limits,
                device="cpu",  # it copies nothing: clients do
                codec=self._settings.codec,
                emit=self._emit,
            )
            share.cache = await cache.__aenter__()
        except BaseException:
            await self._resize(self._weights())
            raise
        self._shares[directory] = share
        log("info", "host.share_opened", model=model.name, directory=directory, part=round(part, 3))
        return share

    def _weights(self) -> float:
        return sum(each.weight for each in self)

    async def _resize(self, weights: float) -> None:
        """Give each open cache its part of all that is owned, by its weight out of so many."""
        for share in self:
            if share.cache is None:
                continue
            for tier in self._settings.tiers:
                if isinstance(tier, OwnedTierSettings):
                    capacity = int(_capacity_of(tier) * share.weight / weights)
                    try:
                        await share.cache.resize(tier_name(tier), capacity)
                    except TieredKVError as error:
                        log("warning", "host.resize_failed", tier=tier_name(tier), error=str(error))

    def _part_of(self, tier: TierSettings, directory: str, part: float) -> TierSettings:
        """Return the settings of one model's part of a tier."""
        if not isinstance(tier, OwnedTierSettings):
            return tier
        capacity = _capacity_of(tier)
        changed: dict[str, Any] = {"capacity": int(capacity * part), "max_capacity": capacity}
        if paths := _directories_of(tier):
            changed["path"] = tuple(path / directory for path in paths)
        return type(tier).model_validate({**dict(tier), **changed})

    def _paths(self) -> list[Path]:
        """The directories of the tiers that have one of their own."""
        return [path for tier in self._settings.tiers for path in _directories_of(tier)]


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


def _left_in(path: Path) -> list[str]:
    """Name the directories of models, which may be deleted one day: others' are none, whatever they are called."""
    with suppress(OSError):
        return [
            each.name
            for each in path.iterdir()
            if len(each.name) == _DIRECTORY_DIGITS
            and set(each.name) <= set("0123456789abcdef")
            and (each / _HOLDER).is_file()
        ]
    return []


def _delete(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
