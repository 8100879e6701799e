from __future__ import annotations

import math

import pytest
import torch

from slipstream.algo import advantages as adv


def groups(*ids: int) -> torch.Tensor:
    return torch.tensor(ids)


def rewards(*values: float | None) -> torch.Tensor:
    return adv.reward_tensor(values)


def close(actual: torch.Tensor, *expected: float, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=atol)


@pytest.mark.parametrize("hole", [None, math.nan, math.inf, -math.inf])
def test_unscored_sample_leaves_mean_and_std(hole: float | None) -> None:
    """Case 5."""
    close(adv.mean_only(rewards(1, hole, 0, 1), groups(0, 0, 0, 0)), 1 / 3, 0, -2 / 3, 1 / 3)
    deviation = math.sqrt(2 / 9)
    close(
        adv.grpo(rewards(1, hole, 0, 1), groups(0, 0, 0, 0)),
        1 / 3 / deviation, 0, -2 / 3 / deviation, 1 / 3 / deviation,
    )  # fmt: skip


def test_group_of_one_has_no_advantage() -> None:
    """Case 25."""
    for std in ("population", "sample"):
        close(adv.grpo(rewards(0.7), groups(4), std), 0.0)
    for method in (adv.mean_only, adv.rloo, adv.gopo, adv.maxrl, adv.batch_scaled):
        close(method(rewards(0.7), groups(4)), 0.0)


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7])
@pytest.mark.parametrize("size", range(2, 17))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tied_group_is_exactly_zero(value: float, size: int, dtype: torch.dtype) -> None:
    """Case 26."""
    rewards_B = torch.full((size,), value, dtype=dtype)
    ids_B = torch.zeros(size, dtype=torch.long)
    mask_BT = torch.ones(size, 2, dtype=torch.bool)
    for std in ("population", "sample"):
        assert torch.equal(adv.grpo(rewards_B, ids_B, std, 0.0), torch.zeros(size, dtype=torch.float64))
        assert torch.equal(adv.batch_scaled(rewards_B, ids_B, std, 0.0), torch.zeros(size, dtype=torch.float64))
        for baseline in (False, True):
            whitened_BT = adv.reinforce(rewards_B, ids_B, mask_BT, None, baseline, std, 0.0)
            assert torch.equal(whitened_BT, torch.zeros(size, 2, dtype=torch.float64))
    for method in (adv.mean_only, adv.rloo, adv.gopo, adv.maxrl):
        assert torch.equal(method(rewards_B, ids_B), torch.zeros(size, dtype=torch.float64))
    components_BK = rewards_B[:, None].expand(size, 3)
    zero_B = adv.gdpo(components_BK, torch.ones(3), ids_B, rewards_B, epsilon=0.0)
    assert torch.equal(zero_B, torch.zeros(size, dtype=torch.float64))


def test_partial_group_does_not_shift_the_next() -> None:
    """Case 28."""
    close(adv.mean_only(rewards(1, 0, 1, 1, 0), groups(0, 0, 1, 1, 1)), 1 / 2, -1 / 2, 1 / 3, 1 / 3, -2 / 3)


def test_interleaved_groups_are_told_apart_by_id() -> None:
    """Case 29."""
    close(adv.mean_only(rewards(1, 0, 1, 0), groups(9, 2, 9, 2)), 0, 0, 0, 0, atol=0)


def test_samples_of_one_prompt_are_one_group() -> None:
    """Case 30."""
    close(adv.mean_only(rewards(1, 0, 0, 0), groups(5, 5, 5, 5)), 0.75, -0.25, -0.25, -0.25)


def test_std_is_population_or_sample_by_name() -> None:
    """Case 32."""
    one_of_four = rewards(1, 0, 0, 0), groups(0, 0, 0, 0)
    close(adv.grpo(*one_of_four, "population"), 1.7320508, -0.5773503, -0.5773503, -0.5773503)
    close(adv.grpo(*one_of_four, "sample"), 1.5, -0.5, -0.5, -0.5)


def test_pairs_are_plus_and_minus_one_or_less_with_the_sample_std() -> None:
    close(adv.grpo(rewards(1, 0), groups(0, 0), "population"), 1, -1)
    close(adv.grpo(rewards(1, 0), groups(0, 0), "sample"), 0.7071068, -0.7071068)


def test_empty_completion_counts_in_the_mean() -> None:
    """Case 46."""
    close(adv.mean_only(rewards(1, 1, 1, 0), groups(0, 0, 0, 0)), 0.25, 0.25, 0.25, -0.75)


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    close(adv.rloo(rewards(1, 0, 0.5, None), groups(0, 0, 0, 0)), 1 - 0.25, 0 - 0.75, 0.5 - 0.5, 0)


def test_batch_scaling_divides_by_the_std_of_the_batchs_advantages() -> None:
    """ScaleRL: centred [0.5, -0.5, 0, 0] with a std of sqrt(1/8); the std of the rewards would be 1.3."""
    scaled_B = adv.batch_scaled(rewards(1, 0, 3, 3), groups(0, 0, 1, 1), epsilon=0.0)
    close(scaled_B, math.sqrt(2), -math.sqrt(2), 0, 0)


