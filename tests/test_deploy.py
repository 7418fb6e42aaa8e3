"""What is in ``deploy/`` speaks of metrics, labels, settings and commands that exist."""

import configparser
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.caches import keep, open_cache
from tests.support.engine import PAYLOAD_BYTES, Engine, prompt
from tiered_kv import CPUTier, TieredKVSettings
from tiered_kv.cli.app import app
from tiered_kv.telemetry import Metrics

DASHBOARD = Path(__file__).parents[1] / "deploy" / "grafana" / "tiered-kv.json"
DEPLOY = DASHBOARD.parents[1]
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
    metrics = Metrics(registry, salts=["tenant"], prefill_tokens_per_s=1e4)
    async with open_cache(CPUTier(capacity=16 * PAYLOAD_BYTES), engine=engine, metrics=metrics) as kv:
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


def alerts() -> list[dict[str, Any]]:
    """Return the rules of the alerts."""
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


async def test_each_alert_is_about_metrics_that_exist() -> None:
    """By their names and labels; whoever is woken by one is told what it is, and finds its metric in the guide."""
    names, labels = await scraped()
    guide = (DEPLOY.parent / "docs" / "how-to" / "observe.md").read_text().partition("## All metrics")[0]
    assert len({each["alert"] for each in alerts()}) == len(alerts())
    for each in alerts():
        asked = set(re.findall(r"\btiered_kv_\w+", each["expr"]))
        assert asked
        assert asked <= names, asked - names
        said = re.findall(r"\$labels\.(\w+)", each["annotations"]["summary"])
        said += [label for part in re.findall(r"by \(([^)]*)\)", each["expr"]) for label in part.split(", ")]
        assert set(said) <= labels | OF_PROMETHEUS | NEEDS_TROUBLE
        shown = {re.sub("_bucket$", "", name.removeprefix("tiered_kv_")) for name in asked}
        assert any(f"`{name}`" in guide for name in shown), shown
        assert each["labels"]["severity"] in {"warning", "critical"}


def test_prometheus_takes_the_alerts() -> None:
    """Rules, and the configuration that names them."""
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is missing: apt-get install prometheus")
    for kind, name in (("config", "prometheus.yml"), ("rules", "alerts.yml")):
        said = subprocess.run([promtool, "check", kind, DEPLOY / name], capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stdout + said.stderr


def test_panels_do_not_overlap() -> None:
    """Each has its place, its title and what it means."""
    board = json.loads(DASHBOARD.read_text())
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}
    assert len(places) == len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert all(panel["title"] and panel["description"] for panel in board["panels"])


def test_the_compose_file_fits_what_is_there() -> None:
    """What is mounted exists, the services find each other, and nobody but this host reaches them."""
    folder = DEPLOY
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    mounts = [mount.split(":") for service in services.values() for mount in service["volumes"]]
    assert all((folder / source).exists() for source, *_ in mounts)
    assert {way for *_, way in mounts} == {"ro"}
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service["ports"])
    assert all(re.search(r":v?\d+\.\d+\.\d+$", service["image"]) for service in services.values())
    assert set(services["grafana"]["depends_on"]) <= set(services)
    provisioning = folder / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == f"http://prometheus:{services['prometheus']['ports'][0].rpartition(':')[2]}"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "tiered-kv.yaml").read_text())["providers"]
    (inside,) = [target for source, target, _ in mounts if source.endswith("tiered-kv.json")]
    assert Path(inside).parent == Path(provider["options"]["path"])
    (job,) = yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"]
    (host, _, _), *_ = [target.partition(":") for target in job["static_configs"][0]["targets"]]
    assert any(each.startswith(f"{host}:") for each in services["prometheus"]["extra_hosts"])


# The server of one cache for a host.

SOCKET = "/run/tiered-kv/kv.sock"


def manifests() -> list[dict[str, Any]]:
    """Return the Kubernetes objects."""
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / "daemonset.yaml").read_text()))


@pytest.mark.parametrize("where", ["host", "kubernetes"])
def test_a_server_can_be_started_with_the_settings(where: str) -> None:
    """They are settings of this version, and name the socket and the directory that all else here gives it."""
    text = (DEPLOY / "host" / "tiered-kv.toml").read_text()
    if where == "kubernetes":
        text = manifests()[0]["data"]["tiered-kv.toml"]
    settings = TieredKVSettings.of(tomllib.loads(text))
    assert settings.host.socket == Path(SOCKET)
    assert settings.tiers[1].path == Path("/var/lib/tiered-kv")  # type: ignore[attr-defined] # it is an NVMe tier


def test_the_unit_starts_what_there_is() -> None:
    """A command that exists, with directories that systemd makes, and time enough to write what was stored."""
    unit = configparser.ConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign] # as the documentation of configparser says
    unit.read(DEPLOY / "host" / "tiered-kv.service")
    service = unit["Service"]
    _, *arguments = service["ExecStart"].split()
    assert arguments == ["serve", "--config", "/etc/tiered-kv.toml"]
    assert typer.main.get_command(app).get_command(None, "serve")  # type: ignore[attr-defined] # it is a group
    assert (service["Type"], service["RuntimeDirectory"], service["StateDirectory"]) == ("notify", *["tiered-kv"] * 2)
    assert service["RuntimeDirectoryPreserve"] == "yes"
    assert float(service["WatchdogSec"]) > 0
    assert (
        float(service["TimeoutStopSec"])
        > TieredKVSettings.of({"tiers": ["cpu://?capacity=1MiB"]}).limits.close_timeout_s
    )


