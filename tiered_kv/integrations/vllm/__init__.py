"""tiered_kv below a vLLM: a KV connector.

```shell
vllm serve MODEL --kv-transfer-config '{
    "kv_connector": "TieredKVConnector", "kv_connector_module_path": "tiered_kv.integrations.vllm",
    "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"tiers": ["cpu://?capacity=32GiB", "file:///mnt/kv?capacity=1TiB"]}}'
```
"""

from tiered_kv.integrations.vllm.compatibility import VERSIONS
from tiered_kv.integrations.vllm.connector import TieredKVConnector

__all__ = ["VERSIONS", "TieredKVConnector"]
