"""Score centring: a control variate over the sampler's most likely tokens.

Sampled from q (the sampler), the score E_q[f(p/q) grad log p] isn't 0 for a constant advantage once q differs
from p. The extra term subtracts its expectation over the head H, the sampler's top-k ids, and the tail as one
class. Shapes: B samples, T completion tokens, K head ids.
"""

from __future__ import annotations

from torch import Tensor

from slipstream.algo.ratios import LIMIT, bounded_weight
from slipstream.algo.settings.spec import Correction


def centring_loss(
    advantages_BT: Tensor,
    head_BTK: Tensor,
    head_sampler_BTK: Tensor,
    correction: Correction,
    high: float | None = None,
    low: float | None = None,
) -> Tensor:
    """A sum over v in H of sg[q_v w_v - alpha p_v] log p_v, to be added to the policy loss [B, T].

    p is the learner (`head_BTK`, with gradient), q the sampler, w_v = f(p_v / q_v), alpha = rho f(1 / rho) with
    rho = q_tail / p_tail; f is 1 (`none`), min(., high) (`tis`) or . inside the bounds (`mis`), the same as the
    weight of the policy loss. With H the whole vocabulary the expected gradient of both terms is 0 for a
    constant advantage; with q = p the term is 0. An id that the sampler gives -inf pads the head.
    """
    real_BTK = head_sampler_BTK.isfinite()
    log_p_BTK = head_BTK.where(real_BTK, 0.0)
    p_BTK = log_p_BTK.detach().exp().where(real_BTK, 0.0)
    q_BTK = head_sampler_BTK.exp()
    log_ratio_BTK = (log_p_BTK.detach() - head_sampler_BTK.where(real_BTK, 0.0)).clamp(-LIMIT, LIMIT)
    w_BTK, _ = bounded_weight(log_ratio_BTK.exp(), correction, high, low)
    alpha_BT = _tail_weight(p_BTK, q_BTK, correction, high, low)
    coefficient_BTK = q_BTK * w_BTK - alpha_BT[..., None] * p_BTK
    return advantages_BT * (coefficient_BTK * log_p_BTK).sum(-1)


def _tail_weight(
    p_BTK: Tensor, q_BTK: Tensor, correction: Correction, high: float | None, low: float | None
) -> Tensor:
    """alpha = rho f(1 / rho); where the head is everything is no tail, any alpha gives the same gradient."""
    tiny = 1e-6
    p_tail_BT, q_tail_BT = (1 - p_BTK.sum(-1)).clamp(min=tiny), (1 - q_BTK.sum(-1)).clamp(min=tiny)
    rho_BT = q_tail_BT / p_tail_BT
    return rho_BT * bounded_weight(1 / rho_BT, correction, high, low)[0]