def test_containers_share_the_socket_alone() -> None:
    """What engines mount is its directory; the server has the blocks and the settings besides."""
    services = yaml.safe_load((DEPLOY / "host" / "compose.yaml").read_text())["services"]
    assert services["engine-one"]["volumes"] == services["engine-two"]["volumes"] == ["socket:/run/tiered-kv"]
    assert "socket:/run/tiered-kv" in services["kv"]["volumes"]
    pod = manifests()[1]["spec"]["template"]["spec"]
    mounted = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounted)
    assert mounted["socket"] == str(Path(SOCKET).parent)
    assert mounted["settings"] in (DEPLOY / "host" / "Containerfile").read_text()


def test_whoever_asks_whether_a_server_is_ready_asks_the_command_line() -> None:
    """All probes are one command that exists, at the socket; engines are started once a server is ready."""
    services = yaml.safe_load((DEPLOY / "host" / "compose.yaml").read_text())["services"]
    asked = manifests()[1]["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["exec"]["command"]
    assert services["kv"]["healthcheck"]["test"] == ["CMD", *asked]
    assert services["engine-one"]["depends_on"] == {"kv": {"condition": "service_healthy"}}
    assert asked == ["tiered-kv", "status", "--host", SOCKET]
    alive = manifests()[1]["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["exec"]["command"]
    assert alive == ["sh", "-c", f"{' '.join(asked)}; test $? -ne 2"]
    command = typer.main.get_command(app).get_command(None, "status")  # type: ignore[attr-defined] # it is a group
    assert "--host" in [option for each in command.params for option in each.opts]


def test_an_image_is_built_of_the_package_alone() -> None:
    """All that the wheel is made of is sent to the builder, and nothing else: no virtual environment, no repository."""
    root = DEPLOY.parent
    lines = [line for line in (root / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    sent = {line[1:] for line in lines if line.startswith("!")}
    assert lines[0] == "*"
    assert all((root / each).exists() for each in sent)
    project = tomllib.loads((root / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    hook = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["path"]
    needed = {"pyproject.toml", "constraints.txt", hook, "README.md", *project["project"]["license-files"]}
    assert sent == needed | {each.partition("/")[0] for each in wheel}


def test_the_image_has_what_the_manifests_count_on() -> None:
    """The user and group of that number, the extras of these tiers and commands, and the pinned build of torch."""
    file = (DEPLOY / "host" / "Containerfile").read_text()
    pod = manifests()[1]["spec"]["template"]["spec"]
    (uid,) = re.findall(r"useradd --system --uid (\d+) tiered-kv", file)
    assert {pod["securityContext"][each] for each in ("runAsUser", "runAsGroup", "fsGroup")} == {int(uid)}
    services = yaml.safe_load((DEPLOY / "host" / "compose.yaml").read_text())["services"]
    assert services["engine-one"]["group_add"] == [uid]
    (torch,) = re.findall(r'"torch==(\S+)\+cpu"', file)
    assert f"torch=={torch}\n" in (DEPLOY.parent / "constraints.txt").read_text()
    (extras,) = re.findall(r"/src\[(\S+)\]", file)
    assert {"cli", "encryption", "host", "metrics", "page"} <= set(extras.split(","))
    assert set(extras.split(",")) <= set(
        tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )


def test_whoever_ends_a_server_by_force_waits_until_it_has_drained_and_closed() -> None:
    """Each takes `close_timeout_s` at most; what is longer than the default is set in each file."""
    files = [manifests()[0]["data"]["tiered-kv.toml"], (DEPLOY / "host" / "tiered-kv.toml").read_text()]
    (unit,) = re.findall(r"^TimeoutStopSec=(\d+)$", (DEPLOY / "host" / "tiered-kv.service").read_text(), re.MULTILINE)
    services = yaml.safe_load((DEPLOY / "host" / "compose.yaml").read_text())["services"]
    assert services["kv"]["stop_grace_period"] == "2m"
    pod = manifests()[1]["spec"]["template"]["spec"]
    for text in files:
        takes_s = 2 * tomllib.loads(text)["limits"]["close_timeout_s"]
        assert 60 < takes_s < min(120, int(unit), pod["terminationGracePeriodSeconds"])


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """Every key and value in it is one of systemd's."""
    if (verify := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is missing: apt-get install systemd")
    text = (DEPLOY / "host" / "tiered-kv.service").read_text()
    (unit := tmp_path / "tiered-kv.service").write_text(text.replace("/opt/tiered-kv/bin/tiered-kv", sys.executable))
    said = subprocess.run([verify, "verify", unit], capture_output=True, text=True, check=False)
    if "Failed to" in said.stderr and "tiered-kv.service" not in said.stderr:
        pytest.skip(f"systemd-analyze cannot work here ({said.stderr.strip()[:80]}): run it on a host with systemd")
    assert (said.returncode, [line for line in said.stderr.splitlines() if "tiered-kv.service" in line]) == (0, [])
