"""How fast tiers of ours, of vLLM, of LMCache and of SGLang HiCache store blocks to files and load them.

Each tier is driven by its own engine's code, is a process in that engine's own environment, stays open and takes turns
with the others: one works at a time, and begins when all writes of others have ended. What is moved is eight requests
that come at once, from and into memory that an engine has on a CPU: of vLLM and HiCache their own CPU tier, which
spares them a copy that LMCache makes. Ours makes it where that memory is paged, and makes none where it is a host pool
of whole blocks. A turn is told

- *store*: until the tier says that it has all blocks. None of them flushes the disk for that, and who writes through
  the page cache says so while the blocks are in memory alone;
- *flushed*: the same, and until all of it is on the disk;
- *load*: from the look-up until all is in memory, with the page cache as that has left it;
- *cold load*: the same when the page cache was told to drop the files.

Each turn stores blocks that no turn had before. Our NVMe tier has room for one turn and a quarter, so it evicts, and
writes where it has written before, as it does for all of its life. The others have room for all, and make files: none
is deleted meanwhile, as ext4 is slow at making files for minutes after it has deleted some. Bytes are compared after
each load, untimed. Ours verifies a checksum of every block, no other has any. Ratios are to a bare loop of direct I/O
in eight threads, a median over rounds, since a disk drifts. CPU is all that a process has used, its engine's part
included, and not what the kernel writes later.

A tier whose environment is not built is named: `make fault-bench` builds them.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, cast

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE / "faults"))

from _peer import Space  # noqa: E402 - where the next lies is said above
from run import ENGINES, ROOT, Tier  # noqa: E402 - the same

SIZES = {"128KiB": 128 << 10, "1MiB": 1 << 20}
NUM_REQUESTS = 8
TIERS = {
    "bare": Tier("bare loop", "_peer_bare"),
    "nvme": Tier("tiered_kv nvme", "_peer_ours"),
    "nvme_direct": Tier("tiered_kv nvme, host pool", "_peer_ours"),
    "shared_fs": Tier("tiered_kv shared_fs", "_peer_ours"),
    "vllm_fs": Tier("vLLM fs", "_peer_vllm", "vllm"),
    "lmcache": Tier("LMCache local_disk", "_peer_lmcache", "lmcache"),
    "lmcache_direct": Tier("LMCache local_disk, use_odirect", "_peer_lmcache", "lmcache"),
    "hicache": Tier("HiCache file", "_peer_hicache", "sglang"),
}
LEND = {"bare", "vllm_fs", "hicache"}
"""Those that read files into the engine's memory, and write them from there."""
WHAT = {"store": ("store",), "flushed": ("store", "flush"), "load": ("load",), "load_cold": ("load_cold",)}
"""The figures, each of so many parts of a turn."""

Rounds = Sequence[Mapping[str, float]]


