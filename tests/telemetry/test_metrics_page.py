"""docs/metrics.md says what the code exports."""

from __future__ import annotations

import re
from pathlib import Path

from slipstream.learner.step.objective_metrics import objective_metrics
from slipstream.telemetry.metrics_page import every_metric, markdown

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == markdown(objective_metrics()), (
        "make it anew: slipstream metrics docs > docs/metrics.md"
    )


def test_names_follow_the_conventions():
    metrics = [each for section in every_metric(objective_metrics()).values() for each in section]
    names = [each.name for each in metrics]
    assert len(names) == len(set(names)) > 100
    for each in metrics:
        assert re.fullmatch(r"slipstream_[a-z0-9_]+", each.name)
        assert each.name.endswith("_total") == (each.kind == "counter"), each.name
        assert each.help, each.name
        assert not {"ticket", "sample", "prompt", "version"} & set(each.labels), each.name
