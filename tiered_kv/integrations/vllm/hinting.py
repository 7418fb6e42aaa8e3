"""What is done with the KV hints that requests bring: by the cache's event loop, when their blocks are stored.

The scheduler's thread reads them as a request comes, and says when it has ended; it waits for nothing. Whoever sends
hints says what is in them: whatever is wrong there, or here, costs the hints and not the engine.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tiered_kv.cache.hinted import MOST_WAITING, Hints
from tiered_kv.integrations.vllm.configuration import EngineGroup
from tiered_kv.integrations.vllm.counts import Counts
from tiered_kv.integrations.vllm.messages import Tracked
from tiered_kv.integrations.vllm.naming import RequestNaming
from tiered_kv.integrations.vllm.storing import PendingStores
from tiered_kv.transfers.jobs import Job
from tiered_kv.values.hints import HintAction, blocks_meant, delay_of, envelope_in, read_hints
from tiered_kv.values.log import Seldom


class Hinting:
    """The hints of the requests that vLLM has, and of those that have just ended."""

    def __init__(
        self,
        hints: Hints,
        groups: tuple[EngineGroup, ...],
        counts: Counts,
        naming: RequestNaming,
        *,
        call: Callable[..., object],
    ) -> None:
        """Begin with none.

        Args:
            hints: Does what they ask for.
            groups: The KV groups.
            counts: What is counted.
            naming: Names blocks.
            call: Has the cache's event loop call something, without waiting.
        """
        self._hints = hints
        self._groups = groups
        self._counts = counts
        self._naming = naming
        self._call = call
        self._wanted: dict[str, list[HintAction]] = {}
        self._ended: list[tuple[Tracked, list[HintAction]]] = []
        self._seldom = Seldom()
        self._has_hinted = False  # until then nobody need know what is asked for

    def come(self, request: Any) -> None:
        """Read what a request brings, and have done what is to be done at once."""
        actions: list[HintAction] = []
        with self._guarded(1):  # of what cannot be read nobody knows how many it asks for
            actions = self._read(request)
        with self._guarded(0):
            self._use(request)
        if now := [each for each in actions if each.after_s is None]:
            with self._guarded(len(now)):
                self._begin([], request, now)
        if later := [each for each in actions if each.after_s is not None]:
            self._wanted[request.request_id] = later

    def _read(self, request: Any) -> list[HintAction]:
        envelope = getattr(request, "kv_hints", None)
        if envelope is None and (params := request.kv_transfer_params):
            envelope = envelope_in(params)  # of vLLM's HTTP server, which has no field for hints of its own
        actions, num_ignored = read_hints(envelope)
        if actions and len(self._wanted) >= MOST_WAITING:
            actions, num_ignored = [], num_ignored + len(actions)
        self._counts.hints(len(actions), num_ignored)
        return actions

    def end(self, tracked: Tracked | None, request: Any) -> None:
        """Take note that a request has ended. Its hints come behind its stores."""
        actions = self._wanted.pop(request.request_id, None)
        with self._guarded(0):
            self._use(request)  # what it had fetched for itself
        if actions and tracked is not None:  # else it has never had its turn
            self._ended.append((tracked, actions))

    def step(self, storing: PendingStores) -> None:
        """Hand on the hints of requests that have ended, once jobs hold all that is stored of them."""
        if not self._ended:
            return
        waiting, self._ended = self._ended, []
        for tracked, actions in waiting:
            if tracked.num_due:
                self._ended.append((tracked, actions))
            elif tracked.may_store:
                with self._guarded(len(actions)):
                    self._begin(storing.jobs_of(tracked), tracked.request, actions)

    @contextmanager
    def _guarded(self, num_actions: int) -> Iterator[None]:
        """Count an error as so many actions that are passed over, and log it: vLLM's scheduler goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - what somebody has sent must not end the engine
            self._counts.hints(0, num_actions)
            self._seldom.failed("KV hints", error)

    def _use(self, request: Any) -> None:
        """Say which blocks a request asks for: hints that said so were right."""
        if not self._has_hinted or not self._naming.can_name(request):
            return
        keys = [
            self._naming.keys(group, request, 0, len(request.block_hashes) // group.hashes_per_block)
            for group in self._groups
        ]
        self._call(self._hints.use, keys, request.cache_salt or "")

    def _begin(self, jobs: list[Job], request: Any, actions: list[HintAction]) -> None:
        if not self._naming.can_name(request):  # nothing of it is kept
            return
        meant = []
        for group in self._groups:
            hashes = request.block_hashes[group.hashes_per_block - 1 :: group.hashes_per_block]
            sizes = {"block_size": group.block_size, "num_prompt_tokens": request.num_prompt_tokens}
            for action, blocks in blocks_meant(actions, hashes, **sizes):
                first = blocks.start
                if action.kind not in {"demote", "evict"}:  # without the others it is of no less use
                    first = max(first, group.num_left(blocks.stop * group.block_size))
                meant.append((action, self._naming.keys(group, request, first, blocks.stop)))
        meant.sort(key=lambda each: delay_of(each[0]))  # of all groups
        if meant:
            self._has_hinted = True
            self._call(self._hints.begin, meant, request.cache_salt or "", jobs)

    def forget(self) -> None:
        """Other weights are served: what requests have computed before is nobody's."""
        self._wanted.clear()
        self._ended.clear()
