"""Tests that say, when they fail, which promise was broken: the first sentence of their docstring."""

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tiered_kv.testing.helpers import GROUPS, records_in_files
from tiered_kv.values.specs import LoadStoreSpec

SIZE = GROUPS[0].payload_bytes
ODD = GROUPS[-1].payload_bytes
_ON_ASYNCIO = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"], scope="session")]


def content(n: int, num_bytes: int = SIZE) -> bytes:
    """Return the payload of the ``n``-th block."""
    return (b"%08d" % n * (num_bytes // 8 + 1))[:num_bytes]


class Promises:
    """Base of suites for backends: their tests run on asyncio, each with its promise in front of what was found."""

    pytestmark = _ON_ASYNCIO

    async def records_at(self, spec: LoadStoreSpec) -> list[bytes]:
        """Read what the medium's `locate` has named, without the backend. Files are read as they are."""
        return records_in_files(spec)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, test in list(vars(cls).items()):
            if name.startswith("test_") and inspect.iscoroutinefunction(test) and test.__doc__:
                setattr(cls, name, _with_promise(test))


def _with_promise(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    promise = " ".join((inspect.getdoc(test) or "").partition("\n\n")[0].split())

    @functools.wraps(test)
    async def run(*args: Any, **fixtures: Any) -> None:  # noqa: ANN401 - what pytest gives to a test
        __tracebackhide__ = True  # pytest shows the test itself
        try:
            await test(*args, **fixtures)
        except AssertionError as error:
            error.args = (f"{promise}\n{error}",)
            raise
        except pytest.fail.Exception as error:  # what should have been raised was not
            error.msg = f"{promise}\n{error.msg}"
            raise
        except Exception as error:
            error.add_note(f"The promise that was broken: {promise}")
            raise

    return run
