from __future__ import annotations

import re

import pytest
import torch

from slipstream.algo.measures.metrics import METRICS, Tally, finish_metrics
from slipstream.algo.objective import objective
from slipstream.algo.prepare import GlobalBatch, prepare
from slipstream.algo.settings.recipes import resolve

NAME = "slipstream_objective_"


def weights_of(recipe: str, **fields: object) -> dict[str, float]:
    """Metrics of three tokens whose ratios are .606531, 12.182494 and .818731."""
    spec = resolve(recipe, {"advantage": "given", **fields})
    batch = GlobalBatch(
        rewards_B=torch.zeros(3),
        groups_B=torch.zeros(3, dtype=torch.long),
        lengths_B=torch.ones(3, dtype=torch.long),
        sampler_BT=torch.full((3, 1), -4.0, dtype=torch.float64),
        given_B=torch.ones(3),
    )
    gaps = torch.tensor([[-0.5], [2.5], [-0.2]], dtype=torch.float64)
    prepared = prepare(spec, batch)
    return finish_metrics(objective(spec, prepared, -4.0 + gaps)[1].merge(prepared.tally))


def test_ratios_are_measured_before_and_after_the_cut() -> None:
    """Case 58."""
    truncated = weights_of("tis", cap_high=2.0)
    assert truncated[NAME + "importance_raw_mean"] == pytest.approx(4.5359, abs=1e-4)
    assert truncated[NAME + "importance_raw_max"] == pytest.approx(12.182494)
    assert truncated[NAME + "importance_weight_mean"] == pytest.approx(1.1418, abs=1e-4)
    assert truncated[NAME + "truncated_weight_ratio"] == pytest.approx(1 / 3)
    assert truncated[NAME + "masked_ratio"] == 0
    masked = weights_of("mis", cap_high=2.0, cap_low=None)
    assert masked[NAME + "importance_raw_mean"] == pytest.approx(4.5359, abs=1e-4)
    assert masked[NAME + "importance_weight_mean"] == pytest.approx(0.4751, abs=1e-4)
    assert masked[NAME + "masked_bounds_ratio"] == pytest.approx(1 / 3)
    assert masked[NAME + "gradient_tokens"] == 2
    weights = torch.tensor([0.606531, 12.182494, 0.818731])
    effective = float(weights.sum() ** 2 / (3 * weights.square().sum()))
    assert masked[NAME + "effective_tokens_ratio"] == pytest.approx(effective, rel=1e-5)
    assert masked[NAME + "effective_sequences_ratio"] == pytest.approx(effective, rel=1e-5)
    assert masked[NAME + "mismatch_k1_nats"] == pytest.approx(-(-0.5 + 2.5 - 0.2) / 3)
    assert masked[NAME + "mismatch_k3_nats"] == pytest.approx(float((weights - 1).sum()) / 3 - 0.6, rel=1e-5)


def test_every_share_of_a_small_batch_is_what_a_hand_counts() -> None:
    """Ratios e^.5 and e^.4 (clipped high), 1, and e^-.5 (clipped low, and over the age bound)."""
    spec = resolve("grpo", {"proximal": "sampler", "correction": "none", "advantage": "given"})
    batch = GlobalBatch(
        rewards_B=torch.tensor([1.0, 1.0]),
        groups_B=torch.tensor([0, 0]),
        lengths_B=torch.tensor([3, 1]),
        sampler_BT=torch.full((2, 3), -1.0),
        truncated_B=torch.tensor([True, False]),
        ages_BT=torch.tensor([[0, 1, 1], [4, 0, 0]]),
        max_age=3,
        given_B=torch.tensor([1.0, -1.0]),
    )
    prepared = prepare(spec, batch)
    entropy_BT = torch.tensor([[1.0, 2.0, 3.0], [6.0, 99.0, 99.0]])
    _, tally = objective(spec, prepared, torch.tensor([[-0.5, -0.6, -1.0], [-1.5, 7.0, 7.0]]), entropy_BT)
    values = finish_metrics(tally.merge(prepared.tally))
    expected = {
        "tokens": 4, "sequences": 2, "gradient_tokens": 1, "clip_high_ratio": 1 / 2, "clip_low_ratio": 1 / 4,
        "masked_ratio": 1 / 4, "masked_age_ratio": 1 / 4, "kept_sequences_ratio": 1 / 2, "entropy_nats": 3.0,
        "policy_ratio_max": 1.6487213, "importance_raw_max": 1.6487213, "importance_weight_max": 1.0,
        "truncated_ratio": 1 / 2, "response_tokens_mean": 2.0, "response_tokens_max": 3,
        "zero_variance_ratio": 1, "all_right_ratio": 1, "all_wrong_ratio": 0, "mismatch_k1_nats": -0.1,
        'trained_tokens_by_age{age="0"}': 1, 'trained_tokens_by_age{age="1"}': 2,
        'trained_tokens_by_age{age="4"}': 0,
    }  # fmt: skip
    assert {name: values[NAME + name] for name in expected} == pytest.approx(expected)


