"""Dashboards: the committed JSON is what the code builds, and every panel asks for metrics that exist."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from slipstream.learner.step.objective_metrics import objective_metrics
from slipstream.telemetry.metrics_page import every_metric

FOLDER = Path(__file__).parents[2] / "k8s" / "grafana"
DASHBOARDS = sorted(FOLDER.glob("*.json"))


def expressions(board: dict) -> list[str]:
    panels = [inner for panel in board["panels"] for inner in (panel, *panel.get("panels", []))]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def test_the_committed_dashboards_are_current():
    if importlib.util.find_spec("grafana_foundation_sdk") is None:
        pytest.skip("grafana-foundation-sdk is missing (extra: test)")
    spec = importlib.util.spec_from_file_location("grafana_build", FOLDER / "build.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = path
    built = module.built()
    assert sorted(built) == [file.name for file in DASHBOARDS]
    for name, text in built.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, "make it anew: python k8s/grafana/build.py"


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_every_panel_asks_for_metrics_that_exist(file):
    known = {each.name: each.kind for section in every_metric(objective_metrics()).values() for each in section}
    asked = expressions(json.loads(file.read_text(encoding="utf-8")))
    assert len(asked) >= 6
    for expression in asked:
        for name in re.findall(r"slipstream_[a-z0-9_]+", expression):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            assert name in known or known.get(base) == "histogram", name
        assert "$run" in expression
