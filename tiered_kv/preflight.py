"""Asks, before host memory is taken, whether the machine will give it.

Linux says yes to any allocation and ends the process later, when the pages are first touched. So the numbers are
compared beforehand: the memory that is available, the limits of the control groups the process is in (version 2 or 1),
and the limit of locked memory.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tiered_kv.errors import ConfigurationError
from tiered_kv.system import files

_GIB: Final = 1024**3
_CAP_IPC_LOCK: Final = 1 << 14
_LESS: Final = "give the cpu tier less capacity or lower limits.bounce"


def check_host_memory(num_bytes: int, *, root: Path = Path("/")) -> None:
    """Raise unless ``num_bytes`` more of host memory can be had. Where the machine does not say, nothing is checked.

    Args:
        num_bytes: What is about to be allocated, all together.
        root: Where ``proc`` and ``sys`` are.

    Raises:
        ConfigurationError: It exceeds a limit. Every limit it exceeds is named, in GiB, with what to change.
    """
    problems = []
    if num_bytes > (available := _available(root / "proc/meminfo")):
        problems.append(f"{_gib(available)} are available on this machine: {_LESS}, or end other processes")
    for path, limit, used in _cgroups(root):
        if num_bytes > limit - used:
            advice = f"raise it (docker --memory, Kubernetes resources.limits.memory, systemd MemoryMax) or {_LESS}"
            problems.append(f"the control group {path} is limited to {_gib(limit)}, {_gib(used)} in use: {advice}")
    if problems:
        raise ConfigurationError("\n  ".join([f"{_gib(num_bytes)} of host memory are wanted, but", *problems]))


def doubt_of_page_locking(num_bytes: int, *, root: Path = Path("/")) -> str:
    """Say why ``num_bytes`` might not be page-locked, or nothing.

    A doubt and no error: some drivers lock pages without asking RLIMIT_MEMLOCK, and where locking fails the cache works
    on with pageable memory, slower.
    """
    if num_bytes <= (limit := _memlock(root / "proc/self")):
        return ""
    advice = f"raise it (ulimit -l, docker --ulimit memlock=-1, systemd LimitMEMLOCK=infinity) or {_LESS}"
    return f"{_gib(num_bytes)} are to be pinned, locked memory (RLIMIT_MEMLOCK) is limited to {_gib(limit)}: {advice}"


def _available(meminfo: Path) -> float:
    for line in files().lines(meminfo):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return float("inf")


def _cgroups(root: Path) -> Iterator[tuple[str, float, int]]:
    """Yield path, limit and use of every limited control group from the process's own up to the root."""
    for line in files().lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, names = "sys/fs/cgroup", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            mount, names = "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        limit_file, use_file, prefix = names
        # A container may see the host's path here and only its own group there: what is absent is passed over.
        group = Path(path.lstrip("/"))
        for each in (group, *group.parents):
            folder = root / mount / each
            limit, use = _number(folder / limit_file), _number(folder / use_file)
            if limit is not None and use is not None:
                yield f"/{each}".removesuffix("."), limit, max(0, use - _page_cache(folder / "memory.stat", prefix))


def _page_cache(stat: Path, prefix: str) -> int:
    """Return the bytes that the kernel drops before it refuses memory: files that were read or written."""
    counted = (f"{prefix}inactive_file", f"{prefix}active_file")
    pairs = (line.split() for line in files().lines(stat))
    return sum(int(value) for name, value in pairs if name in counted)


def _memlock(process: Path) -> float:
    for line in files().lines(process / "status"):
        if line.startswith("CapEff:") and int(line.split()[1], 16) & _CAP_IPC_LOCK:
            return float("inf")  # the limit does not hold for a process with this capability
    for line in files().lines(process / "limits"):
        if line.startswith("Max locked memory"):
            soft = line.split()[3]
            return float("inf") if soft == "unlimited" else int(soft)
    return float("inf")


def _number(path: Path) -> int | None:
    """Return the number in a file; None for ``max`` and for no file."""
    text = next(iter(files().lines(path)), "").strip()
    return int(text) if text.isdigit() else None


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
