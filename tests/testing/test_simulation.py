"""The simulation does the same each time, finds what is planted, and finds nothing in what is shipped."""

import json
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from typer.testing import CliRunner

from tiered_kv.cli.app import app
from tiered_kv.testing.simulation.run import in_words, shrink, simulate
from tiered_kv.tiers.chain import Chain
from tiered_kv.tiers.tier import Batch, Naming
from tiered_kv.transfers.handles import Revocable
from tiered_kv.values.keys import epoch_digest

SAMPLE = range(30)
STEPS = 100
MOST_SEEDS = 60
"""Within which a planted bug is to be found."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_sample_of_seeds_finds_nothing_and_does_the_same_twice() -> None:
    """Whatever is chosen, no promise is broken; and a run can be repeated."""
    for seed in SAMPLE:
        first = simulate(seed, STEPS)
        assert not first.failure, f"seed {seed}: {first.failure}"
        if seed % 4 == 0:
            assert simulate(seed, STEPS).digest == first.digest


def test_a_run_is_the_same_in_another_process() -> None:
    """Also where strings hash otherwise."""
    digests = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _PRINT_DIGEST],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command_counts_the_same_by_several_processes() -> None:
    """Seeds are told in their order, whoever runs them."""
    counted = [
        CliRunner().invoke(app, ["simulate", "--steps", "200", "--seed", "7", "--json", *more]).stdout
        for more in ((), ("--processes", "2"))
    ]
    assert counted[0] == counted[1]
    told = json.loads(counted[0])
    assert told["steps"] >= 200
    assert (told["failures"], told["seeds"]) == (0, 2)


_PRINT_DIGEST = """
from tiered_kv.testing.simulation.run import simulate
print([simulate(seed, 40).digest for seed in range(3)])
"""

Plant = Callable[[pytest.MonkeyPatch], None]


def _blocks_of_all_weights_have_one_name(patch: pytest.MonkeyPatch) -> None:
    batch = Naming.batch
    patch.setattr(Naming, "batch", lambda self, keys, _: batch(self, keys, epoch_digest("w0")))


def _nothing_is_evicted(patch: pytest.MonkeyPatch) -> None:
    async def evict(chain: Chain, batch: Batch, tier: str | None) -> object:
        return np.zeros(len(batch), np.bool_)

    patch.setattr("tiered_kv.tiers.upkeep.evict", evict)


def _a_cancelled_call_leaves_its_copies_running(patch: pytest.MonkeyPatch) -> None:
    async def drain_copies(self: Revocable, *_: float) -> bool:
        return True

    patch.setattr(Revocable, "drain_copies", drain_copies)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "plant",
    [_blocks_of_all_weights_have_one_name, _nothing_is_evicted, _a_cancelled_call_leaves_its_copies_running],
    ids=lambda plant: plant.__name__.strip("_"),
)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a few dozen seeds; and what is found can be made plainer, and repeated."""
    plant(monkeypatch)
    found = next((report for seed in range(MOST_SEEDS) if (report := simulate(seed, STEPS)).failure), None)
    assert found is not None
    plain = shrink(found, STEPS, most_runs=8)
    assert plain.kind == found.kind
    assert in_words(plain.tape).startswith("first come, first served")
