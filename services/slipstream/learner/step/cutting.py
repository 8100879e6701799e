"""The collected batch cut up: into the parts that optimizer steps are made on, and each part into forward passes.

Everything follows from the batch and the layout, so that all ranks cut alike. Shapes: B samples of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from slipstream.algo.minibatch import group_parts
from slipstream.algo.prepare import Prepared, proximal_rows
from slipstream.algo.settings.spec import Objective
from slipstream.learner.batch.micro_batches import Pass, RowLayout, Rows, Scored, passes, shares
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.step.step_report import StepReport


@dataclass(frozen=True)
class Part:
    """What one optimizer step is made on.

    Attributes:
        groups: The groups of the batch that it holds.
        passes: This rank's passes over the samples that carry a gradient.
        scored: Those over the samples whose logprobs are wanted beforehand; the same ones where that is the same.
    """

    groups: range
    passes: list[Pass]
    scored: list[Pass]


@dataclass(frozen=True)
class Cutter:
    """Cuts batches for a model and a number of ranks.

    Attributes:
        spec: The objective.
        layout: How the model wants its batches.
        ranks: This process's place.
        parts: Optimizer steps of a full batch.
    """

    spec: Objective
    layout: RowLayout
    ranks: Ranks
    parts: int = 1

    def cut(self, groups: Scored, groups_B: Tensor, prepared: Prepared, report: StepReport) -> list[Part]:
        """The parts of a prepared batch; the report learns what goes through the model."""
        before_B = proximal_rows(self.spec, prepared)
        found = []
        for part in group_parts(len(groups), self.parts):
            inside_B = (groups_B >= part.start) & (groups_B < part.stop)
            rows_B, scored_B = prepared.gradient_B & inside_B, before_B & inside_B
            shared = self.share(groups, rows_B)
            report.count(shared, self.layout.pair_cost)
            own = passes(shared, self.ranks.rank)
            more = bool((rows_B != scored_B).any())
            found.append(Part(part, own, self.passes(groups, scored_B) if more else own))
        return found

    def passes(self, groups: Scored, rows_B: Tensor) -> list[Pass]:
        """This rank's passes over some of the samples."""
        return passes(self.share(groups, rows_B), self.ranks.rank)

    def share(self, groups: Scored, rows_B: Tensor) -> Sequence[Sequence[Rows]]:
        """The rows of each rank's passes over some of the samples."""
        return shares(groups, rows_B.tolist(), self.layout, self.ranks.size)
