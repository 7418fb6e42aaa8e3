"""The page as somebody sees it who looks at it: in a browser, on a phone, at night."""

from contextlib import AsyncExitStack

import pytest
from playwright.async_api import Browser

from tests.support.backends import ScriptedBackend
from tests.support.browser import DESKTOP, PHONE, browser, is_cut_off, looking_at
from tests.support.caches import Recorder, keep, open_cache
from tests.support.engine import MODEL, PAYLOAD_BYTES, Engine, prompt
from tiered_kv import CPUTier, PageServed

CPU = CPUTier(capacity=16 * PAYLOAD_BYTES)
VIEWS = [(size, dark) for size in (DESKTOP, PHONE) for dark in (False, True)]


async def texts_of(started: Browser, address: str) -> list[str]:
    """Return what it says on a desk and on a phone, in the light and in the dark: whole, without an error there."""
    texts, grounds = [], set()
    for size, dark in VIEWS:
        async with looking_at(started, address, size, dark=dark) as (page, wrong):
            await page.wait_for_selector("#chain svg")
            assert not await is_cut_off(page)
            assert wrong == []
            texts.append(await page.inner_text("body"))
            grounds.add(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2
    return texts


@pytest.mark.slow
async def test_it_shows_a_cache_that_works() -> None:
    """On a desk and on a phone, in the light and in the dark: whole, without an error, without another host."""
    seen, engine = Recorder(), Engine()
    async with open_cache(CPU, ScriptedBackend(), engine=engine, emit=seen, page="127.0.0.1:0") as kv:
        await keep(kv, engine, prompt(6))
        await kv.evict(prompt(6)[4:5])
        await kv.load(prompt(6), engine.compute(prompt(6)))
        address = seen.of(PageServed)[0].address
        async with browser() as started:
            for text in await texts_of(started, address):
                assert MODEL.name in text
                assert "All well" in text
            async with looking_at(started, address) as (page, _):
                await page.wait_for_selector("#chain svg")
                for tier in kv.stats().tiers:
                    assert tier.tier in await page.inner_html("#chain")
                assert "removed" in await page.inner_text("#missed")
                assert "4 of 6" in await page.inner_text("#shortfalls")
                assert "now" in await page.inner_html("#ghost")


@pytest.mark.slow
async def test_it_shows_a_cache_that_nobody_has_asked_and_one_in_trouble() -> None:
    """In the same windows: an empty one boasts of nothing, and trouble says in the medium's own words what it is."""
    seen, engine, backend = Recorder(), Engine(), ScriptedBackend()
    async with open_cache(CPU, backend, engine=engine, emit=seen, page="127.0.0.1:0") as kv, browser() as started:
        address = seen.of(PageServed)[0].address
        for text in await texts_of(started, address):
            assert "Nobody has asked yet" in text
            assert "All well" not in text
        for seed in range(3):
            backend.on_write.fail_next(OSError(28, "No space left on a device whose name is long", "/mnt/" + 120 * "x"))
            await keep(kv, engine, prompt(2, seed=seed))
        for text in await texts_of(started, address):
            assert "Trouble in" in text
            assert "no writes" in text
            assert "No space left on a device" in text


@pytest.mark.slow
async def test_it_follows_what_happens() -> None:
    """Without a reload: new traffic, a tier in trouble, and the end of the cache."""
    seen, engine, backend = Recorder(), Engine(), ScriptedBackend()
    async with AsyncExitStack() as stack:
        started = await stack.enter_async_context(browser())
        async with open_cache(CPU, backend, engine=engine, emit=seen, page="127.0.0.1:0") as kv:
            address = seen.of(PageServed)[0].address
            page, _ = await stack.enter_async_context(looking_at(started, address))
            await page.wait_for_selector(".pill:has-text('Nobody has asked yet')")
            boasts = ("All well", "Nothing was missed", "Every prompt was there", "Stores kept")
            assert not [each for each in boasts if each in await page.inner_text("body")]
            await kv.load(prompt(3, seed=7), engine.compute(prompt(3)))
            await page.wait_for_selector("text=never stored")
            for seed in range(3):
                backend.on_write.fail_next(OSError("full"))
                await keep(kv, engine, prompt(2, seed=seed))
            await page.wait_for_selector(".pill.bad:has-text('Trouble in')")
            assert "full" in await page.inner_text("#trouble")
            top_of = "name => document.getElementById(name).getBoundingClientRect().top"
            assert await page.evaluate(top_of, "trouble") < await page.evaluate(top_of, "figures")
            assert not await is_cut_off(page)
        await page.wait_for_selector(".pill.bad:has-text('No answer since')")
