"""What a simulation replaces is all that there is: the core asks the machine for nothing behind its back."""

import ast
from pathlib import Path

import pytest

import tiered_kv
import tiered_kv_backends

CORE = Path(tiered_kv.__file__).parent
NVME = Path(tiered_kv_backends.__file__).parent / "nvme"
FOLDERS = [CORE / name for name in ("catalog", "tiers", "transfers")]
FILES = sorted(path for folder in (*FOLDERS, NVME) for path in folder.rglob("*.py"))
OUTSIDE = {"fcntl", "queue", "random", "secrets", "select", "shutil", "socket", "subprocess", "tempfile", "time"}
MEMORY_OR_THREAD = {"threading", "mmap"}
ALLOWED = {
    "records.py": {"threading"},  # memory that each thread has for itself
    "health.py": {"random"},  # a type: the numbers are given to it
    "engine_memory.py": {"mmap"},  # memory, which is not simulated
}
CONSTANTS = {"environ", "fspath", "path", "sysconf", "strerror", "register_at_fork", "PathLike"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nothing_real_is_reachable(path: Path) -> None:
    """No module of the core imports what tells time or chance, starts threads or opens files; of `os`, names only."""
    tree = ast.parse(path.read_text())
    imported = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    imported |= {(node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
    }
    calls = {name for name in used if name not in CONSTANTS and not name.isupper()}
    outside = (OUTSIDE if path.name != "directory.py" else OUTSIDE - {"fcntl"}) | MEMORY_OR_THREAD
    assert not imported & outside - ALLOWED.get(path.name, set())
    assert not calls
