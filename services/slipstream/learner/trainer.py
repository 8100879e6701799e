"""One optimizer step: groups in, new weights out, or a reason why there are none.

The global batch is prepared once; micro-batches then add their parts of its one loss and gradient, so how the
batch is cut changes memory and nothing else. Shapes: B samples of the global batch, S of a micro-batch, T
completion tokens, R rows of L tokens, N different (hidden state, next token) pairs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
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
from slipstream.learner.batch import Layout, MicroBatch, Pass, Scored, passes, shares
from slipstream.learner.collect import global_batch
from slipstream.learner.model import Policy
from slipstream.learner.optimizer import Optimizer
from slipstream.learner.ranks import Ranks
from slipstream.learner.report import Reason, StepReport
from slipstream.learner.sharding import shard, whole_on_host
from slipstream.learner.wire import pack_work
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
        watched: Samples of the next batch, by number, whose logprobs the report is to hold.
    """

    def __init__(self, config: Config, folder: Path, ranks: Ranks | None = None) -> None:
        """Load the model of a Hugging Face folder.

        Args:
            config: The whole config.
            folder: The model.
            ranks: This process's place among others that train with it; None trains alone.

        Raises:
            UserError: The folder or the device cannot be used.
        """
        torch.set_num_threads(config.learner.threads)
        torch.manual_seed(config.run.seed)
        self._config = config
        self._spec = objective_of(config)
        temperature = self._spec.temperature
        self._temperature = config.sampling.temperature if temperature is None else temperature
        self.ranks = Ranks() if ranks is None else ranks
        device = config.learner.device if self.ranks.mesh is None else str(self.ranks.device)
        self.policy = Policy(folder, config.model, device, config.learner.lora)
        if self.ranks.mesh is not None:
            shard(self.policy.scorer, self.policy.module, self.ranks.mesh, config.learner.parallel)
        self.optimizer = Optimizer(self.policy.parameters(), config.learner.optimizer, config.run.steps)
        self._layout = Layout(config.learner.micro_batch_tokens, self.policy.shares, self.policy.pair_cost)
        self.nonfinite = 0
        self.nonfinite_in_a_row = 0
        self.watched: Collection[int] = ()

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
        self._call_ranks("step", lambda: pack_work(groups, version, lost))
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
        """The weights to publish, by Hugging Face name; views, valid until the next step.

        Of a sharded model rank 0 gets whole tensors in host memory, one gathered after the other; others get none.
        """
        self._call_ranks("tensors")
        if self.ranks.mesh is None:
            return self.policy.tensors()
        return dict(whole_on_host(self.policy.tensors(), self.ranks.leads))

    def save_writers(self) -> dict[str, Callable[[Path], None]]:
        """What a checkpoint holds: for each file name, a function that writes it from a copy of the present state."""
        self._call_ranks("save")
        return state.writers(self)

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint's folder; the next step is what it would have been.

        Raises:
            UserError: The checkpoint is of another model, or lacks a file.
        """
        self._call_ranks("load", lambda: [str(folder).encode()])
        state.load(self, folder)

    def load_weights(self, folder: Path) -> None:
        """Take over a checkpoint's weights and nothing else.

        Raises:
            UserError: The checkpoint is of another model, or lacks a file.
        """
        self._call_ranks("weights", lambda: [str(folder).encode()])
        state.load_weights(self, folder)

    def _call_ranks(self, work: str, frames: Callable[[], list[bytes | memoryview]] | None = None) -> None:
        """Rank 0: have the others do the same; they find out by `ranks.called`."""
        if self.ranks.size > 1 and self.ranks.leads:
            self.ranks.announce(work)
            if frames is not None:
                self.ranks.share(frames())

    def _build(
        self, groups: Scored, version: int, lost: Lost, report: StepReport
    ) -> tuple[Prepared, list[Pass]]:
        stale = self._config.staleness
        max_age = stale.max_staleness if masks_over_bound(stale.policy) else None
        batch = global_batch(groups, version, max_age, self._component_weights(), lost)
        prepared = prepare(self._spec, batch)
        gradient_B = prepared.gradient_B
        shared = shares(groups, gradient_B.tolist(), self._layout, self.ranks.size)
        report.groups = len(groups)
        report.skipped_groups = len(groups) - len(torch.unique(batch.groups_B[gradient_B]))
        report.samples, report.gradient_samples = len(gradient_B), int(gradient_B.sum())
        report.completion_tokens = int(batch.lengths_B.sum())
        report.count(shared, self._layout.pair_cost)
        return prepared, passes(shared, self.ranks.rank)

    def _component_weights(self) -> dict[str, float] | None:
        if self._spec.advantage != "gdpo":
            return None
        return {f.component: f.weight for f in self._config.reward.functions}

    def _with_proximal(self, prepared: Prepared, batches: list[Pass], report: StepReport) -> Prepared:
        """With the logprobs of the policy as it is now, if the objective asks for the whole batch's."""
        if self._spec.proximal != "recompute":
            return prepared
        proximal_BT = torch.zeros(prepared.mask_BT.shape)
        with report.timed("proximal"), torch.no_grad():
            for batch, counts in batches:
                logprobs_ST = self._logprobs(batch)[0].float().cpu()
                columns_T = torch.arange(logprobs_ST.shape[1])
                if counts:
                    proximal_BT[batch.samples_S[:, None], columns_T] = logprobs_ST
            proximal_BT = self.ranks.add_up(proximal_BT)
        return add_proximal(self._spec, prepared, proximal_BT)

    def _accumulate(self, prepared: Prepared, batches: list[Pass], report: StepReport) -> Tally:
        """Add every micro-batch's gradient; returns the metrics' sums over the global batch.

        Ranks go on to the end together, whatever one of them finds, and then decide alike.

        Raises:
            NonFiniteError: A number in the loss is not finite, on this rank or another.
        """
        own, failure = Tally.of({}, {}), ""
        for batch, counts in batches:
            with report.timed("forward"):
                part = prepared.rows(batch.samples_S).to(self.policy.device)
                width = part.mask_BT.shape[1]
                logprobs_ST, entropy_ST = self._logprobs(batch)
                loss = logprobs_ST.sum() * 0.0
                try:
                    if counts:
                        loss, share = objective(self._spec, part, logprobs_ST[:, :width], entropy_ST[:, :width])
                        own = own.merge(share)
                        self._keep_watched(batch, logprobs_ST, report)
                except NonFiniteError as error:
                    failure = str(error)
                    if self.ranks.size == 1:
                        break
            with report.timed("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
        if self.ranks.any(bool(failure)):
            raise NonFiniteError(failure or "on another rank")
        own = Tally(self.ranks.add_up(own.sums), self.ranks.largest(own.maxima))
        return prepared.tally.merge(own)

    def _keep_watched(self, batch: MicroBatch, logprobs_ST: Tensor, report: StepReport) -> None:
        for row, sample in enumerate(batch.samples_S.tolist()):
            if sample in self.watched:
                report.logprobs[sample] = logprobs_ST[row].detach().float().cpu().tolist()

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
