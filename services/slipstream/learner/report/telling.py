"""What the learner tells of its steps: a line in the run's folder, one for the terminal, and the metrics."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from slipstream.learner.descent import Line
from slipstream.learner.intake.wait import Batch
from slipstream.learner.parts import Parts
from slipstream.learner.report.batch_shape import shape_of
from slipstream.learner.report.bottleneck import BottleneckMeter, Verdict
from slipstream.learner.report.concerns import Concerns, Seen
from slipstream.learner.report.record import of_all_groups, progress_line
from slipstream.learner.report.samples_shown import chosen, shown_step
from slipstream.learner.step.step_report import StepReport
from slipstream.protocol.messages import Group
from slipstream.run.folder import append_line, read_lines
from slipstream.telemetry import tracing
from slipstream.telemetry.logs import know
from slipstream.telemetry.sample_log import SampleLog, is_sent, sampled
from slipstream.telemetry.sinks.shown import step_values
from slipstream.telemetry.sinks.sink import Sampled

log = logging.getLogger("slipstream.learner")
_RECENT_STEPS = 20


class Telling:
    """Tells of each step, and of what limits the run."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._pipeline = BottleneckMeter()
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._per_step = parts.config.telemetry.samples_per_step
        self._samples = SampleLog(parts.folder.samples, parts.config.telemetry.samples_mb)
        self._choice: tuple[int, list[int]] | None = None
        self._concerns = Concerns(parts.config.sampling.max_new_tokens)
        told = read_lines(parts.folder.steps)  # by a learner before this one
        for line in told:
            self._concerns.widen(line.get("reward_min"), line.get("reward_max"))
        self._unscored = sum(sum(line.get("unscored_total", {}).values()) for line in told[-1:])
        parts.metrics.steps.set(parts.config.run.steps or 0)

    def choose(self, batch: Batch, step: int) -> frozenset[int]:
        """Choose what a person is to see of the batch, before it is trained on; returns those samples by number."""
        if not self._per_step:
            return frozenset()
        groups = [group for group, _ in batch]
        index, picked = self._choice = chosen(groups, step, self._per_step)
        before = sum(len(group.samples) for group in groups[:index])
        return frozenset(before + each for each in picked)

    async def step(
        self, line: Line, before: int, batch: Batch, report: StepReport, record: dict[str, Any]
    ) -> None:
        """Tell of one step.

        Args:
            line: Where the step led.
            before: The version that it was trained at.
            batch: Its groups.
            report: The trainer's report.
            record: Its line, as `step_record` made it.
        """
        try:
            await self._tell(line, before, batch, report, record)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            # the step is made and booked: a number that nobody foresaw costs its line, never the run
            log.warning("step %d is not told of in full: %s: %s", line.step, type(error).__name__, error)

    async def _tell(
        self, line: Line, before: int, batch: Batch, report: StepReport, record: dict[str, Any]
    ) -> None:
        verdict = await self._judge(report)
        groups, config = [group for group, _ in batch], self._parts.config
        shape = shape_of(
            groups, before, config.staleness.max_staleness, config.sampling.max_new_tokens, line.lost
        )
        counts = await self._parts.ledger.counts()
        record = record | shape | of_all_groups(counts, self._unscored)
        self._unscored = sum(counts.unscored.values())
        if verdict is not None:
            record |= verdict.as_record()
        append_line(self._parts.folder.steps, record)
        know(step=line.step, version=line.version)
        self._recent.append(record["seconds"])
        pace = sum(self._recent) / len(self._recent)
        log.info("%s", progress_line(record, config.run.steps, pace))
        self.seen(line.step, Seen.of(record))
        self._show(record, verdict)
        self._trace(groups, report)
        samples: list[Sampled] = []
        if self._choice is not None:
            shown = shown_step(batch, self._choice, report.logprobs, self._parts.tokenizer, line.step, before)
            await asyncio.to_thread(self._samples.write, shown)
            samples = sampled(shown) if is_sent(line.step) else []
        self._parts.sinks.write(line.step, step_values(record), samples)

    def seen(self, step: int, seen: Seen) -> None:
        """Warn of what a batch says of the whole run; also to be told of one that became no step.

        Args:
            step: The newest step.
            seen: The batch.
        """
        for concern in self._concerns.see(seen):
            log.log(
                logging.INFO if concern.over else logging.WARNING,
                "%s%s",
                "no longer so: " if concern.over else "",
                concern.text,
            )
            what = {"time": time.time(), "step": step, "kind": concern.kind}
            append_line(self._parts.folder.warnings, what | {"text": concern.text, "over": concern.over})

    @property
    def concerns(self) -> list[str]:
        """What is wrong with the run now, in words."""
        return [concern.text for concern in self._concerns.open]

    def best(self, group: Group) -> bool:
        """Whether nothing can be better than every sample of a group, as far as this run has seen."""
        return self._concerns.best(group)

    def _trace(self, groups: Sequence[Group], report: StepReport) -> None:
        """Each ticket of the step was trained on for as long as the step took."""
        seconds = sum(value for name, value in report.seconds.items() if name not in ("wait", "publish"))
        for group in groups:
            tracing.span("train", group.run, group.ticket, group.attempt, seconds)

    async def _judge(self, report: StepReport) -> Verdict | None:
        if self._pipeline.step(report.seconds):
            state = await self._parts.ledger.state()
            end = state.terms.end_ticket
            ended = state.status != "running" or (end is not None and state.next >= end)
            self._pipeline.look(await self._parts.ledger.members(), ended)
        return self._pipeline.verdict()

    def _show(self, record: dict[str, Any], verdict: Verdict | None) -> None:
        metrics = self._parts.metrics
        metrics.step.set(record["step"])
        metrics.version.set(record["version"])
        metrics.tokens.inc(record["tokens"])
        metrics.samples.inc(record["samples"])
        metrics.groups.inc(record["groups"])
        for name, seconds in record["parts"].items():
            metrics.seconds.labels(name).inc(seconds)
        metrics.updates.inc(record["updates"])
        metrics.skipped_share.set(record["skipped_share"])
        for reason, count in record["skipped_updates"].items():
            metrics.skipped_updates.labels(reason).inc(count)
        for name, value in record["components"].items():
            metrics.component.labels(name).set(value)
        metrics.reward.set(record["reward"])
        metrics.response.set(record["length"])
        norm = record["gradient_norm"]
        metrics.gradient_norm.set(math.nan if norm is None else norm)
        metrics.learning_rate.set(record["learning_rate"])
        metrics.imbalance.set(record["imbalance"])
        if governor := record["governor"]:
            metrics.governor_factor.set(governor["factor"])
            metrics.governor_bound.set(governor["next_bound"])
        metrics.age_mean.set(record["age_mean"])
        metrics.age_max.set(record["age_max"])
        metrics.over_bound.set(record["over_bound_groups"])
        metrics.tokens_over_bound.set(record["over_bound_tokens"])
        metrics.objective(record["metrics"])
        if verdict is not None:
            metrics.limit.set(verdict.limit_ratio)
            for stage, seconds in verdict.seconds.items():
                metrics.stage_seconds.labels(stage).set(seconds)
                metrics.bound.labels(stage).set(verdict.load[stage])
