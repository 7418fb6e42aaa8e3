import ast
import re
from pathlib import Path

import pytest

from tests.support import programs

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "quickstart.py"


@pytest.mark.slow
def test_it_runs() -> None:
    """The example finds on disk what it stored before the restart, loads the same bytes, and prints nothing else."""
    ran = programs.run(EXAMPLE)
    assert ran.returncode == 0, ran.stderr
    lines = ["stored 31 blocks", "found {'nvme': 31}, loaded 31 blocks", "the same bytes: True"]
    assert ran.stdout.splitlines() == lines
    assert not ran.stderr


def test_it_is_short() -> None:
    """The first example that anyone reads has no more than 25 lines of code."""
    source = EXAMPLE.read_text()
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(source.splitlines(), start=1)
    assert len([line for number, line in lines if line.strip() and number not in docstrings]) <= 25


def test_the_readme_quotes_it() -> None:
    """What the README shows as the quickstart is this file, word for word, so it runs."""
    readme = (ROOT / "README.md").read_text()
    if "<!-- quickstart -->" not in readme:
        pytest.skip("the README has no quickstart: mark one with <!-- quickstart -->")
    quoted = re.search(r"<!-- quickstart -->\s*```python\n(.*?)```", readme, re.DOTALL)
    assert quoted
    assert quoted[1].strip() == EXAMPLE.read_text().strip()
