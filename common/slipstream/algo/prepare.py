"""Once per step, on the *global* batch: rewards to advantages, masks and scales; then cut into micro-batches.

Everything that depends on the batch as a whole is settled here, so that `objective` may be called on any
slices, in any order, on any rank. Batches are padded [B, T] over *completion tokens only*, masks come from
lengths.
Shapes: B samples, T completion tokens, K reward components or head ids.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from slipstream.algo import advantages as adv
from slipstream.algo.advantages import Groups
from slipstream.algo.aggregation import token_scales
from slipstream.algo.finite import head_sum, require_finite
from slipstream.algo.global_batch import GlobalBatch, Prepared, check_shapes, length_mask, need
from slipstream.algo.kl import kl_in_reward
from slipstream.algo.masks import fresh_tokens, second_moment_kept
from slipstream.algo.measures.metrics import Tally
from slipstream.algo.settings.context import GROUPED
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


__all__ = ["GlobalBatch", "Prepared", "add_proximal", "length_mask", "prepare", "proximal_rows"]


def prepare(spec: Objective, batch: GlobalBatch) -> Prepared:
    """Advantages, masks and scales of a global batch.

    A group with fewer than two scored samples is dropped where the advantage needs a group. Unscored samples
    leave the loss and its denominators; truncated ones, if asked for, the loss and every denominator that is a
    count of the loss.

    Raises:
        NonFiniteError: A log-probability inside the mask is NaN or infinite; names the sample.
        ValueError: The objective needs something that the batch lacks, two fields differ in shape, or an age is
            negative.
    """
    check_shapes(batch)
    raw_B = need(batch.given_B, "given_B") if spec.advantage == "given" else batch.rewards_B
    dropped_B = _lone(spec, raw_B, batch.groups_B)
    rewards_B = shape_rewards(spec, raw_B.double(), batch.groups_B, batch.lengths_B).where(
        ~dropped_B, torch.nan
    )
    sampled_BT = _sampled(batch)
    tokens_B = sampled_BT.sum(1).where(rewards_B.isfinite(), -1)
    mask_BT = _loss_mask(spec, batch, sampled_BT, rewards_B.isfinite())
    _check(batch, mask_BT)
    advantages_BT = _advantages(spec, batch, rewards_B, mask_BT)
    fresh_BT = _fresh(batch, mask_BT)
    prepared = Prepared(
        advantages_BT=advantages_BT,
        mask_BT=mask_BT,
        fresh_BT=fresh_BT,
        keep_BT=fresh_BT,
        scale_BT=token_scales(spec.aggregation, mask_BT, batch.groups_B, tokens_B, spec.horizon),
        gradient_B=_gradient(spec, fresh_BT, fresh_BT, advantages_BT),
        tokens_B=tokens_B,
        index_B=torch.arange(len(mask_BT), device=mask_BT.device),
        tally=_tally(batch, raw_B, mask_BT, fresh_BT),
        sampler_BT=batch.sampler_BT,
        reference_BT=batch.reference_BT,
        ages_BT=batch.ages_BT,
        head_sampler_BTK=batch.head_sampler_BTK,
        in_head_BT=batch.in_head_BT,
    )
    return prepared if batch.proximal_BT is None else add_proximal(spec, prepared, batch.proximal_BT)


def add_proximal(spec: Objective, prepared: Prepared, proximal_BT: Tensor) -> Prepared:
    """The same with the proximal policy's logprobs, and M2PO's trimming, which needs them of the whole batch.

    Rows that `proximal_rows` leaves out may hold anything.

    Raises:
        NonFiniteError: A log-probability inside the mask is NaN or infinite; names the sample.
        ValueError: The shape is not that of the batch's mask.
    """
    if proximal_BT.shape != prepared.mask_BT.shape:
        wanted = tuple(prepared.mask_BT.shape)
        raise ValueError(f"proximal_BT has shape {tuple(proximal_BT.shape)}, but the batch's mask {wanted}")
    rows_B = proximal_rows(spec, prepared)
    looked_BT = prepared.keep_BT & rows_B[:, None]
    require_finite("proximal logprob", proximal_BT, looked_BT, prepared.index_B)
    keep_BT = prepared.keep_BT
    if spec.m2po_tau is not None:
        sampler_BT = need(prepared.sampler_BT, "sampler_BT")
        keep_BT = second_moment_kept(sampler_BT, proximal_BT, looked_BT, spec.m2po_tau)
    gradient_B = _gradient(spec, prepared.fresh_BT, keep_BT, prepared.advantages_BT)
    proximal_BT = proximal_BT.where(rows_B[:, None], 0.0)
    return replace(prepared, proximal_BT=proximal_BT, keep_BT=keep_BT, gradient_B=gradient_B)


def proximal_rows(spec: Objective, prepared: Prepared) -> Tensor:
    """Samples [B] that a proximal pass must cover: M2PO trims over all, others need the trained ones."""
    return prepared.keep_BT.any(1) if spec.m2po_tau is not None else prepared.gradient_B


def _lone(spec: Objective, rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """Samples of groups with fewer than two scored members, if the advantage needs a group [B]."""
    if spec.advantage not in GROUPED:
        return torch.zeros_like(groups_B, dtype=torch.bool)
    return adv.Groups(rewards_B, groups_B).size_B < 2


def _sampled(batch: GlobalBatch) -> Tensor:
    """Tokens that were sampled [B, T]."""
    longest = int(batch.lengths_B.max()) if len(batch.lengths_B) else 0
    padded_BT = batch.sampler_BT if batch.sampler_BT is not None else batch.mask_BT
    width = longest if padded_BT is None else padded_BT.shape[1]
    sampled_BT = length_mask(batch.lengths_B, width)
    return sampled_BT if batch.mask_BT is None else sampled_BT & batch.mask_BT


def _loss_mask(spec: Objective, batch: GlobalBatch, sampled_BT: Tensor, scored_B: Tensor) -> Tensor:
    mask_BT = sampled_BT & scored_B[:, None]
    if spec.mask_truncated:
        mask_BT = mask_BT & ~need(batch.truncated_B, "truncated_B")[:, None]
    return mask_BT


def _check(batch: GlobalBatch, mask_BT: Tensor) -> None:
    index_B = torch.arange(len(mask_BT), device=mask_BT.device)
    for name, values_BT in (("sampler", batch.sampler_BT), ("reference", batch.reference_BT)):
        if values_BT is not None:
            require_finite(f"{name} logprob", values_BT, mask_BT, index_B)
    head_BTK = batch.head_sampler_BTK
    if head_BTK is not None:
        real_BTK = head_BTK != -torch.inf
        require_finite("sum of the sampler's top-k logprobs", head_sum(head_BTK, real_BTK), mask_BT, index_B)


def _fresh(batch: GlobalBatch, mask_BT: Tensor) -> Tensor:
    """Tokens of the mask inside the age bound [B, T]; ages are checked even when there is no bound."""
    if batch.ages_BT is None and batch.max_age is None:
        return mask_BT
    ages_BT = need(batch.ages_BT, "ages_BT")
    return mask_BT & fresh_tokens(ages_BT, mask_BT, batch.max_age)


def _advantages(spec: Objective, batch: GlobalBatch, rewards_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Advantages of every token, float64 [B, T], 0 outside the mask."""
    penalty_BT = _reward_penalty(spec, batch, mask_BT)
    if spec.advantage in ("reinforce", "reinforce_baseline"):
        baseline = spec.advantage == "reinforce_baseline"
        values_BT = adv.reinforce(
            rewards_B, batch.groups_B, mask_BT, penalty_BT, baseline, spec.std, spec.std_epsilon
        )
    else:
        if penalty_BT is not None:
            rewards_B = rewards_B - penalty_BT.sum(1)
        values_BT = _sample_advantages(spec, batch, rewards_B)[:, None].expand(mask_BT.shape)
    if spec.advantage_clamp is not None:
        values_BT = values_BT.clamp(-spec.advantage_clamp, spec.advantage_clamp)
    return values_BT.where(mask_BT, 0.0)


