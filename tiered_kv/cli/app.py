"""The commands. What each does, and what it shows of the answer, is in the modules beside this one."""

import ast
import sys
from importlib import import_module
from importlib.metadata import version as version_of
from importlib.resources import files
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

_MODULES: Final = {
    "serve": "hosting",
    "status": "watching",
    "top": "watching",
    "explain": "explaining",
    "doctor": "doctoring",
    "config": "configuring",
    "bench": "benching",
    "inspect": "shelving",
    "verify": "shelving",
    "delete": "shelving",
    "digest": "shelving",
    "replay": "replaying",
    "plan": "planning",
    "simulate": "simulating",
}
"""Where each command is, as ``<name>_command``."""
_SHOWN: Final[dict[str, Any]] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "markdown",  # in Rich's own markup a file's [host] would be taken for a style
}
_UsageError: Final[Any] = typer.BadParameter.__base__  # of click, or of the copy of it that Typer has


class _Commands(TyperGroup):
    """Imports a command's module when it is called: `status`, which probes run every few seconds, needs no torch."""

    def __init__(self, **attributes: Any) -> None:  # noqa: ANN401 - Typer's
        super().__init__(**attributes)
        self.commands = dict.fromkeys(_MODULES, TyperCommand(None))  # whose names are suggested
        self._is_listing = False

    def main(self, *args: Any, **extra: Any) -> Any:  # noqa: ANN401 - as above
        """Do what the command line says, and exit; what cannot be done is said in one line, and the exit code is 2."""
        if not extra.get("standalone_mode", True):
            return super().main(*args, **extra)
        said = ""
        try:
            code = super().main(*args, **extra | {"standalone_mode": False})
        except typer.Abort:  # a question that nobody answers
            code, said = 1, "aborted"
        except _UsageError as error:
            code, said = error.exit_code, " ".join(error.format_message().split())
            if said and error.ctx is not None:  # without a word the help has been shown
                said += f" ({error.ctx.command_path} --help says more)"
        if said:
            sys.stderr.write(f"tiered-kv: {said}\n")
        sys.exit(code)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401 - of click, or of the copy of it that Typer has
        return list(_MODULES)

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - as above
        self._is_listing = True
        super().format_help(ctx, formatter)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401 - as above
        if cmd_name not in _MODULES:
            return None
        if self._is_listing:
            return TyperCommand(cmd_name, help=_said_of(cmd_name))
        alone = typer.Typer(**_SHOWN)
        module = import_module(f"tiered_kv.cli.{_MODULES[cmd_name]}")
        alone.command(cmd_name)(getattr(module, f"{cmd_name}_command"))
        return typer.main.get_command(alone)


def _said_of(command: str) -> str:
    """Read what a command is for in the text of its module, which is not imported."""
    module = ast.parse(files("tiered_kv.cli").joinpath(f"{_MODULES[command]}.py").read_text())
    functions = (each for each in module.body if isinstance(each, ast.FunctionDef))
    return next(ast.get_docstring(each) or "" for each in functions if each.name == f"{command}_command")


def _say_version(wanted: bool) -> None:  # noqa: FBT001 - Typer calls it with the option's value
    if wanted:
        typer.echo(f"tiered-kv {version_of('tiered-kv')}")
        raise typer.Exit


app = typer.Typer(cls=_Commands, no_args_is_help=True, **_SHOWN | {"add_completion": True})


@app.callback()
def _about(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """Look after tiered KV caches."""
