"""What the report shows, as plain values: series, sums, the ledger's equation, samples, provenance."""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from slipstream.cli.look.run_state import newest_evaluations, open_concerns, status_of
from slipstream.cli.look.series import MOST_POINTS, per_step, thinned
from slipstream.cli.look.status import duration
from slipstream.ledger.counts import by_reason
from slipstream.run.folder import RunFolder, line_of_descent, read_lines

if TYPE_CHECKING:
    from slipstream.ledger.counts import Audit, Counts
    from slipstream.ledger.records import RunState

Steps = Sequence[dict[str, Any]]
MOST_SAMPLES, MOST_DROPPED = 120, 40
_TERMS = {
    "in flight": ("issued", "rolling"),
    "scored": ("scored",),
    "buffered": ("buffered", "taken"),
    "trained": ("trained",),
    "dropped": ("dropped",),
    "failed": ("failed",),
}


def reported(
    folder: RunFolder, state: RunState | None, audit: Audit | None, missing: str, there: bool = True
) -> dict[str, Any]:
    """Everything of the page.

    Args:
        folder: The run's.
        state: Where the ledger says that the run stands, if it could be read.
        audit: Its recount.
        missing: Why there is none.
        there: Whether the run is in anybody's hands.
    """
    steps = line_of_descent(read_lines(folder.steps))
    evaluations, warnings = read_lines(folder.evaluations), read_lines(folder.warnings)
    bound = state.terms.max_staleness if state else 0
    rewards = [step["reward"] for step in steps]
    return {
        "run": folder.name,
        "sub": _sub(steps, state, there),
        "lead": " ".join([_lead(steps), *(f"Warning: {text}." for text in open_concerns(warnings))]),
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "release": _release(),
        "bound": bound,
        "unit_rewards": bool(rewards) and min(rewards) >= 0 and max(rewards) <= 1,
        "tiles": _tiles(steps, evaluations, audit),
        "series": per_step(steps),
        "components": _components(steps),
        "evaluations": _evaluations(evaluations),
        "ages": _ages(steps),
        "lengths": _lengths(steps),
        "parts": _parts(steps),
        "stages": _stages(steps),
        "limit": _limit(steps),
        "equation": _equation(audit) if audit else {"missing": missing},
        "samples": thinned(read_lines(folder.samples), MOST_SAMPLES),
        "dropped": thinned(read_lines(folder.dropped), MOST_DROPPED),
        "attempts": _attempts(folder),
        "lost": [f"{first} to {last}" for first, last in state.lost_versions] if state else [],
        "config": folder.config.read_text(encoding="utf-8"),
    }


def _sub(steps: Steps, state: RunState | None, there: bool) -> str:
    status = "" if state is None else status_of(state, there)
    if state is not None and state.finish_reason:
        status += f" ({state.finish_reason})"
    made = f"{len(steps)} steps, version {steps[-1]['version']}" if steps else "no step yet"
    took = f"{duration(sum(step['seconds'] for step in steps))} of training" if steps else ""
    return " · ".join(part for part in (status, made, took) if part)


