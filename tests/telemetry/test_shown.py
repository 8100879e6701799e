"""The numbers of a step and of an evaluation that sinks get."""

from __future__ import annotations

import math

from slipstream.telemetry.sinks.shown import evaluation_values, step_values


def test_values_of_a_step():
    record = {
        "step": 4,
        "version": 3,
        "reward": 1.0,
        "unscored": 2,
        "unscored_total": {"timeout": 5},
        "gradient_norm": None,
        "learning_rate": 1e-4,
        "updates": 1,
        "parts": {"wait": 2.0},
        "components": {"exact": 0.5},
        "load": {"train": 0.3},
        "metrics": {
            "slipstream_objective_loss": 3.0,
            'slipstream_objective_trained_tokens_by_age{age="0"}': 4.0,
        },
    }
    values = step_values(record)
    assert values["step/version"] == 3
    assert values["step/unscored"] == 2
    assert values["unscored/timeout"] == 5
    assert values["step/learning_rate"] == 1e-4
    assert "step/gradient_norm" not in values  # it was not finite; None would end the sink
    assert values["reward/exact"] == 0.5
    assert values["seconds/wait"] == 2.0
    assert values["objective/loss"] == 3.0
    assert not any("{" in name for name in values)
    endless = step_values(record | {"reward": math.inf, "metrics": {"slipstream_objective_loss": math.nan}})
    assert "step/reward" not in endless
    assert "objective/loss" not in endless
    assert "step/learning_rate" not in step_values(record | {"updates": 0, "learning_rate": 0.0})


def test_values_of_an_evaluation():
    record = {"set": "holdout", "reward": None, "scored": 0, "unscored": 8, "truncated": 1, "tokens_mean": 3.0}
    values = evaluation_values(record)
    assert values["evaluation/holdout/unscored"] == 8
    assert "evaluation/holdout/reward" not in values  # nothing scored is not a score of 0
    assert evaluation_values(record | {"reward": 0.5})["evaluation/holdout/reward"] == 0.5
