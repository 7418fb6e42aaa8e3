"""What a GPU is to tell, in parts: facts, copies, layers, graphs, cache, soak; all of them if none is named.

*facts*: the machine and its driver. *copies*: GB/s of scattered blocks between GPU and host, of several models and
sizes of fragments, over one large pinned copy in the same run; alone, both ways at once, by each way there is, to
pageable memory, one block alone, and the speed that matrix products keep beside them. *layers*: the same layer by
layer. *graphs*: CUDA graphs captured beside a cache at work. *cache*: awaited stores and loads by each chain of tiers,
how long a load of 1,024 blocks holds the event loop, and page-locking another thread. *soak*: random work through all
tiers for minutes, every byte compared.

Each figure is printed as it comes, an error ends no more than the figure it belongs to, and ``--out`` has both as JSON,
a file a part. The last lines are ready for RESULTS.md, and one of JSON.

    python benchmarks/gpu.py [PART ...] [--path DIR] [--out DIR]

Without a GPU nothing is measured. ``--device cpu --small`` runs the same code on a CPU, whose figures mean nothing.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
import torch

from _gpu_copies import copies, layers
from _gpu_facts import facts
from _gpu_report import Report, Run
from _gpu_serving import cache, graphs, soak
from tiered_kv.memory import make_device

PARTS: dict[str, Callable[[Run], None]] = {
    "facts": facts,
    "copies": copies,
    "layers": layers,
    "graphs": graphs,
    "cache": cache,
    "soak": soak,
}


def main() -> None:
    """Run the parts; end with 1 if anything went wrong in one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--device", default="cuda", help="where the engine's cache is (default: cuda)")
    parser.add_argument("--small", action="store_true", help="tiny sizes: to see that it runs")
    parser.add_argument("--path", type=Path, default=Path(), help="a folder on NVMe (default: the current one)")
    parser.add_argument("--out", type=Path, help="a folder for PART.json")
    parser.add_argument("--soak", type=float, default=240, metavar="SECONDS", help="how long the soak takes (240)")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("no GPU: nothing measured")
        print(json.dumps({}))
        return
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    figures, errors = dict[str, dict[str, Any]](), dict[str, str]()
    for part in options.parts or PARTS:
        report = Report(part, options.out)
        device = make_device(options.device)
        soak_s = 0.0 if options.small else options.soak
        with report.catching("all of it"):
            PARTS[part](Run(report, device, options.small, options.path, soak_s))
        with report.catching("closing the device"):
            device.close(10)
        figures |= {f"{part}: {about}": found for about, found in report.figures.items()}
        errors |= {f"{part}: {about}": said for about, said in report.errors.items()}
    print(as_markdown(figures))
    print(json.dumps({**figures, **({"errors": errors} if errors else {})}, default=str))
    sys.exit(bool(errors))


def as_markdown(figures: dict[str, dict[str, Any]]) -> str:
    """Return what was found as rows of a table."""
    lines = ["| part | figure | |", "|---|---|---:|"]
    lines += [
        f"| {about} | {name.replace('_', ' ')} | {value} |"
        for about, found in figures.items()
        for name, value in found.items()
    ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
