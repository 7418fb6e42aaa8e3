"""The dashboard's questions, asked of a Prometheus server that scrapes a cache with traffic."""

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from anyio import fail_after
from prometheus_client import CollectorRegistry

from ports import free_port
from tests.support.caches import Recorder, keep, open_cache
from tests.support.engine import PAYLOAD_BYTES, Engine, prompt
from tests.test_deploy import alerts, expressions
from tiered_kv import CPUTier, PageServed
from tiered_kv.telemetry import Metrics


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Run a server that scrapes the page of a cache once a second; yield where its answers are."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is missing: apt-get install prometheus")
    config, port = folder / "prometheus.yml", free_port()
    config.write_text(
        "global: {scrape_interval: 1s}\nscrape_configs:\n"
        f"  - {{job_name: tiered_kv, static_configs: [{{targets: ['{target}']}}]}}\n"
    )
    listen = f"--web.listen-address=127.0.0.1:{port}"
    words = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", listen]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}/api/v1/"
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
async def test_prometheus_answers_every_panel(tmp_path: Path) -> None:
    """Each expression of the dashboard is one to a real server, and those about traffic have an answer."""
    seen, engine = Recorder(), Engine()
    metrics = Metrics(CollectorRegistry(), salts=["tenant"], prefill_tokens_per_s=1e4)
    cpu = CPUTier(capacity=16 * PAYLOAD_BYTES)
    async with (
        AsyncExitStack() as stack,
        open_cache(cpu, engine=engine, emit=seen, page="127.0.0.1:0", metrics=metrics) as kv,
    ):
        target = urlsplit(seen.of(PageServed)[0].address).netloc
        with prometheus(tmp_path, target) as there:
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=there, trust_env=False))

            async def ask(expression: str) -> list[object]:
                for name, value in {"$model": ".*", "$instance": ".*", "$__rate_interval": "1m"}.items():
                    expression = expression.replace(name, value)
                answer = (await client.get("query", params={"query": expression})).json()
                assert answer["status"] == "success", (expression, answer)
                result: list[object] = answer["data"]["result"]
                return result

            async def has_scraped_twice() -> bool:
                try:
                    return bool(await ask("count_over_time(tiered_kv_requested_blocks_total[1m]) >= 2"))
                except (httpx.TransportError, ValueError):  # it answers 503 in words until it is ready
                    return False

            with fail_after(60):
                while not await has_scraped_twice():
                    await keep(kv, engine, prompt(4))
                    await kv.load(prompt(8), engine.compute(prompt(8)))
                    await asyncio.sleep(0.2)  # it scrapes once a second
            answered = [bool(await ask(each)) for each in expressions()]
            assert sum(answered) > len(answered) / 2
            assert [each["alert"] for each in alerts() if await ask(each["expr"])] == []  # nothing is wrong here
