"""Blocks as files and objects of a shared medium: how they are named and opened, kept within a quota, and spoken of.

Names are those of `BlockKey.path`, a folder per tenant (`salt_folder`). Who deletes there deletes nothing else.

`Opener` opens a file by a path of several names, none of which may be a symbolic link, with one system call. Folder by
folder it takes three calls a name, each of which gives up the interpreter: of many threads at once half their time went
there. Linux has ``openat2`` since 5.6; elsewhere, and where a sandbox refuses it, callers go step by step.

`keep_quota` keeps every tenant of a medium within a quota, as a job of your own beside the caches. It lists the medium,
so it holds at the moment when it has run: what is written later counts at the next run. A tier of medium ``shared_fs``
has the setting ``salt_quota`` besides, which its sweeps keep.

An ``nvme`` tier and one of medium ``shared_fs`` know a directory of the other's by the file that it makes there first.

`scrubbed` takes secrets out of what servers say: some repeat in an error what they were sent.
"""

import ctypes
import errno
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tiered_kv.media.backend import Backend
from tiered_kv.media.inventory import Found
from tiered_kv.settings.tier_settings import StorageTierSettings
from tiered_kv.values.errors import ConfigurationError

_OPENAT2: Final = ctypes.c_long(437)
"""Its number, on every architecture."""
_RESOLVE_NO_SYMLINKS: Final = 0x04
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class Opener:
    """Opens files for one purpose. Any thread may use it.

    Attributes:
        is_there: Whether the system knows the call, as far as was seen.
    """

    def __init__(self, flags: int) -> None:
        self._how = _How(flags, 0, _RESOLVE_NO_SYMLINKS)
        self.is_there = True

    def open(self, path: str, folder_fd: int) -> int:
        """Return a descriptor of the file at ``path`` below a folder; -1 where that takes a step for each name.

        Raises:
            FileNotFoundError: There is none.
        """
        if not self.is_there:
            return -1
        how, size = ctypes.byref(self._how), ctypes.c_size_t(ctypes.sizeof(_How))
        fd = int(_LIBC.syscall(_OPENAT2, ctypes.c_int(folder_fd), path.encode(), how, size))
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code == errno.ENOENT:
            raise FileNotFoundError(code, os.strerror(code), path)
        if code in {errno.ENOSYS, errno.EPERM}:
            self.is_there = False
        return -1  # whatever is in the way, step by step it shows which


NVME_MARK: Final = "holder"
SHARED_FS_MARK: Final = "sweeper.lock"
FINGERPRINT = re.compile("[0-9a-f]{64}")
EPOCH = re.compile("[0-9a-f]{32}")
SHARD = re.compile("replicated|[0-9]+of[0-9]+")
SALT = re.compile("[0-9a-f]{32}")
HASH = re.compile("[0-9a-f]{64}")


def salt_folder(salt: bytes) -> str:
    """Return the folder of a salt's digest, as the medium has it."""
    return salt.hex()[:32]


NAMESPACE = (FINGERPRINT, EPOCH, SHARD, SALT)
"""The folders of a `Namespace.path`, outermost first."""
RECORD = re.compile("/".join(f"(?:{name.pattern})" for name in (*NAMESPACE, HASH)) + r"(?:\.x(?P<size>[0-9]+))?")
"""A block's path, or that of a pack of some."""


async def keep_quota(
    medium: type[Backend], settings: StorageTierSettings | Mapping[str, Any] | str, quota_bytes: int
) -> int:
    """Delete what any salt has beyond ``quota_bytes``, of all models, epochs and shards together.

    What was written longest ago goes first, where the medium tells (S3 does); of Redis, any.

    Args:
        medium: `RedisBackend`, `S3Backend`, or another that can be listed.
        settings: Its settings, a dict of them or a URL.
        quota_bytes: For each salt; no salt is one, too.

    Returns:
        How many blocks were deleted.

    Raises:
        ConfigurationError: No settings of this medium, no quota, or the medium cannot list what it has.
        BackendUnavailableError: The medium failed; what was deleted until then stays deleted.
    """
    if quota_bytes <= 0:
        raise ConfigurationError(f"a quota is a positive number of bytes, got {quota_bytes}")
    async with medium.inventory(medium.Settings.of(settings)) as inventory:
        await inventory.hold()
        num_bytes = Counter[str]()
        async for some in inventory.found():
            for each in some:
                num_bytes[each.place.salt] += each.num_bytes if each.num_blocks else 0
        doubtful = {salt for salt, held in num_bytes.items() if held > quota_bytes}
        theirs: dict[str, Found] = {}
        if doubtful:
            async for some in inventory.found():  # Redis may name a key twice
                theirs |= {each.where: each for each in some if each.num_blocks and each.place.salt in doubtful}
        over = Counter(dict.fromkeys(doubtful, -quota_bytes))
        for each in theirs.values():
            over[each.place.salt] += each.num_bytes
        doomed = []
        for each in sorted(theirs.values(), key=lambda found: found.written_at or 0.0):
            if over[each.place.salt] > 0:
                over[each.place.salt] -= each.num_bytes
                doomed.append(each)
        await inventory.delete(doomed)
        return sum(each.num_blocks for each in doomed)


_SHORTEST = 4
"""Of a secret, the shortest beginning that is taken out: servers cut long words."""


def scrubbed(text: str, secrets: Sequence[str]) -> str:
    """Return the text with every secret in it, or the longest beginning of one, replaced by ``***``."""
    for secret in secrets:
        for length in range(len(secret), min(_SHORTEST, len(secret)) - 1, -1):
            if length and secret[:length] in text:
                text = text.replace(secret[:length], "***")
                break
    return text


def scrub(error: BaseException, secrets: Sequence[str]) -> None:
    """Take the secrets out of an error and of all that it came from, as a traceback shows them."""
    for each in all_causes(error):
        each.args = tuple(scrubbed(part, secrets) if isinstance(part, str) else part for part in each.args)


def all_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, what it came from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
