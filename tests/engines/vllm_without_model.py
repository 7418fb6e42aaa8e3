"""vLLM's scheduler, block pool and prefix cache, our connector, and no model: ``vllm_without_model.py JSON...``.

What it computes is a digest of the tokens up to each one, written where attention would write keys and values. Each
step looks at every token that attention would read: a block of another prefix, group or step is of wrong bytes.
Runs in vLLM's environment, one run after the other; each JSON is that of a `Wanted`, and the answer is a list.
"""

import itertools
import json
import os
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any, Final, Literal

import torch

from tests.support.late_copies import LateCopies
from vllm_generate import ONE_PROCESS, QUIET
from vllm_stored import look_at_stored
from vllm_wrong_connectors import FAULTS

ROW: Final = 16
"""Bytes of a token, of a layer with pages of the least size."""
VOCABULARY: Final = 400


@dataclass(frozen=True)
class Wanted:
    """What to run.

    Attributes:
        model: A checkpoint, of which only the configuration is read.
        transfer: For the connector.
        shape: Of `SHAPES`.
        prompts: How many that come and go as chance has it; or one after the other, of so many tokens each, twice.
        shared: Tokens with which all of these begin.
        at_once: Of how many tokens of each of these, that come at once then, is stored before.
        forgets: What vLLM's own cache has forgotten when one comes again: all, or its states alone.
        seed: Of chance.
        fault: Of `FAULTS`, what is wrong on purpose.
        num_blocks: Of vLLM's.
        runner: Which of vLLM's model runners: the second one writes to new blocks before it tells whose they were.
        late: Whether stores are copied some steps late, and as late as may be where somebody waits for them.
        clock: By which what was found is looked for anew: it stands still, so that a request is told the same for as
            long as it waits for room, or hours go by from step to step.
        engine: More arguments of the engine.
    """

    model: str
    transfer: dict[str, Any]
    shape: str = "windows"
    prompts: int | list[int] = 200
    shared: int = 0
    at_once: int = 0
    forgets: Literal["all", "states"] = "all"
    seed: int = 0
    fault: str = ""
    num_blocks: int = 120
    runner: int = 1
    late: bool = False
    clock: Literal["", "still", "hours"] = ""
    engine: dict[str, Any] = field(default_factory=dict)


