"""Which settings cannot go together, all found at once; no torch here.

Each rule is a condition and what to say. Refused pairs compute something wrong or nothing; those that are only
doubtful are in doubts.py.
"""

from __future__ import annotations

from slipstream.algo.settings.context import (
    GROUPED,
    SAMPLER_ANCHORED,
    STD_ADVANTAGES,
    Context,
    Rules,
    corrects,
    needs_heads,
    needs_sampler,
    uses_ratio,
)
from slipstream.algo.settings.doubts import doubts
from slipstream.algo.settings.spec import Objective, invalid

POSITIVE = (
    "overlong_length", "overlong_buffer", "advantage_clamp", "sapo_tau_pos", "sapo_tau_neg", "dppo_ratio_cap",
    "cap_high", "sequence_mask_high", "veto_high", "m2po_tau", "horizon", "kl_coeff_clamp",
)  # fmt: skip
NOT_NEGATIVE = (
    "overlong_penalty", "length_coeff", "std_epsilon", "clip_low", "clip_high", "dppo_low", "dppo_high", "dro_beta",
    "cap_low", "sequence_mask_low", "veto_low", "kl_beta",
)  # fmt: skip
KL_LIMIT = 20
ORDERED = (
    ("reward_low", "reward_high"),
    ("cap_low", "cap_high"),
    ("sequence_mask_low", "sequence_mask_high"),
    ("veto_low", "veto_high"),
)


def out_of_range(spec: Objective) -> list[str]:
    """Numbers that no method can mean, one line each; fields that are None are off and never wrong."""
    values = vars(spec)
    problems = [f"{n} {values[n]} must be over 0" for n in POSITIVE if values[n] is not None and values[n] <= 0]
    problems += [
        f"{n} {values[n]} must not be negative" for n in NOT_NEGATIVE if values[n] is not None and values[n] < 0
    ]
    if spec.kl_coeff_clamp is not None and spec.kl_coeff_clamp >= KL_LIMIT:
        problems.append(
            f"kl_coeff_clamp {spec.kl_coeff_clamp} must be under {KL_LIMIT}: it is in nats on the log-ratio, and "
            f"e^{KL_LIMIT} bounds nothing; 5 is a good one"
        )
    for low, high in ORDERED:
        if values[low] is not None and values[high] is not None and values[low] > values[high]:
            problems.append(f"{low} {values[low]} must not be over {high} {values[high]}")
    return problems


__all__ = ["Context", "contradictions", "corrects", "needs_heads", "needs_sampler"]


def contradictions(spec: Objective, context: Context | None = None) -> tuple[list[str], list[str]]:
    """Everything that is wrong with an objective in its context: (refused, warned), one line each."""
    if mistyped := invalid(spec):
        return mistyped, []
    context = context or Context()
    refused = [text for rules in _REFUSED for wrong, text in rules(spec, context) if wrong]
    warned = [text for wrong, text in doubts(spec, context) if wrong]
    return out_of_range(spec) + refused, warned


def _sequence_ratio(spec: Objective) -> bool:
    return spec.loss in ("gspo", "vespo")


def _off_policy(s: Objective, c: Context) -> Rules:
    weighted = s.correction != "none"
    yield (
        c.max_staleness > 0 and not corrects(s),
        f"max_staleness {c.max_staleness} with no correction of any kind; set correction: tis, or a loss with a "
        "ratio and proximal: sampler",
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
        weighted and s.proximal == "sampler" and uses_ratio(s),
        f"correction {s.correction} with proximal sampler corrects twice; set correction: none, or proximal: none "
        "(or recompute, with n_mini over 1)",
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
        s.kl_coeff_clamp is not None and s.kl_beta == 0,
        f"kl_coeff_clamp {s.kl_coeff_clamp} with kl_beta 0 bounds nothing; set kl_beta, or kl_coeff_clamp: null",
    )
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
        s.advantage in GROUPED and s.advantage not in STD_ADVANTAGES and c.group_size == 1,
        f"advantage {s.advantage} compares the samples of a group, but group_size is 1, so none would ever train",
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
    yield c.temperature == 0, "sampling temperature 0 explores nothing and has no logprobs; use > 0"
    yield (
        c.raw_logprobs and c.temperature != 1.0,
        f"raw engine logprobs with temperature {c.temperature}; use processed logprobs",
    )


_REFUSED = (_off_policy, _losses, _rewards, _sampling)
