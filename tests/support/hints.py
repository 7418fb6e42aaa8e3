"""Envelopes of KV hints, as orchestrators send them."""

from typing import Any


def hints(*actions: tuple[str, dict[str, Any]], version: str = "1.0") -> dict[str, Any]:
    """Return an envelope."""
    return {
        "protocol_version": "0.1",
        "message_id": "m",
        "actions": [
            {"action_id": str(at), "action_type": kind, "action_version": version, "payload": payload}
            for at, (kind, payload) in enumerate(actions)
        ],
    }
