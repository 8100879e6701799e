"""What of a batch is looked at beside its loss: the sampler's likeliest ids, and samples that a person is to see."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import Tensor

from slipstream.algo.settings.contradictions import needs_heads
from slipstream.algo.settings.spec import Objective
from slipstream.learner.batch.collect import head_ids
from slipstream.learner.batch.micro_batches import MicroBatch, Scored
from slipstream.learner.step.step_report import StepReport


class BatchLook(NamedTuple):
    """The likeliest ids [B, T, K], where the objective needs them, and the watched samples by number."""

    heads_BTK: Tensor | None
    watched: Collection[int]

    def keep(self, batch: MicroBatch, logprobs_ST: Tensor, report: StepReport) -> None:
        """Put the logprobs of watched samples into the report."""
        for row, sample in enumerate(batch.samples_S.tolist()):
            if sample in self.watched:
                report.logprobs[sample] = logprobs_ST[row].detach().float().cpu().tolist()


def look_at(spec: Objective, groups: Scored, watched: Collection[int] = ()) -> BatchLook:
    """What is looked at of a batch."""
    return BatchLook(head_ids(groups) if needs_heads(spec) else None, watched)
