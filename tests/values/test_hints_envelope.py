"""What orchestrators say of KV: the envelope read, bounded, and what it is about."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.hints import hints
from tiered_kv.values.hints import MOST_ACTIONS, MOST_S, HintAction, blocks_meant, read_hints


@pytest.mark.parametrize(
    "actions",
    [
        "none",
        [None],
        [{"action_type": "kv.pin"}],
        hints(("kv.teleport", {}))["actions"],
        hints(("kv.pin", {}), version="2.0")["actions"],
        hints(("kv.pin", {"ttl_seconds": "long"}))["actions"],
        hints(("kv.pin", {"ttl_seconds": float("nan")}))["actions"],
        hints(("kv.pin", {"start": -1}))["actions"],
        hints(("kv.pin", {"start": True}))["actions"],
        hints(("kv.retain", {"priority": 101}))["actions"],
        hints(("kv.retain", {"directives": [3]}))["actions"],
        hints(("kv.fetch", {"block_hashes": ["1"]}))["actions"],
        hints(("kv.fetch", {"delay_seconds": -1}))["actions"],
        hints(("kv.evict", "all"))["actions"],  # type: ignore[arg-type]  # what is tested
    ],
)
def test_what_is_not_understood_is_counted(actions: object) -> None:
    """It is no error, and nothing is asked for."""
    assert read_hints({"actions": actions}) == ([], 1)


def test_each_action_is_read_by_itself() -> None:
    """Objects as vLLM has them, beside one that nobody knows; what is too long is cut."""
    sent = hints(
        ("kv.unknown", {}),
        ("kv.retain", {"directives": [{"end": 64, "priority": 50, "duration": 20}, {"start": 64, "priority": 0}]}),
        ("kv.pin", {"ttl_seconds": 1e9}),
        ("kv.fetch", {"source_control_endpoint": "tcp://elsewhere", "block_hashes": [-1, 5]}),
    )
    envelope = SimpleNamespace(actions=[SimpleNamespace(**each) for each in sent["actions"]])
    assert read_hints(envelope) == (
        [
            HintAction("retain", 0.5, 20, end=64),
            HintAction("demote", start=64),
            HintAction("pin", for_s=MOST_S),
            HintAction("prefetch", for_s=60, after_s=None, hashes=frozenset({2**64 - 1, 5})),
        ],
        1,
    )


def test_too_many_actions_are_passed_over() -> None:
    """So that no request costs more than others by much."""
    actions, num_ignored = read_hints(hints(*[("kv.demote", {})] * (MOST_ACTIONS + 3)))
    assert (len(actions), num_ignored) == (MOST_ACTIONS, 3)


def test_an_action_is_about_whole_blocks_of_its_request() -> None:
    """By tokens, by names that KV events had, or of the answer alone."""
    names = [bytes(24) + number.to_bytes(8, "big") for number in range(10)]

    def of(**wanted: Any) -> list[range]:  # noqa: ANN401 - a HintAction's
        meant = blocks_meant([HintAction("pin", **wanted)], names, block_size=16, num_prompt_tokens=100)
        return [blocks for _, blocks in meant]

    assert of() == [range(10)]
    assert of(start=1, end=63) == [range(1, 3)]
    assert of(start=None) == [range(7, 10)]
    assert of(hashes=frozenset({2, 3, 7, 99})) == [range(2, 4), range(7, 8)]
    assert of(start=500) == of(hashes=frozenset()) == of(hashes=frozenset({99})) == []
    assert of(start=64, hashes=frozenset({2})) == of(start=0, end=16, hashes=frozenset({2, 3})) == []


def test_what_many_actions_name_is_looked_for_once() -> None:
    """However many they are: blocks times actions would keep whoever asks for too long. What has a delay comes last."""

    class Names(Sequence[bytes]):
        num_looks = 0

        def __getitem__(self, at: Any) -> Any:  # noqa: ANN401 - as a Sequence has it
            if at >= len(self):
                raise IndexError
            self.num_looks += 1
            return int(at).to_bytes(32, "big")

        def __len__(self) -> int:
            return 1000

    names = Names()
    actions = [HintAction("prefetch", after_s=16.0 - at, hashes=frozenset({at, 2 * at, 5000})) for at in range(16)]
    meant = list(blocks_meant(actions, names, block_size=16, num_prompt_tokens=16_000))
    assert names.num_looks <= 1000
    assert meant[:3] == [(actions[15], range(15, 16)), (actions[15], range(30, 31)), (actions[14], range(14, 15))]
    assert meant[-2:] == [(actions[1], range(1, 3)), (actions[0], range(1))]
