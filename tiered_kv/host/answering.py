"""What a client asks beside its transfers, and how a server answers: by the same call of the face."""

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final, TypeVar

from tiered_kv.block_cache import BlockCache
from tiered_kv.host import questions, wire
from tiered_kv.host.places import Place
from tiered_kv.keys import BlockKeys
from tiered_kv.results import LookupResult
from tiered_kv.tier_calls import TierCalls

T = TypeVar("T")
Answering = Callable[[], Coroutine[Any, Any, questions.Answer]]
Answered = questions.Answer | Answering
"""At once, or what finds it out."""


def answer(kv: TierCalls, request: questions.Asking) -> Answered:
    """Answer a question about keys.

    Args:
        kv: The client's seat at the cache.
        request: The question.

    Raises:
        TieredKVError: There is something wrong with it.
    """
    return _ANSWERS[type(request)](kv, request, request.keys.block_keys())


def _lookup(kv: TierCalls, request: questions.Lookup, keys: BlockKeys) -> Answered:
    if request.is_owned:
        return _found(request.id, kv.lookup_nowait(keys))
    if not request.where and (found := kv.lookup_at_once(keys)) is not None:
        return _found(request.id, found)
    return _then(partial(kv.lookup, keys, where=request.where), partial(_found, request.id))


def _membership(kv: BlockCache, request: questions.Membership, keys: BlockKeys) -> Answered:
    return questions.States(request.id, kv.membership(keys).tobytes())


def _pin(kv: BlockCache, request: questions.Pin, keys: BlockKeys) -> Answered:
    return questions.Number(request.id, kv.pin(keys, ttl_s=request.ttl_s).num_blocks)


def _prefetch(kv: BlockCache, request: questions.Prefetch, keys: BlockKeys) -> Answered:
    return _then(
        partial(kv.prefetch, keys, to=request.to),
        lambda got: questions.Prefetched(request.id, got.num_blocks, got.num_moved, got.faults),
    )


def _evict(kv: BlockCache, request: questions.Evict, keys: BlockKeys) -> Answered:
    return _then(partial(kv.evict, keys, tier=request.tier), partial(questions.Number, request.id))


def _explain(kv: BlockCache, request: questions.Explain, keys: BlockKeys) -> Answered:
    return _then(
        partial(kv.explain, keys, ask=request.ask), lambda blocks: questions.Explained(request.id, tuple(blocks))
    )


def flush(cache: BlockCache, request: questions.Flush) -> Answered:
    """Wait until every store of every client is settled."""
    return _then(partial(cache.flush, sync=request.sync), lambda _: questions.Number(request.id, 0))


def clear(cache: BlockCache, request: questions.Clear) -> Answered:
    """Empty the tiers of all clients of the model."""
    return _then(cache.clear, lambda _: questions.Number(request.id, 0))


_ANSWERS: Final[Mapping[type[wire.Message], Callable[..., Answered]]] = {
    questions.Lookup: _lookup,
    questions.Membership: _membership,
    questions.Pin: _pin,
    questions.Prefetch: _prefetch,
    questions.Evict: _evict,
    questions.Explain: _explain,
}


def _then(ask: Callable[[], Awaitable[T]], make: Callable[[T], questions.Answer]) -> Answered:
    async def answer() -> questions.Answer:
        return make(await ask())

    return answer


def _found(id_: int, result: LookupResult) -> questions.Found:
    runs = tuple((run.tier, run.start, run.stop) for run in result.runs)
    places = tuple(Place.of(run.spec) for run in result.runs) if any(run.spec for run in result.runs) else ()
    return questions.Found(
        id_, result.num_blocks, runs, result.num_bytes, dict(result.costs), result.num_pending, places
    )
