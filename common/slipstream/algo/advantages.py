"""Rewards to advantages, grouped by id, never by position.

Shapes: B samples, T completion tokens, K reward components. Rewards are float64 [B]; NaN means *unscored*: such
a sample is in no mean and no std, and its advantage is 0 (the loss mask removes its tokens). A tied group gives
exactly 0 to each member, whatever the floats. Groups are integer ids [B], of any size and in any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.algo.settings.spec import Std


def reward_tensor(rewards: Sequence[float | None]) -> Tensor:
    """Rewards [B] as float64, with NaN for every one that could not be scored (None, NaN, +-inf)."""
    rewards_B = torch.tensor([float("nan") if r is None else float(r) for r in rewards], dtype=torch.float64)
    return torch.where(rewards_B.isfinite(), rewards_B, torch.nan)


class Groups:
    """Statistics per group over the *scored* samples of a batch, each spread back to the samples [B]."""

    def __init__(self, rewards_B: Tensor, groups_B: Tensor) -> None:
        _, self.index_B = torch.unique(groups_B, return_inverse=True)
        self.count = int(self.index_B.max()) + 1 if len(groups_B) else 0
        self.scored_B = rewards_B.isfinite()
        self.rewards_B = rewards_B.double().where(self.scored_B, 0.0)
        self.size_B = self.sum(self.scored_B.double())
        self.mean_B = self.sum(self.rewards_B) / self.size_B.clamp(min=1)
        self.high_B = self._extreme("amax", -torch.inf)
        self.low_B = self._extreme("amin", torch.inf)
        self.tied_B = self.high_B <= self.low_B

    def sum(self, values_B: Tensor) -> Tensor:
        """Sum of each sample's group [B]."""
        return values_B.new_zeros(self.count).index_add(0, self.index_B, values_B)[self.index_B]

    def centred(self) -> Tensor:
        """Reward minus group mean [B]; exactly 0 in a tied group and for an unscored sample."""
        return torch.where(self.scored_B & ~self.tied_B, self.rewards_B - self.mean_B, 0.0)

    def std(self, kind: Std) -> Tensor:
        """Standard deviation of each sample's group [B]; 0 for a group of one."""
        degrees_B = self.size_B - int(kind == "sample")
        return (self.sum(self.centred().square()) / degrees_B.clamp(min=1)).sqrt()

    def _extreme(self, which: str, empty: float) -> Tensor:
        values_B = self.rewards_B.where(self.scored_B, empty)
        start_G = torch.full((self.count,), empty, dtype=values_B.dtype, device=values_B.device)
        return start_G.scatter_reduce(0, self.index_B, values_B, which)[self.index_B]


def grpo(rewards_B: Tensor, groups_B: Tensor, std: Std = "population", epsilon: float = 1e-6) -> Tensor:
    """A = (R - mean) / (std + epsilon), per group. DeepSeekMath, arXiv 2402.03300."""
    groups = Groups(rewards_B, groups_B)
    return groups.centred() / (groups.std(std) + epsilon).where(~groups.tied_B, 1.0)


