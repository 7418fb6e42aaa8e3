"""What our own metrics say, in the process of an engine."""

from prometheus_client import REGISTRY


def own_lookups() -> dict[str, float]:
    """Return the blocks that were looked up, and by reason those that were not found."""
    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    asked = sum(each.value for each in samples if each.name == "tiered_kv_lookup_blocks_total")
    missed = [each for each in samples if each.name == "tiered_kv_lookup_missed_blocks_total" and each.value]
    return {"asked": asked} | {each.labels["reason"]: each.value for each in missed}
