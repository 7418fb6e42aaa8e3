"""What is below an engine: a cache of its own, or the one that a server of this host keeps, by one setting."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from tiered_kv.block_cache import BlockCache
from tiered_kv.cache import TieredKV
from tiered_kv.errors import ConfigurationError
from tiered_kv.keys import ModelIdentity, Shard
from tiered_kv.layout import KVLayout
from tiered_kv.memory.make import DeviceLike
from tiered_kv.settings import TieredKVSettings

CONNECT: Final = "connect"
"""The setting: the address of a server, in the place of all others."""


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

    def cache(
        self,
        *,
        model: ModelIdentity,
        layout: KVLayout,
        shard: Shard | tuple[Shard, ...] | None = None,
        device: DeviceLike | None = None,
    ) -> BlockCache:
        """Return it, as `TieredKV.from_settings` or `TieredKV.connect` does.

        Raises:
            ConfigurationError: It cannot be.
        """
        if self.settings is None:
            return TieredKV.connect(self.url, model=model, layout=layout, shard=shard, device=device)
        return TieredKV.from_settings(self.settings, model=model, layout=layout, shard=shard, device=device)
