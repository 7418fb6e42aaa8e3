"""A program that ends with its cache open: started by test_blocking with a directory and how it ends.

Stores a prompt and prints how many blocks that was. ``open`` runs to its end and leaves the cache open;
``daemon`` has opened it in a thread that never ends; ``late`` is as ``open``, and calls the cache when that is closed.
"""

import atexit
import sys
import threading
from contextlib import ExitStack, suppress

from tests.support.engine import MODEL, PAYLOAD_BYTES, SMALL_LIMITS, Engine, prompt, small_layout
from tiered_kv import BlockingTieredKV, ClosedError, TieredKV, open_blocking

KEYS = prompt(9)
stack = ExitStack()


def serve(path: str) -> BlockingTieredKV:
    """Open a cache and store."""
    tiers = [f"cpu://?capacity={64 * PAYLOAD_BYTES}", f"file://{path}?capacity=64MiB"]
    cache = TieredKV(tiers, model=MODEL, layout=small_layout(), limits=SMALL_LIMITS, device="cpu", emit=lambda _: None)
    kv = stack.enter_context(open_blocking(cache))
    engine = Engine()
    kv.register_kv_caches(engine.caches)
    sys.stdout.write(f"{kv.store(KEYS, engine.compute(KEYS)).num_stored}\n")
    return kv


def call_late(kv: BlockingTieredKV) -> None:
    """Call a cache that has ended with the program, as an engine does that ends its connector last."""
    with suppress(ClosedError):
        kv.drain()
    stack.close()


def serve_for_ever(path: str, has_stored: threading.Event) -> None:
    """Open a cache, store, and never come back."""
    serve(path)
    has_stored.set()
    threading.Event().wait()


if __name__ == "__main__":
    if sys.argv[2] == "open":
        serve(sys.argv[1])
    elif sys.argv[2] == "late":
        atexit.register(call_late, serve(sys.argv[1]))
    else:
        stored = threading.Event()
        threading.Thread(target=serve_for_ever, args=(sys.argv[1], stored), daemon=True).start()
        stored.wait()
