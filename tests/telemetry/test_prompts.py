"""What was asked for, each prompt once, whatever calls asked for it."""

import numpy as np
import pytest

from tests.support.engine import prompt
from tiered_kv.telemetry.prompts import Prompts
from tiered_kv.tiers.tier import Batch
from tiered_kv.values.keys import Namespace

SPACE = Namespace(b"f" * 32, b"e" * 32)


def blocks(start: int, stop: int, seed: int = 0) -> Batch:
    """Name some blocks of a prompt."""
    return Batch(SPACE, SPACE.names(prompt(stop, seed=seed)), np.arange(stop))[start:stop]


def rows(prompts: Prompts) -> list[tuple[str, int, int, str]]:
    """Return what fell short."""
    return [(each.call, each.found, each.requested, each.because) for each in prompts.shortfalls]


@pytest.mark.parametrize(
    ("loads", "missing", "told"),
    [
        pytest.param([], {"evicted": 2}, [("lookup", 8, 10, "evicted")], id="not loaded"),
        pytest.param([(0, 8, 8)], {"evicted": 2}, [("lookup", 8, 10, "evicted")], id="what was found"),
        pytest.param([(0, 7, 7)], {"evicted": 2}, [("lookup", 8, 10, "evicted")], id="but the last one"),
        pytest.param([(0, 10, 8)], {"evicted": 2}, [("lookup", 8, 10, "evicted")], id="all of it"),
        pytest.param([(0, 4, 4), (4, 8, 4)], {"evicted": 2}, [("lookup", 8, 10, "evicted")], id="in two parts"),
        pytest.param([(0, 8, 3)], {"evicted": 2, "late": 5}, [("load", 3, 10, "late")], id="less came"),
        pytest.param([(4, 8, 1)], {"evicted": 2, "late": 3}, [("load", 5, 10, "late")], id="less of a part"),
        pytest.param([(0, 10, 10)], {}, [], id="the rest was on its way"),
        pytest.param([(0, 8, 3), (0, 10, 10)], {}, [], id="at the second try"),
    ],
)
def test_what_is_looked_up_and_loaded_is_one_request(
    loads: list[tuple[int, int, int]], missing: dict[str, int], told: list[tuple[str, int, int, str]]
) -> None:
    """Each of its blocks is counted once, and it is one row, whatever part of it the engine loads."""
    prompts = Prompts()
    prompts.looked_up(blocks(0, 10), 8, "evicted")
    for start, stop, num_came in loads:
        prompts.loaded(blocks(start, stop), num_came, "late" if num_came < stop - start else "")
    asked = prompts.counted()
    assert (asked.requested, asked.missing) == (10, sum(missing.values()))
    assert {why: n for why, n in asked.missing_because.items() if n} == missing
    assert (asked.looked_up, asked.not_found, asked.not_found_because) == (10, 2, {"evicted": 2})
    assert rows(prompts) == told


def test_a_load_that_nobody_looked_up_is_a_request() -> None:
    """Of another prompt, of a longer one, or after so many lookups that its own is forgotten."""
    prompts = Prompts()
    prompts.loaded(blocks(0, 4), 4, "")
    prompts.looked_up(blocks(0, 4), 4, "")
    prompts.loaded(blocks(0, 6), 5, "evicted")
    prompts.loaded(blocks(0, 2, seed=1), 0, "never stored")
    for seed in range(2, 200):
        prompts.looked_up(blocks(0, 1, seed=seed), 1, "")
    prompts.loaded(blocks(0, 4), 4, "")
    asked = prompts.counted()
    assert (asked.requested, asked.missing) == (4 + 4 + 6 + 2 + 198 + 4, 3)
    assert rows(prompts) == [("load", 5, 6, "evicted"), ("load", 0, 2, "never stored")]
