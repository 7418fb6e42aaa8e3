"""What is wrong with settings, and where, in lines that hold no secret: pydantic's own errors show what was given."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, get_args

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tiered_kv.values.errors import ConfigurationError

Where = tuple[int | str, ...]
"""A place in settings: names of fields and positions in lists."""

_LEAST_PART, _MOST_MEANT = 4, 4
"""Letters that are taken for a part of a name, and names that are suggested for it."""
_NUMBERS = {f"{kind}_{failed}" for kind in ("int", "float", "bool") for failed in ("type", "parsing")}
_BOUNDS = {"finite_number", "greater_than", "greater_than_equal", "less_than", "less_than_equal"}
_SHOWN = {"literal_error", *_NUMBERS, *_BOUNDS}
"""Errors of fields that are numbers or choices and so no secrets: what was given may be shown."""
_SAID = {
    "dict_type": "must be a table, in Python a dict",
    "model_type": "must be a table, in Python a dict, of settings",
    "path_type": "must be a path, in quotes",
    "too_long": "there may be {max_length} at most",
}
"""What is said of errors instead of pydantic's words, where nothing else is to be known."""

_BYTES = TypeAdapter(ByteSize)
_SIZE = re.compile(r"\d[\d_]*|(\d+\.?\d*|\.\d+)\s*[a-z]+", re.IGNORECASE)
"""What pydantic's ByteSize reads whole: it takes ``10%`` for ten bytes, and ``1.5`` for one."""
_BITS = re.compile(r".*([a-z]*bits?|[KMGTPE]i?b)")
"""It takes ``1Gbit`` for an eighth of a gigabyte, and ``8Gb`` for all of eight."""


def located(problems: Iterable[tuple[Where, str]]) -> ConfigurationError:
    """Make the error that says what is wrong, and where: as the validation of one tier tells that of the whole."""
    problems = tuple(problems)
    error = ConfigurationError("; ".join(line(where, what) for where, what in problems))
    error.problems = problems
    return error


def problems_of(error: ConfigurationError) -> tuple[tuple[Where, str], ...]:
    """Return where, below the place that an error is of, and what."""
    return error.problems or (((), str(error)),)


