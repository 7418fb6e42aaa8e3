"""What operators' tools take of a bucket in which others may put what they like."""

import asyncio
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tiered_kv.media.inventory import MOST_FOUND_BYTES
from tiered_kv.values.errors import BackendUnavailableError
from tiered_kv.values.keys import salt_digest
from tiered_kv_backends.paths import salt_folder
from tiered_kv_backends.s3 import S3Backend, bucket_upkeep, collect_epochs

PAGES = 30
FOLDER = f"{'a' * 64}/{'b' * 32}/0of1"


class Endless(BaseHTTPRequestHandler):
    """A store whose listing goes on for as long as nobody deletes what the first page had.

    Attributes:
        num_pages: Asked for.
        deleted: What deletions have named.
    """

    protocol_version = "HTTP/1.1"
    num_pages = 0
    deleted = b""

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """List some objects, a tenant's first."""
        kind = type(self)
        kind.num_pages += 1
        salt = salt_folder(salt_digest("ann")) if kind.num_pages == 1 else "c" * 32
        objects = "".join(
            f"<Contents><Key>p/{FOLDER}/{salt}/{kind.num_pages * 1000 + n:064x}</Key><Size>1</Size><ETag>e</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for n in range(1000)
        )
        is_last = bool(kind.deleted) or kind.num_pages == PAGES
        more = "false" if is_last else f"true</IsTruncated><NextContinuationToken>t{kind.num_pages}"
        end = "NextContinuationToken" if not is_last else "IsTruncated"
        self._answer(f"<ListBucketResult><Name>b</Name><IsTruncated>{more}</{end}>{objects}</ListBucketResult>")

    def do_POST(self) -> None:
        """Delete."""
        assert "delete" in parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        type(self).deleted += asked
        keys = re.findall(r"<Key>.*?</Key>", asked.decode())
        self._answer(f"<DeleteResult>{''.join(f'<Deleted>{key}</Deleted>' for key in keys)}</DeleteResult>")

    def _answer(self, text: str) -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def endless() -> Iterator[int]:
    """Serve such a store; yield its port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_a_tenant_is_deleted_as_the_listing_comes(endless: int) -> None:
    """No more than a part of it is kept, so that one which never ends takes time and no memory."""
    settings = {
        "medium": "s3", "url": "s3://b/p", "endpoint": f"http://127.0.0.1:{endless}", "region": "us-east-1",
        "access_key_id": "a", "secret_access_key": "b",
    }  # fmt: skip
    assert await S3Backend.delete_tenant(settings, "ann") == 1000
    assert Endless.num_pages < PAGES
    assert Endless.deleted.count(b"<Key>") == 1000


async def test_so_many_epochs_are_collected_by_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many folders of epochs others make there: one run keeps few of them in mind, the next has the rest."""
    monkeypatch.setattr(bucket_upkeep, "_MOST_EPOCHS", 2)
    for n in range(5):
        block = tmp_path / ("a" * 64) / f"{n:032x}" / "0of1" / ("0" * 32) / ("c" * 64)
        block.parent.mkdir(parents=True)
        block.touch()
    settings = {"medium": "s3", "url": f"file://{tmp_path}"}
    collected = [await collect_epochs(settings, keep_weights=["served"], idle_s=0) for _ in range(4)]
    assert collected == [2, 2, 1, 0]


async def test_no_more_is_read_of_an_object_than_a_record_may_have(tmp_path: Path) -> None:
    """Whoever may write to the bucket puts objects of any length there, by names of ours: what is too long is not read.

    Of one that has grown since it was listed, as much is read as there was.
    """
    planted = tmp_path / FOLDER / ("0" * 32) / ("c" * 64)
    planted.parent.mkdir(parents=True)
    planted.write_bytes(b"begun")
    settings = S3Backend.Settings.of({"medium": "s3", "url": f"file://{tmp_path}"})
    async with S3Backend.inventory(settings) as inventory:
        (found,) = [each async for some in inventory.found() for each in some]
        with planted.open("r+b") as file:
            file.truncate(8 << 20)
        assert await inventory.read(found) == b"begun"
        with planted.open("r+b") as file:
            file.truncate(MOST_FOUND_BYTES + 1)
        (found,) = [each async for some in inventory.found() for each in some]
        assert found.num_bytes == MOST_FOUND_BYTES + 1
        assert await inventory.read(found) == b""


async def test_a_request_that_fails_keeps_no_other_from_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one request could not delete is said once all that others can is gone."""
    monkeypatch.setattr(bucket_upkeep, "_AT_ONCE", 10)
    settings = S3Backend.Settings.of({"medium": "s3", "url": f"file://{tmp_path}"})
    folder = tmp_path / FOLDER / salt_folder(salt_digest("ann"))
    folder.mkdir(parents=True)
    for n in range(50):
        (folder / f"{n:064x}").touch()
    async with S3Backend.inventory(settings) as inventory:
        found = [each async for some in inventory.found() for each in some]
        bad = tmp_path / found[0].where
        bad.unlink()
        (bad / "more").mkdir(parents=True)
        with pytest.raises(BackendUnavailableError, match="delete blocks"):
            await inventory.delete(found)
    assert not any((tmp_path / each.where).exists() for each in found[10:])


async def test_what_went_meanwhile_keeps_no_others(tmp_path: Path) -> None:
    """Whoever else deletes objects between listing and deletion: the rest of them goes, and it is no error."""
    settings = S3Backend.Settings.of({"medium": "s3", "url": f"file://{tmp_path}"})
    folder = tmp_path / FOLDER / salt_folder(salt_digest("ann"))
    folder.mkdir(parents=True)
    objects = [folder / f"{n:064x}" for n in range(50)]
    for each in objects:
        each.touch()
    async with S3Backend.inventory(settings) as inventory:
        found = [each async for some in inventory.found() for each in some]
        objects[0].unlink()
        objects[7].unlink()
        await inventory.delete(found)
    assert not any(each.exists() for each in objects)
    for each in objects:
        each.touch()
    await asyncio.gather(S3Backend.delete_tenant(settings, "ann"), S3Backend.delete_tenant(settings, "ann"))
    assert not any(each.exists() for each in objects)
