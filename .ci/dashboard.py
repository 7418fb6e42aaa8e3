"""Make docs/images/dashboard.png: what a real Prometheus answers to each panel of the Grafana dashboard.

    python .ci/dashboard.py [--seconds 90]

A real cache with real traffic is scraped; every expression of deploy/grafana/tiered-kv.json is asked as Grafana would.
matplotlib draws the answers, not Grafana. Needs Prometheus: apt-get install prometheus.
"""

import argparse
import asyncio
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import matplotlib as mpl
from PIL import Image
from prometheus_client import CollectorRegistry
from screenshots import IMAGES, SALTS, busy_cache

from tiered_kv.telemetry import Metrics

mpl.use("Agg")
from matplotlib import pyplot as plt  # after it is told not to look for a screen

DASHBOARD = Path(__file__).parents[1] / "deploy" / "grafana" / "tiered-kv.json"
VARIABLES = {"$model": ".*", "$instance": ".*", "$__rate_interval": "10s"}
UNITS = {"short": "", "percentunit": "%", "s": "seconds", "Bps": "bytes / s", "bytes": "bytes"}


async def main(seconds: float) -> None:
    """Have a cache work, scrape it, ask, and draw."""
    metrics = Metrics(CollectorRegistry(), salts=SALTS, prefill_tokens_per_s=8000.0)
    with tempfile.TemporaryDirectory() as folder:
        async with busy_cache(page="127.0.0.1:0", metrics=metrics) as address:
            with prometheus(Path(folder), urlsplit(address).netloc) as there:
                await asyncio.sleep(seconds)
                panels = json.loads(DASHBOARD.read_text())["panels"]
                await asyncio.to_thread(draw, panels, there, seconds)


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Run a server that scrapes a cache's page once a second; yield where its answers are."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\nscrape_configs:\n"
        f"  - {{job_name: tiered_kv, static_configs: [{{targets: ['{target}']}}]}}\n"
    )
    program = shutil.which("prometheus") or "prometheus"
    words = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}/api/v1/"
    finally:
        process.kill()
        process.wait()


def draw(panels: list[dict[str, Any]], there: str, seconds: float) -> None:
    """Draw every panel at its place."""
    rows = 1 + max(panel["gridPos"]["y"] // 8 for panel in panels)
    figure, axes = plt.subplots(rows, 2, figsize=(12, 2.6 * rows), layout="constrained")
    with httpx.Client(base_url=there, trust_env=False) as client:
        stop = time.time()
        for panel in panels:
            place = axes[panel["gridPos"]["y"] // 8][panel["gridPos"]["x"] // 12]
            unit = panel["fieldConfig"]["defaults"]["unit"]
            for target in panel["targets"]:
                for name, points in ask(client, target, stop - seconds, stop):
                    values = [float(y) * (100 if unit == "percentunit" else 1) for _, y in points]
                    if any(values):
                        place.plot([at - stop for at, _ in points], values, label=name, linewidth=1.2)
            place.set_title(panel["title"], loc="left", fontsize=10)
            place.set_ylabel(UNITS.get(unit, unit), fontsize=8)
            place.set_xlim(-seconds, 0)
            place.set_ylim(bottom=0)
            place.tick_params(labelsize=7)
            place.grid(alpha=0.25)
            if place.get_legend_handles_labels()[1]:
                place.legend(fontsize=7, loc="upper left", ncols=2, framealpha=0.6)
            else:
                place.text(0.5, 0.5, "all 0", ha="center", color="gray", transform=place.transAxes)
    figure.supxlabel("seconds; answers of a Prometheus server, drawn by matplotlib and not by Grafana", fontsize=8)
    picture = BytesIO()
    figure.savefig(picture, dpi=85)
    Image.open(picture).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
        IMAGES / "dashboard.png", optimize=True
    )


def ask(client: httpx.Client, target: dict[str, str], start: float, stop: float) -> Iterator[tuple[str, list[Any]]]:
    """Yield the name and the points of each line that an expression gives."""
    expression = target["expr"]
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    asked: dict[str, str | float] = {"query": expression, "start": start, "end": stop, "step": 2}
    answer = client.get("query_range", params=asked).raise_for_status().json()
    for line in answer["data"]["result"]:
        name = target["legendFormat"]
        for label, value in line["metric"].items():
            name = name.replace("{{" + label + "}}", value)
        yield name, line["values"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0)
    asyncio.run(main(parser.parse_args().seconds))
