from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tiered_kv.testing import SlotBackendTests, open_backend
from tiered_kv_backends.nvme import NVMeBackend


@pytest.mark.parametrize("direct", ["auto", "never"])
class TestNVMeBackend(SlotBackendTests):
    @pytest.fixture
    async def backend(self, tmp_path: Path, direct: str) -> AsyncIterator[NVMeBackend]:
        """One on the disk of the tests' folder."""
        settings = NVMeBackend.Settings(path=tmp_path, capacity="32MiB", direct=direct)
        async with open_backend(NVMeBackend(settings)) as backend:
            yield backend
