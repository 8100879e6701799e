"""Writes what the chart holds copies of: its values' schema, the default run, dashboards and alert rules.

`python k8s/make_chart.py` after a change of a setting, of values.yaml, of k8s/grafana or of k8s/prometheus; a test
fails while they differ. A chart may hold no links to files outside it, so it holds copies.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from slipstream.config.schema import Config

K8S = Path(__file__).parent
CHART = K8S / "chart" / "slipstream"

# Where a value's default does not say everything about its type.
QUANTITY = {"anyOf": [{"type": "string", "pattern": r"^[0-9.]+(m|k|[KMGTP]i?)?$"}, {"type": "number"}]}
AT_LEAST_1 = {"type": "integer", "minimum": 1}
FREE: dict[str, Any] = {"type": "object"}
OBJECTS: dict[str, Any] = {"type": "array", "items": {"type": "object"}}
AMOUNT = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]+%$"}]}
ACCESS = {"enum": ["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"]}
BY_KEY: dict[str, Any] = {
    "requests": {"type": "object", "additionalProperties": QUANTITY},
    "limits": {"type": "object", "additionalProperties": QUANTITY},
    "rdma": {"type": "object", "additionalProperties": AT_LEAST_1},
    "flavour": {"enum": ["core", "cpu", "gpu"]},
    "logFormat": {"enum": ["json", "human"]},
    "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "accessMode": ACCESS,
    "maxUnavailable": AMOUNT,
    "replicas": {"type": "integer", "minimum": 0},
    "nodes": AT_LEAST_1,
    "ranksPerNode": AT_LEAST_1,
    "threads": AT_LEAST_1,
    "restarts": {"type": "integer", "minimum": 0},
    "minReplicas": {"type": "integer", "minimum": 0},
    "maxReplicas": AT_LEAST_1,
    "waitShare": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "drainSeconds": {"type": "integer", "minimum": 4, "maximum": 3600},
    "stopSeconds": {"type": "integer", "minimum": 1},
    "cooldownSeconds": {"type": "integer", "minimum": 0},
    "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
    "size": QUANTITY,
    "sharedMemory": QUANTITY,
    "maxMemory": {"type": "string", "pattern": "^[0-9]+(b|kb|mb|gb|k|m|g)?$"},
    "runName": {"type": "string", "pattern": "^([A-Za-z0-9][A-Za-z0-9._-]{0,62})?$"},
    "files": {"type": "object", "additionalProperties": {"type": "string"}},
    "podAnnotations": {"type": "object", "additionalProperties": {"type": "string"}},
    "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    "labels": {"type": "object", "additionalProperties": {"type": "string"}},
    "nodeSelector": {"type": "object", "additionalProperties": {"type": "string"}},
    "affinity": FREE,
    "env": OBJECTS,
    "envFrom": OBJECTS,
    "tolerations": OBJECTS,
    "pullSecrets": OBJECTS,
    "metricsFrom": OBJECTS,
    "fetchTo": OBJECTS,
    "judgesTo": OBJECTS,
}
BY_TYPE = {str: "string", bool: "boolean", int: "integer", float: "number"}


def values_schema() -> dict[str, Any]:
    """The JSON schema of values.yaml: its own keys by their defaults, `config` by the config's models."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    config = Config.model_json_schema()
    definitions = config.pop("$defs")
    schema = _of("", values)
    schema["properties"]["config"] = config
    schema["properties"]["global"] = FREE  # what Helm gives every chart
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema, "$defs": definitions}


def _of(key: str, value: Any) -> dict[str, Any]:
    if key in BY_KEY:
        return dict(BY_KEY[key])
    if isinstance(value, dict):
        properties = {name: _of(name, child) for name, child in value.items()}
        return {"type": "object", "additionalProperties": False, "properties": properties}
    if isinstance(value, list):
        raise SystemExit(f"k8s/make_chart.py: {key} is a list; say in BY_KEY of what")
    return {"type": BY_TYPE[type(value)]}


def copies() -> dict[Path, str]:
    """Every generated file of the chart with its content."""
    made = {
        CHART / "values.schema.json": json.dumps(values_schema(), indent=1, sort_keys=True) + "\n",
        CHART / "files" / "config.yaml": _text(K8S.parent / "configs" / "smollm2-sums.yaml"),
    }
    for source in sorted((K8S / "grafana").glob("*.json")):
        made[CHART / "files" / "grafana" / source.name] = _text(source)
    for source in rule_files():
        made[CHART / "files" / "prometheus" / source.name] = _text(source)
    return made


def rule_files() -> list[Path]:
    """Files of recording and alert rules; tests of rules and server configs lie beside them."""
    found = sorted((K8S / "prometheus").glob("*.y*ml"))
    return [path for path in found if "groups" in (yaml.safe_load(_text(path)) or {})]


def leftovers() -> list[Path]:
    """Files of the chart whose source has gone."""
    kept = copies()
    found = [*(CHART / "files").rglob("*")]
    return [path for path in found if path.is_file() and path not in kept]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


if __name__ == "__main__":
    for path in leftovers():
        path.unlink()
    for path, text in copies().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
