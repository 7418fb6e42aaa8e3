"""Which vLLM this is written for. Imported before anything of vLLM's that may have another shape in another version."""

import re
from typing import Final

from vllm import __version__

from tiered_kv.values.errors import ConfigurationError

VERSIONS: Final = ("0.32", "0.33")
"""Of vLLM, whose interface changes from one to the next."""


def check_version(version: str) -> str:
    """Return which of `VERSIONS` a vLLM is.

    Raises:
        ConfigurationError: It names both.
    """
    found = re.match(r"\d+\.\d+", version)
    if found is None or found[0] not in VERSIONS:
        raise ConfigurationError(
            f"this tiered_kv is for vLLM {' and '.join(VERSIONS)}, and this is vLLM {version}: install one of those, "
            "or a tiered_kv for this one"
        )
    return found[0]


VERSION: Final = check_version(__version__)
"""Of the vLLM that is here."""
