"""Which settings cannot go together, all found at once; no torch here.

Each rule is a condition and what to say. Refused pairs compute something wrong or nothing; warned pairs compute
what was asked for, which is seldom what was meant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.algo.ranges import out_of_range
from slipstream.algo.spec import Objective, invalid

SAMPLER_ANCHORED = ("vespo", "dppo_tv", "dppo_kl", "dppo_topk_tv", "dppo_topk_kl", "dro")
TOPK = ("dppo_topk_tv", "dppo_topk_kl")
STD_ADVANTAGES = ("grpo", "gdpo", "batch_scaled")


@dataclass(frozen=True)
class Context:
    """What the rules need to know and the objective does not hold; defaults contradict nothing."""

    group_size: int = 8
    batch_samples: int | None = None
    max_staleness: int = 0
    staleness_policy: str = "pace"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    learner_repeats_warp: bool = False
    raw_logprobs: bool = False
    has_sampler_logprobs: bool = True
    has_topk_logprobs: bool = False
    has_token_versions: bool = True
    has_reference: bool = False
    reward_components: int = 1
    adam_eps: float = 1e-8
    n_mini: int = 1
    groups_per_step: int | None = None
    min_informative_groups: int | None = None
    min_informative_frac: float | None = None


def needs_heads(spec: Objective) -> bool:
    """Whether an objective looks at the sampler's likeliest tokens beside the sampled one."""
    return spec.loss in TOPK or spec.score_centring


def contradictions(spec: Objective, context: Context | None = None) -> tuple[list[str], list[str]]:
    """Everything that is wrong with an objective in its context: (refused, warned), one line each."""
    if mistyped := invalid(spec):
        return mistyped, []
    context = context or Context()
    refused = [text for rules in _REFUSED for wrong, text in rules(spec, context) if wrong]
    warned = [text for wrong, text in _warned(spec, context) if wrong]
    return out_of_range(spec) + refused, warned


def corrects(spec: Objective) -> bool:
    """Whether anything in the objective accounts for the sampler not being the learner."""
    masks = (spec.sequence_mask_low, spec.sequence_mask_high, spec.veto_low, spec.veto_high)
    return (
        spec.correction != "none"
        or spec.loss in SAMPLER_ANCHORED
        or (_uses_ratio(spec) and spec.proximal == "sampler")
        or any(bound is not None for bound in (*masks, spec.off_policy_delta, spec.m2po_tau))
    )


def needs_sampler(spec: Objective) -> bool:
    """Whether the objective cannot be computed without the sampler's logprobs."""
    in_reward = spec.kl_beta > 0 and spec.kl_place == "reward"
    anchored = spec.proximal in ("sampler", "approximate")
    return corrects(spec) or anchored or spec.score_centring or in_reward


Rules = Iterator[tuple[bool, str]]


def _uses_ratio(spec: Objective) -> bool:
    return spec.loss in ("clip", "gspo", "cispo", "sapo", "importance")


def _sequence_ratio(spec: Objective) -> bool:
    return spec.loss in ("gspo", "vespo")


def _off_policy(s: Objective, c: Context) -> Rules:
    weighted = s.correction != "none"
    yield (
        c.max_staleness > 0 and not corrects(s),
        f"max_staleness {c.max_staleness} with no correction of any kind; set correction, or proximal: sampler",
    )
    yield (
        needs_sampler(s) and not c.has_sampler_logprobs,
        f"correction {s.correction}, proximal {s.proximal}, loss {s.loss} need sampler logprobs, which are off",
    )
    yield (
        weighted and s.loss in SAMPLER_ANCHORED,
        f"correction {s.correction} with loss {s.loss} corrects twice; set correction: none",
    )
    yield (
        weighted and s.proximal == "sampler" and _uses_ratio(s),
        f"correction {s.correction} with proximal sampler corrects twice; set one of them to none",
    )
    yield (
        s.correction == "mis" and s.cap_high is None and s.cap_low is None,
        "correction mis without cap_high or cap_low bounds nothing; set one, or correction: raw",
    )
    yield s.correction == "tis" and s.cap_high is None, "correction tis needs cap_high"
    yield (
        s.m2po_tau is not None and s.proximal != "recompute",
        f"m2po_tau needs proximal: recompute (the batch's logprobs before the step), got {s.proximal}",
    )
    yield (
        s.proximal == "approximate" and not c.has_token_versions,
        "proximal approximate needs per-token versions, which the engine doesn't give",
    )
    yield (
        c.staleness_policy == "token" and not c.has_token_versions,
        "staleness policy token needs per-token versions, which the engine doesn't give",
    )
    yield (
        not c.has_topk_logprobs and needs_heads(s),
        f"{'score_centring' if s.score_centring else 'loss ' + s.loss} needs the sampler's top-k logprobs; "
        "set sampling.top_logprobs",
    )


