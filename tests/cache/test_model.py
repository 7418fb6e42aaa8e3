"""The whole facade against a model: whatever is called in whatever order, no wrong byte is ever served.

In virtual time, with backends in memory that fail, hang and lie; and in real time on a real NVMe tier. The rules are in
``model/``, by occasion; what must hold after each is in ``model/machine.py``.
"""

import pytest
from hypothesis import HealthCheck, settings

from tests.cache.model.changing import Changing
from tests.cache.model.ending import Ending
from tests.cache.model.faults import Corruption, Faults
from tests.cache.model.groups import Groups, Ranks
from tests.cache.model.holding import Holding
from tests.cache.model.world import RealWorld, UvloopWorld, VirtualWorld

pytestmark = pytest.mark.timeout(600, method="thread")  # an exception would have Hypothesis go on


class VirtualMachine(Ending, Holding, Changing, Ranks, Faults):
    """Everything, the same each time, and no time limit passed by a moment."""

    make_world = VirtualWorld


class RealMachine(Ending, Holding, Changing, Groups, Corruption):
    """Threads and files."""

    make_world = RealWorld


class UvloopMachine(RealMachine):
    """The same on uvloop."""

    make_world = UvloopWorld


def _settings(part: float) -> settings:
    """Take a part of all examples: 100, or 20,000 by ``make torture``."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    is_sample = settings().max_examples <= 100
    num_examples = round(settings().max_examples * part * (1 if is_sample else 2))
    return settings(
        max_examples=num_examples,
        stateful_step_count=20,
        suppress_health_check=slow,
        derandomize=is_sample,  # by `make test` the same each time; by `make torture` at random
    )


TestInVirtualTime = pytest.mark.slow(VirtualMachine.TestCase)
TestInVirtualTime.settings = _settings(0.7 if settings.get_current_profile_name() == "torture" else 0.12)

ONLY_IN_TORTURE = pytest.mark.skipif(
    settings.get_current_profile_name() != "torture",
    reason="real time limits are waited for, for minutes: make torture",
)

TestOnNVMe = ONLY_IN_TORTURE(RealMachine.TestCase)
TestOnNVMe.settings = _settings(0.08)

TestOnUvloop = ONLY_IN_TORTURE(UvloopMachine.TestCase)
TestOnUvloop.settings = _settings(0.07)
