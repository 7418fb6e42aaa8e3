from pathlib import Path

import pytest

from tests.support import programs

EXAMPLE = Path(__file__).parents[2] / "examples" / "read_blocks.py"


@pytest.mark.slow
def test_it_runs() -> None:
    """A process with nothing but specs reads what the engine has computed, from files and from a store's packs."""
    pytest.importorskip("obstore", reason="obstore is missing: pip install 'tiered-kv[s3]'")
    ran = programs.run(EXAMPLE)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    for kind in ("File", "Object"):
        assert f"20 blocks by {kind}LoadStoreSpec, the engine's bytes: True" in lines
