"""What all commands share: options, and how answers and errors are shown.

Answers go to stdout, as tables or with ``--json`` as one line of JSON; all else to stderr.
"""

import json
import math
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from tiered_kv.settings.setting_errors import read_size
from tiered_kv.values.errors import ConfigurationError, TieredKVError

if TYPE_CHECKING:
    from tiered_kv.settings.settings import TieredKVSettings

_WIDTH: Final = 160
"""Of tables that go to a file or another program."""
_MOST_BYTES: Final = 1 << 62
"""Of a size: far more than there is, and a float can hold what is computed of it."""

AsJSON = Annotated[bool, typer.Option("--json", help="Answer with one line of JSON.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", help="A TOML file, or an engine's of JSON; else $TIERED_KV_CONFIG and TIERED_KV_* are read."
    ),
]
_OF_VLLM: Final = "kv_connector_extra_config"
_OF_SGLANG: Final = "tiered_kv"
_BELOW_VLLMS: Final = "TieredKVTier"
"""A tier below vLLM's own CPU tier."""
_OF_A_CACHE: Final = ("tiers", "limits", "codec")
"""What vLLM's connector takes there for its cache; the rest is the connector's own."""
_OF_AN_ADAPTER: Final = ("connect", "tokens_per_state", "weights")
"""What SGLang's takes there for itself; the rest is its cache's."""
_FIRST_RANK: Final = {_OF_VLLM: ("{dp_rank}", "0"), _OF_SGLANG: ("{rank}", "0-0-0-0")}
"""What stands in for a rank there, and what it is in the first process."""

out = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
err = Console(stderr=True)


def settings_of(config: Path | None) -> "TieredKVSettings":
    """Read the settings of a file, or of the environment."""
    from tiered_kv.settings.settings import TieredKVSettings  # noqa: PLC0415 - brings torch, which who only asks does without

    if config is None:
        return TieredKVSettings()
    if not is_json(config):
        return TieredKVSettings.from_toml(config)
    return TieredKVSettings.of(said_in(config, tells=True))


def is_json(config: Path) -> bool:
    """Say whether it is what an engine is given: that goes before the environment, and TOML after it."""
    return config.suffix == ".json"


def said_in(config: Path, *, tells: bool = False) -> dict[str, Any]:
    """Return what a file says of a cache's settings; ``tells`` what of it is left out.

    Raises:
        ConfigurationError: It is nothing that an engine's adapter reads, or is of a cache that a host's server keeps.
        OSError: It cannot be read.
    """
    text = config.read_text(encoding="utf-8")
    if not is_json(config):
        return tomllib.loads(text)
    try:
        said = json.loads(text)
        engine = _OF_VLLM if _OF_VLLM in said else _OF_SGLANG
        extra = json.loads(text.replace(*_FIRST_RANK[engine]))[engine] or {}
        ours = [each for each in extra.get("secondary_tiers") or () if each["type"] == _BELOW_VLLMS]
        extra = {**(ours[0] if ours else extra)}
        others = sorted({*extra} - {*_OF_A_CACHE} if engine == _OF_VLLM else {*extra} & {*_OF_AN_ADAPTER})
        found = {name: value for name, value in extra.items() if name not in others}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ConfigurationError(
            f"{config}: JSON is read as an engine's adapter has it: "
            f'{{"{_OF_VLLM}": {{"tiers": [...]}}}} of vLLM, or {{"{_OF_SGLANG}": {{"tiers": [...]}}}} of SGLang'
        ) from None
    if "connect" in others:
        raise ConfigurationError(f"{config} has an engine connect to a host's server: ask with the file `serve` has")
    if others and tells:
        tell(f"{config}: {', '.join(others)}: for the adapter alone to read")
    return found


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Say what went wrong in one line, and exit 2."""
    try:
        yield
    except TieredKVError as error:
        fail(" ".join([str(error), *getattr(error, "__notes__", ())]))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def refuse_if(*contradictions: tuple[bool, str]) -> None:
    """Refuse options of which one would be ignored.

    Raises:
        ConfigurationError: One of them is so; with what is said of it.
    """
    for is_so, why in contradictions:
        if is_so:
            raise ConfigurationError(why)


def size_of(option: str, text: str) -> int:
    """Read a size in bytes.

    Raises:
        ConfigurationError: It is none.
    """
    try:
        size = read_size(text)
    except ValueError:  # pydantic's are some
        size = 0
    if not 1 <= size <= _MOST_BYTES:
        raise ConfigurationError(f"{option} must be a size in bytes, such as 128KiB, got {text!r:.80}")
    return size


def read_whole(path: str) -> bytes:
    """Return what a file holds, or stdin for ``-``."""
    return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()


def fail(what: str) -> NoReturn:
    """Say in one line what is wrong, and exit 2."""
    first, *others = what.splitlines() or [""]  # as of settings, a line for each that is wrong
    line = " ".join([first, "; ".join(each.strip() for each in others)]).rstrip()
    sys.stderr.write(f"tiered-kv: {line}\n")
    raise typer.Exit(2)


def say(line: str) -> None:
    """Answer with a line, however long; what is in it is no markup."""
    out.print(line, highlight=False, markup=False, soft_wrap=True)


def tell(line: str) -> None:
    """Say a line beside the answer."""
    err.print(line, highlight=False, markup=False, soft_wrap=True)


def print_json(value: object) -> None:
    """Answer with one line of JSON; what it has no number for, infinity and NaN, is null."""
    sys.stdout.write(json.dumps(_finite(value), allow_nan=False) + "\n")


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Answer with a table; its cells may have markup."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    with out.capture() as text:
        out.print(table, highlight=False)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in text.get().splitlines()))
