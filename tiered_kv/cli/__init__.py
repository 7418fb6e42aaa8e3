"""The command line ``tiered-kv``. Needs the extra ``cli``."""

import os
import sys
from pathlib import Path


def main() -> None:
    """Run the command that the process was started with; exit 0 if all is well, 1 if not, 2 if it could not be done."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started it: nothing is asked or shown
            setattr(sys, name, Path(os.devnull).open("r" if name == "stdin" else "w"))  # noqa: SIM115 - for as long as the process
    try:
        from tiered_kv.cli.app import app  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        if error.name not in {"httpx", "rich", "typer"}:
            raise
        sys.exit("the command line needs typer, rich and httpx: pip install 'tiered-kv[cli]'")
    try:
        try:
            app(prog_name="tiered-kv")
        finally:
            sys.stdout.flush()
    except OSError as error:
        sys.stderr.write(f"tiered-kv: {error.filename or 'stdout'}: {error.strerror}\n")
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # where what is left goes, as the interpreter ends
        sys.exit(2)


__all__ = ["main"]
