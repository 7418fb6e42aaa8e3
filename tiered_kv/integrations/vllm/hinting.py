"""What is done with the KV hints that requests bring: by the cache's event loop, when their blocks are stored.

The scheduler's thread reads them as a request comes, and says when it has ended; it waits for nothing.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from tiered_kv.cache.block_cache import BlockCache
from tiered_kv.integrations.kv_hints import Favours, HintAction, read_hints
from tiered_kv.integrations.vllm.configuration import Configuration, EngineGroup
from tiered_kv.integrations.vllm.counts import Counts
from tiered_kv.integrations.vllm.messages import Tracked
from tiered_kv.integrations.vllm.naming import Naming
from tiered_kv.integrations.vllm.storing import Storing
from tiered_kv.transfers.jobs import Job
from tiered_kv.values.errors import ClosedError
from tiered_kv.values.hints import ReuseHint
from tiered_kv.values.keys import BlockKeys
from tiered_kv.values.log import log

MOST_WAITING: Final = 1024
"""Requests with hints that have come or ended, and delays: of more the hints are passed over."""
_STORED_S: Final = 10.0
"""What was not stored by then is passed over."""
_LOOK_S: Final = 0.02
_NAMES: Final = ("kv_hints", "kv_hint")
"""In ``kv_transfer_params``, which vLLM's HTTP server takes; it has no field for hints of its own."""


class Hinting:
    """The hints of the requests that vLLM has, and of those that have just ended."""

    def __init__(
        self,
        cache: BlockCache,
        configuration: Configuration,
        counts: Counts,
        naming: Naming,
        *,
        call: Callable[..., object],
        memory: str,
        num_slots: int,
    ) -> None:
        """Begin with none.

        Args:
            cache: That is told.
            configuration: What is wanted.
            counts: What is counted.
            naming: Names blocks.
            call: Has the cache's event loop call something, without waiting.
            memory: The name of the tier that blocks are prefetched to.
            num_slots: Of that tier: a share of them may be favoured for each tenant, and half of them for all.
        """
        self._cache = cache
        self._groups: tuple[EngineGroup, ...] = configuration.groups
        self._counts = counts
        self._naming = naming
        self._call = call
        self._memory = memory
        self._favours = Favours(int(num_slots * configuration.connector.hint_share), num_slots // 2)
        self._wanted: dict[str, list[HintAction]] = {}
        self._ended: list[tuple[Tracked, list[HintAction]]] = []
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop's

    def come(self, request: Any) -> None:
        """Read what a request brings, and have done what is to be done at once."""
        envelope = getattr(request, "kv_hints", None)
        if envelope is None and (params := request.kv_transfer_params):
            envelope = next((params[name] for name in _NAMES if params.get(name) is not None), None)
        actions, num_ignored = read_hints(envelope)
        if actions and len(self._wanted) >= MOST_WAITING:
            actions, num_ignored = [], num_ignored + len(actions)
        self._counts.hints(len(actions), num_ignored)
        if now := [each for each in actions if each.after_s is None]:
            self._begin([], request, now)
        if later := [each for each in actions if each.after_s is not None]:
            self._wanted[request.request_id] = later

    def end(self, tracked: Tracked | None, request: Any) -> None:
        """Take note that a request has ended. Its hints come behind its stores."""
        actions = self._wanted.pop(request.request_id, None)
        if actions and tracked is not None:  # else it has never had its turn
            self._ended.append((tracked, actions))

    def step(self, storing: Storing) -> None:
        """Hand on the hints of requests that have ended, once jobs hold all that is stored of them."""
        if not self._ended:
            return
        waiting, self._ended = self._ended, []
        for tracked, actions in waiting:
            if tracked.num_due:
                self._ended.append((tracked, actions))
            elif tracked.may_store:
                self._begin(storing.jobs_of(tracked), tracked.request, actions)

    def _begin(self, jobs: list[Job], request: Any, actions: list[HintAction]) -> None:
        if not self._naming.can_name(request):  # nothing of it is kept
            return
        meant = []
        for action in actions:
            for group in self._groups:
                each = group.hashes_per_block
                hashes = request.block_hashes[each - 1 :: each]
                ranges = action.ranges(hashes, group.block_size, request.num_prompt_tokens)
                for blocks in ranges:
                    first = blocks.start
                    if group.num_blocks is not None and action.kind not in {"demote", "evict"}:
                        first = max(first, blocks.stop - group.num_blocks)  # without the others it is of no less use
                    meant.append((action, self._naming.keys(group, request, first, blocks.stop)))
        if meant:
            self._call(self._start, jobs, meant, request.cache_salt or "")

    def _start(self, jobs: list[Job], meant: list[tuple[HintAction, BlockKeys]], salt: str) -> None:
        if len(self._tasks) >= MOST_WAITING:
            return
        task = asyncio.get_running_loop().create_task(self._run(jobs, meant, salt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, jobs: list[Job], meant: list[tuple[HintAction, BlockKeys]], salt: str) -> None:
        """Wait until blocks are stored, then act. Whoever awaits a job takes its news from the scheduler."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while any(job.result is None for job in jobs) and loop.time() < began_s + _STORED_S:  # noqa: ASYNC110 - see above
            await asyncio.sleep(_LOOK_S)
        for action, keys in sorted(meant, key=lambda each: each[0].after_s or 0.0):
            await asyncio.sleep(max(0.0, began_s + (action.after_s or 0.0) - loop.time()))
            try:
                await self._act(action, keys, salt)
            except ClosedError:
                return
            except Exception as error:  # noqa: BLE001 - what somebody has sent must not end the others
                log("error", "background.failed", exc_info=error, task="KV hints")

    async def _act(self, action: HintAction, keys: BlockKeys, salt: str) -> None:
        if action.kind in {"demote", "evict"}:
            if action.kind == "evict" and salt:  # what has no salt is everybody's
                await self._cache.evict(keys)
            else:
                self._cache.touch(keys, hint=ReuseHint(0.0))
            return
        now_s = asyncio.get_running_loop().time()
        named = [bytes([keys.group]) + each for each in keys]
        num_blocks = self._favours.take(salt, named, now_s=now_s, for_s=action.for_s)
        self._counts.favoured(num_blocks, len(keys) - num_blocks)
        if not num_blocks:
            return
        if action.kind == "retain":
            hint = ReuseHint(action.probability, within_s=action.for_s, category="kv.retain")
            self._cache.touch(keys[:num_blocks], hint=hint)
        elif action.kind == "pin":
            self._cache.pin(keys[:num_blocks], ttl_s=action.for_s)
        else:
            await self._cache.prefetch(keys[:num_blocks], to=self._memory)

    def forget(self) -> None:
        """Other weights are served: what requests have computed before is nobody's."""
        self._wanted.clear()
        self._ended.clear()

    async def settle(self) -> None:
        """Wait until all that was begun is done, delays included."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def aclose(self) -> None:
        """End what waits."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