class InWords(BaseModel):
    """Base of settings whose errors hold no secret: pydantic's own show what was given, or assigned."""

    @classmethod
    def model_validate(cls, obj: Any, **how: Any) -> Self:  # noqa: ANN401 - as pydantic has it
        """Validate as pydantic does, with errors as those of construction."""
        try:
            return super().model_validate(obj, **how)
        except ValidationError as error:
            found = problems(error, cls)
        raise located(found)

    @model_validator(mode="wrap")  # around construction, of whose arguments each has a name
    @classmethod
    def _check_names(cls, given: object, validate: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(given, Mapping) and not all(isinstance(name, str) for name in given):
            raise ValueError("the names of settings are strings")
        return validate(given)

    def __setattr__(self, name: str, value: object) -> None:
        _change(name, partial(super().__setattr__, name, value))

    def __delattr__(self, name: str) -> None:
        _change(name, partial(super().__delattr__, name))


def _change(name: str, change: Callable[[], None]) -> None:
    try:
        change()
    except ValidationError:
        pass
    else:
        return
    raise located([((name,), "settings are frozen: make others")])


class Checked(InWords):
    """Base of settings: immutable, with no unknown fields.

    Raises:
        ConfigurationError: A field is unknown, wrong, missing or assigned to. No value that may be secret is shown.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @field_validator("*", mode="wrap")
    @classmethod
    def _check_size_or_path(cls, given: object, validate: ValidatorFunctionWrapHandler) -> object:
        """Refuse sizes and paths that would be read as something else; ``~`` is the home directory."""
        value = validate(given)
        if isinstance(value, ByteSize):
            check_size(given)
        if isinstance(value, tuple) and isinstance(given, list | tuple):
            several = zip(given, value, strict=True)
            return tuple(_as_path(one, each) if isinstance(each, Path) else each for one, each in several)
        return _as_path(given, value) if isinstance(value, Path) else value

    def __init__(self, **values: Any) -> None:  # noqa: ANN401 - the fields' types are for pydantic to check
        try:
            super().__init__(**values)
        except ValidationError as error:
            found = problems(error, type(self))
        else:
            return
        raise located(found)  # outside of `except`: pydantic's error holds what was given, secrets included


def check_size(given: object) -> None:
    """Raise `ValueError` for what pydantic's ByteSize takes for a size in bytes, and is none."""
    if isinstance(given, str) and _BITS.fullmatch(given.strip()):
        raise ValueError(f"{given!r:.80} is in bits: write bytes, e.g. '32GiB'")
    if isinstance(given, bool) or (isinstance(given, str) and not _SIZE.fullmatch(given.strip())):
        raise ValueError(f"{given!r:.80} is no size: write bytes as an int, or e.g. '32GiB'")


def read_size(given: object) -> int:
    """Read a size in bytes, as a field of settings does; raise `ValueError` for what is none."""
    check_size(given)
    return int(_BYTES.validate_python(given))


def size_in_words(num_bytes: float) -> str:
    """Return a number of bytes as people write it: ``1.5 GiB``."""
    return ByteSize(round(num_bytes)).human_readable(separator=" ")


def _as_path(given: object, path: Path) -> Path:
    if given in ("", b""):
        raise ValueError("must not be empty: write '.' for the current directory")
    if "://" in str(given):
        raise ValueError("is a URL: write the path alone, or the whole tier as a URL")
    if any(part.startswith("$") for part in path.parts):
        raise ValueError("variables of the environment are not filled in: write the path itself; '~' is your home")
    if "\0" in str(path):
        raise ValueError(f"no file's name has a NUL in it, got {str(path)!a:.80}")
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(f"is no UTF-8, got {str(path)!a:.80}: use another directory, or a link to it") from None
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError("begins with '~', and whose home that is cannot be told: write the whole path") from None


def problems(error: ValidationError, model: type[BaseModel]) -> list[tuple[Where, str]]:
    """Say where and what, with what to write instead, for each of pydantic's errors."""
    found: list[tuple[Where, str]] = []
    for each in error.errors(include_url=False):
        is_unknown = each["type"] == "extra_forbidden"
        # Of unions pydantic tells each type that it has tried, ``tuple[...]``, as if that were a place.
        where = tuple(part for part in each["loc"] if is_unknown or "[" not in str(part))
        cause = each.get("ctx", {}).get("error")
        if isinstance(cause, ConfigurationError):
            found += [((*where, *inner), text) for inner, text in problems_of(cause)]
        elif where not in dict(found):
            found.append((where, _what(each, model)))
    return found


def _what(error: ErrorDetails, model: type[BaseModel]) -> str:
    kind, where, context = error["type"], error["loc"], error.get("ctx", {})
    what = _SAID[kind].format(**context) if kind in _SAID else error["msg"]
    given = f"{error['input']!r:.80}"
    match kind:
        case "value_error":
            what = str(context["error"])
        case "extra_forbidden":
            word, known = str(where[-1]), _fields_at(model, where[:-1])
            deeper = [f"{name}.{word}" for name in known if word in _fields_at(model, (*where[:-1], name))]
            meant = f": did you mean {deeper[0]!r}?" if deeper else hint(word, known)
            what = f"there is no such setting{meant}"
        case "missing":
            what = f"must be given{_example(model, where)}"
        case "tuple_type":
            table = "; in TOML each tier is a [[tiers]]" if isinstance(error["input"], dict) else ""
            what = "must be a list" + (f", e.g. ['cpu://?capacity=32GiB']{table}" if where == ("tiers",) else "")
        case "string_type":
            is_class = isinstance(error["input"], type)
            what = "must be text" + (": of a class write 'package.module:Class'" if is_class else ", in quotes")
        case "byte_size" | "byte_size_unit" if not given.strip("' ").startswith("-"):
            what = f"{given} is no size: write bytes as an int, or e.g. '32GiB'"
        case "byte_size" | "byte_size_unit" | "greater_than" if context.get("gt", 0) == 0:
            what = f"must be positive, got {given}"
        case _ if kind in _SHOWN:
            what = f"{what}, got {given}"
    return what


def hint(word: str, known: Iterable[str], others: Mapping[str, str] = MappingProxyType({})) -> str:
    """Say what may have been meant and what there is, to end a message with.

    Args:
        word: What was written.
        known: What may be.
        others: What else people call some of it, in small letters.
    """
    names = sorted(known)
    small = {name.lower(): name for name in names}
    word = others.get(word.lower(), word.lower())
    longer = [name for name in small if word in name] if len(word) >= _LEAST_PART and word not in small else []
    close = longer[:_MOST_MEANT] or difflib.get_close_matches(word, small, n=1)
    meant = f": did you mean {' or '.join(repr(small[each]) for each in close)}?" if close else ":"
    return f"{meant} known are {', '.join(names)}"


def line(where: Where, what: str, variable: str = "") -> str:
    """Write both in one line, the place as one would in Python: ``tiers[0].capacity: ...``.

    Args:
        where: The place.
        what: What is wrong there.
        variable: That of the environment that says it, if one does.
    """
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).lstrip(".")
    of = f" (of {variable})" if variable else ""
    return f"{path}{of}: {what}" if path else what


def _fields_at(model: type[BaseModel], where: Where) -> dict[str, FieldInfo]:
    for part in where:
        if isinstance(part, int):  # of a list: the model of its items was found with it
            continue
        field = model.model_fields.get(part)
        types = () if field is None else (field.annotation, *get_args(field.annotation))
        found = [each for each in types if isinstance(each, type) and issubclass(each, BaseModel)]
        if not found:
            return {}
        model = found[0]
    return model.model_fields


def _example(model: type[BaseModel], where: Where) -> str:
    field = _fields_at(model, where[:-1]).get(str(where[-1]))
    return f", e.g. {field.examples[0]!r}" if field is not None and field.examples else ""
