"""A small vLLM: its scheduler and model runner as far as a KV connector sees them. What its model computes is a digest.

The modules of vLLM that the connector imports are pretended. Each block is filled with bytes that its hash tells, in
the step that completes it, and scribbled over in the step in which its next owner begins to compute it: so a copy that
was made too early or too late is of wrong bytes.
"""

import asyncio
import hashlib
import importlib
import pickle
import sys
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import torch

from tiered_kv import ModelIdentity

BLOCK_SIZE: Final = 4
PAGE_BYTES: Final = 512
LAYERS: Final = ("layer0", "layer1")
STRIDE: Final = 4096
"""Of a block on the host, in bytes: two pages, padded."""


def pretended() -> dict[str, ModuleType]:
    """Return the modules of vLLM that the connector imports, as far as it uses them here."""

    class Base:
        pass

    @dataclass
    class Stats:
        data: dict[str, Any] = field(default_factory=dict)

    def as_blocks(tensor: torch.Tensor, _num_blocks: int) -> torch.Tensor:
        return tensor

    bases = (
        "KVCacheEvent", "BlockStored", "BlockRemoved", "CacheHitSource", "KVConnectorHandshakeMetadata",
        "KVConnectorMetadata", "KVConnectorWorkerMetadata", "KVConnectorBase_V1", "KVConnectorRole",
        "KVConnectorPromMetrics", "FullAttentionSpec", "MLAAttentionSpec", "UniformTypeKVCacheSpecs",
        "AttentionLayerBase",
    )  # fmt: skip
    names: dict[str, object] = {name: type(name, (Base,), {}) for name in bases}
    names |= {
        "__version__": "0.32.0",
        "KVConnectorStats": Stats,
        "generate_block_hash_extra_keys": None,
        "to_event_extra_keys": None,
        "get_layers_from_vllm_config": lambda *_: {},
        "get_tensor_model_parallel_rank": lambda: 0,
        "group_kernel_blocks": as_blocks,
    }
    modules = (
        "vllm", "vllm.config", "vllm.distributed", "vllm.distributed.kv_events", "vllm.distributed.kv_transfer",
        "vllm.distributed.kv_transfer.kv_connector", "vllm.distributed.kv_transfer.kv_connector.v1",
        "vllm.distributed.kv_transfer.kv_connector.v1.base", "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
        "vllm.distributed.parallel_state", "vllm.model_executor", "vllm.model_executor.layers",
        "vllm.model_executor.layers.attention_layer_base", "vllm.v1", "vllm.v1.core", "vllm.v1.core.kv_cache_utils",
        "vllm.v1.kv_cache_interface", "vllm.v1.metrics", "vllm.v1.metrics.cache_hit_source",
    )  # fmt: skip
    made = {name: ModuleType(name) for name in modules}
    for module in made.values():
        vars(module).update({**names, **vars(module)})
    return made


def connector() -> Any:  # noqa: ANN401 - a package that only exists beside vLLM
    """Import the connector beside a pretended vLLM; take both out of ``sys.modules`` afterwards."""
    ours = "tiered_kv.integrations.vllm"
    sys.modules.update(pretended())
    try:
        names = ("scheduling", "moving", "configuration", "messages", "storing")
        return SimpleNamespace(**{name: importlib.import_module(f"{ours}.{name}") for name in names})
    finally:
        for name in [each for each in sys.modules if each.partition(".")[0] == "vllm"]:
            del sys.modules[name]


VLLM: Final = connector()


