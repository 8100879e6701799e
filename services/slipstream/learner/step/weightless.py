"""Groups that cannot have weight in a step, whatever the model says of them, and those that had no part in one.

Shapes: B samples of the batch, T completion tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algo.global_batch import Prepared
from slipstream.learner.batch.micro_batches import Scored
from slipstream.learner.step.step_report import StepReport
from slipstream.protocol.messages import Group

STALE = "stale"


def weights_of(prepared: Prepared, groups_B: Tensor, groups: int) -> list[int]:
    """Tokens of each group that are in the loss and inside the age bound."""
    return _sums(prepared.fresh_BT, groups_B, groups)


def weightless(groups: Scored, prepared: Prepared, groups_B: Tensor) -> dict[int, str]:
    """The groups without any such token by their place in the batch, each with the reason: `stale` (all of its tokens
    are over the age bound), `unscored`, `empty` (no token was sampled) or `masked` (truncated, or not sampled)."""
    weights = weights_of(prepared, groups_B, len(groups))
    in_loss = _sums(prepared.mask_BT, groups_B, len(groups))
    return {
        index: STALE if in_loss[index] else _why(group)
        for index, (group, _) in enumerate(groups)
        if not weights[index]
    }


def trained_of(batch: Scored, report: StepReport) -> list[tuple[int, int]]:
    """(ticket, attempt) of the groups that had a part in an update."""
    return [(group.ticket, group.attempt) for index, (group, _) in enumerate(batch) if index not in report.idle]


def idle_of(batch: Scored, report: StepReport) -> list[tuple[int, int, str]]:
    """(ticket, attempt, reason) of the others."""
    found = [(batch[index][0], reason) for index, reason in sorted(report.idle.items())]
    return [(group.ticket, group.attempt, reason) for group, reason in found]


def _why(group: Group) -> str:
    scored = [sample for sample in group.samples if sample.reward is not None]
    if len(scored) < min(2, len(group.samples)):
        return "unscored"
    return "masked" if any(sample.tokens for sample in scored) else "empty"


def _sums(mask_BT: Tensor, groups_B: Tensor, groups: int) -> list[int]:
    sums = torch.zeros(groups, dtype=torch.long).index_add_(0, groups_B, mask_BT.sum(1))
    return [int(each) for each in sums]
