"""Continuous batching in asyncio: each request is a coroutine, and whatever they ask for at a time is one step.

Where tiered_kv comes in: a sequence that enters has its prefix loaded (`Engine._enter`); blocks that are full are
stored (`Engine._keep`); a sequence that must make room for an older one is swapped out, and in again later, or computed
anew (`Engine._leave`). While blocks are loaded and stored, the others go on computing.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Literal

from paged_llama import BLOCK_SIZE, PagedLlama, Work, blocks_for
from tiered_kv import (
    BlockKeys,
    ClosedError,
    GPULoadStoreSpec,
    ReuseHint,
    StoreHandle,
    TieredKV,
    hash_blocks,
    hash_tail,
)

CHUNK = 128
"""Tokens of a prompt that one step computes: longer ones would keep everyone else waiting."""


@dataclass(eq=False)
class Generation:
    """A sequence that is being continued.

    Attributes:
        prompt: Its tokens, one at least.
        salt: Equal prompts of other salts share nothing with it.
        hint: What is known of its future when it has ended: that a tool is called, or that nothing comes behind it.
        num_shared: Of its first tokens, how many other prompts begin with: no hint is about these.
        age: Numbers requests as they come: older ones go first.
        num_cached: Tokens of the prompt whose KV was loaded when it entered.
        tokens: The prompt, and what was generated.
        num_computed: Of these, the leading ones whose KV is in the blocks.
        block_ids: Its blocks, in order.
        must_leave: An older one needs its blocks.
        away: What was swapped out, and is to be swapped in; the keys, and how many tokens they are of.
        num_kept: Its leading blocks that the cache has, or is getting.
        storing: Stores that may still read its blocks.
    """

    prompt: Sequence[int]
    salt: str = ""
    hint: ReuseHint | None = None
    num_shared: int = 0
    age: int = field(default_factory=count().__next__)
    num_cached: int = 0
    tokens: list[int] = field(init=False)
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    must_leave: bool = False
    away: tuple[BlockKeys, int] | None = None
    num_kept: int = 0
    storing: list[StoreHandle] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)


class Pages:
    """The blocks of the paged cache, and the line of those who wait for some, the oldest first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._holders: set[Generation] = set()
        self._line: list[Generation] = []
        self._changed = asyncio.Event()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    async def take(self, request: Generation, num_blocks: int) -> bool:
        """Give a request so many more blocks, once there are, or say False: it must leave.

        The first in the line has the youngest of those who hold blocks leave, if that is younger.
        """
        self._line.append(request)
        self._line.sort(key=lambda each: each.age)
        try:
            while not request.must_leave:
                if self._line[0] is request and self._give(request, num_blocks):
                    return True
                await self._changed.wait()
            return False
        finally:
            self._line.remove(request)
            self._tell()

    def release(self, request: Generation) -> None:
        """Take all blocks of a request back, as soon as no store reads them any more."""
        block_ids, request.block_ids, request.must_leave = request.block_ids, [], False
        self._holders.discard(request)
        storing = [handle for handle in request.storing if not handle.done]
        request.storing = []
        num_reading = len(storing)

        def give_back() -> None:
            self._free += block_ids
            self._tell()

        def stored(_: object) -> None:
            nonlocal num_reading
            num_reading -= 1
            if not num_reading:
                give_back()

        for handle in storing:
            handle.when_done(stored)
        if not storing:
            give_back()

    def _give(self, request: Generation, num_blocks: int) -> bool:
        if num_blocks <= self.num_free:
            request.block_ids += [self._free.pop() for _ in range(num_blocks)]
            self._holders.add(request)
            return True
        youngest = max(self._holders, key=lambda each: each.age, default=request)
        if youngest.age > request.age:
            youngest.must_leave = True
            self._tell()
        return False

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Steps:
    """Steps of the model, one after another in a thread of its own: each takes all that waits for one."""

    def __init__(self, model: PagedLlama) -> None:
        self._model = model
        self._waiting: list[tuple[Work, asyncio.Future[int]]] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self._is_running = False

    async def compute(self, work: Work) -> int:
        """Have it computed, and return the next token. Cancelled, it ends when no step uses the blocks any more."""
        loop = asyncio.get_running_loop()
        token: asyncio.Future[int] = loop.create_future()
        self._waiting.append((work, token))
        if not self._is_running:
            self._is_running = True
            loop.call_soon(self._begin, loop)
        cancelled = False
        while not token.done():
            try:
                await asyncio.wait({token})
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError
        return token.result()

    # No task: what a loop that ends cancels could not say how the step has ended.

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        batch, self._waiting = self._waiting, []
        self._is_running = bool(batch)
        if batch:
            step = loop.run_in_executor(self._thread, self._model.compute, [work for work, _ in batch])
            step.add_done_callback(partial(self._ended, loop, [token for _, token in batch]))

    def _ended(
        self,
        loop: asyncio.AbstractEventLoop,
        tokens: Sequence["asyncio.Future[int]"],
        step: "asyncio.Future[Sequence[int]]",
    ) -> None:
        if (error := step.exception()) is not None:
            for token in tokens:
                token.set_exception(error)  # each of them has to hear of it
        else:
            for token, said in zip(tokens, step.result(), strict=True):
                token.set_result(said)
        loop.call_soon(self._begin, loop)  # who got a token asks for its next one: that is one step again


