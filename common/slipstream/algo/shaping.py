"""Rewards before they become advantages. Shapes: B samples; rewards are float64 [B] with NaN for unscored."""

from __future__ import annotations

from torch import Tensor

from slipstream.algo.advantages import Groups
from slipstream.algo.settings.spec import LengthReward, Objective


def shape_rewards(spec: Objective, rewards_B: Tensor, groups_B: Tensor, lengths_B: Tensor) -> Tensor:
    """Scale, clip, then add the length terms that the objective asks for; an unscored sample stays NaN."""
    shaped_B = rewards_B * spec.reward_scale
    if spec.reward_low is not None or spec.reward_high is not None:
        shaped_B = shaped_B.clamp(spec.reward_low, spec.reward_high)
    if spec.overlong_length is not None and spec.overlong_buffer is not None:
        penalty_B = soft_overlong(lengths_B, spec.overlong_length, spec.overlong_buffer)
        shaped_B = shaped_B + spec.overlong_penalty * penalty_B
    if spec.length_reward != "none":
        shaped_B = length_reward(spec.length_reward, shaped_B, groups_B, lengths_B, spec.length_coeff)
    return shaped_B


def soft_overlong(lengths_B: Tensor, length: int, buffer: int) -> Tensor:
    """DAPO's soft overlong penalty [B]: 0 up to length - buffer, then falling linearly to -1 at `length`.

    (L_max - L_c - |y|) / L_c inside the buffer, whose *width* is L_c. DAPO, arXiv 2503.14476, eq. 13.
    """
    return ((length - buffer - lengths_B.double()) / buffer).clamp(-1.0, 0.0)


def length_reward(
    kind: LengthReward, rewards_B: Tensor, groups_B: Tensor, lengths_B: Tensor, coeff: float
) -> Tensor:
    """Rewards [B] with a preference for short answers among the scored members of a group.

    `linear` adds coeff * lambda for a right answer (reward > 0) and coeff * min(0, lambda) for others, where
    lambda = 0.5 - (|y| - shortest) / (longest - shortest), 0 if all are equal (Kimi k1.5, arXiv 2501.12599).
    `relative` multiplies by 1 / (1 + coeff * |y| / mean length), a length-normalised reward.
    """
    spread = Groups(lengths_B.double().where(rewards_B.isfinite(), float("nan")), groups_B)
    if kind == "relative":
        return rewards_B / (1 + coeff * lengths_B / spread.mean_B.clamp(min=1))
    width_B = (spread.high_B - spread.low_B).where(~spread.tied_B, 1.0)
    lambda_B = (0.5 - (lengths_B - spread.low_B) / width_B).where(~spread.tied_B, 0.0)
    return rewards_B + coeff * lambda_B.where(rewards_B > 0, lambda_B.clamp(max=0))
