"""tiered_kv below a vLLM: a KV connector.

```shell
vllm serve MODEL --kv-transfer-config '{
    "kv_connector": "TieredKVConnector", "kv_connector_module_path": "tiered_kv.integrations.vllm",
    "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"tiers": ["cpu://?capacity=32GiB", "file:///mnt/kv?capacity=1TiB"]}}'
```
"""

from contextlib import suppress

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from tiered_kv.integrations.vllm.compatibility import VERSIONS
from tiered_kv.integrations.vllm.connector import TieredKVConnector

__all__ = ["VERSIONS", "TieredKVConnector"]

with suppress(ValueError):  # it is known already, where this is imported anew
    # vLLM's MultiConnector looks for the class of what each connector has counted by its name alone.
    KVConnectorFactory.register_connector("TieredKVConnector", __name__, "TieredKVConnector")
