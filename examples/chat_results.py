"""What the runs of ``chat.py`` were, whether they were right, and how they are shown."""

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from chat_engine import CHUNK, Completion
from tiered_kv import LoadResult, TierFault

RECOMPUTE = "recompute"
LABELS = {
    RECOMPUTE: "Recomputed",
    "gpu": "GPU pool",
    "cpu": "CPU memory",
    "nvme": "NVMe, new process",
    "s3": "S3, new process",
    "redis": "Redis, new process",
}
WIDTH = 110
"""Columns that `draw_table` takes at most."""
PASSED_ON = "cpu"
"""Where loads say that blocks were which another load was just reading. Below the CPU tier this is no other source."""


@dataclass(frozen=True)
class Run:
    """All conversations, served once."""

    source: str
    """The tier their prefixes were loaded from, or ``RECOMPUTE``."""
    device: str
    """What computed, and in which type."""
    io: str
    """How a tier on disk reads: ``"direct"``, or ``"buffered"`` by the page cache; empty for other tiers."""
    requests: list[Completion]
    """One after the other the turns of the first conversation, those of the second, and so on."""
    loads: list[LoadResult]

    @property
    def mean_ttft_s(self) -> float:
        """Mean time to first token."""
        return statistics.mean(request.ttft_s for request in self.requests)

    @property
    def num_passed_on(self) -> int:
        """Blocks that were not read for one request but copied from what was just read for another."""
        return sum(load.num_blocks - load.by_tier.get(self.source, 0) for load in self.loads)

    def write(self, path: Path) -> None:
        """Write the run as JSON."""
        path.write_text(json.dumps(asdict(self), default=torch.Tensor.tolist))

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Read what `write` wrote, logits to the bit."""
        run = json.loads(path.read_text())
        for request in run["requests"]:
            request["last_logits"] = torch.tensor(request["last_logits"])
        for load in run["loads"]:
            load["faults"] = tuple(TierFault(**fault) for fault in load["faults"])
        run["requests"] = [Completion(**request) for request in run["requests"]]
        run["loads"] = [LoadResult(**load) for load in run["loads"]]
        return cls(**run)


def find_faults(run: Run, reference: Run, *, may_pass_on: bool, tier: str = "") -> list[str]:
    """Return what is not as it has to be: other output than the recomputation's, or KV that came from elsewhere.

    Args:
        run: What was served from a tier.
        reference: The recomputation of the same conversations.
        tier: Its name, if it is not the run's source.
        may_pass_on: Whether `PASSED_ON` counts as this tier.
    """
    faults = []
    for number, (request, recomputed) in enumerate(zip(run.requests, reference.requests, strict=True), start=1):
        what = f"request {number} from {run.source}"
        reusable = (len(request.prompt) - 1) // CHUNK * CHUNK
        if (request.prompt, request.tokens) != (recomputed.prompt, recomputed.tokens):
            faults.append(f"{what}: other tokens than recomputed")
        if not torch.equal(request.last_logits, recomputed.last_logits):
            faults.append(f"{what}: other last logits than recomputed")
        if request.num_reused_tokens != reusable:
            faults.append(f"{what}: {request.num_reused_tokens} of {reusable} tokens loaded")
    allowed = {tier or run.source, *([PASSED_ON] if may_pass_on else [])}
    if elsewhere := {tier for load in run.loads for tier in load.by_tier} - allowed:
        faults.append(f"the run from {run.source} also loaded from {', '.join(sorted(elsewhere))}")
    reasons = (f"{fault.reason} {fault.detail}".rstrip() for load in run.loads for fault in load.faults)
    return faults + [f"a load from {run.source}: {reason}" for reason in reasons]


def is_equal(run: Run, reference: Run) -> bool:
    """Say whether all tokens and last logits are the recomputation's, to the bit."""
    pairs = zip(run.requests, reference.requests, strict=True)
    return all(one.tokens == other.tokens and torch.equal(one.last_logits, other.last_logits) for one, other in pairs)


