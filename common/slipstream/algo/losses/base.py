"""What every policy loss takes and gives. Shapes: B samples, T completion tokens, K head ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Terms:
    """Inputs of a policy loss; entries outside `mask_BT` are 0 and everything in the mask is finite.

    `logprobs_BT` is log pi with gradient. `log_r_BT` = log pi - log pi_o and `log_u_BT` = log pi - log mu carry
    its gradient and have no bound: `ratios.as_ratio` clamps where they are exponentiated. `head_*_BTK` are logprobs
    of the sampler's most likely ids, by the learner (with gradient) and by the sampler; `in_head_BT` says where the
    sampled token is one of them.
    """

    logprobs_BT: Tensor
    sampler_BT: Tensor
    log_r_BT: Tensor
    log_u_BT: Tensor
    advantages_BT: Tensor
    mask_BT: Tensor
    head_BTK: Tensor | None = None
    head_sampler_BTK: Tensor | None = None
    in_head_BT: Tensor | None = None


@dataclass(frozen=True)
class TokenLoss:
    """Loss of each token [B, T], and the tokens whose gradient an upper or a lower bound took away [B, T]."""

    loss_BT: Tensor
    high_BT: Tensor
    low_BT: Tensor


def unbounded(loss_BT: Tensor, mask_BT: Tensor) -> TokenLoss:
    """A token loss without any bound."""
    nowhere_BT = torch.zeros_like(mask_BT)
    return TokenLoss(loss_BT, nowhere_BT, nowhere_BT)


def by_sign(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """`yes` where the condition holds, else `no`, in the dtype of `like` (two floats alone would be float32)."""
    return torch.where(condition, like.new_tensor(yes), like.new_tensor(no))
