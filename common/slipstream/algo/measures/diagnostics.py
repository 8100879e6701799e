"""Sums and maxima of one micro-batch, from the tensors that the loss used anyway; no second forward.

Shapes: B samples, T completion tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algo.aggregation import sequence_sum
from slipstream.algo.correction import Corrected
from slipstream.algo.global_batch import Prepared
from slipstream.algo.losses.base import Terms, TokenLoss
from slipstream.algo.measures.metrics import AGES, Tally
from slipstream.algo.ratios import LIMIT, as_ratio
from slipstream.algo.settings.spec import Objective


@torch.no_grad()
def tally(
    spec: Objective,
    part: Prepared,
    terms: Terms,
    policy: TokenLoss,
    corrected: Corrected,
    log_rho_BT: Tensor,
    loss: Tensor,
    kl_BT: Tensor | None,
    entropy_BT: Tensor | None,
) -> Tally:
    """Everything `metrics.METRICS` needs of this slice."""
    mask_BT, weight_BT = part.mask_BT, corrected.weight_BT
    ratio_BT = as_ratio(terms.log_r_BT)
    pulled_BT = (terms.advantages_BT != 0) | (spec.loss == "dro")
    live_BT = mask_BT & (weight_BT > 0)
    # CISPO's bound caps a weight and leaves the gradient; every other loss's bound takes the gradient away.
    stopped_BT = (policy.high_BT | policy.low_BT) & (spec.loss != "cispo")
    sums: dict[str, Tensor | float] = {
        "loss": loss.detach(),
        "tokens": mask_BT.sum(),
        "sequences": mask_BT.any(1).sum(),
        "kept_sequences": live_BT.any(1).sum(),
        "gradient_tokens": (live_BT & ~stopped_BT & pulled_BT).sum(),
        "clip_high": policy.high_BT.sum(),
        "clip_low": policy.low_BT.sum(),
        "ratio": _sum(ratio_BT, mask_BT),
        "weight": _sum(weight_BT, mask_BT),
        "masked": (mask_BT & (weight_BT == 0)).sum(),
        "masked_bounds": corrected.touched_BT.sum() if spec.correction == "mis" else 0.0,
        "truncated_weight": corrected.touched_BT.sum() if spec.correction == "tis" else 0.0,
        **{f"masked_{name}": dropped_BT.sum() for name, dropped_BT in corrected.dropped.items()},
    }
    maxima = {"ratio": _max(ratio_BT, mask_BT), "weight": _max(weight_BT, mask_BT)}
    if part.sampler_BT is not None:
        sums |= _against_sampler(terms.log_u_BT, corrected.raw_BT, log_rho_BT, mask_BT)
        sums |= _inside_bound(corrected.raw_BT, part.fresh_BT)
        maxima["raw"] = _max(corrected.raw_BT, mask_BT)
    if kl_BT is not None:
        sums |= {"kl": _sum(kl_BT, part.fresh_BT), "kl_tokens": part.fresh_BT.sum()}
        maxima["kl"] = _max(kl_BT, part.fresh_BT)
    if entropy_BT is not None:
        sums |= {"entropy": _sum(entropy_BT, mask_BT), "entropy_tokens": mask_BT.sum()}
    if part.ages_BT is not None:
        sums |= _by_age(part.ages_BT, live_BT)
    return Tally.of(sums, maxima)


def _against_sampler(
    log_u_BT: Tensor, raw_BT: Tensor, log_rho_BT: Tensor, mask_BT: Tensor
) -> dict[str, Tensor | float]:
    sequence_N = as_ratio(sequence_sum(log_rho_BT, mask_BT).double()[mask_BT.any(1)])
    log_u_BT = log_u_BT.double()
    return {
        "sampler_tokens": mask_BT.sum(),
        "sampler_sequences": mask_BT.any(1).sum(),
        "raw": _sum(raw_BT, mask_BT),
        "raw_square": _sum(raw_BT.double().square(), mask_BT),
        "sequence_raw": sequence_N.sum(),
        "sequence_raw_square": sequence_N.square().sum(),
        "mismatch_k1": -_sum(log_u_BT, mask_BT),
        "mismatch_k3": _sum(log_u_BT.clamp(max=LIMIT).expm1() - log_u_BT, mask_BT),
    }


def _inside_bound(raw_BT: Tensor, fresh_BT: Tensor) -> dict[str, Tensor | float]:
    return {
        "fresh_tokens": fresh_BT.sum(),
        "fresh_raw": _sum(raw_BT, fresh_BT),
        "fresh_raw_square": _sum(raw_BT.double().square(), fresh_BT),
    }


def _by_age(ages_BT: Tensor, live_BT: Tensor) -> dict[str, Tensor | float]:
    ages_N = ages_BT[live_BT].clamp(0, AGES[-1])
    counts_A = torch.bincount(ages_N, minlength=len(AGES))
    return {f"age_{age}": counts_A[age] for age in AGES}


def _sum(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return values_BT.double().where(mask_BT, 0.0).sum()


def _max(values_BT: Tensor, mask_BT: Tensor) -> Tensor | float:
    return values_BT.where(mask_BT, -torch.inf).max() if mask_BT.numel() else -torch.inf