@dataclass(eq=False)
class Request:
    """One of vLLM's requests, with what its scheduler keeps of it."""

    request_id: str
    num_prompt_tokens: int
    num_wanted: int
    cache_salt: str | None = None
    prompt: str = ""
    num_computed_tokens: int = 0
    num_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    is_loading: bool = False
    all_hashes: list[bytes] = field(default_factory=list)
    skip_reading_prefix_cache: bool = False
    lora_request: None = None

    def know(self, num_tokens: int) -> None:
        """Have so many tokens, and the hashes of their full blocks."""
        self.num_tokens = num_tokens
        self.block_hashes = [self.hash_of(at) for at in range(num_tokens // BLOCK_SIZE)]

    def hash_of(self, number: int) -> bytes:
        """Return the hash that a block has as soon as its tokens are known: what they are is no matter of chance."""
        for at in range(len(self.all_hashes), number + 1):
            parent = self.all_hashes[-1] if at else (self.cache_salt or "").encode()
            said = self.prompt if (at + 1) * BLOCK_SIZE <= self.num_prompt_tokens and self.prompt else self.request_id
            self.all_hashes.append(hashlib.sha256(parent + f"{said} {at}".encode()).digest())
        return self.all_hashes[number]


class SmallVLLM:
    """A vLLM that steps when it is told to.

    Attributes:
        scheduling: The scheduler's side of the connector.
        running: Requests that have blocks, the one that came first first.
        waiting: Requests that have none.
        num_free: Blocks that nobody has.
        num_preemptions: So far.
        orders: Of each step, the stores that the workers were told of, those before computing too.
    """

    def __init__(
        self,
        *tiers: Any,  # noqa: ANN401 - whatever a cache takes
        num_blocks: int = 256,
        num_ranks: int = 1,
        is_async: bool = False,
        role: str = "kv_both",
        limits: dict[str, Any] | None = None,
    ) -> None:
        """Start it over tiers, one step behind its own output if ``is_async``."""
        below = {"tiers": list(tiers), **({"limits": limits} if limits else {})}
        configuration = VLLM.configuration.Configuration(
            connector=VLLM.configuration.ConnectorSettings(),
            below=VLLM.configuration.below_of(below),
            model=ModelIdentity("small", weights="w0"),
            num_ranks=num_ranks, block_size=BLOCK_SIZE, hashes_per_block=1, layer_names=LAYERS, page_bytes=PAGE_BYTES,
            num_engine_blocks=num_blocks, loads=role != "kv_producer", stores=role != "kv_consumer",
            tells_events=False,
        )  # fmt: skip
        self.scheduling = VLLM.scheduling.SchedulingSide(configuration)
        self.memory: list[dict[str, torch.Tensor]] = []
        self.workers: list[Any] = []
        for rank in range(num_ranks):
            layers = {name: torch.zeros(num_blocks, PAGE_BYTES, dtype=torch.uint8) for name in LAYERS}
            worker = VLLM.moving.MovingSide(None, configuration)
            worker._rank = rank  # noqa: SLF001 - vLLM's own groups say it
            worker.register_kv_caches(layers)
            self.memory.append(layers)
            self.workers.append(worker)
        self.scheduling.open([worker.hello() for worker in self.workers])
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.orders: list[int] = []
        self.num_preemptions = 0
        self._kept: dict[str, Request] = {}
        self._free = deque(range(num_blocks))
        self._preempted: set[str] = set()
        self._said: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        self._is_async = is_async
        self._outputs: deque[tuple[list[Request], Any, set[str], set[str], set[int]]] = deque()

    @property
    def num_free(self) -> int:
        """See the class."""
        return len(self._free)

    def ask(
        self, name: str, num_prompt_tokens: int, num_wanted: int, salt: str | None = None, prompt: str = ""
    ) -> None:
        """Take a request; of equal ``prompt`` the first blocks are equal."""
        request = Request(name, num_prompt_tokens, num_wanted, salt, prompt)
        request.know(num_prompt_tokens)
        self.waiting.append(request)

    def preempt(self, *names: str) -> None:
        """Take blocks from running requests, the last one first: between steps, or while one is scheduled."""
        for request in [each for each in reversed(self.running) if each.request_id in names and not each.is_loading]:
            self.running.remove(request)
            self.num_preemptions += 1
            self._give_back(request)
            request.num_computed_tokens = 0
            self.waiting.appendleft(request)
            self._preempted.add(request.request_id)

    def abort(self, *names: str) -> None:
        """End requests, as a client that goes away does."""
        for request in [each for each in (*self.running, *self.waiting) if each.request_id in names]:
            (self.running if request in self.running else self.waiting).remove(request)
            self._end(request)

    def step(self, count: int = 1) -> None:
        """Do so many steps."""
        for _ in range(count):
            scheduled = self._schedule()
            step = pickle.loads(pickle.dumps(self.scheduling.next_step(scheduled)))
            self.orders.append(len(step.stores) + len(step.flushes))
            self._preempted = set()
            told = []
            for request, num in scheduled.of:
                first = request.num_computed_tokens
                request.num_computed_tokens += num
                told.append((request, first))
            self._outputs.append(self._execute(step, told))
            if len(self._outputs) > self._is_async:
                self._update(*self._outputs.popleft())

    def settle(self) -> None:
        """Step until nothing is left to do, and nothing is held."""
        while self.running or self.waiting or self._kept:
            self.step()
        while self._outputs:
            self._update(*self._outputs.popleft())

    def settle_loop(self) -> None:
        """Have the cache's event loop do what it was told to do."""
        for _ in range(3):  # a call from another thread makes another, and that may make one more
            self.scheduling.kv.call(asyncio.sleep, 0)

    def settle_copies(self) -> None:
        """Have the workers end the stores that they were told of."""
        wait([copy for worker in self.workers for copy in worker._stores])  # noqa: SLF001 - ours

    def close(self) -> None:
        """End."""
        for worker in self.workers:
            worker.close()
        self.scheduling.close()

    def is_right(self, request: Request, number: int, rank: int) -> bool:
        """Whether a request's block is what its hash tells."""
        block, expected = request.block_ids[number], _content(request.hash_of(number), rank)
        return all(bool((layer[block] == expected).all()) for layer in self.memory[rank].values())

    def _schedule(self) -> Any:  # noqa: ANN401 - as vLLM has it
        of: list[tuple[Request, int]] = []
        for request in list(self.running):
            if request.is_loading or request not in self.running:
                continue
            num_new = max(1, request.num_tokens - request.num_computed_tokens)
            if not self._allocate(request, request.num_computed_tokens + num_new):
                break
            of.append((request, num_new))
        while self.waiting and len(self.running) < 64:
            request = self.waiting[0]
            if (found := self.scheduling.find(request, 0)) is None:
                break
            if not self._allocate(request, request.num_tokens, may_preempt=False):
                break
            self.running.append(self.waiting.popleft())
            self.scheduling.begin(request, request.block_ids, found)
            request.num_computed_tokens = found
            if found:
                request.is_loading = True
            else:
                of.append((request, request.num_tokens))
        of = [(request, num) for request, num in of if request in self.running]
        tables = {request.request_id: (list(request.block_ids),) for request, _ in of}
        return SimpleNamespace(
            of=of,
            num_scheduled_tokens={request.request_id: num for request, num in of},
            preempted_req_ids=set(self._preempted),
            kv_connector_block_state=SimpleNamespace(get_block_ids=tables.get),
        )

    def _allocate(self, request: Request, num_tokens: int, *, may_preempt: bool = True) -> bool:
        num_more = -(-num_tokens // BLOCK_SIZE) - len(request.block_ids)
        while num_more > len(self._free):
            if not may_preempt or self.scheduling.frees_soon:
                return False
            victim = next(each for each in reversed(self.running) if not each.is_loading)
            self.preempt(victim.request_id)
            if victim is request:
                return False
        request.block_ids += [self._free.popleft() for _ in range(num_more)]
        return True

    def _execute(self, step: Any, told: list[tuple[Request, int]]) -> Any:  # noqa: ANN401 - as vLLM has it
        reports, ended = [], []
        for rank, worker in enumerate(self.workers):
            worker.before_computing(step)
            for request, first in told:
                self._compute(request, first, rank)
            worker.start_loads(step)
            worker.start_stores(step)
            ended.append(worker.ended())
            reports.append(worker.report() or VLLM.messages.Report())
        lost = set().union(*(worker.take_lost() for worker in self.workers))
        report = reports[0]
        for other in reports[1:]:
            report = report.aggregate(other)
        sent, loaded = (self._said_by_all(at, [said[at] for said in ended]) for at in range(2))
        return [request for request, _ in told], report, sent, loaded, lost

    def _said_by_all(self, what: int, said: list[set[str]]) -> set[str]:
        """Return the requests of which every rank has said something by now."""
        counts = self._said[what]
        for names in said:
            counts.update(names)
        done = {name for name, count in counts.items() if count == len(self.workers)}
        for name in done:
            del counts[name]
        return done

    def _compute(self, request: Request, first: int, rank: int) -> None:
        for at in range(first // BLOCK_SIZE, len(request.block_ids)):
            is_full = (at + 1) * BLOCK_SIZE <= request.num_computed_tokens
            for layer in self.memory[rank].values():
                layer[request.block_ids[at]] = _content(request.hash_of(at), rank) if is_full else 0xEE

    def _update(self, computed: list[Request], report: Any, sent: set[str], loaded: set[str], lost: set[int]) -> None:  # noqa: ANN401
        for request in computed:
            if request not in self.running or request.is_loading or request.num_computed_tokens < request.num_tokens:
                continue
            request.know(request.num_tokens + 1)
            if request.num_tokens - request.num_prompt_tokens >= request.num_wanted:
                self.running.remove(request)
                self._end(request)
        for request in [each for each in (*self.running, *self._kept.values()) if each.request_id in loaded]:
            holes = [at for at, block in enumerate(request.block_ids) if block in lost]
            if holes:
                request.num_computed_tokens = min(request.num_computed_tokens, holes[0] * BLOCK_SIZE)
            for at in range(request.num_computed_tokens // BLOCK_SIZE):
                if not all(self.is_right(request, at, rank) for rank in range(len(self.workers))):
                    raise AssertionError(f"{request.request_id} was given wrong bytes as its block {at}")
            request.is_loading = False
            if request not in self.running:  # it was aborted meanwhile
                self._give_back(self._kept.pop(request.request_id))
        self.scheduling.take(report, sent)
        for name in sent:
            self._give_back(self._kept.pop(name))

    def _end(self, request: Request) -> None:
        if self.scheduling.end(request) or request.is_loading:
            self._kept[request.request_id] = request
        else:
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        self._free.extend(reversed(request.block_ids))
        request.block_ids = []


def _content(digest: bytes, rank: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(hashlib.shake_128(digest + bytes([rank])).digest(PAGE_BYTES)), dtype=torch.uint8)


def small_vllm(*tiers: Any, **wanted: Any) -> Iterator[SmallVLLM]:  # noqa: ANN401 - as above
    """Yield one, and end it."""
    engine = SmallVLLM(*tiers, **wanted)
    try:
        yield engine
    finally:
        engine.close()
