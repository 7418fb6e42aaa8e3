"""The model test can fail: each of these bugs, planted on purpose, is found."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test
from numpy.typing import NDArray

from tests.cache.test_model import VirtualMachine
from tiered_kv import Outcome
from tiered_kv.cache.checks import LoadCall
from tiered_kv.cache.seat import Seat
from tiered_kv.catalog.leases import Lease
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.records import Records
from tiered_kv.tiers.tier import Batch, Naming
from tiered_kv.transfers.handles import Revocable
from tiered_kv.transfers.transfer_requests import LoadRequest
from tiered_kv.values.keys import epoch_digest

MUST_FIND = settings(
    max_examples=400,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
Plant = Callable[[pytest.MonkeyPatch], None]


def _reads_are_not_verified(patch: pytest.MonkeyPatch) -> None:
    async def believe(self: Records, keys: object, records: object, outcomes: list[Outcome], *_: object) -> Any:  # noqa: ANN401 - as `verify`
        return outcomes, {}

    patch.setattr(Records, "verify", believe)


def _blocks_of_all_weights_have_one_name(patch: pytest.MonkeyPatch) -> None:
    batch = Naming.batch
    patch.setattr(Naming, "batch", lambda self, keys, _: batch(self, keys, epoch_digest("w0")))


def _loads_ignore_new_weights(patch: pytest.MonkeyPatch) -> None:
    request_of = Seat.load_request

    def anyway(self: Seat, call: LoadCall) -> LoadRequest:
        return replace(request_of(self, call), is_current=lambda: True)

    patch.setattr(Seat, "load_request", anyway)


def _a_cancelled_call_leaves_its_copies_running(patch: pytest.MonkeyPatch) -> None:
    async def drain_copies(self: Revocable, *_: float) -> bool:
        return True

    patch.setattr(Revocable, "drain_copies", drain_copies)


def _deadlines_do_not_hold_for_copies(patch: pytest.MonkeyPatch) -> None:
    drain = Revocable.drain_copies
    patch.setattr(Revocable, "drain_copies", lambda self, *_: drain(self))


def _nothing_is_evicted(patch: pytest.MonkeyPatch) -> None:
    def evict(chain: Chain, batch: Batch, tier: str | None) -> tuple[NDArray[np.bool_], list[object]]:
        return np.zeros(len(batch), np.bool_), []

    patch.setattr("tiered_kv.tiers.upkeep.evict", evict)


def _some_leases_leak(patch: pytest.MonkeyPatch) -> None:
    release = Chain.release

    def leak(self: Chain, *leases: Lease, is_use: bool = False) -> None:
        release(self, *(lease for lease in leases if len(lease.slots) != 3), is_use=is_use)

    patch.setattr(Chain, "release", leak)


def _missed_blocks_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tiered_kv.tiers.fates.Fates.count_load", lambda *_: None)


QUICKLY_FOUND: list[Plant] = [
    _a_cancelled_call_leaves_its_copies_running,
    _some_leases_leak,
    _missed_blocks_are_not_counted,
]
FOUND_IN_A_MINUTE: list[Plant] = [
    _deadlines_do_not_hold_for_copies,
    _loads_ignore_new_weights,
    _reads_are_not_verified,
    _blocks_of_all_weights_have_one_name,
    _nothing_is_evicted,
]
ONLY_IN_TORTURE = pytest.mark.skipif(
    settings.get_current_profile_name() != "torture", reason="these take a minute each: make torture"
)
BUGS = [*QUICKLY_FOUND, *(pytest.param(plant, marks=ONLY_IN_TORTURE) for plant in FOUND_IN_A_MINUTE)]


@pytest.mark.slow
@pytest.mark.timeout(600, method="thread")  # ends the process: Hypothesis takes an exception for one more failure
@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__.strip("_"))
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a few hundred examples, or else in one of two more rounds: threads of a busy machine vary what happens."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):  # the model itself may stumble over what it cannot be
        _search()


def _search() -> None:
    for is_first in (True, False, False):
        with suppress(Flaky):
            run_state_machine_as_test(VirtualMachine, settings=settings(MUST_FIND, derandomize=is_first))
