"""`KVEventPublisher`: what changes in a cache's tiers, told to routers in vLLM's wire format over ZMQ.

This checks what is given, and needs no extra to be imported; `router_feed` does the work.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray

from tiered_kv.telemetry.kv_event_values import (
    Form,
    HasChanges,
    KVEventStatistics,
    SocketSettings,
    given_hashes,
    own_hashes,
    parent_of,
    tokens_of,
)
from tiered_kv.tiers.changes import Changes
from tiered_kv.values.errors import ClosedError, ConfigurationError
from tiered_kv.values.integers import as_int
from tiered_kv.values.keys import BlockKeys, TokenIds

if TYPE_CHECKING:  # the extra "events" may not be installed
    from tiered_kv.telemetry.router_feed import RouterFeed

MediumName = Literal["GPU", "CPU", "STORAGE"]
Locality = Literal["LOCAL", "REMOTE"]

_LIKE_THEIR_MEDIUM: Final[Mapping[str, MediumName]] = {"gpu": "GPU", "cpu": "CPU"}


class KVEventPublisher:
    """Tells routers which blocks a cache holds: ``async with KVEventPublisher(kv, "tcp://*:5557") as publisher``.

    Open it on the event loop of an open cache, and close it before the cache. Only what `describe` was told about is
    published. Token ids are: keep the endpoint where prompts may be read.

    Attributes:
        endpoint, replay_endpoint: Where it listens, with the port that a ``*`` became, once it is open.
    """

    def __init__(
        self,
        kv: HasChanges,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        data_parallel_rank: int | None = 0,
        media: Mapping[str, MediumName] | None = None,
        localities: Mapping[str, Locality] | None = None,
        cache_specs: Mapping[int, tuple[str] | tuple[str, int]] | None = None,
        form: Form = "map",
        high_water_mark: int = 10_000,
        buffer_steps: int = 10_000,
        buffer_bytes: int = 64 << 20,
        snapshot_every_s: float = 1.0,
    ) -> None:
        """Check what was given; nothing is opened yet.

        Args:
            kv: The cache.
            endpoint: Where routers subscribe. As in vLLM, what has a ``*`` or ``::`` in it and ``ipc://`` is bound,
                anything else connected to.
            replay_endpoint: Where they ask for what they lost.
            topic: The first part of each message.
            data_parallel_rank: Told in each message, if not None.
            media: Per tier, what it is to routers. By default ``gpu`` and ``cpu`` are what they are called, all others
                storage; so name here a memory tier that you gave another name.
            localities: Per storage tier, whether its blocks are the publisher's own; ``"LOCAL"`` by default, since only
                tiers that the cache owns alone are told of.
            cache_specs: Per KV group, its kind of attention in vLLM's words, and its window if it has one:
                ``{0: ("full_attention",), 1: ("sliding_window", 4096)}``. Left out of events by default.
            form: ``"map"``, or ``"array"`` for routers that know only the older form.
            high_water_mark: Messages kept for a subscriber that does not read; it loses those beyond, and sees the gap.
            buffer_steps: Messages kept for replays.
            buffer_bytes: Bytes kept for replays.
            snapshot_every_s: How often all is told anew at most, however many routers join.

        Raises:
            ConfigurationError: A value that cannot be right.
        """
        for name, text in (("endpoint", endpoint), ("replay_endpoint", replay_endpoint or ""), ("topic", topic)):
            if not isinstance(text, str):
                raise ConfigurationError(f"{name} must be a str, got {text!r:.80}")
        if form not in {"map", "array"}:
            raise ConfigurationError(f"form must be 'map' or 'array', got {form!r}")
        if snapshot_every_s < 0:
            raise ConfigurationError(f"snapshot_every_s must be 0 or more, got {snapshot_every_s!r}")
        self.endpoint, self.replay_endpoint = endpoint, replay_endpoint
        self._kv = kv
        self._media, self._localities, self._cache_specs = dict(media or {}), dict(localities or {}), cache_specs or {}
        self._settings = SocketSettings(
            endpoint,
            replay_endpoint,
            topic,
            data_parallel_rank,
            form,
            as_int("high_water_mark", high_water_mark, least=1),
            as_int("buffer_steps", buffer_steps, least=1),
            as_int("buffer_bytes", buffer_bytes, least=1),
            snapshot_every_s,
        )
        self._open: RouterFeed | None = None

    async def __aenter__(self) -> Self:
        """Open the sockets and begin with what is in the tiers.

        Raises:
            ConfigurationError: The extra ``events`` is not installed, an endpoint is taken, or a tier is not known.
            ClosedError: The cache is not open.
        """
        if self._open is not None:
            raise ClosedError("a KVEventPublisher is opened once; make another")
        try:
            from tiered_kv.telemetry import router_books, router_feed, router_socket  # noqa: PLC0415 - they need the extra
        except ModuleNotFoundError as error:
            raise ConfigurationError(f"KV events need {error.name}: pip install 'tiered-kv[events]'") from error
        changes = self._kv.events()
        media = {
            tier: router_books.EventMedium(name, self._localities.get(tier, "LOCAL") if name == "STORAGE" else None)
            for tier, name in self._media_of(changes).items()
        }
        specs = {group: router_books.CacheSpec(*spec) for group, spec in self._cache_specs.items()}
        books = router_books.RouterBooks(changes.places, media, specs)
        socket = router_socket.RouterSocket(books, self._settings)
        self.endpoint, self.replay_endpoint = socket.endpoint, socket.replay_endpoint
        self._open = router_feed.RouterFeed(self._kv, changes, books, socket)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Tell routers that nothing is there any more, and close the sockets, within seconds. Idempotent."""
        if self._open is not None:
            await self._open.aclose()

    def describe(
        self,
        keys: BlockKeys,
        token_ids: TokenIds,
        *,
        parent: BlockKeys | int | None = None,
        hashes: Sequence[int] | NDArray[np.uint64] | None = None,
        lora_id: int | None = None,
        lora_name: str | None = None,
        extra_keys: Sequence[tuple[Any, ...] | None] | None = None,
    ) -> None:
        """Say what blocks are, best before they are looked up or stored. Any thread may call; it waits for nothing.

        Descriptions are kept of all that is in some tier, and of the 65,536 newest blocks beside. So describe each
        prompt when it comes: after a restart that is how routers learn of what was recovered. They are of the weights
        served now.

        Args:
            keys: The blocks.
            token_ids: Their tokens, from the first one's on; a key of a partial block, the last one, is left out.
            parent: Where ``keys`` do not begin the prompt: the keys before them, or the hash of the block before them.
            hashes: u64 per block, as the engine gives them to routers; ``parent`` is then one too. By default the last
                8 bytes of each key, read big-endian, which is what vLLM tells of its own 32-byte hashes. Blocks of
                different tenants need different hashes, which those of `hash_blocks` and of vLLM are.
            lora_id: The number of the LoRA that computed them.
            lora_name: Its name.
            extra_keys: Per block, what else went into its hash, for routers that hash by themselves.

        Raises:
            ConfigurationError: Numbers that do not match, no parent, keys of shorter hashes without ``hashes``, or what
                no event can hold.
            ClosedError: The publisher or the cache is not open.
        """
        feed = self._feed()
        from tiered_kv.telemetry.router_books import check_said  # noqa: PLC0415 - who is open has the extra

        tokens = tokens_of(keys, token_ids)
        num = len(tokens)
        if extra_keys is not None:
            if not isinstance(extra_keys, Sequence):
                raise ConfigurationError(f"extra_keys must be a list, an entry a block, got {extra_keys!r:.80}")
            if len(extra_keys) < num:
                raise ConfigurationError(f"extra_keys must name every block: {num} blocks, {len(extra_keys)} entries")
            extra_keys = tuple(extra_keys)  # which a thread reads, when the caller's may have changed
        if hashes is not None and keys.start and isinstance(parent, BlockKeys):
            raise ConfigurationError("with hashes= of your own, parent is the u64 of the block before them")
        own, before = own_hashes(keys) if hashes is None else given_hashes(hashes, num), parent_of(keys, parent)
        check_said(before, lora_id, lora_name, extra_keys)
        feed.describe(
            keys[:num], hashes=own[:num], parent=before, tokens=tokens,
            lora_id=lora_id, lora_name=lora_name, extra_keys=extra_keys,
        )  # fmt: skip

    def statistics(self) -> KVEventStatistics:
        """Count what was told so far.

        Raises:
            ClosedError: It was never opened.
        """
        return self._feed().statistics()

    def _feed(self) -> "RouterFeed":
        if self._open is None:
            raise ClosedError("this KVEventPublisher is not open: use it with 'async with'")
        return self._open

    def _media_of(self, changes: Changes) -> dict[str, MediumName]:
        tiers = list(dict.fromkeys(tier for tier, _, _ in changes.places))
        media = {tier: self._media.get(tier, _LIKE_THEIR_MEDIUM.get(tier, "STORAGE")) for tier in tiers}
        for what, given, known in (
            ("media", self._media, {"GPU", "CPU", "STORAGE"}),
            ("localities", self._localities, {"LOCAL", "REMOTE"}),
        ):
            if unknown := [tier for tier in given if tier not in tiers]:
                raise ConfigurationError(
                    f"{what} names {unknown[0]!r}; this cache owns {', '.join(tiers) or 'no tier'}"
                )
            if wrong := [word for word in given.values() if word not in known]:
                raise ConfigurationError(f"{what} are {', '.join(sorted(known))}, got {wrong[0]!r}")
        return media