class Turns:
    """A tier that is open in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]", errors: Path) -> None:
        self._process = process
        self._errors = errors
        self.says = self._answer()

    def take(self) -> Mapping[str, float]:
        """Have it take a turn, and return what that took."""
        to = cast(IO[str], self._process.stdin)
        to.write("\n")
        to.flush()
        found: Mapping[str, float] = self._answer()
        return found

    def _answer(self) -> Any:  # noqa: ANN401 - it is JSON
        line = cast(IO[str], self._process.stdout).readline()
        if not line:
            sys.exit(f"{self._process.args!r} has ended:\n{self._errors.read_text()[-4000:]}")
        return json.loads(line)


@contextlib.contextmanager
def opened(name: str, folder: Path, space: Space) -> Iterator[Turns]:
    """Start a tier over a folder of its own, for a ``with`` block."""
    (folder / name).mkdir()
    errors, tier = folder / f"{name}.log", TIERS[name]
    command = [
        str(tier.python),
        str(HERE / "_peer.py"),
        tier.module,
        name,
        str(folder / name),
        json.dumps(asdict(space)),
    ]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "backends", HERE, HERE / "faults", ENGINES)))
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}  # as vLLM has it: torch's threads spin
    with (
        errors.open("w") as log,
        subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        try:
            yield Turns(process, errors)
        except BaseException:
            process.kill()
            raise


def measure(names: Sequence[str], folder: Path, space: Space, num_rounds: int) -> Mapping[str, Rounds]:
    """Return what each turn of each tier took; who is first moves on from round to round."""
    found: dict[str, list[Mapping[str, float]]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        turns = {name: stack.enter_context(opened(name, folder, space)) for name in names}
        print("; ".join(f"{TIERS[name].title}: {each.says}" for name, each in turns.items()))
        for number in range(num_rounds):
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                found[name].append(turns[name].take())
    return found


def seconds(each: Mapping[str, float], what: str, part: str = "") -> float:
    """Return a figure of one turn."""
    return sum(each[f"{name}{part}"] for name in WHAT[what])


def over(ours: Rounds, others: Rounds, what: str, part: str = "") -> float:
    """Return how many times the seconds of ours others' are, in the median over rounds."""
    pairs = zip(ours, others, strict=True)
    return statistics.median(seconds(other, what, part) / seconds(our, what, part) for our, other in pairs)


def show(size: str, found: Mapping[str, Rounds], num_gb: float, missing: Sequence[str]) -> None:
    """Print the table of one size."""
    print(
        f"\n{size + ', GB/s and over the bare loop':34}" + "".join(f"{what.replace('_', ' '):>15}" for what in WHAT),
        end="",
    )
    print(f"{'CPU s a GB: store':>22}{'load':>8}{'cold load':>11}")
    for name, rounds in found.items():
        line = f"{TIERS[name].title:34}"
        for what in WHAT:
            gb_s = num_gb / statistics.median(seconds(each, what) for each in rounds)
            line += f"{gb_s:8.2f} {over(rounds, found['bare'], what):6.2f}"
        for what, width in (("store", 22), ("load", 8), ("load_cold", 11)):
            line += f"{statistics.median(each[f'{what}_cpu'] for each in rounds) / num_gb:{width}.2f}"
        print(line)
    for name in missing:
        print(f"{TIERS[name].title:34} not built")


def ratios(size: str, found: Mapping[str, Rounds]) -> dict[str, float]:
    """Return the speed of our NVMe tier over each other's, and others' processor time over that of it.

    Over those that are lent their engine's memory, of ours that is lent it.
    """
    said = {}
    for name in found.keys() - {"nvme", "nvme_direct"}:
        ours = found["nvme_direct" if name in LEND else "nvme"]
        for what in WHAT:
            said[f"{what}_{size}_over_{name}"] = over(ours, found[name], what)
        for what in ("store", "load_cold"):
            said[f"{what}_cpu_{size}_over_{name}"] = 1 / over(ours, found[name], what, "_cpu")
    return {key: round(ratio, 3) for key, ratio in sorted(said.items())}


def main() -> None:
    """Measure both sizes, print a table of each and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path, default=Path(), help="a folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=256, help="of one turn's store, and of each engine's memory")
    parser.add_argument("--tier", action="append", choices=list(TIERS)[3:], help="beside nvme only this; repeat it")
    options = parser.parse_args()
    always = {"bare", "nvme", "nvme_direct"}
    wanted = [name for name in TIERS if options.tier is None or name in always | {*options.tier}]
    names = [name for name in wanted if TIERS[name].python is not None]
    said: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=options.path, prefix=".peers-benchmark-") as folder:
        for size, block_bytes in SIZES.items():
            space = Space(block_bytes, (options.mib << 20) // block_bytes, NUM_REQUESTS)
            (here := Path(folder).absolute() / size).mkdir()
            found = measure(names, here, space, options.rounds)
            show(size, found, space.num_bytes / 1e9, [name for name in wanted if name not in names])
            said |= ratios(size, found)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
