from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from slipstream.algo.advantages import reward_tensor
from slipstream.algo.finite import NonFiniteError
from slipstream.algo.measures.metrics import finish_metrics
from slipstream.algo.objective import objective
from slipstream.algo.prepare import (
    GlobalBatch,
    Prepared,
    add_proximal,
    length_reward,
    prepare,
    proximal_rows,
    soft_overlong,
)
from slipstream.algo.settings.recipes import resolve

Make = Callable[..., GlobalBatch]


def simple(
    rewards: list[float | None], lengths: list[int], groups: list[int] | None = None, **more: object
) -> GlobalBatch:
    return GlobalBatch(
        rewards_B=reward_tensor(rewards),
        groups_B=torch.tensor(groups or [0] * len(rewards)),
        lengths_B=torch.tensor(lengths),
        sampler_BT=torch.full((len(rewards), max(lengths)), -1.0),
        **more,  # type: ignore[arg-type]
    )


def metric(prepared: Prepared, name: str) -> float:
    return finish_metrics(prepared.tally)["slipstream_objective_" + name]


def test_unscored_sample_leaves_the_loss_and_the_token_count() -> None:
    """Cases 5 and 6."""
    prepared = prepare(resolve("grpo"), simple([1, None, 0, 1], [2, 3, 2, 2]))
    assert prepared.mask_BT.sum(1).tolist() == [2, 0, 2, 2]
    torch.testing.assert_close(
        prepared.scale_BT[prepared.mask_BT], torch.full((6,), 1 / 6, dtype=torch.float64)
    )
    assert prepared.gradient_B.tolist() == [True, False, True, True]
    assert metric(prepared, "unscored_samples") == 1


def test_wrong_answer_and_failure_are_not_the_same() -> None:
    """Case 6: 0.0 counts, no score does not; with one scored sample the group is dropped."""
    prepared = prepare(resolve("grpo"), simple([0.0, None], [2, 2]))
    assert not prepared.mask_BT.any()
    assert not prepared.trainable
    assert metric(prepared, "dropped_groups") == 1


def test_group_of_one_is_dropped_only_where_a_group_is_needed() -> None:
    """Case 25."""
    batch = simple([0.7, 0.1], [2, 2], groups=[0, 1])
    assert not prepare(resolve("grpo"), batch).trainable
    assert metric(prepare(resolve("grpo"), batch), "zero_variance_ratio") == 1
    assert prepare(resolve("reinforce_pp"), batch).trainable


def test_empty_completion_counts_in_the_baseline_only() -> None:
    """Case 46."""
    prepared = prepare(resolve("grpo", {"advantage": "mean_only"}), simple([1, 1, 1, 0], [2, 2, 2, 0]))
    assert prepared.advantages_BT[0, 0] == 0.25
    assert prepared.gradient_B.tolist() == [True, True, True, False]


def test_batch_of_empties_gives_loss_zero_and_no_step() -> None:
    """Case 46."""
    batch = replace(simple([1, 0], [0, 0]), sampler_BT=torch.zeros(2, 0))
    prepared = prepare(resolve("grpo"), batch)
    logprobs_BT = torch.zeros(2, 0, requires_grad=True)
    loss, tally = objective(resolve("grpo"), prepared, logprobs_BT)
    loss.backward()
    assert loss.item() == 0
    assert not prepared.trainable
    assert all(math.isfinite(v) for v in finish_metrics(tally.merge(prepared.tally)).values())


def test_truncated_samples_leave_numerator_and_denominator() -> None:
    """Case 48: they stay in the baseline."""
    batch = simple([1, 0], [4, 4], truncated_B=torch.tensor([False, True]))
    prepared = prepare(resolve("grpo", {"mask_truncated": True}), batch)
    assert prepared.scale_BT.sum(1).tolist() == [1, 0]
    assert prepared.advantages_BT[0, 0] == pytest.approx(1.0, abs=1e-5)
    assert metric(prepared, "truncated_ratio") == 0.5