def mean_only(rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """A = R - mean, per group. Dr. GRPO, arXiv 2503.20783."""
    return Groups(rewards_B, groups_B).centred()


def rloo(rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """A = R - mean of the *others* = (R - mean) G / (G - 1), per group. RLOO, arXiv 2402.14740."""
    groups = Groups(rewards_B, groups_B)
    return groups.centred() * groups.size_B / (groups.size_B - 1).clamp(min=1)


def batch_scaled(rewards_B: Tensor, groups_B: Tensor, std: Std = "population", epsilon: float = 1e-6) -> Tensor:
    """A = (R - group mean) / (std of these over the batch + epsilon); no batch mean leaves. arXiv 2510.13786."""
    centred_B = mean_only(rewards_B, groups_B)
    deviation = _std(centred_B[rewards_B.isfinite()], std)
    return centred_B / (deviation + epsilon if deviation > 0 else 1.0)


def gdpo(
    components_BK: Tensor,
    weights_K: Tensor,
    groups_B: Tensor,
    rewards_B: Tensor,
    std: Std = "population",
    epsilon: float = 1e-6,
) -> Tensor:
    """Each component normalised in its group, weighted sum, then whitened over the batch's scored sequences.

    A component that is NaN for a sample adds 0 to it. Unscored samples (`rewards_B` NaN) are out of everything.
    A group that is tied in every component gives exactly 0: the batch mean that whitening subtracts is 0 but for
    rounding, as every group's sum is. GDPO, arXiv 2601.05242.

    Raises:
        ValueError: There aren't as many weights as components.
    """
    if len(weights_K) != components_BK.shape[1]:
        raise ValueError(f"{len(weights_K)} component weights for {components_BK.shape[1]} reward components")
    scored_B = rewards_B.isfinite()
    total_B = torch.zeros(len(rewards_B), dtype=torch.float64, device=rewards_B.device)
    tied_B = torch.ones_like(scored_B)
    for component_B, weight in zip(components_BK.T, weights_K, strict=True):
        scored_component_B = component_B.where(scored_B, torch.nan)
        total_B = total_B + weight * grpo(scored_component_B, groups_B, std, epsilon)
        tied_B = tied_B & Groups(scored_component_B, groups_B).tied_B
    return whiten(total_B, scored_B, std, epsilon).where(~tied_B, 0.0)


def gopo(rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """A = 2 - 4 (rank - 1) / (G - 1), rank 1 best, average ranks on ties; so it runs from 2 to -2.

    With ties averaged this is 2 (members below - members above) / (G - 1), exact in any float.
    GOPO, arXiv 2602.03876.
    """
    groups = Groups(rewards_B, groups_B)
    both_BB = (groups.index_B[:, None] == groups.index_B) & groups.scored_B & groups.scored_B[:, None]
    below_B = (both_BB & (groups.rewards_B < groups.rewards_B[:, None])).sum(1)
    above_B = (both_BB & (groups.rewards_B > groups.rewards_B[:, None])).sum(1)
    advantages_B: Tensor = 2.0 * (below_B - above_B) / (groups.size_B - 1).clamp(min=1)
    return advantages_B


def maxrl(rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """A = (R - mean) / mean, per group; rewards must not be negative. MaxRL, arXiv 2602.02710.

    Raises:
        ValueError: A reward is negative, where dividing by the mean would turn or blow up the sign.
    """
    if bool((rewards_B < 0).any()):
        raise ValueError(f"advantage maxrl needs rewards >= 0, got {float(rewards_B[rewards_B < 0][0])}")
    groups = Groups(rewards_B, groups_B)
    return groups.centred() / groups.mean_B.where(groups.mean_B > 0, 1.0)


def whiten(values: Tensor, mask: Tensor, std: Std = "population", epsilon: float = 1e-6) -> Tensor:
    """(x - mean) / (std + epsilon) over the masked entries of any shape; 0 elsewhere and if all are equal."""
    chosen_N = values[mask].double()
    if len(chosen_N) == 0 or bool(chosen_N.max() == chosen_N.min()):
        return torch.zeros_like(values, dtype=torch.float64)
    return ((values - chosen_N.mean()) / (_std(chosen_N, std) + epsilon)).where(mask, 0.0)


def reinforce(
    rewards_B: Tensor,
    groups_B: Tensor,
    mask_BT: Tensor,
    penalty_BT: Tensor | None = None,
    baseline: bool = False,
    std: Std = "population",
    epsilon: float = 1e-6,
) -> Tensor:
    """REINFORCE++ advantages [B, T], whitened over all valid tokens. arXiv 2501.03262.

    The mean of the tokens isn't that of the group, so only a batch without any difference gives exactly 0 here.

    Args:
        rewards_B: Reward of each completion, paid at its last token.
        groups_B: Group ids, used with `baseline` only.
        mask_BT: Valid tokens of scored samples.
        penalty_BT: Token penalty such as beta times KL. Without baseline, a token's return is the reward minus
            the penalties from it on; with baseline (REINFORCE++-baseline) the sequence's penalty leaves the
            reward before the group mean does.
    """
    if penalty_BT is None:
        penalty_BT = torch.zeros(mask_BT.shape, dtype=torch.float64, device=mask_BT.device)
    penalty_BT = penalty_BT.double().where(mask_BT, 0.0)
    if baseline:
        return_BT = mean_only(rewards_B - penalty_BT.sum(1), groups_B)[:, None].expand(mask_BT.shape)
    else:
        to_go_BT = penalty_BT.flip(1).cumsum(1).flip(1)
        return_BT = rewards_B.nan_to_num(0.0).double()[:, None] - to_go_BT
    return whiten(return_BT, mask_BT, std, epsilon)


def _std(values_N: Tensor, kind: Std) -> Tensor:
    if len(values_N) == 0 or bool(values_N.max() == values_N.min()):
        return values_N.new_zeros(())
    deviation: Tensor = values_N.std(correction=int(kind == "sample"))
    return deviation
