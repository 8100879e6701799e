"""Losses of the ratio r = pi / pi_o: clipped surrogate, dual clip, GSPO, CISPO, SAPO, and no bound at all.

Shapes: B samples, T completion tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algo.aggregation import sequence_mean
from slipstream.algo.losses.base import Terms, TokenLoss, by_sign, unbounded
from slipstream.algo.ratios import as_ratio


def clipped(
    terms: Terms, low: float | None = 0.2, high: float | None = 0.2, dual: float | None = None
) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)); None leaves a side open. PPO, arXiv 1707.06347.

    With `dual` = c > 1, a negative advantage's loss is at most -c A (dual clip, arXiv 1912.09729).
    """
    return _surrogate(as_ratio(terms.log_r_BT), terms.advantages_BT, terms.mask_BT, low, high, dual)


def gspo(terms: Terms, low: float | None = 3e-4, high: float | None = 4e-4) -> TokenLoss:
    """Clipped surrogate of the sequence ratio s = exp(mean log r), in the token form. GSPO, arXiv 2507.18071.

    Each token has s_t = sg[s] pi / sg[pi]: the value of s, and the gradient through its own log pi. With
    `sequence_mean` aggregation the gradient is that of the mean over sequences of the clipped s.
    """
    log_s_B = sequence_mean(terms.log_r_BT.detach(), terms.mask_BT)
    log_s_BT = log_s_B[:, None] + terms.logprobs_BT - terms.logprobs_BT.detach()
    return _surrogate(as_ratio(log_s_BT), terms.advantages_BT, terms.mask_BT, low, high, None)


def cispo(terms: Terms, low: float | None = None, high: float | None = 0.28) -> TokenLoss:
    """-sg[clip(r, 1 - low, 1 + high)] A log pi; every token keeps a gradient. CISPO, arXiv 2506.13585."""
    ratio_BT = as_ratio(terms.log_r_BT.detach())
    over_BT, under_BT = _outside(ratio_BT, low, high)
    loss_BT = -_clip(ratio_BT, low, high) * terms.advantages_BT * terms.logprobs_BT
    return TokenLoss(loss_BT, over_BT & terms.mask_BT, under_BT & terms.mask_BT)


def sapo(terms: Terms, tau_pos: float = 1.0, tau_neg: float = 1.05) -> TokenLoss:
    """-A (4 / tau) sigmoid(tau (r - 1)), a soft gate; larger tau is sharper. SAPO, arXiv 2511.20347."""
    tau_BT = by_sign(terms.advantages_BT > 0, tau_pos, tau_neg, terms.log_r_BT)
    gate_BT = 4 / tau_BT * torch.sigmoid(tau_BT * (as_ratio(terms.log_r_BT) - 1))
    return unbounded(-terms.advantages_BT * gate_BT, terms.mask_BT)


def importance(terms: Terms) -> TokenLoss:
    """-A r, the importance-weighted policy gradient without any bound."""
    return unbounded(-terms.advantages_BT * as_ratio(terms.log_r_BT), terms.mask_BT)


def reinforce(terms: Terms) -> TokenLoss:
    """-A log pi. Williams 1992."""
    return unbounded(-terms.advantages_BT * terms.logprobs_BT, terms.mask_BT)


def no_ratio(terms: Terms) -> TokenLoss:
    """-A pi / sg[pi]: the value -A with the gradient of REINFORCE (GRPO without a ratio)."""
    ratio_BT = (terms.logprobs_BT - terms.logprobs_BT.detach()).exp()
    return unbounded(-terms.advantages_BT * ratio_BT, terms.mask_BT)


def _surrogate(
    ratio_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    low: float | None,
    high: float | None,
    dual: float | None,
) -> TokenLoss:
    """max(-A ratio, -A clip(ratio)), and which tokens lost their gradient to which side."""
    loss_BT = torch.maximum(-advantages_BT * ratio_BT, -advantages_BT * _clip(ratio_BT, low, high))
    over_BT, under_BT = _outside(ratio_BT.detach(), low, high)
    high_BT, low_BT = over_BT & (advantages_BT > 0), under_BT & (advantages_BT < 0)
    if dual is not None:
        negative_BT = advantages_BT < 0
        loss_BT = torch.where(negative_BT, torch.minimum(loss_BT, -dual * advantages_BT), loss_BT)
        high_BT = high_BT | (negative_BT & (ratio_BT.detach() > dual))
    return TokenLoss(loss_BT, high_BT & mask_BT, low_BT & mask_BT)


def _clip(ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    if low is None and high is None:
        return ratio
    return ratio.clamp(None if low is None else 1 - low, None if high is None else 1 + high)


def _outside(ratio: Tensor, low: float | None, high: float | None) -> tuple[Tensor, Tensor]:
    return ratio > (torch.inf if high is None else 1 + high), ratio < (-torch.inf if low is None else 1 - low)
