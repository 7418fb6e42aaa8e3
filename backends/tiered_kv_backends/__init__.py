"""Storage media for tiered_kv, each an adapter found by entry point. Read ``memory.py`` first."""