@pytest.mark.parametrize("aggregation", ["fixed_length", "longest"])
def test_masked_and_truncated_samples_do_not_change_what_a_token_weighs_under_a_constant_divisor(
    aggregation: str,
) -> None:
    """Dr. GRPO: 4 scored samples of 8 tokens (the fifth is unscored) times the horizon, 8, whatever is masked."""
    spec = resolve("dr_grpo", {"aggregation": aggregation, "horizon": 8, "mask_truncated": True})
    for cut, old in ((0, 0), (2, 0), (0, 2), (2, 1)):
        truncated_B = torch.arange(5) < cut
        ages_BT = torch.zeros(5, 8, dtype=torch.long)
        ages_BT[4 - old : 4] = 9
        batch = simple([0, 1, 0, 1, None], [8] * 5, truncated_B=truncated_B, ages_BT=ages_BT, max_age=2)
        scale_BT = prepare(spec, batch).scale_BT
        assert scale_BT[cut:4].tolist() == [[1 / 32] * 8] * (4 - cut)


def test_all_truncated_is_no_step_with_finite_metrics() -> None:
    """Case 49."""
    batch = simple([1, 0], [4, 4], truncated_B=torch.tensor([True, True]))
    spec = resolve("grpo", {"mask_truncated": True})
    prepared = prepare(spec, batch)
    logprobs_BT = torch.full((2, 4), -1.0, requires_grad=True)
    loss, tally = objective(spec, prepared, logprobs_BT)
    loss.backward()
    assert loss.item() == 0
    assert logprobs_BT.grad is not None
    assert not logprobs_BT.grad.any()
    assert not prepared.trainable
    assert all(math.isfinite(v) for v in finish_metrics(tally.merge(prepared.tally)).values())


def test_masks_are_by_length_and_by_what_was_sampled() -> None:
    """Cases 35 and 36."""
    own_BT = torch.tensor([[True, False, True], [True, True, True]])
    prepared = prepare(resolve("grpo"), simple([1, 0], [3, 2], mask_BT=own_BT))
    assert prepared.mask_BT.tolist() == [[True, False, True], [True, True, False]]


def test_old_tokens_lose_their_weight_and_nothing_else() -> None:
    ages_BT = torch.tensor([[3, 1, 0], [3, 3, 9]])
    batch = simple([1, 0], [3, 2], ages_BT=ages_BT, max_age=2)
    spec = resolve("grpo", {"correction": "none"})
    prepared = prepare(spec, batch)
    fresh = prepare(spec, replace(batch, max_age=None))
    assert torch.equal(prepared.advantages_BT, fresh.advantages_BT)
    assert torch.equal(prepared.scale_BT, fresh.scale_BT)
    assert prepared.gradient_B.tolist() == [True, False]
    assert metric(prepared, "masked_age_ratio") == 3 / 5
    logprobs_BT = torch.full((2, 3), -1.0, requires_grad=True)
    loss, tally = objective(spec, prepared, logprobs_BT)
    loss.backward()
    assert logprobs_BT.grad is not None
    torch.testing.assert_close(logprobs_BT.grad, torch.tensor([[0, -0.2, -0.2], [0, 0, 0]]), rtol=1e-5, atol=0)
    ages = {k: v for k, v in finish_metrics(tally).items() if "trained_tokens_by_age" in k and v}
    assert sorted(ages.values()) == [1, 1]


def test_old_tokens_have_no_kl_and_no_entropy_gradient_either() -> None:
    batch = simple(
        [1, 0], [2, 2], ages_BT=torch.tensor([[3, 0], [3, 3]]), max_age=2, reference_BT=torch.full((2, 2), -2.0)
    )
    spec = resolve("grpo", {"kl_beta": 0.1, "entropy_coeff": 0.1})
    logprobs_BT = torch.full((2, 2), -1.0, requires_grad=True)
    entropy_BT = torch.ones(2, 2, requires_grad=True)
    objective(spec, prepare(spec, batch), logprobs_BT, entropy_BT)[0].backward()
    assert logprobs_BT.grad is not None
    assert entropy_BT.grad is not None
    assert (logprobs_BT.grad != 0).tolist() == [[False, True], [False, False]]
    assert (entropy_BT.grad != 0).tolist() == [[False, True], [False, False]]


def test_token_of_the_future_is_an_error() -> None:
    with pytest.raises(ValueError, match="sample 1, token 0: age -1 is in the future"):
        prepare(resolve("grpo"), simple([1, 0], [1, 1], ages_BT=torch.tensor([[0], [-1]])))


def test_missing_sampler_logprob_names_the_sample() -> None:
    """Case 40."""
    batch = simple([1, 0], [2, 2])
    assert batch.sampler_BT is not None
    batch.sampler_BT[1, 1] = math.nan
    with pytest.raises(NonFiniteError, match="sampler logprob of sample 1, token 1 is nan"):
        prepare(resolve("grpo"), batch)