def _losses(s: Objective, c: Context) -> Rules:
    yield s.dual_clip is not None and _sequence_ratio(s), f"dual_clip with the sequence ratio of loss {s.loss}"
    yield (
        s.dual_clip is not None and s.loss == "cispo",
        "dual_clip with loss cispo, which has no minimum to bound",
    )
    yield (
        s.dual_clip is not None and s.loss not in ("clip", "gspo", "vespo", "cispo"),
        f"dual_clip with loss {s.loss}, which doesn't use it",
    )
    yield s.dual_clip is not None and s.dual_clip <= 1, f"dual_clip {s.dual_clip} must be greater than 1"
    yield (
        s.loss == "gspo" and s.aggregation != "sequence_mean",
        f"loss gspo is a mean over sequences: aggregation must be sequence_mean, got {s.aggregation}",
    )
    yield (
        s.loss == "cispo" and s.correction_level != "token" and s.correction != "none",
        f"loss cispo is per token: correction_level must be token, got {s.correction_level}",
    )
    yield (
        s.loss == "cispo" and s.proximal == "none",
        "loss cispo with proximal none has a ratio of 1 and caps nothing; set proximal: sampler",
    )
    yield (
        s.score_centring
        and not (s.loss in ("reinforce", "no_ratio", "clip") and s.proximal == "none" and s.dual_clip is None),
        f"score_centring with loss {s.loss} and proximal {s.proximal}; needs reinforce or clip, and none",
    )
    yield (
        s.score_centring and s.correction != "none" and s.correction_level != "token",
        f"score_centring needs correction_level token, got {s.correction_level}",
    )
    yield s.aggregation == "fixed_length" and s.horizon is None, "aggregation fixed_length needs horizon"
    yield (
        s.kl_beta > 0 and not c.has_reference,
        f"kl_beta {s.kl_beta} without a reference model (learner.reference.source)",
    )
    yield s.kl_beta == 0 and c.has_reference, "a reference model with kl_beta 0 would only cost time and memory"
    yield (
        s.kl_beta > 0 and s.kl_place == "reward" and s.kl_kind.endswith("weighted"),
        f"kl_kind {s.kl_kind} weights a gradient; in the reward use k1, k2 or k3",
    )


