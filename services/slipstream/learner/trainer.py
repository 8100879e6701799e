"""One optimizer step: groups in, new weights out, or a reason why there are none.

The global batch is prepared once; micro-batches then add their parts of its one loss and gradient, so how the
batch is cut changes memory and nothing else. Shapes: B samples of the global batch, S of a micro-batch, T
completion tokens, R rows of L tokens, N different (hidden state, next token) pairs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from slipstream.algo.finite import NonFiniteError
from slipstream.algo.metrics import Tally, finish_metrics
from slipstream.algo.objective import objective
from slipstream.algo.prepare import Prepared, add_proximal, prepare
from slipstream.config.rules import objective_of
from slipstream.config.schema import Config
from slipstream.errors import RunHalted
from slipstream.learner import state
from slipstream.learner.batch import Layout, MicroBatch, Scored, micro_batches
from slipstream.learner.collect import global_batch
from slipstream.learner.model import Policy
from slipstream.learner.optimizer import Optimizer
from slipstream.learner.report import Reason, StepReport
from slipstream.staleness import Lost, masks_over_bound

_LOG = logging.getLogger("slipstream.learner")
_MASKED_AGE = "slipstream_objective_masked_age_ratio"


class Trainer:
    """The policy, its optimizer, and the step that joins them.

    Attributes:
        policy: The model.
        optimizer: Its optimizer.
        nonfinite: Steps skipped for a non-finite gradient, in all.
        nonfinite_in_a_row: The same since the last good step.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        """Load the model of a Hugging Face folder.

        Raises:
            UserError: The folder or the device cannot be used.
        """
        torch.set_num_threads(config.learner.threads)
        torch.manual_seed(config.run.seed)
        self._config = config
        self._spec = objective_of(config)
        temperature = self._spec.temperature
        self._temperature = config.sampling.temperature if temperature is None else temperature
        self.policy = Policy(folder, config.model, config.learner.device)
        self.optimizer = Optimizer(self.policy.parameters(), config.learner.optimizer, config.run.steps)
        self._layout = Layout(config.learner.micro_batch_tokens, self.policy.shares, self.policy.pair_cost)
        self.nonfinite = 0
        self.nonfinite_in_a_row = 0

    def step(self, groups: Scored, version: int, lost: Lost = ()) -> StepReport:
        """Train on a batch of groups, once.

        Nothing moves, neither weights nor moments nor weight decay, unless the report says `stepped`.

        Args:
            groups: The global batch, at least one group.
            version: Version of the weights before the step.
            lost: Versions that restarts took out of the line of descent; ages count without them.

        Raises:
            RunHalted: Too many non-finite steps in a row.
            StalenessError: A token of a version that does not exist yet.
        """
        report = StepReport(updates=self.optimizer.updates)
        with report.timed("build"):
            prepared, batches = self._build(groups, version, lost, report)
        try:
            prepared = self._with_proximal(prepared, batches, report)
            tally = self._accumulate(prepared, batches, report)
        except NonFiniteError as error:
            return self._skip_nonfinite(report, str(error))
        report.metrics = finish_metrics(tally)
        if report.metrics.get(_MASKED_AGE) == 1.0:
            return self._skip(report, "too_old", "every token of the batch is over staleness.max_staleness")
        if not prepared.trainable:
            return self._skip(report, "no_gradient", "no sample of the batch can change the gradient")
        with report.timed("optimizer"):
            return self._update(report)

    def tensors(self) -> dict[str, Tensor]:
        """The weights to publish, by Hugging Face name; views, valid until the next step."""
        return self.policy.tensors()

    def save_writers(self) -> dict[str, Callable[[Path], None]]:
        """What a checkpoint holds: for each file name, a function that writes it from a copy of the present state."""
        return state.writers(self)

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint's folder; the next step is what it would have been.

        Raises:
            UserError: The checkpoint is of another model, or lacks a file.
        """
        state.load(self, folder)

    def _build(
        self, groups: Scored, version: int, lost: Lost, report: StepReport
    ) -> tuple[Prepared, list[MicroBatch]]:
        stale = self._config.staleness
        max_age = stale.max_staleness if masks_over_bound(stale.policy) else None
        batch = global_batch(groups, version, max_age, self._component_weights(), lost)
        prepared = prepare(self._spec, batch)
        gradient_B = prepared.gradient_B
        batches = micro_batches(groups, gradient_B.tolist(), self._layout)
        report.groups = len(groups)
        report.skipped_groups = len(groups) - len(torch.unique(batch.groups_B[gradient_B]))
        report.samples, report.gradient_samples = len(gradient_B), int(gradient_B.sum())
        report.completion_tokens = int(batch.lengths_B.sum())
        report.model_tokens = sum(batch.tokens for batch in batches)
        report.padding_tokens = sum(batch.tokens_RL.numel() - batch.tokens for batch in batches)
        report.micro_batches = len(batches)
        return prepared, batches

    def _component_weights(self) -> dict[str, float] | None:
        if self._spec.advantage != "gdpo":
            return None
        return {f.component: f.weight for f in self._config.reward.functions}

    def _with_proximal(self, prepared: Prepared, batches: list[MicroBatch], report: StepReport) -> Prepared:
        """With the logprobs of the policy as it is now, if the objective asks for the whole batch's."""
        if self._spec.proximal != "recompute":
            return prepared
        proximal_BT = torch.zeros(prepared.mask_BT.shape)
        with report.timed("proximal"), torch.no_grad():
            for batch in batches:
                logprobs_ST = self._logprobs(batch)[0].float().cpu()
                columns_T = torch.arange(logprobs_ST.shape[1])
                proximal_BT[batch.samples_S[:, None], columns_T] = logprobs_ST
        return add_proximal(self._spec, prepared, proximal_BT)

    def _accumulate(self, prepared: Prepared, batches: list[MicroBatch], report: StepReport) -> Tally:
        """Add every micro-batch's gradient; returns the metrics' sums over the global batch."""
        tally = prepared.tally
        for batch in batches:
            with report.timed("forward"):
                part = prepared.rows(batch.samples_S).to(self.policy.device)
                width = part.mask_BT.shape[1]
                logprobs_ST, entropy_ST = self._logprobs(batch)
                loss, share = objective(self._spec, part, logprobs_ST[:, :width], entropy_ST[:, :width])
            with report.timed("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
            tally = tally.merge(share)
        return tally

    def _logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Logprobs [S, T] of the samples' actions, and entropies: a metric, and a term of some objectives."""
        return self.policy.logprobs(batch.to(self.policy.device), self._temperature)

    def _update(self, report: StepReport) -> StepReport:
        norm = self.optimizer.gradient_norm()
        report.gradient_norm = norm
        if not math.isfinite(norm):
            return self._skip_nonfinite(report, f"the gradient's norm is {norm}")
        if norm == 0.0:
            return self._skip(report, "zero_gradient", "the gradient is 0 everywhere")
        report.learning_rate = self.optimizer.learning_rate
        self.optimizer.step(norm)
        self.nonfinite_in_a_row = 0
        report.stepped, report.updates = True, self.optimizer.updates
        return report

    def _skip(self, report: StepReport, reason: Reason, detail: str) -> StepReport:
        self.optimizer.forget()
        report.reason, report.detail = reason, detail
        return report

    def _skip_nonfinite(self, report: StepReport, detail: str) -> StepReport:
        self.nonfinite += 1
        self.nonfinite_in_a_row += 1
        limit = self._config.learner.max_nonfinite_steps
        _LOG.warning("step skipped (%d in a row): %s", self.nonfinite_in_a_row, detail)
        if self.nonfinite_in_a_row >= limit:
            raise RunHalted(
                f"{limit} steps in a row were not finite (learner.max_nonfinite_steps); last: {detail}"
            )
        return self._skip(report, "nonfinite", detail)
