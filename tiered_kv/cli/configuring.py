"""Settings for people: what is in force and where it comes from, and all there are."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.markup import escape

from tiered_kv.cli.common import (
    AsJSON,
    ConfigFile,
    is_json,
    one_line_errors,
    print_json,
    print_table,
    refuse_if,
    said_in,
    settings_of,
)
from tiered_kv.settings.chain_settings import model_of
from tiered_kv.settings.registry import known_media
from tiered_kv.settings.settings import CONFIG, PREFIX, TieredKVSettings, tables_of
from tiered_kv.settings.tier_settings import TierSettings
from tiered_kv.values.errors import ConfigurationError

_TABLES: Final = tables_of(TieredKVSettings.model_fields)


@dataclass(frozen=True)
class Key:
    """One setting.

    Attributes:
        key: As in a TOML file.
        value: In force, or the default.
        source: Where it comes from, or can be set.
    """

    key: str
    value: str
    source: str


def config_command(
    config: ConfigFile = None,
    *,
    keys: Annotated[bool, typer.Option(help="All keys there are, of every medium.")] = False,
    schema: Annotated[bool, typer.Option(help="The JSON schema of the settings, and of each medium's.")] = False,
    as_json: AsJSON = False,
) -> None:
    """Show the settings that are in force, and where each comes from; no secrets."""
    with one_line_errors():
        refuse_if((keys and schema, "--keys and --schema are two questions: leave one out"))
        if schema:
            print_json(settings_schema())
            return
        found = all_keys() if keys else in_force(settings_of(config), config)
    if as_json:
        print_json([asdict(each) for each in found])
        return
    columns = ("key", "default", "environment") if keys else ("key", "value", "from")
    print_table(columns, [tuple(map(escape, (each.key, each.value, each.source))) for each in found])


def in_force(settings: TieredKVSettings, path: Path | None) -> list[Key]:
    """Return every setting, and where it comes from: a variable, the file, or the default. Secrets are stars."""
    values = settings.model_dump(mode="json")
    path = path or (Path(given) if (given := os.environ.get(CONFIG)) else None)
    file = said_in(path) if path is not None else {}
    tables = {name: values.pop(name) for name in _TABLES}
    del values["tiers"]
    found = [Key(f"tiers[{n}]", _said(tier), _source("tiers", file, path)) for n, tier in enumerate(settings.tiers)]
    found += [Key(name, json.dumps(value), _source(name, file, path)) for name, value in values.items()]
    return found + [
        Key(f"{table}.{name}", json.dumps(value), _source(table, file, path, name))
        for table, fields in tables.items()
        for name, value in fields.items()
    ]


def all_keys() -> list[Key]:
    """Return every key there is with its default, and the variable that sets it."""
    found = [
        Key(name, _default(field), f"{PREFIX}{name.upper()}")
        for name, field in TieredKVSettings.model_fields.items()
        if name not in _TABLES
    ]
    found += [
        Key(f"{table}.{name}", _default(field), f"{PREFIX}{table.upper()}__{name.upper()}")
        for table, model in _TABLES.items()
        for name, field in model.model_fields.items()
    ]
    for medium, model in _models().items():
        found += [
            Key(f"{medium}: {name}", _default(field), f"{PREFIX}TIERS (JSON)")
            for name, field in model.model_fields.items()
            if name != "medium"
        ]
    return found


def settings_schema() -> dict[str, Any]:
    """Return the JSON schema of the settings, and of each medium's tiers."""
    media = {medium: model.model_json_schema() for medium, model in _models().items()}
    return {"settings": TieredKVSettings.model_json_schema(), "tiers": media}


def _models() -> dict[str, type[BaseModel]]:
    """Return the settings of each medium whose extra is installed."""
    found: dict[str, type[BaseModel]] = {}
    for medium in known_media():
        with suppress(ConfigurationError):
            found[medium] = model_of(medium)
    return found


def _source(name: str, file: Mapping[str, Any], path: Path | None, key: str = "") -> str:
    """Return where a field, or a key of a table, comes from."""
    whole = f"{PREFIX}{name}".upper()
    in_file = key in file.get(name, {}) if key else name in file
    if in_file and path is not None and is_json(path):
        return str(path)
    for variable in [f"{whole}__{key}".upper(), whole] if key else [whole]:
        is_set = next((each for each in os.environ if each.upper() == variable), "")
        if is_set and (variable != whole or not key or key in (json.loads(os.environ[is_set]) or ())):
            return is_set
    return str(path) if in_file else "default"


def _said(tier: TierSettings) -> str:
    """Return what is not as it is by default."""
    return json.dumps({"medium": tier.medium} | tier.model_dump(mode="json", exclude_defaults=True))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, tuple) and all(isinstance(each, BaseModel) for each in default):
        return json.dumps([f"{each.medium}://" for each in default])
    return json.dumps(default, default=str)
