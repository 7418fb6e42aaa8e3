"""The Helm chart and the plain manifest say the same, and nothing that Kubernetes does not know."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.test_deploy import DEPLOY, manifests

CHART = DEPLOY / "kubernetes" / "tiered-kv"
SCHEMA = json.loads((Path(__file__).parent / "support" / "kubernetes.schema.json").read_text())
HELM = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is missing: its wheel is of Linux on x86-64 only")
EVERYTHING: dict[str, object] = {
    "image": {"repository": "registry.example:5000/kv", "tag": "1.2", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "registry"}],
    "config": '[[tiers]]\nmedium = "cpu"\ncapacity = "1GiB"\n',
    "socketDirectory": "/srv/kv/socket",
    "blocksDirectory": "/srv/kv/blocks",
    "envFrom": [{"secretRef": {"name": "kv-bucket"}}],
    "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "2Gi"}},
    "nodeSelector": {"nvidia.com/gpu.present": "true", "zone": "a"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "priorityClassName": "system-node-critical",
    "podAnnotations": {"team": "serving"},
    "terminationGracePeriodSeconds": 600,
}


def helm(command: str, values: dict[str, object], folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run helm on the chart with values."""
    (file := folder / "values.yaml").write_text(yaml.safe_dump(values))
    assert HELM is not None
    name = ["tiered-kv"] if command == "template" else []
    return subprocess.run(
        [HELM, command, *name, str(CHART), "--values", str(file)], capture_output=True, text=True, check=False
    )


def rendered(values: dict[str, object], folder: Path) -> list[dict[str, Any]]:
    """Return the objects that the chart makes of values."""
    said = helm("template", values, folder)
    assert said.returncode == 0, said.stderr
    return list(yaml.safe_load_all(said.stdout))


def test_kubernetes_knows_all_that_the_manifest_says() -> None:
    """Each field and its type."""
    for each in manifests():
        jsonschema.validate(each, SCHEMA)


@pytest.mark.parametrize("wrong", [{"terminationGracePeriodSecond": 1}, {"volumes": [{"name": "a"}]}])
def test_a_wrong_field_is_noticed(wrong: dict[str, object]) -> None:
    """A misspelled name, or a volume that is none."""
    server = manifests()[1]
    server["spec"]["template"]["spec"].update(wrong)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(server, SCHEMA)


@needs_helm
def test_the_chart_as_it_is_makes_the_manifest(tmp_path: Path) -> None:
    """With an annotation besides, by which other settings restart the pods."""
    settings, server = rendered({}, tmp_path)
    del server["spec"]["template"]["metadata"]["annotations"]
    assert [settings, server] == manifests()


@needs_helm
def test_a_chart_of_which_every_value_is_set_is_valid(tmp_path: Path) -> None:
    """Kubernetes knows all that comes of it, and each value is in it."""
    objects = rendered(EVERYTHING, tmp_path)
    for each in objects:
        jsonschema.validate(each, SCHEMA)
    settings, server = objects
    template = server["spec"]["template"]
    pod = template["spec"]
    container, volumes = pod["containers"][0], {each["name"]: each for each in pod["volumes"]}
    assert template["metadata"]["annotations"].items() >= {"team": "serving"}.items()
    assert {
        "image": {
            **dict(zip(("repository", "tag"), container["image"].rsplit(":", 1), strict=True)),
            "pullPolicy": container["imagePullPolicy"],
        },
        "config": settings["data"]["tiered-kv.toml"],
        "socketDirectory": volumes["socket"]["hostPath"]["path"],
        "blocksDirectory": volumes["blocks"]["hostPath"]["path"],
        "podAnnotations": EVERYTHING["podAnnotations"],
        **{name: container[name] for name in ("envFrom", "resources")},
        **{name: pod[name] for name in EVERYTHING.keys() & pod.keys()},
    } == EVERYTHING
    assert pod["initContainers"][0]["image"] == container["image"]


@needs_helm
def test_other_settings_restart_the_pods(tmp_path: Path) -> None:
    """Their files are mounted in a way that does not follow the settings."""

    def annotation(config: str) -> str:
        return str(rendered({"config": config}, tmp_path)[1]["spec"]["template"]["metadata"]["annotations"])

    assert annotation("a = 1") != annotation("a = 2")


@needs_helm
def test_a_default_is_taken_out(tmp_path: Path) -> None:
    """As everywhere in Helm: by null."""
    _, server = rendered({"nodeSelector": {"nvidia.com/gpu.present": None, "gpu": "yes"}}, tmp_path)
    assert server["spec"]["template"]["spec"]["nodeSelector"] == {"gpu": "yes"}


@needs_helm
@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"socketDirectory": "run"}, "socketDirectory"), ({"sokcet": "/run"}, "sokcet"), ({"config": ""}, "config")],
)
def test_wrong_values_are_refused(wrong: dict[str, object], named: str, tmp_path: Path) -> None:
    """By name, before anything is made."""
    said = helm("template", wrong, tmp_path)
    assert said.returncode != 0
    assert named in said.stderr


@needs_helm
def test_helm_has_nothing_to_say_against_it(tmp_path: Path) -> None:
    """`helm lint`, strictly."""
    assert HELM is not None
    said = helm("lint", {}, tmp_path)
    assert said.returncode == 0, said.stdout
    assert "[WARNING]" not in said.stdout