def _sample_advantages(spec: Objective, batch: GlobalBatch, rewards_B: Tensor) -> Tensor:
    groups_B = batch.groups_B
    match spec.advantage:
        case "grpo":
            return adv.grpo(rewards_B, groups_B, spec.std, spec.std_epsilon)
        case "mean_only":
            return adv.mean_only(rewards_B, groups_B)
        case "rloo":
            return adv.rloo(rewards_B, groups_B)
        case "batch_scaled":
            return adv.batch_scaled(rewards_B, groups_B, spec.std, spec.std_epsilon)
        case "gdpo":
            components_BK = need(batch.components_BK, "components_BK")
            weights_K = batch.component_weights_K
            weights_K = torch.ones(components_BK.shape[1]) if weights_K is None else weights_K
            return adv.gdpo(components_BK, weights_K, groups_B, rewards_B, spec.std, spec.std_epsilon)
        case "gopo":
            return adv.gopo(rewards_B, groups_B)
        case "maxrl":
            return adv.maxrl(rewards_B, groups_B)
        case "given":
            return need(batch.given_B, "given_B").double().nan_to_num(0.0)
    raise ValueError(f"advantage {spec.advantage!r} is unknown")


def _reward_penalty(spec: Objective, batch: GlobalBatch, mask_BT: Tensor) -> Tensor | None:
    """beta KL(sampler, reference) of each token, for KL in the reward: of the policy that earned the reward.

    Each token's share is bounded by `kl_coeff_clamp`: one of them at z = 20 would be 4.85e8, more than any reward.
    """
    if spec.kl_beta == 0 or spec.kl_place != "reward":
        return None
    sampler_BT = need(batch.sampler_BT, "sampler_BT")
    reference_BT = need(batch.reference_BT, "reference_BT")
    z_BT = (reference_BT.double() - sampler_BT.double()).where(mask_BT, 0.0)
    return spec.kl_beta * kl_in_reward(spec.kl_kind, z_BT, spec.kl_coeff_clamp)


