"""The calls of the face that a client has its server answer: the one table of their names, and the client's side.

A call is one line in `AskedCalls`: its arguments and its answer are those of `BlockCache`, whose signature is what both
sides check them against. So the server calls nothing by a name that has no line here, and nothing with an argument of
another type than the face says.
"""

import asyncio
import inspect
import math
import time
import typing
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import update_wrapper
from itertools import accumulate
from typing import Any, Final, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from tiered_kv.cache.answers import Explanation
from tiered_kv.cache.block_cache import BlockCache
from tiered_kv.cache.checks import check_found, check_one_rank, check_ttl
from tiered_kv.host import protocol, wire
from tiered_kv.host.client_transfers import Starts
from tiered_kv.host.connection import Connection
from tiered_kv.host.protocol import Answer, Answered, Call, Keys
from tiered_kv.transfers.handles import Handle
from tiered_kv.transfers.prefetch import PrefetchHandle
from tiered_kv.values.errors import BackendUnavailableError, ClosedError, ConfigurationError, Reason, TierFault
from tiered_kv.values.hints import check_hint
from tiered_kv.values.keys import BlockKeys
from tiered_kv.values.log import log
from tiered_kv.values.results import (
    BlockState,
    CacheStatistics,
    LookupResult,
    PinResult,
    PrefetchResult,
    RemovalResult,
    TierRun,
)

