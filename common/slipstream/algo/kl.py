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
"""

from __future__ import annotations

from torch import Tensor

from slipstream.algo.ratios import LIMIT
from slipstream.algo.spec import KLKind


def kl_value_and_coefficient(kind: KLKind, log_ref_over_pi: Tensor, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Value and d value / d log pi of an estimator, both detached, for z clamped to +-20 (any shape)."""
    z, m = log_ref_over_pi.detach().clamp(-LIMIT, LIMIT), ratio.detach()
    k1, k2, k3 = -z, z.square() / 2, z.expm1() - z
    match kind:
        case "k1":
            return k1, k1.new_ones(k1.shape)
        case "k2":
            return k2, -z
        case "k3":
            return k3, -z.expm1()
        case "k3_k2":
            return k3, -z
        case "k1_weighted":
            return m * k1, m * (1 - z)
        case "k3_weighted":
            return m * k3, -m * z


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
    z_BT = reference_BT.where(mask_BT, 0.0) - logprobs_BT
    value_BT, coefficient_BT = kl_value_and_coefficient(kind, z_BT, ratio_BT)
    if clamp is not None:
        coefficient_BT = coefficient_BT.clamp(-clamp, clamp)
    return (value_BT + coefficient_BT * (logprobs_BT - logprobs_BT.detach())).where(mask_BT, 0.0)