def test_batch_scaling_leaves_unscored_samples_out_and_subtracts_no_batch_mean() -> None:
    centred = [2 / 3, -1 / 3, -1 / 3, 0.5, -0.5]
    deviation = math.sqrt((6 / 9 + 0.5) / 5)
    scaled_B = adv.batch_scaled(rewards(1, 0, 0, None, 1, 0), groups(0, 0, 0, 0, 1, 1), epsilon=0.0)
    close(scaled_B, *[each / deviation for each in centred[:3]], 0, *[each / deviation for each in centred[3:]])


def test_gdpo_normalises_each_component_before_it_adds_them() -> None:
    components_BK = torch.tensor([[1.0, 10.0], [0.0, 10.0], [0.0, 30.0], [0.0, math.nan]], dtype=torch.float64)
    ids, total = groups(0, 0, 1, 1), rewards(11, 10, 30, 0)
    # component 0: +1, -1, tied; component 1: tied in group 0, alone in group 1, so 0
    close(adv.gdpo(components_BK, torch.tensor([2.0, 1.0]), ids, total), math.sqrt(2), -math.sqrt(2), 0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_tied_group_beside_others_is_exactly_zero_in_gdpo(seed: int) -> None:
    """Case 26: whitening must not leave the rounding of the batch mean in a group without signal."""
    random = torch.Generator().manual_seed(seed)
    ids_B = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 1])
    components_BK = torch.rand(10, 2, generator=random, dtype=torch.float64)
    components_BK[ids_B == 1] = torch.tensor([0.1, 0.7], dtype=torch.float64)
    values_B = adv.gdpo(components_BK, torch.tensor([1.0, 0.3]), ids_B, components_BK.sum(1))
    assert not values_B[ids_B == 1].any()
    assert values_B[ids_B != 1].all()


def test_gdpo_leaves_the_components_of_an_unscored_sample_out() -> None:
    components_BK = torch.tensor([[1.0, 0.0], [0.0, 1.0], [50.0, 9.0], [0.0, 0.0]], dtype=torch.float64)
    ids, total, weights_K = groups(0, 0, 0, 0), rewards(1, 1, None, 0), torch.tensor([1.0, 0.5])
    keep = torch.tensor([0, 1, 3])
    expected_B = adv.gdpo(components_BK[keep], weights_K, ids[keep], total[keep])
    values_B = adv.gdpo(components_BK, weights_K, ids, total)
    torch.testing.assert_close(values_B[keep], expected_B)
    assert values_B[2] == 0


def test_gdpo_needs_a_weight_for_each_component() -> None:
    with pytest.raises(ValueError, match="1 component weights for 2 reward components"):
        adv.gdpo(torch.zeros(2, 2), torch.ones(1), groups(0, 0), rewards(1, 0))


def test_gopo_ranks_and_averages_ties() -> None:
    close(adv.gopo(rewards(0.1, 9.0, 0.5), groups(0, 0, 0)), -2, 2, 0, atol=0)
    # ranks 1, 2.5, 2.5, 4 of four
    close(adv.gopo(rewards(1, 0.5, 0.5, 0), groups(0, 0, 0, 0)), 2, 0, 0, -2, atol=1e-12)
    close(adv.gopo(rewards(1, None, 0), groups(0, 0, 0)), 2, 0, -2, atol=0)


def test_maxrl_divides_by_the_mean_and_refuses_negative_rewards() -> None:
    close(adv.maxrl(rewards(1, 0, 0, 0), groups(0, 0, 0, 0)), 3, -1, -1, -1)
    with pytest.raises(ValueError, match="maxrl needs rewards >= 0, got -1"):
        adv.maxrl(rewards(1, -1), groups(0, 0))


def test_reinforce_pp_pays_later_penalties_to_earlier_tokens() -> None:
    mask_BT = torch.tensor([[True, True], [True, False]])
    penalty_BT = torch.tensor([[0.1, 0.2], [0.4, 9.0]])
    values_BT = adv.reinforce(rewards(1, 0), groups(0, 1), mask_BT, penalty_BT)
    returns = torch.tensor([1 - 0.3, 1 - 0.2, -0.4], dtype=torch.float64)
    expected = (returns - returns.mean()) / returns.std(correction=0)
    torch.testing.assert_close(values_BT[mask_BT], expected, rtol=1e-5, atol=1e-6)
    assert values_BT[1, 1] == 0


def test_reinforce_pp_baseline_takes_the_group_mean_first() -> None:
    mask_BT = torch.tensor([[True, True], [True, False]])
    values_BT = adv.reinforce(rewards(1, 0), groups(0, 0), mask_BT, baseline=True)
    centred = torch.tensor([0.5, 0.5, -0.5], dtype=torch.float64)
    expected = (centred - centred.mean()) / centred.std(correction=0)
    torch.testing.assert_close(values_BT[mask_BT], expected, rtol=1e-5, atol=1e-6)
