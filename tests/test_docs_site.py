"""The documentation as a reader sees it: built, and looked at in a browser."""

import functools
import html
import re
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
PUBLIC = ("tiered_kv.testing.", "tiered_kv.telemetry.", "tiered_kv.integrations.")
ROOMS = "values|settings|media|catalog|memory|tiers|transfers|cache|host"
CUT_OFF = "all => all.filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.textContent)"
PAGES = ("", "how-to/observe/", "how-to/command-line/", "reference/settings-table/", "reference/cache/")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(build, check=True, cwd=REPOSITORY)
    return folder


@pytest.fixture(scope="module")
def site(pages: Path) -> Iterator[str]:
    """Serve it to this host."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(pages))) as server:
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
def test_the_reference_speaks_of_what_is_public_alone(pages: Path) -> None:
    """No name of ours that is private, and no module below those that are imported from; what engines call is first."""
    for path in sorted((pages / "reference").rglob("index.html")):
        text = path.read_text().partition("<article")[2].partition("</article>")[0]
        text = html.unescape(re.sub(r"<[^>]+>", "", text))
        assert re.findall(r"(?<![\w.`/])_[a-z]\w*", text) == [], path
        modules = re.findall(r"\btiered_kv(?:_backends)?\.[a-z]\w*\.\w+", text)
        modules += re.findall(rf"(?<![\w./])(?:{ROOMS})\.[a-z]\w*\.\w+", text)
        assert [each for each in modules if not each.startswith(PUBLIC)] == [], path
    text = (pages / "reference/cache/index.html").read_text()
    calls = re.findall(r'<h\d id="tiered_kv\.cache\.block_cache\.BlockCache\.(\w+)"', text)
    assert calls[:2] == ["load", "store"]
    assert calls[calls.index("register_kv_caches") :].index("lookup")


@pytest.mark.slow
async def test_no_code_is_cut_off_on_a_desk(site: str) -> None:
    """Beside a table of contents and without one."""
    async with browser() as started:
        for width in (1180, 1280, 1600):
            for path in (*PAGES, "explanation/architecture/", "tutorial/", "how-to/why-a-miss/"):
                async with looking_at(started, site + path, (width, 900)) as (page, _):
                    cut = await page.eval_on_selector_all(".md-content pre code", CUT_OFF)
                    assert cut == [], (width, path)


@pytest.mark.slow
async def test_no_page_is_wider_than_its_window(site: str) -> None:
    """On a desk and on a phone."""
    async with browser() as started:
        for size in (DESKTOP, PHONE):
            for path in PAGES:
                async with looking_at(started, site + path, size) as (page, _):
                    assert not await is_cut_off(page), (path, size)
