from __future__ import annotations

import json

import pytest
from benchmarks.result import missed, tell


@pytest.mark.parametrize(
    ("figure", "aim", "holds"),
    [
        (2.0, ">= 2", True),
        (1.9, ">= 2", False),
        (2.0, "< 2", False),
        (1.9, "<= 2", True),
        (0, "== 0", True),
        (1, "== 0", False),
    ],
)
def test_an_aim_is_a_comparison_with_its_figure(figure, aim, holds):
    assert (missed({"x": figure}, {"x": aim}) == {}) is holds


def test_a_figure_that_was_not_measured_misses_its_aim():
    assert missed({}, {"x": "> 1"}) == {"x": "not measured, aim > 1"}


def test_the_last_line_is_for_programs(capsys):
    tell("speed", {"x": 1.5, "y": 1.0}, {"x": ">= 2"}, seed=3)
    *before, last = capsys.readouterr().out.splitlines()
    assert before == ["aim missed: x: 1.5, aim >= 2"]
    assert json.loads(last) == {
        "benchmark": "speed",
        "seed": 3,
        "figures": {"x": 1.5, "y": 1.0},
        "aims": {"x": ">= 2"},
    }
