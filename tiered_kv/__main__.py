"""``python -m tiered_kv``: the command line ``tiered-kv``."""

from tiered_kv.cli import main

if __name__ == "__main__":
    main()
