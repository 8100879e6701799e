"""Log-ratios between policies, and corrections made of them.

A log-ratio is clamped where it is exponentiated and nowhere else: sums, means and squares take it as it is.

mu is the sampler's probability of a token, pi_o the proximal policy's, pi the learner's; rho = pi_o / mu (pi /
mu where there is no proximal pass), r = pi / pi_o, u = pi / mu. All that becomes a weight here is detached.
Shapes: B samples, T completion tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algo.aggregation import sequence_mean, sequence_sum
from slipstream.algo.settings.spec import Correction, Level

LIMIT = 20.0  # bound on what is exponentiated: exp(20) = 4.9e8 squares without overflow in float32


def log_ratio(top_BT: Tensor, bottom_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log(top / bottom), exactly 0 outside the mask whatever stands there (inf and NaN too)."""
    return top_BT.where(mask_BT, 0.0) - bottom_BT.where(mask_BT, 0.0)


def as_ratio(log: Tensor) -> Tensor:
    """exp of a log-ratio, or of a sum or mean of them (any shape), clamped to +-20 first."""
    return log.clamp(-LIMIT, LIMIT).exp()


def level_ratio(log_rho_BT: Tensor, mask_BT: Tensor, level: Level) -> Tensor:
    """rho at a level, spread to the tokens [B, T].

    `token`: rho · `product`: exp(sum log rho), the unbiased weight of a sequence ·
    `geometric`: exp(mean log rho), normalised by length: right for masks, biased as a weight.
    """
    match level:
        case "token":
            return as_ratio(log_rho_BT)
        case "product":
            log_B = sequence_sum(log_rho_BT, mask_BT)
        case "geometric":
            log_B = sequence_mean(log_rho_BT, mask_BT)
    return as_ratio(log_B)[:, None].expand_as(log_rho_BT)


def bounded_weight(
    rho: Tensor, kind: Correction, high: float | None = None, low: float | None = None
) -> tuple[Tensor, Tensor]:
    """Weight from a ratio of any shape, and which entries a bound touched.

    `raw` w = rho · `tis` w = min(rho, high), with `low` also max(rho, low) (truncated importance sampling) ·
    `mis` w = rho where low <= rho <= high, else 0 (masked importance sampling; IcePop is this on tokens with
    0.5 and 5, arXiv 2510.18855) · `none` w = 1.
    """
    nothing = torch.zeros_like(rho, dtype=torch.bool)
    if kind == "none":
        return torch.ones_like(rho), nothing
    if kind == "raw":
        return rho, nothing
    touched = (rho > (torch.inf if high is None else high)) | (rho < (-torch.inf if low is None else low))
    if kind == "mis":
        return rho.where(~touched, 0.0), touched
    return (rho if high is None and low is None else rho.clamp(low, high)), touched


def proximal_guess(sampler_BT: Tensor, learner_BT: Tensor, ages_BT: Tensor) -> Tensor:
    """log pi_o by interpolation: log mu + alpha (log pi - log mu), alpha = (age - 1) / age clipped to [0, 1].

    The age of a token is v - v_b (learner's version less its own), so alpha = (v - 1 - v_b) / (v - v_b): the
    policy one version back, without a forward pass. A token of age 0 or 1 has log mu. A-3PO, arXiv 2512.06547.
    """
    ages_BT = ages_BT.to(sampler_BT.dtype)
    alpha_BT = ((ages_BT - 1) / ages_BT.clamp(min=1)).clamp(0.0, 1.0)
    return sampler_BT + alpha_BT * (learner_BT.detach() - sampler_BT)
