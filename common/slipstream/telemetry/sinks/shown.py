"""The numbers of a step and of an evaluation, by the names that charts group by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_OF_A_STEP = (
    "version",
    "reward",
    "length",
    "truncated",
    "unscored",
    "age_mean",
    "age_max",
    "tokens",
    "seconds",
    "gradient_norm",
    "updates",
    "skipped_share",
)
_OF_AN_EVALUATION = ("reward", "scored", "unscored", "truncated", "tokens_mean")


def step_values(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step's line, by the names that charts group by; one that is not finite has none."""
    values = {f"step/{name}": record.get(name) for name in _OF_A_STEP}
    if record["updates"]:  # else there was none, which is no rate of 0
        values["step/learning_rate"] = record["learning_rate"]
    values |= {f"unscored/{name}": value for name, value in record.get("unscored_total", {}).items()}
    values |= {f"reward/{name}": value for name, value in record.get("components", {}).items()}
    values |= {f"load/{name}": value for name, value in record.get("load", {}).items()}
    values |= {f"seconds/{name}": value for name, value in record["parts"].items()}
    named = {name.removeprefix("slipstream_objective_"): value for name, value in record["metrics"].items()}
    values |= {f"objective/{name}": value for name, value in named.items() if "{" not in name}
    return _known(values)


def evaluation_values(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an evaluation's line; without a reward where nothing could be scored."""
    values = {f"evaluation/{record['set']}/{name}": record[name] for name in _OF_AN_EVALUATION}
    return _known(values)


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    """Without what is not there, or is not finite: some sinks end at it, and none can draw it."""
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
