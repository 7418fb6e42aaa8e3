"""What a caller knows of the future of blocks: how likely they come back, and when; and when it is to store them.

Orchestrators say it of KV in an envelope that vLLM, SGLang and Dynamo share; it is read and bounded here. An action is
about blocks of the prompt that it comes with, and of no other: so nobody reaches another tenant's. What is not
understood is passed over and counted. A hint is never an order: what it asks for may not happen.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final, Literal

from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.integers import is_number

StoreWhen = Literal["computed", "evicted", "auto"]
"""When an engine stores a block: as soon as it is computed, or when its own cache is about to drop it; see `evicts`."""
_MIRRORED: Final = 4
"""Where memory below holds so many times what the engine does, little is gained by not having the same there twice."""

HintKind = Literal["retain", "demote", "prefetch", "pin", "evict"]
_KINDS: Final[Mapping[str, HintKind]] = {
    "kv.retain": "retain",
    "kv.demote": "demote",
    "kv.prefetch": "prefetch",
    "kv.fetch": "prefetch",
    "kv.pin": "pin",
    "kv.evict": "evict",
}
ENVELOPES: Final = ("kv_hints", "kv_hint")
"""What those who send an envelope call it."""
_MAJOR: Final = "1"
"""Of an action's version: others may mean something else."""
MOST_ACTIONS: Final = 16
"""Of a request, and as many directives of an action."""
MOST_HASHES: Final = 1 << 16
"""That an action may name."""
LONGEST_CATEGORY: Final = 1000
"""Characters: tiers remember some."""
MOST_S: Final = 3600.0
"""What lasts for longer, or comes later, does so for so long."""
USUAL_S: Final = 600.0
"""How long what is retained or pinned stays where nobody says."""
PREFETCHED_S: Final = 60.0
"""For how long what was prefetched counts as favoured."""
_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class ReuseHint:
    """How likely blocks are to be asked for again, and when: for `TieredKV.store` and `TieredKV.touch`.

    A hint holds until the blocks are used again. It decides which blocks go first when there is no room, and nothing
    else: what is hinted at wrongly is still served.

    Attributes:
        probability: From 0 to 1. Blocks of probability 0, a closed conversation's, go first under every policy; of
            other hints only ``"lhd"`` makes use.
        within_s: In how many seconds, on average, if they do come back. By default as soon as others do.
        category: What they have in common, e.g. ``"tool call"``: what is expected of a category is corrected by what
            becomes of its blocks. At most 1,000 characters. A tier tells seven apart, counting different probabilities
            and times; of more it learns as if there were no hint.

    Raises:
        ConfigurationError: A value that cannot be.
    """

    probability: float
    within_s: float | None = None
    category: str = ""

    def __post_init__(self) -> None:
        if not is_number(self.probability) or not 0 <= self.probability <= 1:
            raise ConfigurationError(f"a hint's probability must be a number from 0 to 1, got {self.probability!r:.80}")
        if self.within_s is not None and not (is_number(self.within_s) and 0 < float(self.within_s) < inf):
            raise ConfigurationError(f"a hint's within_s must be a positive number or None, got {self.within_s!r:.80}")
        if not isinstance(self.category, str):
            raise ConfigurationError(f"a hint's category must be a str, got {type(self.category).__name__}")
        if len(self.category) > LONGEST_CATEGORY:
            raise ConfigurationError(
                f"a hint's category has {LONGEST_CATEGORY} characters at most, got {len(self.category)}"
            )


def check_hint(hint: object) -> ReuseHint | None:
    """Return a hint, if it is one, or None.

    Raises:
        ConfigurationError: It is neither a hint nor None.
    """
    if hint is None or isinstance(hint, ReuseHint):
        return hint
    raise ConfigurationError(f"hint must be a ReuseHint or None, got {type(hint).__name__}")


def evicts(when: StoreWhen, *, engine_blocks: int, memory_blocks: int) -> bool:
    """Say whether blocks are to be stored when the engine is about to drop them, rather than when it computes them.

    Memory below then has what the engine has not, and so more of all; each block that leaves is copied, and what only
    the engine has is lost with it.

    Args:
        when: What is wanted; ``"auto"`` goes by the rest.
        engine_blocks: How many the engine's own cache holds.
        memory_blocks: How many the memory tiers hold; 0 if there are none.
    """
    if when != "auto":
        return when == "evicted"
    return 0 < memory_blocks < _MIRRORED * engine_blocks


@dataclass(frozen=True, slots=True)
class HintAction:
    """One thing that is wanted of a request's blocks.

    Attributes:
        kind: What.
        probability: Of a retention: how likely the blocks come back.
        for_s: For how long.
        after_s: When, once the request has ended; None for as soon as it has come.
        start: The first token; None for the first that was not in the prompt.
        end: The token behind the last; None for the request's last.
        hashes: The last 64 bits of the engine's names of blocks, as its KV events have them; None for all blocks.
    """

    kind: HintKind
    probability: float = 0.0
    for_s: float = 0.0
    after_s: float | None = 0.0
    start: int | None = 0
    end: int | None = None
    hashes: frozenset[int] | None = None