def make_console() -> Console:
    """Return a console. In a file or a pipe, which count as 80 columns, lines are long enough for any table."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    return console


def draw_table(runs: Sequence[Run], faults: Mapping[str, Sequence[str]]) -> Table:
    """Return a row a run; the first is the recomputation that the others are measured against."""
    reference = runs[0]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))  # 80 columns, as a rule
    table.add_column("KV of prompts", no_wrap=True)
    for heading in ("blocks", "hit tokens", "TTFT", "speed-up", "GB/s", "output", "all loaded"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        num_bytes, seconds = (sum(getattr(load, each) for load in run.loads) for each in ("num_bytes", "seconds"))
        verdicts = [is_equal(run, reference), not faults[run.source]] if run is not reference else []
        words = zip(("equal", "yes"), ("differs", "no"), verdicts, strict=False)
        table.add_row(
            LABELS[run.source],
            f"{sum(load.num_blocks for load in run.loads):,}",
            f"{sum(request.num_reused_tokens for request in run.requests):,}",
            f"{run.mean_ttft_s * 1e3:,.0f} ms",
            f"{reference.mean_ttft_s / run.mean_ttft_s:.1f}x",
            f"{num_bytes / seconds / 1e9:.2f}" if seconds else "",
            *(f"[green]{good}" if verdict else f"[bold red]{bad}" for good, bad, verdict in words),
        )
    return table


def describe(runs: Sequence[Run]) -> str:
    """Say what the numbers of `draw_table` mean, and what they do not."""
    requests, num_tokens = runs[0].requests, sum(len(request.prompt) for request in runs[0].requests)
    text = f"""{len(requests)} prompts, {num_tokens:,} tokens together, computed by {runs[0].device}. TTFT is the mean
    time to first token with all conversations at once: it includes waiting for each other. Recomputed means that
    nothing at all is reused, not even a conversation's own earlier turns. GB/s is what a load got while others were
    loading and computing. Output is equal if every token and last logit is the recomputed one, bit for bit."""
    lines = [" ".join(text.split())]
    if runs[0].device.startswith("cpu") and any(run.source == "gpu" for run in runs):
        lines.append("There is no GPU here: the GPU pool lies in host memory, and its numbers say nothing of a GPU's.")
    for run in (run for run in runs if run.io):
        through = "past the page cache (O_DIRECT)" if run.io == "direct" else "through the page cache"
        shared = (
            f"; {run.num_passed_on} of its blocks came with a read for another request" if run.num_passed_on else ""
        )
        lines.append(f"{LABELS[run.source].partition(',')[0]} was read {through}{shared}.")
    return "\n".join(lines)


def show(console: Console, runs: Sequence[Run], faults: Mapping[str, Sequence[str]]) -> None:
    """Print all runs, and whatever was not as it has to be."""
    console.print(draw_table(runs, faults))
    console.print(describe(runs), highlight=False)
    for fault in chain.from_iterable(faults.values()):
        console.print(f"[red]{fault}", highlight=False)


def draw_plot(runs: Sequence[Run], path: Path) -> None:
    """Save a bar of the mean TTFT a run, with a dot a request upon it."""
    figure = Figure(figsize=(8, 0.7 * len(runs) + 1.2), layout="constrained")
    axes = figure.subplots()
    for row, run in enumerate(runs):
        seconds = [request.ttft_s for request in run.requests]
        axes.barh(row, run.mean_ttft_s, color="#4477aa" if row else "#bbbbbb", height=0.55)
        axes.plot(seconds, [row] * len(seconds), "o", color="black", markersize=4, alpha=0.35, markeredgewidth=0)
        speedup = f"   {runs[0].mean_ttft_s / run.mean_ttft_s:.1f}x faster" if row else ""
        where = (max(seconds), row)
        text = f"mean {run.mean_ttft_s:.2f} s{speedup}"
        axes.annotate(text, where, xytext=(8, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(runs)), [LABELS[run.source] for run in runs])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2 * max(request.ttft_s for run in runs for request in run.requests))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("Time to first token by where the KV of the prompt came from", loc="left", fontsize=11)
    axes.set_xlabel(f"seconds; bar: mean, dot: a request; {runs[0].device}", fontsize=9)
    figure.savefig(path, dpi=160)


def device_of(model_device: torch.device, dtype: torch.dtype) -> str:
    """Say what computes, as people read it."""
    name = torch.cuda.get_device_name(model_device) if model_device.type == "cuda" else f"cpu ({os.cpu_count()} cores)"
    return f"{name} in {str(dtype).removeprefix('torch.')}"
