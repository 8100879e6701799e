"""Batches and groups that cannot move the weights: which they are, how they leave, and when there are too many.

A group has weight when a token of it is in the loss and inside the age bound. One without is set aside before the
batch is trained on, and its step is made with others. A batch that has weight and no gradient is no step either: its
groups are dropped by name.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from slipstream.errors import RunHalted
from slipstream.learner.descent import Line
from slipstream.learner.intake.wait import Batch, Intake
from slipstream.learner.parts import Parts
from slipstream.learner.report.concerns import Seen
from slipstream.learner.report.telling import Telling
from slipstream.learner.step.step_report import StepReport
from slipstream.learner.step.weightless import STALE
from slipstream.ledger.records import Aside
from slipstream.staleness import evicts_over_bound
from slipstream.telemetry.logs import Pace

log = logging.getLogger("slipstream.learner")
BATCHES, FEWEST = 20, 512  # of which at least one moves the weights where a group in a hundred could
_SOLVED = 0.9  # share; a few prompts with a wrong gold are wrong for ever


class Idle:
    """Has groups leave by name that moved nothing, and ends a run in which nothing else comes.

    Attributes:
        solved: Whether nothing else comes because nearly every answer is the best that the run has seen: it has
            reached its end before its steps.
    """

    def __init__(self, parts: Parts, intake: Intake, telling: Telling) -> None:
        self._parts = parts
        self._intake = intake
        self._telling = telling
        self._batches: Counter[str] = Counter()
        self._groups: Counter[str] = Counter()
        self._dropped = self._best = 0
        self._pace = Pace(lines=5, seconds=10.0)  # small batches come by the hundred a second
        self.solved = False

    async def set_aside(self, line: Line, batch: Batch, report: StepReport) -> None:
        """Take a batch apart that made no update; what of it can still train is free again.

        Raises:
            RunHalted: `learner.max_idle_batches` batches' worth of groups were dropped since the last update, and
                the run is not `solved`.
        """
        leaving = self._leaving(batch, report.idle)
        await self._intake.set_aside(line.step + 1, batch, leaving)
        self._batches[report.reason] += 1
        metrics = self._parts.metrics
        metrics.skipped.labels(report.reason).inc()
        for reason, count in report.skips.items():
            metrics.skipped_updates.labels(reason).inc(count)
        names = _counted(Counter(report.idle.values()))
        self._pace.warn(
            log,
            "step %d is not made with these %d groups: %s; set aside: %s",
            line.step + 1,
            len(batch),
            report.detail,
            names,
        )
        dropped = sum(each.reason != STALE for each in leaving)
        self._best += sum(
            self._telling.best(batch[at][0]) for at in report.idle if report.idle[at] == "no_gradient"
        )
        if dropped:  # what comes again says nothing of the run
            self._telling.seen(line.step, Seen.idle([group for group, _ in batch], report.reason))
        self._dropped += dropped
        if self._dropped >= self._limit() * self._parts.config.batch.groups:
            self._end(line.step + 1, report)

    def told(self, batch: Batch, report: StepReport) -> dict[str, Any]:
        """What was idle on the way to a step that is made, for its line: batches and groups, by reason."""
        self._leaving(batch, report.idle)
        found = {"idle_batches": dict(self._batches), "idle_groups": dict(self._groups)}
        self._batches, self._groups, self._dropped, self._best = Counter(), Counter(), 0, 0
        return found

    def _leaving(self, batch: Batch, idle: Mapping[int, str]) -> list[Aside]:
        """The groups that leave. What is too old comes again under a policy that drops nothing for its age."""
        self._groups.update(idle.values())
        again = not evicts_over_bound(self._parts.config.staleness.policy)
        groups = [(batch[index][0], reason) for index, reason in sorted(idle.items())]
        return [Aside(group.ticket, group.attempt, why, again and why == STALE) for group, why in groups]

    def _limit(self) -> int:
        """Batches. A fixed number of small ones would end a run in which the next group might have been the one."""
        config = self._parts.config
        return config.learner.max_idle_batches or max(BATCHES, -(-FEWEST // config.batch.groups))

    def _end(self, step: int, report: StepReport) -> None:
        self.solved = self._best >= _SOLVED * self._dropped
        if self.solved:
            log.info(
                "nothing is left to learn: in %d of %d groups for step %d every sample has the highest reward of "
                "this run, and none moves the weights; the run ends here (harder prompts go on: learner.start_from)",
                self._best,
                self._dropped,
                step,
            )
            return
        why = "; ".join(self._telling.concerns) or f"last: {report.detail}"
        raise RunHalted(
            f"nothing moves the weights: {self._dropped} groups were dropped for step {step} "
            f"({_counted(self._groups)}), as many as {self._limit()} batches hold (learner.max_idle_batches): {why}"
        )


def _counted(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
