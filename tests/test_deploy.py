"""What is in ``deploy/`` speaks of metrics that exist, with labels that they have."""

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.caches import keep, open_cache
from tests.support.engine import PAYLOAD_BYTES, Engine, prompt
from tiered_kv import CPUTier
from tiered_kv.telemetry import Metrics

DASHBOARD = Path(__file__).parents[1] / "deploy" / "grafana" / "tiered-kv.json"
OF_PROMETHEUS = {"instance", "le"}
NEEDS_TROUBLE = {"tier", "call", "reason"}
"""Labels of counters that have no samples before something goes wrong."""
SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}


def expressions() -> list[str]:
    """Return what every panel asks."""
    board: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


async def scraped() -> tuple[set[str], set[str]]:
    """Return the names and labels that a cache with some traffic exports."""
    registry, engine = CollectorRegistry(), Engine()
    async with open_cache(CPUTier(capacity=16 * PAYLOAD_BYTES), engine=engine, metrics=Metrics(registry)) as kv:
        await keep(kv, engine, prompt(4))
        await kv.load(prompt(8), engine.compute(prompt(8)))
        families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    names = {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}
    return names, {label for family in families for sample in family.samples for label in sample.labels}


async def test_each_panel_asks_for_metrics_that_exist() -> None:
    """A metric that is renamed is renamed in the dashboard as well."""
    names, _ = await scraped()
    assert len(expressions()) > 10
    asked = {name for each in expressions() for name in re.findall(r"\btiered_kv_\w+", each)}
    assert asked <= names, asked - names


async def test_each_panel_asks_for_labels_that_exist() -> None:
    """As the metrics have them, or as Prometheus adds them."""
    _, labels = await scraped()
    for each in expressions():
        said = [label for part in re.findall(r"by \(([^)]*)\)", each) for label in part.split(", ")]
        said += re.findall(r"(\w+)=~?\"", each)
        assert set(said) <= labels | OF_PROMETHEUS | NEEDS_TROUBLE, each


def test_panels_do_not_overlap() -> None:
    """Each has its place, its title and what it means."""
    board = json.loads(DASHBOARD.read_text())
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}
    assert len(places) == len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert all(panel["title"] and panel["description"] for panel in board["panels"])