class Engine:
    """Continues token sequences, from one event loop, with ``kv`` under its pages."""

    def __init__(
        self, model: PagedLlama, kv: TieredKV, num_blocks: int, *, preempts_by: Literal["swap", "recompute"] = "swap"
    ) -> None:
        """Take a model with ``num_blocks`` blocks, whose tensors ``kv`` has registered.

        Args:
            model: Computes.
            kv: Keeps blocks.
            num_blocks: Of the model's pages.
            preempts_by: What becomes of a sequence that must make room: its blocks are swapped out, or forgotten.
        """
        self.kv = kv
        self.pages = Pages(num_blocks)
        self.num_preempted = 0
        self._steps = Steps(model)
        self._preempts_by = preempts_by

    def generate(self, request: Generation, max_tokens: int) -> AsyncGenerator[int]:
        """Return what yields so many tokens, computed ahead of who takes them. Close it: it gives back all it holds.

        Raises:
            ValueError: There is no prompt, or it can never fit.
        """
        num_tokens, most = len(request.prompt), self.pages.num_blocks * BLOCK_SIZE
        if not num_tokens or not 0 < max_tokens <= most - num_tokens:
            raise ValueError(f"{num_tokens} tokens and {max_tokens} new ones: at least 1 of each, {most} in all")
        return self._generate(request, max_tokens)

    async def _generate(self, request: Generation, max_tokens: int) -> AsyncGenerator[int]:
        said: asyncio.Queue[int | None] = asyncio.Queue()
        running = asyncio.create_task(self._run(request, max_tokens, said))  # a slow reader delays nobody else
        try:
            while (token := await said.get()) is not None:
                yield token
            running.result()
        finally:
            running.cancel()
            await asyncio.wait({running})

    async def _run(self, request: Generation, max_tokens: int, said: "asyncio.Queue[int | None]") -> None:
        try:
            await self._enter(request)
            request.num_cached = request.num_computed
            for _ in range(max_tokens):
                token = await self._next(request)
                request.tokens.append(token)
                said.put_nowait(token)
            self._keep(request, request.hint)
        finally:
            self.pages.release(request)
            self._let_go(request)
            asyncio.get_running_loop().call_soon(said.put_nowait, None)  # when this task is done

    async def _enter(self, request: Generation) -> None:
        """Get blocks, and load into them what is known: all but the last token, whose logits are wanted."""
        if not await self.pages.take(request, blocks_for(len(request.tokens))):
            raise AssertionError("who has no blocks need not leave")
        if request.away is not None:
            keys, num_tokens = request.away
            loaded = await self.kv.swap_in(keys, GPULoadStoreSpec(request.block_ids[: len(keys)]))
            self._let_go(request)  # what has not come back will be computed
        else:
            num_tokens = len(request.tokens) - 1
            keys = hash_blocks(request.tokens[:num_tokens], block_size=BLOCK_SIZE, salt=request.salt)
            loaded = await self.kv.load(keys, GPULoadStoreSpec(request.block_ids[: len(keys)]))
        request.num_computed = min(loaded.num_blocks * BLOCK_SIZE, num_tokens)
        request.num_kept = request.num_computed // BLOCK_SIZE

    async def _next(self, request: Generation) -> int:
        """Compute all tokens that are not computed, and return the one that follows."""
        while True:
            missing = blocks_for(len(request.tokens)) - len(request.block_ids)
            if request.must_leave or (missing > 0 and not await self.pages.take(request, missing)):
                await self._leave(request)
                await self._enter(request)
                continue
            start = request.num_computed
            chunk = request.tokens[start : start + CHUNK]
            token = await self._steps.compute(Work(chunk, start, request.block_ids))
            request.num_computed += len(chunk)
            if request.num_computed == len(request.tokens):
                if len(chunk) > 1:
                    self._keep(request)  # the prompt: others may begin with it while this one is being continued
                return token

    async def prefetch(self, prompt: Sequence[int], salt: str) -> None:
        """Bring what is known of a prompt that is about to come to memory, such as when its tool has answered."""
        await self.kv.prefetch(hash_blocks(prompt, block_size=BLOCK_SIZE, salt=salt), to="cpu")

    def _keep(self, request: Generation, hint: ReuseHint | None = None) -> None:
        """Start to store the blocks that are full and were not stored. They do not change until they are released.

        Of those that were, say what is known of their future.
        """
        keys = hash_blocks(request.tokens[: request.num_computed], block_size=BLOCK_SIZE, salt=request.salt)
        done = request.num_kept
        if done < len(keys):
            storing = self.kv.start_store(keys[done:], GPULoadStoreSpec(request.block_ids[done : len(keys)]), hint=hint)
            request.storing.append(storing)
            request.num_kept = len(keys)
        if hint is not None:
            self.kv.touch(keys[blocks_for(request.num_shared) : done], hint=hint)

    async def _leave(self, request: Generation) -> None:
        """Give all blocks back to an older request."""
        self.num_preempted += 1
        computed = request.tokens[: request.num_computed]
        if self._preempts_by == "swap" and computed:
            full = hash_blocks(computed, block_size=BLOCK_SIZE, salt=request.salt)
            keys = full + hash_tail(computed[len(full) * BLOCK_SIZE :], parent=full)
            request.away = keys, len(computed)
            await self.kv.swap_out(keys, GPULoadStoreSpec(request.block_ids[: len(keys)]))
        self.pages.release(request)

    def _let_go(self, request: Generation) -> None:
        """What was swapped out is not wanted any more."""
        if request.away is not None:
            with suppress(ClosedError):
                self.kv.unpin(request.away[0])
            request.away = None
