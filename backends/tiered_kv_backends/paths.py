"""What names of ours look like on a shared medium: `BlockKey.path`. Who deletes there deletes nothing else."""

import re

FINGERPRINT = re.compile("[0-9a-f]{64}")
EPOCH = re.compile("[0-9a-f]{32}")
SHARD = re.compile("replicated|[0-9]+of[0-9]+")
SALT = re.compile("[0-9a-f]{32}")
HASH = re.compile("[0-9a-f]{64}")


def salt_folder(salt: bytes) -> str:
    """Return the folder of a salt's digest."""
    return salt.hex()[:32]


NAMESPACE = (FINGERPRINT, EPOCH, SHARD, SALT)
"""The folders of a `Namespace.path`, outermost first."""
RECORD = re.compile("/".join(f"(?:{name.pattern})" for name in (*NAMESPACE, HASH)) + r"(?:\.x(?P<size>[0-9]+))?")
"""A block's path, or that of a pack of some."""
