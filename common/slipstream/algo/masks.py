"""Masks that take the weight of tokens or whole sequences away; True means *keep*.

Denominators don't change by these (see aggregation.py). Shapes: B samples, T completion tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.algo.aggregation import sequence_mean
from slipstream.algo.ratios import log_ratio


def fresh_tokens(ages_BT: Tensor, mask_BT: Tensor, max_age: int | None = None) -> Tensor:
    """Tokens inside the staleness bound (age <= max_age; None is no bound) [B, T].

    Raises:
        ValueError: A token in the mask has a negative age, i.e. comes from a version that does not exist yet.
    """
    ages_BT = ages_BT.where(mask_BT, 0)
    if bool((ages_BT < 0).any()):
        sample, token = (ages_BT < 0).nonzero()[0].tolist()
        raise ValueError(f"sample {sample}, token {token}: age {int(ages_BT[sample, token])} is in the future")
    return mask_BT if max_age is None else ages_BT <= max_age


def geometric_inside(log_rho_BT: Tensor, mask_BT: Tensor, low: float | None, high: float | None) -> Tensor:
    """Sequences [B] whose geometric-mean ratio exp(mean log rho) is inside [low, high]."""
    return _inside(sequence_mean(log_rho_BT, mask_BT), low, high)


def veto_free(log_rho_BT: Tensor, mask_BT: Tensor, low: float | None, high: float | None) -> Tensor:
    """Sequences [B] without any token whose ratio is outside the wide band [low, high]."""
    return (_inside(log_rho_BT, low, high) | ~mask_BT).all(1)


def on_policy_enough(advantages_BT: Tensor, log_u_BT: Tensor, mask_BT: Tensor, delta: float) -> Tensor:
    """Sequences [B] to keep: all but those with A < 0 and mean(log mu - log pi) > delta. arXiv 2512.02556.

    The mean is of the raw differences: a clamp before it would hide the one gap that makes the sequence off-policy.
    """
    negative_B = sequence_mean(advantages_BT, mask_BT) < 0
    return ~(negative_B & (sequence_mean(-log_u_BT, mask_BT) > delta))


def second_moment_kept(sampler_BT: Tensor, proximal_BT: Tensor, mask_BT: Tensor, tau: float) -> Tensor:
    """M2PO: tokens [B, T] left when the largest (log mu - log pi_o)^2 are dropped until the mean is below tau.

    Takes the *global* batch: a version per micro-batch would depend on the split. At least one token stays.
    arXiv 2510.01161.
    """
    square_BT = log_ratio(sampler_BT.double(), proximal_BT.double(), mask_BT).square()
    ordered_N, order_N = square_BT[mask_BT].sort(stable=True)
    means_N = ordered_N.cumsum(0) / torch.arange(1, len(ordered_N) + 1, device=square_BT.device)
    kept_N = means_N < tau
    kept_N[:1] = True
    return torch.zeros_like(mask_BT).masked_scatter(
        mask_BT, torch.empty_like(kept_N).index_copy(0, order_N, kept_N)
    )


def _inside(log: Tensor, low: float | None, high: float | None) -> Tensor:
    """Whether a ratio, given by its log in any shape, is inside [low, high]; None leaves a side open."""
    least, most = math.log(low) if low else -math.inf, math.inf if high is None else math.log(high)
    return (log >= least) & (log <= most)
