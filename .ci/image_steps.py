"""Does what `deploy/host/Containerfile` says in a root of its own, and starts what comes of it: `make image`.

Needs no container engine and no registry, but root and overlay mounts: the root is this machine's, below a layer in
memory that takes all that is written. What an image's base brings, a Python of its version, is a virtual environment of
this one. Where it cannot be done, this says why and ends with 0.
"""

import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "deploy" / "host" / "Containerfile"
INSIDE = "TIERED_KV_IMAGE_ROOT"
SETTINGS = """
[[tiers]]
medium = "cpu"
capacity = "16MiB"
[[tiers]]
medium = "nvme"
path = "/var/lib/tiered-kv"
capacity = "64MiB"
[host]
socket = "/run/tiered-kv/kv.sock"
mode = "660"
"""
READY_WITHIN_S = 60


def steps() -> list[tuple[str, str]]:
    """Return the instructions of the file, each with what stands behind it."""
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()
    return [(kind, rest) for kind, _, rest in (line.partition(" ") for line in joined if line)]


def copy_context(to: Path) -> None:
    """Copy what a builder would be sent."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    ignored = [line.rpartition("/")[2] for line in lines if line.startswith("**/")]
    for name in (line[1:] for line in lines if line.startswith("!")):
        if (source := ROOT / name).is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns(*ignored))
        elif not any(fnmatch.fnmatch(name, each) for each in ignored):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to / name)


def build(root: Path) -> None:
    """Do the steps in a root, and start the server as the image would."""
    user = "root"
    environment = {**os.environ, "PATH": f"/opt/base/bin:{os.environ['PATH']}"}
    environment["PIP_RETRIES"] = "0"  # an index that cannot be reached is passed over
    environment.pop("VIRTUAL_ENV", None)

    def inside(*command: str) -> list[str]:
        return ["chroot", f"--userspec={user}", str(root), *command]

    for kind, rest in steps():
        print(f"{kind} {rest}"[:120], flush=True)
        if kind == "FROM":
            (version,) = re.findall(r"python:(\d+\.\d+)", rest)
            if version != "{}.{}".format(*sys.version_info):
                return print(f"not tried: this Python is not {version}")
            subprocess.run(inside(sys.executable, "-m", "venv", "/opt/base"), check=True, env=environment)
            for folder in Path(sys.base_prefix).parents:  # an image's Python is for all users
                (root / folder.relative_to("/")).chmod(0o755)
        elif kind == "COPY":
            copy_context(root / rest.split()[1].lstrip("/"))
        elif kind == "RUN":
            subprocess.run(inside("sh", "-ec", rest), check=True, env=environment)
        elif kind == "USER":
            user = rest
        elif kind == "ENTRYPOINT":
            (root / "etc" / "tiered-kv.toml").write_text(SETTINGS)
            serve(inside, [each.strip('",') for each in shlex.split(rest.strip("[]").replace(",", " "))], environment)
    return None


def serve(inside: Callable[..., list[str]], command: list[str], environment: dict[str, str]) -> None:
    """Start the server, wait until it says that it is ready, and end it as a container engine does."""
    server = subprocess.Popen(inside(*command), env=environment)
    ask = inside("tiered-kv", "status", "--host", "/run/tiered-kv/kv.sock")
    give_up = time.monotonic() + READY_WITHIN_S
    while subprocess.run(ask, env=environment, capture_output=True, check=False).returncode:
        if server.poll() is not None or time.monotonic() > give_up:
            sys.exit(f"the server is not ready after {READY_WITHIN_S} s, or has ended")
        time.sleep(0.5)
    subprocess.run(ask, env=environment, check=True)
    server.terminate()
    if server.wait(READY_WITHIN_S):
        sys.exit(f"the server has ended with {server.returncode}")


def main() -> None:
    """Mount the root and build; or say why that cannot be done here."""
    if root := os.environ.get(INSIDE):
        return build(Path(root))
    folder = Path(tempfile.mkdtemp(prefix="tiered-kv-image-"))
    mounts = (
        f"mount -t tmpfs none {folder} && cd {folder} && mkdir upper work root"
        " && mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root"
        " && mount --rbind /dev root/dev && mount -t proc proc root/proc"
    )
    unshared = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c"]
    try:
        if os.geteuid() or subprocess.run([*unshared, mounts], capture_output=True, check=False).returncode:
            return print("the image's steps were not tried: that takes root, unshare and overlay mounts")
        script = f'{mounts} && exec "$0" "$@"'
        done = subprocess.run(
            [*unshared, script, sys.executable, __file__],
            env={**os.environ, INSIDE: str(folder / "root")},
            check=False,
        )
        sys.exit(done.returncode)
    finally:
        folder.rmdir()


if __name__ == "__main__":
    main()