def test_no_gradient_samples_are_known_unless_kl_or_entropy_reach_them() -> None:
    batch = simple([1, 0, 1, 1], [2, 2, 2, 2], groups=[0, 0, 1, 1], reference_BT=torch.full((4, 2), -1.0))
    assert prepare(resolve("grpo"), batch).gradient_B.tolist() == [True, True, False, False]
    for fields in ({"kl_beta": 0.1}, {"entropy_coeff": 0.1}):
        assert prepare(resolve("grpo", fields), batch).gradient_B.all()
    reward_kl = {"kl_beta": 0.1, "kl_place": "reward"}
    assert prepare(resolve("grpo", reward_kl), batch).gradient_B.tolist() == [True, True, False, False]
    # a tied group still counts in the denominator
    assert prepare(resolve("grpo"), batch).scale_BT[0, 0] == 1 / 8


def test_kl_in_the_reward_lowers_the_return_of_what_strays() -> None:
    batch = simple([1, 1], [2, 2], reference_BT=torch.tensor([[-1.0, -1.0], [-2.0, -1.0]]))
    fields = {"advantage": "mean_only", "kl_beta": 0.5, "kl_place": "reward", "kl_kind": "k1"}
    prepared = prepare(resolve("grpo", fields), batch)
    assert prepared.advantages_BT[:, 0].tolist() == [0.25, -0.25]


def test_kl_in_the_reward_is_of_the_sampler_with_a_proximal_policy_too(make_batch: Make) -> None:
    fields = {"kl_beta": 0.5, "kl_place": "reward", "kl_kind": "k1"}
    spec, batch = resolve("decoupled_ppo", fields), make_batch()
    later = prepare(spec, replace(batch, proximal_BT=None))
    assert torch.equal(prepare(spec, batch).advantages_BT, later.advantages_BT)


def test_half_precision_logprobs_are_widened_before_they_are_subtracted() -> None:
    """10.0546875 has no bfloat16: the difference of two exact inputs would be 10.0625."""
    half = torch.bfloat16
    far, near = torch.tensor([[-10.0625], [-1.0]], dtype=half), torch.tensor([[-0.0078125], [-1.0]], dtype=half)
    batch = replace(simple([1, 1], [1, 1]), sampler_BT=far, reference_BT=near)
    fields = {"advantage": "mean_only", "kl_beta": 1.0, "kl_place": "reward", "kl_kind": "k1"}
    assert prepare(resolve("grpo", fields), batch).advantages_BT[0, 0] == 10.0546875 / 2
    moment = 10.0546875**2 / 2
    for tau, kept in ((moment + 0.01, 2), (moment - 0.01, 1)):
        spec = resolve("m2po", {"m2po_tau": tau})
        assert int(prepare(spec, replace(batch, proximal_BT=near)).keep_BT.sum()) == kept


def test_m2po_needs_the_whole_batch_and_may_come_later(make_batch: Make) -> None:
    spec, batch = resolve("m2po", {"m2po_tau": 0.005}), make_batch()
    whole = prepare(spec, batch)
    later = prepare(spec, replace(batch, proximal_BT=None))
    assert proximal_rows(spec, later).tolist() == later.mask_BT.any(1).tolist()
    assert batch.proximal_BT is not None
    later = add_proximal(spec, later, batch.proximal_BT)
    assert torch.equal(whole.keep_BT, later.keep_BT)
    assert 0 < int(whole.keep_BT.sum()) < int(whole.mask_BT.sum())


def test_rows_are_trimmed_and_keep_their_place(make_batch: Make) -> None:
    prepared = prepare(resolve("grpo"), make_batch())
    part = prepared.rows(torch.tensor([2, 3]))
    assert part.mask_BT.shape == (2, 2)
    assert part.index_B.tolist() == [2, 3]
    logprobs_BT = torch.full((2, 2), -1.0)
    logprobs_BT[1, 1] = math.inf
    with pytest.raises(NonFiniteError, match="learner logprob of sample 3, token 1 is inf"):
        objective(resolve("grpo"), part, logprobs_BT)


