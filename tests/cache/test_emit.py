"""A program's own `emit`, and its logs: whatever they do, nothing comes of it."""

import errno
import io
import logging
import os
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from tests.support.caches import Recorder, open_cache
from tests.support.engine import MODEL, Engine, contents, prompt, small_layout
from tiered_kv import ConfigurationError, TieredKV
from tiered_kv.telemetry import log_event
from tiered_kv.values.events import BlocksLoaded, BlocksStored, Event
from tiered_kv.values.log import log

CPU = {"medium": "cpu", "capacity": "1MiB"}


async def test_an_emit_that_raises_reaches_no_transfer() -> None:
    """Events are for watching: a fault in who watches changes nothing."""

    def emit(event: Event) -> None:
        raise RuntimeError(event.name)

    engine, keys = Engine(), prompt(6)
    async with open_cache(CPU, engine=engine, emit=emit) as kv:
        spec = engine.compute(keys)
        assert (await kv.store(keys, spec)).num_stored == 6
        engine.poison()
        assert (await kv.load(keys, spec)).num_blocks == 6
        assert engine.read(spec) == contents(keys)


async def test_an_emit_that_raises_at_every_event_does_not_fill_the_log() -> None:
    """There is an event for each operation: of a receiver that takes none it is said once in a while."""

    def emit(event: Event) -> None:
        raise RuntimeError(event.name)

    engine, keys = Engine(), prompt(6)
    with capture_logs() as logs:
        async with open_cache(CPU, engine=engine, emit=[emit, emit]) as kv:
            spec = engine.compute(keys)
            for _ in range(20):
                await kv.load(keys, spec)
    assert [each["event"] for each in logs] == ["event.not_taken"] * 2


async def test_several_receivers_hear_of_every_event() -> None:
    """Also those that come after one that raises."""

    def emit(event: Event) -> None:
        raise RuntimeError(event.name)

    engine, keys, first, last = Engine(), prompt(6), Recorder(), Recorder()
    async with open_cache(CPU, engine=engine, emit=[first, emit, last]) as kv:
        await kv.store(keys, engine.compute(keys))
    assert first.of(BlocksStored)
    assert first.events == last.events


def test_a_receiver_that_nobody_would_await_is_refused() -> None:
    """A coroutine function would lose every event in silence."""

    async def emit(event: Event) -> None:
        raise AssertionError(event)

    class Receiver:
        async def __call__(self, event: Event) -> None:
            raise AssertionError(event)

    for each in (emit, Receiver(), [Recorder(), emit]):
        with pytest.raises(ConfigurationError, match="plain function"):
            TieredKV([CPU], model=MODEL, layout=small_layout(), emit=each)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ConfigurationError, match="or several, got 5"):
        TieredKV([CPU], model=MODEL, layout=small_layout(), emit=[5])  # type: ignore[list-item]  # on purpose


@pytest.fixture
def unconfigured() -> Iterator[None]:
    """Neither structlog nor the logger of ours is configured, before the test and after it."""
    logger = logging.getLogger("tiered_kv")
    level, handlers = logger.level, list(logger.handlers)
    structlog.reset_defaults()
    logger.setLevel(logging.NOTSET)
    yield
    structlog.reset_defaults()
    logger.setLevel(level)
    logger.handlers = handlers


class FullDisk(io.StringIO):
    """A file that takes nothing."""

    def write(self, text: str, /) -> int:
        """Say that there is no room."""
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), text)


def _full_disk() -> None:
    structlog.configure(logger_factory=structlog.WriteLoggerFactory(FullDisk()))


def _closed_pipe() -> None:
    stream = io.StringIO()
    stream.close()
    structlog.configure(logger_factory=structlog.WriteLoggerFactory(stream))


def _raising_processor() -> None:
    def processor(_logger: object, _name: str, _event: MutableMapping[str, Any]) -> str:
        raise ZeroDivisionError

    structlog.configure(processors=[processor])


def _raising_handler() -> None:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ZeroDivisionError(record)

    logger = logging.getLogger("tiered_kv")
    logger.addHandler(Handler())
    logger.setLevel(logging.DEBUG)


@pytest.mark.parametrize("configure", [_full_disk, _closed_pipe, _raising_processor, _raising_handler])
@pytest.mark.usefixtures("unconfigured")
async def test_a_log_that_cannot_be_written_fails_no_operation(configure: Callable[[], None]) -> None:
    """A full disk, a closed pipe or a processor that raises costs the entries, and no load or store."""
    engine, keys = Engine(), prompt(6)
    configure()
    async with open_cache(CPU, engine=engine, emit=log_event) as kv:
        spec = engine.compute(keys)
        assert (await kv.store(keys, spec)).num_stored == 6
        engine.poison()
        assert (await kv.load(keys, spec)).num_blocks == 6
        assert engine.read(spec) == contents(keys)


@pytest.mark.usefixtures("unconfigured")
async def test_without_structlog_the_standard_librarys_logging_decides(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is printed by us; below warning nothing is logged unless asked for; a record has the event's values."""
    engine, keys = Engine(), prompt(6)
    async with open_cache(CPU, engine=engine, emit=log_event) as kv:
        await kv.store(keys, engine.compute(keys))
        assert not caplog.records
        caplog.set_level(logging.DEBUG, "tiered_kv")
        await kv.load(keys, engine.compute(keys))
    loaded = next(record for record in caplog.records if vars(record)["event"] == BlocksLoaded.name)
    assert loaded.levelname == "DEBUG"
    assert loaded.getMessage().startswith("blocks.loaded blocks=6 requested=6 by_tier={'cpu': 6}")
    assert vars(loaded)["values"]["blocks"] == 6
    assert "".join(capsys.readouterr()) == ""
    assert not structlog.is_configured()


@pytest.mark.usefixtures("unconfigured")
def test_what_a_program_does_not_want_to_see_costs_no_logger() -> None:
    """An entry for every load, which as a rule nobody looks at, is not made to be thrown away."""
    written: list[str] = []

    class Sink:
        def msg(self, text: str) -> None:
            written.append(text)

        debug = error = msg

    made: list[Sink] = []

    def make(*_: object) -> Sink:
        made.append(Sink())
        return made[-1]

    for least, wanted in ((logging.ERROR, ["b"]), (logging.DEBUG, ["b", "a", "b"])):
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(least),
            processors=[lambda _logger, _name, values: str(values["event"])],
            logger_factory=make,
        )
        log("debug", "a")
        log("error", "b")
        assert (written, len(made)) == (wanted, len(wanted))


@pytest.mark.usefixtures("unconfigured")
def test_figures_are_logged_with_as_many_digits_as_say_something(caplog: pytest.LogCaptureFixture) -> None:
    """The text has six; the record's values are as they were."""
    log("warning", "disk.slow", took_ms=201.00000000002183, path="/kv")
    (record,) = caplog.records
    assert record.getMessage() == "disk.slow took_ms=201 path='/kv'"
    assert record.__dict__["values"] == {"took_ms": 201.00000000002183, "path": "/kv"}
