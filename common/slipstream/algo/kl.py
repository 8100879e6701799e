"""KL of the learner to the reference, as a value and the gradient coefficient that goes with it.

z = log pi_ref - log pi per token. Schulman's estimators: k1 = -z, k2 = z^2 / 2, k3 = e^z - z - 1. Writing the
term as sg[value] + sg[coefficient] (log pi - sg log pi) keeps value and gradient apart, so that a bound on the
gradient leaves the logged value alone and nothing can be 0 * inf. Shapes: B samples, T completion tokens.

| kind        | value        | coefficient of grad log pi | expected gradient under pi, score term left out |
|-------------|--------------|----------------------------|--------------------------------------------------|
| k1          | -z           | 1                          | 0 (useless as a loss)                            |
| k2          | z^2 / 2      | -z                         | grad KL(pi || ref)                               |
| k3          | e^z - z - 1  | 1 - e^z                    | grad KL(ref || pi)                               |
| k3_k2       | e^z - z - 1  | -z                         | grad KL(pi || ref)                               |
| k1_weighted | -z m         | m (1 - z)                  | grad KL(pi || ref), exactly                      |
| k3_weighted | m k3         | -m z                       | grad KL(pi || ref), exactly                      |

m is the live ratio: 1 in value on-policy (exp(log pi - sg log pi)), the importance ratio off-policy.

A bound c is in nats on z: the coefficient takes clamp(z, -c, c) in the place of z, so that of k3 is at most
e^c - 1 in size, and that of k3_weighted too, however large m is. The value that is logged stays exact (its
exponential up to e^60). Where the KL is taken off the reward there is no gradient to bound: there the value itself
goes on beyond c as a straight line, of the slope that it has at c.
"""

from __future__ import annotations

import math

from torch import Tensor

from slipstream.algo.ratios import LIMIT
from slipstream.algo.settings.spec import KLKind

EXACT = 60.0  # largest z whose e^z is logged as it is: times a ratio of e^20 it is still finite in float32


def kl_value(kind: KLKind, z: Tensor, ratio: Tensor) -> Tensor:
    """Value of an estimator, exact (any shape)."""
    k3 = z.clamp(max=EXACT).expm1() - z
    match kind:
        case "k1":
            return -z
        case "k2":
            return z.square() / 2
        case "k3" | "k3_k2":
            return k3
        case "k1_weighted":
            return -ratio * z
        case "k3_weighted":
            return ratio * k3


def kl_coefficient(kind: KLKind, z: Tensor, ratio: Tensor, clamp: float | None) -> Tensor:
    """d value / d log pi that an estimator is trained with, for z inside +-clamp; None is no bound."""
    if clamp is not None:
        z = z.clamp(-clamp, clamp)
    match kind:
        case "k1":
            return z.new_ones(z.shape)
        case "k2" | "k3_k2":
            return -z
        case "k3":
            return -z.clamp(max=LIMIT).expm1()
        case "k1_weighted":
            return ratio * (1 - z)
        case "k3_weighted":
            most = math.inf if clamp is None else math.expm1(clamp)
            return (-ratio * z).clamp(-most, most)


def kl_in_reward(kind: KLKind, z: Tensor, clamp: float | None) -> Tensor:
    """Value to take off a reward (any shape): exact for |z| <= clamp, beyond it the tangent at the bound."""
    one = z.new_ones(())
    near = z if clamp is None else z.clamp(-clamp, clamp)
    slope = -kl_coefficient("k3" if kind == "k3_k2" else kind, near, one, None)
    return kl_value(kind, near, one) + slope * (z - near)


def kl_penalty(
    kind: KLKind,
    logprobs_BT: Tensor,
    reference_BT: Tensor,
    ratio_BT: Tensor,
    mask_BT: Tensor,
    clamp: float | None,
) -> Tensor:
    """KL term of each token [B, T], 0 outside the mask; `clamp` bounds the coefficient, never the value."""
    logprobs_BT = logprobs_BT.where(mask_BT, 0.0)
    own_BT = logprobs_BT.detach()
    z_BT, ratio_BT = reference_BT.detach().where(mask_BT, 0.0) - own_BT, ratio_BT.detach()
    value_BT = kl_value(kind, z_BT, ratio_BT)
    coefficient_BT = kl_coefficient(kind, z_BT, ratio_BT, clamp)
    return (value_BT + coefficient_BT * (logprobs_BT - own_BT)).where(mask_BT, 0.0)