def blocks_meant(
    actions: Sequence[HintAction], hashes: Sequence[bytes], *, block_size: int, num_prompt_tokens: int
) -> Iterator[tuple[HintAction, range]]:
    """Yield which of a request's blocks are meant by each action, neighbours together, in the order of their delays.

    Takes time in the blocks and in what actions name, and not in one times the other.

    Args:
        actions: What is wanted.
        hashes: The engine's name of each block, as far as its tokens are known.
        block_size: Tokens a block.
        num_prompt_tokens: Of the request.
    """
    at: dict[int, int] = {}
    if any(action.hashes is not None for action in actions):
        at = {int.from_bytes(each[-8:], "big"): position for position, each in enumerate(hashes)}
    for action in sorted(actions, key=delay_of):
        start = -(-(num_prompt_tokens if action.start is None else action.start) // block_size)
        stop = len(hashes) if action.end is None else min(len(hashes), action.end // block_size)
        if action.hashes is None:
            named = [range(start, stop)] if start < stop else []
        else:
            named = _neighbours(sorted(at[each] for each in action.hashes & at.keys() if start <= at[each] < stop))
        for blocks in named:
            yield action, blocks


def delay_of(action: HintAction) -> float:
    """Return in how many seconds it is to be done."""
    return action.after_s or 0.0


def _neighbours(positions: Sequence[int]) -> list[range]:
    """Return ascending positions as ranges."""
    ends = [at for at, after in zip(positions, [*positions[1:], inf], strict=False) if after != at + 1]
    starts = [at for at, before in zip(positions, [-inf, *positions], strict=False) if before != at - 1]
    return [range(first, last + 1) for first, last in zip(starts, ends, strict=True)]


def envelope_in(said: Mapping[str, Any]) -> Any:  # noqa: ANN401 - whatever somebody has sent
    """Return the envelope that is among what somebody has sent; None if there is none."""
    return next((said[name] for name in ENVELOPES if said.get(name) is not None), None)


def read_hints(envelope: object) -> tuple[list[HintAction], int]:
    """Return what an envelope asks for, and how many of its actions are not understood, or one too many.

    Args:
        envelope: An object or a mapping with ``actions``, and each of these with ``action_type``, ``action_version``
            and ``payload``; None for nothing.
    """
    if envelope is None:
        return [], 0
    actions = _field(envelope, "actions")
    if not isinstance(actions, list | tuple):
        return [], 1
    read: list[HintAction] = []
    num_ignored = max(0, len(actions) - MOST_ACTIONS)
    for action in actions[:MOST_ACTIONS]:
        try:
            read += _read(action)
        except (ValueError, OverflowError):
            num_ignored += 1
    return read, num_ignored


def _field(of: object, name: str) -> Any:  # noqa: ANN401 - whatever somebody has sent
    return of.get(name) if isinstance(of, Mapping) else getattr(of, name, None)


def _read(action: object) -> list[HintAction]:
    kind = _KINDS.get(str(_field(action, "action_type")))
    payload = _field(action, "payload")
    version = str(_field(action, "action_version")).partition(".")[0]
    if kind is None or version != _MAJOR or not isinstance(payload, Mapping):
        raise ValueError
    if kind != "retain" or "directives" not in payload:
        return [_one(kind, payload)]
    directives = payload["directives"]
    if not isinstance(directives, list) or len(directives) > MOST_ACTIONS:
        raise ValueError
    return [_one(kind, each) for each in directives]


def _one(kind: HintKind, payload: object) -> HintAction:
    if not isinstance(payload, Mapping):
        raise ValueError  # noqa: TRY004 - what was sent is wrong, not the program
    start, end = _int(payload, "start", 0), _int(payload, "end", None)
    if payload.get("covers_output") is True:
        start = None
    action = HintAction(kind, start=start, end=end, hashes=_hashes(payload))
    lasting = _seconds(payload, ("ttl_seconds", "duration"), USUAL_S)
    if kind == "retain":
        priority = payload.get("priority", 100)
        if not is_number(priority) or not 0 <= priority <= 100:
            raise ValueError
        return (
            replace(action, probability=priority / 100, for_s=lasting) if priority else replace(action, kind="demote")
        )
    if kind == "pin":
        return replace(action, for_s=lasting)
    if kind == "prefetch":
        has_delay = payload.get("delay_seconds") is not None
        return replace(
            action, after_s=_seconds(payload, ("delay_seconds",), 0.0) if has_delay else None, for_s=PREFETCHED_S
        )
    return action


def _int(payload: Mapping[str, Any], name: str, usual: int | None) -> int | None:
    value = payload.get(name)
    if value is None:
        return usual
    if type(value) is not int or value < 0:
        raise ValueError
    return value


def _seconds(payload: Mapping[str, Any], names: tuple[str, ...], usual: float) -> float:
    value = next((payload[name] for name in names if payload.get(name) is not None), usual)
    if not is_number(value) or value < 0:
        raise ValueError
    return float(min(max(value, 1e-3), MOST_S))


def _hashes(payload: Mapping[str, Any]) -> frozenset[int] | None:
    named = payload.get("block_hashes")
    if named is None:
        return None
    if not isinstance(named, list | tuple) or len(named) > MOST_HASHES:
        raise ValueError
    if not all(type(each) is int for each in named):
        raise ValueError
    return frozenset(each & _MASK for each in named)  # some send them signed
