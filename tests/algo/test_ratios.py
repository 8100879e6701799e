from __future__ import annotations

import math

import pytest
import torch

from slipstream.algo import masks
from slipstream.algo.ratios import as_ratio, bounded_weight, level_ratio, log_ratio, proximal_guess

ONE = torch.ones(1, 1, dtype=torch.bool)


def ratio_of(log_value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return as_ratio(log_ratio(torch.full((1, 1), log_value, dtype=dtype), torch.zeros(1, 1, dtype=dtype), ONE))


@pytest.mark.parametrize("gap", [-200.0, -20.0, 0.0, 20.0, 88.8, 100.0, 200.0])
def test_log_ratio_is_clamped_before_the_exponential(gap: float) -> None:
    """Case 54."""
    rho = ratio_of(gap)
    assert float(rho) == pytest.approx(math.exp(max(-20, min(20, gap))), rel=1e-6)
    assert float(bounded_weight(rho, "tis", high=2.0)[0]) == pytest.approx(min(2.0, math.exp(max(-20.0, gap))))
    inside = 0.5 <= math.exp(gap) <= 2
    assert float(bounded_weight(rho, "mis", high=2.0, low=0.5)[0]) == (1.0 if inside else 0.0)


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_masked_entries_have_log_ratio_zero_whatever_they_hold(poison: float) -> None:
    top_BT = torch.tensor([[poison, -1.0]], requires_grad=True)
    ratio_BT = log_ratio(top_BT, torch.tensor([[poison, -2.0]]), torch.tensor([[False, True]]))
    assert ratio_BT.tolist() == [[0.0, 1.0]]
    ratio_BT.sum().backward()
    assert top_BT.grad is not None
    assert top_BT.grad.tolist() == [[0.0, 1.0]]


def test_each_weight_and_what_it_touched() -> None:
    rho = torch.tensor([0.2, 0.5, 1.5, 2.0, 9.0])
    cases = {
        ("tis", 2.0, None): [0.2, 0.5, 1.5, 2.0, 2.0],
        ("tis", 2.0, 0.5): [0.5, 0.5, 1.5, 2.0, 2.0],
        ("mis", 2.0, 0.5): [0.0, 0.5, 1.5, 2.0, 0.0],
        ("mis", 2.0, None): [0.2, 0.5, 1.5, 2.0, 0.0],
        ("raw", 2.0, 0.5): [0.2, 0.5, 1.5, 2.0, 9.0],
        ("none", 2.0, 0.5): [1.0] * 5,
    }
    for (kind, high, low), expected in cases.items():
        weight, touched = bounded_weight(rho, kind, high, low)  # type: ignore[arg-type]
        torch.testing.assert_close(weight, torch.tensor(expected))
        bites = kind in ("tis", "mis")
        assert touched.tolist() == [bites and low is not None, False, False, False, bites]


@pytest.mark.parametrize("length", [100, 2000])
def test_product_grows_with_length_and_the_geometric_mean_does_not(length: int) -> None:
    """Case 57."""
    log_rho_BT = torch.full((1, length), 0.012, dtype=torch.float64)
    mask_BT = torch.ones(1, length, dtype=torch.bool)
    product, geometric = (float(level_ratio(log_rho_BT, mask_BT, k)[0, 0]) for k in ("product", "geometric"))
    # exp(24) = 2.6e10 is above the clamp at exp(20) = 4.9e8; either way it is far over any cap
    assert product == pytest.approx({100: 3.3201, 2000: math.exp(20)}[length], rel=1e-4)
    assert geometric == pytest.approx(1.01207, abs=1e-5)
    assert float(bounded_weight(torch.tensor(product), "mis", high=3.0)[0]) == 0
    assert masks.geometric_inside(log_rho_BT, mask_BT, 0.98, 1.02).all()
    assert not masks.geometric_inside(log_rho_BT, mask_BT, 0.999, 1.002).any()


def test_second_moment_is_of_the_raw_differences() -> None:
    """One gap of 60 among 1e5 tokens: a mean of 0.036 with it; clamped to 20 it would be 0.004 and stay."""
    sampler_BT, mask_BT = torch.zeros(1, 100_000), torch.ones(1, 100_000, dtype=torch.bool)
    proximal_BT = sampler_BT.clone()
    proximal_BT[0, 5] = -60.0
    kept_BT = masks.second_moment_kept(sampler_BT, proximal_BT, mask_BT, 0.02)
    assert (~kept_BT).nonzero().tolist() == [[0, 5]]


def test_geometric_mean_counts_valid_tokens_only() -> None:
    log_rho_BT = torch.tensor([[0.3, 0.3, 5.0]])
    mask_BT = torch.tensor([[True, True, False]])
    assert float(level_ratio(log_rho_BT, mask_BT, "geometric")[0, 0]) == pytest.approx(math.exp(0.3))
    assert float(level_ratio(log_rho_BT, mask_BT, "product")[0, 0]) == pytest.approx(math.exp(0.6))


def test_veto_drops_a_sequence_for_one_token() -> None:
    log_rho_BT = torch.tensor([[0.0, math.log(1e-5)], [0.0, 1.0], [math.log(101), 0.0], [0.0, 20.0]])
    mask_BT = torch.tensor([[True, True], [True, True], [True, True], [True, False]])
    assert masks.veto_free(log_rho_BT, mask_BT, 1e-4, 100.0).tolist() == [False, True, False, True]


def test_off_policy_mask_drops_only_negative_far_sequences() -> None:
    log_u_BT = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-0.1, -0.1], [-9.0, 1.0]])
    advantages_BT = torch.tensor([[-1.0], [1.0], [-1.0], [-1.0]]).expand(4, 2)
    mask_BT = torch.tensor([[True, True], [True, True], [True, True], [False, True]])
    assert masks.on_policy_enough(advantages_BT, log_u_BT, mask_BT, 0.5).tolist() == [False, True, True, True]


