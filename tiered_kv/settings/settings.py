"""What a cache is made of, said in Python, in the environment or in a TOML file.

```python
TieredKVSettings(tiers=[CPUTier(capacity="32GiB"), {"medium": "nvme", "path": "/mnt/kv", "capacity": "1TiB"}])
TieredKVSettings(tiers=["cpu://?capacity=32GiB", "file:///mnt/kv?capacity=1TiB"])
```

In the environment: ``TIERED_KV_TIERS`` (a JSON list of the same), ``TIERED_KV_LIMITS__LOAD_TIMEOUT_S``, and so on; or
``TIERED_KV_CONFIG``, the path of a TOML file. Arguments go before the environment, the environment before the file.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Self, TypedDict, Unpack

from pydantic import (
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from tiered_kv.memory.codec import CodecName
from tiered_kv.settings.chain_settings import Bytes, CPUTier, Tier, check_chain, check_policies, tier_name
from tiered_kv.settings.page_address import checked_token, page_address
from tiered_kv.settings.setting_errors import Checked, InWords, Where, line, problems, size_in_words
from tiered_kv.settings.tier_settings import HostSettings, Size, TierSettings, default_size
from tiered_kv.values.errors import ConfigurationError

PREFIX = "TIERED_KV_"
CONFIG = "TIERED_KV_CONFIG"
_LIKE_OURS = re.compile("TIERED_*KV_*(.+)")
_OF_KUBERNETES = re.compile(r"\w+_(SERVICE_(HOST|PORT)(_\w+)?=|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?=|PORT=(tcp|udp|sctp)://)")
"""What every pod has of each service beside it, whatever that is called."""
_GIB, _MIB = 1024**3, 1024**2

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class CacheLimits(Checked):
    """What bounds a cache in time, memory and work, whatever its tiers are."""

    load_timeout_s: Seconds = 30.0
    """How long a load may take unless the call says otherwise; then it answers with the prefix that is in place. One
    that is planned is planned by then, with what is in host memory."""
    store_timeout_s: Seconds = 5.0
    """How long a store may keep its caller waiting for its blocks to be copied; what is not copied then is dropped."""
    window: Bytes = default_size(16 * _MIB)
    """Bytes moved as one piece: while one window is copied to the GPU, the next one is read. Long transfers go in
    windows of twice as much, but for their first and last. A block that is larger is a piece of its own, but
    a size that is set may not be less than a block."""
    bounce: Bytes = default_size(160 * _MIB)
    """Bytes of host memory for blocks that only pass through. Holds at least one window; with ten of them a tier may
    read four at a time."""
    store_queue: Bytes = default_size(_GIB)
    """Bytes of stores accepted but not yet written to every tier. Beyond it, new blocks stay in the first tier only,
    and are counted as dropped below it: a slow disk must not delay serving."""
    prefetch_quota: Bytes = default_size(256 * _MIB)
    """Bytes of prefetches in flight at once, so that a guess about the future does not crowd out loads."""
    pin_quota: Bytes = default_size(_GIB)
    """Bytes that each tenant (salt) may keep pinned, over all tiers. Of no tier more than half can be pinned."""
    promote: bool = True
    """Whether blocks loaded from a lower tier are kept in the tiers above it too."""
    swap_space: Size = default_size(0)
    """Bytes of host memory, per KV group, for pages that the engine swaps by numbers of its own: `TieredKV.swap`. Taken
    at the first swap."""
    open_timeout_s: Seconds = 60.0
    """How long opening one tier may take: the cache does not open without it. One that is not
    `StorageTierSettings.required` is waited for as long as for any call of it, and used once it is open, however late
    that is."""
    close_timeout_s: Seconds = 10.0
    """How long closing waits for what is still being written."""
    low_water: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Blocks that wait for tiers with ``write="back"`` are written once less than this part of the tier in which they
    wait is free or evictable."""
    clean_after_s: Seconds = 30.0
    """They are written after this time, whether their tier needs the room or not: what waits is lost if the process
    ends."""
    clean_bandwidth: Bytes | None = None
    """Bytes a second that such writing may take; as much as the tiers allow if left out. `flush` and closing pass it
    over."""
    reads_in_flight: Annotated[int, Field(ge=1)] = 2
    """Windows of one load that are read ahead of the copy to the GPU."""

    @model_validator(mode="after")
    def _check_bounce(self) -> Self:
        if self.bounce < self.window:
            bounce, window = map(size_in_words, (self.bounce, self.window))
            raise ValueError(f"bounce ({bounce}) must hold at least one window ({window})")
        return self


