"""Object stores of other clouds for tests: Azurite, Microsoft's emulator of Azure's, and as much of Google's as we ask.

Google publishes no emulator. Those of others take no objects by the XML API, which is the one that obstore speaks.
"""

import asyncio
import base64
import hashlib
import hmac
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from email.utils import formatdate
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from ports import free_port

BUCKET = "blocks"
TOKEN = "token-of-a-test"  # noqa: S105 - nobody's
_ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of every Azurite: it is in Microsoft's documentation."""
_START_WITHIN_S = 60.0
_FACTS = 'ETag: "1"\r\nLast-Modified: Sun, 22 Nov 2026 00:00:00 GMT\r\n'
_Answer = tuple[str, str, bytes]
"""Status, headers, body."""


class GoogleServer:
    """One bucket in memory, by Google's XML API: objects, ranges of them and listings, for who shows `TOKEN`."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        self.writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = re.search(r"(?i)\r\ncontent-length: *(\d+)", head)
                body = await reader.readexactly(int(length[1]) if length else 0)
                status, headers, answer = self._answer(head, body)
                headers = f"Content-Length: {len(answer)}\r\nDate: {formatdate(usegmt=True)}\r\n{headers}"
                writer.write(f"HTTP/1.1 {status}\r\n{headers}\r\n".encode())
                writer.write(b"" if head.startswith("HEAD") else answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()

    def _answer(self, head: str, body: bytes) -> _Answer:
        method, target, _ = head.partition("\r\n")[0].split(" ")
        bucket, _, name = unquote(urlsplit(target).path).lstrip("/").partition("/")
        if f"Bearer {TOKEN}" not in head:
            return "401 Unauthorized", "", b"<Error><Code>AuthenticationRequired</Code></Error>"
        if bucket != BUCKET:
            return "404 Not Found", "", b"<Error><Code>NoSuchBucket</Code></Error>"
        if not name:
            return "200 OK", "", self._listing(parse_qs(urlsplit(target).query).get("prefix", [""])[0])
        return self._put(name, head, body) if method == "PUT" else self._answer_of(name, method, head)

    def _put(self, name: str, head: str, body: bytes) -> _Answer:
        if name in self.objects and re.search(r"(?i)\r\nx-goog-if-generation-match: *0\r", head):
            return "412 Precondition Failed", "", b"<Error><Code>PreconditionFailed</Code></Error>"
        self.objects[name] = body
        return "200 OK", _FACTS, b""

    def _answer_of(self, name: str, method: str, head: str) -> _Answer:
        if name not in self.objects:
            return "404 Not Found", "", b"<Error><Code>NoSuchKey</Code></Error>"
        if method == "DELETE":
            del self.objects[name]
            return "204 No Content", "", b""
        whole = self.objects[name]
        if (wanted := re.search(r"(?i)\r\nrange: *bytes=(\d+)-(\d+)", head)) is None:
            return "200 OK", _FACTS, whole
        start, end = int(wanted[1]), min(int(wanted[2]), len(whole) - 1)
        if start >= len(whole):
            return "416 Requested Range Not Satisfiable", "", b"<Error><Code>InvalidRange</Code></Error>"
        where = f"Content-Range: bytes {start}-{end}/{len(whole)}\r\n"
        return "206 Partial Content", _FACTS + where, whole[start : end + 1]

    def _listing(self, prefix: str) -> bytes:
        facts = "<LastModified>2026-11-22T00:00:00.000Z</LastModified><ETag>1</ETag>"
        objects = "".join(
            f"<Contents><Key>{name}</Key>{facts}<Size>{len(body)}</Size></Contents>"
            for name, body in sorted(self.objects.items())
            if name.startswith(prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{objects}</ListBucketResult>".encode()


@asynccontextmanager
async def google_server() -> AsyncIterator[dict[str, str]]:
    """Yield the options of a tier that finds a server, which is empty."""
    google = GoogleServer()
    server = await asyncio.start_server(google.serve, "127.0.0.1", 0)
    try:
        yield {"base_url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "bearer_token": TOKEN}
    finally:
        server.close()
        for writer in google.writers:
            writer.transport.abort()


@contextmanager
def azurite(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the options of a tier that finds Azurite, with a container, or skip. It ends by its process id."""
    if (program := shutil.which("azurite-blob")) is None:
        pytest.skip("Azurite is missing: npm install -g azurite")
    port = free_port()
    words = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder)]
    with (folder / "azurite.log").open("wb") as log:
        process = subprocess.Popen([*words, "--skipApiVersionCheck"], stdout=log, stderr=log, cwd=folder)
    try:
        endpoint = f"http://127.0.0.1:{port}/{_ACCOUNT}"
        _wait_until_it_listens(process, port)
        _make_container(endpoint)
        yield {"endpoint": endpoint, "account_name": _ACCOUNT, "account_key": ACCOUNT_KEY}
    finally:
        process.kill()
        process.wait()


def _make_container(endpoint: str) -> None:
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06", "Content-Length": "0"}
    signed = "PUT" + 12 * "\n" + f"x-ms-date:{headers['x-ms-date']}\nx-ms-version:{headers['x-ms-version']}\n"
    signed += f"/{_ACCOUNT}/{_ACCOUNT}/{BUCKET}\nrestype:container"
    key = hmac.digest(base64.b64decode(ACCOUNT_KEY), signed.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(key).decode()}"
    where = f"{endpoint}/{BUCKET}?restype=container"
    urllib.request.urlopen(urllib.request.Request(where, method="PUT", headers=headers), timeout=30).close()  # noqa: S310 - loopback


def _wait_until_it_listens(process: subprocess.Popen[bytes], port: int) -> None:
    give_up = time.monotonic() + _START_WITHIN_S
    while time.monotonic() < give_up and process.poll() is None:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        time.sleep(0.05)  # a poll with a bound: a server does not say when it listens
    raise RuntimeError(f"{process.args!r} did not start")
