"""Ranges of the objective's numbers, each field by itself or with its other bound; no torch here."""

from __future__ import annotations

from slipstream.algo.settings.spec import Objective

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
