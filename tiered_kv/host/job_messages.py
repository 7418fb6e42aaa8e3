"""What a planner says to the server whose cache it plans for, and what that answers. ``id`` names a job, as a transfer.

The server holds slots; which blocks of the engine they are for the client alone knows. What workers have moved they say
to whoever plans, and that says it here.
"""

from typing import Literal

from tiered_kv.hints import ReuseHint
from tiered_kv.host.fields import Keys, Part
from tiered_kv.host.wire import Field, Message
from tiered_kv.plan import TierShare


class PlanJob(Message, frozen=True, tag="plan_job"):
    """Plan a load or store. ``is_bound``: the client knows the engine's blocks, so that its plan goes to workers."""

    id: int
    direction: Literal["load", "store"]
    keys: Keys
    gaps: bool
    is_bound: bool
    hint: ReuseHint | None


class BindJob(Message, frozen=True, tag="bind_job"):
    """The client knows the engine's blocks for so many keys, from ``start`` on; the rest is not wanted."""

    id: int
    start: int
    num_blocks: int


class JobMoved(Message, frozen=True, tag="job_moved"):
    """A rank's worker has moved the first slots of its part, and touches none any more: `Outcomes`."""

    id: int
    rank: int
    num_moved: int
    error: str
    seconds: float


class JobMovedKeys(Message, frozen=True, tag="job_moved_keys"):
    """The same for keys at ``positions``, int64, that are moved, or not to be."""

    id: int
    rank: int
    positions: bytes
    moved: bool


AboutJob = PlanJob | BindJob | JobMoved | JobMovedKeys


class JobPlan(Field, frozen=True):
    """A `Plan`: by rank, the process that moves a part, and the part."""

    num_blocks: int
    pids: tuple[int, ...]
    parts: tuple[Part, ...]


class JobPlanned(Message, frozen=True, tag="job_planned"):
    """What is held for a job, until `JobEnded`."""

    id: int
    plan: JobPlan


class JobEnded(Message, frozen=True, tag="job_ended"):
    """How a job ended: a `JobResult`. ``plan`` is there if it was not said before; ``mask`` is one byte a key."""

    id: int
    plan: JobPlan | None
    num_blocks: int
    errors: tuple[str, ...]
    num_bytes: int
    moved_s: float
    by_tier: dict[str, TierShare]
    mask: bytes