def test_kl_is_that_of_the_tokens_inside_the_age_bound() -> None:
    batch = GlobalBatch(
        rewards_B=torch.tensor([1.0, 0.0]),
        groups_B=torch.tensor([0, 0]),
        lengths_B=torch.tensor([2, 1]),
        sampler_BT=torch.full((2, 2), -1.0),
        reference_BT=torch.tensor([[-9.0, -3.0], [-2.0, 0.0]]),
        ages_BT=torch.tensor([[5, 1], [0, 0]]),
        max_age=1,
    )
    spec = resolve("grpo", {"kl_kind": "k1", "kl_beta": 0.1})
    values = finish_metrics(objective(spec, prepare(spec, batch), torch.full((2, 2), -1.0))[1])
    assert values[NAME + "kl_nats"] == pytest.approx((2.0 + 1.0) / 2)
    assert values[NAME + "kl_nats_max"] == pytest.approx(2.0)


def test_cispo_caps_a_weight_and_keeps_the_gradient() -> None:
    values = weights_of("cispo")
    assert values[NAME + "clip_high_ratio"] == pytest.approx(1 / 3)
    assert values[NAME + "gradient_tokens"] == 3


def test_dro_has_a_gradient_without_an_advantage() -> None:
    assert weights_of("dro", advantage="mean_only")[NAME + "gradient_tokens"] == 3
    assert weights_of("tis")[NAME + "gradient_tokens"] == 3
    assert weights_of("tis", advantage="mean_only")[NAME + "gradient_tokens"] == 0


@pytest.mark.parametrize(("size", "expected"), [(2, 0.702), (4, 0.449), (8, 0.201)])
def test_share_of_groups_without_signal_is_what_probability_says(size: int, expected: float) -> None:
    """Case 34: binary reward, success rate .1819, 10 000 groups."""
    right = torch.rand(10_000 * size, generator=torch.Generator().manual_seed(size)) < 0.1819
    batch = GlobalBatch(
        rewards_B=right.double(),
        groups_B=torch.arange(10_000).repeat_interleave(size),
        lengths_B=torch.ones(10_000 * size, dtype=torch.long),
        sampler_BT=torch.full((10_000 * size, 1), -1.0),
    )
    values = finish_metrics(prepare(resolve("grpo"), batch).tally)
    assert values[NAME + "zero_variance_ratio"] == pytest.approx(expected, abs=0.015)
    both = values[NAME + "all_right_ratio"] + values[NAME + "all_wrong_ratio"]
    assert values[NAME + "zero_variance_ratio"] == pytest.approx(both)
    assert values[NAME + "all_right_ratio"] == pytest.approx(0.1819**size, abs=0.01)


def test_merging_is_by_sums_and_maxima() -> None:
    a = Tally.of({"ratio": 2.0, "tokens": 2.0}, {"ratio": 1.5})
    b = Tally.of({"ratio": 18.0, "tokens": 6.0}, {"ratio": 9.0})
    values = finish_metrics(a.merge(b))
    assert values[NAME + "policy_ratio_mean"] == 2.5
    assert values[NAME + "policy_ratio_max"] == 9.0


def test_nothing_counted_is_not_zero() -> None:
    values = finish_metrics(Tally.of({}, {}))
    assert NAME + "policy_ratio_mean" not in values
    assert NAME + "kl_nats_max" not in values
    assert NAME + "effective_tokens_ratio" not in values


def test_unknown_name_is_refused() -> None:
    with pytest.raises(KeyError, match="tokenz"):
        Tally.of({"tokenz": 1.0}, {})


def test_names_are_unique_and_follow_conventions() -> None:
    keys = [metric.key for metric in METRICS]
    assert len(keys) == len(set(keys))
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]+", metric.name)
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket"))
        assert metric.help[0].isupper()