def _gradient(spec: Objective, fresh_BT: Tensor, keep_BT: Tensor, advantages_BT: Tensor) -> Tensor:
    """Samples [B] that can change the gradient."""
    if (spec.kl_beta != 0 and spec.kl_place == "loss") or spec.entropy_coeff != 0:
        return fresh_BT.any(1)
    return (keep_BT & ((advantages_BT != 0) | (spec.loss == "dro"))).any(1)


def _tally(batch: GlobalBatch, raw_B: Tensor, mask_BT: Tensor, fresh_BT: Tensor) -> Tally:
    groups = adv.Groups(batch.rewards_B, batch.groups_B)
    scored_B, tied_B = groups.scored_B, groups.tied_B
    share_B = scored_B / groups.size_B.clamp(min=1)  # adds up to 1 over the scored members of a group
    counted = share_B.sum()
    sums: dict[str, Tensor | float] = {
        "tokens_batch": mask_BT.sum(),
        "sequences_batch": mask_BT.any(1).sum(),
        "masked_age": (mask_BT & ~fresh_BT).sum(),
        "groups": counted,
        "tied_groups": share_B[tied_B].sum(),
        "right_groups": share_B[tied_B & (groups.high_B > 0)].sum(),
        "wrong_groups": share_B[tied_B & (groups.high_B <= 0)].sum(),
        "dropped_groups": groups.count - share_B[groups.size_B > 1].sum(),
        "unscored": (~raw_B.isfinite()).sum(),
        "samples": float(len(scored_B)),
        "scored": scored_B.sum(),
        "rewards": groups.rewards_B.sum(),
        "lengths": batch.lengths_B.sum(),
    }
    if batch.truncated_B is not None:
        sums["truncated"] = batch.truncated_B.sum()
    return Tally.of(sums, {"lengths": batch.lengths_B.max()} if len(batch.lengths_B) else {})
