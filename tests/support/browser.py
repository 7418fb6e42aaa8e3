"""Headless Chromium, where one is installed: what people see is looked at as they would."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import pytest
from playwright.async_api import Browser, Page, async_playwright

from tests.support.network import network

_NAMES: Final = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
DESKTOP: Final = (1180, 900)
PHONE: Final = (390, 844)


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Yield one; skip the test, and say how to get it, where there is none."""
    program = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("Chromium is missing: apt-get install chromium-headless-shell")
    with network(changing=False):
        async with async_playwright() as driver:
            started = await driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
            try:
                yield started
            finally:
                await started.close()


@asynccontextmanager
async def looking_at(
    started: Browser, address: str, size: tuple[int, int] = DESKTOP, *, dark: bool = False
) -> AsyncIterator[tuple[Page, list[str]]]:
    """Yield a window that has gone there, and what went wrong in it: errors, and requests to anywhere else."""
    wrong: list[str] = []
    page = await started.new_page(
        viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light"
    )
    page.on("console", lambda said: wrong.append(said.text) if said.type in {"error", "warning"} else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith((address, "data:")) else wrong.append(asked.url))
    await page.goto(address)
    try:
        yield page, wrong
    finally:
        await page.close()


async def is_cut_off(page: Page) -> bool:
    """Say whether a page is wider than its window."""
    is_wider: bool = await page.evaluate("document.documentElement.scrollWidth > innerWidth")
    return is_wider
