import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tiered_kv import ConfigurationError
from tiered_kv.traces import (
    SYNTHETIC,
    BadLine,
    Request,
    Trace,
    agents,
    api_batches,
    chat,
    names_of,
    open_trace,
    read_trace,
    timers,
    write_trace,
    zipf_prompts,
)

MOONCAKE = [
    {"timestamp": 27_000, "input_length": 700, "output_length": 52, "hash_ids": [46, 47]},
    {"timestamp": 30_000, "input_length": 1_500, "output_length": 3, "hash_ids": [46, 47, 2353]},
]
BAILIAN = [
    {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 20, "output_length": 9, "type": "text",
     "turn": 1, "hash_ids": [7, 8]},
    {"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.5, "input_length": 40, "output_length": 8, "type": "search",
     "turn": 2, "hash_ids": [7, 8, 9]},
    {"chat_id": 170, "parent_chat_id": 160, "timestamp": 99.5, "input_length": 50, "output_length": 8, "type": "text",
     "turn": 3, "hash_ids": [7, 8, 9, 10]},
]  # fmt: skip


def write_lines(path: Path, lines: list[object], *, gz: bool = False) -> Path:
    """Write each value as a line of JSON, and text as it is."""
    text = "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines).encode()
    path.write_bytes(gzip.compress(text) if gz else text)
    return path


@pytest.mark.parametrize("gz", [False, True])
def test_mooncakes_times_are_milliseconds_and_its_blocks_512_tokens(tmp_path: Path, *, gz: bool) -> None:
    """Whether the file is gzip is seen by its bytes, not its name. The first request is at 0."""
    trace = read_trace(write_lines(tmp_path / "trace", [*MOONCAKE], gz=gz))
    assert trace.block_size == 512
    assert [each.at_s for each in trace.requests] == [0.0, 3.0]
    assert [each.ids.tolist() for each in trace.requests] == [[46, 47], [46, 47, 2353]]
    assert (trace.requests[1].input_tokens, trace.requests[1].output_tokens) == (1_500, 3)
    assert (trace.num_references, trace.num_blocks, trace.seconds) == (5, 3, 3.0)


def test_bailians_requests_know_their_conversation(tmp_path: Path) -> None:
    """Times are seconds, blocks 16 tokens; a session is named by its first request."""
    trace = read_trace(write_lines(tmp_path / "trace", [*BAILIAN]))
    assert trace.block_size == 16
    assert [each.at_s for each in trace.requests] == [0.0, 1.0, 38.0]
    assert [(each.session, each.turn, each.category) for each in trace.requests] == [
        (159, 1, "text"),
        (159, 2, "search"),
        (159, 3, "text"),
    ]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ([1, 2], "an object, not list"),
        (MOONCAKE[0] | {"timestamp": "soon"}, "timestamp must be a number of 0 or more, got 'soon'"),
        (MOONCAKE[0] | {"timestamp": float("nan")}, "timestamp must be"),
        (MOONCAKE[0] | {"timestamp": True}, "timestamp must be"),
        (MOONCAKE[0] | {"timestamp": 10**400}, "timestamp must be"),
        (MOONCAKE[0] | {"input_length": -1}, "input_length must be an int of 0 or more, got -1"),
        ({"timestamp": 0, "input_length": 3}, "hash_ids must be a list, got None"),
        (MOONCAKE[0] | {"hash_ids": [1, -2]}, "hash_ids must be ints from 0 to 2**63 - 1"),
        (MOONCAKE[0] | {"hash_ids": [1, 2.5]}, "hash_ids must be ints"),
        (MOONCAKE[0] | {"hash_ids": [[1], [2]]}, "hash_ids must be ints"),
        (MOONCAKE[0] | {"hash_ids": [[1], 2]}, "hash_ids must be ints"),
        (MOONCAKE[0] | {"hash_ids": [2**64]}, "hash_ids must be ints"),
        (MOONCAKE[0] | {"hash_ids": ["a"]}, "hash_ids must be ints"),
        (MOONCAKE[0] | {"hash_ids": [1, 2, 1]}, "hash_ids names a block twice"),
        (MOONCAKE[0] | {"block_size": 16}, "block_size is 16, and 0 before"),
    ],
)
def test_a_bad_line_is_told_by_its_number_and_left_out(tmp_path: Path, bad: object, why: str) -> None:
    """What is around it is read; empty lines are no fault."""
    told: list[BadLine] = []
    path = write_lines(tmp_path / "trace", [MOONCAKE[0], "", bad, MOONCAKE[1]])
    assert len(read_trace(path, on_bad_line=told.append).requests) == 2
    assert [each.number for each in told] == [3]
    assert why in told[0].why
    assert len(told[0].why) < 200


def test_a_gzip_that_ends_in_the_middle_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    """As a recording whose process was killed leaves it."""
    told: list[BadLine] = []
    path = write_lines(tmp_path / "trace.gz", [MOONCAKE[0]] * 10_000, gz=True)
    path.write_bytes(path.read_bytes()[:-40])
    trace = read_trace(path, on_bad_line=told.append)
    assert 0 < len(trace.requests) <= 10_000
    assert len(told) == 1


