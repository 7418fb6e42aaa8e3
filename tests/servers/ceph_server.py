"""A real S3-compatible store for tests: one Ceph monitor, one OSD and the RADOS gateway, on loopback."""

import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import obstore
from obstore.store import S3Store

from ports import free_port

ACCESS_KEY, SECRET_KEY = "AKTEST", "SKTESTSECRET"
_PROGRAMS = ("radosgw", "radosgw-admin", "ceph", "ceph-mon", "ceph-osd", "ceph-authtool", "monmaptool", "openssl")
MISSING = "a Ceph gateway is missing: apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common"
_START_WITHIN_S = 180.0  # the gateway makes its pools first: most of a minute where much else runs

_CONFIG = """
[global]
fsid = {fsid}
mon_initial_members = a
mon_host = v2:127.0.0.1:{mon_port}
public_addr = 127.0.0.1
ms_bind_ipv6 = false
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
auth_allow_insecure_global_id_reclaim = false
keyring = {folder}/keyring
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pgp_num = 4
mon_allow_pool_size_one = true
mon_warn_on_pool_no_redundancy = false
mon_max_pg_per_osd = 1000
osd_crush_chooseleaf_type = 0
run_dir = {folder}/run
admin_socket = {folder}/run/$name.asok
log_file = {folder}/log/$name.log
pid_file = {folder}/run/$name.pid
mon_data = {folder}/mon
osd_data = {folder}/osd
[mon.a]
host = localhost
mon_addr = 127.0.0.1:{mon_port}
[osd.0]
osd_objectstore = bluestore
osd_fast_shutdown = true
bluestore_block_create = true
bluestore_block_size = 4294967296
osd_memory_target = 939524096
[client.rgw.a]
rgw_frontends = beast endpoint=127.0.0.1:{port} ssl_endpoint=127.0.0.1:{tls_port} ssl_certificate={folder}/tls.pem
rgw_data = {folder}/rgw
rgw_enable_ops_log = false
rgw_enable_usage_log = false
"""


