"""All corrections of an objective together: one detached weight per token, and why tokens lost theirs.

Shapes: B samples, T completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from slipstream.algo import masks
from slipstream.algo.global_batch import Prepared
from slipstream.algo.ratios import bounded_weight, level_ratio
from slipstream.algo.settings.spec import Objective


@dataclass(frozen=True)
class Corrected:
    """`weight_BT` multiplies the policy loss and is 0 where any mask said so. `keep_BT` is the masks alone.

    `raw_BT` is rho at the chosen level before any bound; `touched_BT` where a bound of the weight bit;
    `dropped` holds, per mask, the tokens [B, T] it took.
    """

    weight_BT: Tensor
    keep_BT: Tensor
    raw_BT: Tensor
    touched_BT: Tensor
    dropped: dict[str, Tensor]


def correct(
    spec: Objective, part: Prepared, log_rho_BT: Tensor, log_u_BT: Tensor, advantages_BT: Tensor
) -> Corrected:
    """Weight of each token from its log-ratios (detached, clamped, 0 outside the mask)."""
    mask_BT = part.mask_BT
    raw_BT = level_ratio(log_rho_BT, mask_BT, spec.correction_level)
    weight_BT, touched_BT = bounded_weight(raw_BT, spec.correction, spec.cap_high, spec.cap_low)
    dropped = {"m2po": part.fresh_BT & ~part.keep_BT}
    for name, keep_B in _sequence_masks(spec, mask_BT, log_rho_BT, log_u_BT, advantages_BT).items():
        dropped[name] = mask_BT & ~keep_B[:, None]
    keep_BT = part.keep_BT
    for dropped_BT in dropped.values():
        keep_BT = keep_BT & ~dropped_BT
    return Corrected(weight_BT.where(keep_BT, 0.0), keep_BT, raw_BT, touched_BT & mask_BT, dropped)


def _sequence_masks(
    spec: Objective, mask_BT: Tensor, log_rho_BT: Tensor, log_u_BT: Tensor, advantages_BT: Tensor
) -> dict[str, Tensor]:
    """Sequences to keep [B], for each sequence mask that is on."""
    keep: dict[str, Tensor] = {}
    if spec.sequence_mask_low is not None or spec.sequence_mask_high is not None:
        low, high = spec.sequence_mask_low, spec.sequence_mask_high
        keep["sequence"] = masks.geometric_inside(log_rho_BT, mask_BT, low, high)
    if spec.veto_low is not None or spec.veto_high is not None:
        keep["veto"] = masks.veto_free(log_rho_BT, mask_BT, spec.veto_low, spec.veto_high)
    if spec.off_policy_delta is not None:
        keep["off_policy"] = masks.on_policy_enough(advantages_BT, log_u_BT, mask_BT, spec.off_policy_delta)
    return keep