def _lead(steps: Steps) -> str:
    if not steps:
        return "No step was made yet."
    tenth = max(1, len(steps) // 10)
    first, last = steps[:tenth], steps[-tenth:]
    return (
        f"The mean reward went from {_mean(first, 'reward'):.3f} in the first {_steps(tenth)} to "
        f"{_mean(last, 'reward'):.3f} in the last, the mean length from {_mean(first, 'length'):.0f} to "
        f"{_mean(last, 'length'):.0f} tokens."
    )


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def _tiles(steps: Steps, evaluations: Steps, audit: Audit | None) -> list[dict[str, str]]:
    if not steps:
        return []
    last, tenth = steps[-1], steps[-max(1, len(steps) // 10) :]
    seconds, tokens = sum(s["seconds"] for s in steps), sum(s["tokens"] for s in steps)
    tiles = [_tile("reward", f"{_mean(tenth, 'reward'):.3f}", f"mean of the last {_steps(len(tenth))}")]
    first = {
        record["set"]: record["reward"] for record in reversed(evaluations) if record["reward"] is not None
    }
    for name, found in newest_evaluations(evaluations).items():
        note = f"{first[name]:.3f} at first, {found['scored']} held-out prompts"
        tiles.append(_tile(name, f"{found['reward']:.3f}", note))
    waited = sum(step["parts"].get("wait", 0.0) for step in steps)
    tiles += [
        _tile("tokens/s", f"{tokens / seconds:,.0f}", f"{tokens:,} tokens trained"),
        _tile(
            "steps", f"{last['step']:,}", f"{seconds / len(steps):.2f} s each, {waited / seconds:.0%} waiting"
        ),
        _tile(
            "age",
            f"{_mean(steps, 'age_mean'):.2f}",
            f"updates; oldest token {max(s['age_max'] for s in steps)}",
        ),
    ]
    if "limit_ratio" in last:
        limited = Counter(step["bottleneck"] for step in steps if "bottleneck" in step).most_common(1)[0][0]
        ratios = [step["limit_ratio"] for step in steps if "limit_ratio" in step]
        note = f"of the speed limit; most often {limited}"
        tiles.append(_tile("speed", f"{sum(ratios) / len(ratios):.0%}", note))
    if audit is not None:
        holds = ("holds", "good") if audit.holds else ("broken", "bad")
        tiles.append(_tile("ledger", holds[0], f"{audit.counts.issued:,} groups accounted for", holds[1]))
    return tiles


def _tile(label: str, value: str, note: str, tone: str = "") -> dict[str, str]:
    return {"label": label, "value": value, "note": note, "tone": tone}


def _components(steps: Steps) -> dict[str, list[float | None]]:
    names = sorted({name for step in steps for name in step.get("components", {})})
    return {
        name: _thin_column(steps, lambda step, name=name: step.get("components", {}).get(name))
        for name in names
    }


def _thin_column(steps: Steps, read: Callable[[dict[str, Any]], float | None]) -> list[float | None]:
    return thinned([read(step) for step in steps], MOST_POINTS)


def _evaluations(records: Steps) -> dict[str, list[list[float]]]:
    sets: dict[str, dict[int, float]] = defaultdict(dict)
    for record in records:
        if record["reward"] is not None:
            sets[record["set"]][record["step"]] = record["reward"]
    return {name: [[step, found[step]] for step in sorted(found)] for name, found in sets.items()}


def _ages(steps: Steps) -> dict[str, list[Any]]:
    counts: Counter[int] = Counter()
    for step in steps:
        for age, tokens in step.get("ages", {}).items():
            counts[int(age)] += tokens
    values = list(range(max(counts, default=0) + 1))
    return {"values": values, "labels": [str(age) for age in values], "counts": [counts[age] for age in values]}


def _lengths(steps: Steps) -> dict[str, Any]:
    """Lengths in the first and in the last quarter of the run; only of steps with the newest upper end."""
    known = [step for step in steps if "lengths" in step]
    if not known:
        return {"labels": [], "groups": []}
    longest, bins = known[-1]["longest"], len(known[-1]["lengths"])
    same = [step["lengths"] for step in known if (step["longest"], len(step["lengths"])) == (longest, bins)]
    quarter = max(1, len(same) // 4)
    parts = {"first quarter": same[:quarter], "last quarter": same[-quarter:]}
    groups = [
        {"name": name, "counts": [sum(column) for column in zip(*part, strict=True)]}
        for name, part in parts.items()
    ]
    shown = min(bins, longest + 1)  # with few tokens most bins cannot be reached
    used = [
        at for at in range(bins) if any(length * bins // (longest + 1) == at for length in range(longest + 1))
    ]
    if shown < bins:
        for group in groups:
            group["counts"] = [group["counts"][at] for at in used]
        return {"labels": [str(length) for length in range(longest + 1)], "groups": groups}
    return {"labels": [str(round(at * (longest + 1) / bins)) for at in range(bins)], "groups": groups}


def _parts(steps: Steps) -> list[dict[str, Any]]:
    sums: Counter[str] = Counter()
    for step in steps:
        sums.update(step["parts"])
    return [{"name": name, "value": round(value, 3)} for name, value in sums.most_common() if value > 0]


def _stages(steps: Steps) -> list[dict[str, Any]]:
    known = [step for step in steps if "load" in step]
    if not known:
        return []
    names = list(known[-1]["load"])
    rows = [
        {
            "name": name,
            "load": sum(step["load"].get(name, 0.0) for step in known) / len(known),
            "seconds": sum(step["stages"].get(name, 0.0) for step in known) / len(known),
        }
        for name in names
    ]
    most = max(row["load"] for row in rows)
    return [row | {"limits": row["load"] == most} for row in rows if row["name"] != "data" or row["load"] > 0]


def _limit(steps: Steps) -> str:
    ratios = [step["limit_ratio"] for step in steps if "limit_ratio" in step]
    if not ratios:
        return ""
    share = sum(ratios) / len(ratios)
    limit = "its speed limit, max(T_generate, T_train, T_sync)"
    return f"The run reached {share:.0%} of {limit}: the slowest of these stages was idle for {1 - share:.0%}."


def _equation(audit: Audit) -> dict[str, Any]:
    counts = audit.counts
    terms = [_term(name, states, counts) for name, states in _TERMS.items()]
    if counts.tokens_discarded:
        terms.append(
            {"name": "discarded attempts", "groups": 0, "tokens": counts.tokens_discarded, "reasons": ""}
        )
    return {"terms": terms, "issued": counts.issued, "tokens": counts.tokens_in, "problems": audit.problems}


def _term(name: str, states: Sequence[str], counts: Counts) -> dict[str, Any]:
    reasons = {"dropped": counts.dropped, "failed": counts.failed}.get(name, {})
    return {
        "name": name,
        "groups": sum(counts.groups[state] for state in states),
        "tokens": sum(counts.tokens[state] for state in states),
        "reasons": by_reason(reasons),
    }


def _attempts(folder: RunFolder) -> list[dict[str, Any]]:
    found = []
    for path in sorted((folder.path / "attempts").glob("*/provenance.json")):
        facts = json.loads(path.read_text(encoding="utf-8"))
        git = facts.get("git") or {}
        commit = (git.get("commit") or "")[:10]
        found.append(
            {
                "number": path.parent.name,
                "time": facts.get("time"),
                "code": f"{commit}{' + changes' if git.get('dirty') else ''}"
                if commit
                else f"tree {facts.get('tree', '')[:10]}",
                "python": facts.get("python"),
                "torch": (facts.get("versions") or {}).get("torch"),
                "host": f"{facts.get('host')}, {facts.get('cores')} cores",
                "command": " ".join(facts.get("argv", [])),
            }
        )
    return found


def _mean(steps: Steps, name: str) -> float:
    return sum(step[name] for step in steps) / len(steps)


def _release() -> str:
    try:
        return importlib.metadata.version("slipstream")
    except importlib.metadata.PackageNotFoundError:
        return ""