F = TypeVar("F", bound=Callable[..., Any])
LONG_S: Final = 60.0
"""What calls for operators may take: `flush`, `clear`, `evict`."""
MOST_KEYS: Final = 1 << 14
"""That one message is about: a client asks about more in parts, so that between them others have their turns."""
_MOST_LOOKED_UP: Final = 1 << 17
"""The same of lookups, parts of which would count as so many requests: more than a prompt has. The server needs some 5
ms to find as many."""
_RANKS: Final = 8
"""Of a client, for which one message may be about as many keys as it may at all: each key is looked up for each."""
_NO_STATISTICS: Final = CacheStatistics((), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class _Form:
    """How a type of the face passes between processes: as another type, made by ``say`` and undone by ``hear``."""

    passed: Any
    say: Callable[[Any], Any]
    hear: Callable[[Any], Any]


_FORMS: Final[Mapping[object, _Form]] = {
    BlockKeys: _Form(Keys, lambda said: said, Keys.block_keys),  # said before: with the weights that they are of
    LookupResult: _Form(protocol.Found, protocol.Found.of, protocol.Found.result),
    NDArray[np.bool_]: _Form(
        bytes, lambda given: np.asarray(given, np.bool_).tobytes(), lambda said: _bytes(said) != 0
    ),
    NDArray[np.int8]: _Form(bytes, lambda given: given.tobytes(), lambda it: _bytes(it).view(np.int8)),
}
"""Types that are not here pass as they are: numbers, texts, and dataclasses of these."""


def _form(hint: object) -> _Form:
    return _FORMS.get(hint, _Form(hint, _same, _same))


def _same(value: Any) -> Any:  # noqa: ANN401 - any
    return value


def _bytes(said: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(said, np.uint8)


def _prefix_found(answers: list[LookupResult]) -> LookupResult:
    runs: list[TierRun] = []
    for answer, start in zip(answers, accumulate((each.num_blocks for each in answers), initial=0), strict=False):
        for run in answer.runs:
            moved = replace(run, start=start + run.start, stop=start + run.stop)
            if runs and moved.spec is None and (runs[-1].tier, runs[-1].spec) == (moved.tier, None):
                moved = replace(moved, start=runs.pop().start)
            runs.append(moved)
    return replace(
        answers[-1],
        num_blocks=sum(each.num_blocks for each in answers),
        runs=tuple(runs),
        num_bytes=sum(each.num_bytes for each in answers),
        costs={name: cost for each in answers for name, cost in each.costs.items()},
    )


def _prefix_brought(answers: list[PrefetchResult]) -> PrefetchResult:
    return PrefetchResult(
        sum(each.num_blocks for each in answers),
        sum(each.num_moved for each in answers),
        tuple(fault for each in answers for fault in each.faults),
    )


def _removed(answers: list[RemovalResult]) -> RemovalResult:
    kept_by = dict.fromkeys(name for each in answers for name in each.kept_by)
    return RemovalResult(sum(each.num_blocks for each in answers), tuple(kept_by))


_PREFIXES: Final = (LookupResult, PrefetchResult, PinResult)
_JOINS: Final[Mapping[object, Callable[[list[Any]], Any]]] = {
    LookupResult: _prefix_found,
    NDArray[np.bool_]: np.concatenate,
    NDArray[np.int8]: np.concatenate,
    PrefetchResult: _prefix_brought,
    PinResult: lambda answers: PinResult(sum(each.num_blocks for each in answers)),
    RemovalResult: _removed,
    list[Explanation]: lambda answers: [each for answer in answers for each in answer],
    type(None): lambda _: None,
}
"""How answers about parts of the keys become one, for each type that a call with keys may answer with.

Of a prefix all but the last were about the whole of theirs.
"""


@dataclass(eq=False)
class Remote:
    """One call of the face, as it passes between a client and its server.

    Attributes:
        call: A method of `BlockCache`.
        away: What it comes to while no server is there, of its arguments; None: it raises, as it may not be done.
        anywhere: Whether any thread may call it.
        timeout_s: What a coroutine waits for an answer; None: as long as a client waits for any.
        changes: Whether it changes what is stored: a client that only reads may not call it.
        is_of_all: Whether it is about the blocks of every engine that shares the model, not of this client alone.
        is_counted: Whether it is answered only once all is counted of which the client knows that it has ended.
        knows_past: Whether the answer depends on the weights that the client served before.
        most_keys: That one message may be about, of few ranks.
        name: Of the method.
        arguments: Their names, in the order in which they are said.
        passed: The types that they and the answer pass as.
        has_keys: Whether it is about blocks, and so about the weights that they are of.
        is_handle: Whether it returns a handle, by which the answer is awaited.
        is_awaited: Whether the answer is to be awaited.
        is_noted: Whether nothing is answered.
    """

    call: Callable[..., Any]
    _: KW_ONLY
    away: Callable[[Any], Any] | None = None
    anywhere: bool = False
    timeout_s: float | None = None
    changes: bool = False
    is_of_all: bool = False
    is_counted: bool = False
    knows_past: bool = False
    most_keys: int = MOST_KEYS

    def __post_init__(self) -> None:
        call = self.call
        self.name = call.__name__
        hints = typing.get_type_hints(call)
        answer = hints.pop("return")
        self.is_handle = typing.get_origin(answer) is Handle
        if self.is_handle:  # what awaiting it gives
            (answer,) = typing.get_args(answer)
        self.is_awaited = self.is_handle or inspect.iscoroutinefunction(call)
        self.is_noted = answer is type(None) and not self.is_awaited
        self._forms = {name: _form(hint) for name, hint in hints.items()}
        self.has_keys = BlockKeys in hints.values()
        self._arguments = _struct_of(call, self._forms)
        self.arguments: tuple[str, ...] = self._arguments.__struct_fields__
        self._decode = wire.decoder(self._arguments)
        self._answer = _form(answer)
        self.passed: tuple[Any, ...] = (*(form.passed for form in self._forms.values()), self._answer.passed)
        joined = answer if self.has_keys else type(None)
        if joined not in _JOINS:
            raise TypeError(f"{call.__name__}: _JOINS does not say how answers of {joined} about parts become one")
        self._join = _JOINS[joined]
        self._decode_answer = wire.decoder(self._answer.passed)

    def bind(self, *args: object, **kwargs: object) -> Any:  # noqa: ANN401 - made when the house was
        """Return the arguments by name, as attributes.

        Raises:
            TypeError: They are not the call's.
        """
        return self._arguments(*args, **kwargs)

    def said(self, given: Any, keys: Keys | None) -> bytes:  # noqa: ANN401 - of `bind`
        """Encode arguments, with the ``keys`` among them as they are said."""
        arguments = {name: form.say(getattr(given, name)) for name, form in self._forms.items()}
        if keys is not None:
            arguments["keys"] = keys
        return wire.encoded(self._arguments(**arguments))

    def most_of(self, num_ranks: int) -> int:
        """Return how many keys one message may be about whose client stands for so many ranks."""
        return max(1, self.most_keys * _RANKS // max(_RANKS, num_ranks))

    def heard(self, said: bytes, num_ranks: int) -> tuple[bytes, dict[str, Any]]:
        """Decode what a client of so many ranks has said: the weights that it is about, and the arguments.

        Raises:
            ConfigurationError: They are not what the face says.
        """
        try:
            given = self._decode(said)
        except wire.WireError as error:
            raise ConfigurationError(f"{self.name}(): {error}") from None
        epoch: bytes = given.keys.epoch if self.has_keys else b""
        arguments = {name: form.hear(getattr(given, name)) for name, form in self._forms.items()}
        if self.has_keys and len(arguments["keys"]) > (most := self.most_of(num_ranks)):
            raise ConfigurationError(f"{self.name}() of {len(arguments['keys'])} keys, {most} at most")
        return epoch, arguments

    def parts(self, given: Any, num_ranks: int) -> list[Any]:  # noqa: ANN401 - of `bind`
        """Cut what `bind` made into what one message each may be about."""
        num_keys, most = len(given.keys) if self.has_keys else 0, self.most_of(num_ranks)
        if getattr(given, "where", False):  # the answer has a path or a name of each
            most = min(most, MOST_KEYS)
        if num_keys <= most:
            return [given]
        by_key = [name for name in ("keys", "found") if hasattr(given, name)]
        return [
            msgspec.structs.replace(given, **{name: getattr(given, name)[start : start + most] for name in by_key})
            for start in range(0, num_keys, most)
        ]

    def ends_with(self, answer: object, part: Any) -> bool:  # noqa: ANN401 - of `parts`
        """Say whether nothing more is to be asked: of a prefix that ends in this part."""
        return isinstance(answer, _PREFIXES) and answer.num_blocks < len(part.keys)

    def joined(self, answers: list[Any]) -> Any:  # noqa: ANN401 - of the call's type, as below
        """Make one answer of the answers to the parts of a call."""
        return answers[0] if len(answers) == 1 else self._join(answers)

    def answered(self, id_: int, value: object) -> Answered:
        """Say what the call has come to."""
        return Answered(id_, wire.encoded(self._answer.say(value)))

    def answer_in(self, answered: Answered) -> Any:  # noqa: ANN401
        """Return what the call has come to.

        Raises:
            WireError: It is none of the answers to this call.
        """
        passed = self._decode_answer(answered.value)
        try:
            return self._answer.hear(passed)
        except (TypeError, ValueError) as error:
            raise wire.WireError(f"an answer that cannot be: {error}") from error


def _struct_of(call: Callable[..., Any], forms: Mapping[str, _Form]) -> Any:  # noqa: ANN401 - a class of its own
    """Return a class with the arguments of a call for fields; those by name alone come after those by position."""
    made: Any = wire.Field
    for is_by_name in (False, True):
        parameters = [
            each
            for each in list(inspect.signature(call).parameters.values())[1:]
            if (each.kind is inspect.Parameter.KEYWORD_ONLY) == is_by_name
        ]
        fields: list[Any] = [
            (each.name, forms[each.name].passed, *([] if each.default is each.empty else [each.default]))
            for each in parameters
        ]
        made = msgspec.defstruct(
            call.__name__, fields, bases=(made,), kw_only=is_by_name, frozen=True, array_like=True,
            forbid_unknown_fields=True,
        )  # fmt: skip
    return made


_CHECKS: Final[Mapping[str, Callable[[Any], object]]] = {"ttl_s": check_ttl, "hint": check_hint}
"""By the name of an argument."""


# What makes a client's methods of those of the face.


def _asked(call: F, **how: Any) -> F:  # noqa: ANN401 - as `Remote` has them
    """Make a method of a client that asks the server, about so many keys at a time.

    A coroutine awaits each answer, and so does what returns a handle, in a task of the client's. What returns at once
    blocks its thread, a second at most; what answers nothing is told to a server that is there.
    """
    remote = Remote(call, **how)

    async def asked(kv: "AskedCalls", /, *args: object, **kwargs: object) -> object:
        return await kv._ask(remote, remote.bind(*args, **kwargs))  # noqa: SLF001 - ours

    def called(kv: "AskedCalls", /, *args: object, **kwargs: object) -> object:
        way = kv._start if remote.is_handle else kv._note if remote.is_noted else kv._ask_now  # noqa: SLF001 - ours
        return way(remote, remote.bind(*args, **kwargs))

    method = asked if inspect.iscoroutinefunction(call) else called
    update_wrapper(method, call)
    vars(method).update(remote=remote, __isabstractmethod__=False)
    return cast("F", method)


def _nothing_found(given: Any) -> LookupResult:  # noqa: ANN401 - of `Remote.bind`
    return LookupResult(0, (), 0, given.keys.block_size)


class AskedCalls(BlockCache):
    """The calls of a client that its server answers, a line each. What each promises `BlockCache` says.

    ``lookup_nowait``, ``membership``, ``pin`` and ``stats`` block their thread for the answer, at most for a second.
    What ``lookup`` says with ``where`` is as the server sees it: slots and paths are the server's. Pins end with this
    process too, and ``unpin`` is for its own. ``evict``, ``clear`` and ``flush`` are about the blocks of all engines
    that share them, and raise `BackendUnavailableError` if the server has not answered: it may not have been done.
    ``explain`` knows one state more, ``"server away"``. ``stats`` is of the model's cache in the server, and
    ``count_lookup`` counts in its metrics.

    Without ``away`` a call raises while no server is there.
    """

    lookup = _asked(BlockCache.lookup, most_keys=_MOST_LOOKED_UP, away=_nothing_found)
    lookup_nowait = _asked(BlockCache.lookup_nowait, most_keys=_MOST_LOOKED_UP, away=_nothing_found, anywhere=True)
    presence = _asked(
        BlockCache.presence, most_keys=_MOST_LOOKED_UP, away=lambda given: np.zeros(len(given.keys), np.bool_)
    )
    membership = _asked(
        BlockCache.membership, away=lambda given: np.full(len(given.keys), BlockState.MISS, np.int8), anywhere=True
    )
    count_lookup = _asked(BlockCache.count_lookup, anywhere=True, most_keys=_MOST_LOOKED_UP)
    prefetch = _asked(
        BlockCache.prefetch,
        away=lambda given: PrefetchResult(0, 0, (TierFault("host", Reason.SERVER_AWAY, len(given.keys)),)),
        timeout_s=math.inf,
    )
    touch = _asked(BlockCache.touch)
    resident = _asked(BlockCache.resident)
    leaving = _asked(BlockCache.leaving)
    pin = _asked(BlockCache.pin, away=lambda _: PinResult(0), is_counted=True)
    unpin = _asked(BlockCache.unpin)
    evict = _asked(BlockCache.evict, timeout_s=LONG_S, changes=True)
    clear = _asked(BlockCache.clear, timeout_s=LONG_S, changes=True, is_of_all=True)
    flush = _asked(BlockCache.flush, timeout_s=LONG_S, is_of_all=True)
    explain = _asked(
        BlockCache.explain,
        most_keys=1024,
        away=lambda given: [Explanation("server away")] * len(given.keys),
        timeout_s=LONG_S,
        knows_past=True,
    )
    stats = _asked(BlockCache.stats, away=lambda _: _NO_STATISTICS, is_counted=True)

    def __init__(self, connection: Connection, starts: Starts) -> None:
        """Ask by way of ``connection``, about blocks of the weights of ``starts``."""
        self._connection = connection
        self._starts = starts

    async def _ask(self, remote: Remote, given: Any, timeout_s: float | None = None) -> Any:  # noqa: ANN401 - of `Remote.bind`
        """Ask the server, part by part if that is about many keys, and wait so long for what each comes to.

        It hears first of what was submitted and planned before, in this thread too.
        """
        self._connection.here().loop_calls.catch_up()
        limit_s, answers = remote.timeout_s if timeout_s is None else timeout_s, list[Any]()
        for part in self._parts(remote, given):
            answer = await self._connection.ask(self._message(remote, part), limit_s)
            answers.append(self._answer_in(answer, remote, part))
            if remote.ends_with(answers[-1], part):
                break
        return remote.joined(answers)

    def _ask_now(self, remote: Remote, given: Any) -> Any:  # noqa: ANN401 - of `Remote.bind`
        """`_ask`, which blocks its thread, a second at most."""
        answers, since = list[Any](), time.monotonic()
        for part in self._parts(remote, given):
            answer = self._connection.ask_now(self._message(remote, part), since, anywhere=remote.anywhere)
            answers.append(self._answer_in(answer, remote, part))
            if remote.ends_with(answers[-1], part):
                break
        return remote.joined(answers)

    def _start(self, remote: Remote, given: Any) -> PrefetchHandle:  # noqa: ANN401 - of `Remote.bind`
        """`_ask` in a task of this client's, for as long as the server is there."""
        self._parts(remote, given)  # which checks it

        async def ask() -> Any:  # noqa: ANN401 - of the call's type
            try:
                return await self._ask(remote, given)
            except asyncio.CancelledError:
                return PrefetchResult(0, 0)
            except ClosedError:  # before its first step, or between two parts: as what closing cuts off on its way
                return self._answer_in(None, remote, given)

        def cancel() -> None:
            task.get_loop().call_soon(task.cancel)  # behind its first step: before that there is nobody yet to answer

        task = self._connection.here().tasks.spawn(ask(), f"{remote.name} {len(given.keys)} blocks")
        return Handle(task, cancel)

    def _note(self, remote: Remote, given: Any) -> None:  # noqa: ANN401 - of `Remote.bind`
        """Tell the server, which answers nothing; while it is away nothing is told."""
        for part in self._parts(remote, given):
            self._connection.note(self._message(remote, part)(0))

    def _parts(self, remote: Remote, given: Any) -> list[Any]:  # noqa: ANN401 - of `Remote.bind`
        """Check arguments, and cut them into what one message each of this client may be about.

        Raises:
            ConfigurationError, LayoutMismatchError: They cannot be right, which needs no server to say so.
            ClosedError: The client is not open.
        """
        here = self._connection.here(anywhere=remote.anywhere)
        if remote.has_keys:
            here.check(given.keys)
        for name, check in _CHECKS.items():
            if hasattr(given, name):
                check(getattr(given, name))
        if hasattr(given, "found"):
            check_found(given.keys, given.found)
        if getattr(given, "where", False):
            check_one_rank(here.shards)
        if (tier := getattr(given, "tier", None)) is not None:
            names = [each.name for each in here.attached.tiers]  # of the last server, also while none is there
            if tier not in names:
                raise ConfigurationError(f"no tier {tier!r:.80} here; there are {', '.join(names)}")
        return remote.parts(given, len(here.shards))

    def _message(self, remote: Remote, part: Any) -> Callable[[int], Call]:  # noqa: ANN401 - of `_parts`
        """Return what makes the message with some arguments, of its number."""
        keys = Keys.of(part.keys, self._starts.epoch) if remote.has_keys else None
        said, before = remote.said(part, keys), tuple(self._starts.past_epochs) if remote.knows_past else ()
        return lambda id_: Call(id_, remote.name, said, before)

    def _answer_in(self, answer: Answer | None, remote: Remote, given: Any) -> Any:  # noqa: ANN401 - of `Remote.bind`
        """Return what a call has come to, or what it comes to while no server is there.

        Raises:
            BackendUnavailableError: There is no answer, and nothing else to say.
        """
        if isinstance(answer, Answered):
            try:
                return remote.answer_in(answer)
            except wire.WireError as error:
                log("error", "host.server_broken", error=str(error))
        if remote.away is None:
            raise BackendUnavailableError(f"the server at {self._connection.path} has not answered")
        return remote.away(given)


CALLS: Final[Mapping[str, Remote]] = {
    name: method.remote for name, method in vars(AskedCalls).items() if hasattr(method, "remote")
}
"""What a client may call, by name."""