@dataclass
class CephServer:
    """A running gateway.

    Attributes:
        endpoint: Without TLS.
        tls_endpoint: With the certificate in ``ca_file``, for ``localhost``.
        ca_file: To be trusted.
        folder: Of all its state; ``log`` has its logs.
    """

    endpoint: str
    tls_endpoint: str
    ca_file: Path
    folder: Path

    def make_bucket(self, name: str) -> None:
        """Create a bucket, by a signed PUT of no path in it, and the gateway's pools, by storing an object."""
        store = S3Store(
            name, endpoint=self.endpoint, access_key_id=ACCESS_KEY, secret_access_key=SECRET_KEY, region="us-east-1",
            client_options={"allow_http": True, "timeout": timedelta(seconds=_START_WITHIN_S)},
        )  # fmt: skip
        request = urllib.request.Request(obstore.sign(store, "PUT", "", timedelta(minutes=5)), method="PUT")  # noqa: S310 - loopback
        with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310
            assert response.status == 200
        obstore.put(store, "first", b"object")

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Within, the gateway accepts connections and answers nobody."""
        process = self._process_id("client.rgw.a")
        os.kill(process, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(process, signal.SIGCONT)

    def kill(self) -> None:
        """End the gateway on the spot."""
        _end(self._process_id("client.rgw.a"), signal.SIGKILL)
        self._process_file("client.rgw.a").unlink()

    def start(self) -> None:
        """Start the gateway and wait until it answers; one that ends instead is no longer waited for."""
        self._run("radosgw", "-n", "client.rgw.a")
        try:
            _wait_until(self._has_begun, "the gateway to begin")
            _wait_until(self._answers, "the gateway to answer")
        except (TimeoutError, ChildProcessError) as error:
            error.add_note((self.folder / "log" / "client.rgw.a.log").read_text()[-2000:])
            raise

    def start_all(self) -> None:
        """Make a cluster and start it."""
        admin = ["--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *"]
        users = {
            "mon.": ["--cap", "mon", "allow *"],
            "client.admin": admin,
            "client.rgw.a": ["--cap", "mon", "allow rwx", "--cap", "osd", "allow rwx"],
            "osd.0": ["--cap", "mon", "allow profile osd", "--cap", "osd", "allow *"],
        }
        for number, (name, caps) in enumerate(users.items()):
            create = [] if number else ["--create-keyring"]
            self._run("ceph-authtool", "keyring", *create, "--gen-key", "-n", name, *caps)
        address = self._config("mon_host")
        fsid = self._config("fsid")
        self._run("monmaptool", "--create", "--clobber", "--fsid", fsid, "--addv", "a", f"[{address}]", "monmap")
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", "monmap", "--keyring", "keyring")
        self._run("ceph-mon", "-i", "a")
        osd = str(uuid.uuid4())
        self._run("ceph", "osd", "new", osd, "0")
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._run("ceph-osd", "-i", "0")
        self._make_certificate()
        self.start()
        user = ["--uid=test", "--display-name=test", f"--access-key={ACCESS_KEY}", f"--secret={SECRET_KEY}"]
        self._run("radosgw-admin", "-n", "client.rgw.a", "user", "create", *user)

    def end_all(self) -> None:
        """End what was started, the gateway first."""
        for name in ("client.rgw.a", "osd.0", "mon.a"):
            with suppress(FileNotFoundError, ProcessLookupError):
                process = self._process_id(name)
                os.kill(process, signal.SIGCONT)
                _end(process, signal.SIGKILL)

    def _make_certificate(self) -> None:
        """Make an authority and its certificate for localhost: no client takes an authority's own for a server's.

        Nor, from Python 3.13 on, one of an authority that does not say what its key is for.
        """
        make = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        authority = ["-subj", "/CN=tests", "-addext", "keyUsage=critical,keyCertSign,cRLSign"]
        self._run("openssl", *make, *authority, "-keyout", "ca.key", "-out", "ca.pem")
        names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        signed = ["-addext", "basicConstraints=critical,CA:FALSE", "-CA", "ca.pem", "-CAkey", "ca.key"]
        self._run("openssl", *make, *names, *signed, "-keyout", "server.key", "-out", "server.pem")
        parts = (self.folder / name for name in ("server.key", "server.pem"))
        (self.folder / "tls.pem").write_text("".join(part.read_text() for part in parts))

    def _run(self, program: str, *arguments: str) -> None:
        config = [] if program in ("ceph-authtool", "monmaptool", "openssl") else ["-c", str(self.folder / "ceph.conf")]
        with (self.folder / "log" / "start.log").open("a") as log:
            subprocess.run(
                [program, *arguments, *config],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=True,
                timeout=_START_WITHIN_S,
            )

    def _config(self, name: str) -> str:
        lines = (self.folder / "ceph.conf").read_text().splitlines()
        return next(line.partition(" = ")[2] for line in lines if line.startswith(f"{name} = "))

    def _process_id(self, name: str) -> int:
        return int(self._process_file(name).read_text())

    def _process_file(self, name: str) -> Path:
        return self.folder / "run" / f"{name}.pid"

    def _has_begun(self) -> bool:
        file = self._process_file("client.rgw.a")
        return file.exists() and file.read_text() != ""

    def _has_ended(self) -> bool:
        try:
            return _is_zombie(self._process_id("client.rgw.a"))
        except FileNotFoundError:  # it takes the file along when it ends by itself
            return True

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.endpoint, timeout=5).close()  # noqa: S310 - loopback
        except urllib.error.HTTPError:
            return True
        except OSError:
            if self._has_ended():
                raise ChildProcessError("the gateway ended") from None
            return False
        return True


def is_installed() -> bool:
    """Say whether the programs are there."""
    return all(shutil.which(program) for program in _PROGRAMS)


@contextmanager
def ceph_server(folder: Path) -> Iterator[CephServer]:
    """Yield a server with all its state in ``folder``; its processes end after it, by their ids."""
    for name in ("mon", "osd", "run", "log", "rgw"):
        (folder / name).mkdir(parents=True)
    port, tls_port, mon_port = (free_port() for _ in range(3))
    config = _CONFIG.format(fsid=uuid.uuid4(), folder=folder, port=port, tls_port=tls_port, mon_port=mon_port)
    (folder / "ceph.conf").write_text(config)
    server = CephServer(f"http://127.0.0.1:{port}", f"https://localhost:{tls_port}", folder / "ca.pem", folder)
    try:
        server.start_all()
        yield server
    finally:
        server.end_all()


def _end(process: int, with_signal: signal.Signals) -> None:
    os.kill(process, with_signal)
    _wait_until(lambda: not Path(f"/proc/{process}").exists() or _is_zombie(process), f"process {process} to end")


def _is_zombie(process: int) -> bool:
    with suppress(FileNotFoundError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def _wait_until(holds: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + _START_WITHIN_S
    while not holds():
        if time.monotonic() > give_up:
            raise TimeoutError(f"waited {_START_WITHIN_S:g} s for {what}")
        time.sleep(0.05)
