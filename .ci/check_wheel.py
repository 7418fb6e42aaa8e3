"""Check what users get: the wheel, installed without extras, imports, and imports fast.

The scratch environment links to exactly those distributions of this one that the wheel requires without extras, so that
torch is not installed twice and an import of anything undeclared fails.
"""

import importlib.metadata
import json
import pathlib
import subprocess
import sys
import tempfile
import venv

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("tiered_kv", "tiered_kv_backends")

# Modules that cannot be imported without an extra, or an engine, and which.
NEEDS_EXTRA = {
    "tiered_kv.cli.": "cli",
    "tiered_kv.host.": "host",
    "tiered_kv.integrations.sglang": "SGLang itself",
    "tiered_kv.integrations.transformers": "transformers",
    "tiered_kv.integrations.vllm": "vLLM",
    "tiered_kv.memory.kernels": "cuda",
    "tiered_kv.media.seal": "encryption",
    "tiered_kv.telemetry.prometheus": "metrics",
    "tiered_kv.telemetry.router_": "events",
    "tiered_kv.testing.conformance": "testing",
    "tiered_kv.testing.policy_conformance": "testing",
    "tiered_kv.testing.promises": "testing",
    "tiered_kv.testing.simulation.client": "host",
    "tiered_kv.testing.simulation.planning_clients": "host",
    "tiered_kv.testing.slot_conformance": "testing",
    "tiered_kv_backends.mooncake": "mooncake",
    "tiered_kv_backends.redis": "redis",
    "tiered_kv_backends.s3": "s3",
}

IMPORT_ALL = f"""
import importlib, pkgutil
for package in {PACKAGES}:
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not module.name.startswith({tuple(NEEDS_EXTRA)}):
            importlib.import_module(module.name)
            print(module.name)
"""

IMPORT_COST = """
import json, resource, time, torch
def peak_mib(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
mib, start = peak_mib(), time.perf_counter()
from tiered_kv import TieredKV
print(json.dumps([time.perf_counter() - start, peak_mib() - mib]))
"""


def required_by(*names: str) -> set[str]:
    """Return the installed distributions that ``names`` require without extras, directly or not, and themselves."""
    found: set[str] = set()
    queue = [Requirement(name) for name in names]
    seen: set[tuple[str, frozenset[str]]] = set()
    while queue:
        wanted = queue.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        if key in seen:
            continue
        seen.add(key)
        found.add(key[0])
        for line in importlib.metadata.requires(wanted.name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)
            ):
                queue.append(requirement)
    return found


def link(distribution: str, into: pathlib.Path) -> None:
    """Make one installed distribution importable from the site-packages folder ``into``."""
    for file in importlib.metadata.files(distribution) or []:
        top = file.parts[0]
        target, source = into / top, pathlib.Path(str(file.locate())).parents[len(file.parts) - 1] / top
        if top not in {"..", "__pycache__"} and source.exists() and not target.exists():
            target.symlink_to(source)


def run(python: pathlib.Path, code: str, cwd: str) -> str:
    """Return what ``code`` prints in a new interpreter, isolated from this folder and from the environment."""
    child = subprocess.run([python, "-I", "-c", code], cwd=cwd, check=False, stdout=subprocess.PIPE, text=True)
    if child.returncode:
        sys.exit("The wheel without extras fails in a new interpreter, with the error above.")
    return child.stdout


def main() -> None:
    """Build, install, import and measure; any failure ends with an exception."""
    with tempfile.TemporaryDirectory(prefix="tiered-kv-wheel-") as scratch:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", scratch, str(ROOT)]
        subprocess.run(build, check=True)
        (wheel,) = pathlib.Path(scratch).glob("*.whl")

        venv.create(f"{scratch}/venv", with_pip=False, symlinks=True)
        python = pathlib.Path(scratch, "venv/bin/python")
        site = pathlib.Path(run(python, "import sysconfig; print(sysconfig.get_path('purelib'))", scratch).strip())
        dependencies = required_by("tiered-kv") - {"tiered-kv"}
        for distribution in sorted(dependencies):
            link(distribution, site)
        subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)

        modules = run(python, IMPORT_ALL, scratch).split()
        costs = [json.loads(run(python, IMPORT_COST, scratch)) for _ in range(3)]
        seconds, mib = min(costs)
        beyond_torch = len(dependencies - required_by("torch"))
        print(f"{wheel.name}: {len(modules)} modules imported without extras")
        print(f"beyond torch: import {seconds:.2f} s, {mib:.0f} MiB, {beyond_torch} distributions")


if __name__ == "__main__":
    main()
