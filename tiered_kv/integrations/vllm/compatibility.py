"""Which vLLM this is written for, and on what it runs.

Imported before anything of vLLM's that may have another shape in another version.
"""

import re
from typing import Final

from vllm import __version__
from vllm.platforms import current_platform

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


def device_kind() -> str:
    """Say what computes: what is called fp8 is another number, of the same bits, on another make of GPU."""
    return f"{current_platform.device_name} with {current_platform.fp8_dtype()}"
