"""What the rules on an objective ask of it and of the run around it; no torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.algo.settings.spec import Objective

SAMPLER_ANCHORED = ("vespo", "dppo_tv", "dppo_kl", "dppo_topk_tv", "dppo_topk_kl", "dro")
TOPK = ("dppo_topk_tv", "dppo_topk_kl")
STD_ADVANTAGES = ("grpo", "gdpo", "batch_scaled")
GROUPED = (
    *STD_ADVANTAGES,
    "mean_only",
    "rloo",
    "gopo",
    "reinforce_baseline",
    "maxrl",
)  # compare within a group


@dataclass(frozen=True)
class Context:
    """What the rules need to know and the objective does not hold; defaults contradict nothing."""

    group_size: int = 8
    small_groups_meant: bool = False
    batch_samples: int | None = None
    max_staleness: int = 0
    staleness_policy: str = "pace"
    temperature: float = 1.0
    raw_logprobs: bool = False
    has_sampler_logprobs: bool = True
    has_topk_logprobs: bool = False
    has_token_versions: bool = True
    has_reference: bool = False
    reward_components: int = 1
    adam_eps: float = 1e-8
    governs: bool = False
    n_mini: int = 1
    groups_per_step: int | None = None
    min_informative_groups: int | None = None
    min_informative_frac: float | None = None


def needs_heads(spec: Objective) -> bool:
    """Whether an objective looks at the sampler's likeliest tokens beside the sampled one."""
    return spec.loss in TOPK or spec.score_centring


def corrects(spec: Objective) -> bool:
    """Whether anything in the objective accounts for the sampler not being the learner."""
    masks = (spec.sequence_mask_low, spec.sequence_mask_high, spec.veto_low, spec.veto_high)
    return (
        spec.correction != "none"
        or spec.loss in SAMPLER_ANCHORED
        or (uses_ratio(spec) and spec.proximal == "sampler")
        or any(bound is not None for bound in (*masks, spec.off_policy_delta, spec.m2po_tau))
    )


def needs_sampler(spec: Objective) -> bool:
    """Whether the objective cannot be computed without the sampler's logprobs."""
    in_reward = spec.kl_beta > 0 and spec.kl_place == "reward"
    anchored = spec.proximal in ("sampler", "approximate")
    return corrects(spec) or anchored or spec.score_centring or in_reward


Rules = Iterator[tuple[bool, str]]  # whether something is wrong, and what to say then


def uses_ratio(spec: Objective) -> bool:
    """Whether the loss takes r, the ratio to what `proximal` names."""
    return spec.loss in ("clip", "gspo", "cispo", "sapo", "importance")
