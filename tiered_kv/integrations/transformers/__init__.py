"""Hugging Face transformers: `generate` and `generate_batch` with the prefixes of prompts from tiers.

`open_tiered` opens a cache for a model. Inside its ``with`` block `generate_batch`, and what else uses continuous
batching, takes prefixes from tiers by itself; `TieredModel.past` gives a `TieredCache` for one call of `generate`.
"""

try:
    from tiered_kv.integrations.transformers.model import TieredModel, open_tiered
    from tiered_kv.integrations.transformers.past import TieredCache
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(
        "tiered_kv.integrations.transformers needs transformers: pip install 'tiered-kv[transformers]'", name=error.name
    ) from error

__all__ = ["TieredCache", "TieredModel", "open_tiered"]
