from __future__ import annotations

import json

import pytest
from benchmarks.result import missed, tell, unmeasured


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


@pytest.mark.parametrize("figures", [{}, {"x": None}])
def test_a_figure_that_was_not_measured_neither_meets_nor_misses_its_aim(figures, capsys):
    assert missed(figures, {"x": "> 1"}) == {}
    assert unmeasured(figures, {"x": "> 1"}) == {"x": "> 1"}
    tell("speed", figures, {"x": "> 1"})
    *before, last = capsys.readouterr().out.splitlines()
    assert before == ["aim open: x: not measured, aim > 1"]
    assert json.loads(last)["figures"] == figures


def test_an_aim_that_is_met_does_not_hide_one_that_is_open(capsys):
    tell("speed", {"x": 2.0, "y": None}, {"x": "> 1", "y": "> 1"})
    assert "all aims met" not in capsys.readouterr().out


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