def test_advantages_can_be_given_and_clamped() -> None:
    batch = simple([0, 0, 0], [1, 1, 1], given_B=torch.tensor([0.5, -7.0, math.nan]))
    prepared = prepare(resolve("grpo", {"advantage": "given", "advantage_clamp": 2.0}), batch)
    assert prepared.advantages_BT[:, 0].tolist() == [0.5, -2.0, 0.0]
    assert prepared.mask_BT[:, 0].tolist() == [True, True, False]


def test_given_advantages_count_only_where_they_are_asked_for() -> None:
    batch = simple([1, 0, None], [1, 1, 1], given_B=torch.tensor([7.0, 7.0, 7.0]))
    prepared = prepare(resolve("grpo"), batch)
    assert prepared.advantages_BT[:, 0].tolist() == pytest.approx([1, -1, 0], abs=1e-5)
    given = prepare(resolve("grpo", {"advantage": "given"}), batch)
    assert given.advantages_BT[:, 0].tolist() == [7, 7, 7]
    for result in (prepared, given):
        assert metric(result, "reward_mean") == 0.5


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ages_BT": torch.zeros(2, 1, dtype=torch.long)}, r"ages_BT has shape \(2, 1\), but B = 2, T = 2"),
        ({"groups_B": torch.zeros(3, dtype=torch.long)}, r"groups_B has shape \(3,\), but B = 2, T = 2"),
        ({"sampler_BT": torch.zeros(2)}, r"sampler_BT has shape \(2,\), but B = 2"),
        (
            {"head_sampler_BTK": torch.zeros(2, 3, 4)},
            r"head_sampler_BTK has shape \(2, 3, 4\), but B = 2, T = 2",
        ),
        ({"lengths_B": torch.tensor([2, 3])}, "lengths_B holds 3, but T = 2"),
    ],
)
def test_field_that_does_not_fit_is_named(changes: dict[str, torch.Tensor], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        prepare(resolve("grpo"), replace(simple([1, 0], [2, 2]), **changes))


@pytest.mark.parametrize("shape", [(2, 1), (2, 3), (4,)])
def test_logprobs_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    batch = simple([1, 0], [2, 2])
    with pytest.raises(ValueError, match=r"logprobs_BT has shape .*, but the batch's mask \(2, 2\)"):
        objective(resolve("grpo"), prepare(resolve("grpo"), batch), torch.zeros(shape))
    spec = resolve("decoupled_ppo")
    with pytest.raises(ValueError, match=r"proximal_BT has shape .*, but the batch's mask \(2, 2\)"):
        add_proximal(spec, prepare(spec, batch), torch.zeros(shape))


def test_correction_without_sampler_logprobs_is_never_silently_off() -> None:
    batch = replace(simple([1, 0], [2, 2]), sampler_BT=None)
    with pytest.raises(ValueError, match="the objective needs sampler_BT"):
        objective(resolve("grpo"), prepare(resolve("grpo"), batch), torch.zeros(2, 2))
    spec = resolve("grpo", {"proximal": "none"})
    loss, _ = objective(spec, prepare(spec, batch), torch.zeros(2, 2))
    assert loss.isfinite()


def test_soft_overlong_buffer_is_a_width() -> None:
    lengths_B = torch.tensor([10, 80, 90, 100, 300])
    assert soft_overlong(lengths_B, 100, 20).tolist() == [0, 0, -0.5, -1, -1]


def test_rewards_are_scaled_clipped_then_penalised() -> None:
    fields = {
        "advantage": "given", "reward_scale": 2.0, "reward_high": 1.5, "overlong_length": 4, "overlong_buffer": 2,
    }  # fmt: skip
    from slipstream.algo.prepare import shape_rewards

    shaped_B = shape_rewards(
        resolve("grpo", fields), reward_tensor([1, 0.5, None]), torch.tensor([0, 0, 0]), torch.tensor([3, 2, 2])
    )
    assert shaped_B[:2].tolist() == [1.0, 1.0]
    assert shaped_B[2].isnan()


def test_length_rewards_prefer_short_answers() -> None:
    rewards_B, groups_B = reward_tensor([1, 1, 0, None]), torch.tensor([0, 0, 0, 0])
    lengths_B = torch.tensor([10, 20, 30, 999])
    linear_B = length_reward("linear", rewards_B, groups_B, lengths_B, 1.0)
    assert linear_B[:3].tolist() == [1.5, 1.0, -0.5]
    relative_B = length_reward("relative", rewards_B, groups_B, lengths_B, 1.0)
    assert relative_B[:2].tolist() == [1 / 1.5, 1 / 2]
