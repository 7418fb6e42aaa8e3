"""``python -m tiered_kv.cli``."""

from tiered_kv.cli import main

main()
