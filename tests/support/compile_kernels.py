"""Compile the kernels for GPUs that need not be there, and print a line of JSON about each variant.

A process of its own, since Triton interprets in the one that tests. ``python -m tests.support.compile_kernels 90:16``
compiles for sm_90 what is aligned to 16 bytes, both ways.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tiered_kv.memory import kernels

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TYPES = {"table": "*i64", "pages": "*i64", "slots": "*i64", "rows": "i64"}


def specialised() -> list[str]:
    """Return the arguments whose value or alignment would have the kernel compiled again."""
    return [
        each.name
        for each in kernels._copy.params  # noqa: SLF001 - what is under test
        if not (each.is_constexpr or each.do_not_specialize or each.do_not_specialize_on_alignment)
    ]


def compile_one(architecture: int, alignment: int, *, to_rows: bool, folder: Path) -> dict[str, object]:
    """Return what one variant became."""
    names = kernels._copy.arg_names  # noqa: SLF001 - what is under test
    constants = kernels.constants_of(alignment, to_rows=to_rows)
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernels._copy, signature, values)  # noqa: SLF001 - what is under test
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    usage = re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", _output("cuobjdump", "--dump-resource-usage", binary))
    machine_code = _output("nvdisasm", "-c", binary) if alignment == 16 else ""
    accesses = re.findall(r"\b(?:LDG|STG)\.E[.\w]*", machine_code)
    return {
        "variant": [architecture, alignment, to_rows],
        "usage": {name.lower(): int(number) for name, number in usage},
        "ptx": sorted(set(re.findall(r"(?:ld|st)\.global[.\w]*", compiled.asm["ptx"]))),
        "accesses": Counter(accesses),
    }


def _output(tool: str, *arguments: str | Path) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Compile what the arguments name."""
    sys.stdout.write(json.dumps(specialised()) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for argument in sys.argv[1:]:
            architecture, alignment = map(int, argument.split(":"))
            for to_rows in (True, False):
                found = compile_one(architecture, alignment, to_rows=to_rows, folder=Path(folder))
                sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
