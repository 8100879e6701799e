"""The end of a run for a person: what it learned, how fast, how stale, where the time went, where it lies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from slipstream.ledger.counts import Counts, by_reason
from slipstream.run.folder import RunFolder, line_of_descent, read_lines

_HEIGHT = 8
_BLOCKS = " ▁▂▃▄▅▆▇█"
_WIDEST = 64


def print_summary(folder: RunFolder, out: TextIO, counts: Counts | None = None) -> None:
    """Write the summary of a run; a run without steps says so.

    Args:
        folder: The run's.
        out: Where to write.
        counts: What the ledger says became of the groups; without them the newest step's line has to do.
    """
    steps = line_of_descent(read_lines(folder.steps))
    troubles = [*_left_out(counts, steps[-1] if steps else {}), *_warnings(read_lines(folder.warnings))]
    if not steps:
        out.write("\n".join(["", f"no step was made; see {folder.logs}", *troubles, ""]))
        return
    lines = ["", f"run {folder.name}: {len(steps)} steps, {steps[-1]['version']} versions", ""]
    lines += [*curve([step["reward"] for step in steps]), ""]
    lines += _evaluations(read_lines(folder.evaluations))
    lines += _components(steps)
    lines += _speed(steps)
    lines += _staleness(steps)
    lines += _time(steps)
    lines += troubles
    lines += ["", f"folder       {folder.path}   (its weights: slipstream export {folder.path} FOLDER)", ""]
    out.write("\n".join(lines))
    out.flush()


def curve(values: Sequence[float]) -> list[str]:
    """Values between 0 and 1 as a chart of block characters, one column a step (or a few steps)."""
    stride = -(-len(values) // _WIDEST)
    columns = [_mean(values[start : start + stride]) for start in range(0, len(values), stride)]
    top = max(1.0, *columns) if columns else 1.0
    rows = []
    for row in range(_HEIGHT, 0, -1):
        label = f"{top * row / _HEIGHT:5.2f}" if row % 2 == 0 else "     "
        cells = [_BLOCKS[round(8 * min(1.0, max(0.0, value / top * _HEIGHT - row + 1)))] for value in columns]
        rows.append(f"{label} │{''.join(cells)}")
    return ["reward per step", *rows, f" 0.00 └{'─' * len(columns)} step {len(values)}"]


def _evaluations(records: Sequence[dict[str, Any]]) -> list[str]:
    by_set: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        if record["reward"] is not None:  # of none could anything be scored
            by_set[record["set"]].append(record)
    lines = []
    for name, found in by_set.items():
        first, last = min(found, key=_step), max(found, key=_step)
        what = "accuracy" if all(record.get("binary") for record in found) else "mean reward"
        lines.append(
            f"{name:<12} {what} {first['reward']:.3f} (step {first['step']}) -> {last['reward']:.3f} "
            f"(step {last['step']}), {last['scored']} held-out prompts"
        )
    return lines


def _components(steps: Sequence[dict[str, Any]]) -> list[str]:
    """Each reward at the beginning and at the end, where there are several."""
    names = list(dict.fromkeys(name for step in steps for name in step.get("components", {})))
    if len(names) < 2:
        return []
    some = min(10, -(-len(steps) // 2))
    parts = []
    for name in names:
        first, last = (
            _mean([step["components"][name] for step in part if name in step.get("components", {})])
            for part in (steps[:some], steps[-some:])
        )
        parts.append(f"{name} {first:.3f} -> {last:.3f}")
    return [f"rewards      {', '.join(parts)} (first and last {some} steps)"]


def _speed(steps: Sequence[dict[str, Any]]) -> list[str]:
    seconds = sum(step["seconds"] for step in steps)
    tokens = sum(step["tokens"] for step in steps)
    return [
        f"speed        {len(steps) / seconds:.2f} steps/s, {tokens / seconds:.0f} tokens/s, {seconds:.0f} s training"
    ]


def _staleness(steps: Sequence[dict[str, Any]]) -> list[str]:
    mean = _mean([step["age_mean"] for step in steps])
    masked = _mean([step["metrics"].get("slipstream_objective_masked_age_ratio") or 0.0 for step in steps])
    oldest = max(step["age_max"] for step in steps)
    return [
        f"staleness    age {mean:.2f} mean, {oldest} max (of a group's oldest token); {masked:.1%} tokens masked"
    ]


def _time(steps: Sequence[dict[str, Any]]) -> list[str]:
    parts: dict[str, float] = defaultdict(float)
    for step in steps:
        for name, seconds in step["parts"].items():
            parts[name] += seconds
    total = sum(parts.values())
    shares = sorted(parts.items(), key=lambda item: -item[1])
    return [
        "learner time "
        + ", ".join(f"{name} {value / total:.0%}" for name, value in shares if value / total > 0.004)
    ]


def _left_out(counts: Counts | None, last: Mapping[str, Any]) -> list[str]:
    """Groups and samples that taught nothing, by reason; of the whole run, or up to its newest step."""
    if counts is None:
        found = {name: last.get(f"{name}_total", {}) for name in ("dropped", "failed", "unscored")}
    else:
        found = {"dropped": counts.dropped, "failed": counts.failed, "unscored": counts.unscored}
    return [
        f"{name:<12} {sum(reasons.values())} {'samples' if name == 'unscored' else 'groups'} ({by_reason(reasons)})"
        for name, reasons in found.items()
        if reasons
    ]


def _warnings(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The newest stretch of each kind of trouble, and how many there were."""
    stretches: dict[str, list[list[Mapping[str, Any]]]] = defaultdict(list)
    for record in records:
        if not record["over"]:
            stretches[record["kind"]].append([record])
        elif stretches[record["kind"]]:
            stretches[record["kind"]][-1].append(record)
    lines = []
    for found in stretches.values():
        first, last = found[-1][0], found[-1][-1]
        until = f"steps {first['step']} to {last['step']}" if last["over"] else f"since step {first['step']}"
        times = f", {len(found)} times in all" if len(found) > 1 else ""
        lines.append(f"warning      {until}{times}: {first['text']}")
    return lines


def _step(record: dict[str, Any]) -> int:
    return int(record["step"])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
