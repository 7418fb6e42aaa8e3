"""A serving engine with a synchronous step loop, and tiered_kv beside it: submit, compute something else, poll.

Clients hand in prompts from threads of their own; the engine serves them in one loop, which waits for the cache only
when it has nothing to compute. The model is a stand-in whose KV is known for every block, so that what is loaded can be
compared.

    python examples/engine_threads.py
"""

import queue
import threading
from dataclasses import dataclass, field

import torch

from tiered_kv import (
    BlockingTieredKV,
    BlockKeys,
    GPULoadStoreSpec,
    KVLayout,
    LoadResult,
    LoadTicket,
    ModelIdentity,
    StoreTicket,
    TieredKV,
    hash_blocks,
    open_blocking,
)

BLOCK_SIZE, NUM_PAGES = 16, 64
SYSTEM_PROMPT = range(4 * BLOCK_SIZE)
Ticket = LoadTicket | StoreTicket


@dataclass
class Request:
    """A prompt, the engine's pages for it once it is admitted, and how many of them were loaded."""

    keys: BlockKeys
    pages: list[int] = field(default_factory=list)
    num_loaded: int = 0
    done: threading.Event = field(default_factory=threading.Event)


class Engine:
    """A paged KV cache and a loop. Its pages belong to it, to a load or to a store; the dicts below say to which."""

    def __init__(self) -> None:
        self.kv_caches = [torch.zeros(NUM_PAGES, 2, BLOCK_SIZE, 2, 64) for _layer in range(4)]
        self.waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self.stopping, self.has_ended = threading.Event(), threading.Event()
        self.free = list(range(NUM_PAGES))
        self.loading: dict[Ticket, Request] = {}  # the cache writes their pages
        self.ready: list[Request] = []  # the engine computes in their pages
        self.storing: dict[Ticket, list[int]] = {}  # the cache reads these pages
        self.num_loaded = self.num_computed = self.num_wrong = 0

    def run(self, kv: BlockingTieredKV) -> None:
        """Serve until told to stop, then until everything has ended."""
        try:
            while not (self.stopping.is_set() and self.waiting.empty() and not self.loading and not self.storing):
                self.admit(kv)
                # With something to compute the loop only looks; with nothing it waits, a little, for the cache.
                self.collect(kv, timeout_s=0.0 if self.ready else 0.001)
                if self.ready:
                    self.compute(kv, self.ready.pop(0))
        finally:  # by an exception, too: no client waits for an engine that serves nobody any more
            self.has_ended.set()

    def serve(self, request: Request) -> bool:
        """Hand in a prompt and wait until it is computed, in a client's thread; say whether it was."""
        self.waiting.put(request)
        while not request.done.wait(0.1):
            if self.has_ended.is_set():
                return request.done.is_set()
        return True

    def admit(self, kv: BlockingTieredKV) -> None:
        """Give waiting requests pages, and have the cache fill those that it knows."""
        while not self.waiting.empty():
            request = self.waiting.get()
            if len(request.keys) > len(self.free):
                self.waiting.put(request)
                return
            request.pages = [self.free.pop() for _ in request.keys]
            n = kv.lookup_nowait(request.keys).num_blocks
            if n == 0:
                self.ready.append(request)
                continue
            # On a GPU: after=event, recorded behind the last kernel that used these pages.
            ticket = kv.submit_load(request.keys[:n], GPULoadStoreSpec(request.pages[:n]), deadline_s=1.0)
            self.loading[ticket] = request

    def collect(self, kv: BlockingTieredKV, *, timeout_s: float) -> None:
        """Take back the pages of whatever has ended."""
        for ticket, result in kv.poll(timeout_s):
            if isinstance(result, LoadResult):
                request = self.loading.pop(ticket)
                request.num_loaded = result.num_blocks  # behind them the pages may hold anything
                self.ready.append(request)
            else:
                self.free += self.storing.pop(ticket)

    def compute(self, kv: BlockingTieredKV, request: Request) -> None:
        """Check what was loaded, compute the rest, answer, and have the cache keep what is new."""
        n = request.num_loaded
        for key, page in zip(request.keys[:n], request.pages[:n], strict=True):
            self.num_wrong += any(not torch.equal(layer[page], block_of(key, layer)) for layer in self.kv_caches)
        for key, page in zip(request.keys[n:], request.pages[n:], strict=True):
            for layer in self.kv_caches:
                layer[page] = block_of(key, layer)
        self.num_loaded += n
        self.num_computed += len(request.keys) - n
        # The pages are the store's until it has ended, so they are not free yet. On a GPU: after=event.
        ticket = kv.submit_store(request.keys, GPULoadStoreSpec(request.pages))
        self.storing[ticket] = request.pages
        request.done.set()


def block_of(key: bytes, layer: torch.Tensor) -> torch.Tensor:
    """Return what the stand-in model computes for a block: known, and another for every key."""
    return torch.full_like(layer[0], int.from_bytes(key[:3], "big"))


def chat(engine: Engine, client: int, num_turns: int) -> None:
    """One client: each prompt is the one before, and more. Runs in its own thread."""
    prompt = list(SYSTEM_PROMPT)
    for turn in range(num_turns):
        prompt += range(1000 * client + 100 * turn, 1000 * client + 100 * turn + 2 * BLOCK_SIZE)
        if not engine.serve(Request(hash_blocks(prompt, block_size=BLOCK_SIZE))):
            return


def main() -> None:
    """Serve four chats of four turns upon one system prompt."""
    engine = Engine()
    layout = KVLayout.from_tensors(engine.kv_caches, block_size=BLOCK_SIZE, axes="BPNHD")
    model = ModelIdentity("stand-in", weights="none")
    cache = TieredKV(["cpu://?capacity=64MiB"], model=model, layout=layout, device="cpu")
    with open_blocking(cache) as kv:
        kv.register_kv_caches(engine.kv_caches, axes="BPNHD")
        serving = threading.Thread(target=engine.run, args=(kv,))
        clients = [threading.Thread(target=chat, args=(engine, client, 4)) for client in range(4)]
        for thread in (serving, *clients):
            thread.start()
        try:
            for thread in clients:
                thread.join()
        finally:  # after Ctrl-C, too: the cache is closed behind this, and what is under way ends first
            engine.stopping.set()
            serving.join()
    total = engine.num_loaded + engine.num_computed
    print(f"{total} blocks: {engine.num_loaded} loaded, {engine.num_computed} computed, {engine.num_wrong} wrong")
    print(f"pages free again: {len(engine.free)} of {NUM_PAGES}")


if __name__ == "__main__":
    main()
