"""``tiered-kv simulate``: the shipped code in virtual time, on threads that take turns, disks and stores that fail."""

import html
import signal
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer

from tiered_kv.cli.common import AsJSON, err, out, print_json
from tiered_kv.testing.simulation.run import STEPS_A_SEED, RunReport, in_words, shrink, simulate

_SHOWN_LINES = 40
_SEEDS_A_PROCESS = 256
"""Of what each one's threads have allocated and freed malloc keeps some megabytes."""


def simulate_command(
    steps: Annotated[int, typer.Option(min=1, help="Calls of engines and changes of the world, in all.")] = 5000,
    seed: Annotated[int, typer.Option(min=0, help="The first seed; each one takes some 120 steps.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="How many seeds are run at once.")] = 1,
    pages: Annotated[Path | None, typer.Option(help="A folder for a page of HTML per failure.")] = None,
    *,
    twice: Annotated[bool, typer.Option(help="Run each seed twice: the same must happen.")] = False,
    json: AsJSON = False,
) -> None:
    """Look for broken promises. Ends with 0 if none was found; a seed that fails does so each time.

    With --steps 1 --seed N one seed is run again. Of each that fails the end of its timeline is shown.
    """
    num_steps = num_faults = num_seeds = 0
    failed: list[RunReport] = []
    for report, is_same in _reports(seed, processes, twice=twice):
        if not is_same:
            err.print(f"seed {report.seed} does not do the same twice", markup=False)
            raise typer.Exit(2)
        num_seeds, num_steps, num_faults = num_seeds + 1, num_steps + report.num_steps, num_faults + report.num_faults
        if report.failure:
            failed.append(report)
            _show(report, pages, is_quiet=json)
        if num_steps >= steps:
            break
    if json:
        print_json({"steps": num_steps, "faults": num_faults, "failures": len(failed), "seeds": num_seeds})
    else:
        found = ", ".join(f"{kind} {n}" for kind, n in Counter(each.kind for each in failed).items()) or "nothing found"
        out.print(f"{num_seeds} seeds, {num_steps} steps, {num_faults} faults: {found}", markup=False)
    if failed:
        raise typer.Exit(1)


def _reports(seed: int, processes: int, *, twice: bool) -> Iterator[tuple[RunReport, bool]]:
    """Yield what became of one seed after another, in their order, and whether it did the same twice."""
    seeds = count(seed)
    if processes == 1:
        for each in seeds:
            yield _run(each, twice)
    ignored = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for this process, which ends the others
    pool = ProcessPoolExecutor(
        processes, get_context("spawn"), signal.signal, ignored, max_tasks_per_child=_SEEDS_A_PROCESS
    )
    try:
        pending = deque(pool.submit(_run, next(seeds), twice) for _ in range(2 * processes))
        while True:
            yield pending.popleft().result()
            pending.append(pool.submit(_run, next(seeds), twice))
    finally:
        pool.shutdown(cancel_futures=True)


def _run(seed: int, twice: bool) -> tuple[RunReport, bool]:  # noqa: FBT001 - what a pool passes
    report = simulate(seed)
    return report, not twice or simulate(seed).digest == report.digest


def _show(report: RunReport, pages: Path | None, *, is_quiet: bool) -> None:
    """Make a failure plainer, and show what happened."""
    plain = shrink(report, most_runs=60)
    told = simulate(report.seed, STEPS_A_SEED, tape=plain.tape, keeps_timeline=True)
    if pages is not None:
        pages.mkdir(parents=True, exist_ok=True)
        lines = "\n".join(map(html.escape, told.timeline))
        title = html.escape(f"seed {report.seed}: {report.failure}")
        text = f"<!doctype html><title>{title}</title><h1>{title}</h1><p>{in_words(plain.tape)}</p><pre>{lines}</pre>"
        (pages / f"seed-{report.seed}.html").write_text(text)
    if not is_quiet:
        out.print(f"seed {report.seed}: {report.failure}\n  {in_words(plain.tape)}", markup=False)
        out.print("\n".join(told.timeline[-_SHOWN_LINES:]), markup=False)
