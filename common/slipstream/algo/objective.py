"""The objective of a batch: the one function that the learner differentiates.

`prepare(spec, batch)` settles what depends on the global batch; `objective` then gives the loss of any slice of
it. The losses of the slices add up to the loss of the batch and so do their gradients: accumulate by adding,
and let ranks *sum* their gradients. Per token, in the order of this module:

    weight * policy loss  +  score centring  +  beta KL(pi, ref)  -  c entropy

with `weight` the detached correction for the sampler. Log-probabilities are float32 or wider here, whatever
came in. Shapes: B samples, T completion tokens, K head ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algo.correction import Corrected, correct
from slipstream.algo.finite import head_sum, require_finite
from slipstream.algo.global_batch import Prepared, need
from slipstream.algo.kl import kl_penalty
from slipstream.algo.losses import ratio_losses as ratio
from slipstream.algo.losses import sampler_losses as sampler
from slipstream.algo.losses.base import Terms, TokenLoss
from slipstream.algo.measures import diagnostics
from slipstream.algo.measures.metrics import Tally
from slipstream.algo.ratios import LIMIT, as_ratio, bounded_weight, log_ratio, proximal_guess
from slipstream.algo.settings.contradictions import needs_sampler
from slipstream.algo.settings.spec import Correction, Objective


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


def objective(
    spec: Objective,
    part: Prepared,
    logprobs_BT: Tensor,
    entropy_BT: Tensor | None = None,
    head_BTK: Tensor | None = None,
) -> tuple[Tensor, Tally]:
    """Loss of a slice of the batch (a scalar with gradient) and its share of the metrics.

    Args:
        spec: What to optimise.
        part: `Prepared`, whole or cut with `rows`; on the same device.
        logprobs_BT: log pi of the completion tokens, in the shape of `part.mask_BT`; anything outside the mask.
        entropy_BT: Entropy of the learner, with gradient if `entropy_coeff` is not 0.
        head_BTK: log pi of the sampler's top-k ids, for score centring and top-k DPPO.

    Raises:
        NonFiniteError: log pi or the entropy of a token in the loss is NaN or infinite; names the sample.
        ValueError: The objective needs an input that was not given, or `logprobs_BT` has another shape.
    """
    _check(spec, part, logprobs_BT, entropy_BT, head_BTK)
    terms, log_rho_BT = _terms(spec, part, logprobs_BT, head_BTK)
    corrected = correct(spec, part, log_rho_BT, terms.log_u_BT.detach(), terms.advantages_BT)
    policy = policy_loss(spec, terms)
    loss_BT = corrected.weight_BT * policy.loss_BT
    if spec.score_centring:
        loss_BT = loss_BT + _centring(spec, terms, corrected)
    kl_BT = _kl(spec, part, terms, corrected)
    if kl_BT is not None and spec.kl_place == "loss":
        loss_BT = loss_BT + spec.kl_beta * kl_BT
    if spec.entropy_coeff != 0:
        bonus_BT = need(entropy_BT, "entropy_BT").to(loss_BT.dtype)
        loss_BT = loss_BT - spec.entropy_coeff * bonus_BT.where(part.fresh_BT, 0.0)
    loss = (part.scale_BT.to(loss_BT.dtype) * loss_BT.where(part.mask_BT, 0.0)).sum()
    return loss, diagnostics.tally(spec, part, terms, policy, corrected, log_rho_BT, loss, kl_BT, entropy_BT)


def policy_loss(spec: Objective, terms: Terms) -> TokenLoss:
    """The policy loss that `spec.loss` names, with its settings."""
    match spec.loss:
        case "clip":
            return ratio.clipped(terms, spec.clip_low, spec.clip_high, spec.dual_clip)
        case "gspo":
            return ratio.gspo(terms, spec.clip_low, spec.clip_high)
        case "cispo":
            return ratio.cispo(terms, spec.clip_low, spec.clip_high)
        case "sapo":
            return ratio.sapo(terms, spec.sapo_tau_pos, spec.sapo_tau_neg)
        case "importance":
            return ratio.importance(terms)
        case "reinforce":
            return ratio.reinforce(terms)
        case "no_ratio":
            return ratio.no_ratio(terms)
        case "vespo":
            positive, negative = (
                (spec.vespo_k_pos, spec.vespo_lambda_pos),
                (spec.vespo_k_neg, spec.vespo_lambda_neg),
            )
            return sampler.vespo(terms, positive, negative)
        case "dro":
            return sampler.dro(terms, spec.dro_beta)
        case "dppo_tv" | "dppo_kl" | "dppo_topk_tv" | "dppo_topk_kl":
            divergence = spec.loss.removeprefix("dppo_")
            return sampler.dppo(terms, divergence, spec.dppo_low, spec.dppo_high, spec.dppo_ratio_cap)
    raise ValueError(f"loss {spec.loss!r} is unknown")


def _check(
    spec: Objective, part: Prepared, logprobs_BT: Tensor, entropy_BT: Tensor | None, head_BTK: Tensor | None
) -> None:
    """Refuse what would broadcast by accident, hide a NaN, or correct against a sampler that isn't known."""
    if logprobs_BT.shape != part.mask_BT.shape:
        shape, wanted = tuple(logprobs_BT.shape), tuple(part.mask_BT.shape)
        raise ValueError(f"logprobs_BT has shape {shape}, but the batch's mask {wanted}")
    if needs_sampler(spec):
        need(part.sampler_BT, "sampler_BT")
    require_finite("learner logprob", logprobs_BT, part.mask_BT, part.index_B)
    if entropy_BT is not None:
        require_finite("entropy", entropy_BT, part.mask_BT, part.index_B)
    if head_BTK is not None and part.head_sampler_BTK is not None:
        summed_BT = head_sum(head_BTK, part.head_sampler_BTK.isfinite())
        require_finite("sum of the learner's top-k logprobs", summed_BT, part.mask_BT, part.index_B)


