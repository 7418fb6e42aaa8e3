"""``python -m tiered_kv.cli``."""

from tiered_kv.cli import main

if __name__ == "__main__":
    main()
