from pathlib import Path

import pytest

from tests.support.caches import open_cache
from tiered_kv.memory.host import check_host_memory, doubt_of_page_locking
from tiered_kv.values.errors import ConfigurationError

GIB = 1024**3
NO_LIMIT_V1 = 9223372036854771712
MEMINFO = "MemTotal:       67108864 kB\nMemFree:         1048576 kB\nMemAvailable:   33554432 kB\n"
LIMITS = "Limit              Soft Limit  Hard Limit  Units\nMax locked memory  {}  unlimited  bytes\n"


def machine(root: Path, **files: str) -> Path:
    """Make the parts of ``/proc`` and ``/sys`` that say what memory there is; by default 32 GiB and no limit."""
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def complaint(num_bytes: int, root: Path) -> str:
    """Return why ``num_bytes`` cannot be had, or nothing."""
    try:
        check_host_memory(num_bytes, root=root)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_memory_is_what_is_available_not_what_is_free(tmp_path: Path) -> None:
    """The page cache of a busy machine is no reason to refuse; what other processes hold is."""
    root = machine(tmp_path)
    assert not complaint(32 * GIB, root)
    assert "33.00 GiB of host memory are wanted, but 32.00 GiB are available" in complaint(33 * GIB, root)


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(
            {
                "proc/self/cgroup": "0::/kubepods/pod1/kv\n",
                "sys/fs/cgroup/kubepods/pod1/kv/memory.max": "max\n",
                "sys/fs/cgroup/kubepods/pod1/kv/memory.current": f"{7 * GIB}\n",
                "sys/fs/cgroup/kubepods/pod1/memory.max": f"{8 * GIB}\n",
                "sys/fs/cgroup/kubepods/pod1/memory.current": f"{7 * GIB}\n",
                "sys/fs/cgroup/kubepods/pod1/memory.stat": f"anon 5\ninactive_file {3 * GIB}\nactive_file {GIB}\n",
            },
            id="version 2, limited above",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
                "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
            },
            id="version 2, from inside a container",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "9:cpu,cpuacct:/a\n4:memory:/docker/kv\n0::/\n",
                "sys/fs/cgroup/memory/docker/kv/memory.limit_in_bytes": f"{8 * GIB}\n",
                "sys/fs/cgroup/memory/docker/kv/memory.usage_in_bytes": f"{5 * GIB}\n",
                "sys/fs/cgroup/memory/docker/kv/memory.stat": f"total_inactive_file {2 * GIB}\ninactive_file 1\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{NO_LIMIT_V1}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{60 * GIB}\n",
            },
            id="version 1",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/docker/of-the-host\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
            },
            id="version 1, from inside a container",
        ),
    ],
)
def test_a_control_group_leaves_its_limit_minus_what_is_used(tmp_path: Path, files: dict[str, str]) -> None:
    """The tightest group counts, wherever above the process it is; page cache is no use, it goes first."""
    root = machine(tmp_path, **files)
    assert not complaint(5 * GIB, root)
    assert "is limited to 8.00 GiB, 3.00 GiB in use: raise it" in complaint(5 * GIB + 1, root)


def test_locked_memory_counts_only_where_it_is_locked(tmp_path: Path) -> None:
    """RLIMIT_MEMLOCK bounds pinned memory, unless the process may lock without limit."""
    root = machine(tmp_path, **{"proc/self/limits": LIMITS.format(8 * 1024**2)})
    assert not complaint(GIB, root)
    assert "(RLIMIT_MEMLOCK) is limited to 0.01 GiB: raise it (ulimit -l" in doubt_of_page_locking(GIB, root=root)
    machine(root, **{"proc/self/status": "Name:\tpython\nCapEff:\t0000000000004000\n"})
    assert not doubt_of_page_locking(GIB, root=root)


def test_no_limit_of_locked_memory_is_no_limit(tmp_path: Path) -> None:
    """``unlimited`` is read as such."""
    root = machine(tmp_path, **{"proc/self/limits": LIMITS.format("unlimited")})
    assert not doubt_of_page_locking(GIB, root=root)


def test_every_limit_that_is_exceeded_is_named(tmp_path: Path) -> None:
    """One run tells all that has to change."""
    root = machine(
        tmp_path,
        **{
            "proc/self/limits": LIMITS.format(GIB),
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{8 * GIB}",
            "sys/fs/cgroup/memory.current": "0",
        },
    )
    told = complaint(40 * GIB, root)
    assert [part in told for part in ("available on this machine", "control group /")] == [True] * 2


def test_a_machine_that_does_not_say_is_not_refused(tmp_path: Path) -> None:
    """Where there is no ``/proc``, the allocation itself has to tell."""
    check_host_memory(1 << 60, root=tmp_path)
    assert not doubt_of_page_locking(1 << 60, root=tmp_path)


def test_this_machine_gives_a_page_and_not_an_exbibyte() -> None:
    """The real files are read as the made ones are."""
    check_host_memory(4096)
    with pytest.raises(ConfigurationError, match=r"lower limits\.bounce"):
        check_host_memory(1 << 60)


async def test_a_pool_of_a_device_that_is_the_cpu_is_host_memory() -> None:
    """It is looked at with the rest of it: refused before it is taken."""
    with pytest.raises(ConfigurationError, match="of host memory are wanted"):
        async with open_cache({"medium": "gpu", "capacity": 1 << 50}, {"medium": "cpu", "capacity": 1 << 20}):
            pass
