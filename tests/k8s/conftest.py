"""The chart rendered for the ways in which it is used; offline, by Helm's own library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

CHART = Path(__file__).parents[2] / "k8s" / "chart" / "slipstream"
ROLES = ("rollout", "reward", "buffer", "learner")
EVERYTHING = """
runName: "2024"
config: {model: {source: tiny-sorter}, data: {kind: sort_digits}, reward: {functions: [{use: exact_match}]}}
files: {my_reward.py: "def score(completion, task):\\n    return 1.0\\n"}
image: {repository: registry.example/team/slipstream, tag: v7, pullSecrets: [{name: pull}]}
env: [{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hub, key: token, optional: true}}}]
envFrom: [{secretRef: {name: more, optional: true}}]
serviceAccount: {name: trainer, annotations: {owner: team}}
rollout:
  rdma: {rdma/hca: 1}
  priorityClassName: high
  nodeSelector: {pool: gpu}
  tolerations: [{key: nvidia.com/gpu, operator: Exists}]
  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [
    {matchExpressions: [{key: gpu, operator: In, values: [h200]}]}]}}}
  podAnnotations: {note: here}
  env: [{name: NCCL_DEBUG, value: INFO}]
  autoscaling: {enabled: true}
buffer: {replicas: 3, storage: {className: fast}}
learner: {ranksPerNode: 2}
cache: {existingClaim: models}
keys: {existingSecret: curve}
networkPolicy: {judgesTo: [{ipBlock: {cidr: 203.0.113.0/24}}]}
podMonitor: {enabled: true, labels: {release: prometheus}}
prometheusRule: {enabled: true}
dashboards: {enabled: true, annotations: {grafana_folder: slipstream}}
"""
EXTERNAL = """
configText: "{data: {kind: sort_digits}, reward: {functions: [{use: exact_match}]}}"
redis: {enabled: false, url: "rediss://user@books.example:6380/3", existingSecret: books, secretKey: pw}
serviceAccount: {create: false}
networkPolicy: {metricsFrom: [], fetchTo: []}
learner: {storage: {existingClaim: lustre}, nodes: 2}
"""
CASES = {
    "default": "",
    "everything": EVERYTHING,
    "external redis": EXTERNAL,
    "no policies": "networkPolicy: {enabled: false}",
    "1x8gpu": (CHART / "values-1x8gpu.yaml").read_text(encoding="utf-8"),
    "16x8gpu": (CHART / "values-16x8gpu.yaml").read_text(encoding="utf-8"),
}


class Rendered:
    """The objects of one rendered chart."""

    def __init__(self, objects: list[dict[str, Any]], values: dict[str, Any]) -> None:
        self.objects, self.values = objects, values

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.objects if each["kind"] == kind]

    def named(self, kind: str, suffix: str) -> dict[str, Any]:
        (found,) = [each for each in self.of(kind) if each["metadata"]["name"].endswith(suffix)]
        return found

    def workloads(self) -> list[dict[str, Any]]:
        return [each for each in self.objects if each["kind"] in ("Deployment", "StatefulSet", "Job")]

    def pods(self) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        """Name, labels and spec of every pod that the chart makes."""
        for each in self.workloads():
            template = each["spec"]["template"]
            yield each["metadata"]["name"], template["metadata"]["labels"], template["spec"]
        for each in self.of("Pod"):
            yield each["metadata"]["name"], each["metadata"]["labels"], each["spec"]

    def container(self, role: str) -> dict[str, Any]:
        (found,) = [c for _, _, spec in self.pods() for c in spec["containers"] if c["name"] == role]
        return found


def render(values: str, name: str = "sums") -> Rendered:
    """Render as `helm install NAME -n rl` would, with values given as YAML."""
    given = helm_python.values_from_yaml(values) if values else {}
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(given)
        files = chart.render(given, name=name, namespace="rl")
        merged = chart.merge_values(given)
    objects = [
        each
        for path, text in files.items()
        if path.endswith(".yaml")
        for each in yaml.safe_load_all(text)
        if each
    ]
    return Rendered(objects, merged)


@pytest.fixture(scope="session", name="render")
def render_values() -> Callable[..., Rendered]:
    return render


@pytest.fixture(scope="session")
def chart() -> Path:
    return CHART


@pytest.fixture(scope="session", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    """Values of one way in which the chart is used, as YAML."""
    return CASES[request.param]


@pytest.fixture(scope="session")
def everything() -> str:
    return EVERYTHING


@pytest.fixture(scope="session")
def rendered(case: str) -> Rendered:
    return render(case)
