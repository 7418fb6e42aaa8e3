"""How a server is, asked from any process. Whoever only asks needs no torch: a readiness probe does, all the time."""

import os
from typing import Any

from tiered_kv.errors import ConfigurationError
from tiered_kv.host import handshake
from tiered_kv.host.opening import Health, Healthy


def health_at(path: str | os.PathLike[str], *, timeout_s: float = 5.0) -> dict[str, Any]:
    """Ask the server that listens at ``path`` for its health. Blocks the thread.

    Args:
        path: Of its socket.
        timeout_s: How long to wait.

    Raises:
        ConfigurationError: What answers is no server of this version.
        BackendUnavailableError: Nothing answers in time.
    """
    connection, answer, descriptors = handshake.begin(os.fspath(path), Health(), timeout_s)
    handshake.give_back(connection, descriptors)
    if not isinstance(answer, Healthy):
        raise ConfigurationError(f"{path} answered {type(answer).__name__} to a question about its health")
    return answer.facts
