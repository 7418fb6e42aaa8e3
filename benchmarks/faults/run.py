"""The fault bench: sixteen classes of faults, on tiers of ours and of others, and what an engine is given then.

Each step is a process in the tier's own environment, over files on a medium that fails as it is told to. Ours are
forked from one that has imported the tier; who knows what others start as they are imported. The worst
that came of a block decides a cell: *right* (its bytes), *miss* (the engine is told to compute it), *raises*, *dies*,
*hangs* (no answer within 30 s), *wrong bytes*; or *not applicable*. Right and miss are both safe. Whether a block
should be right depends on the class: one that was damaged can't be.
"""

import argparse
import json
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

HERE: Final = pathlib.Path(__file__).resolve().parent
ROOT: Final = HERE.parent.parent
ENGINES: Final = ROOT / "tests" / "engines"
sys.path[:0] = [str(HERE), str(ENGINES)]

import medium  # noqa: E402 - where it lies is said above
from classes import CLASSES  # noqa: E402 - the same
from environments import Environment  # noqa: E402 - the same
from outcome import Steps, outcome_of  # noqa: E402 - the same


@dataclass(frozen=True)
class Tier:
    """A column: what it is called, the module ``drive_*`` that drives it, and whose environment it runs in."""

    title: str
    module: str
    engine: str = ""

    @property
    def python(self) -> str | None:
        """The interpreter that has it; None where its environment is not built."""
        if not self.engine:
            return sys.executable
        environment = Environment.of(self.engine)
        return str(environment.python) if environment.is_built else None


TIERS: Final = (
    Tier("tiered_kv nvme", "nvme"),
    Tier("tiered_kv shared_fs", "shared_fs"),
    Tier("vLLM fs", "vllm_fs", "vllm"),
    Tier("LMCache local_disk", "lmcache_disk", "lmcache"),
    Tier("HiCache file", "hicache_file", "sglang"),
)


@contextmanager
def on_a_medium(tier: Tier, library: pathlib.Path) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Give what runs one class after the other on a tier, each over an empty folder and a medium that is fine."""
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".faults-") as folder:
        at = pathlib.Path(folder)
        path = os.pathsep.join(map(str, (ROOT, ROOT / "backends", HERE, ENGINES)))
        variables = {**os.environ, **medium.variables(library, at), "PYTHONPATH": path}
        steps = Steps(str(tier.python), tier.module, at, variables, forks=not tier.engine)

        def run(name: str) -> dict[str, Any]:
            shutil.rmtree(at / "data")
            (at / "data").mkdir()
            medium.Medium(at / "order").be_fine()
            return outcome_of(steps, name, len(CLASSES[name]))

        try:
            yield run
        finally:
            steps.close()


def main() -> None:
    """Run, print the table, what was seen beside it, and JSON last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", action="append", choices=[each.module for each in TIERS], help="only this; repeat it")
    parser.add_argument("--fault", action="append", choices=list(CLASSES), help="only this; repeat it")
    parser.add_argument("--build", action="store_true", help="build the others' environments first: gigabytes, once")
    arguments = parser.parse_args()
    tiers = [each for each in TIERS if arguments.tier is None or each.module in arguments.tier]
    if arguments.build:
        for engine in {each.engine for each in tiers} - {""}:
            Environment.of(engine).build()
    for each in tiers:
        if each.python is None:
            print(f"left out: {each.title}, its environment is not built: make fault-bench builds it")
    tiers = [each for each in tiers if each.python is not None]
    table: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        library = medium.built(pathlib.Path(folder))
        if library is None:
            sys.exit("cc is missing: apt-get install gcc")
        print(f"| Fault | {' | '.join(each.title for each in tiers)} |\n|---|{'---|' * len(tiers)}")
        runs = {each.title: stack.enter_context(on_a_medium(each, library)) for each in tiers}
        for name in arguments.fault or CLASSES:
            table[name] = {title: run(name) for title, run in runs.items()}
            print(f"| {name} | {' | '.join(said['outcome'] for said in table[name].values())} |", flush=True)
    print()
    versions = {title: said.pop("versions") for row in table.values() for title, said in row.items()}
    print("; ".join(f"{title}: {version}" for title, version in versions.items()))
    for name, row in table.items():
        for title, said in row.items():
            if said["note"]:
                print(f"{name}, {title}: {said['note']}")
    print(json.dumps({"versions": versions, "table": table}))


if __name__ == "__main__":
    main()
