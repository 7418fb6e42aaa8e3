"""The command line ``tiered-kv``. Needs the extra ``cli``."""

import sys


def main() -> None:
    """Run the command that the process was started with; exit 0 if all is well, 1 if not, 2 if it could not be done."""
    try:
        from tiered_kv.cli.app import app  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        if error.name not in {"httpx", "rich", "typer"}:
            raise
        sys.exit("the command line needs typer, rich and httpx: pip install 'tiered-kv[cli]'")
    app(prog_name="tiered-kv")


__all__ = ["main"]
