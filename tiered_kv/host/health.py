"""How a server is, asked from any process. Whoever only asks needs no torch: a readiness probe does, all the time."""

import os
from typing import Any

from tiered_kv.errors import ConfigurationError
from tiered_kv.host import handshake
from tiered_kv.host.opening import Health, Healthy


def health_at(path: str | os.PathLike[str], *, timeout_s: float = 5.0) -> dict[str, Any]:
    """See `TieredKVServer.health_at`."""
    connection, answer, descriptors = handshake.begin(os.fspath(path), Health(), timeout_s)
    handshake.give_back(connection, descriptors)
    if not isinstance(answer, Healthy):
        raise ConfigurationError(f"{path} answered {type(answer).__name__} to a question about its health")
    return answer.facts
