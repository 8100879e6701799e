"""The steps of a run as columns for charts, thinned out so that a page of a long run stays small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

MOST_POINTS = 600
Item = TypeVar("Item")
_OBJECTIVE = {
    "zero_variance": "zero_variance_ratio",
    "truncated": "truncated_ratio",
    "entropy": "entropy_nats",
    "ess": "effective_tokens_ratio",
    "k3": "mismatch_k3_nats",
    "masked": "masked_ratio",
}


def per_step(steps: Sequence[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Columns by name, all equally long; None where a step has no such value."""
    rows = [_row(step) for step in thinned(steps, MOST_POINTS)]
    names = ("step", *_row_names())
    return {name: [row.get(name) for row in rows] for name in names}


def thinned(items: Sequence[Item], most: int) -> list[Item]:
    """At most so many of the items, evenly spread, the last one always among them."""
    if len(items) <= most:
        return list(items)
    last = len(items) - 1
    return [items[round(at * last / (most - 1))] for at in range(most)]


def _row_names() -> tuple[str, ...]:
    own = (
        "reward",
        "length",
        "age_mean",
        "age_max",
        "gradient_norm",
        "seconds",
        "wait",
        "tokens_per_second",
        "clip",
    )
    return (*own, *_OBJECTIVE)


def _row(step: dict[str, Any]) -> dict[str, float | None]:
    metrics = step["metrics"]

    def objective(name: str) -> float | None:
        value = metrics.get(f"slipstream_objective_{name}")
        return None if value is None else float(f"{value:.5g}")

    clips = [value for side in ("clip_high_ratio", "clip_low_ratio") if (value := objective(side)) is not None]
    row: dict[str, float | None] = {
        "step": step["step"],
        "wait": step["parts"].get("wait", 0.0),
        "tokens_per_second": round(step["tokens"] / step["seconds"], 2) if step["seconds"] else None,
        "clip": sum(clips) if clips else None,
    }
    row |= {
        name: step[name] for name in ("reward", "length", "age_mean", "age_max", "gradient_norm", "seconds")
    }
    return row | {name: objective(full) for name, full in _OBJECTIVE.items()}