def _terms(
    spec: Objective, part: Prepared, logprobs_BT: Tensor, head_BTK: Tensor | None
) -> tuple[Terms, Tensor]:
    """Inputs of the policy loss, masked and in at least float32, and log rho [B, T], detached."""
    dtype = torch.promote_types(logprobs_BT.dtype, torch.float32)
    mask_BT = part.mask_BT
    pi_BT = logprobs_BT.to(dtype).where(mask_BT, 0.0)
    mu_BT = pi_BT.detach() if part.sampler_BT is None else part.sampler_BT.to(dtype).where(mask_BT, 0.0)
    anchor_BT, rho_top_BT = pi_BT.detach(), pi_BT.detach()
    if spec.proximal == "sampler":
        anchor_BT = mu_BT
    elif spec.proximal == "recompute":
        anchor_BT = rho_top_BT = need(part.proximal_BT, "proximal_BT").to(dtype)
    elif spec.proximal == "approximate":
        anchor_BT = rho_top_BT = proximal_guess(mu_BT, pi_BT, need(part.ages_BT, "ages_BT"))
    head_sampler_BTK = part.head_sampler_BTK
    if head_BTK is not None and head_sampler_BTK is not None:
        head_BTK = head_BTK.to(dtype).where(mask_BT[..., None], 0.0)
        head_sampler_BTK = head_sampler_BTK.to(dtype).where(mask_BT[..., None], -torch.inf)
    terms = Terms(
        logprobs_BT=pi_BT,
        sampler_BT=mu_BT,
        log_r_BT=log_ratio(pi_BT, anchor_BT, mask_BT),
        log_u_BT=log_ratio(pi_BT, mu_BT, mask_BT),
        advantages_BT=part.advantages_BT.to(dtype),
        mask_BT=mask_BT,
        head_BTK=head_BTK,
        head_sampler_BTK=head_sampler_BTK,
        in_head_BT=part.in_head_BT,
    )
    return terms, log_ratio(rho_top_BT, mu_BT, mask_BT)


def _centring(spec: Objective, terms: Terms, corrected: Corrected) -> Tensor:
    head_BTK, head_sampler_BTK = (
        need(terms.head_BTK, "head_BTK"),
        need(terms.head_sampler_BTK, "head_sampler_BTK"),
    )
    extra_BT = centring_loss(
        terms.advantages_BT, head_BTK, head_sampler_BTK, spec.correction, spec.cap_high, spec.cap_low
    )
    return extra_BT.where(corrected.keep_BT, 0.0)


def _kl(spec: Objective, part: Prepared, terms: Terms, corrected: Corrected) -> Tensor | None:
    """KL of each token to the reference [B, T], where a reference was given."""
    if part.reference_BT is None:
        if spec.kl_beta != 0:
            raise ValueError("kl_beta needs reference_BT, which the batch does not hold")
        return None
    ratio_BT = as_ratio(terms.log_r_BT.detach()) * corrected.weight_BT
    reference_BT = part.reference_BT.to(ratio_BT.dtype)
    return kl_penalty(
        spec.kl_kind, terms.logprobs_BT, reference_BT, ratio_BT, part.fresh_BT, spec.kl_coeff_clamp
    )
