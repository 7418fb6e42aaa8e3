"""Storage backends that do what must not go unseen: without them what the tests of SGLang see would be no proof."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiered_kv.integrations.sglang import TieredKVStorage


class ReportingStorage(TieredKVStorage):
    """Adds a line to the file ``report`` of the extra config for each page that is settled: an engine does not say."""

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: object = None) -> list[bool]:
        """Store, settle, report."""
        stored = super().batch_set_v1(keys, host_indices, extra_info)
        assert self.kv is not None
        self.kv.flush()
        with Path(self._config.extra_config["report"]).open("a") as report:
            report.write("".join(f"{key}\n" for key in keys))
        return stored


class WipingStorage(TieredKVStorage):
    """Fills with zeros what it has loaded: whoever still answers the same has not used it."""

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: object = None) -> list[bool]:
        """Load, then wipe."""
        loaded = super().batch_get_v1(keys, host_indices, extra_info)
        self.mem_pool_host.kv_buffer.zero_()
        return loaded


class EvictingStorage(TieredKVStorage):
    """Evicts the fifth page of what was found, and those behind it, before it is loaded."""

    def batch_exists(self, keys: Sequence[str], extra_info: object = None) -> int:
        """Answer, then evict."""
        found = super().batch_exists(keys, extra_info)
        assert self.kv is not None
        (named,) = self._pools["kv"].keys(keys, 0)
        self.kv.evict(named[4:])
        return found


class WipingPools(TieredKVStorage):
    """Fills with zeros what it has loaded into the pools beside the main one."""

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: object = None) -> dict[Any, list[bool]]:
        """Load, then wipe."""
        loaded = super().batch_get_v2(transfers, extra_info)
        for transfer in transfers:
            for part in self._pools[transfer.name.value].parts:
                part.buffer.zero_()
        return loaded


class EvictingPools(TieredKVStorage):
    """Evicts what it has found of the pools beside the main one before that is loaded."""

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Sequence[Any] | None = None, extra_info: object = None
    ) -> Any:
        """Answer, then evict."""
        found = super().batch_exists_v2(keys, pool_transfers, extra_info)
        assert self.kv is not None
        for transfer in pool_transfers or ():
            for named in self._pools[transfer.name.value].keys(keys, 0):
                self.kv.evict(named)
        return found
