"""The chart renders, is what Kubernetes' own schemas want, and refuses wrong values by name."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml

from slipstream.config.load import load_config

CONFIGS = Path(__file__).parents[2] / "configs"
Render = Callable[[str], Any]
MINORS = {tuple(each.split(".")[:2]): each for each in kubernetes_validate.utils.all_versions()}
NEWEST = list(MINORS.values())[-3:]
# No schemas of these come with Kubernetes; what we use of them is held here.
CUSTOM = {
    "PodMonitor": ["selector", "podMetricsEndpoints"],
    "PrometheusRule": ["groups"],
    "ScaledObject": ["scaleTargetRef", "minReplicaCount", "maxReplicaCount", "cooldownPeriod", "triggers"],
}


def test_helm_has_nothing_to_say_but_that_there_is_no_icon(chart: Path, case: str) -> None:
    report = helm_python.lint(chart, helm_python.values_from_yaml(case or "{}"), strict=True)
    assert report["errors"] == []
    assert [each["error"] for each in report["messages"]] == ["icon is recommended"]


@pytest.fixture(scope="module", autouse=True)
def quick_schemas() -> Iterator[None]:
    """The validator reads megabytes of definitions anew for each object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            kubernetes_validate.utils,
            "schema_contents",
            functools.cache(kubernetes_validate.utils.schema_contents),
        )
        yield


@pytest.mark.parametrize("version", NEWEST)
def test_every_object_is_what_kubernetes_wants(rendered: Any, version: str) -> None:
    assert rendered.objects
    for each in rendered.objects:
        if each["kind"] in CUSTOM:
            assert sorted(each["spec"]) == sorted(CUSTOM[each["kind"]])
        else:
            kubernetes_validate.validate(each, version, strict=True)


def test_the_schemas_are_those_of_the_three_newest_minors() -> None:
    minors = [tuple(map(int, version.split(".")[:2])) for version in NEWEST]
    assert minors == [(1, minors[0][1] + step) for step in range(3)]
    assert minors[0] >= (1, 35)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ("rollout: {replica: 3}", "'replica' not allowed"),
        ("config: {staleness: {max_stalness: 2}}", "max_stalness"),
        ('config: {staleness: {max_staleness: "2"}}', "/config/staleness/max_staleness"),
        ("learner: {flavour: tpu}", "/learner/flavour"),
        ("learner: {nodes: 0}", "/learner/nodes"),
        ("rollout: {resources: {limits: {memory: lots}}}", "/rollout/resources/limits/memory"),
        ("runName: no/slash", "/runName"),
        ("config: {model: {source: x}}\nconfigText: 'model: {}'", "config and configText"),
        ("redis: {enabled: false}", "redis.url"),
        ("learner: {nodes: 2}", "learner.storage.accessMode"),
    ],
)
def test_a_wrong_value_is_named(values: str, says: str, render: Render) -> None:
    with pytest.raises(helm_python.HelmError) as caught:
        render(values)
    assert says in str(caught.value)


def test_copies_are_current(chart: Path) -> None:
    """The schema follows the config's models; the files are those of the repository."""
    made = runpy.run_path(str(chart.parents[1] / "make_chart.py"))
    stale = [path for path, text in made["copies"]().items() if not path.exists() or path.read_text() != text]
    assert stale == [], "run python k8s/make_chart.py"
    assert made["leftovers"]() == [], "run python k8s/make_chart.py"


def test_every_value_has_a_place_in_a_template(chart: Path) -> None:
    templates = "".join(path.read_text() for path in (chart / "templates").rglob("*") if path.is_file())
    values = yaml.safe_load((chart / "values.yaml").read_text())
    names = {key for value in [values, *values.values()] if isinstance(value, dict) for key in value}
    assert [
        name for name in sorted(names) if f".{name}" not in templates and f'"{name}"' not in templates
    ] == []


def test_the_rendered_config_loads(rendered: Any, tmp_path: Path) -> None:
    text = rendered.named("ConfigMap", "-config")["data"]["config.yaml"]
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    plain = {
        each["name"]: each["value"].replace("$(POD_IP)", "10.0.0.1")
        for each in rendered.container("learner")["env"]
        if "value" in each
    }
    config, _ = load_config(tmp_path / "config.yaml", [], plain)
    assert config.run.name == (rendered.values["runName"] or "sums")
    assert config.network.advertise == "10.0.0.1"


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_config_of_the_repository_passes_through(config: Path, tmp_path: Path, render: Render) -> None:
    text = config.read_text(encoding="utf-8")
    tree = "config:\n" + "".join(f"  {line}\n" for line in text.splitlines())
    for number, values in enumerate([tree, yaml.safe_dump({"configText": text})]):
        file = tmp_path / f"{number}.yaml"
        file.write_text(render(values).named("ConfigMap", "-config")["data"]["config.yaml"])
        assert load_config(file, [], {}) == load_config(config, [], {})


def test_the_schema_is_one_that_validators_read(chart: Path, everything: str) -> None:
    schema = helm_python.Chart.load(chart).schema
    assert schema is not None
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(helm_python.values_from_yaml(everything), schema)


def test_it_packages(chart: Path, tmp_path: Path) -> None:
    archive = helm_python.package(chart, destination=tmp_path)
    with helm_python.Chart.load(archive) as packed:
        assert packed.render(name="sums", namespace="rl")
        assert {each["name"] for each in packed.files} >= {"files/config.yaml", "values-1x8gpu.yaml"}
