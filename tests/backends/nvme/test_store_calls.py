"""Calls under way in threads: the files stay open for them, and are closed once, after the last."""

import threading

import pytest

from tiered_kv import BackendUnavailableError
from tiered_kv_backends.nvme.directory_store import FileCalls


def test_files_are_closed_at_once_where_nothing_is_under_way() -> None:
    """And once, however often that is asked for; no call begins after it."""
    closed: list[str] = []
    calls = FileCalls(lambda: closed.append("files"))
    assert calls.guarded(lambda: "read") == "read"
    calls.close()
    calls.close()
    assert closed == ["files"]
    with pytest.raises(BackendUnavailableError, match="was closed"):
        calls.guarded(closed.append, "a call")
    assert closed == ["files"]


def test_files_stay_open_until_the_last_call_has_ended() -> None:
    """Whatever ends it: a descriptor may be another file's by then."""
    happened: list[str] = []
    calls, begun, go_on = FileCalls(lambda: happened.append("files closed")), threading.Event(), threading.Event()

    def read() -> None:
        begun.set()
        assert go_on.wait(60)
        happened.append("read")
        raise OSError

    def guarded() -> None:
        with pytest.raises(OSError):  # noqa: PT011 - it is ours
            calls.guarded(read)

    thread = threading.Thread(target=guarded)
    thread.start()
    assert begun.wait(60)
    calls.close()
    assert happened == []
    go_on.set()
    thread.join()
    assert happened == ["read", "files closed"]
