"""What a replay found."""

from dataclasses import dataclass
from typing import Final

DAY_S: Final = 86_400.0
GIB: Final = 2**30


@dataclass(frozen=True, slots=True)
class TierReport:
    """What became of blocks in one tier.

    Attributes:
        name: The tier.
        policy: Of eviction there.
        capacity_blocks: How many it holds; of an imagined tier, at most as many as the trace has.
        hits: Blocks that loads had from it.
        hit_rate: The same of all blocks asked for.
        read_bytes: Payloads read for loads and promotions.
        written_blocks: Blocks that stores wrote to it.
        promoted_blocks: Blocks copied up to it.
        written_bytes: Both, with what a record adds.
        write_amplification: The same for each byte of those blocks; 0 before the first.
        written_bytes_a_day: At the pace of the trace; 0 if all requests came at once.
        evicted_blocks: Gone for want of room.
    """

    name: str
    policy: str
    capacity_blocks: int
    hits: int
    hit_rate: float
    read_bytes: int
    written_blocks: int
    promoted_blocks: int
    written_bytes: int
    write_amplification: float
    written_bytes_a_day: float
    evicted_blocks: int


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What the engine's own cache did, above the tiers.

    Attributes:
        num_blocks: How many it holds.
        stores: ``"computed"`` or ``"evicted"``: when blocks were stored.
        hit_rate: Blocks of leading prefixes that it had, of all asked for.
        copied_blocks: Copied out of it, to be stored.
        copied_rate: The same, for each block asked for.
    """

    num_blocks: int
    stores: str
    hit_rate: float
    copied_blocks: int
    copied_rate: float


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a chain of tiers did for a trace.

    Attributes:
        trace: Its name.
        num_requests: How many.
        num_blocks: Blocks asked for.
        block_bytes: Payload of one.
        hit_rate: Blocks of leading prefixes that some tier had, or the engine, of all asked for.
        input_tokens: Of all prompts.
        saved_tokens: Of them, those that were not computed.
        saved_s: Seconds of prefill for these.
        trace_s: From the first request to the last.
        loads: Requests of which some tier had something.
        loads_in_memory: Of these, those that found all of it in memory.
        tiers: Fastest first.
        is_real: Whether it was done, and not imagined.
        wrong_blocks: Blocks whose bytes were not what was stored: 0, or a fault. Only a real cache has bytes.
        load_s: What all loads took together. Only a real cache takes time.
        engine: What its own cache did, if it was imagined to have one.
    """

    trace: str
    num_requests: int
    num_blocks: int
    block_bytes: int
    hit_rate: float
    input_tokens: int
    saved_tokens: int
    saved_s: float
    trace_s: float
    loads: int
    loads_in_memory: int
    tiers: tuple[TierReport, ...]
    is_real: bool = False
    wrong_blocks: int = 0
    load_s: float = 0.0
    engine: EngineReport | None = None

    @property
    def tiers_hit_rate(self) -> float:
        """What the tiers had, of all asked for."""
        return sum(each.hit_rate for each in self.tiers)


def gib(num_bytes: float) -> str:
    """Show bytes as GiB, without the unit."""
    return f"{num_bytes / GIB:,.1f}"
