"""Losses anchored at the sampler itself, which correct for it inside the loss: VESPO, DPPO, DRO.

u = pi / mu. Shapes: B samples, T completion tokens, K head ids.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.algo.aggregation import sequence_sum
from slipstream.algo.losses.base import Terms, TokenLoss, by_sign, unbounded
from slipstream.algo.ratios import as_ratio

TINY = 1e-7  # keeps a probability's complement away from 0 in a binary divergence


def vespo(
    terms: Terms, positive: tuple[float, float] = (2.0, 3.0), negative: tuple[float, float] = (3.0, 2.0)
) -> TokenLoss:
    """-sg[phi(W)] A log pi with phi(W) = W^k e^(lambda (1 - W)). VESPO, arXiv 2602.10693.

    W = exp(sum log u), one per sequence, its log clamped to [log 1e-8, 20]; (k, lambda) is `positive` for
    A >= 0 and `negative` for A < 0. phi is taken as one exponential, so that neither factor overflows.
    """
    log_w_B = sequence_sum(terms.log_u_BT.detach(), terms.mask_BT).clamp(math.log(1e-8), 20.0)
    log_w_BT = log_w_B[:, None].expand_as(terms.log_u_BT)
    rising_BT = terms.advantages_BT >= 0
    k_BT = by_sign(rising_BT, positive[0], negative[0], log_w_BT)
    lambda_BT = by_sign(rising_BT, positive[1], negative[1], log_w_BT)
    phi_BT = (k_BT * log_w_BT + lambda_BT * (1 - log_w_BT.exp())).exp()
    return unbounded(-phi_BT * terms.advantages_BT * terms.logprobs_BT, terms.mask_BT)


def dppo(terms: Terms, divergence: str, low: float = 0.15, high: float = 0.15, cap: float = 20.0) -> TokenLoss:
    """-A sg[min(u, cap)] log pi, 0 where the step leaves the trust region. DPPO, arXiv 2602.04879.

    With p = pi and q = mu, a token is masked when its divergence is over the bound *and* the move is in the
    advantage's direction: A > 0, p > q and D > high, or A <= 0, p < q and D > low. `divergence`: `tv` |p - q|,
    `kl` binary KL(q||p), `topk_tv` and `topk_kl` the same over the sampler's head, the sampled token (where it is not
    of the head) and the rest as one class.
    """
    p_BT, q_BT = terms.logprobs_BT.detach().exp(), terms.sampler_BT.exp()
    divergence_BT = _divergence(terms, divergence, p_BT, q_BT)
    high_BT = (terms.advantages_BT > 0) & (p_BT > q_BT) & (divergence_BT > high) & terms.mask_BT
    low_BT = (terms.advantages_BT <= 0) & (p_BT < q_BT) & (divergence_BT > low) & terms.mask_BT
    weight_BT = as_ratio(terms.log_u_BT.detach()).clamp(max=cap).where(~(high_BT | low_BT), 0.0)
    return TokenLoss(-terms.advantages_BT * weight_BT * terms.logprobs_BT, high_BT, low_BT)


def dro(terms: Terms, beta: float = 0.1) -> TokenLoss:
    """-(A log pi - (beta / 2) (log u)^2). DRO, arXiv 2405.19107."""
    square_BT = terms.log_u_BT.square()
    return unbounded(-(terms.advantages_BT * terms.logprobs_BT - beta / 2 * square_BT), terms.mask_BT)


def binary_kl(q: Tensor, p: Tensor) -> Tensor:
    """KL(q || p) of two Bernoulli variables: q log(q / p) + (1 - q) log((1 - q) / (1 - p))."""
    q, p = q.clamp(TINY, 1 - TINY), p.clamp(TINY, 1 - TINY)
    return q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()


def _divergence(terms: Terms, kind: str, p_BT: Tensor, q_BT: Tensor) -> Tensor:
    if kind == "tv":
        return (p_BT - q_BT).abs()
    if kind == "kl":
        return binary_kl(q_BT, p_BT)
    if terms.head_BTK is None or terms.head_sampler_BTK is None or terms.in_head_BT is None:
        raise ValueError(
            f"loss dppo_{kind} needs top-k logprobs of sampler and learner, and who is in the head"
        )
    real_BTK = terms.head_sampler_BTK.isfinite()
    p_BTK, q_BTK = (h.exp().where(real_BTK, 0.0) for h in (terms.head_BTK.detach(), terms.head_sampler_BTK))
    p_BTC, q_BTC = classes(p_BTK, p_BT, terms.in_head_BT), classes(q_BTK, q_BT, terms.in_head_BT)
    if kind == "topk_tv":
        return (p_BTC - q_BTC).abs().sum(-1) / 2
    return (q_BTC * (q_BTC.clamp(min=TINY) / p_BTC.clamp(min=TINY)).log()).sum(-1)


def classes(head_BTK: Tensor, sampled_BT: Tensor, in_head_BT: Tensor) -> Tensor:
    """Probabilities of the head ids, of the sampled token (0 where the head has it) and of the rest [B, T, K + 2]."""
    named_BTC = torch.cat([head_BTK, sampled_BT.where(~in_head_BT, 0.0)[..., None]], dim=-1)
    return torch.cat([named_BTC, (1 - named_BTC.sum(-1, keepdim=True)).clamp(min=0)], dim=-1)
