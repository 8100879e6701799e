"""Settings that compute what was asked for, which is seldom what was meant: a warning each; no torch here."""

from __future__ import annotations

from slipstream.algo.settings.context import SAMPLER_ANCHORED, STD_ADVANTAGES, Context, Rules, uses_ratio
from slipstream.algo.settings.spec import Objective


def doubts(s: Objective, c: Context) -> Rules:
    """Every doubt, with whether it applies."""
    yield (
        s.aggregation == "fixed_length" and c.adam_eps > 1e-7,
        f"aggregation fixed_length makes small gradients: adam_eps {c.adam_eps} should be 1e-8",
    )
    widest = max((bound for bound in (s.clip_low, s.clip_high) if bound is not None), default=0.0)
    yield (
        s.loss == "gspo" and widest > 0.05,
        f"loss gspo with a clip of {widest} never clips; the paper has 3e-4, 4e-4",
    )
    yield from _idle(s, c)
    yield (
        s.correction != "none" and s.correction_level == "geometric",
        "correction_level geometric as a weight is biased: a mean is no ratio of probabilities; set token or "
        "product, and use the mean in sequence_mask_low and sequence_mask_high",
    )
    yield (
        c.min_informative_groups is not None
        and c.groups_per_step is not None
        and 2 * c.min_informative_groups < c.groups_per_step,
        f"min_informative_groups {c.min_informative_groups} is under half of {c.groups_per_step} groups a step",
    )
    yield (
        s.kl_beta > 0 and s.kl_coeff_clamp is None and s.kl_kind != "k1",
        f"kl_beta {s.kl_beta} without kl_coeff_clamp: one token at z = 20 weighs 4.85e8 in k3; 5 is a good bound",
    )
    yield (
        c.max_staleness > 8 and s.m2po_tau is None and not c.governs,
        f"max_staleness {c.max_staleness} without a second-moment control (m2po_tau) or one of the effective sample "
        "size (learner.governor.act)",
    )
    yield (
        s.advantage in STD_ADVANTAGES and 1 < c.group_size < 4 and not c.small_groups_meant,
        f"group_size {c.group_size} with a standard deviation of so few rewards",
    )


def _idle(s: Objective, c: Context) -> Rules:
    """Ratios that are 1 by what they are taken against, and proximal policies that nothing is taken against."""
    start = s.proximal == "none" or (s.proximal == "recompute" and c.n_mini == 1)
    again = s.proximal == "recompute"
    one = f"with proximal {s.proximal}{' and n_mini 1' if again else ''} the ratio is 1"
    mend = f"set proximal: sampler and correction: none{', or n_mini over 1' if again else ''}"
    for name in ("clip_low", "clip_high", "dual_clip"):
        bound = getattr(s, name)
        yield (
            start and s.loss == "clip" and bound is not None,
            f"{name} {bound} never acts: {one}; {mend}, or {name}: null",
        )
    yield (
        start and s.loss in ("gspo", "cispo", "sapo", "importance"),
        f"loss {s.loss} never acts: {one}; {mend}",
    )
    yield (
        c.n_mini > 1 and s.proximal == "none" and uses_ratio(s),
        f"n_mini {c.n_mini} with proximal none: each mini-step's ratio is 1, so nothing bounds how far they go "
        "together; set proximal: recompute",
    )
    yield (
        s.proximal in ("recompute", "approximate") and s.loss in SAMPLER_ANCHORED and s.m2po_tau is None,
        f"proximal {s.proximal} with loss {s.loss}, whose ratio is to the sampler: it changes nothing in the loss; "
        "set proximal: sampler",
    )
