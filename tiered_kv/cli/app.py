"""The commands. What each does, and what it shows of the answer, is in the modules beside this one."""

from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperGroup

_MODULES: Final = {
    "serve": "hosting",
    "status": "watching",
    "top": "watching",
    "explain": "explaining",
    "doctor": "doctoring",
    "config": "configuration",
    "bench": "benching",
    "inspect": "shelving",
    "verify": "shelving",
    "delete": "shelving",
    "replay": "replaying",
    "plan": "planning",
    "simulate": "simulating",
}
"""Where each command is, as ``<name>_command``."""


class _Commands(TyperGroup):
    """Imports what a command needs when it is called: of `status`, which probes ask for every few seconds, no torch."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401 - of click, or of the copy of it that Typer has
        return list(_MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401 - as above
        if cmd_name not in _MODULES:
            return None
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        module = import_module(f"tiered_kv.cli.{_MODULES[cmd_name]}")
        alone.command(cmd_name)(getattr(module, f"{cmd_name}_command"))
        return typer.main.get_command(alone)


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _about() -> None:
    """Look after tiered KV caches."""
