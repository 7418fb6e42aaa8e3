"""Keeping every tenant of a shared medium within a quota. For a job of your own, beside the caches.

It lists the medium, so it holds at the moment when it has run: what is written later counts at the next run. A tier of
medium ``shared_fs`` has the setting ``salt_quota`` besides, which its sweeps keep.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from tiered_kv.backend import Backend
from tiered_kv.errors import ConfigurationError
from tiered_kv.inventory import Found
from tiered_kv.tier_settings import TierSettings


async def keep_quota(medium: type[Backend], settings: TierSettings | Mapping[str, Any] | str, quota_bytes: int) -> int:
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
        num_bytes = Counter[str]()
        async for some in inventory.found():
            for each in some:
                num_bytes[each.place.salt] += each.num_bytes
        doubtful = {salt for salt, held in num_bytes.items() if held > quota_bytes}
        theirs: dict[str, Found] = {}
        if doubtful:
            async for some in inventory.found():  # Redis may name a key twice
                theirs |= {each.where: each for each in some if each.place.salt in doubtful}
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
