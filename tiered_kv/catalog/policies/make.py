"""Policies by name."""

from typing import Final

from tiered_kv.catalog.policies.arc import ARCPolicy
from tiered_kv.catalog.policies.base import Policy
from tiered_kv.catalog.policies.lhd import LHDPolicy
from tiered_kv.catalog.policies.lru import LRUPolicy
from tiered_kv.catalog.policies.mq import MQPolicy
from tiered_kv.catalog.policies.s3fifo import S3FIFOPolicy
from tiered_kv.errors import ConfigurationError

_POLICIES: Final[dict[str, type[Policy]]] = {
    "lru": LRUPolicy, "arc": ARCPolicy, "mq": MQPolicy, "s3-fifo": S3FIFOPolicy, "lhd": LHDPolicy,
}  # fmt: skip


def make_policy(policy: str | type[Policy], num_slots: int) -> Policy:
    """Make a policy over ``num_slots`` slots from its name or its class.

    Raises:
        ConfigurationError: There is no policy of this name.
    """
    if isinstance(policy, str):
        if policy not in _POLICIES:
            raise ConfigurationError(f"policy must be one of {', '.join(_POLICIES)}, or a Policy class; got {policy!r}")
        policy = _POLICIES[policy]
    return policy(num_slots)
