"""A deterministic simulation of caches in virtual time: see `tiered_kv.testing.simulation.run`."""