def specs(shape: str) -> list[Any]:
    """Return what the layers of a model are like, a group each."""
    from vllm.v1.kv_cache_interface import (  # noqa: PLC0415 - takes seconds, and the environment is set first
        ChunkedLocalAttentionSpec,
        CircularBufferSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowMLASpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )

    def heads(size: int = 16, num: int = 1) -> dict[str, Any]:
        return {"block_size": size, "num_kv_heads": num, "head_size": ROW // 8, "dtype": torch.float32}

    def window(width: int, size: int = 16, num: int = 1) -> Any:
        return SlidingWindowSpec(**heads(size, num), sliding_window=width)

    def latents(num: int, size: int = 16, width: int = 0, **more: bool) -> Any:
        kept = {"block_size": size, "num_kv_heads": 1, "head_size": num * ROW // 4, "dtype": torch.float32}
        return SlidingWindowMLASpec(**kept, sliding_window=width, **more) if width else MLAAttentionSpec(**kept)

    full = FullAttentionSpec(**heads())
    chunk = ChunkedLocalAttentionSpec(**heads(), attention_chunk_size=96)
    indexed = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": latents(4), "b": latents(1)})
    state = MambaSpec(block_size=64, shapes=((64,),), dtypes=(torch.float32,), mamba_cache_mode="align")
    unequal = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": full, "b": FullAttentionSpec(**heads(num=2))})
    return {
        "full": [full],
        "windows": [full, window(40)],
        "gpt-oss": [full, window(128)],
        "gemma": [window(24), window(24), full],
        "one window": [window(33)],
        "two windows": [full, window(17), window(70)],
        "small blocks": [FullAttentionSpec(**heads(32)), window(40, 16, 2)],
        "chunks": [full, chunk, chunk],
        "states": [FullAttentionSpec(**heads(64)), state, state],
        "parts of states": [FullAttentionSpec(**heads(64)), state],
        "pages": [unequal, window(40, 16, 3)],
        "latents": [indexed],
        "short windows": [FullAttentionSpec(**heads(64)), window(8, 4, 16), window(30, 16, 4)],
        "compressed": [latents(1, 64), latents(2, 32, 40), latents(16, 4, 8), latents(8, 8, 40)],
        "replayed": [latents(4, 16, 40, bounded_replay=True), CircularBufferSpec(**heads(8, 8)), latents(1, 64)],
        "draft": [full, window(40), full],
    }[shape]


@lru_cache(1 << 16)
def _next(digest: bytes, token: int) -> bytes:
    return blake2b(digest + token.to_bytes(4, "little"), digest_size=ROW).digest()


class Prefixes:
    """The digests of a request's tokens, each of all up to it."""

    def __init__(self, salt: str | None) -> None:
        self._digests = [blake2b((salt or "").encode(), digest_size=ROW).digest()]

    def of(self, tokens: Any, first: int, stop: int, *, by: int = 0) -> torch.Tensor:
        """Return ``(stop - first, ROW)``, of so many tokens behind each."""
        first, stop = first + by, stop + by
        for at in range(len(self._digests) - 1, stop):
            self._digests.append(_next(self._digests[-1], tokens[at]))
        joined = bytearray(b"".join(self._digests[first + 1 : stop + 1]))
        return torch.frombuffer(joined, dtype=torch.uint8).view(-1, ROW)


class Engine:
    """vLLM's scheduler, and a runner whose model is a digest.

    Attributes:
        wrong: What attention would have read of wrong bytes.
        asked: The requests, by name.
    """

    def __init__(self, wanted: Wanted) -> None:
        from vllm.config import KVTransferConfig  # noqa: PLC0415 - as above
        from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
        from vllm.utils.hashing import sha256_cbor  # noqa: PLC0415
        from vllm.v1.core.kv_cache_utils import (  # noqa: PLC0415
            generate_scheduler_kv_cache_config,
            get_request_block_hasher,
            init_none_hash,
            resolve_kv_cache_block_sizes,
        )
        from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor  # noqa: PLC0415
        from vllm.v1.structured_output import StructuredOutputManager  # noqa: PLC0415

        from tiered_kv.integrations.vllm import moving  # noqa: PLC0415
        from tiered_kv.integrations.vllm.configuration import Configuration  # noqa: PLC0415

        os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
        arguments = {
            "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 1024, "block_size": 16,
            "max_num_batched_tokens": 128, "max_num_seqs": 8, "enable_prefix_caching": True,
            "enable_chunked_prefill": True, "kv_transfer_config": KVTransferConfig(**wanted.transfer), **wanted.engine,
        }  # fmt: skip
        config = EngineArgs(model=wanted.model, **arguments).create_engine_config()
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(wanted.runner - 1)  # by now: a configuration asks for Triton then
        self._is_second = wanted.runner == 2
        self._make_groups(wanted.shape, config.cache_config)
        config.cache_config.num_gpu_blocks = wanted.num_blocks
        groups = [KVCacheGroupSpec(names, spec) for names, spec in zip(self.names, self.specs, strict=True)]
        groups[-1].is_eagle_group = wanted.shape == "draft"
        self._drafts = set(self.names[-1] if groups[-1].is_eagle_group else ())
        tensors = [KVCacheTensor(size=0, layers=self.names[0], layer_stride=0, block_stride=0)]
        cache = KVCacheConfig(
            num_blocks=wanted.num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups,
            prefix_cache_retention_interval=config.cache_config.prefix_cache_retention_interval,
        )  # fmt: skip
        block_size, hash_size = resolve_kv_cache_block_sizes(cache, config)
        cache.hash_block_size = hash_size
        init_none_hash(sha256_cbor)
        self._hasher = get_request_block_hasher(hash_size, sha256_cbor)
        self.scheduler: Any = Scheduler(
            config, generate_scheduler_kv_cache_config([cache]), StructuredOutputManager(config),
            block_size=block_size, hash_block_size=hash_size,
        )  # fmt: skip
        self.scheduling: Any = self.scheduler.connector._in_scheduler()  # noqa: SLF001 - there is no other way
        vars(moving).update(get_tensor_model_parallel_rank=lambda: 0, get_layers_from_vllm_config=lambda *_: {})
        self.worker = moving.MovingSide(config, Configuration.of(config, cache))
        self._make_memory(wanted.num_blocks)
        self.worker.register_kv_caches(self.memory)
        if wanted.late:
            LateCopies(self.worker, random.Random(wanted.seed))
        hello = self.worker.hello()
        assert hello is not None
        self.scheduling.open([hello])
        self.wrong: list[str] = []
        self.num_tokens = self.num_loaded = self.num_loaded_bytes = self.num_hints = self.num_looked = 0
        self._count()
        if wanted.clock:
            times = itertools.repeat(0.0) if wanted.clock == "still" else itertools.count(step=3600.0)
            self.scheduling._loads._clock = times.__next__  # noqa: SLF001 - ours
        self.asked: dict[str, Any] = {}
        self._prefixes: dict[str, Prefixes] = {}
        self._names = 0
        self._pool = self.scheduler.kv_cache_manager.block_pool
        self._num_free = self._pool.get_num_free_blocks()

    def _count(self) -> None:
        """Count what the connector counts."""
        load_ended = self.scheduling.counts.load_ended

        def count(num_tokens: int, by_tier: Any) -> None:
            self.num_loaded += num_tokens
            self.num_loaded_bytes += sum(share.num_bytes for share in by_tier.values())
            load_ended(num_tokens, by_tier)

        self.scheduling.counts.load_ended = count
        hints = self.scheduling.counts.hints

        def count_hints(num_actions: int, num_ignored: int) -> None:
            self.num_hints += num_actions
            hints(num_actions, num_ignored)

        self.scheduling.counts.hints = count_hints
        look = self.scheduling._loads._find  # noqa: SLF001 - ours

        def count_looks(*of: Any) -> Any:
            self.num_looked += 1
            return look(*of)

        self.scheduling._loads._find = count_looks  # noqa: SLF001 - ours

    def _make_groups(self, shape: str, cache_config: Any) -> None:
        """Name the layers of each group, and configure what vLLM does for such a model."""
        self.specs, self.names = specs(shape), []
        if "states" in shape:
            cache_config.mamba_cache_mode = "align"
            cache_config.block_size = self.specs[0].block_size  # by which the scheduler cuts prompts
        if shape == "parts of states":
            cache_config.prefix_match_unit = 16
        for number, spec in enumerate(self.specs):
            if hasattr(spec, "kv_cache_specs"):
                inner = {f"{number}.{name}": each for name, each in spec.kv_cache_specs.items()}
                self.specs[number] = type(spec)(block_size=spec.block_size, kv_cache_specs=inner)
            self.names.append(list(inner) if hasattr(spec, "kv_cache_specs") else [f"{number}.x"])

    def _make_memory(self, num_blocks: int) -> None:
        """Have groups share memory, as vLLM does: what one writes another would read where it is not its own."""
        most = max(spec.page_size_bytes for spec in self.specs)
        self._pages: list[torch.Tensor] = []
        self.memory: dict[str, torch.Tensor] = {}
        for spec, names in zip(self.specs, self.names, strict=True):
            for layer, name in enumerate(names):
                if layer == len(self._pages):
                    self._pages.append(torch.zeros(num_blocks, most, dtype=torch.uint8))
                size = getattr(spec, "kv_cache_specs", {}).get(name, spec).page_size_bytes
                self.memory[name] = self._pages[layer][:, :size]

    def ask(self, tokens: list[int], num_wanted: int, salt: str | None, hint: str = "") -> str:
        """Add a request, with an action of a KV hint if one is named."""
        from vllm import SamplingParams  # noqa: PLC0415 - as above
        from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope  # noqa: PLC0415
        from vllm.v1.request import Request  # noqa: PLC0415

        self._names += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=num_wanted, ignore_eos=True)
        name = f"r{self._names}"
        hints = KvHintsEnvelope("0.1", name, [KvHintAction(name, hint, "1.0", {})]) if hint else None
        request = Request(
            name, tokens, sampling, None, cache_salt=salt, block_hasher=self._hasher, kv_hints=hints
        )  # fmt: skip
        self.asked[name], self._prefixes[name] = request, Prefixes(salt)
        self.scheduler.add_request(request)
        return name

    def step(self) -> None:
        """Do one."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: PLC0415 - as above

        has_room = self._has_all_room()
        scheduled = self.scheduler.schedule()
        meta, names = scheduled.kv_connector_metadata, list(scheduled.num_scheduled_tokens)
        if not self._is_second:
            self.worker.before_computing(meta)  # what is emptied next may be a preempted request's yet
        for block in scheduled.new_block_ids_to_zero or ():
            for pages in self._pages:
                pages[block] = 0
        for copy in scheduled.kv_cache_block_copies or ():
            for pages in self._pages:
                pages[copy.dst_block_id] = pages[copy.src_block_id]
        if self._is_second:
            for name in names:
                self._begin_states(name, scheduled.num_scheduled_tokens[name])
            self.worker.before_computing(meta)
        self.worker.load_first(meta)
        sampled = [self._compute(name, scheduled.num_scheduled_tokens[name]) for name in names]
        self.worker.start_stores(meta)
        sent, loaded = self.worker.ended()
        output = KVConnectorOutput(
            finished_sending=sent, finished_recving=loaded, failed_recving=self.worker.take_failed(),
            invalid_block_ids=self.worker.take_lost(), kv_connector_worker_meta=self.worker.report(),
        )  # fmt: skip
        indices = {name: at for at, name in enumerate(names)}
        self.scheduler.update_from_output(
            scheduled, ModelRunnerOutput(names, indices, sampled, kv_connector_output=output)
        )
        if has_room and not names:
            raise RuntimeError("no step to come will compute anything: requests wait for each other's blocks")

    def _has_all_room(self) -> bool:
        """Say whether the first of those that have blocks is to be computed next, and nobody else has any."""
        waiting, tables = self.scheduler.kv_holding_waiting, self.scheduler.kv_cache_manager.get_block_ids
        if self.scheduler.running or not waiting or waiting.peek_request().status.name == "WAITING_FOR_REMOTE_KVS":
            return False
        theirs = {block for each in waiting for table in tables(each.request_id) for block in table if block}
        return len(theirs) == self.num_held()

    def forget(self, what: str) -> None:
        """Have vLLM's own cache forget all, or its states alone."""
        from vllm.v1.core.kv_cache_utils import get_group_id  # noqa: PLC0415 - as above

        while what == "all" and not self.scheduler.reset_prefix_cache():
            self.step()  # blocks are being copied yet
        of = {group for group, spec in enumerate(self.specs) if hasattr(spec, "mamba_cache_mode")}
        known = [block for block in self._pool.blocks if block.block_hash is not None]
        self._pool.evict_blocks({block.block_id for block in known if get_group_id(block.block_hash) in of})

    def settle(self) -> None:
        """Step until nothing is left to do."""
        while self.scheduler.has_requests():
            self.step()

    @property
    def token_bytes(self) -> int:
        """Bytes of a token, of all layers."""
        return sum(spec.page_size_bytes // spec.block_size for spec in self.specs)

    def num_held(self) -> int:
        """Count the blocks that nobody has given back: none, when nothing is left to do."""
        return int(self._num_free - self._pool.get_num_free_blocks())

    def _begin_states(self, name: str, num_new: int) -> None:
        """Copy a request's states to the blocks that its next tokens go into, as the second runner does."""
        stop = self.scheduler.requests[name].num_computed_tokens
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        for spec, layers, table in zip(self.specs, self.names, tables, strict=True):
            if hasattr(spec, "mamba_cache_mode") and (first := stop - num_new):
                source, target = table[(first - 1) // spec.block_size], table[(stop - 1) // spec.block_size]
                for layer in layers:
                    self.memory[layer][target] = self.memory[layer][source]

    def _compute(self, name: str, num_new: int) -> list[int]:
        request = self.scheduler.requests[name]
        stop = request.num_computed_tokens  # vLLM has counted this step's already
        first, tokens, prefixes = stop - num_new, request.all_token_ids, self._prefixes[name]
        self.num_tokens += num_new
        sampled = int(prefixes.of(tokens, stop - 1, stop)[0, 0]) % VOCABULARY
        following = [*tokens, sampled]  # what a draft computes of a token depends on the one behind it
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        for spec, layers, table in zip(self.specs, self.names, tables, strict=True):
            for layer in layers:
                each = getattr(spec, "kv_cache_specs", {}).get(layer, spec)
                if not hasattr(each, "sliding_window") and not each.prefix_cacheable:
                    continue  # a ring, of which nothing is read where a prefix may end
                digests = partial(prefixes.of, following, by=int(layer in self._drafts))
                least = request.replay_start if getattr(each, "bounded_replay", False) else 0
                is_right = self._compute_layer(each, layer, table, (least, first, stop), digests)
                if not is_right:
                    self.wrong.append(f"{name} of {len(tokens)} tokens, from {first} to {stop}, {layer}")
        if stop < request.num_tokens:
            return []
        return [sampled]

    def _counts(self, layer: str, begin: int, end: int, size: int) -> torch.Tensor:
        """Say which tokens are to be right: of a draft not a block's last, as the block of another may come behind it.

        That costs a draft, which is then not accepted, and no token.
        """
        at = torch.arange(begin, end)
        return at % size != size - 1 if layer in self._drafts else torch.ones(end - begin, dtype=torch.bool)

    def _compute_layer(
        self,
        spec: Any,
        layer: str,
        table: list[int],
        part: tuple[int, int, int],
        digests: Callable[[int, int], torch.Tensor],
    ) -> bool:
        """Read what a layer would, from a first token on, then write; say whether it was right."""
        least, first, stop = part
        size, memory = spec.block_size, self.memory[layer]
        if hasattr(spec, "mamba_cache_mode"):
            source, target = (first - 1) // size, (stop - 1) // size
            is_right = not first or bool((memory[table[source], :ROW] == digests(first - 1, first)[0]).all())
            memory[table[target], :ROW] = digests(stop - 1, stop)[0]
            return is_right and bool(table[target])
        rows = memory.view(len(memory), size, -1, ROW)
        begin = max(0, first - spec.sliding_window + 1) if getattr(spec, "sliding_window", None) else 0
        if chunk := getattr(spec, "attention_chunk_size", None):
            begin = first // chunk * chunk
        begin = max(begin, least)  # what is before that no layer reads again

        def places(start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
            at = torch.arange(start, end)
            return torch.tensor(table)[at // size], at % size

        salt = _salt(layer)
        is_right = begin == first or bool(
            (rows[places(begin, first)] == digests(begin, first)[:, None] ^ salt)
            .flatten(1).all(1)[self._counts(layer, begin, first, size)].all()
        )  # fmt: skip
        rows[places(first, stop)] = (digests(first, stop)[:, None] ^ salt).expand(-1, rows.shape[2], -1)
        return is_right

    def holds(self, layer: str, table: int, block: int, request: Any, number: int, end: int | None) -> bool:
        """Say whether a block of vLLM's has what a request's block has of a layer, of all its tokens or to an end."""
        spec, prefixes = self.specs[table], self._prefixes[request.request_id]
        spec = getattr(spec, "kv_cache_specs", {}).get(layer, spec)
        first, stop = number * spec.block_size, end or (number + 1) * spec.block_size
        tokens, by = [*request.all_token_ids, 0], int(layer in self._drafts)
        if hasattr(spec, "mamba_cache_mode"):
            return bool((self.memory[layer][block, :ROW] == prefixes.of(tokens, stop - 1, stop)[0]).all())
        rows = self.memory[layer][block].view(spec.block_size, -1, ROW)[: stop - first]
        are_right = (rows == prefixes.of(tokens, first, stop, by=by)[:, None] ^ _salt(layer)).flatten(1).all(1)
        return bool(are_right[self._counts(layer, first, stop, spec.block_size)].all())


def _salt(layer: str) -> int:
    """Return what tells a layer's bytes from others'."""
    return ord(layer[-1]) + int(layer[0])


HINTS: Final = ("", "", "", "kv.retain", "kv.demote", "kv.prefetch", "kv.fetch", "kv.pin", "kv.evict", "kv.unknown")


def disturb(engine: Engine, alive: list[str], chance: random.Random) -> None:
    """Reset caches, preempt all, abort a request, or forget what is stored; mostly do nothing."""
    from vllm.v1.request import RequestStatus  # noqa: PLC0415 - takes seconds, and the environment is set first

    match chance.randrange(60):
        case 0:
            engine.scheduler.reset_prefix_cache()
        case 1:
            with suppress(RuntimeError):  # as vLLM says where a load is under way
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        case 2 | 3 if alive:
            engine.scheduler.finish_requests(chance.choice(alive), RequestStatus.FINISHED_ABORTED)
        case 4:
            engine.scheduling.kv.clear()


def serve(engine: Engine, num_prompts: int, chance: random.Random) -> None:
    """Have prompts that share prefixes come and go until all are answered, or wrong bytes are read."""
    roots = [[chance.randrange(VOCABULARY) for _ in range(600)] for _ in range(4)]
    alive: list[str] = []
    num_asked = 0
    while num_asked < num_prompts and not engine.wrong:
        if len(alive) < 12 and chance.random() < 0.4:
            tail = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(40))]
            tokens = chance.choice(roots)[: chance.randrange(1, 500)] + tail
            salt, hint = chance.choice([None, None, "tenant"]), chance.choice(HINTS)
            alive.append(engine.ask(tokens, chance.randrange(1, 40), salt, hint))
            num_asked += 1
        disturb(engine, alive, chance)
        engine.step()
        alive = [name for name in alive if name in engine.scheduler.requests]
    if not engine.wrong:
        engine.settle()


def serve_again(engine: Engine, wanted: Wanted, lengths: list[int]) -> None:
    """Have prompts come one after the other, and come again when vLLM has forgotten them."""
    chance = random.Random(0)
    shared = [chance.randrange(VOCABULARY) for _ in range(wanted.shared)]
    for rest in [[chance.randrange(VOCABULARY) for _ in range(length - len(shared))] for length in lengths]:
        tokens = shared + rest
        for _ in range(2):
            engine.forget(wanted.forgets)
            engine.scheduling.kv.flush()
            engine.ask(tokens, 1, None)
            engine.settle()


def serve_at_once(engine: Engine, num_stored: int, lengths: list[int]) -> None:
    """Have prompts come at once, that others began like, when vLLM has forgotten these: all wait for loads together."""
    from tiered_kv.integrations.vllm import loading  # noqa: PLC0415 - when vLLM can be imported

    vars(loading).update(_PATIENCE_S=60.0)  # the step that asks for them waits for all of their plans
    chance = random.Random(0)
    prompts = [[chance.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
    for tokens in prompts:
        engine.ask(tokens[:num_stored], 1, None)
        engine.settle()
    engine.forget("all")
    engine.scheduling.kv.flush()
    for tokens in prompts:
        engine.ask(tokens, 1, None)
    engine.settle()


def run(wanted: Wanted) -> dict[str, Any]:
    """Serve, and say what was wrong."""
    engine, raised, stored = Engine(wanted), "", 0
    start = engine.worker._start  # noqa: SLF001 - ours
    if wanted.fault:
        FAULTS[wanted.fault](engine)
    try:
        if isinstance(wanted.prompts, list) and wanted.at_once:
            serve_at_once(engine, wanted.at_once, wanted.prompts)
        elif isinstance(wanted.prompts, list):
            serve_again(engine, wanted, wanted.prompts)
        else:
            serve(engine, wanted.prompts, random.Random(wanted.seed))
    except Exception as error:  # a wrong connector may break vLLM
        if not wanted.fault:
            raise
        raised = f"{type(error).__name__}: {error}"[:200]
    held = 0 if engine.wrong or raised else engine.num_held()
    if not engine.wrong and not raised:
        stored, engine.wrong = look_at_stored(engine, start)
    engine.worker.close()
    engine.scheduler.shutdown()
    return {
        "wrong": engine.wrong[:3], "raised": raised, "held": held, "tokens": engine.num_tokens,
        "loaded": engine.num_loaded, "loaded_bytes": engine.num_loaded_bytes, "token_bytes": engine.token_bytes,
        "hints": engine.num_hints, "looked": engine.num_looked, "stored": stored,
    }  # fmt: skip


if __name__ == "__main__":
    os.environ.update({**QUIET, **ONE_PROCESS})
    print(json.dumps([run(Wanted(**json.loads(asked))) for asked in sys.argv[1:]]))
