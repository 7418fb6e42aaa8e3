"""A small vLLM: its scheduler and model runner as far as a KV connector sees them. What its model computes is a digest.

The modules of vLLM that the connector imports are pretended. Each block is filled with bytes that its hash tells, in
the step that completes it, and scribbled over in the step in which its next owner begins to compute it: so a copy that
was made too early or too late is of wrong bytes. Each step looks at every block that attention would read.

Its layers may be of several KV groups: with full attention, with windows, which lose blocks as they go, and with
states, of which each step has another block.
"""

import asyncio
import hashlib
import importlib
import pickle
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from functools import cache
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

    class Factory:
        register_connector = staticmethod(lambda *_: None)

    class SecondaryTierManager:
        def __init__(self, *_: object) -> None:
            self.block_size_bytes = PAGE_BYTES

    def as_blocks(tensor: torch.Tensor, _num_blocks: int) -> torch.Tensor:
        return tensor

    bases = (
        "KVCacheEvent", "KVConnectorHandshakeMetadata",
        "KVConnectorMetadata", "KVConnectorWorkerMetadata", "KVConnectorBase_V1", "KVConnectorRole",
        "KVConnectorPromMetrics", "FullAttentionSpec", "MLAAttentionSpec", "UniformTypeKVCacheSpecs",
        "AttentionLayerBase", "ChunkedLocalAttentionSpec", "CircularBufferSpec", "SlidingWindowMLASpec",
        "SlidingWindowSpec", "MambaSpec", "SupportsHMA",
        "KVConnectorTransferResults", "LookupResult", "RequestOffloadingContext", "JobResult",
    )  # fmt: skip
    names: dict[str, object] = {name: type(name, (Base,), {}) for name in bases}
    names |= {
        "__version__": "0.32.0",
        "KVConnectorStats": Stats,
        "SecondaryTierManager": SecondaryTierManager,
        "Medium": SimpleNamespace(STORAGE="storage"),
        "CacheHitSource": SimpleNamespace(HOST="host", DISK="disk", EXTERNAL_UNSPECIFIED="others"),
        "get_offload_block_hash": None,
        "get_offload_group_idx": None,
        "generate_block_hash_extra_keys": lambda request, _start, _end, at: ([request.lora_request.lora_name], at),
        "to_event_extra_keys": lambda keys: keys,
        "BlockStored": type("BlockStored", (SimpleNamespace,), {}),
        "BlockRemoved": type("BlockRemoved", (SimpleNamespace,), {}),
        "get_layers_from_vllm_config": lambda *_: {},
        "current_platform": SimpleNamespace(device_name="cpu", fp8_dtype=lambda: torch.float8_e4m3fn),
        "get_pp_group": None,
        "get_tensor_model_parallel_rank": lambda: 0,
        "group_kernel_blocks": as_blocks,
        "KVConnectorFactory": Factory,
    }
    modules = (
        "vllm", "vllm.config", "vllm.distributed", "vllm.distributed.kv_events", "vllm.distributed.kv_transfer",
        "vllm.distributed.kv_transfer.kv_connector", "vllm.distributed.kv_transfer.kv_connector.factory",
        "vllm.distributed.kv_transfer.kv_connector.v1",
        "vllm.distributed.kv_transfer.kv_connector.v1.base", "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
        "vllm.distributed.parallel_state", "vllm.model_executor", "vllm.model_executor.layers",
        "vllm.model_executor.layers.attention_layer_base", "vllm.platforms", "vllm.v1", "vllm.v1.core",
        "vllm.v1.core.kv_cache_utils", "vllm.v1.kv_cache_interface", "vllm.v1.kv_offload", "vllm.v1.kv_offload.base",
        "vllm.v1.kv_offload.tiering", "vllm.v1.kv_offload.tiering.base", "vllm.v1.metrics",
        "vllm.v1.metrics.cache_hit_source",
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
        names = [
            "compatibility",
            "scheduling",
            "moving",
            "configuration",
            "model_identity",
            "messages",
            "counts",
            "hinting",
            "loading",
            "naming",
            "offload_tier",
            "paying",
            "waiting_room",
            "storing",
            "tier_events",
        ]
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
    tables: list[list[int]] = field(default_factory=list)
    is_loading: bool = False
    all_hashes: list[bytes] = field(default_factory=list)
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    kv_hints: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    shared_prefix_boundary: int = 0

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


class Pool:
    """Blocks, as vLLM counts who has them, and what they hold until they are taken. Number 0 stands for none."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [
            SimpleNamespace(block_id=number, ref_cnt=0, block_hash=None, next_free_block=None)
            for number in range(num_blocks + 1)
        ]
        self.free = deque(range(1, num_blocks + 1))
        self.cached: dict[bytes, int] = {}

    @property
    def free_block_queue(self) -> "Pool":
        """The queue of what is free."""
        return self

    @property
    def fake_free_list_head(self) -> Any:  # noqa: ANN401 - as vLLM has it
        """The one before the first that is free, each of which knows the next."""
        head = SimpleNamespace(next_free_block=None)
        before = head
        for number in self.free:
            before.next_free_block = before = self.blocks[number]
        before.next_free_block = None
        return head

    fake_free_list_tail = None

    def remove(self, block: Any) -> None:  # noqa: ANN401 - as above
        """Take one out of the queue."""
        self.free.remove(block.block_id)

    def prepend_n(self, blocks: list[Any]) -> None:
        """Have these be the next."""
        self.free.extendleft(block.block_id for block in reversed(blocks))

    def keep(self, number: int, digest: bytes) -> None:
        """Find what a block holds by a hash, from now on."""
        self.blocks[number].block_hash = digest + bytes(4)
        self.cached[digest] = number

    def get_num_free_blocks(self) -> int:
        """Count those that nobody has."""
        return len(self.free)

    def take(self) -> int:
        """Return a block that nobody had."""
        number = self.free[0]
        block = self.blocks[number]
        if block.block_hash is not None and self.cached.get(block.block_hash[:-4]) == number:
            del self.cached[block.block_hash[:-4]]
        block.block_hash = None
        self.touch([block])
        return number

    def touch(self, blocks: Iterable[Any]) -> None:
        """Have somebody else have them too."""
        for block in blocks:
            if not block.ref_cnt:
                self.free.remove(block.block_id)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Any]) -> None:
        """Have one less have them."""
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if not block.ref_cnt:
                self.free.append(block.block_id)

    def give(self, numbers: Iterable[int]) -> None:
        """Have a request have them no more."""
        self.free_blocks([self.blocks[number] for number in numbers if number])


def group(
    number: int = 0,
    *,
    size: int = BLOCK_SIZE,
    num_blocks: int | None = None,
    is_state: bool = False,
    page: int = PAGE_BYTES,
    table: int | None = None,
) -> Any:  # noqa: ANN401 - of a package that only exists beside vLLM
    """Return a KV group of two layers: of full attention, or that needs so many of the last blocks, or one state."""
    names = tuple(f"{number}.{name}" for name in LAYERS)
    return VLLM.configuration.EngineGroup(
        number,
        number if table is None else table,
        size,
        size // BLOCK_SIZE,
        names,
        page,
        1 if is_state else num_blocks,
        is_state,
    )


class SmallVLLM:
    """A vLLM that steps when it is told to.

    Attributes:
        scheduling: The scheduler's side of the connector.
        running: Requests that have blocks, the one that came first first.
        waiting: Requests that have none.
        num_free: Blocks that nobody has.
        num_preemptions: So far.
        orders: Of each step, the stores that the workers were told of, those before computing too.
        hits: Tokens that were found, by where they were, in vLLM's words.
    """

    def __init__(
        self,
        *tiers: Any,  # noqa: ANN401 - whatever a cache takes
        num_blocks: int = 256,
        num_ranks: int = 1,
        is_async: bool = False,
        role: str = "kv_both",
        limits: dict[str, Any] | None = None,
        groups: tuple[Any, ...] = (),
        store_when: str = "computed",
        has_cache: bool = False,
        writes_first: bool = False,
        connect: str = "",
        num_step_tokens: int = 1 << 30,
        **settings: Any,  # noqa: ANN401 - of the connector
    ) -> None:
        """Start it over tiers, one step behind its own output if ``is_async``, with a prefix cache if ``has_cache``.

        With ``connect`` a host's server there has the tiers. A step computes ``num_step_tokens`` at most.

        With ``writes_first`` as vLLM's second model runner: it empties what it hands out anew, and begins states there,
        before its workers hear who was preempted.
        """
        below = {"tiers": list(tiers), **({"limits": limits} if limits else {})}
        if connect:
            below = {"connect": connect}
        given = groups or (group(),)
        configuration = VLLM.configuration.Configuration(
            connector=VLLM.configuration.ConnectorSettings(store_when=store_when, **settings),
            below=VLLM.configuration.below_of(below),
            model=ModelIdentity("small", weights="w0"),
            num_ranks=num_ranks, num_stages=1, groups=given,
            tables=tuple({of.table: (of.block_size, num_blocks) for of in given}.values()),
            num_engine_blocks=num_blocks + 1, num_step_blocks=16,
            loads=role != "kv_producer", stores=role != "kv_consumer",
            tells_events=False, writes_first=writes_first, is_async=bool(is_async),
        )  # fmt: skip
        self.groups = configuration.groups
        self.has_cache = has_cache
        self.num_here = 0
        """Blocks of prompts that its own cache had."""
        self._tables = [next(of for of in self.groups if of.table == at) for at in range(1 + self.groups[-1].table)]
        one_each = replace(configuration, groups=tuple(self._tables))  # as vLLM tells its scheduler of unequal pages
        self.scheduling = VLLM.scheduling.SchedulingSide(one_each)
        self._pool = Pool(num_blocks)
        self.scheduling.use_pool(self._pool)
        self.memory: list[dict[str, torch.Tensor]] = []
        self.workers: list[Any] = []
        for rank in range(num_ranks):
            layers = {
                name: torch.zeros(num_blocks + 1, each.page_bytes, dtype=torch.uint8)
                for each in self.groups
                for name in each.layer_names
            }
            worker = VLLM.moving.MovingSide(None, configuration)
            worker._rank = rank  # noqa: SLF001 - vLLM's own groups say it
            worker.register_kv_caches(layers)
            self.memory.append(layers)
            self.workers.append(worker)
        self.scheduling.open([worker.hello() for worker in self.workers])
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.orders: list[int] = []
        self.hits: Counter[str] = Counter()
        self.num_preemptions = 0
        self._kept: dict[str, Request] = {}
        self._failed: set[str] = set()
        self._preempted: set[str] = set()
        self._said: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        self._is_async = is_async
        self._num_step_tokens = num_step_tokens
        self._void: set[str] = set()
        """Requests that have computed with what was to be loaded and was not, until that is heard of."""
        self._writes_first = writes_first
        self._new: list[list[int]] = []
        """By table, the blocks that were handed out since the last step."""
        self._outputs: deque[tuple[list[tuple[Request, int]], Any, set[str], set[str], set[int], set[str]]] = deque()

    @property
    def num_kept(self) -> int:
        """Requests that have ended, and whose blocks are kept."""
        return len(self._kept)

    @property
    def num_free(self) -> int:
        """See the class."""
        return len(self._pool.free)

    def ask(
        self,
        name: str,
        num_prompt_tokens: int,
        num_wanted: int,
        salt: str | None = None,
        prompt: str = "",
        hints: Any = None,  # noqa: ANN401 - whatever somebody sends
        lora: Any = None,  # noqa: ANN401 - a LoRA request of vLLM's
        params: Any = None,  # noqa: ANN401 - as hints
    ) -> Request:
        """Take a request and return it; of equal ``prompt`` the first blocks are equal, whatever the adapter."""
        request = Request(name, num_prompt_tokens, num_wanted, salt, prompt, kv_hints=hints, lora_request=lora)
        request.kv_transfer_params = params
        request.know(num_prompt_tokens)
        self.waiting.append(request)
        self.scheduling.come(request)
        return request

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

    def is_right(self, request: Request, number: int, rank: int, of: Any = None) -> bool:  # noqa: ANN401 - as `group`
        """Whether a request's block is what its hash tells."""
        of = of or self.groups[0]
        block = request.tables[of.table][number]
        expected = _content(request.hash_of((number + 1) * of.hashes_per_block - 1), rank, of.number, of.page_bytes)
        return bool(block) and all(bool((self.memory[rank][name][block] == expected).all()) for name in of.layer_names)

    def _check(self, request: Request, num_tokens: int) -> None:
        """Look at all that attention would read behind these tokens."""
        if wrong := self._wrong(request, num_tokens, range(len(self.workers))):
            raise AssertionError(f"{request.request_id} would read wrong bytes as its {wrong}")

    def _wrong(self, request: Request, num_tokens: int, ranks: Iterable[int]) -> str:
        """Name a block that attention would read behind these tokens, and that is not what its hash tells."""
        for of in self.groups:
            stop = num_tokens // of.block_size
            if of.is_handed_over and num_tokens % of.block_size:
                continue  # the state is on its way to the end of a block
            for at in range(0 if of.num_blocks is None else max(0, stop - of.num_blocks), stop):
                if not all(self.is_right(request, at, rank, of) for rank in ranks):
                    return f"block {at} of {of.number}"
        return ""

    def _schedule(self) -> Any:  # noqa: ANN401 - as vLLM has it
        self._new, num_preemptions = [[] for _ in self._tables], self.num_preemptions
        num_left = self._num_step_tokens
        of: list[tuple[Request, int]] = []
        for request in list(self.running):
            if request.is_loading or request not in self.running:
                continue
            self._leave_behind(request)
            num_new = self._until_a_state(request, max(1, request.num_tokens - request.num_computed_tokens))
            if not (num_new := min(num_new, num_left)):
                break
            if not self._allocate(request, request.num_computed_tokens + num_new):
                break
            self._cache(request, request.num_computed_tokens + num_new)
            num_left -= num_new
            of.append((request, num_new))
        skipped: list[Request] = []
        while self.waiting and num_left and len(self.running) < 64 and self.num_preemptions == num_preemptions:
            request = self.waiting[0]
            here = self._cached(request)
            num_here = len(here) * BLOCK_SIZE
            found, is_beside = self.scheduling.find(request, num_here)
            if found is None:
                skipped.append(self.waiting.popleft())
                continue
            if here:
                self._pool.touch([self._pool.blocks[number] for number in here])
                request.tables = [list(here)]
            num_new = min(num_left, self._until_a_state(request, request.num_tokens - num_here - found))
            num_new = 0 if is_beside else num_new
            if not self._allocate(request, num_here + found + num_new, num_found=found, may_preempt=False):
                self._give_back(request)
                break
            self.num_here += len(here)
            self.running.append(self.waiting.popleft())
            self.scheduling.begin(request, request.tables, found)
            self.hits.update(self.scheduling.hit_sources(request, found) if found else {})
            request.num_computed_tokens = num_here + found
            if is_beside:
                request.is_loading = True
            else:
                self._cache(request, request.num_computed_tokens + num_new)
                num_left -= num_new
                of.append((request, num_new))
        self.waiting.extendleft(reversed(skipped))
        of = [(request, num) for request, num in of if request in self.running]
        tables = {request.request_id: tuple(map(list, request.tables)) for request, _ in of}
        states = {
            request.request_id: self._states_at(request, request.num_computed_tokens + num) for request, num in of
        }
        return SimpleNamespace(
            of=of,
            num_scheduled_tokens={request.request_id: num for request, num in of},
            preempted_req_ids=set(self._preempted),
            new_block_ids_to_zero=[
                block
                for each, new in zip(self._tables, self._new, strict=True)
                if not each.is_handed_over  # as vLLM has it
                for block in new
            ],
            kv_cache_block_copies=None,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(new_block_ids=[self._new]),
            kv_connector_block_state=SimpleNamespace(get_block_ids=tables.get, boundary_state_offloads=states),
        )

    def _cached(self, request: Request) -> list[int]:
        """Return the blocks of a prompt's head that its own cache has; never all of it, for something is computed."""
        most = (request.num_tokens - 1) // BLOCK_SIZE if self.has_cache else 0
        numbers = [self._pool.cached.get(request.hash_of(at)) for at in range(most)]
        stop = numbers.index(None) if None in numbers else most
        return [number for number in numbers[:stop] if number is not None]

    def _cache(self, request: Request, num_tokens: int) -> None:
        """Have its own cache find what is computed."""
        for at in range(min(num_tokens, request.num_tokens) // BLOCK_SIZE if self.has_cache else 0):
            self._pool.keep(request.tables[0][at], request.hash_of(at))

    def _states_at(self, request: Request, end: int) -> list[tuple[int, int, int]]:
        """Return which states a step leaves that others can go on from: the table, the block, the token behind it."""
        return [
            (of.table, request.tables[of.table][end // of.block_size - 1], end)
            for of in self.groups
            if of.is_handed_over and end % of.block_size == 0 and end <= request.num_tokens
        ]

    def _until_a_state(self, request: Request, num_new: int) -> int:
        """Cut a step where a state is kept."""
        first = request.num_computed_tokens
        sizes: list[int] = [of.block_size for of in self.groups if of.is_handed_over]
        return min([num_new, *(size - first % size for size in sizes)])

    def _leave_behind(self, request: Request) -> None:
        """Give back what no step that is to come, or under way, reads."""
        under_way = [first for output in self._outputs for each, first in output[0] if each is request]
        first = min([request.num_computed_tokens, *under_way])
        for of, table in zip(self._tables, request.tables, strict=True):
            if of.num_blocks is not None:
                stop = (first - 1) // of.block_size if of.is_handed_over else first // of.block_size - of.num_blocks
                for at in range(max(0, stop)):
                    self._pool.give([table[at]])
                    table[at] = 0

    def _allocate(self, request: Request, num_tokens: int, *, num_found: int = 0, may_preempt: bool = True) -> bool:
        wanted: list[list[bool]] = []  # of each new place in each table, whether it is a block, or stands for none
        request.tables = request.tables or [[] for _ in self._tables]
        for of, table in zip(self._tables, request.tables, strict=True):
            new = range(len(table), -(-num_tokens // of.block_size))
            behind = 0 if of.num_blocks is None else num_found // of.block_size - of.num_blocks
            wanted.append([at >= (new.stop - 1 if of.is_handed_over else behind) for at in new])
        while sum(map(sum, wanted)) > len(self._pool.free):
            if not may_preempt or self.scheduling.frees_soon():
                return False
            victim = next(each for each in reversed(self.running) if not each.is_loading)
            self.preempt(victim.request_id)
            if victim is request:
                return False
        for table, more, handed_out in zip(request.tables, wanted, self._new, strict=True):
            got = [self._pool.take() if is_one else 0 for is_one in more]
            table.extend(got)
            handed_out.extend(filter(None, got))
        return True

    def _execute(self, step: Any, told: list[tuple[Request, int]]) -> Any:  # noqa: ANN401 - as vLLM has it
        reports, ended = [], []
        for rank, worker in enumerate(self.workers):
            if self._writes_first:
                for layer in self.memory[rank].values():
                    layer[[block for new in self._new for block in new]] = 0
            worker.before_computing(step)
            worker.load_first(step)
            for request, first in told:
                self._compute(request, first, rank)
            worker.start_stores(step)
            ended.append(worker.ended())
            reports.append(worker.report() or VLLM.messages.Report())
        lost = set().union(*(worker.take_lost() for worker in self.workers))
        for request, first in told:
            if not lost.isdisjoint(request.tables[0]):
                self._void.add(request.request_id)  # what it has computed counts for nothing
            if request.request_id not in self._void:
                self._check(request, first)
        self._failed |= set().union(*(worker.take_failed() for worker in self.workers))
        report = reports[0]
        for other in reports[1:]:
            report = report.aggregate(other)
        sent, loaded = (self._said_by_all(at, [said[at] for said in ended]) for at in range(2))
        failed = self._failed & loaded
        self._failed -= failed
        return told, report, sent, loaded, lost, failed

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
        wrong = self._wrong(request, first, [rank])
        for of in self.groups:
            table, size = request.tables[of.table], of.block_size
            for at in range(first // size, len(table)):
                is_full = (at + 1) * size <= request.num_computed_tokens
                digest = request.hash_of((at + 1) * of.hashes_per_block - 1) if is_full else b""
                for name in of.layer_names if table[at] else ():
                    is_told = is_full and not wrong  # what is computed with wrong bytes is wrong
                    page = _content(digest, rank, of.number, of.page_bytes) if is_told else 0xEE
                    self.memory[rank][name][table[at]] = page

    def _update(
        self,
        computed: list[tuple[Request, int]],
        report: Any,  # noqa: ANN401 - as vLLM has it
        sent: set[str],
        loaded: set[str],
        lost: set[int],
        failed: set[str],
    ) -> None:
        for request in (*self.running, *self._kept.values()) if lost else ():
            if holes := [at for at, block in enumerate(request.tables[0]) if block in lost]:
                request.num_computed_tokens = min(request.num_computed_tokens, holes[0] * BLOCK_SIZE)
                self._void.discard(request.request_id)
        for request, _ in computed:
            if request not in self.running or request.is_loading or request.num_computed_tokens < request.num_tokens:
                continue
            request.know(request.num_tokens + 1)
            if request.num_tokens - request.num_prompt_tokens >= request.num_wanted:
                self.running.remove(request)
                self._end(request)
        for request in [each for each in (*self.running, *self._kept.values()) if each.request_id in loaded]:
            request.is_loading = False
            if request not in self.running:  # it was aborted meanwhile
                self._give_back(self._kept.pop(request.request_id))
            elif request.request_id in failed:
                self.running.remove(request)
                self._give_back(request)
                request.num_computed_tokens = 0
                self.waiting.appendleft(request)
            else:
                self._check(request, request.num_computed_tokens)
                self._cache(request, request.num_computed_tokens)
        self.scheduling.take(report, sent)
        for name in sent:
            self._give_back(self._kept.pop(name))

    def _end(self, request: Request) -> None:
        if self.scheduling.end(request, request.tables) or request.is_loading:
            self._kept[request.request_id] = request
        else:
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        for table in request.tables:
            self._pool.give(reversed(table))
        request.tables = []


@cache
def _content(digest: bytes, rank: int, number: int, num_bytes: int) -> torch.Tensor:
    said = hashlib.shake_128(digest + bytes([rank, number])).digest(num_bytes)
    return torch.frombuffer(bytearray(said), dtype=torch.uint8)


def small_vllm(*tiers: Any, **wanted: Any) -> Iterator[SmallVLLM]:  # noqa: ANN401 - as above
    """Yield one, and end it."""
    engine = SmallVLLM(*tiers, **wanted)
    try:
        yield engine
    finally:
        engine.close()
