"""The documentation as a reader sees it: built, and looked at in a browser."""

import functools
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.browser import DESKTOP, PHONE, browser, is_cut_off, looking_at

pytest.importorskip("mkdocs", reason="mkdocs is missing: pip install '.[docs]'")

REPOSITORY = Path(__file__).parents[1]
PAGES = ("", "how-to/observe/", "how-to/command-line/", "reference/settings-table/", "reference/cache/")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Build the site, and serve it to this host."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(build, check=True, cwd=REPOSITORY)
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder))) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        serving.join()


@pytest.mark.slow
async def test_a_search_finds_the_page(site: str) -> None:
    """Without another host; the first page found is the one that explains the word."""
    async with browser() as started, looking_at(started, site) as (page, wrong):
        await page.fill(".md-search__input", "ghost curve")
        await page.wait_for_selector(".md-search-result__item")
        found = await page.eval_on_selector_all(".md-search-result__link", "links => links.map(link => link.href)")
        assert any("how-to/observe" in each for each in found)
        assert not any("changelog" in each for each in found)
        assert wrong == []


@pytest.mark.slow
async def test_no_page_is_wider_than_its_window(site: str) -> None:
    """On a desk and on a phone."""
    async with browser() as started:
        for size in (DESKTOP, PHONE):
            for path in PAGES:
                async with looking_at(started, site + path, size) as (page, _):
                    assert not await is_cut_off(page), (path, size)
