"""Which tiers a simulated cache has, and what may be promised of them."""

import math
from dataclasses import dataclass, replace
from typing import Final

from tiered_kv.testing.simulation.engine import STRIDE
from tiered_kv.testing.simulation.tape import Tape

NUM_ALL: Final = 160
"""Slots of a tier that has room for all prompts, under all weights, and for some strangers."""
MOST_STRANGERS: Final = 30
"""Prompts of two blocks each that find room beside a hundred blocks."""
_BETWEEN_PASSES_S: Final = 1.0
"""From the end of one scrub to the beginning of the next, at least."""


@dataclass(frozen=True)
class Shape:
    """Which tiers a cache has, and how they are used."""

    chain: tuple[str, ...] = ("cpu", "nvme")
    cpu_slots: int = 12
    disk_slots: int = NUM_ALL
    writes_back: bool = False
    admit_after: int = 1
    ttl_s: float | None = None
    low_water: float = 0.5
    cipher: str = ""
    codec: str = "none"
    policy: str = "lru"
    promote: bool = True
    store_bytes: int = 1 << 30
    is_paced: bool = False
    """Whether reads of the store are held to a few blocks a second."""
    num_disks: int = 1
    changes_disks: bool = False
    """Whether each life may be on other directories than the one before."""
    wear: int | None = None
    """Bytes that may be written to the store in an hour."""
    queue_bytes: int = 1 << 30
    """Of stores that are being written below."""
    has_direct_pools: bool = False
    """Whether storage reads and writes host pools of the engine's own straight."""
    has_neighbours: bool = False
    """Whether other caches come and go beside it."""
    scrub_bytes_per_s: int | None = None
    """How fast the disk is read through to verify what lies there, if it is."""
    scrub_interval_s: float = 1.0
    """From the beginning of one such pass to that of the next."""

    @property
    def keeps_in_memory(self) -> bool:
        """Whether the CPU tier has room for every block there is, so that none has to go for want of it.

        Where the queue of stores is short, blocks may stay in the GPU pool alone, which is small.
        """
        is_reached = not self.has("gpu") or not self.has_short_queue
        return "cpu" in self.chain and self.cpu_slots >= NUM_ALL and self.ttl_s is None and is_reached

    @property
    def is_roomy(self) -> bool:
        """Whether the disk has room for every block there is, so that none has to go for want of it."""
        return "nvme" in self.chain and self.disk_slots >= NUM_ALL

    @property
    def keeps_all(self) -> bool:
        """Whether whatever is stored whole, and used as often as the disk wants, is there once flushed, and stays.

        What is used again goes to the disk from the memory that keeps it: without any, a use may meet it in passing.
        Where the queue of stores is short it may be dropped then, and no store says so.
        """
        is_plain = self.ttl_s is None and self.codec == "none"
        return self.is_roomy and self.is_owned and is_plain and self._is_admitted

    @property
    def has_short_queue(self) -> bool:
        """Whether a store may find the queue of stores full, and drop below memory what it says that it dropped."""
        return self.queue_bytes < 1 << 30

    @property
    def keeps_in_store(self) -> bool:
        """Whether the store below has room for all, and nobody else has a say in it."""
        is_roomy = self.store_bytes >= 1 << 30 and self.wear is None
        return (
            self.has("store") and not self.has("other") and is_roomy and not self.has_neighbours and self._is_admitted
        )

    @property
    def _is_admitted(self) -> bool:
        is_in_memory = self.has("cpu") or self.has("gpu")
        return self.admit_after == 1 or (is_in_memory and not self.has_short_queue)

    @property
    def is_owned(self) -> bool:
        """Whether all tiers are this cache's alone."""
        return not {"store", "other"} & set(self.chain)

    @property
    def writes_soon(self) -> bool:
        """Whether the disk gets what is stored as soon as it is."""
        waits = self.writes_back and ("cpu" in self.chain or "gpu" in self.chain)
        return self.has("nvme") and not waits and self.admit_after == 1

    def scrubbed_within_s(self, num_bytes: int) -> float:
        """Return how long a broken block on disks that hold so much may lie there, where nothing is in a scrub's way.

        It may have broken just behind the pass that goes on: what is left of that, then the next one up to it.
        """
        pass_s = num_bytes / (self.scrub_bytes_per_s or math.inf)
        return max(self.scrub_interval_s, pass_s + _BETWEEN_PASSES_S) + pass_s

    def has(self, medium: str) -> bool:
        """Whether there is such a tier."""
        return medium in self.chain


def drawn_shape(tape: Tape) -> Shape:
    """Draw which tiers there are."""
    chain = tape.pick(
        "plan",
        (
            ("cpu", "nvme"),
            ("cpu", "nvme", "store"),
            ("nvme",),
            ("cpu", "store"),
            ("gpu", "cpu", "nvme"),
            ("nvme", "store"),
            ("store",),
            ("store", "other"),
        ),
    )
    shape = Shape(
        chain,
        cpu_slots=tape.pick("plan", (12, 6, 40, NUM_ALL)),
        disk_slots=tape.pick("plan", (NUM_ALL, NUM_ALL, 24, 10)),
        writes_back=bool(tape.draw("plan", 2)),
        admit_after=tape.pick("plan", (1, 1, 2)),
        ttl_s=tape.pick("plan", (None, None, 1.0)),
        low_water=tape.pick("plan", (0.5, 0.0, 1.0)),
        cipher=tape.pick("plan", ("", "", "", "aes-256-gcm", "aes-256-gmac")),
        codec=tape.pick("plan", ("none", "none", "none", "exponent")),
        policy=tape.pick("plan", ("lru", "lhd", "lru", "mq", "arc")),
        promote=not tape.chance("plan", 0.2),
        store_bytes=tape.pick("plan", (1 << 30, 1 << 30, 300_000)),
        is_paced=tape.chance("plan", 0.2),
        num_disks=tape.pick("plan", (1, 1, 1, 2)),
        wear=tape.pick("plan", (None, None, 200_000)),
        queue_bytes=tape.pick("plan", (1 << 30, 1 << 30, 4 * STRIDE)),
        has_direct_pools=tape.chance("plan", 0.5),
        has_neighbours=tape.chance("plan", 0.2),
    )
    if tape.chance("plan", 0.3):  # what keeps whatever is flushed: then most is promised
        chain = tape.pick("plan", (("cpu", "nvme"), ("gpu", "cpu", "nvme"), ("nvme",)))
        return replace(shape, chain=chain, disk_slots=NUM_ALL, ttl_s=None, codec="none")
    return shape


def scrubbed(shape: Shape, tape: Tape) -> Shape:
    """Return the same tiers, of which the disk is scrubbed, if there is one."""
    if not shape.has("nvme"):
        return shape
    return replace(
        shape,
        scrub_bytes_per_s=tape.pick("plan", (1 << 30, 400_000, 100_000)),
        scrub_interval_s=tape.pick("plan", (1.0, 1.0, 5.0, 20.0)),
    )
