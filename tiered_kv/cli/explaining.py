"""``tiered-kv explain``: why a prompt is not there, and what to do about it."""

import json
import sys
import textwrap
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.markup import escape

from tiered_kv.cli.common import AsJSON, one_line_errors, print_json, print_table, read_whole
from tiered_kv.cli.running import At, Explained, running_cache
from tiered_kv.settings.page_address import DEFAULT
from tiered_kv.values.errors import ConfigurationError

_WIDTH: Final = 110
_ADVICE: Final[Mapping[str, str]] = {
    "pending": "It is on its way: ask again.",
    "being written": "It was evicted from memory, and is on its way to storage: ask again.",
    "bypassed": "Its tier is not asked now, since it failed or was late: `tiered-kv status` and the log say more.",
    "old epoch": "It is there, computed by weights whose digest begins so; the cache serves others: {names}.",
    "evicted": "Others needed its room: a larger tier, or one more. The page says which size would have had it.",
    "removed": "A call removed it: evict, clear or delete.",
    "expired": "It was there for longer than the tier's ttl_s.",
    "corrupt": "Its bytes were not what they should be: look at the disk, and run `tiered-kv verify`.",
    "failed": "Its tier could not write it: the log's tier.failed says why, and `tiered-kv doctor` what to change.",
    "dropped": "A store did not keep it, for want of room or time: `tiered-kv status` counts how many, and why.",
    "not admitted": "It was not used often enough for the tier's admit_after.",
    "never stored": "No prompt that begins so was stored since the cache was opened, by these names: {names}. Prompts "
    "of another salt or layout have others, and are not looked for, nor are those of weights of which the cache knows "
    "nothing: `tiered-kv inspect` shows those that lie in a directory or a store.",
}
_DIFFERS: Final = (
    "A prompt with the same first {token} tokens was stored, and none that goes on like this one: compare the tokens "
    "from {token} on with those of the prompt that you thought was the same. Or the engine stored it only so far."
)


def explain_command(
    tokens: Annotated[
        str, typer.Argument(help="The prompt's token ids: a file with a JSON list of them, or - for stdin.")
    ] = "",
    at: At = DEFAULT,
    *,
    hashes: Annotated[
        Path | None, typer.Option(help="A file with a JSON list of an engine's own block hashes, hexadecimal, instead.")
    ] = None,
    salt: Annotated[str, typer.Option(envvar="TIERED_KV_SALT", help="Of the tenant.")] = "",
    group: Annotated[int, typer.Option(min=0, help="The KV group.")] = 0,
    as_json: AsJSON = False,
) -> None:
    """Say of each block of a prompt why a running cache has it, or has not, and what helps.

    Exits 1 if some block is missing.
    """
    with one_line_errors(), running_cache(at) as cache:
        if bool(tokens) == bool(hashes):
            raise ConfigurationError("give the prompt's token ids, or --hashes: one of the two")
        asked = {"hashes": _list_in(str(hashes))} if hashes else {"tokens": _list_in(tokens)}
        said = cache.explain({**asked, "salt": salt, "group": group})
    blocks = said["blocks"]
    missing = next((at for at, block in enumerate(blocks) if block["state"] != "ready"), len(blocks))
    if as_json:
        print_json({**said, "num_ready": missing})
        raise typer.Exit(int(missing < len(blocks)))
    size, rows, number = said["block_size"], [], 0
    for words, run in groupby(block["says"] for block in blocks):
        start, number = number, number + len(list(run))
        which = f"{start}" if number == start + 1 else f"{start}-{number - 1}"
        rows.append((which, f"{start * size:,}-{number * size - 1:,}", escape(words)))
    print_table(("blocks", "tokens", "what is known"), rows)
    for line in _conclusion(said, missing).splitlines():
        sys.stdout.write(f"{textwrap.fill(line, _WIDTH)}\n")
    raise typer.Exit(int(missing < len(blocks)))


def _conclusion(said: Explained, missing: int) -> str:
    blocks, size = said["blocks"], said["block_size"]
    if not blocks:
        return f"No full block of {size} tokens: nothing is kept of a prompt this short."
    if missing == len(blocks):
        return f"All {missing} blocks can be loaded."
    block, named_by = blocks[missing], said["named_by"]
    names = f"model {named_by['model'][:12]}, weights {named_by['epoch'][:8]}, tenant {named_by['tenant'][:8]}"
    is_other = missing > 0 and block["state"] == "never stored"
    advice = _DIFFERS if is_other else _ADVICE.get(block["state"], "")
    advice = advice.format(names=names, token=f"{missing * size:,}")
    if block["unknown_in"]:
        advice += f" {', '.join(block['unknown_in'])} may have it, and was not asked: `tiered-kv status` says why."
    words = f"{missing} of {len(blocks)} blocks can be loaded. Block {missing} cannot: {block['says']}.\n{advice}"
    return words.rstrip()


def _list_in(path: str) -> list[Any]:
    data = read_whole(path)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is no JSON ({error}): write a list, [1, 2, 3]") from error
    if not isinstance(found, list):
        raise ConfigurationError(f"{path} holds no list: write [1, 2, 3]")
    return found
