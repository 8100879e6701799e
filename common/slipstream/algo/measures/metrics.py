"""Names and help of every metric of the objective, listed once, and the tally they are computed from.

A tally holds *sums* and *maxima* in float64, so that micro-batches and ranks combine by adding the one vector
and taking the maximum of the other, and means are means over tokens or sequences, never means of means.
Names follow Prometheus conventions: base units, `_ratio` for a share between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

PREFIX = "slipstream_objective_"
AGES = tuple(range(9))  # exact buckets of the age histogram; the last one holds all older tokens


@dataclass(frozen=True)
class Metric:
    """One exported value: sum(top) / sum(bottom), or sum(top) alone, or the maximum named `maximum`."""

    name: str
    help: str
    top: str = ""
    bottom: str = ""
    maximum: str = ""
    label: str = ""

    @property
    def key(self) -> str:
        """Full name, with its label when it has one."""
        return f"{PREFIX}{self.name}{{{self.label}}}" if self.label else PREFIX + self.name


def _share(name: str, top: str, bottom: str, text: str) -> Metric:
    return Metric(name, text, top=top, bottom=bottom)


METRICS: tuple[Metric, ...] = (
    Metric("loss", "Loss of the step, policy and KL and entropy terms together", top="loss"),
    Metric("tokens", "Tokens in the loss (its mask, before any correction)", top="tokens_batch"),
    Metric("gradient_tokens", "Tokens whose policy loss has a gradient", top="gradient_tokens"),
    Metric("sequences", "Sequences with at least one token in the loss", top="sequences_batch"),
    _share("clip_high_ratio", "clip_high", "tokens", "Share of tokens clipped or masked by the upper bound"),
    _share("clip_low_ratio", "clip_low", "tokens", "Share of tokens clipped or masked by the lower bound"),
    _share("policy_ratio_mean", "ratio", "tokens", "Mean of r, learner over proximal probability"),
    Metric("policy_ratio_max", "Largest r, learner over proximal probability", maximum="ratio"),
    _share("importance_raw_mean", "raw", "sampler_tokens", "Mean of rho before any truncation or mask"),
    Metric("importance_raw_max", "Largest rho before any truncation or mask", maximum="raw"),
    _share("importance_weight_mean", "weight", "tokens", "Mean correction weight after truncation and masks"),
    Metric("importance_weight_max", "Largest correction weight after truncation and masks", maximum="weight"),
    _share("truncated_weight_ratio", "truncated_weight", "tokens", "Share of tokens whose weight met a bound"),
    _share("masked_ratio", "masked", "tokens", "Share of tokens with weight 0, for any reason"),
    _share("masked_bounds_ratio", "masked_bounds", "tokens", "Share of tokens that MIS or IcePop zeroed"),
    _share(
        "masked_sequence_ratio", "masked_sequence", "tokens", "Share of tokens the geometric-mean mask zeroed"
    ),
    _share("masked_veto_ratio", "masked_veto", "tokens", "Share of tokens in sequences that the veto dropped"),
    _share("masked_off_policy_ratio", "masked_off_policy", "tokens", "Share of tokens off-policy mask zeroed"),
    _share("masked_m2po_ratio", "masked_m2po", "tokens", "Share of tokens that M2PO trimmed"),
    _share("masked_age_ratio", "masked_age", "tokens_batch", "Share of tokens masked because of their age"),
    _share("kept_sequences_ratio", "kept_sequences", "sequences", "Share of sequences with a weight left"),
    Metric("effective_tokens_ratio", "Effective sample size over tokens, as a share of them", top="ess_token"),
    Metric(
        "effective_fresh_ratio",
        "Effective sample size over tokens inside the age bound, as a share",
        top="ess_fresh",
    ),
    Metric("effective_sequences_ratio", "Effective sample size over sequences, as a share", top="ess_sequence"),
    _share("mismatch_k1_nats", "mismatch_k1", "sampler_tokens", "KL(sampler||learner), k1 estimate, per token"),
    _share("mismatch_k3_nats", "mismatch_k3", "sampler_tokens", "KL(sampler||learner), k3 estimate, per token"),
    _share(
        "kl_nats",
        "kl",
        "kl_tokens",
        "KL to the reference by the chosen estimator, per token inside the age bound",
    ),
    Metric("kl_nats_max", "Largest token KL to the reference", maximum="kl"),
    _share("entropy_nats", "entropy", "entropy_tokens", "Mean entropy of the learner, per token"),
    _share("zero_variance_ratio", "tied_groups", "groups", "Share of groups whose rewards are all equal"),
    _share("all_right_ratio", "right_groups", "groups", "Share of groups all equal at a reward > 0"),
    _share("all_wrong_ratio", "wrong_groups", "groups", "Share of groups all equal at a reward <= 0"),
    Metric("dropped_groups", "Groups with fewer than two scored samples, left out", top="dropped_groups"),
    Metric("unscored_samples", "Samples without a reward, left out", top="unscored"),
    _share("truncated_ratio", "truncated", "samples", "Share of samples cut off at their length limit"),
    _share("response_tokens_mean", "lengths", "samples", "Mean completion length in tokens"),
    Metric("response_tokens_max", "Longest completion in tokens", maximum="lengths"),
    _share("reward_mean", "rewards", "scored", "Mean reward of scored samples, before shaping"),
    *(
        Metric(
            "trained_tokens_by_age", "Tokens with weight by age in versions", f"age_{age}", label=f'age="{age}"'
        )
        for age in AGES
    ),
)

_EFFECTIVE = (
    *("raw_square", "sequence_raw", "sequence_raw_square", "sampler_sequences"),
    *("fresh_raw", "fresh_raw_square", "fresh_tokens"),
)
_NAMED = {name for m in METRICS for name in (m.top, m.bottom) if name and not name.startswith("ess_")}
SUMS: tuple[str, ...] = (*sorted(_NAMED), *_EFFECTIVE)
MAXIMA: tuple[str, ...] = tuple(m.maximum for m in METRICS if m.maximum)
_SUM_AT = {name: i for i, name in enumerate(SUMS)}
_MAXIMUM_AT = {name: i for i, name in enumerate(MAXIMA)}


@dataclass(frozen=True)
class Tally:
    """Mergeable state of all metrics: `sums` [len(SUMS)] to add, `maxima` [len(MAXIMA)] to maximise."""

    sums: Tensor
    maxima: Tensor

    @staticmethod
    def of(sums: Mapping[str, Tensor | float], maxima: Mapping[str, Tensor | float]) -> Tally:
        """A tally from named values; names not given count 0 (sums) and -inf (maxima).

        Raises:
            KeyError: A name that no metric uses.
        """
        return Tally(_vector(sums, _SUM_AT, 0.0), _vector(maxima, _MAXIMUM_AT, -torch.inf))

    def merge(self, other: Tally) -> Tally:
        """The tally of both parts together."""
        return Tally(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))


def finish_metrics(tally: Tally) -> dict[str, float]:
    """Value of each metric that had anything to count, by full name (with the label of the age histogram)."""
    sums = dict(zip(SUMS, tally.sums.tolist(), strict=True))
    maxima = dict(zip(MAXIMA, tally.maxima.tolist(), strict=True))
    sums["ess_token"] = _effective(sums["raw"], sums["raw_square"], sums["sampler_tokens"])
    sums["ess_fresh"] = _effective(sums["fresh_raw"], sums["fresh_raw_square"], sums["fresh_tokens"])
    sums["ess_sequence"] = _effective(
        sums["sequence_raw"], sums["sequence_raw_square"], sums["sampler_sequences"]
    )
    values = {}
    for metric in METRICS:
        if metric.maximum:
            value = maxima[metric.maximum]
        elif not metric.bottom:
            value = sums[metric.top]
        else:
            value = sums[metric.top] / sums[metric.bottom] if sums[metric.bottom] else float("-inf")
        if value != float("-inf"):
            values[metric.key] = value
    return values


def _vector(values: Mapping[str, Tensor | float], at: dict[str, int], empty: float) -> Tensor:
    """Named values at their places [len(at)], moved to the host in one copy."""
    vector = torch.full((len(at),), empty, dtype=torch.float64)
    if values:
        device = next((v.device for v in values.values() if isinstance(v, Tensor)), None)
        stacked = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in values.values()])
        vector[[at[name] for name in values]] = stacked.cpu()
    return vector


def _effective(total: float, squares: float, count: float) -> float:
    """(sum w)^2 / (n sum w^2), between 0 and 1; -inf when nothing was counted."""
    return total * total / (squares * count) if squares and count else float("-inf")
