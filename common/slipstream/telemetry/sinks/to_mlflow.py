"""MLflow."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slipstream.secrets import hide
from slipstream.telemetry.sinks.sink import Sampled, SinkRun

log = logging.getLogger("slipstream.telemetry")
_TAG = "slipstream.run"
_MANY = 100  # parameters and tags in one call, at most
_MOST = 1000  # metrics in one call
_LONGEST_NAME = 250
_LONGEST = 6000  # characters of a parameter
_LONGEST_TAG = 5000


class MLflow:
    """A run in an experiment, on the server that MLFLOW_TRACKING_URI names. A restart goes on with the run of the
    same name. A parameter cannot change there: where a run goes on with another value, a tag `changed.NAME` says so.
    """

    def __init__(self, experiment: str, run: SinkRun) -> None:
        import mlflow

        self._entities = mlflow.entities
        self._client: Any = mlflow.MlflowClient()
        found = self._find(self._experiment(experiment), run.name)
        self._id: str = found.info.run_id
        self._keeps_samples = True
        self._tell_settings(dict(_flat(run.config)), found.data.params)

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _find(self, experiment: str, run: str) -> Any:
        found = self._client.search_runs([experiment], filter_string=f"tags.`{_TAG}` = '{run}'", max_results=1)
        if not found:
            return self._client.create_run(experiment, run_name=run, tags={_TAG: run})
        self._client.update_run(found[0].info.run_id, status="RUNNING")
        return found[0]

    def _tell_settings(self, settings: dict[str, str], known: Mapping[str, str]) -> None:
        new = [self._entities.Param(name, value) for name, value in settings.items() if name not in known]
        changed = [
            self._entities.RunTag(f"changed.{name}", value[:_LONGEST_TAG])
            for name, value in settings.items()
            if known.get(name, value) != value
        ]
        for start in range(0, max(len(new), len(changed)), _MANY):
            there = slice(start, start + _MANY)
            self._client.log_batch(self._id, params=new[there], tags=changed[there])

    def write(self, step: int, values: Mapping[str, float], samples: Sequence[Sampled]) -> None:
        now = time.time_ns() // 1_000_000
        metrics = [self._entities.Metric(_legal(name), value, now, step) for name, value in values.items()]
        for start in range(0, len(metrics), _MOST):
            self._client.log_batch(self._id, metrics=metrics[start : start + _MOST])
        if samples and self._keeps_samples:
            self._keep(step, samples)

    def _keep(self, step: int, samples: Sequence[Sampled]) -> None:
        """Samples are files, in a store that may be another than that of the numbers, or out of reach."""
        text = "\n\n---\n\n".join(sample.markdown() for sample in samples)
        try:
            self._client.log_text(self._id, text, f"samples/step-{step:06d}.md")
        except Exception as error:  # noqa: BLE001
            self._keeps_samples = False
            log.warning("telemetry.mlflow goes without samples: %s: %s", type(error).__name__, hide(str(error)))

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every setting by its whole path. Empty lists and mappings stand for themselves."""
    entries = tree.items() if isinstance(tree, Mapping) else enumerate(tree if isinstance(tree, list) else ())
    if not (isinstance(tree, Mapping | list) and tree):
        yield _legal(path), (tree if isinstance(tree, str) else json.dumps(tree))[:_LONGEST]
    for key, value in entries:
        yield from _flat(value, f"{path}.{key}" if path else str(key))


def _legal(name: str) -> str:
    """A name as MLflow takes it, which must also be able to name a file."""
    parts = [re.sub(r"[^\w\-. ]", "_", part) for part in name.split("/")]
    return "/".join(part if part.strip(".") else "_" for part in parts)[:_LONGEST_NAME]
