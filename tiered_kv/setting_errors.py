"""What is wrong with settings, and where, in lines that hold no secret: pydantic's own errors show what was given."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from tiered_kv.errors import ConfigurationError

Where = tuple[int | str, ...]
"""A place in settings: names of fields and positions in lists."""

_NUMBERS = {f"{kind}_{failed}" for kind in ("int", "float", "bool") for failed in ("type", "parsing")}
_BOUNDS = {"finite_number", "greater_than", "greater_than_equal", "less_than", "less_than_equal"}
_SHOWN = {"literal_error", *_NUMBERS, *_BOUNDS}
"""Errors of fields that are numbers or choices and so no secrets: what was given may be shown."""


class LocatedError(ConfigurationError):
    """What is wrong, and where: what the validation of one tier tells that of the whole."""

    def __init__(self, problems: list[tuple[Where, str]]) -> None:
        super().__init__("; ".join(line(where, what) for where, what in problems))
        self.problems = problems

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.problems,)


class Checked(BaseModel):
    """Base of settings: immutable, with no unknown fields.

    Raises:
        ConfigurationError: A field is unknown, wrong, missing or assigned to. No value that may be secret is shown.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    def __init__(self, **values: Any) -> None:  # noqa: ANN401 - the fields' types are for pydantic to check
        try:
            super().__init__(**values)
        except ValidationError as error:
            found = problems(error, type(self))
        else:
            return
        raise LocatedError(found)  # outside of `except`: pydantic's error holds what was given, secrets included

    @classmethod
    def model_validate(cls, obj: Any, **how: Any) -> Self:  # noqa: ANN401 - as pydantic has it
        """Validate as pydantic does, with errors as those of construction."""
        if isinstance(obj, Mapping) and not all(isinstance(name, str) for name in obj):
            raise LocatedError([((), "the names of settings are strings")])
        try:
            return super().model_validate(obj, **how)
        except ValidationError as error:
            found = problems(error, cls)
        raise LocatedError(found)

    def __setattr__(self, name: str, value: object) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError:
            pass
        else:
            return
        raise LocatedError([((name,), "settings are frozen: make others")])


def problems(error: ValidationError, model: type[BaseModel]) -> list[tuple[Where, str]]:
    """Say where and what, with what to write instead, for each of pydantic's errors."""
    found: list[tuple[Where, str]] = []
    for each in error.errors(include_url=False):
        cause = each.get("ctx", {}).get("error")
        if isinstance(cause, LocatedError):
            found += [((*each["loc"], *inner), text) for inner, text in cause.problems]
        else:
            found.append((each["loc"], _what(each, model)))
    return found


def _what(error: ErrorDetails, model: type[BaseModel]) -> str:
    kind, what, where, context = error["type"], error["msg"], error["loc"], error.get("ctx", {})
    given = f"{error['input']!r:.80}"
    match kind:
        case "value_error":
            what = str(context["error"])
        case "extra_forbidden":
            what = f"there is no such setting{hint(str(where[-1]), _fields_at(model, where[:-1]))}"
        case "missing":
            what = "must be given"
        case "tuple_type":
            what = "must be a list, e.g. ['cpu://?capacity=32GiB']"
        case "byte_size" | "byte_size_unit" if not given.strip("' ").startswith("-"):
            what = f"{given} is no size: write bytes as an int, or e.g. '32GiB'"
        case "byte_size" | "byte_size_unit" | "greater_than" if context.get("gt", 0) == 0:
            what = f"must be positive, got {given}"
        case _ if kind in _SHOWN:
            what = f"{what}, got {given}"
    return what


def hint(word: str, known: Iterable[str]) -> str:
    """Say what may have been meant and what there is, to end a message with."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    meant = f": did you mean {close[0]!r}?" if close else ":"
    return f"{meant} known are {', '.join(names)}"


def line(where: Where, what: str) -> str:
    """Write both in one line, the place as one would in Python: ``tiers[0].capacity: ...``."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).lstrip(".")
    return f"{path}: {what}" if path else what


def _fields_at(model: type[BaseModel], where: Where) -> list[str]:
    for part in where:
        field = model.model_fields.get(str(part))
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        model = field.annotation
    return list(model.model_fields)
