"""One step as one line: for the terminal, for the run's folder and for the metrics page."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from slipstream.learner.descent import Line
from slipstream.learner.intake.wait import Batch
from slipstream.learner.step.step_report import StepReport
from slipstream.learner.step.weightless import trained_of
from slipstream.ledger.counts import Counts
from slipstream.staleness import age


def step_record(
    line: Line, before: int, batch: Batch, report: StepReport, seconds: float, learner: str = ""
) -> dict[str, Any]:
    """What a step did, as plain values.

    Args:
        line: Where the step led.
        before: The learner's version while it trained; ages count from it.
        batch: The step's groups.
        report: The trainer's report.
        seconds: Wall time since the last step, waiting included.
        learner: The incarnation of the learner that made it.
    """
    ages = [age(before, group.oldest_version, line.lost) for group, _ in batch]
    rewards = [reward for group, _ in batch for reward in group.scored_rewards]
    lengths = [sample.tokens for group, _ in batch for sample in group.samples]
    return {
        "time": time.time(),
        "step": line.step,
        "version": line.version,
        "learner": learner,
        "stepped": report.stepped,
        "reward": _mean(rewards),
        "reward_min": min(rewards, default=None),
        "reward_max": max(rewards, default=None),
        "length": _mean(lengths),
        "age_mean": _mean(ages),
        "age_max": max(ages, default=0),
        "groups": len(batch),
        "skipped_groups": report.skipped_groups,
        "skipped_share": 1.0 - report.gradient_samples / report.samples if report.samples else 0.0,
        "updates": report.made,
        "skipped_updates": dict(report.skips),
        "tokens": report.completion_tokens,
        "model_tokens": report.model_tokens,
        "padding_tokens": report.padding_tokens,
        "micro_batches": report.micro_batches,
        "imbalance": round(report.imbalance, 4),
        "learning_rate": report.learning_rate,
        "governor": report.governor,
        "gradient_norm": report.gradient_norm if math.isfinite(report.gradient_norm) else None,
        "seconds": round(seconds, 4),
        "parts": {name: round(value, 4) for name, value in report.seconds.items()},
        "cpu": {name: round(value, 4) for name, value in report.cpu_seconds.items()},
        "generate_seconds": _mean([group.generate_seconds for group, _ in batch]),
        "score_seconds": _mean([group.score_seconds for group, _ in batch]),
        "tickets": [list(ticket) for ticket in trained_of(batch, report)],
        "weights": [tokens for index, tokens in enumerate(report.weights) if index not in report.idle],
        "metrics": report.metrics,
    }


def of_all_groups(counts: Counts, before: int) -> dict[str, Any]:
    """What became of groups and samples up to this step, also of those that reached no batch, for its line.

    Args:
        counts: The ledger's.
        before: Samples that were unscored at the step before.
    """
    return {
        "unscored": sum(counts.unscored.values()) - before,
        "unscored_total": counts.unscored,
        "dropped_total": counts.dropped,
        "failed_total": counts.failed,
    }


def progress_line(record: dict[str, Any], steps: int | None, pace: float) -> str:
    """The step for a person: reward, length, age, gradient, time, where it went, and how long it will still take.

    Args:
        record: What the step did.
        steps: Steps to make, or None when the data decides.
        pace: Seconds that a step takes of late.
    """
    parts = record["parts"]
    wait = parts.get("wait", 0.0)
    work = sum(value for name, value in parts.items() if name != "wait")
    limit = (
        f"  {record['bottleneck']} {record['load'][record['bottleneck']]:.0%}" if "bottleneck" in record else ""
    )
    rest = (steps or 0) - record["step"]
    left = f"  {_duration(rest * pace)} left" if rest > 0 else ""
    lost = f"  unscored {record['unscored']}" if record["unscored"] else ""
    return (
        f"step {record['step']}{f'/{steps}' if steps else ''}  version {record['version']}  "
        f"reward {record['reward']:.3f}  length {record['length']:.1f}  age {record['age_mean']:.1f} "
        f"(max {record['age_max']})  no gradient {record['skipped_groups']}/{record['groups']}  "
        f"{_pull(record)}{lost}  "
        f"{record['seconds']:.2f} s (wait {wait:.2f}, work {work:.2f}){limit}{left}"
    )


def _pull(record: dict[str, Any]) -> str:
    """How hard the step pulled, and where there is a reference how far from it the policy is."""
    norm, kl = record["gradient_norm"], record["metrics"].get("slipstream_objective_kl_nats")
    shown = "not finite" if norm is None else f"{norm:.3g}"
    return f"gradient norm {shown}" + ("" if kl is None else f"  kl {kl:.3g}")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