def test_a_file_of_nothing_but_bad_lines_is_refused(tmp_path: Path) -> None:
    """Naming the first."""
    with pytest.raises(ConfigurationError, match=r"no requests in it \(2 bad lines; line 1: no JSON"):
        read_trace(write_lines(tmp_path / "trace", ["?", "!"]))
    with pytest.raises(ConfigurationError, match="no requests"):
        read_trace(write_lines(tmp_path / "trace", []))


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_what_is_written_is_read_again(tmp_path: Path, name: str) -> None:
    """All of it; and equal traces make equal files."""
    ids = np.array([2**63 - 1, 5], dtype=np.int64)
    trace = Trace("t", [Request(0.0, ids, 33, 7), Request(1.5, ids[:1], 16, 0, session=4, turn=2, category="c")], 16)
    write_trace(tmp_path / name, trace)
    again = read_trace(f"{tmp_path}/{name}")
    assert again.block_size == 16
    assert [(r.at_s, r.ids.tolist(), r.input_tokens, r.output_tokens, r.session, r.turn, r.category)
            for r in again.requests] == [
        (0.0, [2**63 - 1, 5], 33, 7, None, 1, ""), (1.5, [2**63 - 1], 16, 0, 4, 2, "c"),
    ]  # fmt: skip
    write_trace(tmp_path / "other", again)
    write_trace(tmp_path / "same", trace)
    assert (tmp_path / "other").read_bytes() == (tmp_path / "same").read_bytes()


def test_requests_are_sorted_by_time_and_stay_in_order_where_they_came_at_once(tmp_path: Path) -> None:
    """Servers log requests when they end."""
    lines = [MOONCAKE[0] | {"timestamp": at, "input_length": n} for n, at in enumerate([9, 5, 7, 5])]
    trace = read_trace(write_lines(tmp_path / "trace", [*lines]))
    assert [each.input_tokens for each in trace.requests] == [1, 3, 2, 0]
    assert trace.requests[0].at_s == 0.0


@pytest.mark.parametrize("make", [zipf_prompts, chat, agents, api_batches, timers])
def test_a_synthetic_trace_is_the_same_for_the_same_seed(make: Callable[..., Trace]) -> None:
    """As many requests as asked for, in order of time, each of at least one block and none twice."""
    trace, again, other = make(seed=3, num_requests=300), make(seed=3, num_requests=300), make(num_requests=300)
    prompts = [each.ids.tolist() for each in trace.requests]
    assert prompts == [each.ids.tolist() for each in again.requests]
    assert prompts != [each.ids.tolist() for each in other.requests]
    assert len(prompts) == 300
    times = [each.at_s for each in trace.requests]
    assert times == sorted(times)
    assert all(len(set(each)) == len(each) > 0 for each in prompts)
    assert trace.num_blocks < trace.num_references


@pytest.mark.parametrize("make", [chat, agents, timers])
def test_turns_continue_the_ones_before(make: Callable[..., Trace]) -> None:
    """A later request of a session begins with the whole prompt of the one before it."""
    last: dict[int | None, list[int]] = {}
    for each in make(num_requests=500).requests:
        prompt = each.ids.tolist()
        before = last.get(each.session, [])
        assert (each.turn > 1) == bool(before)
        assert prompt[: len(before)] == before
        last[each.session] = prompt


def test_synthetic_traces_go_by_name() -> None:
    """On the command line they stand where a path would."""
    for name in SYNTHETIC:
        trace = open_trace(f"synthetic:{name}?num_requests=20&seed=4")
        assert (trace.name, len(trace.requests)) == (f"synthetic:{name}", 20)
    with pytest.raises(ConfigurationError, match=r"there are agents, .*, shifts, timers, twice, zipf"):
        open_trace("synthetic:nothing")
    for wrong in ("?num_requests=many", "?requests=5", "?seed"):
        with pytest.raises(ConfigurationError, match="numbers for any of seed=0"):
            open_trace(f"synthetic:chat{wrong}")
    for wrong in ("num_requests=0", "per_s=0", "per_s=-1", "per_s=nan", "think_s=0"):
        with pytest.raises(ConfigurationError, match="must be more than 0"):
            open_trace(f"synthetic:chat?{wrong}")
    for beyond in ("zipf?exponent=-400", "zipf?exponent=inf", "batches?mean_batch=inf", "chat?think_s=nan"):
        with pytest.raises(
            ConfigurationError, match=f"^synthetic:{re.escape(beyond)}: .* come numbers for any of seed=0"
        ):
            open_trace(f"synthetic:{beyond}")


def test_names_are_the_ids() -> None:
    """Each in the first word of four."""
    assert names_of(np.array([1, 2**63 - 1])).tolist() == [[1, 0, 0, 0], [2**63 - 1, 0, 0, 0]]