def _rewards(s: Objective, c: Context) -> Rules:
    yield (
        s.advantage in STD_ADVANTAGES and c.group_size == 1,
        f"advantage {s.advantage} normalises by a standard deviation, but group_size is 1",
    )
    yield (
        c.batch_samples is not None and c.group_size > 0 and c.batch_samples % c.group_size != 0,
        f"batch of {c.batch_samples} samples is not a multiple of group_size {c.group_size}",
    )
    yield (
        s.advantage == "gdpo" and c.reward_components < 2,
        f"advantage gdpo needs two or more reward components, got {c.reward_components}",
    )
    in_reward = s.kl_beta > 0 and s.kl_place == "reward"
    shaping = (
        s.overlong_length is not None
        or s.length_reward != "none"
        or s.reward_scale != 1.0
        or s.reward_low is not None
        or s.reward_high is not None
    )
    yield s.advantage == "gdpo" and shaping, "advantage gdpo takes components: shape those, not their sum"
    yield s.advantage == "given" and shaping, "advantage given takes no rewards: there is nothing to shape"
    yield (
        s.advantage in ("gdpo", "given") and in_reward,
        f"advantage {s.advantage} takes no KL in the reward; set kl_place: loss",
    )
    yield (
        s.advantage == "maxrl" and (s.overlong_length is not None or s.length_reward == "linear" or in_reward),
        "advantage maxrl needs rewards >= 0, which overlong_length, length_reward linear and kl_place reward lower",
    )
    yield (
        (s.overlong_length is None) != (s.overlong_buffer is None),
        "overlong_length and overlong_buffer go together",
    )
    yield (
        s.overlong_length is not None
        and s.overlong_buffer is not None
        and s.overlong_buffer > s.overlong_length,
        f"overlong_buffer {s.overlong_buffer} must not be over overlong_length {s.overlong_length}",
    )
    yield (
        c.min_informative_groups is not None and c.min_informative_frac is not None,
        "min_informative_groups and min_informative_frac are two forms of one quota; set one",
    )


def _sampling(s: Objective, c: Context) -> Rules:
    warp = not c.learner_repeats_warp
    for name, value, neutral in (
        ("top_p", c.top_p, 1.0),
        ("top_k", c.top_k, 0),
        ("min_p", c.min_p, 0.0),
        ("repetition_penalty", c.repetition_penalty, 1.0),
    ):
        off = value <= neutral if name == "top_k" else value == neutral
        yield warp and not off, f"{name} {value} in training rollouts biases every ratio; set it to {neutral}"
    yield c.temperature == 0, "sampling temperature 0 explores nothing and has no logprobs; use > 0"
    yield (
        s.temperature is not None and s.temperature != c.temperature,
        f"objective temperature {s.temperature} is not the sampling temperature {c.temperature}",
    )
    yield (
        c.raw_logprobs and c.temperature != 1.0,
        f"raw engine logprobs with temperature {c.temperature}; use processed logprobs",
    )


_REFUSED = (_off_policy, _losses, _rewards, _sampling)


def _warned(s: Objective, c: Context) -> Rules:
    yield (
        s.aggregation == "fixed_length" and c.adam_eps > 1e-7,
        f"aggregation fixed_length makes small gradients: adam_eps {c.adam_eps} should be 1e-8",
    )
    widest = max((bound for bound in (s.clip_low, s.clip_high) if bound is not None), default=0.0)
    yield (
        s.loss == "gspo" and widest > 0.05,
        f"loss gspo with a clip of {widest} never clips; the paper has 3e-4, 4e-4",
    )
    idle = "dual_clip" if s.dual_clip is not None else f"loss {s.loss}"
    yield (
        s.proximal == "none" and (s.dual_clip is not None or s.loss in ("gspo", "sapo", "importance")),
        f"{idle} with proximal none has a ratio of 1 and never acts; set proximal: sampler",
    )
    yield (
        c.n_mini > 1 and s.proximal == "none" and _uses_ratio(s),
        f"n_mini {c.n_mini} with proximal none: each mini-step's ratio is 1, so nothing bounds how far they go "
        "together; set proximal: recompute",
    )
    yield (
        c.min_informative_groups is not None
        and c.groups_per_step is not None
        and 2 * c.min_informative_groups < c.groups_per_step,
        f"min_informative_groups {c.min_informative_groups} is under half of {c.groups_per_step} groups a step",
    )
    yield (
        s.kl_beta > 0 and s.kl_place == "loss" and s.kl_coeff_clamp is None,
        f"kl_beta {s.kl_beta} without kl_coeff_clamp: the gradient of k3 has no bound; 5 is a good one",
    )
    yield (
        c.max_staleness > 8 and s.m2po_tau is None,
        f"max_staleness {c.max_staleness} without a second-moment control (m2po_tau)",
    )
    yield (
        s.advantage in STD_ADVANTAGES and 1 < c.group_size < 4,
        f"group_size {c.group_size} with a standard deviation of so few rewards",
    )
