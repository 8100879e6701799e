"""What one call of `Trainer.step` did, and what it cost."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.learner.batch.micro_batches import Rows, cost
from slipstream.learner.batch.packing import row_length

Reason = Literal["", "no_gradient", "no_weight", "too_old", "zero_gradient", "nonfinite"]
LOSS = "slipstream_objective_loss"
_WORDS: dict[str, str] = {
    "no_gradient": "no sample of the batch can change the gradient",
    "too_old": "groups of which every token is over staleness.max_staleness",
    "no_weight": "groups of which no token is in the loss",
    "zero_gradient": "the gradient is 0 everywhere",
}
_GRAVEST: tuple[Reason, ...] = ("nonfinite", "zero_gradient", "no_gradient", "no_weight", "too_old")


@dataclass
class StepReport:
    """The outcome of a step.

    Attributes:
        stepped: Whether the weights changed, so that there is a new version.
        reason: Why they did not, the gravest where parts differ: `too_old` (a group's every token is over the age
            bound), `no_weight` (a group has no token in the loss: unscored, masked or empty), `no_gradient` (no
            sample can change the gradient: all rewards equal), `zero_gradient` (computed, and exactly 0) or
            `nonfinite`.
        detail: The reason in words.
        made: Optimizer steps made on parts of the batch.
        skips: How many parts had none, by reason.
        idle: Groups without a part in any update, by their place in the batch, each with its reason.
        current: Places of the groups that are being trained on.
        weights: Tokens of each group that are in the loss and inside the age bound.
        measured_parts: Parts whose loss was measured.
        updates: Updates made so far in the run, this one included.
        learning_rate: Rate of the last update; 0.0 without one.
        gradient_norm: Global norm before clipping, of several parts the largest; not finite if one's was not.
        groups: Groups in the batch; `skipped_groups` of them had no sample with a gradient.
        samples: Samples in the batch; `gradient_samples` of them went through the model.
        completion_tokens: Sampled tokens in the batch.
        model_tokens: Tokens that went through the model; `padding_tokens` came on top.
        micro_batches: Forward passes of a rank; all ranks make as many.
        imbalance: Cost of the busiest rank over the mean of all, less 1; of several parts the largest.
        metrics: Values by their exported name; the loss is the mean over parts.
        governor: What the governor did to this step and made of its effective sample size; empty when it is off.
        seconds: Wall seconds of `build`, `forward`, `backward` and `optimizer`.
        cpu_seconds: The same in CPU seconds of this process.
        logprobs: The learner's, of the samples that were watched and went through the model, by their number.
    """

    stepped: bool = False
    reason: Reason = ""
    detail: str = ""
    made: int = 0
    skips: dict[Reason, int] = field(default_factory=dict)
    idle: dict[int, str] = field(default_factory=dict)
    current: Sequence[int] = ()
    weights: list[int] = field(default_factory=list)
    measured_parts: int = 0
    updates: int = 0
    learning_rate: float = 0.0
    gradient_norm: float = 0.0
    groups: int = 0
    skipped_groups: int = 0
    samples: int = 0
    gradient_samples: int = 0
    completion_tokens: int = 0
    model_tokens: int = 0
    padding_tokens: int = 0
    micro_batches: int = 0
    imbalance: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    governor: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)

    def skip(self, reason: Reason, detail: str = "") -> None:
        """A part of the batch made no step."""
        self.skips[reason] = self.skips.get(reason, 0) + 1
        self.idle |= dict.fromkeys(self.current, reason)
        self.detail = detail or _WORDS.get(reason, "")

    def saw_norm(self, norm: float) -> None:
        """The gradient's norm of a part."""
        if not math.isfinite(norm) or norm > self.gradient_norm:
            self.gradient_norm = norm

    def measured(self, metrics: dict[str, float]) -> None:
        """The metrics of the whole batch, with the sum of the parts' losses in place of their mean."""
        loss = metrics.pop(LOSS)
        self.metrics = {LOSS: loss / self.measured_parts, **metrics} if self.measured_parts else metrics

    def ended(self) -> StepReport:
        """The report itself, once every part has had its turn."""
        self.stepped = self.made > 0
        if not self.stepped:
            self.reason = next(reason for reason in _GRAVEST if reason in self.skips)
        return self

    def count(self, shared: Sequence[Sequence[Rows]], pair_cost: float) -> None:
        """Take note of how a part of the batch is cut, for each rank its micro-batches."""
        every = [rows for share in shared for rows in share]
        tokens = sum(row_length(row) for rows in every for row in rows)
        self.model_tokens += tokens
        self.padding_tokens += int(cost(every, 0.0)) - tokens
        self.micro_batches += max(len(share) for share in shared)
        costs = [cost(share, pair_cost) for share in shared]
        if every:
            self.imbalance = max(self.imbalance, max(costs) * len(costs) / sum(costs) - 1.0)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time spent inside to a part."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - wall
            self.cpu_seconds[part] = self.cpu_seconds.get(part, 0.0) + time.process_time() - cpu
