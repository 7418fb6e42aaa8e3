"""The command line, called as a shell would: in a thread, for it has an event loop of its own."""

import asyncio
import json
from typing import Any

from typer.testing import CliRunner, Result

from tiered_kv.cli.app import app


async def run(*arguments: str, stdin: str | None = None) -> Result:
    """Call it, while the loop goes on."""
    return await asyncio.to_thread(CliRunner().invoke, app, arguments, stdin)


async def answer(*arguments: str, code: int = 0) -> Any:  # noqa: ANN401 - what JSON is
    """Call it with ``--json`` and return what it says."""
    result = await run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)