class _Arguments(TypedDict, total=False):
    tiers: Sequence[TierSettings | Mapping[str, Any] | str]
    limits: CacheLimits | Mapping[str, Any]
    codec: CodecName
    metrics: bool
    metrics_salts: Sequence[str]
    prefill_tokens_per_s: float
    page: bool | int | str
    page_hints_token: str | SecretStr
    record_trace: str
    host: HostSettings | Mapping[str, Any]


class TieredKVSettings(InWords, BaseSettings):
    """All settings of a cache. Immutable and picklable.

    Args:
        **arguments: the fields below; what is left out comes from the environment, the TOML file, the default.

    Raises:
        ConfigurationError: Something is unknown, wrong, missing or assigned to: one line each, saying where and what to
            write.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", frozen=True, extra="forbid", hide_input_in_errors=True
    )

    tiers: tuple[Tier, ...] = (CPUTier(),)
    """Fastest first: at most one ``gpu``, then at most one ``cpu``, then storage."""
    limits: CacheLimits = CacheLimits()
    codec: CodecName = "none"
    """How blocks are kept. ``"fp8"`` keeps bf16 and fp16 in half the bytes in every tier, not exactly: see
    [On a GPU](../explanation/gpu.md#what-is-exact) for the bound of its error. ``"exponent"`` keeps bf16 bit for bit in
    three quarters of the bytes, in storage: see [the guide](../how-to/configure.md#three-quarters-of-the-bytes)."""
    metrics: bool = False
    """Whether to tell Prometheus what happens, by prometheus_client (extra ``metrics``): see
    [Observe a cache](../how-to/observe.md)."""
    metrics_salts: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Tenants whose blocks are counted one by one, in the metrics' label ``salt``: none that is secret."""
    prefill_tokens_per_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """How fast the engine computes a prompt, for the metric ``prefill_saved_seconds``. 0: not known."""
    page: Annotated[str, BeforeValidator(page_address)] = ""
    """Where to serve [a page to look at](../how-to/observe.md#a-page-to-look-at) (extra ``page``): an address,
    ``"127.0.0.1:8420"``, a port of this host, ``"unix:/path/of.sock"``, or true for port 8420. Empty: nowhere."""
    page_hints_token: SecretStr = SecretStr("")
    """Who sends this to the page may send [hints](../how-to/control.md#hints-by-http) of what comes back, and of what
    does not. Empty: hints are not taken."""
    record_trace: str = ""
    """A file to record to which blocks are asked for, as salted hashes, for
    [plans of capacity](../how-to/plan-capacity.md); gzip if it ends in ``.gz``. Empty: none."""
    host: HostSettings = HostSettings()
    """How a server of one cache for a host listens: see [One cache for a host](../how-to/host.md)."""

    @field_validator("page_hints_token")
    @classmethod
    def _check_token(cls, token: SecretStr) -> SecretStr:
        checked_token(token.get_secret_value())
        return token

    @model_validator(mode="after")
    def _check_hints(self) -> Self:
        if self.page_hints_token.get_secret_value() and not self.page:
            raise ValueError("page_hints_token is for a page: set page too")
        return self

    def __init__(self, **arguments: Unpack[_Arguments]) -> None:
        path = _config_file.get() or os.environ.get(CONFIG)
        sources = [f"{PREFIX}* of the environment", *([f"the file {path}"] if path else [])]
        try:
            _check_environment(type(self).model_fields)
            said = {name: _as_said(value) for name, value in arguments.items()}
            super().__init__(**said)
        except ValidationError as error:
            lines = [line(where, what, _variable(where, said)) for where, what in problems(error, type(self))]
        except SettingsError as error:
            lines = [_no_json(error)]
        except RecursionError:
            lines = ["a variable holds JSON of too many levels"]
        else:
            return
        # `from None`: pydantic's error holds what was given, secrets included.
        raise ConfigurationError(
            "\n  ".join([f"settings (arguments, {', '.join(sources)}) cannot work:", *lines])
        ) from None

    @classmethod
    def of(cls, given: object = None) -> Self:
        """Return settings as they are, made of a dict of them, or, of None, read from the environment.

        Raises:
            ConfigurationError: It is none of these, or its settings cannot work.
        """
        if isinstance(given, cls):
            return given
        if given is None or (isinstance(given, Mapping) and all(isinstance(name, str) for name in given)):
            return cls(**dict(given or {}))
        advice = ""
        if isinstance(given, str | os.PathLike):
            advice = ": TieredKVSettings.from_toml(path) reads a file"
        elif isinstance(given, Mapping):
            advice = " with keys that are no strings"
        elif isinstance(given, list | tuple):
            advice = ": TieredKV(tiers, ...) takes a list of tiers"
        raise ConfigurationError(
            f"settings are TieredKVSettings, or a dict of them, not {type(given).__name__}{advice}"
        )

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Self:
        """Read a TOML file with ``[[tiers]]`` and ``[limits]``. The environment goes before it.

        Raises:
            ConfigurationError: The file cannot be read or is no TOML, or its settings cannot work; it is named.
        """
        token = _config_file.set(Path(path))
        try:
            return cls()
        finally:
            _config_file.reset(token)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 -- pydantic-settings passes these by name
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order the sources: arguments, environment, TOML file."""
        path = _config_file.get() or os.environ.get(CONFIG)
        if not path:
            return init_settings, env_settings
        return init_settings, env_settings, InitSettingsSource(settings_cls, _read_toml(Path(path)))

    @model_validator(mode="after")
    def _check_chain(self) -> Self:
        names = [tier_name(tier) for tier in self.tiers]
        check_chain([tier.medium for tier in self.tiers], names)
        check_policies(self.tiers, names)
        return self


_config_file: ContextVar[Path | None] = ContextVar("config_file", default=None)
"""The file of the `from_toml` call that is being made: pydantic-settings has no argument for it."""


def _as_said(value: Any) -> Any:  # noqa: ANN401 - as given
    """Return of a table only the keys that were given: the environment may have the others."""
    return value.model_dump(exclude_unset=True) if isinstance(value, Checked) else value


def _variable(where: Where, said: Mapping[str, Any]) -> str:
    """Return the variable of the environment that has this setting; empty if an argument has it, or none does."""
    names = [part for part in where[:2] if isinstance(part, str)]
    for deep in range(len(names), 0, -1):
        within, *key = names[:deep]
        argument = said.get(within)
        if within in said and not (key and isinstance(argument, Mapping) and key[0] not in argument):
            return ""
        if (variable := PREFIX + "__".join(names[:deep]).upper()) in map(str.upper, os.environ):
            return variable
    return ""


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(f"the settings file {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # of syntax, of encoding or of depth
        raise ConfigurationError(f"the settings file {path} is no TOML: {error}") from error


def _no_json(error: SettingsError) -> str:
    """Say which variable of the environment is not what its field takes, and show one."""
    named = re.search(r'field "(\w+)"', str(error))
    field = named[1] if named else "tiers"
    example = {"tiers": '["cpu://?capacity=32GiB"]', "metrics_salts": '["tenant-7"]'}.get(field, '{"name": value}')
    return f"{PREFIX}{field.upper()}: write JSON, e.g. {PREFIX}{field.upper()}='{example}'"


def tables_of(fields: Mapping[str, FieldInfo]) -> dict[str, type[Checked]]:
    """Return the fields that are tables in a file, ``[limits]``: in the environment each key is behind a ``__``."""
    kinds = ((name, field.annotation) for name, field in fields.items())
    return {name: kind for name, kind in kinds if isinstance(kind, type) and issubclass(kind, Checked)}


def _check_environment(fields: Mapping[str, FieldInfo]) -> None:
    """Refuse variables that look like ours and are not read."""
    tables = {table.upper() for table in tables_of(fields)}
    known = [field.upper() for field in fields] + [CONFIG.removeprefix(PREFIX)]
    for variable, value in os.environ.items():
        like_ours = _LIKE_OURS.fullmatch(variable.upper())
        if like_ours is None or _OF_KUBERNETES.match(f"{variable}={value}"):
            continue
        name = like_ours[1]
        head, *rest = name.split("__", maxsplit=1)
        if variable.upper() == PREFIX + name and (head in tables if rest else head in known):
            continue
        limit = re.sub(r"^LIMITS?_*", "", name)
        if limit.lower() in CacheLimits.model_fields:
            raise ConfigurationError(f"{variable} is not read: write {PREFIX}LIMITS__{limit}")
        if name.endswith("CAPACITY"):
            tiers = f"{PREFIX}TIERS='[\"cpu://?capacity=32GiB\"]'"
            raise ConfigurationError(f"{variable} is not read: tiers are given whole, e.g. {tiers}")
        whole = "_".join([head, *rest])
        if close := [whole] if whole in known else difflib.get_close_matches(head, known, n=1):
            meant = "__".join([close[0], *rest]) if close[0] in tables else close[0]
            raise ConfigurationError(f"{variable} is not read: write {PREFIX}{meant}")
