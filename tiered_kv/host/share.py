"""One model of a server: its cache, what it has of every tier that the server owns, and who uses it."""

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tiered_kv.cache import TieredKV
from tiered_kv.errors import ClosedError, ConfigurationError, TieredKVError
from tiered_kv.host.lending import Claim
from tiered_kv.log import log
from tiered_kv.telemetry.page import Page
from tiered_kv.tiers.pins import Pins


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