def test_m2po_drops_the_largest_until_the_mean_is_below_tau() -> None:
    sampler_BT = torch.tensor([[0.0, 0.1, -0.3], [0.5, 9.0, 0.2]])
    mask_BT = torch.tensor([[True, True, True], [True, False, True]])
    # squares .0 .01 .09 .25 .04: means of the smallest 4 are .035 and of all .078
    kept_BT = masks.second_moment_kept(sampler_BT, torch.zeros(2, 3), mask_BT, tau=0.04)
    assert kept_BT.tolist() == [[True, True, True], [False, False, True]]


def test_m2po_keeps_at_least_one_token() -> None:
    mask_BT = torch.ones(1, 2, dtype=torch.bool)
    kept_BT = masks.second_moment_kept(torch.tensor([[3.0, 2.0]]), torch.zeros(1, 2), mask_BT, tau=0.04)
    assert kept_BT.tolist() == [[False, True]]
    empty_BT = masks.second_moment_kept(torch.zeros(1, 2), torch.zeros(1, 2), ~mask_BT, tau=0.04)
    assert not empty_BT.any()


def test_tokens_over_the_age_bound_are_not_fresh_and_the_future_is_an_error() -> None:
    ages_BT = torch.tensor([[0, 1, 2, -5]])
    mask_BT = torch.tensor([[True, True, True, False]])
    assert masks.fresh_tokens(ages_BT, mask_BT, 1).tolist() == [[True, True, False, True]]
    with pytest.raises(ValueError, match=r"sample 0, token 3: age -5 is in the future"):
        masks.fresh_tokens(ages_BT, torch.ones(1, 4, dtype=torch.bool), 1)


def test_proximal_guess_is_one_version_back() -> None:
    sampler_BT, learner_BT = torch.zeros(1, 4), torch.full((1, 4), -1.0, requires_grad=True)
    guess_BT = proximal_guess(sampler_BT, learner_BT, torch.tensor([[0, 1, 2, 4]]))
    torch.testing.assert_close(guess_BT, torch.tensor([[0.0, 0.0, -0.5, -0.75]]))
    assert not guess_BT.requires_grad
