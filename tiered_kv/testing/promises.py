"""Tests that say, when they fail, which promise was broken: the first sentence of their docstring."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pytest

from tiered_kv.testing.helpers import GROUPS, longest_stall, records_in_files
from tiered_kv.values.specs import LoadStoreSpec

SIZE = GROUPS[0].payload_bytes
ODD = GROUPS[-1].payload_bytes
MOST_STALL_S: Final = 0.2
"""While a call takes longer than this, on the event loop itself, no other transfer moves."""
_TRIES: Final = 3
_ON_ASYNCIO = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"], scope="session")]


def content(n: int, num_bytes: int = SIZE) -> bytes:
    """Return the payload of the ``n``-th block."""
    return (b"%08d" % n * (num_bytes // 8 + 1))[:num_bytes]


def assert_bytes(found: Sequence[bytes], wanted: Sequence[bytes]) -> None:
    """Fail unless all are equal; say which one is not, and where: whole blocks side by side tell a person nothing."""
    __tracebackhide__ = True  # pytest shows the line of the test
    assert len(found) == len(wanted), "as many blocks as were written"
    for n, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if one != other:
            at = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
            raise AssertionError(
                f"block {n} of {len(wanted)} is not what was written: at byte {at} it has {one[at : at + 16]!r}, "
                f"not {other[at : at + 16]!r} (it has {len(one)} bytes, of {len(other)})"
            )


async def assert_loop_goes_on(calls: Mapping[str, Callable[[], Awaitable[object]]]) -> None:
    """Make each call; fail if one holds up the event loop, each time that it is made."""
    for doing, call in calls.items():
        stalls: list[float] = []
        while not stalls or (stalls[-1] > MOST_STALL_S and len(stalls) < _TRIES):  # a busy machine may hold it up once
            stalls.append(await longest_stall(call()))
        held_s = min(stalls)
        assert held_s <= MOST_STALL_S, f"{doing} held it up for {held_s:.1f} s: let a thread do it, context.workers(n)"


class Promises:
    """Base of suites: a test that fails has its promise in front of what was found."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, test in list(vars(cls).items()):
            if name.startswith("test_") and inspect.isfunction(test) and test.__doc__:
                setattr(cls, name, _with_promise(test))


class BackendPromises(Promises):
    """Base of suites for backends: their tests run on asyncio."""

    pytestmark = _ON_ASYNCIO

    async def records_at(self, spec: LoadStoreSpec) -> list[bytes]:
        """Read what the medium's `locate` has named, without the backend. Files are read as they are."""
        return records_in_files(spec)


def _with_promise(test: Callable[..., Any]) -> Callable[..., Any]:
    promise = " ".join((inspect.getdoc(test) or "").partition("\n\n")[0].split())

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:  # noqa: ANN401 - what pytest gives to a test
        __tracebackhide__ = True  # pytest shows the test itself
        with _told(promise):
            test(*args, **fixtures)

    @functools.wraps(test)
    async def run_async(*args: Any, **fixtures: Any) -> None:  # noqa: ANN401 - likewise
        __tracebackhide__ = True
        with _told(promise):
            await test(*args, **fixtures)

    return run_async if inspect.iscoroutinefunction(test) else run


@contextmanager
def _told(promise: str) -> Iterator[None]:
    __tracebackhide__ = True
    try:
        yield
    except AssertionError as error:
        error.args = (f"{promise}\n{error}",)
        raise
    except pytest.fail.Exception as error:  # what should have been raised was not
        error.msg = f"{promise}\n{error.msg}"
        raise
    except Exception as error:
        error.add_note(f"The promise that was broken: {promise}")
        raise
