"""The objective's metrics as the documentation lists them."""

from __future__ import annotations

from slipstream.algo.measures.metrics import METRICS, PREFIX
from slipstream.telemetry.registry import Described


def objective_metrics() -> list[Described]:
    """One entry a name; the age histogram is one metric with a label."""
    found: dict[str, Described] = {}
    for metric in METRICS:
        labels = (metric.label.partition("=")[0],) if metric.label else ()
        name = PREFIX + metric.name
        found.setdefault(name, Described(name, "gauge", metric.help, labels))
    return list(found.values())
