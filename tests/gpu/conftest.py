"""What a run on a GPU found, as it goes into benchmarks/RESULTS.md."""

import pytest
import torch

from tiered_kv.memory import crossover, driver


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """End the run with the GPU, the versions, how many tests passed, and which ways over the bus were measured."""
    if not torch.cuda.is_available():
        return
    counts = {kind: len(terminalreporter.getreports(kind)) for kind in ("passed", "failed", "error")}
    terminalreporter.section("for benchmarks/RESULTS.md")
    terminalreporter.write_line(
        f"`make test-gpu` on {torch.cuda.get_device_name()} (torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"batches of DMAs: {'yes' if driver.has_batches(torch.cuda.current_device()) else 'no'}): "
        + ", ".join(f"{number} {kind}" for kind, number in counts.items() if number)
    )
    for (_, num_bytes, num_fragments, num_parts, to_rows), fastest in crossover.measured().items():
        ways = ", ".join(f"{way.name} from {count}" for count, way in fastest)
        what = "blocks" if num_parts == 1 else f"one of {num_parts} layers"
        direction = "store" if to_rows else "load"
        terminalreporter.write_line(f"- {direction} of {what} of {num_fragments} x {num_bytes} bytes: {ways}")
