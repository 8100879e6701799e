"""One collected batch as several optimizer steps: each part is the global batch of its own step.

Rewards, advantages, ages, the proximal policy and M2PO's trimming belong to the batch as it was collected; only the
denominators are those of the part, because a part's loss is a mean over what it steps on. So one part of all groups
is the batch itself. Shapes: B samples, T completion tokens.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from torch import Tensor

from slipstream.algo.aggregation import token_scales
from slipstream.algo.global_batch import Prepared
from slipstream.algo.settings.spec import Objective


def group_parts(groups: int, parts: int) -> list[range]:
    """Consecutive groups of each part, in order, as equal in number as can be; never an empty part."""
    count = min(parts, groups)
    cuts = [index * groups // count for index in range(count + 1)] if count else [0]
    return [range(first, last) for first, last in pairwise(cuts)]


def only(spec: Objective, prepared: Prepared, groups_B: Tensor, part: range) -> Prepared:
    """The same batch with everything outside a part masked, and the part's own denominators.

    Samples keep their rows, so that a sample's number means the same in every part.

    Args:
        spec: The objective.
        prepared: The whole batch, with its proximal policy if it has one.
        groups_B: Number of each sample's group, from 0.
        part: The groups of the part.
    """
    inside_B = (groups_B >= part.start) & (groups_B < part.stop)
    inside_B1 = inside_B[:, None]
    mask_BT = prepared.mask_BT & inside_B1
    tokens_B = prepared.tokens_B.where(inside_B, -1)
    return replace(
        prepared,
        mask_BT=mask_BT,
        fresh_BT=prepared.fresh_BT & inside_B1,
        keep_BT=prepared.keep_BT & inside_B1,
        scale_BT=token_scales(spec.aggregation, mask_BT, groups_B, tokens_B, spec.horizon),
        gradient_B=prepared.gradient_B & inside_B,
        tokens_B=tokens_B,
    )
