"""Scored groups to a prepared batch: everything that is settled before the first optimizer step on it.

The reference's logprobs come first where the KL is part of the reward, for then they change the advantages of whole
groups; where it is part of the loss, only samples with weight are scored, in the passes that train. The proximal
policy's come last. Shapes: B samples of the batch, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from slipstream.algo.finite import require_finite
from slipstream.algo.global_batch import GlobalBatch, Prepared
from slipstream.algo.prepare import add_proximal, prepare
from slipstream.algo.settings.contradictions import needs_heads
from slipstream.algo.settings.spec import Objective
from slipstream.config.schema import Config
from slipstream.learner.batch.collect import global_batch
from slipstream.learner.batch.micro_batches import MicroBatch, Pass, RowLayout, Scored
from slipstream.learner.model.model import Policy
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.step.cutting import Cutter, Part
from slipstream.learner.step.reference import Reference
from slipstream.learner.step.reference_source import find_reference
from slipstream.learner.step.step_report import StepReport
from slipstream.learner.step.weightless import weightless, weights_of
from slipstream.staleness import Lost, masks_over_bound

Logprobs = Callable[[MicroBatch], Tensor]


def score(logprobs: Logprobs, passes: Iterable[Pass], mask_BT: Tensor, ranks: Ranks) -> Tensor:
    """Logprobs [B, T] of what the passes of all ranks hold, float32 in host memory, and 0 elsewhere.

    Args:
        logprobs: Of a micro-batch's actions [S, T].
        passes: This rank's; each sample is in one pass that counts, of one rank.
        mask_BT: Gives the shape.
        ranks: All of them come here together, and each gets the whole.
    """
    found_BT = torch.zeros(mask_BT.shape)
    with torch.no_grad():
        for batch, counts in passes:
            logprobs_ST = logprobs(batch).float().cpu()
            columns_T = torch.arange(logprobs_ST.shape[1])
            if counts:
                found_BT[batch.samples_S[:, None], columns_T] = logprobs_ST
    return ranks.add_up(found_BT)


Ready = tuple[Prepared, Tensor, list[Part]]


@dataclass(frozen=True)
class Preparing:
    """Prepares batches.

    Attributes:
        config: The whole config.
        spec: The objective.
        cutter: Cuts what is prepared.
        policy: The model that is trained.
        reference: The one that the KL is measured to.
        temperature: That of all logprobs.
    """

    config: Config
    spec: Objective
    cutter: Cutter
    policy: Policy
    reference: Reference | None
    temperature: float

    def batch(self, groups: Scored, version: int, lost: Lost, bound: int, report: StepReport) -> Ready:
        """The prepared batch, the number of each sample's group [B], and its parts: none where groups are idle.

        Args:
            groups: At least one.
            version: The learner's, before the step.
            lost: Versions that restarts took out of the line of descent.
            bound: Age in versions up to which tokens keep their weight, where the policy masks older ones.
            report: Learns of it.

        Raises:
            NonFiniteError: A logprob that takes part is not finite; on all ranks alike.
            StalenessError: A token of a version that does not exist yet.
        """
        with report.timed("build"):
            max_age = bound if masks_over_bound(self.config.staleness.policy) else None
            batch = global_batch(
                groups, version, max_age, self._component_weights(), lost, needs_heads(self.spec)
            )
        if self.spec.kl_place == "reward":
            batch = self._with_reference(groups, batch, report)
        with report.timed("build"):
            prepared = prepare(self.spec, batch)
            _count(report, len(groups), batch, prepared.gradient_B)
            report.weights = weights_of(prepared, batch.groups_B, len(groups))
            report.idle = weightless(groups, prepared, batch.groups_B)
            if report.idle:
                return prepared, batch.groups_B, []
            parts = self.cutter.cut(groups, batch.groups_B, prepared, report)
        if self.spec.kl_place == "loss":
            passes = [each for part in parts for each in part.passes]
            reference_BT = self._reference(passes, prepared.mask_BT, prepared.gradient_B, report)
            prepared = replace(prepared, reference_BT=reference_BT)
        return self._with_proximal(prepared, parts, report), batch.groups_B, parts

    def _with_reference(self, groups: Scored, batch: GlobalBatch, report: StepReport) -> GlobalBatch:
        """With the reference's logprobs of every sample in the loss; which those are does not depend on them."""
        if self.reference is None or batch.sampler_BT is None:
            return batch
        with report.timed("build"):
            trial = prepare(self.spec, replace(batch, reference_BT=torch.zeros_like(batch.sampler_BT)))
            rows_B = trial.mask_BT.any(1)
            passes = self.cutter.passes(groups, rows_B)
        return replace(batch, reference_BT=self._reference(passes, trial.mask_BT, rows_B, report))

    def _reference(
        self, passes: Sequence[Pass], mask_BT: Tensor, rows_B: Tensor, report: StepReport
    ) -> Tensor | None:
        reference, temperature = self.reference, self.temperature
        if reference is None:
            return None
        with report.timed("reference"), reference.ready():
            found_BT = score(
                lambda batch: reference.logprobs(batch, temperature), passes, mask_BT, self.cutter.ranks
            )
        require_finite("reference logprob", found_BT, mask_BT & rows_B[:, None], torch.arange(len(rows_B)))
        return found_BT

    def _with_proximal(self, prepared: Prepared, parts: Sequence[Part], report: StepReport) -> Prepared:
        """With the logprobs of the policy as it is now, frozen for all parts, if the objective asks for them."""
        if self.spec.proximal != "recompute":
            return prepared
        policy, temperature = self.policy, self.temperature
        passes = [each for part in parts for each in part.scored]
        with report.timed("proximal"):
            proximal_BT = score(
                lambda batch: policy.logprobs(batch.to(policy.device), temperature)[0],
                passes,
                prepared.mask_BT,
                self.cutter.ranks,
            )
        return add_proximal(self.spec, prepared, proximal_BT)

    def _component_weights(self) -> dict[str, float] | None:
        if self.spec.advantage != "gdpo":
            return None
        functions = self.config.reward.functions
        parts = {f"{f.component}.{name}": f.weight * own for f in functions for name, own in f.weights.items()}
        return {f.component: f.weight for f in functions} | parts


def preparing_of(config: Config, spec: Objective, folder: Path, policy: Policy, ranks: Ranks) -> Preparing:
    """What prepares the batches of a config.

    Raises:
        UserError: The reference cannot be had.
    """
    source = find_reference(config, folder) if spec.kl_beta else None
    reference = None if source is None else Reference(source, policy, config, ranks)
    shares = policy.shares and (reference is None or reference.shares)
    layout = RowLayout(config.learner.micro_batch_tokens, shares, policy.pair_cost)
    cutter = Cutter(spec, layout, ranks, config.learner.n_mini)
    return Preparing(config, spec, cutter, policy, reference, config.sampling.temperature)


def _count(report: StepReport, groups: int, batch: GlobalBatch, gradient_B: Tensor) -> None:
    report.groups = groups
    report.skipped_groups = groups - len(torch.unique(batch.groups_B[gradient_B]))
    report.samples, report.gradient_samples = len(gradient_B), int(gradient_B.sum())
    report.completion_tokens = int(batch.lengths_B.sum())
