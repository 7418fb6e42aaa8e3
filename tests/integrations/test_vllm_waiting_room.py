"""Room in vLLM's pool for requests that have blocks and wait for a load: there is enough to compute all of them."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.integrations.test_vllm_loads import LENGTH, loads_of, stored_once
from tests.integrations.test_vllm_stores import ROOMY, SHAPES, Copies
from tests.support.small_vllm import VLLM, Pool


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for plans however long they take: here it is no matter of the machine's speed."""
    monkeypatch.setattr(VLLM.loading, "_PATIENCE_S", 60.0)


@pytest.mark.parametrize("is_bringing", [True, False])
@pytest.mark.parametrize(("num_blocks", "num_loading"), [(47, 1), (48, 2), (71, 2), (72, 3)])
def test_requests_wait_together_where_all_can_be_computed(
    monkeypatch: pytest.MonkeyPatch, num_blocks: int, num_loading: int, *, is_bringing: bool
) -> None:
    """Each is to have 24 blocks at most, and has 13 for its load. The others come then, and nobody passes them."""
    with stored_once(ROOMY, groups=SHAPES["windows"], num_blocks=num_blocks) as engine:
        monkeypatch.setattr(VLLM.messages.Tracked, "may_hurry", is_bringing)
        loads, copies = loads_of(engine), Copies(engine, "load")
        requests = [engine.ask(name, LENGTH, 2, prompt="a") for name in ("two", "three", "four")]
        engine.step()
        assert [each.is_loading for each in requests] == [at < num_loading for at in range(3)]
        copies.end()
        engine.settle()
        assert loads == [False] * 3


def request(name: str, num_tokens: int) -> Any:  # noqa: ANN401 - a request of vLLM's, as far as it counts here
    """Return one of so many tokens."""
    return SimpleNamespace(request_id=name, num_tokens=num_tokens)


def room(num_free: int) -> Any:  # noqa: ANN401 - of a package that only exists beside vLLM
    """Return the room in a pool, for requests that have a table of all their blocks and one of the last two."""
    made = VLLM.waiting_room.WaitingRoom(((4, 100), (4, 2)))
    made.use_pool(Pool(num_free))
    return made


def test_what_waits_alone_is_no_matter_of_room() -> None:
    """VLLM says whether it has blocks."""
    assert room(0).has_for(request("one", 400))


def test_what_has_no_room_is_not_overtaken() -> None:
    """Not in the same step, by what has: else the former might never have any."""
    of = room(30)
    of.wait(request("one", 16), [[1, 2], [0, 3]])  # of 8 blocks it has 3
    assert of.has_for(request("small", 16))
    assert not of.has_for(request("large", 100))
    assert not of.has_for(request("small", 16))
    of.begin_step()
    assert of.has_for(request("small", 16))


def test_who_computes_or_has_ended_takes_no_room() -> None:
    """It may be preempted then, or has given its blocks back."""
    of = room(29)
    of.wait(request("one", 80), [[1], [2]])
    assert not of.has_for(request("two", 16))
    of.leave("one")
    of.begin_step()
    assert of.has_for(request("two", 16))


def test_a_load_that_has_failed_leaves_no_blocks() -> None:
    """Its request is computed from its first token on, before those that wait behind it."""
    of, one = room(16), request("one", 16)
    of.wait(one, [[1, 2], [0, 3]])
    assert of.has_for(request("two", 24))  # of 10, beside the 5 of the first
    of.ask(one)
    assert not of.has_for(request("two", 24))
    of.ask(request("three", 24))  # nobody waits by that name
    of.leave("one")
    assert of.has_for(request("two", 24))


def test_a_load_that_has_failed_does_not_wait_for_itself() -> None:
    """It may be found again, where a host's server was gone meanwhile: one by itself takes no room from itself."""
    of, one = room(10), request("one", 16)  # of 8 blocks at most
    of.wait(one, [[1, 2], [0, 3]])
    of.ask(one)
    assert of.has_for(one)
    assert not of.has_for(request("two", 16))
