"""A replay of a trace with hashes only, in the time of the trace."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiered_kv.replay.hinting_sessions import HintsAre, SimulatedHints
from tiered_kv.replay.report import DAY_S, EngineReport, ReplayReport, TierReport
from tiered_kv.replay.simulated_chain import SimulatedChain, SimulatedEngine, SimulatedTier, TierPlan
from tiered_kv.traces import Trace, names_of
from tiered_kv.values.hints import StoreWhen


@dataclass(frozen=True, slots=True)
class BlockCost:
    """What tokens cost.

    Attributes:
        token_bytes: Of keys and values, all layers.
        prefill_tokens_a_s: How fast the engine computes a prompt.
    """

    token_bytes: int
    prefill_tokens_a_s: float


def replay(
    trace: Trace,
    plans: Sequence[TierPlan],
    cost: BlockCost,
    *,
    promote: bool = True,
    engine_blocks: int = 0,
    engine_ahead: int = 0,
    store_when: StoreWhen = "auto",
    hints: HintsAre = "none",
    on_request: Callable[[int], None] = lambda _: None,
) -> ReplayReport:
    """Serve the requests of a trace in order.

    Args:
        trace: The requests.
        plans: The tiers, fastest first.
        cost: Of a token.
        promote: See `CacheLimits.promote`.
        engine_blocks: How many blocks the engine's own cache holds, above the tiers; 0 for none.
        engine_ahead: How many blocks before they leave it they are copied out; see `SimulatedEngine`.
        store_when: When it stores them.
        hints: What sessions say of when they come back; "random" ones are wrong.
        on_request: Told how many requests were served.

    Raises:
        ConfigurationError: The tiers hold no block, or there is no such policy.
    """
    payload_bytes = cost.token_bytes * trace.block_size
    chain = SimulatedChain(plans, payload_bytes=payload_bytes, num_blocks=trace.num_blocks, promote=promote)
    engine = SimulatedEngine(chain, engine_blocks, store_when, engine_ahead)
    saved_tokens = loads = loads_in_memory = 0
    said = SimulatedHints(trace, chain, hints) if hints != "none" and chain.memory else None
    for number, request in enumerate(trace.requests):
        if said is not None:
            said.before(request)
        num_here = engine.hits
        hits = engine.serve(request.at_s, names_of(request.ids))
        num_here = engine.hits - num_here
        if found := int(hits.sum()):
            loads += 1
            loads_in_memory += found == int(hits[: len(chain.memory)].sum())
        saved_tokens += min((num_here + found) * trace.block_size, request.input_tokens)
        if said is not None:
            said.after(number, request)
        on_request(number + 1)
    num_blocks = trace.num_references
    return ReplayReport(
        trace=trace.name,
        num_requests=len(trace.requests),
        num_blocks=num_blocks,
        block_bytes=payload_bytes,
        hit_rate=(engine.hits + sum(tier.hits for tier in chain.tiers)) / max(1, num_blocks),
        input_tokens=trace.input_tokens,
        saved_tokens=saved_tokens,
        saved_s=saved_tokens / cost.prefill_tokens_a_s,
        trace_s=trace.seconds,
        loads=loads,
        loads_in_memory=loads_in_memory,
        tiers=tuple(_report_of(tier, num_blocks, payload_bytes, trace.seconds) for tier in chain.tiers),
        engine=_engine_report(engine, num_blocks) if engine_blocks else None,
    )


def _engine_report(engine: SimulatedEngine, num_blocks: int) -> EngineReport:
    return EngineReport(
        num_blocks=engine.num_blocks,
        stores="evicted" if engine.evicts else "computed",
        hit_rate=engine.hits / max(1, num_blocks),
        copied_blocks=engine.copied,
        copied_rate=engine.copied / max(1, num_blocks),
    )


def _report_of(tier: SimulatedTier, num_blocks: int, payload_bytes: int, seconds: float) -> TierReport:
    num_written, block_bytes = tier.written + tier.promoted, tier.plan.block_bytes(payload_bytes)
    written_bytes = num_written * block_bytes
    return TierReport(
        name=tier.plan.name,
        policy=tier.plan.policy_name,
        capacity_blocks=tier.index.num_slots,
        hits=tier.hits,
        hit_rate=tier.hits / max(1, num_blocks),
        read_bytes=tier.hits * payload_bytes,
        written_blocks=tier.written,
        promoted_blocks=tier.promoted,
        written_bytes=written_bytes,
        write_amplification=block_bytes / payload_bytes if num_written else 0.0,
        written_bytes_a_day=written_bytes * DAY_S / seconds if seconds else 0.0,
        evicted_blocks=tier.evicted,
    )
