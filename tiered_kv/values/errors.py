"""What goes wrong: everything tiered_kv raises on purpose, and what a result names instead.

A tier's fault never reaches a serving path as an error: it shortens a prefix, and the result has a `TierFault` with the
`Reason`.
"""

from dataclasses import dataclass
from enum import StrEnum


class TieredKVError(Exception):
    """Base of every error raised on purpose."""


class ConfigurationError(TieredKVError, ValueError):
    """Can never work: a setting, an argument or a machine's limit must change first.

    Attributes:
        problems: Where settings are wrong, each a place in them and what to write there; of other errors none.
    """

    problems: tuple[tuple[tuple[int | str, ...], str], ...] = ()


class LayoutMismatchError(ConfigurationError):
    """Tensors, ids or bytes of another model, dtype, shape or head layout than the cache was opened for."""


class ClosedError(TieredKVError):
    """Used before opening or after closing."""


class CapacityError(TieredKVError):
    """Too few slots can be freed now: every other block is leased or in flight. Skip the store, or wait."""


class BackendError(TieredKVError):
    """One tier failed; the others still serve."""


class BackendUnavailableError(BackendError):
    """Timeout, throttling, lost connection, full or read-only disk: retry later, keep the block."""


class BlockCorruptError(BackendError):
    """Wrong length, header or checksum: delete the block, never retry."""


class Reason(StrEnum):
    """Why blocks did not arrive, or were not kept: for programs that count by it. Prose for people is in the detail.

    Each is the text that it stands for, so ``"deadline"`` compares equal, and is what logs and metrics show.
    """

    TIMEOUT = "timeout"
    """A tier did not answer within its ``timeout_s``."""
    UNREADABLE = "unreadable"
    """A tier had it, and it was corrupt, or the medium failed."""
    GONE = "gone when read"
    """A tier had it when it was looked for, and not any more when it was read: evicted or deleted meanwhile."""
    TIER_AWAY = "tier away"
    """A tier may have it, and is bypassed."""
    DEADLINE = "deadline"
    """The time of the load, store or swap itself was up."""
    REVOKED = "revoked"
    """Whoever asked for it has cancelled it, or the cache was closed."""
    EPOCH_ADVANCED = "epoch advanced"
    """The weights changed while it was loaded."""
    COPY_FAILED = "copy failed"
    """A copy from or to the engine's memory failed."""
    DEVICE_UNUSABLE = "device unusable"
    """The engine's device has failed: nothing is copied there any more."""
    NOT_MOVED = "not moved"
    """Who was to move it has not: a worker, or the other store that it was left to."""
    UNWRITTEN = "unwritten"
    """The medium did not take it, of a store straight out of the engine's memory."""
    NO_ROOM = "no room"
    """No tier had room for it, or this one had none."""
    QUEUE_FULL = "queue full"
    """This tier was not written to: as many bytes as may wait to be written did so."""
    HELD_BACK = "held back"
    """This tier was not written to: it had as many bytes a day as it may have."""
    REMOVED = "removed meanwhile"
    """A call removed it before this tier had it."""
    DRAINING = "draining"
    """`TieredKV.drain` was called: no more is stored."""
    READ_ONLY = "read only"
    """Who asked may not store, or no tier keeps anything."""
    SERVER_AWAY = "server away"
    """The host's server is gone, or does not answer."""
    SERVER_ENDING = "server ending"
    """The host's server is about to end, and begins nothing more."""
    TOO_MANY_LOADS = "too many loads"
    """The server has as many loads of this client under way as it may."""
    TOO_MANY_STORES = "too many stores"
    """The server has as many stores of this client under way as it may."""
    TOO_MANY_KEYS = "too many keys"
    """More than fit in a message to the server."""
    REFUSED = "refused"
    """The server could not take it, as the detail says; this tier's medium would not; or what it had is sealed by a key
    that the tier lacks, or not at all although it has keys."""
    FAILED = "failed"
    """It broke off in the server, as the detail says."""

    def __repr__(self) -> str:  # in a dict that is printed or logged, too
        return repr(self.value)


def in_words(error: BaseException) -> str:
    """Return an error's kind and what it says; one of others' code may fail to say anything."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - whatever its `__str__` raises
        return type(error).__name__


@dataclass(frozen=True)
class TierFault:
    """Why blocks that a tier had did not arrive, or did not go there: ``reason`` is a fixed word, ``detail`` prose."""

    tier: str
    reason: Reason
    num_blocks: int
    detail: str = ""
