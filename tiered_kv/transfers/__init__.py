"""What moves blocks: loads, stores, prefetches, swaps, and the jobs of other threads and processes."""
