"""Make docs/images/top.svg: what `tiered-kv top` shows of a cache at work, as a terminal has it.

python .ci/terminal.py [--seconds 30]
"""

import argparse
import asyncio
import re
from urllib.parse import urlsplit

from rich.console import Console
from rich.text import Text
from screenshots import IMAGES, busy_cache

from tiered_kv.cli import watching


async def main(seconds: float) -> None:
    """Have a cache work, watch it, and keep the last of three looks."""
    async with busy_cache(page="127.0.0.1:0") as address:
        await asyncio.sleep(seconds)
        terminal = Console(record=True, width=112, force_terminal=True)
        watching.__dict__["out"] = terminal
        await asyncio.to_thread(watching.top_command, urlsplit(address).netloc, every=1.0, looks=3)
    looks = terminal.export_text(clear=False, styles=True).split("\x1b[1mllama")  # each begins with the model's name
    last = Console(record=True, width=112, force_terminal=True)
    last.print(Text.from_ansi("\x1b[1mllama" + looks[-1].rstrip()))
    drawn = re.sub(r"@font-face \{.*?\}", "", last.export_svg(title="tiered-kv top"), flags=re.DOTALL)
    (IMAGES / "top.svg").write_text(drawn)  # without the fonts that it would fetch from elsewhere


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    asyncio.run(main(parser.parse_args().seconds))
