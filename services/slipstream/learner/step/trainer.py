"""One step: groups in, new weights out, or a reason why there are none.

The collected batch is prepared once and makes `learner.n_mini` optimizer steps, each on its part of the groups. In
each the micro-batches add their parts of its one loss and gradient, so how they are cut changes memory and nothing
else. Shapes: B samples of the batch, S of a micro-batch, T completion tokens, R rows of L tokens, N different (hidden
state, next token) pairs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from slipstream.algo.finite import NonFiniteError
from slipstream.algo.measures.metrics import Tally, finish_metrics
from slipstream.algo.minibatch import only
from slipstream.algo.objective import objective
from slipstream.algo.prepare import Prepared
from slipstream.config.rules import objective_of
from slipstream.config.schema import Config
from slipstream.errors import RunHalted, UserError
from slipstream.learner.batch.micro_batches import MicroBatch, Pass, Scored
from slipstream.learner.checkpoint import trainer_state as state
from slipstream.learner.checkpoint.save_together import Writer
from slipstream.learner.model.model import Policy, pick_device
from slipstream.learner.model.precision import autocast_dtype, check_precision, learner_model
from slipstream.learner.model.recompute import prepare_blocks
from slipstream.learner.model.sharding import shard
from slipstream.learner.optimizer.governing import Governor
from slipstream.learner.optimizer.optimizer import Optimizer
from slipstream.learner.optimizer.parameter_groups import freeze, hidden_matrices
from slipstream.learner.publish.outlet import Outlet
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.step.batch_look import BatchLook, look_at
from slipstream.learner.step.cutting import Part
from slipstream.learner.step.preparing import preparing_of
from slipstream.learner.step.step_report import Reason, StepReport
from slipstream.learner.step.step_wire import pack_work
from slipstream.learner.step.weightless import STALE
from slipstream.staleness import Lost

_LOG = logging.getLogger("slipstream.learner")


class Trainer:
    """The policy, its optimizer, and the step that joins them.

    Attributes:
        policy: The model.
        optimizer: Its optimizer.
        nonfinite: Parts of batches skipped because a number was not finite, in all.
        nonfinite_in_a_row: Batches since the last update of which that left nothing.
        outlet: Its weights on their way out.
        saves: Its saves, of this rank's part.
        governor: What its effective sample size changes.
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
        self._temperature = config.sampling.temperature
        self.ranks = Ranks() if ranks is None else ranks
        device = config.learner.device if self.ranks.mesh is None else str(self.ranks.device)
        check_precision(config, pick_device(device), alone=self.ranks.mesh is None)
        lazily = self.ranks.mesh is not None
        self.policy = Policy(folder, learner_model(config), device, config.learner.lora, lazily)
        self.policy.autocast = autocast_dtype(config.learner)
        freeze(self.policy.parameters(), config.learner.freeze)
        prepare_blocks(self.policy.module, config.learner)
        if self.ranks.mesh is not None:
            shard(self.policy.scorer, self.policy.module, self.ranks.mesh, config.learner)
            if self.policy.lazy is not None:
                self.policy.probe()
        trained = self.policy.parameters()
        hidden = hidden_matrices(self.policy.module, trained)
        self.optimizer = Optimizer(
            trained, config.learner.optimizer, config.run.steps, hidden, config.learner.n_mini
        )
        self._preparing = preparing_of(config, self._spec, folder, self.policy, self.ranks)
        self.nonfinite = 0
        self.nonfinite_in_a_row = 0
        self.governor = Governor.of(config)
        self.outlet = Outlet(self.policy, self.ranks)
        self.saves = state.Saves(self.ranks, config.learner.parallel.timeout_seconds)

    def step(self, groups: Scored, version: int, lost: Lost = (), watched: Collection[int] = ()) -> StepReport:
        """Train on a batch of groups, once.

        Nothing moves, neither weights nor moments nor weight decay, unless the report says `stepped`. A batch with a
        group that cannot have weight is not trained on: the report names it, and the step is made with others.

        Args:
            groups: The global batch, at least one group.
            version: Version of the weights before the step.
            lost: Versions that restarts took out of the line of descent; ages count without them.
            watched: Samples, by number, whose logprobs the report is to hold.

        Raises:
            RunHalted: Too many non-finite steps in a row.
            StalenessError: A token of a version that does not exist yet.
        """
        self.ranks.call("step", lambda: pack_work(groups, version, lost))
        report = StepReport(updates=self.optimizer.updates)
        self.governor.begin()
        look = look_at(self._spec, groups, watched)
        report.current = range(len(groups))
        try:
            prepared, groups_B, parts = self._preparing.batch(
                groups, version, lost, self.governor.bound, report
            )
        except NonFiniteError as error:
            self._skip_nonfinite(report, str(error))
            return self._ended(report)
        tally = prepared.tally
        if report.idle:
            report.current = ()
            self._skip(report, "too_old" if STALE in report.idle.values() else "no_weight")
        for part in parts:
            report.current = part.groups
            mini = only(self._spec, prepared, groups_B, part.groups)
            tally = tally.merge(self._mini_step(mini, part, look, report))
        report.measured(finish_metrics(tally))
        if report.made:  # a batch that is no step leaves no trace, or a replay would differ
            report.governor = self.governor.decide(report.metrics)
        return self._ended(report)

    def trial(self, groups: Scored, version: int, lost: Lost = ()) -> None:
        """Everything that a step on these groups would compute, and no update.

        Raises:
            Exception: Whatever such a step would end with. What a step skips by itself, and a mistake in the config,
                are no such end.
        """
        self.ranks.call("trial", lambda: pack_work(groups, version, lost))
        report = StepReport(updates=self.optimizer.updates)
        try:
            look = look_at(self._spec, groups)
            ready = self._preparing.batch(groups, version, lost, self.governor.bound, report)
            for part in ready[2]:
                self._accumulate(only(self._spec, *ready[:2], part.groups), part.passes, look, report)
        except (NonFiniteError, UserError) as error:
            _LOG.info("tried alone: %s", error)
        finally:
            self.optimizer.forget()

    def tensors(self) -> dict[str, Tensor]:
        """The weights by Hugging Face name; see `Outlet.tensors`."""
        return self.outlet.tensors()

    def save_writers(self) -> dict[str, Writer]:
        """What a checkpoint holds: for each file name, a function that writes it from a copy of the present state.

        Rank 0 gets those of all ranks; the others' copies wait, each in its own process, until one is called.
        """
        self.ranks.call("save")
        return self.saves.writers(self)

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint's folder; the next step is what it would have been.

        Raises:
            UserError: The checkpoint is of another model, or lacks a file.
        """
        self.ranks.call("load", lambda: [str(folder).encode()])
        state.load(self, folder, self.ranks)

    def load_weights(self, folder: Path) -> None:
        """Take over a checkpoint's weights and nothing else.

        Raises:
            UserError: The checkpoint is of another model, or lacks a file.
        """
        self.ranks.call("weights", lambda: [str(folder).encode()])
        state.load_weights(self, folder)

    def _mini_step(self, prepared: Prepared, part: Part, look: BatchLook, report: StepReport) -> Tally:
        """One optimizer step, or the reason why there is none; returns what it adds to the metrics."""
        if not prepared.trainable:
            return self._skip(report, "no_gradient")
        try:
            tally = self._accumulate(prepared, part.passes, look, report)
        except NonFiniteError as error:
            return self._skip_nonfinite(report, str(error))
        report.measured_parts += 1
        factor = self.governor.weigh(tally)
        with report.timed("optimizer"):
            self._update(factor, report)
        return tally

    def _accumulate(
        self, prepared: Prepared, batches: Sequence[Pass], look: BatchLook, report: StepReport
    ) -> Tally:
        """Add every micro-batch's gradient; returns the metrics' sums over all of them, of all ranks.

        Ranks go on to the end together, whatever one of them finds, and then decide alike.

        Raises:
            NonFiniteError: A number in the loss is not finite, on this rank or another.
        """
        own, failure = Tally.of({}, {}), ""
        for batch, counts in batches:
            with report.timed("forward"):
                part = prepared.rows(batch.samples_S).to(self.policy.device)
                width = part.mask_BT.shape[1]
                logprobs_ST, entropy_ST, head_STK = self._logprobs(batch, look.heads_BTK)
                loss = logprobs_ST.sum() * 0.0
                try:
                    if counts:
                        cut = (value if value is None else value[:, :width] for value in (entropy_ST, head_STK))
                        loss, share = objective(self._spec, part, logprobs_ST[:, :width], *cut)
                        own = own.merge(share)
                        look.keep(batch, logprobs_ST, report)
                except NonFiniteError as error:
                    failure = str(error)
                    if self.ranks.size == 1:
                        break
            with report.timed("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
        if self.ranks.any(bool(failure)):
            raise NonFiniteError(failure or "on another rank")
        return Tally(self.ranks.add_up(own.sums), self.ranks.largest(own.maxima))

    def _logprobs(self, batch: MicroBatch, heads_BTK: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logprobs [S, T] of the samples' actions, entropies (a metric, and a term of some objectives), and the
        logprobs of the sampler's likeliest ids [S, T, K] where the objective needs them."""
        here = batch.to(self.policy.device)
        if heads_BTK is None:
            return *self.policy.logprobs(here, self._temperature), None
        ids_STK = heads_BTK[batch.samples_S.cpu(), : batch.action_ST.shape[1]]
        return self.policy.with_heads(here, self._temperature, ids_STK.to(self.policy.device))

    def _update(self, factor: float, report: StepReport) -> None:
        norm = self.optimizer.gradient_norm()
        report.saw_norm(norm)
        if not math.isfinite(norm):
            self._skip_nonfinite(report, f"the gradient's norm is {norm}")
        elif norm == 0.0:
            self._skip(report, "zero_gradient")
        else:
            report.learning_rate = self.optimizer.step(norm, factor)
            report.made, report.updates = report.made + 1, self.optimizer.updates

    def _skip(self, report: StepReport, reason: Reason, detail: str = "") -> Tally:
        """No step on this part; returns that it adds nothing to the metrics."""
        self.optimizer.forget()
        report.skip(reason, detail)
        return Tally.of({}, {})

    def _skip_nonfinite(self, report: StepReport, detail: str) -> Tally:
        self.nonfinite += 1
        _LOG.warning("an update is skipped: %s", detail)
        return self._skip(report, "nonfinite", detail)

    def _ended(self, report: StepReport) -> StepReport:
        """The report once every part has had its turn.

        Raises:
            RunHalted: Too many batches in a row made no step because of numbers that were not finite.
        """
        report.ended()
        if report.stepped:
            self.nonfinite_in_a_row = 0
        elif report.reason == "nonfinite":
            self.nonfinite_in_a_row += 1
        limit = self._config.learner.max_nonfinite_steps
        if self.nonfinite_in_a_row >= limit:
            raise RunHalted(
                f"{limit} steps in a row were not finite (learner.max_nonfinite_steps); last: {report.detail}"
            )
        return report
