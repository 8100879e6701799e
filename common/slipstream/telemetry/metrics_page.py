"""Every metric of every process as Markdown, made from the code."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.telemetry.book import BookMetrics
from slipstream.telemetry.links import show_links
from slipstream.telemetry.metrics import BufferMetrics, LearnerMetrics, Metrics, RewardMetrics, RolloutMetrics
from slipstream.telemetry.registry import Described

_HEAD = """# Metrics

Made from the code by `slipstream metrics docs > docs/metrics.md`. Each process serves these pages on its metrics port
(`network.metrics_port`; under `slipstream up` a free one, listed by `slipstream metrics targets RUN`):

| page | answer |
| --- | --- |
| `/metrics` | everything below, in Prometheus' text format |
| `/healthz` | 200 while the process lives; 503 when its event loop has not turned for 60 s |
| `/readyz` | 200 when it can work; else 503 and what it waits for |
| `/version` | the release, as JSON |

Ready means: it has joined the run, the ledger answers, each of its links has a live peer, and a generator or learner
serves a complete version.

Units stand in the names, `_total` marks what only grows, `_ratio` is a share between 0 and 1. Each page labels all
that it shows with `run`; no metric has a label for a sample, a prompt or a ticket. The dashboards (`k8s/grafana/`)
and the alerts (`k8s/prometheus/`) use these names and the labels `role` and `process`, which the scrape config
gives; what to do about an alert is in [the runbook](runbook.md).
"""
_SECTIONS = {
    "Learner": "Levels are those of the last step.",
    "Objective": "Shown by the learner once a step has them; what they mean is in [objective.md](objective.md).",
    "Rollout": "Of each generator replica.",
    "Reward": "Of each reward replica.",
    "Buffer": "Of each shard.",
    "Ledger": "Shown by every buffer shard, since it outlives the others; take the maximum over shards.",
    "Every process": "Beside these, the `process_*` metrics of prometheus-client: CPU, memory, open files.",
}


def every_metric(objective: Sequence[Described]) -> dict[str, list[Described]]:
    """Metrics by section; those of the objective come from the learner, which alone may know them."""
    common = Metrics()
    show_links(common, {}, [])
    book = Metrics()
    own = {metric.name for metric in book.described}
    BookMetrics(book)
    roles = {
        "Learner": LearnerMetrics().described,
        "Objective": list(objective),
        "Rollout": RolloutMetrics().described,
        "Reward": RewardMetrics().described,
        "Buffer": BufferMetrics().described,
        "Ledger": book.described,
    }
    sections = {name: [each for each in found if each.name not in own] for name, found in roles.items()}
    return sections | {"Every process": common.described}


def markdown(objective: Sequence[Described]) -> str:
    """The page."""
    parts = [_HEAD]
    for section, metrics in every_metric(objective).items():
        rows = [f"| `{each.name}{_labels(each)}` | {each.kind} | {each.help} |" for each in metrics]
        parts.append(f"## {section}\n{_SECTIONS[section]}\n\n| metric | kind | what |\n| --- | --- | --- |")
        parts[-1] += "\n" + "\n".join(rows) + "\n"
    return "\n".join(parts)


def _labels(metric: Described) -> str:
    return "{" + ", ".join(metric.labels) + "}" if metric.labels else ""
