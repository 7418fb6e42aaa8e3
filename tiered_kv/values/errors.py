"""Everything tiered_kv raises on purpose.

A tier's fault never reaches a serving path as one of these: it shortens a prefix.
"""


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
