"""How a server of one cache for a host listens, and what a client of it may have. A cache of one's own reads none."""

from pathlib import Path
from typing import Annotated

from pydantic import ByteSize, Field, field_validator

from tiered_kv.setting_errors import Checked

AtLeastOne = Annotated[int, Field(ge=1)]


class HostSettings(Checked):
    """``[host]`` in a TOML file, or ``TIERED_KV_HOST__*`` in the environment: for ``tiered-kv serve``."""

    socket: Path = Path("/run/tiered-kv/kv.sock")
    """Where clients attach. Its directory must be there; whoever may write the socket may attach."""
    mode: str = "660"
    """Permissions of the socket, in octal digits."""
    group: str = ""
    """The group of the socket, by name or number; that of the server's process if left out."""
    clients: AtLeastOne = 256
    """Clients at once; one more is refused."""
    loads_per_client: AtLeastOne = 1024
    """Loads that one client has under way; one more answers 0 blocks."""
    stores_per_client: AtLeastOne = 1024
    """Stores that one client has under way; one more is dropped, as ``"too many stores"``."""
    bytes_per_client: ByteSize | None = None
    """Payload bytes of these loads and stores together; one that goes beyond is answered in the same way, unless it is
    the only one. Left out, their number alone is bounded."""
    leases_per_client: AtLeastOne = 256
    """Leases that one client holds; one more holds nothing."""
    questions_per_client: AtLeastOne = 1024
    """Lookups and other calls that one client waits for; one more is answered as if nothing were there."""
    jobs_per_client: AtLeastOne = 4096
    """Loads and stores that a client's planner has under way; one more ends with nothing."""
    read_only_uids: tuple[int, ...] = ()
    """Users whose clients load, and change nothing."""
    weights: dict[str, float] = Field(default_factory=dict)
    """By a model's name, how much of every owned tier it gets, beside the others; 1 for those not named."""
    fixed: dict[str, dict[str, ByteSize]] = Field(default_factory=dict)
    """By a model's name and a tier's, how many bytes of that are its own, whatever others there are. Weights divide the
    rest among the other models."""
    models: AtLeastOne = 64
    """Models at once, with those that an earlier server has left on a disk; one more is refused."""
    lend_after_s: Annotated[float, Field(gt=0)] = 60.0
    """What a model does not use that has stored nothing for so long is lent to those whose share is full. Once it
    stores again it has it back, and they evict."""
    reclaim_after_s: Annotated[float, Field(gt=0)] = 24 * 3600.0
    """A model that no client has used for so long loses its blocks, and its share goes to the others."""

    @field_validator("mode")
    @classmethod
    def _check_mode(cls, mode: str) -> str:
        try:
            number = int(mode, 8)
        except ValueError:
            number = -1
        if not 0 <= number <= 0o777:
            raise ValueError(f"{mode!r} are no permissions: write three octal digits, e.g. '660'")
        return mode

    @field_validator("weights")
    @classmethod
    def _check_weights(cls, weights: dict[str, float]) -> dict[str, float]:
        if wrong := [name for name, weight in weights.items() if not 0 < weight < float("inf")]:
            raise ValueError(f"weights are positive numbers; not those of {', '.join(wrong)}")
        return weights
